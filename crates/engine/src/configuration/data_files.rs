//! Files of data that directives name, which are read when all of the text is known.

use std::io;
use std::path::PathBuf;

use gale_config::Diagnostic;
use gale_process::{DataMapping, Resources};

/// Takes what is in a file, or what has failed; the error is what is wrong with it.
type Take = Box<dyn FnOnce(io::Result<DataMapping>) -> Result<(), Diagnostic>>;

/// The files asked for so far.
#[derive(Default)]
pub(super) struct DataFiles(Vec<(PathBuf, Take)>);

impl DataFiles {
    /// See [`Builder::data_file`](super::Builder::data_file).
    pub fn want(&mut self, path: PathBuf, take: Take) {
        self.0.push((path, take));
    }

    /// Reads all of them; returns what is wrong with them.
    pub fn read(&mut self, resources: &mut dyn Resources) -> Vec<Diagnostic> {
        let read = |(path, take): (PathBuf, Take)| take(resources.data_file(&path).and_then(|file| file.map())).err();
        std::mem::take(&mut self.0).into_iter().filter_map(read).collect()
    }
}
