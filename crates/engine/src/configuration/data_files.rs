//! Data files that directives name, read after the whole text was read.

use std::io;
use std::path::PathBuf;

use gale_config::Diagnostic;
use gale_process::{DataMapping, Resources};

/// Receives the contents of a file or an error; returns a fault of the contents.
type Take = Box<dyn FnOnce(io::Result<DataMapping>) -> Result<(), Diagnostic>>;

#[derive(Default)]
pub(super) struct DataFiles(Vec<(PathBuf, Take)>);

impl DataFiles {
    /// See [`Builder::data_file`](super::Builder::data_file).
    pub fn want(&mut self, path: PathBuf, take: Take) {
        self.0.push((path, take));
    }

    /// Reads all files; returns their faults.
    pub fn read(&mut self, resources: &mut dyn Resources) -> Vec<Diagnostic> {
        let read = |(path, take): (PathBuf, Take)| take(resources.data_file(&path).and_then(|file| file.map())).err();
        std::mem::take(&mut self.0).into_iter().filter_map(read).collect()
    }
}
