//! Open files, and how pieces of them are read and sent. Nothing here knows a request: `request/files/` passes the
//! settings of its location.

mod client_rate;
pub mod delivery;
pub mod open_files;
pub mod placing;
pub mod reader;

use std::io;

use gale_files::File;

/// A piece of an open file.
#[derive(Clone, Debug)]
pub struct FilePiece {
    /// The file.
    pub file: File,
    /// Beginning of the piece, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl FilePiece {
    /// Moves the beginning of the piece forward by `count` bytes. A count of 0 is an error: the file has become shorter
    /// since its length was announced.
    pub fn advance(&mut self, count: u64) -> io::Result<()> {
        if count == 0 {
            let message = format!("{} was truncated at {} while it was being sent", self.name(), self.offset);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
        }
        self.offset += count;
        self.length -= count;
        Ok(())
    }

    /// The file's name for messages, quoted.
    pub fn name(&self) -> String {
        self.file.path().map_or_else(|| "a file".to_owned(), |path| format!("\"{}\"", path.display()))
    }
}
