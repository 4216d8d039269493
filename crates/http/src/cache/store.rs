//! Files of entries: opened, checked and written where that may block.
//!
//! A file comes to be beside its place and gets its name when it is whole. What is opened is an entry only if its
//! header is whole, its key is the one that was asked for, and its length fits; the sum of a body of up to 256 KiB is
//! checked, too. Nothing here runs on a loop.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::SystemTime;

use gale_runtime::files::{create_directories_blocking, open_blocking};
use gale_runtime::{Bytes, File, OpenFlags};
use rustix::fs::{CWD, RenameFlags};

use super::format::{self, Header, Meta, Unreadable};

/// Bodies up to this length are read with their header, checked, and kept in memory when they are asked for often.
pub const SMALL_BODY: u64 = 64 * 1024;

/// Bodies up to this length are read once and checked when they are opened; longer ones would keep the first client
/// waiting.
const CHECKED_BODY: u64 = 256 * 1024;

/// How much of a file is read at first.
const FIRST_READ: usize = 80 * 1024;

/// An entry that was opened.
pub struct Opened {
    /// What its file says.
    pub header: Header,
    /// The body, if it is small.
    pub body: Option<Bytes>,
    /// The file.
    pub file: File,
}

/// Why there is no entry.
#[derive(Debug)]
pub enum OpenError {
    /// There is no file.
    Missing,
    /// The file is none of Gale's, or was damaged, or is of another key with the same sum.
    Unusable(&'static str),
    /// The disk says no.
    Io(io::Error),
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> OpenError {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => OpenError::Missing,
            _ => OpenError::Io(error),
        }
    }
}

/// Opens the file of an entry.
///
/// # Errors
/// See [`OpenError`].
pub fn open(path: &Path) -> Result<Opened, OpenError> {
    let flags = OpenFlags { no_access_time: true, ..OpenFlags::READ };
    let file = open_blocking(path, flags)?;
    let mut bytes = vec![0; FIRST_READ.min(file.metadata().size as usize)];
    read_exact(&file, &mut bytes, 0)?;
    check(file, bytes, |file, bytes, length| {
        let before = bytes.len();
        bytes.resize(length, 0);
        read_exact(file, &mut bytes[before..], before as u64)
    })
}

/// Checks what was read of a file; `more` reads on up to a length.
fn check(
    file: File,
    mut bytes: Vec<u8>,
    more: impl Fn(&File, &mut Vec<u8>, usize) -> io::Result<()>,
) -> Result<Opened, OpenError> {
    let size = file.metadata().size;
    let header = loop {
        match format::decode(&bytes) {
            Ok(header) => break header,
            Err(Unreadable::Longer(length)) if length as u64 <= size && bytes.len() < length => {
                more(&file, &mut bytes, length)?;
            }
            Err(Unreadable::Foreign) => return Err(OpenError::Unusable("is not one of Gale's")),
            Err(_) => return Err(OpenError::Unusable("is damaged")),
        }
    };
    let start = header.header_length as usize;
    if size != start as u64 + header.body_length {
        return Err(OpenError::Unusable("has a wrong length"));
    }
    let mut body = None;
    if header.body_length <= SMALL_BODY {
        let end = start + header.body_length as usize;
        if bytes.len() < end {
            more(&file, &mut bytes, end)?;
        }
        let found = Bytes::copy_from_slice(&bytes[start..end]);
        if crc32fast::hash(&found) != header.body_crc {
            return Err(OpenError::Unusable("is damaged"));
        }
        body = Some(found);
    } else if header.body_length <= CHECKED_BODY {
        more(&file, &mut bytes, start + header.body_length as usize)?;
        if crc32fast::hash(&bytes[start..]) != header.body_crc {
            return Err(OpenError::Unusable("is damaged"));
        }
    }
    Ok(Opened { header, body, file })
}

