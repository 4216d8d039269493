//! Generated films are cut and played: a part must have exactly its samples, whatever the tables look like. Damaged
//! files and files of other types must be refused without harm.

use std::io;
use std::ops::Range;

use proptest::prelude::*;

use super::movie::{Cut, Part, Problem, Source, cut, each_atom, u32_at, u64_at, write_atom};

impl Source for Vec<u8> {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let rest = self.get(offset as usize..).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// A sample as a player sees it: its time and duration, the shift of its time, whether it is a key frame, and its
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sample {
    time: u64,
    duration: u32,
    shift: u32,
    is_key_frame: bool,
    bytes: Vec<u8>,
}

/// A generated track.
#[derive(Clone, Debug)]
struct Made {
    timescale: u32,
    /// Duration, shift, whether it is a key frame, and length.
    samples: Vec<(u32, u32, bool, u32)>,
    /// Numbers of samples in the chunks, repeated in turn.
    chunks: Vec<usize>,
    has_long_offsets: bool,
    uniform_size: Option<u32>,
}

const MOVIE_TIMESCALE: u32 = 1_000;

fn made() -> impl Strategy<Value = Made> {
    let sample = (1..40_u32, 0..3_u32, proptest::bool::weighted(0.2), 1..9_u32);
    let samples = proptest::collection::vec(sample, 1..80);
    let chunks = proptest::collection::vec(1..6_usize, 1..5);
    (samples, chunks, any::<bool>(), proptest::option::weighted(0.2, 1..9_u32)).prop_map(
        |(mut samples, chunks, has_long_offsets, uniform_size)| {
            samples[0].2 = true;
            samples.iter_mut().for_each(|sample| sample.3 = uniform_size.unwrap_or(sample.3));
            // Only a few durations, so that runs are long.
            samples.iter_mut().for_each(|sample| sample.0 = (sample.0 / 13 + 1) * 20);
            Made { timescale: 500, samples, chunks, has_long_offsets, uniform_size }
        },
    )
}

fn numbers(out: &mut Vec<u8>, numbers: &[u32]) {
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_be_bytes()));
}

fn write_rows(out: &mut Vec<u8>, name: &[u8; 4], rows: &[Vec<u32>]) {
    write_atom(out, name, |out| {
        numbers(out, &[0, rows.len() as u32]);
        rows.iter().for_each(|row| numbers(out, row));
    });
}

fn runs(values: impl Iterator<Item = u32>) -> Vec<Vec<u32>> {
    let mut runs: Vec<Vec<u32>> = Vec::new();
    for value in values {
        match runs.last_mut() {
            Some(run) if run[1] == value => run[0] += 1,
            _ => runs.push(vec![1, value]),
        }
    }
    runs
}

impl Made {
    fn duration(&self) -> u64 {
        self.samples.iter().map(|sample| u64::from(sample.0)).sum()
    }

    /// Returns the samples of each chunk.
    fn chunks(&self) -> Vec<Range<usize>> {
        let mut chunks = Vec::new();
        let mut begin = 0;
        for count in self.chunks.iter().cycle() {
            if begin == self.samples.len() {
                return chunks;
            }
            let end = self.samples.len().min(begin + count);
            chunks.push(begin..end);
            begin = end;
        }
        unreachable!("a cycle has no end")
    }

    /// Returns the bytes of a sample, which identify the track and the sample.
    fn bytes(&self, track: usize, sample: usize) -> Vec<u8> {
        (0..self.samples[sample].3).map(|byte| (track * 101 + sample * 7 + byte as usize) as u8).collect()
    }

    fn samples(&self, track: usize) -> Vec<Sample> {
        let mut time = 0;
        let sample = |(index, &(duration, shift, is_key_frame, _)): (usize, &(u32, u32, bool, u32))| {
            time += u64::from(duration);
            let bytes = self.bytes(track, index);
            Sample { time: time - u64::from(duration), duration, shift, is_key_frame, bytes }
        };
        self.samples.iter().enumerate().map(sample).collect()
    }

