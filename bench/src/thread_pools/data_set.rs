//! data_set: files of 4 MiB with random bytes, more of them than fit into the server's memory; and a tree of small
//! ones.
//!
//! They are written once, can be dropped from memory before each run, and are removed at the end.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::Advice;

/// The size of one file of the article's data set.
pub const FILE_BYTES: u64 = 4 << 20;

/// Removed when dropped.
#[derive(Debug)]
pub struct DataSet {
    pub directory: PathBuf,
    pub files: usize,
}

impl DataSet {
    /// `directory/data/N` for as many files as make up so many bytes (two at least).
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

    /// Takes what can be taken out of the page cache.
    pub fn forget(&self) {
        for number in 0..self.files {
            if let Ok(file) = fs::File::open(self.directory.join(number.to_string())) {
                // Advice; a page that is in use stays.
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

/// Writes one file of random bytes and leaves nothing of it in memory.
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

/// Leaves nothing of a file in memory: what one server has read would be there for the next one.
pub fn forget(path: &Path) -> Result<(), String> {
    let forget = || Ok(rustix::fs::fadvise(fs::File::open(path)?, 0, None, Advice::DontNeed)?);
    forget().map_err(|error: io::Error| format!("{}: {error}", path.display()))
}

/// Writes a file and leaves nothing of it in memory.
fn write_cold(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(contents)?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// `directory/tree/AA/BBB/N`: so many files of a kibibyte, at most a hundred in a directory.
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

/// xorshift: the same numbers each time.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// For lengths that are multiples of eight.
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
    fn small_files_have_a_directory_for_each_hundred() {
        assert_eq!(tree_path(123_456), "tree/12/1234/123456");
    }
}
