//! A track of a film: tables of the times and places of its samples, cut to the wanted ones.
//!
//! ```text
//!   stts  durations of samples            sample ──► time
//!   stss  independent samples             key frames
//!   ctts  shifts of their times           sample ──► offset of its time
//!   stsc  numbers of samples in chunks    sample ──► chunk
//!   stsz  sizes of samples                sample ──► bytes
//!   stco, co64  places of chunks          chunk  ──► offset in the file
//! ```
//! (ISO/IEC 14496-12 §8.6, §8.7)

use std::ops::Range;

use super::movie::{Cut, Problem, Timed, each_atom, set_once, too_small, u32_at, u64_at, write_atom, wrong};

/// `tkhd` (§8.3.2) uses the film's clock, `mdhd` (§8.4.2) the track's.
const TRACK_HEAD: Timed = Timed::new(None, [20, 28], [84, 96]);
const MEDIA_HEAD: Timed = Timed::new(Some([12, 20]), [16, 24], [24, 36]);

/// `stsd`: a version, a count, and the beginning of an entry.
const DESCRIPTION_BYTES_MIN: usize = 16;

/// Result of reading a `trak` atom.
pub enum Read<'m> {
    Track(Box<Track<'m>>),
    /// The track ends before the part begins.
    Over,
}

/// A table: its version and flags, and its rows.
struct Table<T> {
    version: [u8; 4],
    rows: Vec<T>,
}

/// A run of samples with the same duration or shift.
#[derive(Clone, Copy)]
struct Run {
    count: u32,
    value: u32,
}

/// Number of samples and description of the chunks from this one on.
#[derive(Clone, Copy)]
struct Chunks {
    first: u32,
    samples: u32,
    description: u32,
}

/// Sizes of the samples.
enum Sizes {
    Uniform { size: u32, count: u32 },
    Each(Vec<u32>),
}

