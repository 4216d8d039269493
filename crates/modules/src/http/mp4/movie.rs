//! MP4 files (ISO/IEC 14496-12): reads the index of a film, cuts it, and writes it for the wanted part.
//!
//! An atom is a length, a name and data, which may consist of atoms. Unknown atoms are left out of the new index. Files
//! are untrusted: every length and number is checked before it is used, nothing beyond the file's end is read, and
//! memory is bounded by a few times the index.

use std::io;
use std::ops::Range;

use super::track::{Read, Track};

/// Maximum number of atoms before the index: some films have thousands of fragments.
const ATOMS_MAX: u32 = 100_000;

/// Maximum length of `ftyp`, as in nginx.
const FILE_TYPE_BYTES_MAX: u64 = 1024;

/// A 32-bit length and a name.
const HEADER_BYTES: u64 = 8;

/// As above, followed by a 64-bit length.
const LONG_HEADER_BYTES: u64 = 16;

/// Source of the film's bytes.
pub trait Source {
    /// Reads from `offset` until `into` is full or the file ends. May block.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// Reserves memory. Returns `false` if that exceeds the bound.
    fn reserve(&self, _bytes: usize) -> bool {
        true
    }
}

/// Memory needed for cutting an index, for each of its bytes: the old index, its tables, and the new index.
const WORK_PER_BYTE: u64 = 4;

/// The wanted part of a film.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Start, in milliseconds.
    pub start_ms: u64,
    /// Length; `None` for the rest of the film.
    pub length_ms: Option<u64>,
    /// `true` to start at the key frame before the start time.
    pub begins_with_key_frame: bool,
    /// Maximum length of the index, in bytes.
    pub index_bytes_max: u64,
}

impl Cut {
    /// Returns the start by a clock with this many ticks a second.
    pub fn start(&self, timescale: u32) -> u64 {
        scaled(self.start_ms, timescale)
    }

    /// Returns the length by that clock, or `None` for the rest.
    pub fn length(&self, timescale: u32) -> Option<u64> {
        self.length_ms.map(|length| scaled(length, timescale))
    }

    /// Returns the duration of the part of a film with this duration, or `None` if the film ends before the part.
    pub fn duration(&self, whole: u64, timescale: u32) -> Option<u64> {
        let rest = whole.checked_sub(self.start(timescale))?;
        Some(self.length(timescale).map_or(rest, |length| rest.min(length)))
    }

    /// As [`Cut::duration`], but a track that ends where the part begins has no part either.
    pub fn duration_of_track(&self, whole: u64, timescale: u32) -> Option<u64> {
        self.duration(whole, timescale).filter(|_| whole > self.start(timescale))
    }
}

fn scaled(time_ms: u64, timescale: u32) -> u64 {
    (u128::from(time_ms) * u128::from(timescale) / 1_000).try_into().unwrap_or(u64::MAX)
}

/// A part of a film: a head, and a range of the file that follows it.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    /// `ftyp`, `moov`, and the header of `mdat`.
    pub head: Vec<u8>,
    /// Range of the rest in the file.
    pub data: Range<u64>,
}

/// Reason why there is no part.
#[derive(Debug)]
pub enum Problem {
    /// The file is invalid; the text is in nginx's words.
    Wrong(String),
    /// The file cannot be read.
    NotRead(io::Error),
    /// The memory bound would be exceeded.
    NoMemory,
}

/// Returns an error about the file in nginx's words.
pub(super) fn wrong<T>(text: String) -> Result<T, Problem> {
    Err(Problem::Wrong(text))
}

/// Cuts a film of `size` bytes. Returns `None` if the unchanged file is the result. `name` is for messages.
pub fn cut(source: &dyn Source, size: u64, cut: &Cut, name: &str) -> Result<Option<Part>, Problem> {
    let Some(film) = Film::find(source, size, cut, name)? else { return Ok(None) };
    let movie = Movie::read(&film.index, cut, name)?;
    if movie.tracks.is_empty() {
        return wrong(format!("no mp4 trak atoms were found in \"{name}\""));
    }
    let Some(media_end) = film.media_end else { return wrong(format!("no mp4 mdat atom was found in \"{name}\"")) };
    movie.part(&film.file_type, media_end, size, cut, name).map(Some)
}

/// Top-level atoms of a file.
#[derive(Default)]
struct Film {
    /// Data of `ftyp`.
    file_type: Option<Vec<u8>>,
    /// Data of `moov`.
    index: Vec<u8>,
    /// End of `mdat`.
    media_end: Option<u64>,
}

