//! Open files, and how pieces of them are read and sent. Nothing here knows a request: `request/files/` asks, with what
//! the location of one says.

mod client_rate;
pub mod delivery;
pub mod open_files;
pub mod placing;
pub mod reader;

use std::io;

use gale_runtime::File;

/// A piece of an open file.
#[derive(Clone, Debug)]
pub struct FilePiece {
    /// The file.
    pub file: File,
    /// Where the piece begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
}

impl FilePiece {
    /// Notes that so many bytes of the piece have been dealt with. None at all means that the file has become shorter
    /// than it was when its length was announced.
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