fn read_exact(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < into.len() {
        match rustix::io::pread(file, &mut into[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A file that is whole, and has not got its name yet. Dropped, it goes.
pub struct Unnamed {
    temporary: PathBuf,
    size: u64,
    is_named: bool,
}

impl Unnamed {
    fn new(temporary: PathBuf, size: u64) -> Unnamed {
        Unnamed { temporary, size, is_named: false }
    }

    /// How long it is, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Gives it its name. What has that and is none of Gale's stays: nginx's, say.
    ///
    /// # Errors
    /// The disk's; nothing is left of the file then.
    pub fn publish(mut self, path: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, &self.temporary, CWD, path, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.is_named = true;
                return Ok(());
            }
            Err(rustix::io::Errno::EXIST) if !is_ours(path)? => {
                return Err(io::Error::other("a file that is not one of Gale's has its name"));
            }
            // Not every file system knows the flag.
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {}
            Err(error) => return Err(error.into()),
        }
        std::fs::rename(&self.temporary, path)?;
        self.is_named = true;
        Ok(())
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if !self.is_named {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Writes an entry that is in memory.
///
/// # Errors
/// The disk's; nothing is left of the file then.
pub fn write(path: &Path, meta: &Meta, body: &[Bytes], number: u32) -> io::Result<Unnamed> {
    let length = body.iter().map(|piece| piece.len() as u64).sum();
    let mut sum = crc32fast::Hasher::new();
    body.iter().for_each(|piece| sum.update(piece));
    let header = format::encode(meta, format::header_length(meta), length, sum.finalize());
    let (file, temporary) = create(path, number)?;
    let unnamed = Unnamed::new(temporary, header.len() as u64 + length);
    write_all(&file, &header, body)?;
    Ok(unnamed)
}

fn write_all(mut file: &std::fs::File, header: &[u8], body: &[Bytes]) -> io::Result<()> {
    use std::io::Write;
    let mut slices: Vec<IoSlice<'_>> =
        std::iter::once(header).chain(body.iter().map(|piece| &**piece)).map(IoSlice::new).collect();
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        match file.write_vectored(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut rest, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// When this process began to use caches, as file systems tell it.
pub fn begun() -> SystemTime {
    static BEGUN: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);
    *BEGUN
}

/// Which half of the numbers of temporary files is this process's. Two processes may have the same by accident: then
/// what one of them leaves is found later.
static OWN_NUMBERS: LazyLock<u32> = LazyLock::new(|| RandomState::new().hash_one(begun()) as u32 & 0xFFFF_0000);

/// A number for the name of a temporary file.
pub fn new_number() -> u32 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    *OWN_NUMBERS | u32::from(NEXT.fetch_add(1, Relaxed))
}

/// Whether a temporary file's number is one of this process's.
pub fn is_own_number(number: u32) -> bool {
    number & 0xFFFF_0000 == *OWN_NUMBERS
}

/// The name under which a file comes to be.
pub fn temporary(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number:010}"));
    name.into()
}

/// Creates a file beside the place that it is for, with the directories that are missing.
///
/// # Errors
/// The disk's.
pub fn create(path: &Path, number: u32) -> io::Result<(std::fs::File, PathBuf)> {
    use std::os::unix::fs::OpenOptionsExt;
    let temporary = temporary(path, number);
    let mut options = std::fs::File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = match options.open(&temporary) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create_directories_blocking(path.parent().expect("it lies in a directory"), 0o700).map_err(|error| {
                error.error().raw_os_error().map_or(io::ErrorKind::Other.into(), io::Error::from_raw_os_error)
            })?;
            options.open(&temporary)?
        }
        other => other?,
    };
    Ok((file, temporary))
}

/// Completes the header of a file whose body, of this length, was written.
///
/// # Errors
/// The disk's; nothing is left of the file then.
pub fn complete(file: &File, temporary: PathBuf, header: &[u8], body_length: u64) -> io::Result<Unnamed> {
    let unnamed = Unnamed::new(temporary, header.len() as u64 + body_length);
    let mut rest = header;
    while !rest.is_empty() {
        let count = rustix::io::pwrite(file, rest, (header.len() - rest.len()) as u64)?;
        rest = &rest[count..];
    }
    Ok(unnamed)
}

/// Whether a file is one of Gale's, or empty, or gone.
///
/// # Errors
/// The disk's.
pub fn is_ours(path: &Path) -> io::Result<bool> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let mut magic = [0; 8];
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) => Ok(magic == *format::MAGIC),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(file.metadata()?.len() == 0),
        Err(error) => Err(error),
    }
}

/// Takes the file of an entry away, if it is one of Gale's.
pub fn remove(path: &Path) -> io::Result<()> {
    if !is_ours(path)? {
        return Ok(());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The number of the entry in a file; `None` if there is no file, or none of Gale's that can be read.
///
/// # Errors
/// The disk's.
pub fn number_of(path: &Path) -> io::Result<Option<u64>> {
    match open(path) {
        Ok(opened) => Ok(Some(opened.header.meta.number)),
        Err(OpenError::Missing | OpenError::Unusable(_)) => Ok(None),
        Err(OpenError::Io(error)) => Err(error),
    }
}

/// Another header for the file of an entry, whose body stays: after a 304.
pub enum Renewal {
    /// It fits into the place of the one before.
    InPlace(Vec<u8>),
    /// It does not: a copy of the file has it.
    Copy(Unnamed),
}

/// Prepares another header for a file that was opened.
///
/// # Errors
/// The disk's.
pub fn prepare_renewal(path: &Path, opened: &Opened, meta: &Meta, number: u32) -> io::Result<Renewal> {
    let Opened { header, file, .. } = opened;
    let length = format::header_length(meta);
    if length <= header.header_length {
        return Ok(Renewal::InPlace(format::encode(meta, header.header_length, header.body_length, header.body_crc)));
    }
    let (copy, temporary) = create(path, number)?;
    let unnamed = Unnamed::new(temporary, u64::from(length) + header.body_length);
    copy.write_all_at(&format::encode(meta, length, header.body_length, header.body_crc), 0)?;
    let mut buffer = vec![0; 256 * 1024];
    let mut done = 0;
    while done < header.body_length {
        let count = buffer.len().min((header.body_length - done) as usize);
        read_exact(file, &mut buffer[..count], u64::from(header.header_length) + done)?;
        copy.write_all_at(&buffer[..count], u64::from(length) + done)?;
        done += count as u64;
    }
    Ok(Renewal::Copy(unnamed))
}

impl Renewal {
    /// Puts it in place, if the file that was opened is still the one of this name. Returns its length.
    ///
    /// # Errors
    /// The disk's; another file has the name.
    pub fn publish(self, path: &Path, opened: &Opened) -> io::Result<u64> {
        let named = std::fs::File::options().write(true).open(path)?;
        if rustix::fs::fstat(&named)?.st_ino != opened.file.metadata().inode {
            return Err(io::Error::other("another file has taken its place"));
        }
        match self {
            Renewal::InPlace(header) => {
                named.write_all_at(&header, 0)?;
                Ok(header.len() as u64 + opened.header.body_length)
            }
            Renewal::Copy(copy) => {
                let size = copy.size();
                copy.publish(path)?;
                Ok(size)
            }
        }
    }
}