    fn write(&self, out: &mut Vec<u8>, offsets: &[u64]) {
        let chunks = self.chunks();
        let mut chunk_rows: Vec<Vec<u32>> = Vec::new();
        for (number, chunk) in (1..).zip(&chunks) {
            if chunk_rows.last().is_none_or(|row| row[1] != chunk.len() as u32) {
                chunk_rows.push(vec![number, chunk.len() as u32, 1]);
            }
        }
        let key_frames = (1..).zip(&self.samples).filter(|(_, sample)| sample.2).map(|(number, _)| vec![number]);
        let movie_duration = self.duration() * u64::from(MOVIE_TIMESCALE) / u64::from(self.timescale);
        write_atom(out, b"trak", |out| {
            write_atom(out, b"tkhd", |out| {
                numbers(out, &[0, 0, 0, 1, 0, movie_duration as u32]);
                out.extend_from_slice(&[0; 60]);
            });
            write_atom(out, b"mdia", |out| {
                write_atom(out, b"mdhd", |out| numbers(out, &[0, 0, 0, self.timescale, self.duration() as u32, 0]));
                write_atom(out, b"hdlr", |out| out.extend_from_slice(b"handler"));
                write_atom(out, b"minf", |out| {
                    write_atom(out, b"stbl", |out| {
                        write_rows(out, b"stts", &runs(self.samples.iter().map(|sample| sample.0)));
                        write_rows(out, b"ctts", &runs(self.samples.iter().map(|sample| sample.1)));
                        write_rows(out, b"stss", &key_frames.collect::<Vec<_>>());
                        write_rows(out, b"stsc", &chunk_rows);
                        write_atom(out, b"stsz", |out| {
                            numbers(out, &[0, self.uniform_size.unwrap_or(0), self.samples.len() as u32]);
                            if self.uniform_size.is_none() {
                                self.samples.iter().for_each(|sample| numbers(out, &[sample.3]));
                            }
                        });
                        write_atom(out, if self.has_long_offsets { b"co64" } else { b"stco" }, |out| {
                            numbers(out, &[0, offsets.len() as u32]);
                            for offset in offsets {
                                match self.has_long_offsets {
                                    true => out.extend_from_slice(&offset.to_be_bytes()),
                                    false => numbers(out, &[*offset as u32]),
                                }
                            }
                        });
                    });
                });
            });
        });
    }
}

/// Returns a file of these tracks, whose chunks alternate.
fn film(tracks: &[Made], index_is_last: bool) -> Vec<u8> {
    let mut media = Vec::new();
    let mut places = vec![Vec::new(); tracks.len()];
    let turns = tracks.iter().map(|track| track.chunks().len()).max().unwrap_or(0);
    for turn in 0..turns {
        for (number, track) in tracks.iter().enumerate() {
            let Some(chunk) = track.chunks().get(turn).cloned() else { continue };
            places[number].push(media.len() as u64);
            chunk.for_each(|sample| media.extend(track.bytes(number, sample)));
        }
    }
    let index = |begin: u64| {
        let mut out = Vec::new();
        write_atom(&mut out, b"moov", |out| {
            write_atom(out, b"mvhd", |out| {
                let duration = tracks.iter().map(|track| track.duration() * 1_000 / u64::from(track.timescale)).max();
                numbers(out, &[0, 0, 0, MOVIE_TIMESCALE, duration.unwrap_or(0) as u32]);
                out.extend_from_slice(&[0; 80]);
            });
            for (track, places) in tracks.iter().zip(&places) {
                track.write(out, &places.iter().map(|place| begin + place).collect::<Vec<_>>());
            }
        });
        out
    };
    let mut file = Vec::new();
    write_atom(&mut file, b"ftyp", |out| out.extend_from_slice(b"isom"));
    let index_bytes = if index_is_last { 0 } else { index(0).len() };
    let begin = (file.len() + index_bytes + 8) as u64;
    if !index_is_last {
        file.extend(index(begin));
    }
    write_atom(&mut file, b"mdat", |out| out.extend_from_slice(&media));
    if index_is_last {
        file.extend(index(begin));
    }
    file
}

/// Returns the tracks of a file as a player reads them: the samples, and the skipped time at the beginning.
fn play(file: &[u8]) -> Vec<(Vec<Sample>, u64)> {
    let mut tracks = Vec::new();
    each_atom(file, "", |name, data| {
        if name == b"moov" {
            each_atom(data, "", |name, data| {
                if name == b"trak" {
                    tracks.push(play_track(file, data));
                }
                Ok(true)
            })?;
        }
        Ok(true)
    })
    .unwrap();
    tracks
}