impl Film {
    /// Finds the atoms. Returns `None` if the unchanged file is the result.
    fn find(source: &dyn Source, size: u64, cut: &Cut, name: &str) -> Result<Option<Film>, Problem> {
        let mut film = Film::default();
        let (mut offset, mut has_index, mut count) = (0, false, 0);
        while offset < size && !(has_index && film.media_end.is_some()) {
            let mut bytes = [0; LONG_HEADER_BYTES as usize];
            let there = bytes.len().min(usize::try_from(size - offset).unwrap_or(usize::MAX));
            read_exactly(source, offset, &mut bytes[..there], name)?;
            let Some(header) = Header::read(&bytes[..there], size - offset, name)? else { break };
            let data = offset + header.bytes..offset + header.size;
            let data_bytes = data.end - data.start;
            match &header.name {
                b"ftyp" if data_bytes > FILE_TYPE_BYTES_MAX => {
                    return wrong(format!("\"{name}\" mp4 ftyp atom is too large:{data_bytes}"));
                }
                b"ftyp" => {
                    let text = read_data(source, &data, name)?;
                    set_once(&mut film.file_type, text, "ftyp", name)?;
                }
                b"moov" if film.media_end.is_none() && cut.start_ms == 0 && cut.length_ms.is_none() => {
                    return Ok(None);
                }
                b"moov" if has_index => return wrong(duplicate("moov", name)),
                b"moov" if data_bytes > cut.index_bytes_max => {
                    let advice = "you may want to increase mp4_max_buffer_size";
                    return wrong(format!("\"{name}\" mp4 moov atom is too large:{data_bytes}, {advice}"));
                }
                b"moov" => {
                    let work = usize::try_from(data_bytes.saturating_mul(WORK_PER_BYTE)).unwrap_or(usize::MAX);
                    if !source.reserve(work) {
                        return Err(Problem::NoMemory);
                    }
                    film.index = read_data(source, &data, name)?;
                    has_index = true;
                }
                b"mdat" => set_once(&mut film.media_end, data.end, "mdat", name)?,
                _ => {}
            }
            count += 1;
            if count > ATOMS_MAX {
                return wrong(format!("\"{name}\" has too many mp4 atoms"));
            }
            offset = data.end;
        }
        Ok(Some(film))
    }
}

/// Returns the duration of a film of `size` bytes in milliseconds, if its index has it. Only the headers of the atoms
/// before it are read.
pub fn duration_ms(source: &dyn Source, size: u64) -> Option<u64> {
    let index = find_atom(source, 0..size, b"moov")?;
    let head = find_atom(source, index, b"mvhd")?;
    let mut data = [0; MOVIE_HEAD.bytes_min[1]];
    let there = data.len().min(usize::try_from(head.end - head.start).unwrap_or(usize::MAX));
    read_exactly(source, head.start, &mut data[..there], "").ok()?;
    let (timescale, duration) = MOVIE_HEAD.read(&data[..there], "mvhd", "").ok()?;
    // All ones stand for an unknown duration. (ISO/IEC 14496-12 §8.2.2)
    if [u32::MAX.into(), u64::MAX].contains(&duration) {
        return None;
    }
    let duration_ms = (u128::from(duration) * 1_000).checked_div(timescale.into())?;
    u64::try_from(duration_ms).ok().filter(|&duration| duration > 0)
}

/// Maximum number of atoms that [`duration_ms`] passes while it searches for one: each takes a read.
const LOOKED_AT_MAX: usize = 100;

/// Returns the range of the data of the first atom with this name.
fn find_atom(source: &dyn Source, within: Range<u64>, name: &[u8; 4]) -> Option<Range<u64>> {
    let mut offset = within.start;
    for _ in 0..LOOKED_AT_MAX {
        let room = within.end.checked_sub(offset).filter(|&room| room > 0)?;
        let mut bytes = [0; LONG_HEADER_BYTES as usize];
        let there = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        read_exactly(source, offset, &mut bytes[..there], "").ok()?;
        let header = Header::read(&bytes[..there], room, "").ok()??;
        let end = offset + header.size;
        if header.name == *name {
            return Some(offset + header.bytes..end);
        }
        offset = end;
    }
    None
}

fn duplicate(atom: &str, name: &str) -> String {
    format!("duplicate mp4 {atom} atom in \"{name}\"")
}

