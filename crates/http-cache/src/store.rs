//! Files of entries: opening, checking and writing them, which may block.
//!
//! A file is written under a temporary name and renamed when it is complete. An opened file is accepted only if its
//! header is complete, its key is the requested one, and its length is right; for a body of up to 256 KiB the sum is
//! checked too. A longer body has sums of its blocks, which the reader checks (`sums.rs`). Nothing here runs on a loop.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::SystemTime;

use gale_files::{File, OpenFlags, create_directories_blocking, likely_device, open_blocking};
use gale_http::files::delivery::SENDFILE_MIN;
use gale_runtime::{Bytes, ThreadPool};
use parking_lot::Mutex;
use rustix::fs::{CWD, OFlags, RenameFlags};

use super::format::{self, Header, Meta, Unreadable};
use super::sums::{Blocks, BodySum, Summing, Sums, WHOLE_MAX};

/// Bodies up to this length are read with their header, checked, and kept in memory if they are requested often. Longer
/// ones are cheaper to send from their files.
pub const SMALL_BODY: u64 = SENDFILE_MIN - 1;

/// Bytes of a file that are read first.
const FIRST_READ: usize = 80 * 1024;

/// An entry whose file was opened.
pub struct Opened {
    /// The header of the file.
    pub header: Header,
    /// The body, if it is small.
    pub body: Option<Bytes>,
    /// Sums that the body is checked with, if it has one for each block.
    pub blocks: Option<Blocks>,
    /// The file.
    pub file: File,
}

/// Reason for which an entry cannot be used.
#[derive(Debug)]
pub enum OpenError {
    /// There is no file.
    Missing,
    /// The file was not written by Gale.
    Foreign,
    /// The file is not as it was written.
    Damaged(&'static str),
    /// An error of the disk.
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

/// Checks the bytes read so far; `more` reads on, up to a length.
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
            Err(Unreadable::Foreign) => return Err(OpenError::Foreign),
            Err(_) => return Err(OpenError::Damaged("is damaged")),
        }
    };
    let start = header.header_length as usize;
    if size != header.file_length() {
        return Err(OpenError::Damaged("has a wrong length"));
    }
    let mut body = None;
    if header.body_length <= SMALL_BODY {
        let end = start + header.body_length as usize;
        if bytes.len() < end {
            more(&file, &mut bytes, end)?;
        }
        let found = Bytes::copy_from_slice(&bytes[start..end]);
        if BodySum::Whole(crc32fast::hash(&found)) != header.body_sum {
            return Err(OpenError::Damaged("is damaged"));
        }
        body = Some(found);
    } else if header.body_length <= WHOLE_MAX {
        more(&file, &mut bytes, start + header.body_length as usize)?;
        if BodySum::Whole(crc32fast::hash(&bytes[start..])) != header.body_sum {
            return Err(OpenError::Damaged("is damaged"));
        }
    }
    let blocks = header.table().map(|place| read_table(&file, &header, place)).transpose()?;
    Ok(Opened { header, body, blocks, file })
}

/// Reads and checks the table of block sums.
fn read_table(file: &File, header: &Header, place: Range<u64>) -> Result<Blocks, OpenError> {
    let mut table = vec![0; (place.end - place.start) as usize];
    read_exact(file, &mut table, place.start)?;
    match BodySum::Table(crc32fast::hash(&table)) == header.body_sum {
        true => Ok(Blocks::new(header.header_length, header.body_length, &table)),
        false => Err(OpenError::Damaged("is damaged")),
    }
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

/// A complete file under its temporary name. Dropping it removes the file.
pub struct Unnamed {
    temporary: PathBuf,
    size: u64,
    is_named: bool,
}

impl Unnamed {
    fn new(temporary: PathBuf, size: u64) -> Unnamed {
        Unnamed { temporary, size, is_named: false }
    }

    /// Length of the file, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Renames the file to `path`. A file there that was not written by Gale, such as nginx's, stays.
    ///
    /// # Errors
    /// Those of the disk; the file is removed then.
    pub fn publish(mut self, path: &Path) -> io::Result<()> {
        match rustix::fs::renameat_with(CWD, &self.temporary, CWD, path, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.is_named = true;
                return Ok(());
            }
            Err(rustix::io::Errno::EXIST) if !is_ours(path)? => {
                return Err(io::Error::other("a file not written by Gale has its name"));
            }
            // Some file systems do not support the flag.
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
            remove_temporary(&self.temporary);
        }
    }
}