fn play_track(file: &[u8], track: &[u8]) -> (Vec<Sample>, u64) {
    let mut atoms = std::collections::HashMap::new();
    gather(track, &mut atoms);
    let rows = |name: &[u8; 4], head: usize, numbers: usize| -> Vec<Vec<u32>> {
        let Some(data) = atoms.get(name) else { return Vec::new() };
        let rows = data[head..].chunks(4 * numbers);
        let rows: Vec<Vec<u32>> =
            rows.map(|row| (0..numbers).map(|place| u32_at(row, 4 * place).unwrap()).collect()).collect();
        assert_eq!(u32_at(data, head - 4), Some(rows.len() as u32), "{name:?}");
        rows
    };
    let spread = |runs: Vec<Vec<u32>>| -> Vec<u32> {
        runs.into_iter().flat_map(|run| std::iter::repeat_n(run[1], run[0] as usize)).collect()
    };
    let (durations, shifts) = (spread(rows(b"stts", 8, 2)), spread(rows(b"ctts", 8, 2)));
    let key_frames = rows(b"stss", 8, 1).concat();
    let sizes = match u32_at(&atoms[b"stsz"], 4).unwrap() {
        0 => rows(b"stsz", 12, 1).concat(),
        size => vec![size; u32_at(&atoms[b"stsz"], 8).unwrap() as usize],
    };
    let offsets: Vec<u64> = match atoms.get(b"co64") {
        Some(wide) => wide[8..].chunks(8).map(|row| u64_at(row, 0).unwrap()).collect(),
        None => rows(b"stco", 8, 1).concat().into_iter().map(u64::from).collect(),
    };
    let chunk_rows = rows(b"stsc", 8, 3);
    let mut samples = Vec::new();
    let mut time = 0;
    for (number, offset) in (1..).zip(&offsets) {
        let row = chunk_rows.iter().rev().find(|row| row[0] <= number).expect("a row for every chunk");
        let mut place = *offset as usize;
        for _ in 0..row[1] {
            let index = samples.len();
            let bytes = file[place..place + sizes[index] as usize].to_vec();
            place += bytes.len();
            let is_key_frame = key_frames.contains(&(index as u32 + 1));
            let (duration, shift) = (durations[index], shifts[index]);
            samples.push(Sample { time, duration, shift, is_key_frame, bytes });
            time += u64::from(duration);
        }
    }
    assert_eq!((samples.len(), samples.len()), (sizes.len(), durations.len()));
    let prefix = atoms.get(b"elst").map_or(0, |edits| u64_at(edits, 16).unwrap());
    (samples, prefix)
}

/// Collects the leaf atoms of a track.
fn gather(data: &[u8], atoms: &mut std::collections::HashMap<[u8; 4], Vec<u8>>) {
    each_atom(data, "", |name, data| {
        match name {
            b"mdia" | b"minf" | b"stbl" | b"edts" => gather(data, atoms),
            _ => drop(atoms.insert(*name, data.to_vec())),
        }
        Ok(true)
    })
    .unwrap();
}

fn answer(file: &[u8], part: &Part) -> Vec<u8> {
    [&part.head, &file[part.data.start as usize..part.data.end as usize]].concat()
}

fn wanted(start_ms: u64, length_ms: Option<u64>, begins_with_key_frame: bool) -> Cut {
    Cut { start_ms, length_ms, begins_with_key_frame, index_bytes_max: 1 << 20 }
}

/// Returns the samples of a track in a part, and the skipped time.
fn expected(samples: &[Sample], cut: &Cut, timescale: u32) -> (Vec<Sample>, u64) {
    let begin = cut.start(timescale);
    let end_of = |sample: &Sample| sample.time + u64::from(sample.duration);
    let shown = samples.iter().position(|sample| end_of(sample) > begin).expect("it goes on");
    let first = match cut.begins_with_key_frame {
        true => samples[..=shown].iter().rposition(|sample| sample.is_key_frame).expect("the first one is"),
        false => shown,
    };
    let prefix = samples[shown].time - samples[first].time;
    // As in nginx, the length counts from the first shown sample, and the part ends with the last sample that lies in
    // it completely.
    let end = cut.length(timescale).map_or(u64::MAX, |length| samples[first].time + prefix + length);
    let part = samples[first..].iter().take_while(|sample| end_of(sample) <= end);
    let part = part.map(|sample| Sample { time: sample.time - samples[first].time, ..sample.clone() });
    (part.collect(), prefix)
}

proptest! {
    #[test]
    fn a_part_has_the_samples_of_its_time(
        tracks in proptest::collection::vec(made(), 1..3),
        index_is_last: bool,
        start in 0.0..1.0_f64,
        length in proptest::option::of(prop_oneof![0.0..0.1_f64, 0.0..1.2]),
        begins_with_key_frame: bool,
    ) {
        let file = film(&tracks, index_is_last);
        // The requested times exist in all tracks.
        let shortest = tracks.iter().map(|track| track.duration() * 1_000 / u64::from(track.timescale)).min().unwrap();
        let share = |share: f64| (share * shortest as f64) as u64;
        let length = length.map(|length| share(length).max(1));
        let cut_out = wanted(share(start).min(shortest - 1), length, begins_with_key_frame);
        let expected: Vec<_> = tracks
            .iter()
            .enumerate()
            .map(|(number, track)| expected(&track.samples(number), &cut_out, track.timescale))
            .collect();
        match cut(&file, file.len() as u64, &cut_out, "film") {
            Ok(Some(part)) => prop_assert_eq!(play(&answer(&file, &part)), expected),
            Ok(None) => prop_assert!(cut_out.start_ms == 0 && cut_out.length_ms.is_none() && !index_is_last),
            Err(Problem::Wrong(text)) => {
                prop_assert!(text.starts_with("no data between"), "{}", text);
                prop_assert!(expected.iter().all(|(samples, _)| samples.is_empty()));
            }
            Err(problem) => prop_assert!(false, "{:?}", problem),
        }
    }

    #[test]
    fn damaged_films_do_no_harm(
        tracks in proptest::collection::vec(made(), 1..3),
        damages in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
        is_cut_off in proptest::bool::weighted(0.2),
        start_ms in prop_oneof![0..3_000_u64, any::<u64>()],
        length_ms in proptest::option::of(1..3_000_u64),
        begins_with_key_frame: bool,
    ) {
        let mut file = film(&tracks, false);
        for (place, byte) in damages {
            let place = place.index(file.len());
            file[place] = byte;
        }
        if is_cut_off {
            file.truncate(end.index(file.len()));
        }
        let cut_out = wanted(start_ms, length_ms, begins_with_key_frame);
        if let Ok(Some(part)) = cut(&file, file.len() as u64, &cut_out, "film") {
            prop_assert!(part.data.start < part.data.end && part.data.end <= file.len() as u64);
            prop_assert!(part.head.len() <= file.len() + 100 * tracks.len());
        }
    }
}