/// Sets a value that may occur only once.
pub(super) fn set_once<T>(place: &mut Option<T>, value: T, atom: &str, name: &str) -> Result<(), Problem> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => wrong(duplicate(atom, name)),
    }
}

fn read_data(source: &dyn Source, range: &Range<u64>, name: &str) -> Result<Vec<u8>, Problem> {
    // Within the bound, and within the file.
    let mut data = vec![0; (range.end - range.start) as usize];
    read_exactly(source, range.start, &mut data, name)?;
    Ok(data)
}

fn read_exactly(source: &dyn Source, offset: u64, into: &mut [u8], name: &str) -> Result<(), Problem> {
    let wanted = into.len();
    match source.read(offset, into) {
        Ok(count) if count == wanted => Ok(()),
        // The file was truncated meanwhile.
        Ok(_) => wrong(format!("\"{name}\" mp4 file truncated")),
        Err(error) => Err(Problem::NotRead(error)),
    }
}

/// Header of an atom.
struct Header {
    name: [u8; 4],
    /// Length of the header in bytes; the size includes the data.
    bytes: u64,
    size: u64,
}

impl Header {
    /// Reads a header; at most `room` bytes can be left. Returns `None` for an explicit end.
    fn read(bytes: &[u8], room: u64, name: &str) -> Result<Option<Header>, Problem> {
        let truncated = || wrong(format!("\"{name}\" mp4 file truncated"));
        let Some(short) = u32_at(bytes, 0) else { return truncated() };
        let (header_bytes, size) = match short {
            0 => return Ok(None),
            1 => match u64_at(bytes, 8) {
                Some(long) => (LONG_HEADER_BYTES, long),
                None => return truncated(),
            },
            short => (HEADER_BYTES, u64::from(short)),
        };
        if size < header_bytes {
            return wrong(format!("\"{name}\" mp4 atom is too small:{size}"));
        }
        if size > room {
            return wrong(format!("\"{name}\" mp4 atom too large:{size}"));
        }
        let Some(atom_name) = bytes.get(4..8) else { return truncated() };
        let name = atom_name.try_into().expect("four bytes");
        Ok(Some(Header { name, bytes: header_bytes, size }))
    }
}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..offset + 4).map(|bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")))
}

pub(super) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..offset + 8).map(|bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
}

/// Calls `each` with the name and the data of every atom in `data`, until it returns `false`.
pub(super) fn each_atom<'m>(
    data: &'m [u8],
    name: &str,
    mut each: impl FnMut(&[u8; 4], &'m [u8]) -> Result<bool, Problem>,
) -> Result<bool, Problem> {
    let mut rest = data;
    while !rest.is_empty() {
        let Some(header) = Header::read(rest, rest.len() as u64, name)? else { break };
        // Within `rest`, which is in memory.
        let (atom, following) = rest.split_at(header.size as usize);
        if !each(&header.name, &atom[header.bytes as usize..])? {
            return Ok(false);
        }
        rest = following;
    }
    Ok(true)
}

/// Layout of an atom whose fields are wider in version 1.
pub(super) struct Timed {
    /// Offset of the ticks per second, if the atom has them.
    timescale: Option<[usize; 2]>,
    duration: [usize; 2],
    bytes_min: [usize; 2],
}

/// `mvhd` (§8.2.2); as in nginx, QuickTime's layout is required.
const MOVIE_HEAD: Timed = Timed { timescale: Some([12, 20]), duration: [16, 24], bytes_min: [100, 112] };

impl Timed {
    pub const fn new(timescale: Option<[usize; 2]>, duration: [usize; 2], bytes_min: [usize; 2]) -> Timed {
        Timed { timescale, duration, bytes_min }
    }

    /// Returns the ticks per second, 0 if the atom has none, and the duration.
    pub fn read(&self, data: &[u8], atom: &str, name: &str) -> Result<(u32, u64), Problem> {
        let version = version_of(data);
        if data.len() < self.bytes_min[0] || data.len() < self.bytes_min[version] {
            return wrong(too_small(atom, name));
        }
        let timescale = self.timescale.and_then(|offsets| u32_at(data, offsets[version])).unwrap_or(0);
        let duration = match version {
            0 => u32_at(data, self.duration[0]).map(u64::from),
            _ => u64_at(data, self.duration[1]),
        };
        Ok((timescale, duration.unwrap_or(0)))
    }

