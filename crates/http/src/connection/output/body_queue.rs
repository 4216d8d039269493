//! The queue of one response among several on a connection: bytes in hand, behind them pieces of files, and the items
//! behind these.
//!
//! The caller frames the bytes and takes them when there is room, so that a response that waits for a disk holds
//! nothing of the shared output. The queue sends nothing itself and knows no framing.

use std::task::{Context, Poll};
use std::time::Duration;

use gale_runtime::Output;

use super::COPIED_MAX;
use super::items::Items;
use crate::files::delivery::FileOptions;
use crate::request::body::{BodyError, BodyItem};

/// See the file's head.
#[derive(Default)]
pub(in crate::connection) struct BodyQueue {
    output: Output,
    items: Items,
}

impl BodyQueue {
    /// Sets the delivery of files. `sendfile` is off, since frames need the bytes.
    pub fn set_files(&mut self, files: &FileOptions) {
        self.items.set_files(FileOptions { sendfile: false, ..files.clone() });
    }

    /// Queues the bytes or the piece of a file that an item stands for.
    ///
    /// # Errors
    /// No memory for a copy: nothing is queued.
    pub fn push(&mut self, item: BodyItem) -> Result<(), BodyError> {
        match item {
            item if !self.items.is_empty() => self.items.push(item),
            BodyItem::Bytes(bytes) if bytes.len() <= COPIED_MAX => self.output.append(&bytes)?,
            BodyItem::Bytes(bytes) => self.output.push(bytes),
            item @ BodyItem::File(_) => self.items.push(item),
            BodyItem::Flush | BodyItem::Trailers(_) => {}
            BodyItem::Subrequest(_) => unreachable!("`postpone` takes them out"),
        }
        Ok(())
    }

    /// Number of bytes that it stands for.
    pub fn length(&self) -> u64 {
        self.output.len_bytes() as u64 + self.items.length()
    }

    /// Total wait for a disk with nothing in hand.
    pub fn disk_waited(&self) -> Duration {
        self.items.disk_waited()
    }

    /// Returns `true` if there is nothing but bytes in hand.
    pub fn is_in_hand(&self) -> bool {
        self.items.is_empty()
    }

    /// Number of bytes in hand.
    pub fn bytes_in_hand(&self) -> usize {
        self.output.len_bytes()
    }

    /// Returns `true` while a piece of a file is being read.
    pub fn is_reading(&self) -> bool {
        self.items.is_reading()
    }

    /// Takes pieces in hand that are in memory, and begins to read the next one.
    ///
    /// # Errors
    /// The file's.
    pub fn fill(&mut self) -> Result<(), BodyError> {
        let filled = self.items.fill(&mut self.output);
        filled.map_err(|error| BodyError::of_file(self.items.first_name(), error))
    }

    /// Takes a piece in hand that was read.
    ///
    /// # Errors
    /// The file's.
    pub fn poll_reading(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        let polled = self.items.poll_reading(&mut self.output, context);
        polled.map_err(|error| BodyError::of_file(self.items.first_name(), error))
    }

    /// Appends the first `count` bytes in hand to `frames`.
    pub fn copy_to(&mut self, count: usize, frames: &mut Vec<u8>) {
        let mut left = count;
        for chunk in self.output.chunks() {
            let length = left.min(chunk.len());
            frames.extend_from_slice(&chunk[..length]);
            left -= length;
            if left == 0 {
                break;
            }
        }
        self.output.consume(count);
    }

    /// Moves the first `count` bytes in hand to the end of `output`.
    pub fn move_to(&mut self, count: usize, output: &mut Output) {
        self.output.move_to(count, output);
    }

    /// Forgets everything, and gives up a read that is under way.
    pub fn clear(&mut self) {
        self.output.clear();
        self.items.clear();
    }
}