#[track_caller]
fn assert_wrong(file: &[u8], cut_out: Cut, message: &str) {
    match cut(&file.to_vec(), file.len() as u64, &cut_out, "film") {
        Err(Problem::Wrong(text)) => assert_eq!(text, message),
        other => panic!("{other:?}"),
    }
}

/// Returns an atom with this data.
fn atom(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write_atom(&mut out, name, |out| out.extend_from_slice(data));
    out
}

#[test]
fn malformed_files_give_nginx_s_errors() {
    let part = wanted(1_000, None, false);
    assert_wrong(b"", part, "no mp4 trak atoms were found in \"film\"");
    assert_wrong(b"abc", part, "\"film\" mp4 file truncated");
    assert_wrong(&[0, 0, 0, 7, b'f', b'r', b'e', b'e'], part, "\"film\" mp4 atom is too small:7");
    assert_wrong(
        &[0, 0, 0, 1, b'm', b'd', b'a', b't', 0, 0, 0, 0, 0, 0, 0, 8],
        part,
        "\"film\" mp4 atom is too small:8",
    );
    assert_wrong(&[0, 0, 1, 0, b'f', b'r', b'e', b'e'], part, "\"film\" mp4 atom too large:256");
    assert_wrong(&atom(b"ftyp", &[0; 1025]), part, "\"film\" mp4 ftyp atom is too large:1025");
    assert_wrong(&[atom(b"mdat", b""), atom(b"mdat", b"")].concat(), part, "duplicate mp4 mdat atom in \"film\"");
    let index = |data: &[u8]| [atom(b"mdat", b"x"), atom(b"moov", data)].concat();
    assert_wrong(&index(&atom(b"cmov", b"")), part, "\"film\" mp4 compressed moov atom (cmov) is not supported");
    assert_wrong(&index(&atom(b"mvhd", &[0; 99])), part, "\"film\" mp4 mvhd atom too small");
    assert_wrong(&index(&atom(b"trak", b"")), part, "no mp4 stts atoms were found in \"film\"");
    let message = "\"film\" mp4 moov atom is too large:16, you may want to increase mp4_max_buffer_size";
    assert_wrong(&index(&[0; 16]), Cut { index_bytes_max: 15, ..part }, message);
    let track = Made {
        timescale: 1_000,
        samples: vec![(500, 0, true, 4); 10],
        chunks: vec![2],
        has_long_offsets: false,
        uniform_size: None,
    };
    let film = film(&[track], true);
    assert_wrong(&film, wanted(5_001, None, false), "\"film\" mp4 start time exceeds file duration");
    assert_wrong(&film, wanted(5_000, None, false), "no mp4 trak atoms were found in \"film\"");
    assert_wrong(&film, wanted(1_000, Some(1), false), "no data between start time and end time in \"film\"");
    assert_wrong(&film[..film.len() - 1], part, &format!("\"film\" mp4 atom too large:{}", film.len() - 12 - 48));
}

#[test]
fn the_whole_film_is_sent_as_it_is_if_its_index_comes_first() {
    let track = Made {
        timescale: 1_000,
        samples: vec![(500, 0, true, 4); 4],
        chunks: vec![1],
        has_long_offsets: true,
        uniform_size: Some(4),
    };
    let first = film(std::slice::from_ref(&track), false);
    assert_eq!(cut(&first, first.len() as u64, &wanted(0, None, false), "film").unwrap(), None);
    let last = film(std::slice::from_ref(&track), true);
    let part = cut(&last, last.len() as u64, &wanted(0, None, false), "film").unwrap().expect("its index is moved");
    assert_eq!(play(&answer(&last, &part)), [(track.samples(0), 0)]);
}