/// A track. The data of atoms is as it was read.
#[derive(Default)]
pub struct Track<'m> {
    /// `tkhd` and its new duration.
    head: Option<(&'m [u8], u64)>,
    has_media: Option<()>,
    has_information: Option<()>,
    has_samples: Option<()>,
    /// `mdhd` and its new duration.
    media_head: Option<(&'m [u8], u64)>,
    timescale: u32,
    handler: Option<&'m [u8]>,
    /// `vmhd` or `smhd`.
    kind_head: Option<(&'static [u8; 4], &'m [u8])>,
    data_information: Option<&'m [u8]>,
    descriptions: Option<&'m [u8]>,
    times: Option<Table<Run>>,
    key_frames: Option<Table<u32>>,
    shifts: Option<Table<Run>>,
    chunks: Option<Table<Chunks>>,
    /// Entry for the chunk of which only the last samples are wanted, before the others; and for the chunk of which
    /// only the first are.
    chunk_before: Option<Chunks>,
    chunk_after: Option<Chunks>,
    sizes: Option<([u8; 4], Sizes)>,
    offsets: Option<Table<u64>>,
    has_long_offsets: bool,

    /// Time of the samples before the start, which decoding needs, by the track's clock.
    prefix: u64,
    samples: Range<u64>,
    /// First chunk, counted from 0, and the number of its samples before the part.
    first_chunk: u64,
    skipped_samples: u64,
    /// Chunk behind the last one, and the number of samples of the last one that belong to the part.
    end_chunk: u64,
    last_samples: u64,
}

impl<'m> Track<'m> {
    /// Reads the data of a `trak` atom, whose film has this many ticks a second.
    pub fn read(data: &'m [u8], timescale: u32, cut: &Cut, name: &str) -> Result<Read<'m>, Problem> {
        let mut track = Box::<Track>::default();
        let goes_on = each_atom(data, name, |atom, data| match atom {
            b"tkhd" => {
                let (_, duration) = TRACK_HEAD.read(data, "tkhd", name)?;
                let Some(duration) = cut.duration_of_track(duration, timescale) else { return Ok(false) };
                set_once(&mut track.head, (data, duration), "tkhd", name).map(|()| true)
            }
            b"mdia" => {
                set_once(&mut track.has_media, (), "mdia", name)?;
                track.read_media(data, cut, name)
            }
            _ => Ok(true),
        })?;
        if !goes_on {
            return Ok(Read::Over);
        }
        track.check(name)?;
        Ok(Read::Track(track))
    }

    fn read_media(&mut self, data: &'m [u8], cut: &Cut, name: &str) -> Result<bool, Problem> {
        each_atom(data, name, |atom, data| match atom {
            b"mdhd" => {
                let (timescale, duration) = MEDIA_HEAD.read(data, "mdhd", name)?;
                let Some(duration) = cut.duration_of_track(duration, timescale) else { return Ok(false) };
                self.timescale = timescale;
                set_once(&mut self.media_head, (data, duration), "mdhd", name).map(|()| true)
            }
            b"hdlr" => set_once(&mut self.handler, data, "hdlr", name).map(|()| true),
            b"minf" => {
                set_once(&mut self.has_information, (), "minf", name)?;
                self.read_information(data, name).map(|()| true)
            }
            _ => Ok(true),
        })
    }

    fn read_information(&mut self, data: &'m [u8], name: &str) -> Result<(), Problem> {
        each_atom(data, name, |atom, data| {
            match atom {
                b"vmhd" => set_once(&mut self.kind_head, (b"vmhd", data), "vmhd/smhd", name)?,
                b"smhd" => set_once(&mut self.kind_head, (b"smhd", data), "vmhd/smhd", name)?,
                b"dinf" => set_once(&mut self.data_information, data, "dinf", name)?,
                b"stbl" => {
                    set_once(&mut self.has_samples, (), "stbl", name)?;
                    self.read_samples(data, name)?;
                }
                _ => {}
            }
            Ok(true)
        })?;
        Ok(())
    }

    fn read_samples(&mut self, data: &'m [u8], name: &str) -> Result<(), Problem> {
        let pair = |row: &[u8]| Run { count: number(row, 0), value: number(row, 4) };
        each_atom(data, name, |atom, data| {
            match atom {
                b"stsd" if data.len() < DESCRIPTION_BYTES_MIN => return wrong(too_small("stsd", name)),
                b"stsd" => set_once(&mut self.descriptions, data, "stsd", name)?,
                b"stts" => set_once(&mut self.times, table(data, 4, 8, pair, "stts", name)?, "stts", name)?,
                b"stss" => {
                    let table = table(data, 4, 4, |row| number(row, 0), "stss", name)?;
                    set_once(&mut self.key_frames, table, "stss", name)?;
                }
                b"ctts" => set_once(&mut self.shifts, table(data, 4, 8, pair, "ctts", name)?, "ctts", name)?,
                b"stsc" => {
                    let row = |row: &[u8]| Chunks {
                        first: number(row, 0),
                        samples: number(row, 4),
                        description: number(row, 8),
                    };
                    set_once(&mut self.chunks, table(data, 4, 12, row, "stsc", name)?, "stsc", name)?;
                }
                b"stsz" => set_once(&mut self.sizes, sizes(data, name)?, "stsz", name)?,
                b"stco" => {
                    let table = table(data, 4, 4, |row| u64::from(number(row, 0)), "stco", name)?;
                    set_once(&mut self.offsets, table, "stco/co64", name)?;
                }
                b"co64" => {
                    let table = table(data, 4, 8, |row| u64_at(row, 0).expect("a whole row"), "co64", name)?;
                    set_once(&mut self.offsets, table, "stco/co64", name)?;
                    self.has_long_offsets = true;
                }
                _ => {}
            }
            Ok(true)
        })?;
        Ok(())
    }

    /// Checks that all required atoms are there.
    fn check(&self, name: &str) -> Result<(), Problem> {
        if self.times.is_none() {
            return wrong(format!("no mp4 stts atoms were found in \"{name}\""));
        }
        match &self.chunks {
            None => return wrong(format!("no mp4 stsc atoms were found in \"{name}\"")),
            Some(chunks) if chunks.rows.is_empty() => {
                return wrong(format!("zero number of entries in stsc atom in \"{name}\""));
            }
            Some(_) => {}
        }
        if self.offsets.is_none() {
            return wrong(format!("no mp4 stco atoms were found in \"{name}\""));
        }
        Ok(())
    }
}

fn number(row: &[u8], offset: usize) -> u32 {
    u32_at(row, offset).expect("a whole row")
}

/// Reads a table whose number of rows is at `count_at`, followed by the rows.
fn table<T>(
    data: &[u8],
    count_at: usize,
    row_bytes: usize,
    row: impl Fn(&[u8]) -> T,
    atom: &str,
    name: &str,
) -> Result<Table<T>, Problem> {
    let rows = u32_at(data, count_at).and_then(|count| {
        let bytes = usize::try_from(count).ok()?.checked_mul(row_bytes)?;
        data[count_at + 4..].get(..bytes)
    });
    match rows {
        Some(rows) => {
            let version = data[..4].try_into().expect("four bytes");
            Ok(Table { version, rows: rows.chunks_exact(row_bytes).map(row).collect() })
        }
        None => wrong(too_small(atom, name)),
    }
}

fn sizes(data: &[u8], name: &str) -> Result<([u8; 4], Sizes), Problem> {
    match (u32_at(data, 4), u32_at(data, 8)) {
        (Some(0), Some(_)) => {
            let table = table(data, 8, 4, |row| number(row, 0), "stsz", name)?;
            Ok((table.version, Sizes::Each(table.rows)))
        }
        (Some(size), Some(count)) => Ok((data[..4].try_into().expect("four bytes"), Sizes::Uniform { size, count })),
        _ => wrong(too_small("stsz", name)),
    }
}

/// Cutting.
impl Track<'_> {
    /// Cuts the track to the wanted part. Returns the part's range in a file of `size` bytes whose media data ends at
    /// `media_end`, or `None` if the part is empty.
    pub fn cut(&mut self, cut: &Cut, media_end: u64, size: u64, name: &str) -> Result<Option<Range<u64>>, Problem> {
        self.cut_times(cut, name)?;
        self.cut_key_frames(cut);
        self.cut_shifts(cut);
        self.cut_chunks_before(name)?;
        if cut.length_ms.is_some() {
            self.cut_chunks_after(name)?;
        }
        let first_chunk = self.first_chunk as u32;
        let chunks = self.chunks.as_mut().expect("checked");
        chunks.rows.iter_mut().for_each(|row| row.first = row.first.wrapping_sub(first_chunk));
        let (skipped_bytes, last_bytes) = self.cut_sizes(cut, size, name)?;
        self.cut_offsets(cut, media_end, size, skipped_bytes, last_bytes, name)
    }

    fn cut_times(&mut self, cut: &Cut, name: &str) -> Result<(), Problem> {
        let rows = &mut self.times.as_mut().expect("checked").rows;
        let Some((mut place, mut within, before)) = find_time(rows, cut.start(self.timescale)) else {
            return wrong(format!("start time is out mp4 stts samples in \"{name}\""));
        };
        let mut start = before + within;
        if let Some(key_frames) = self.key_frames.as_ref().filter(|_| cut.begins_with_key_frame) {
            let mut missing = samples_to_key_frame(&key_frames.rows, start, name)?;
            start -= missing;
            // Back to the run with the key frame.
            while within < missing {
                self.prefix = self.prefix.saturating_add(within.saturating_mul(rows[place].value.into()));
                missing -= within;
                // The key frame is never before the first run.
                place -= 1;
                within = rows[place].count.into();
            }
            self.prefix = self.prefix.saturating_add(missing.saturating_mul(rows[place].value.into()));
            within -= missing;
        }
        rows.drain(..place);
        // Less than its count.
        rows[0].count -= within as u32;
        if let Some((_, duration)) = &mut self.media_head {
            *duration = duration.saturating_add(self.prefix);
        }
        self.samples.start = start;
        if let Some(length) = cut.length(self.timescale) {
            let wanted = match find_time(rows, length.saturating_add(self.prefix)) {
                Some((place, within, before)) => {
                    rows.truncate(place + 1);
                    rows[place].count = within as u32;
                    before + within
                }
                None => rows.iter().map(|row| u64::from(row.count)).sum(),
            };
            self.samples.end = start + wanted;
        }
        Ok(())
    }

    fn cut_key_frames(&mut self, cut: &Cut) {
        let Some(Table { rows, .. }) = &mut self.key_frames else { return };
        // Key frames are counted from 1.
        let place_of = |rows: &[u32], sample: u64| rows.iter().position(|&row| u64::from(row) > sample);
        let first = place_of(rows, self.samples.start).unwrap_or(rows.len());
        rows.drain(..first);
        if cut.length_ms.is_some()
            && let Some(end) = place_of(rows, self.samples.end)
        {
            rows.truncate(end);
        }
        rows.iter_mut().for_each(|row| *row = row.wrapping_sub(self.samples.start as u32));
    }

    fn cut_shifts(&mut self, cut: &Cut) {
        let Some(Table { rows, .. }) = &mut self.shifts else { return };
        match find_sample(rows, self.samples.start) {
            Some((place, within)) => {
                rows.drain(..place);
                rows[0].count -= within as u32;
            }
            None => rows.clear(),
        }
        if cut.length_ms.is_some()
            && let Some((place, within)) = find_sample(rows, self.samples.end - self.samples.start)
        {
            rows.truncate(place + 1);
            rows[place].count = within as u32;
        }
        if rows.is_empty() {
            self.shifts = None;
        }
    }

    /// Finds the chunk of the first sample.
    fn cut_chunks_before(&mut self, name: &str) -> Result<(), Problem> {
        let found = self.find_chunk(self.samples.start, "start", name)?;
        let Table { rows, .. } = self.chunks.as_mut().expect("checked");
        rows.drain(..found.place);
        let row = &mut rows[0];
        (self.first_chunk, self.skipped_samples) = (found.chunk, found.samples);
        row.first = (found.chunk + 1) as u32;
        if found.samples == 0 {
            return Ok(());
        }
        let left = row.samples - found.samples as u32;
        if found.next == found.chunk + 1 {
            row.samples = left;
        } else {
            self.chunk_before = Some(Chunks { first: 1, samples: left, ..*row });
            row.first = row.first.wrapping_add(1);
        }
        Ok(())
    }

    /// Finds the chunk of the last sample.
    fn cut_chunks_after(&mut self, name: &str) -> Result<(), Problem> {
        let mut wanted = self.samples.end - self.samples.start;
        let mut last_of_before = 0;
        if let Some(before) = &mut self.chunk_before {
            before.samples = u64::from(before.samples).min(wanted) as u32;
            last_of_before = before.samples.into();
            wanted -= last_of_before;
        }
        let found = self.find_chunk(wanted, "end", name)?;
        let Table { rows, .. } = self.chunks.as_mut().expect("checked");
        let first = rows[found.place].first;
        if wanted == found.samples_before {
            // The part ends where the row begins; nginx loses the first chunk in this case.
            rows.truncate(found.place);
            self.last_samples = if found.place == 0 { last_of_before } else { found.samples_of_previous };
        } else {
            rows.truncate(found.place + 1);
            self.last_samples = rows[found.place].samples.into();
        }
        self.end_chunk = found.chunk;
        if found.samples == 0 {
            return Ok(());
        }
        self.end_chunk += 1;
        self.last_samples = found.samples;
        let row = &mut rows[found.place];
        if found.chunk + 1 == u64::from(first) {
            row.samples = found.samples as u32;
        } else {
            let first = self.end_chunk.wrapping_sub(self.first_chunk) as u32;
            self.chunk_after = Some(Chunks { first, samples: found.samples as u32, ..*row });
        }
        Ok(())
    }

    /// Finds the chunk of a sample, counted from 0.
    fn find_chunk(&self, sample: u64, what: &str, name: &str) -> Result<FoundChunk, Problem> {
        let rows = &self.chunks.as_ref().expect("checked").rows;
        let chunk_count = self.offsets.as_ref().expect("checked").rows.len() as u64;
        let (mut rest, mut samples_of_previous) = (sample, 0);
        for (place, row) in rows.iter().enumerate() {
            let next = rows.get(place + 1).map(|next| u64::from(next.first));
            let is_last = next.is_none();
            let next = next.unwrap_or(chunk_count + 1);
            let Some(chunks) = next.checked_sub(row.first.into()) else {
                return wrong(format!("unordered mp4 stsc chunks in \"{name}\""));
            };
            let samples = chunks.saturating_mul(row.samples.into());
            if rest >= samples && !is_last {
                rest -= samples;
                if chunks > 0 {
                    samples_of_previous = row.samples.into();
                }
                continue;
            }
            if rest > samples {
                return wrong(format!("{what} time is out mp4 stsc chunks in \"{name}\""));
            }
            if row.samples == 0 {
                return wrong(format!("zero number of samples in \"{name}\""));
            }
            let Some(first) = u64::from(row.first).checked_sub(1) else {
                return wrong(format!("zero chunk in \"{name}\""));
            };
            return Ok(FoundChunk {
                place,
                chunk: first + rest / u64::from(row.samples),
                samples: rest % u64::from(row.samples),
                next: next.saturating_sub(1),
                samples_before: sample - rest,
                samples_of_previous,
            });
        }
        unreachable!("the last row returns, and there is one")
    }

    /// Returns the length of the samples of the first chunk before the part, and the length of those of the last chunk
    /// in it.
    fn cut_sizes(&mut self, cut: &Cut, size: u64, name: &str) -> Result<(u64, u64), Problem> {
        let Some((_, sizes)) = &mut self.sizes else { return Ok((0, 0)) };
        let count = match sizes {
            Sizes::Uniform { count, .. } => u64::from(*count),
            Sizes::Each(each) => each.len() as u64,
        };
        let Range { start, mut end } = self.samples;
        if start >= count {
            return wrong(format!("start time is out mp4 stsz samples in \"{name}\""));
        }
        if cut.length_ms.is_none() {
            end = count;
        } else if end > count {
            return wrong(format!("end time is out mp4 stsz samples in \"{name}\""));
        }
        // Within the existing samples.
        let bytes = |samples: Range<u64>| match &*sizes {
            Sizes::Uniform { size, .. } => (samples.end - samples.start).saturating_mul((*size).into()),
            Sizes::Each(each) => {
                each[samples.start as usize..samples.end as usize].iter().map(|&size| u64::from(size)).sum()
            }
        };
        let skipped = bytes(start.saturating_sub(self.skipped_samples)..start);
        let last = bytes(end.saturating_sub(self.last_samples)..end);
        for (what, bytes) in [("start", skipped), ("end", last)] {
            if bytes > size {
                return wrong(format!("too large mp4 {what} samples size in \"{name}\""));
            }
        }
        match sizes {
            Sizes::Uniform { count, .. } => *count = (end - start) as u32,
            Sizes::Each(each) => {
                each.truncate(end as usize);
                each.drain(..start as usize);
            }
        }
        Ok((skipped, last))
    }

    fn cut_offsets(
        &mut self,
        cut: &Cut,
        media_end: u64,
        size: u64,
        skipped_bytes: u64,
        last_bytes: u64,
        name: &str,
    ) -> Result<Option<Range<u64>>, Problem> {
        let atom = if self.has_long_offsets { "co64" } else { "stco" };
        let most = if self.has_long_offsets { size } else { size.min(u32::MAX.into()) };
        let add = |offset: u64, bytes: u64| match offset.checked_add(bytes).filter(|&end| end <= most) {
            Some(end) => Ok(end),
            None => wrong(format!("too large chunk offset in \"{name}\"")),
        };
        let Table { rows, .. } = self.offsets.as_mut().expect("checked");
        let count = rows.len() as u64;
        if self.first_chunk >= count {
            return wrong(format!("start time is out mp4 {atom} chunks in \"{name}\""));
        }
        if cut.length_ms.is_some() {
            if self.end_chunk > count || self.end_chunk < self.first_chunk {
                return wrong(format!("end time is out mp4 {atom} chunks in \"{name}\""));
            }
            rows.truncate(self.end_chunk as usize);
        }
        // The first chunk may lie behind the end by now.
        rows.drain(..(self.first_chunk as usize).min(rows.len()));
        let Some(first) = rows.first_mut() else { return Ok(None) };
        *first = add(*first, skipped_bytes)?;
        let start = *first;
        let end = match rows.last() {
            Some(&last) if cut.length_ms.is_some() => add(last, last_bytes)?,
            _ => media_end,
        };
        Ok(Some(start..end))
    }
}

/// Position of a sample.
struct FoundChunk {
    /// Row of its chunk.
    place: usize,
    /// Its chunk, from 0, and the number of samples before it in the chunk.
    chunk: u64,
    samples: u64,
    /// First chunk of the next row.
    next: u64,
    /// Number of samples before the row, and number of samples in each chunk of the previous row.
    samples_before: u64,
    samples_of_previous: u64,
}

/// Returns the run that contains a time, the number of its samples before that time, and the number of samples before
/// the run.
fn find_time(rows: &[Run], time: u64) -> Option<(usize, u64, u64)> {
    let (mut rest, mut before) = (time, 0);
    for (place, row) in rows.iter().enumerate() {
        let span = u64::from(row.count) * u64::from(row.value);
        if rest < span {
            return Some((place, rest / u64::from(row.value), before));
        }
        rest -= span;
        before += u64::from(row.count);
    }
    None
}

/// Returns the run that contains a sample, counted from 0, and the number of its samples before that one.
fn find_sample(rows: &[Run], sample: u64) -> Option<(usize, u64)> {
    let mut rest = sample;
    for (place, row) in rows.iter().enumerate() {
        if rest < u64::from(row.count) {
            return Some((place, rest));
        }
        rest -= u64::from(row.count);
    }
    None
}

/// Returns the distance back to a key frame; key frames are counted from 1.
fn samples_to_key_frame(key_frames: &[u32], sample: u64, name: &str) -> Result<u64, Problem> {
    let mut distance = 0;
    for &key_frame in key_frames {
        let Some(key_frame) = u64::from(key_frame).checked_sub(1) else {
            return wrong(format!("zero sync sample in \"{name}\""));
        };
        match sample.checked_sub(key_frame) {
            Some(closer) => distance = closer,
            None => break,
        }
    }
    Ok(distance)
}

/// Writing.
impl Track<'_> {
    /// Appends the `trak` atom, with offsets moved by this distance.
    pub fn write(&self, out: &mut Vec<u8>, offset: u64) {
        write_atom(out, b"trak", |out| {
            if let Some((data, duration)) = self.head {
                write_atom(out, b"tkhd", |out| TRACK_HEAD.write(out, data, duration));
            }
            if self.prefix > 0 {
                write_atom(out, b"edts", |out| write_atom(out, b"elst", |out| self.write_edits(out)));
            }
            write_atom(out, b"mdia", |out| {
                if let Some((data, duration)) = self.media_head {
                    write_atom(out, b"mdhd", |out| MEDIA_HEAD.write(out, data, duration));
                }
                write_data(out, b"hdlr", self.handler);
                write_atom(out, b"minf", |out| {
                    if let Some((name, data)) = self.kind_head {
                        write_data(out, name, Some(data));
                    }
                    write_data(out, b"dinf", self.data_information);
                    write_atom(out, b"stbl", |out| self.write_samples(out, offset));
                });
            });
        });
    }

    /// Appends an edit list, by which players skip the prefix (§8.6.6).
    fn write_edits(&self, out: &mut Vec<u8>) {
        let duration = self.head.map_or(0, |(_, duration)| duration);
        out.extend_from_slice(&[1, 0, 0, 0]);
        out.extend_from_slice(&1_u32.to_be_bytes());
        out.extend_from_slice(&duration.to_be_bytes());
        out.extend_from_slice(&self.prefix.to_be_bytes());
        // Normal speed: 1.0.
        out.extend_from_slice(&[0, 1, 0, 0]);
    }

    fn write_samples(&self, out: &mut Vec<u8>, offset: u64) {
        let write_run = |out: &mut Vec<u8>, row: &Run| {
            out.extend_from_slice(&row.count.to_be_bytes());
            out.extend_from_slice(&row.value.to_be_bytes());
        };
        write_data(out, b"stsd", self.descriptions);
        if let Some(times) = &self.times {
            write_table(out, b"stts", times.version, times.rows.iter(), write_run);
        }
        if let Some(key_frames) = &self.key_frames {
            let write = |out: &mut Vec<u8>, row: &u32| out.extend_from_slice(&row.to_be_bytes());
            write_table(out, b"stss", key_frames.version, key_frames.rows.iter(), write);
        }
        if let Some(shifts) = &self.shifts {
            write_table(out, b"ctts", shifts.version, shifts.rows.iter(), write_run);
        }
        if let Some(chunks) = &self.chunks {
            let rows = self.chunk_before.iter().chain(&chunks.rows).chain(&self.chunk_after);
            write_table(out, b"stsc", chunks.version, rows, |out, row| {
                for number in [row.first, row.samples, row.description] {
                    out.extend_from_slice(&number.to_be_bytes());
                }
            });
        }
        if let Some((version, sizes)) = &self.sizes {
            write_atom(out, b"stsz", |out| {
                out.extend_from_slice(version);
                let (uniform, count, each) = match sizes {
                    Sizes::Uniform { size, count } => (*size, *count, &[][..]),
                    Sizes::Each(each) => (0, each.len() as u32, &each[..]),
                };
                out.extend_from_slice(&uniform.to_be_bytes());
                out.extend_from_slice(&count.to_be_bytes());
                each.iter().for_each(|size| out.extend_from_slice(&size.to_be_bytes()));
            });
        }
        if let Some(offsets) = &self.offsets {
            let name = if self.has_long_offsets { b"co64" } else { b"stco" };
            write_table(out, name, offsets.version, offsets.rows.iter(), |out, row| {
                let moved = row.wrapping_add(offset);
                match self.has_long_offsets {
                    true => out.extend_from_slice(&moved.to_be_bytes()),
                    false => out.extend_from_slice(&(moved as u32).to_be_bytes()),
                }
            });
        }
    }
}

fn write_data(out: &mut Vec<u8>, name: &[u8; 4], data: Option<&[u8]>) {
    if let Some(data) = data {
        write_atom(out, name, |out| out.extend_from_slice(data));
    }
}

fn write_table<'t, T: 't>(
    out: &mut Vec<u8>,
    name: &[u8; 4],
    version: [u8; 4],
    rows: impl Iterator<Item = &'t T>,
    write: impl Fn(&mut Vec<u8>, &T),
) {
    write_atom(out, name, |out| {
        out.extend_from_slice(&version);
        let place = out.len();
        out.extend_from_slice(&[0; 4]);
        let mut count: u32 = 0;
        for row in rows {
            write(out, row);
            count += 1;
        }
        out[place..place + 4].copy_from_slice(&count.to_be_bytes());
    });
}
