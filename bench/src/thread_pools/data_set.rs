//! data_set: files of 4 MiB with random bytes, more than the server's memory holds; and a tree of small files.
//!
//! They are written once, can be evicted from memory before each run, and are removed at the end.

use std::ffi::c_void;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};

/// Size of a file in the article's data set.
pub const FILE_BYTES: u64 = 4 << 20;

/// Files of the data set. Removed on drop.
#[derive(Debug)]
pub struct DataSet {
    pub directory: PathBuf,
    pub files: usize,
}

impl DataSet {
    /// Writes `directory/data/N`, with a total of `bytes` bytes in at least two files.
    pub fn write(directory: &Path, bytes: u64) -> Result<DataSet, String> {
        let files = usize::try_from((bytes / FILE_BYTES).max(2)).unwrap_or(usize::MAX);
        let set = DataSet { directory: directory.join("data"), files };
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut block = vec![0; FILE_BYTES as usize];
        let mut write = || -> io::Result<()> {
            fs::create_dir_all(&set.directory)?;
            for number in 0..files {
                random.fill(&mut block);
                write_cold(&set.directory.join(number.to_string()), &block)?;
                if number % 64 == 63 {
                    eprintln!("  {} of {files} files of 4 MiB written", number + 1);
                }
            }
            Ok(())
        };
        write().map_err(|error| format!("{}: {error}", set.directory.display()))?;
        Ok(set)
    }

    /// Evicts the files from the page cache, as far as possible.
    pub fn forget(&self) {
        for number in 0..self.files {
            if let Ok(file) = fs::File::open(self.directory.join(number.to_string())) {
                // Only advice: pages in use stay.
                let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
            }
        }
    }
}

impl Drop for DataSet {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Writes a file of random bytes and evicts it from memory.
pub fn write_large(path: &Path, bytes: u64) -> Result<(), String> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut block = vec![0; FILE_BYTES as usize];
    let mut write = || -> io::Result<()> {
        let mut file = fs::File::create(path)?;
        for _ in 0..bytes.div_ceil(FILE_BYTES) {
            random.fill(&mut block);
            file.write_all(&block)?;
        }
        file.sync_data()?;
        file.set_len(bytes)
    };
    write().map_err(|error| format!("{}: {error}", path.display()))
}

/// Evicts a file from memory. Otherwise the next server would find data read by the previous one.
pub fn forget(path: &Path) -> Result<(), String> {
    let forget = || Ok(rustix::fs::fadvise(fs::File::open(path)?, 0, None, Advice::DontNeed)?);
    forget().map_err(|error: io::Error| format!("{}: {error}", path.display()))
}

/// Returns the share of these files' pages in memory. The kernel reports it to root and to the owner of a file.
pub fn share_in_memory(paths: impl IntoIterator<Item = PathBuf>) -> Result<f64, String> {
    let (mut resident, mut all) = (0, 0);
    for path in paths {
        let pages = Mapping::of(&path).and_then(|mapping| mapping.pages());
        let pages = pages.map_err(|error| format!("{}: {error}", path.display()))?;
        resident += pages.iter().filter(|&&page| page & 1 != 0).count();
        all += pages.len();
    }
    Ok(resident as f64 / all.max(1) as f64)
}

/// Locks files in memory until the result is dropped. Only root may lock more than some MiB.
pub fn hold_in_memory(paths: impl IntoIterator<Item = PathBuf>) -> io::Result<Vec<Mapping>> {
    let hold = |path: PathBuf| {
        let mapping = Mapping::of(&path)?;
        // SAFETY: the pages are those of a live mapping; locking them changes nothing that a reader could see.
        unsafe { rustix::mm::mlock(mapping.start, mapping.length) }?;
        Ok(mapping)
    };
    paths.into_iter().map(hold).collect()
}

/// A mapped file, whose contents are not read.
#[derive(Debug)]
pub struct Mapping {
    start: *mut c_void,
    length: usize,
}

impl Mapping {
    /// Maps a file, which must not be empty.
    fn of(path: &Path) -> io::Result<Mapping> {
        let file = fs::File::open(path)?;
        let length = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        // SAFETY: the kernel chooses an unused address.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, &file, 0) }?;
        Ok(Mapping { start, length })
    }

    /// Returns a byte for each page; its lowest bit is set if the page is in memory. (mincore(2))
    fn pages(&self) -> io::Result<Vec<u8>> {
        let mut pages = vec![0u8; self.length.div_ceil(rustix::param::page_size())];
        // SAFETY: the mapping is live, and `pages` has a byte for each of its pages.
        match unsafe { libc::mincore(self.start, self.length, pages.as_mut_ptr()) } {
            0 => Ok(pages),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: no reference into the mapping exists.
        let _ = unsafe { rustix::mm::munmap(self.start, self.length) };
    }
}

/// Writes a file and evicts it from memory.
pub(super) fn write_cold(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(contents)?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// Writes `directory/tree/AA/BBB/N`: files of a KiB, at most a hundred per directory.
pub fn write_tree(directory: &Path, files: usize) -> Result<(), String> {
    let write = || -> io::Result<()> {
        for number in 0..files {
            let path = directory.join(tree_path(number));
            if number % 100 == 0 {
                fs::create_dir_all(path.parent().expect("below the directory"))?;
            }
            fs::write(&path, [b'x'; 1024])?;
            if number % 50_000 == 49_999 {
                eprintln!("  {} of {files} small files written", number + 1);
            }
        }
        Ok(())
    };
    write().map_err(|error| format!("{}: {error}", directory.display()))
}

pub fn tree_path(number: usize) -> String {
    format!("tree/{}/{}/{number}", number / 10_000, number / 100)
}

/// xorshift generator with a fixed sequence.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Fills bytes, whose number must be a multiple of eight.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&self.next().to_le_bytes()));
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_set_is_written_and_removed() {
        let directory = std::env::temp_dir().join(format!("gale-bench-data-{}", std::process::id()));
        let set = DataSet::write(&directory, FILE_BYTES).unwrap();
        assert_eq!(set.files, 2);
        assert_eq!(fs::metadata(set.directory.join("1")).unwrap().len(), FILE_BYTES);
        set.forget();
        drop(set);
        assert!(!directory.join("data").exists());
        let _ = fs::remove_dir(directory);
    }

    #[test]
    fn pages_of_a_file_that_was_just_written_are_in_memory() {
        let path = std::env::temp_dir().join(format!("gale-bench-pages-{}", std::process::id()));
        fs::write(&path, vec![1; 10_000]).unwrap();
        let pages = Mapping::of(&path).unwrap().pages().unwrap();
        assert_eq!(pages.len(), 10_000usize.div_ceil(rustix::param::page_size()));
        assert_eq!(share_in_memory([path.clone()]), Ok(1.0));
        fs::remove_file(&path).unwrap();
        assert!(share_in_memory([path]).is_err());
    }

    #[test]
    fn small_files_have_a_directory_for_each_hundred() {
        assert_eq!(tree_path(123_456), "tree/12/1234/123456");
    }
}
