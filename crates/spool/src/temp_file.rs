//! Files of spools: their places, names and removal.
//!
//! An existing name is skipped, never opened. Only this user may access the file (mode 0600) and the directories
//! created for it (0700). All directory operations run on a pool's threads.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gale_files::{File, FileError, OpenFlags, create_directories_blocking, likely_device, open_blocking};
use gale_runtime::ThreadPool;
use smallvec::SmallVec;

/// Names that are tried. They are random, so a second attempt is rare.
const NAMES_MAX: u32 = 100;

/// A directory for temporary files, from `client_body_temp_path PATH [LEVEL [LEVEL [LEVEL]]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TempPath {
    /// The directory.
    pub path: Arc<Path>,
    /// Number of characters of the file's number in each directory level.
    pub levels: SmallVec<[u8; 3]>,
}

/// Place of a spool's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpoolPath {
    /// In a directory for temporary files. Its name is removed once it is open, so nothing is left behind.
    Unnamed(TempPath),
    /// In a directory for temporary files, with a name that is removed with the spool unless it is kept.
    Named(TempPath),
    /// Beside the file that it will become, as `NAME.0000012345`, and so on the same file system whatever is mounted.
    /// The name is removed with the spool unless it is kept or changed.
    Beside(PathBuf),
}

impl SpoolPath {
    /// Directory of the files, or of their directory levels.
    pub(super) fn directory(&self) -> &Path {
        match self {
            SpoolPath::Unnamed(temp_path) | SpoolPath::Named(temp_path) => &temp_path.path,
            SpoolPath::Beside(path) => path.parent().unwrap_or(Path::new("/")),
        }
    }

    /// Path of the file with this number, in ten digits as in nginx. Directory levels are named by the last digits:
    /// with levels 1 and 2, number 12345 is `PATH/5/34/0000012345`.
    fn path(&self, number: u32) -> PathBuf {
        let digits = format!("{number:010}");
        match self {
            SpoolPath::Unnamed(temp_path) | SpoolPath::Named(temp_path) => {
                let mut path = temp_path.path.to_path_buf();
                let mut end = digits.len();
                for &level in &temp_path.levels {
                    let start = end.saturating_sub(level.into());
                    path.push(&digits[start..end]);
                    end = start;
                }
                path.push(digits);
                path
            }
            SpoolPath::Beside(path) => {
                let mut name = OsString::from(path);
                name.push(".");
                name.push(digits);
                name.into()
            }
        }
    }
}

/// A new file, open for reading and writing.
pub(super) struct TempFile {
    pub file: File,
    pub path: Arc<Path>,
    /// Present while the file has a name.
    pub name: Option<TempName>,
}

impl TempFile {
    /// Creates a file. If this future is dropped before it is ready, it leaves none. Errors: those of open(2),
    /// mkdir(2), unlink(2) and the pool.
    pub async fn create(place: &SpoolPath, pool: &ThreadPool) -> Result<TempFile, FileError> {
        // 32 bits, because the name has ten digits.
        let number = gale_runtime::random_u64() as u32;
        let directory = place.directory().to_owned();
        let line = likely_device(&directory).writes();
        let create = {
            let (place, pool) = (place.clone(), pool.clone());
            move || create_blocking(&place, number, &pool)
        };
        let created = pool.run_when_there_is_room(line, create).await;
        created.map_err(|refused| FileError::new("open", directory, refused))?
    }
}

/// Creates a file that other users cannot open.
fn create_blocking(place: &SpoolPath, number: u32, pool: &ThreadPool) -> Result<TempFile, FileError> {
    let new = OpenFlags { write: true, create: Some(0o600), exclusive: true, no_access_time: true, ..OpenFlags::READ };
    let mut attempts = 0;
    let mut made_directories = false;
    loop {
        let path: Arc<Path> = place.path(number.wrapping_add(attempts)).into();
        match open_blocking(&path, new) {
            Ok(file) => {
                // Created at once, because the file may be unwanted by the time it is open.
                let name = TempName { path: Arc::clone(&path), pool: pool.clone(), is_kept: false };
                let name = match place {
                    SpoolPath::Named(_) | SpoolPath::Beside(_) => Some(name),
                    SpoolPath::Unnamed(_) => name.remove_blocking().map(|()| None)?,
                };
                return Ok(TempFile { file, path, name });
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < NAMES_MAX => attempts += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !made_directories => {
                // Directory levels are created when they are first needed.
                create_directories_blocking(path.parent().expect("it lies in a directory"), 0o700)?;
                made_directories = true;
            }
            Err(error) => return Err(FileError::new("open", path, error)),
        }
    }
}

/// Name of a file, which a thread removes on drop.
#[derive(Debug)]
pub(super) struct TempName {
    path: Arc<Path>,
    pool: ThreadPool,
    is_kept: bool,
}

impl TempName {
    /// Keeps the name, or the one that it was changed to.
    pub fn keep(mut self) {
        self.is_kept = true;
    }

    fn remove_blocking(mut self) -> Result<(), FileError> {
        self.is_kept = true;
        std::fs::remove_file(&self.path).map_err(|error| FileError::new("unlink", Arc::clone(&self.path), error))
    }
}

impl Drop for TempName {
    fn drop(&mut self) {
        if !self.is_kept {
            let path = Arc::clone(&self.path);
            // If the pool refuses the task, the file is left behind.
            let _ = self.pool.detach(likely_device(&path).writes(), move || drop(std::fs::remove_file(&path)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use gale_runtime::default_pool;

    use super::*;
    use crate::scratch::Scratch;

    fn unnamed(directory: &Scratch, levels: &[u8]) -> SpoolPath {
        SpoolPath::Unnamed(TempPath { path: directory.path().into(), levels: levels.into() })
    }

    #[test]
    fn levels_take_their_names_from_the_end_of_the_number() {
        let path = |levels: &[u8]| {
            let temp_path = TempPath { path: Path::new("/t").into(), levels: levels.into() };
            SpoolPath::Unnamed(temp_path).path(12345)
        };
        assert_eq!(path(&[]), Path::new("/t/0000012345"));
        assert_eq!(path(&[1, 2]), Path::new("/t/5/34/0000012345"));
        assert_eq!(path(&[3, 3, 3]), Path::new("/t/345/012/000/0000012345"));
        assert_eq!(SpoolPath::Beside("/cache/entry".into()).path(12345), Path::new("/cache/entry.0000012345"));
    }

    #[test]
    fn a_name_that_is_taken_is_passed_over_and_never_opened() {
        let directory = Scratch::new();
        let place = unnamed(&directory, &[]);
        let taken = place.path(7);
        std::fs::write(&taken, "precious").unwrap();
        let created = create_blocking(&place, 7, &default_pool()).unwrap();
        assert_eq!(*created.path, *place.path(8));
        assert_eq!(std::fs::read(&taken).unwrap(), b"precious");
        assert!(created.name.is_none() && !created.path.exists());
    }

    #[test]
    fn directories_are_for_the_worker_alone() {
        let directory = Scratch::new();
        create_blocking(&unnamed(&directory, &[1, 2]), 12345, &default_pool()).unwrap();
        let made = std::fs::metadata(directory.path().join("5")).unwrap();
        assert_eq!(made.permissions().mode() & 0o777, 0o700);
    }
}
