//! A failed file operation: the call, the path and the error.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use gale_base::os_error::OsErrorText;

/// A failed file operation, displayed like nginx does: `pwrite() "/tmp/1" failed (28: No space left on device)`. Clones
/// serve several recipients.
#[derive(Clone, Debug)]
pub struct FileError {
    call: &'static str,
    path: Arc<Path>,
    to: Option<Arc<Path>>,
    error: Arc<io::Error>,
}

impl FileError {
    /// From the call, its path and its error.
    pub fn new(call: &'static str, path: impl Into<Arc<Path>>, error: impl Into<io::Error>) -> Self {
        FileError { call, path: path.into(), to: None, error: Arc::new(error.into()) }
    }

    /// Adds the second path of the call.
    pub fn with_target(self, to: impl Into<Arc<Path>>) -> Self {
        FileError { to: Some(to.into()), ..self }
    }

    /// The error of the system or the pool.
    pub fn error(&self) -> &io::Error {
        &self.error
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True if there is no room: the disk is full (ENOSPC), or a quota is used up (EDQUOT).
    pub fn is_out_of_space(&self) -> bool {
        matches!(self.error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}() \"{}\"", self.call, self.path.display())?;
        if let Some(to) = &self.to {
            write!(f, " to \"{}\"", to.display())?;
        }
        write!(f, " failed {}", OsErrorText(&self.error))
    }
}

impl Error for FileError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.error)
    }
}
