//! Reads of files on the ring. Each has a slot with its memory and its file, until the kernel is done with both.

use std::cell::RefCell;
use std::os::fd::AsRawFd;

use io_uring::{opcode, types};
use rustix::io::Errno;

use super::operation::{KIND_FILE_READ, user_data};
use super::ring::{Completion, Ring};
use crate::driver::file_read::{FileRead, FileReadEnd, FileReading, file_reading};
use crate::slots::{Key, Slots};

/// Reads in flight per loop: more than a disk does at once. Nothing can break one off, so they are bounded here and not by
/// who waits for them.
const IN_FLIGHT_MAX: usize = 256;

pub(super) struct FileReads {
    reads: RefCell<Slots<(FileRead, FileReadEnd)>>,
    /// Whose entries are made when the turn ends.
    begun: RefCell<Vec<Key>>,
}

impl FileReads {
    pub fn new() -> Self {
        FileReads { reads: RefCell::new(Slots::new()), begun: RefCell::new(Vec::new()) }
    }

    pub fn is_empty(&self) -> bool {
        self.reads.borrow().len() == 0
    }

    /// Gives the read back if there are too many.
    pub fn begin(&self, read: FileRead) -> Result<FileReading, FileRead> {
        let mut reads = self.reads.borrow_mut();
        if reads.len() >= IN_FLIGHT_MAX {
            return Err(read);
        }
        let (reading, end) = file_reading();
        self.begun.borrow_mut().push(reads.insert((read, end)));
        Ok(reading)
    }

    pub fn make_entries(&self, ring: &mut Ring) {
        let mut reads = self.reads.borrow_mut();
        for key in self.begun.borrow_mut().drain(..) {
            let (read, _) = reads.get_mut(key).expect("a slot stays until its read is done");
            let descriptor = types::Fd(match read.is_direct {
                true => read.file.direct().expect("it was opened before").as_raw_fd(),
                false => std::os::fd::AsFd::as_fd(&read.file).as_raw_fd(),
            });
            let into = &mut read.memory[read.into.clone()];
            // Pieces are far below 4 GiB.
            let entry = opcode::Read::new(descriptor, into.as_mut_ptr(), into.len() as u32).offset(read.offset);
            // SAFETY: descriptor and memory belong to the slot, which stays until the completion; the memory is a box, so it
            // does not move with the slot.
            unsafe { ring.push(&entry.build().user_data(user_data(KIND_FILE_READ, key))) };
        }
    }

    pub fn handle_completion(&self, key: Key, completion: &Completion) {
        let Some((read, end)) = self.reads.borrow_mut().remove(key) else { return };
        let result = usize::try_from(completion.result).map_err(|_| Errno::from_raw_os_error(-completion.result));
        end.finish((read.memory, result));
    }

    /// The ring ends while the kernel may still write.
    pub fn forget_memory(&self) {
        self.reads.borrow_mut().for_each(|_, (read, _)| std::mem::forget(std::mem::take(&mut read.memory)));
    }
}