/// Writes an entry that is in memory.
///
/// # Errors
/// Those of the disk; the file is removed then.
pub fn write(path: &Path, meta: &Meta, body: &[Bytes], number: u32) -> io::Result<Unnamed> {
    let length = body.iter().map(|piece| piece.len() as u64).sum();
    let header_length = format::header_length(meta);
    let mut summing = Summing::new(header_length);
    body.iter().for_each(|piece| summing.update(piece));
    let sums = summing.finish();
    let header = format::encode(meta, header_length, length, sums.in_header());
    let (file, temporary) = create(path, number)?;
    let unnamed = Unnamed::new(temporary, header.len() as u64 + length + sums.table().len() as u64);
    write_all(&file, std::iter::once(&*header).chain(body.iter().map(|piece| &**piece)).chain([sums.table()]))?;
    Ok(unnamed)
}

fn write_all<'p>(mut file: &std::fs::File, pieces: impl Iterator<Item = &'p [u8]>) -> io::Result<()> {
    use std::io::Write;
    let mut slices: Vec<IoSlice<'_>> = pieces.filter(|piece| !piece.is_empty()).map(IoSlice::new).collect();
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

/// The time at which this process began to use caches, for comparison with times of files.
pub fn begun() -> SystemTime {
    static BEGUN: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);
    *BEGUN
}

/// The upper half of all numbers of this process's temporary files. Two processes may have the same by accident: then
/// files that one of them abandons are found later.
static OWN_NUMBERS: LazyLock<u32> = LazyLock::new(|| RandomState::new().hash_one(begun()) as u32 & 0xFFFF_0000);

/// Returns a number for the name of a temporary file.
pub fn new_number() -> u32 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    *OWN_NUMBERS | u32::from(NEXT.fetch_add(1, Relaxed))
}

/// True if the number of a temporary file is one of this process.
pub fn is_own_number(number: u32) -> bool {
    number & 0xFFFF_0000 == *OWN_NUMBERS
}

/// The temporary name of a file.
pub fn temporary(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number:010}"));
    name.into()
}

/// Temporary files whose removal has failed. At most [`LEFT_MAX`]: the loader removes others at the next start.
static LEFT: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Bound of the list of files to remove again: a disk that fails so often is not used for a while.
const LEFT_MAX: usize = 1024;

/// Removes a temporary file; may block. If that fails, the manager of the cache tries again.
pub fn remove_temporary(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => note_left(path.to_owned()),
        _ => {}
    }
}

/// Removes a temporary file in a pool. If that refuses or the removal fails, the manager of the cache tries again.
pub fn remove_temporary_in(pool: &ThreadPool, temporary: PathBuf) {
    let path = temporary.clone();
    if pool.detach(likely_device(&path).writes(), move || remove_temporary(&path)).is_err() {
        note_left(temporary);
    }
}

fn note_left(temporary: PathBuf) {
    let mut left = LEFT.lock();
    if left.len() < LEFT_MAX {
        left.push(temporary);
    }
}

/// `true` if temporary files in this directory could not be removed.
pub fn has_left(directory: &Path) -> bool {
    LEFT.lock().iter().any(|path| path.starts_with(directory))
}

/// Removes the temporary files in this directory that could not be removed before; may block.
pub fn remove_left(directory: &Path) {
    let left: Vec<PathBuf> = LEFT.lock().extract_if(.., |path| path.starts_with(directory)).collect();
    left.iter().for_each(|path| remove_temporary(path));
}

/// Creates a file beside its place, with missing directories.
///
/// # Errors
/// Those of the disk.
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

