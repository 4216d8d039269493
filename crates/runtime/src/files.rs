//! Files: a placeholder for the next commit's ladder; opened descriptors only.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An open file.
#[derive(Clone, Debug)]
pub struct File {
    descriptor: Arc<OwnedFd>,
}

impl File {
    /// Takes an open file.
    pub fn from_std(file: std::fs::File) -> Self {
        File {
            descriptor: Arc::new(file.into()),
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