    /// Appends the atom with another duration.
    pub fn write(&self, out: &mut Vec<u8>, data: &[u8], duration: u64) {
        let start = out.len();
        out.extend_from_slice(data);
        let version = version_of(data);
        let place = start + self.duration[version];
        match version {
            // A duration that does not fit is truncated.
            0 => out[place..place + 4].copy_from_slice(&(duration as u32).to_be_bytes()),
            _ => out[place..place + 8].copy_from_slice(&duration.to_be_bytes()),
        }
    }
}

fn version_of(data: &[u8]) -> usize {
    usize::from(data.first().is_some_and(|&version| version != 0))
}

pub(super) fn too_small(atom: &str, name: &str) -> String {
    format!("\"{name}\" mp4 {atom} atom too small")
}

#[derive(Default)]
struct Movie<'m> {
    /// `mvhd` and its new duration.
    head: Option<(&'m [u8], u64)>,
    timescale: u32,
    tracks: Vec<Track<'m>>,
}

impl<'m> Movie<'m> {
    fn read(index: &'m [u8], cut: &Cut, name: &str) -> Result<Movie<'m>, Problem> {
        let mut movie = Movie::default();
        each_atom(index, name, |atom, data| {
            match atom {
                b"mvhd" => {
                    let (timescale, duration) = MOVIE_HEAD.read(data, "mvhd", name)?;
                    let Some(duration) = cut.duration(duration, timescale) else {
                        return wrong(format!("\"{name}\" mp4 start time exceeds file duration"));
                    };
                    movie.timescale = timescale;
                    set_once(&mut movie.head, (data, duration), "mvhd", name)?;
                }
                b"trak" => {
                    if let Read::Track(track) = Track::read(data, movie.timescale, cut, name)? {
                        movie.tracks.push(*track);
                    }
                }
                b"cmov" => return wrong(format!("\"{name}\" mp4 compressed moov atom (cmov) is not supported")),
                _ => {}
            }
            Ok(true)
        })?;
        Ok(movie)
    }

    fn part(
        mut self,
        file_type: &Option<Vec<u8>>,
        media_end: u64,
        size: u64,
        cut: &Cut,
        name: &str,
    ) -> Result<Part, Problem> {
        let mut data = size..0;
        for track in &mut self.tracks {
            if let Some(range) = track.cut(cut, media_end, size, name)? {
                data = data.start.min(range.start)..data.end.max(range.end);
            }
        }
        if data.end <= data.start {
            return wrong(format!("no data between start time and end time in \"{name}\""));
        }
        if data.start >= media_end {
            return wrong(format!("start time is out mp4 mdat atom in \"{name}\""));
        }
        let media_bytes = data.end - data.start;
        let media_header =
            if media_bytes > u64::from(u32::MAX) - HEADER_BYTES { LONG_HEADER_BYTES } else { HEADER_BYTES };
        let file_type = file_type.as_deref();
        // The length does not depend on the offsets.
        let head_bytes = self.write(file_type, 0).len() as u64 + media_header;
        let mut head = self.write(file_type, head_bytes.wrapping_sub(data.start));
        match media_header {
            HEADER_BYTES => head.extend_from_slice(&((HEADER_BYTES + media_bytes) as u32).to_be_bytes()),
            _ => head.extend_from_slice(&1_u32.to_be_bytes()),
        }
        head.extend_from_slice(b"mdat");
        if media_header == LONG_HEADER_BYTES {
            head.extend_from_slice(&(LONG_HEADER_BYTES + media_bytes).to_be_bytes());
        }
        Ok(Part { head, data })
    }

    /// Returns `ftyp` and `moov`, with offsets moved by this distance.
    fn write(&self, file_type: Option<&[u8]>, offset: u64) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(file_type) = file_type {
            write_atom(&mut out, b"ftyp", |out| out.extend_from_slice(file_type));
        }
        write_atom(&mut out, b"moov", |out| {
            if let Some((data, duration)) = self.head {
                write_atom(out, b"mvhd", |out| MOVIE_HEAD.write(out, data, duration));
            }
            self.tracks.iter().for_each(|track| track.write(out, offset));
        });
        out
    }
}

/// Appends an atom whose data `fill` appends.
pub(super) fn write_atom(out: &mut Vec<u8>, name: &[u8; 4], fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(name);
    fill(out);
    // The atom is shorter than the one that was read, except for a few bytes per track.
    let length = (out.len() - start) as u32;
    out[start..start + 4].copy_from_slice(&length.to_be_bytes());
}