/// Stops reads from updating the access time of a file, so that a loop that reads it does not wait for the file
/// system's journal.
pub fn keep_access_time(file: &std::fs::File) {
    // Fails if the file has another owner: its reads then update the time.
    let _ = rustix::fs::fcntl_setfl(file, OFlags::NOATIME);
}

/// Completes a file after its body was written, with this length and these sums: writes the end, then the header.
///
/// # Errors
/// Those of the disk; the file is removed then.
pub fn complete(
    file: &File,
    temporary: PathBuf,
    meta: &Meta,
    header_length: u32,
    body_length: u64,
    sums: &Sums,
) -> io::Result<Unnamed> {
    let body_end = u64::from(header_length) + body_length;
    let unnamed = Unnamed::new(temporary, body_end + sums.table().len() as u64);
    write_at(file, sums.table(), body_end)?;
    write_at(file, &format::encode(meta, header_length, body_length, sums.in_header()), 0)?;
    Ok(unnamed)
}

fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// True if a file was written by Gale, or is empty or missing.
///
/// # Errors
/// Those of the disk.
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

/// Removes the file of an entry, if it was written by Gale.
pub fn remove(path: &Path) -> io::Result<()> {
    if !is_ours(path)? {
        return Ok(());
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The number of the entry in a file; `None` if the file is missing, unreadable, or not written by Gale.
///
/// # Errors
/// Those of the disk.
pub fn number_of(path: &Path) -> io::Result<Option<u64>> {
    match open(path) {
        Ok(opened) => Ok(Some(opened.header.meta.number)),
        Err(OpenError::Missing | OpenError::Foreign | OpenError::Damaged(_)) => Ok(None),
        Err(OpenError::Io(error)) => Err(error),
    }
}

/// A new header for a file whose body stays, after a 304.
pub enum Renewal {
    /// The header fits into the old one's place.
    InFile(Vec<u8>),
    /// It does not fit; a copy of the file has it.
    Copy(Unnamed),
}

/// Prepares a new header for an opened file.
///
/// # Errors
/// Those of the disk; `InvalidData` if the body has to be copied and is damaged.
pub fn prepare_renewal(path: &Path, opened: &Opened, meta: &Meta, number: u32) -> io::Result<Renewal> {
    let Opened { header, file, .. } = opened;
    let length = format::header_length(meta);
    if length <= header.header_length {
        return Ok(Renewal::InFile(format::encode(meta, header.header_length, header.body_length, header.body_sum)));
    }
    let (copy, temporary) = create(path, number)?;
    let mut unnamed = Unnamed::new(temporary, 0);
    // If this process ends here, the next one can recognise the file as Gale's.
    copy.write_all_at(format::MAGIC, 0)?;
    // A longer header moves the body's bytes into other blocks.
    let (mut before, mut after) = (Summing::new(header.header_length), Summing::new(length));
    let mut buffer = vec![0; 256 * 1024];
    let mut done = 0;
    while done < header.body_length {
        let count = buffer.len().min((header.body_length - done) as usize);
        read_exact(file, &mut buffer[..count], u64::from(header.header_length) + done)?;
        copy.write_all_at(&buffer[..count], u64::from(length) + done)?;
        before.update(&buffer[..count]);
        after.update(&buffer[..count]);
        done += count as u64;
    }
    if !before.finish().fit(header.body_sum) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the body is damaged"));
    }
    let sums = after.finish();
    copy.write_all_at(sums.table(), u64::from(length) + done)?;
    copy.write_all_at(&format::encode(meta, length, header.body_length, sums.in_header()), 0)?;
    unnamed.size = u64::from(length) + done + sums.table().len() as u64;
    Ok(Renewal::Copy(unnamed))
}

impl Renewal {
    /// Puts the header in place and returns the file's length. `None` if another process has removed or replaced the
    /// opened file.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn publish(self, path: &Path, opened: &Opened) -> io::Result<Option<u64>> {
        let named = match std::fs::File::options().write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            named => named?,
        };
        if rustix::fs::fstat(&named)?.st_ino != opened.file.metadata().inode {
            return Ok(None);
        }
        match self {
            Renewal::InFile(header) => {
                named.write_all_at(&header, 0)?;
                Ok(Some(opened.header.file_length()))
            }
            Renewal::Copy(copy) => {
                let size = copy.size();
                copy.publish(path)?;
                Ok(Some(size))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::BLOCK;

    /// True if a file can be opened and every block of its body is undamaged.
    fn is_right(path: &Path) -> bool {
        let Ok(Opened { header, blocks: Some(blocks), file, .. }) = open(path) else { return false };
        let (mut at, end) = (u64::from(header.header_length), u64::from(header.header_length) + header.body_length);
        while at < end {
            let block = blocks.block_at(at);
            let mut bytes = vec![0; (block.end - block.start) as usize];
            if read_exact(&file, &mut bytes, block.start).is_err() || !blocks.check(at, crc32fast::hash(&bytes)) {
                return false;
            }
            at = block.end;
        }
        blocks.are_checked()
    }

    #[test]
    fn a_file_that_has_gone_or_was_replaced_is_not_renewed() {
        let directory = std::env::temp_dir().join(format!("gale-store-renewal-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("0123456789abcdef0123456789abcdef");
        let meta = Meta { key: b"http://a/b".as_slice().into(), status: 200, ..Meta::default() };
        let longer = Meta { variant: vec![b'x'; 2000].into(), ..meta.clone() };
        let put = || write(&path, &meta, &[Bytes::from_static(b"body")], new_number()).unwrap().publish(&path).unwrap();
        for renewed in [&meta, &longer] {
            let prepare = || {
                put();
                let opened = open(&path).unwrap();
                (prepare_renewal(&path, &opened, renewed, new_number()).unwrap(), opened)
            };
            let (renewal, opened) = prepare();
            assert!(renewal.publish(&path, &opened).unwrap().is_some());
            let (renewal, opened) = prepare();
            put();
            assert_eq!(renewal.publish(&path, &opened).unwrap(), None);
            let (renewal, opened) = prepare();
            std::fs::remove_file(&path).unwrap();
            assert_eq!(renewal.publish(&path, &opened).unwrap(), None);
            assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "nothing is left of it");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn every_change_of_a_large_file_is_found_by_the_sum_of_its_block() {
        let directory = std::env::temp_dir().join(format!("gale-store-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("0123456789abcdef0123456789abcdef");
        let body: Vec<u8> = (0..WHOLE_MAX + 2 * BLOCK + 1000).map(|at| (at / 7) as u8).collect();
        let meta = Meta { key: b"http://a/b".as_slice().into(), status: 200, ..Meta::default() };
        write(&path, &meta, &[Bytes::from(body)], new_number()).unwrap().publish(&path).unwrap();
        assert!(is_right(&path));
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let length = file.metadata().unwrap().len();
        let boundaries = (0..=length).step_by(BLOCK as usize).flat_map(|at| [at.saturating_sub(1), at]);
        let places: Vec<u64> =
            (0..length).step_by(1009).chain(boundaries).chain(length - 32..length).filter(|&at| at < length).collect();
        for &at in &places {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << (at % 8)], at).unwrap();
            assert!(!is_right(&path), "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert!(is_right(&path));
        file.write_all_at(&[0], length).unwrap();
        assert!(!is_right(&path), "longer");
        for &at in places.iter().rev() {
            file.set_len(at).unwrap();
            assert!(!is_right(&path), "{at}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_temporary_file_that_cannot_be_removed_is_removed_later() {
        let directory = std::env::temp_dir().join(format!("gale-store-left-{}", std::process::id()));
        let (place, other) = (directory.join("place"), directory.join("other"));
        let path = temporary(&place.join("entry"), 7);
        // No file can be removed by this name as long as it is a directory.
        std::fs::create_dir_all(&path).unwrap();
        remove_temporary(&path);
        assert!(has_left(&place) && !has_left(&other));
        remove_left(&place);
        assert!(has_left(&place), "it is tried again");
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, "incomplete").unwrap();
        remove_left(&other);
        assert!(path.exists());
        remove_left(&place);
        assert!(!path.exists() && !has_left(&place));
        remove_temporary(&path);
        assert!(!has_left(&place), "it has gone already");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
