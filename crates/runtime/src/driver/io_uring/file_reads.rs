//! File reads on the ring. Each has a slot with its memory and its file, until the kernel has finished with both.

use std::cell::RefCell;
use std::os::fd::AsRawFd;

use io_uring::{opcode, types};
use rustix::io::Errno;

use super::operation::{KIND_FILE_READ, user_data};
use super::ring::{Completion, Queues, Ring};
use crate::driver::file_read::{FileRead, FileReadEnd, FileReading, file_reading};
use crate::executor::slots::{Key, Slots};

/// Reads in flight per loop: more than a disk does at once. A read cannot be cancelled, so the limit is here and not
/// with its waiter.
const IN_FLIGHT_MAX: usize = 256;

pub(super) struct FileReads {
    /// A read without an end was abandoned.
    reads: RefCell<Slots<(FileRead, Option<FileReadEnd>)>>,
    /// Reads whose entries are made when the turn ends.
    begun: RefCell<Vec<Key>>,
}

impl FileReads {
    pub fn new() -> Self {
        FileReads { reads: RefCell::new(Slots::new()), begun: RefCell::new(Vec::new()) }
    }

    /// True if all remaining reads were abandoned.
    pub fn all_given_up(&self) -> bool {
        let given_up = self.given_up();
        self.reads.borrow().len() == given_up
    }

    /// Begins a read, or gives it back if too many are in flight.
    pub fn begin(&self, read: FileRead) -> Result<FileReading, FileRead> {
        let mut reads = self.reads.borrow_mut();
        if reads.len() >= IN_FLIGHT_MAX {
            return Err(read);
        }
        let (reading, end) = file_reading();
        self.begun.borrow_mut().push(reads.insert((read, Some(end))));
        Ok(reading)
    }

    pub fn make_entries(&self, ring: &mut Ring<impl Queues>) {
        let mut reads = self.reads.borrow_mut();
        for key in self.begun.borrow_mut().drain(..) {
            let (read, _) = reads.get_mut(key).expect("a slot stays until its read is done");
            let descriptor = types::Fd(read.source.descriptor().as_raw_fd());
            let into = &mut read.memory[read.into.clone()];
            // Pieces are far below 4 GiB.
            let entry = opcode::Read::new(descriptor, into.as_mut_ptr(), into.len() as u32).offset(read.offset);
            // SAFETY: descriptor and memory belong to the slot, which stays until the completion; the bytes are on the
            // heap, so they do not move with it.
            unsafe { ring.push(&entry.build().user_data(user_data(KIND_FILE_READ, key))) };
        }
    }

    pub fn handle_completion(&self, key: Key, completion: &Completion) {
        let Some((mut read, end)) = self.reads.borrow_mut().remove(key) else { return };
        let result = usize::try_from(completion.result).map_err(|_| match completion.was_refused() {
            // A pool does it without memory of the ring.
            true => Errno::AGAIN,
            false => Errno::from_raw_os_error(-completion.result),
        });
        read.source.handle_end(result.is_ok());
        drop(read.source);
        if let Some(end) = end {
            end.finish((read.memory, result));
        }
    }

    /// Abandons the reads in flight, whose completions may be lost: their waiters are released, and a pool repeats
    /// them. Their memory stays until the kernel completes them after all; until then each counts towards the limit of
    /// reads in flight.
    pub fn give_up_in_flight(&self) {
        let mut given_up = Vec::new();
        self.reads.borrow_mut().for_each(|key, (read, end)| {
            if !self.begun.borrow().contains(&key) {
                read.source.handle_end(false);
                given_up.push(end.take());
            }
        });
        drop(given_up);
    }

    /// Number of abandoned reads.
    pub fn given_up(&self) -> usize {
        let mut count = 0;
        self.reads.borrow_mut().for_each(|_, (_, end)| count += usize::from(end.is_none()));
        count
    }

    /// Cancels the reads that were not submitted, since no turn will submit them.
    pub fn give_up_begun(&self) {
        for key in self.begun.take() {
            let given_up = self.reads.borrow_mut().remove(key);
            drop(given_up);
        }
    }

    /// Leaks the memory of the remaining reads: the ring is closed while the kernel may still write to it.
    pub fn forget_memory(&self) {
        self.reads.borrow_mut().for_each(|_, (read, _)| std::mem::forget(std::mem::take(&mut read.memory)));
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::super::IoUring;
    use super::*;
    use crate::driver::file_read::ReadSource;
    use crate::driver::{Driver, FileDriver, RingOptions};
    use crate::memory::read_memory::ReadMemory;

    /// A pipe, counted by its owners until its read has ended.
    struct Pipe(Rc<OwnedFd>, Option<Rc<OwnedFd>>);

    impl ReadSource for Pipe {
        fn descriptor(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn handle_end(&mut self, _is_done: bool) {
            self.1 = None;
        }
    }

    /// A driver; `None` where the kernel gives no ring.
    fn driver() -> Option<IoUring> {
        let inbox = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
        let driver = IoUring::new(&RingOptions::default(), false, 64, inbox.as_fd());
        driver.inspect_err(|_| crate::skips::skip("no io_uring here")).ok()
    }

    /// A read that never completes, as on a hung disk: from a pipe without a writer.
    fn hanging_read(from: &Rc<OwnedFd>) -> FileRead {
        let source = Pipe(Rc::clone(from), Some(Rc::clone(from)));
        FileRead { source: Box::new(source), memory: ReadMemory::new(16), into: 0..16, offset: 0 }
    }

    #[test]
    fn a_read_in_flight_when_its_loop_ends_is_over_before_its_memory_goes() {
        let Some(driver) = driver() else { return };
        let (from, _to) = rustix::pipe::pipe().expect("descriptors");
        let from = Rc::new(from);
        let submitted = driver.read_file(hanging_read(&from)).ok().expect("room");
        driver.wait(Some(Duration::ZERO)).expect("a turn");
        let begun = driver.read_file(hanging_read(&from)).ok().expect("room");
        drop(driver);
        let mut cx = Context::from_waker(Waker::noop());
        // The memory is returned with the completion; a read that was never submitted has none to wait for.
        for (reading, bytes) in [(submitted, 16), (begun, 0)] {
            let Poll::Ready((memory, result)) = pin!(reading).poll(&mut cx) else { panic!("it still waits") };
            assert_eq!((memory.len(), result), (bytes, Err(Errno::CANCELED)));
        }
    }

    #[test]
    fn abandoned_read_counts_until_it_is_done() {
        let Some(driver) = driver() else { return };
        let (from, _to) = rustix::pipe::pipe().expect("descriptors");
        let from = Rc::new(from);
        let begin = || driver.read_file(hanging_read(&from)).ok().expect("room");
        let readings: Vec<FileReading> = (0..8).map(|_| begin()).collect();
        driver.wait(Some(Duration::ZERO)).expect("a turn");
        drop(readings);
        let in_flight = || (Rc::strong_count(&from) - 1) / 2;
        assert_eq!(in_flight(), 8);
        drop(driver);
        assert_eq!(in_flight(), 0);
    }
}
