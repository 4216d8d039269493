//! A file read that a driver does while the loop goes on, and the future of its result.
//!
//! The driver owns the memory until the read has ended, even if the future was dropped. Any thread may wait.

use std::future::Future;
use std::mem;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::environment::Environment;
use crate::memory::read_memory::ReadMemory;

/// A read for [`begin_file_read`].
pub struct FileRead {
    /// File to read from.
    pub source: Box<dyn ReadSource>,
    /// Memory, returned with the result.
    pub memory: ReadMemory,
    /// The part of the memory that is read into.
    pub into: Range<usize>,
    /// Offset in the file.
    pub offset: u64,
}

/// File of a read. The driver owns it until the kernel has finished with the read, even if the waiter has left.
pub trait ReadSource {
    /// Descriptor to read from, always the same.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// The read has ended: with bytes, or else it was refused or abandoned. An abandoned read may still end with bytes.
    fn handle_end(&mut self, is_done: bool);
}

/// Begins a read with the ring of the current loop. `None` outside of a loop, if the loop has no ring, or if too many
/// reads are in flight.
pub fn begin_file_read(read: FileRead) -> Option<FileReading> {
    Environment::try_with(|environment| environment.driver.read_file(read).ok()).flatten()
}

/// The memory and the number of bytes read; empty memory if the driver could not return it.
type Outcome = (ReadMemory, Result<usize, Errno>);

/// The waiter's end.
pub struct FileReading(Arc<Mutex<State>>);

/// The driver's end. Dropped without a result, it reports that the read was cancelled.
pub(crate) struct FileReadEnd(Arc<Mutex<State>>);

enum State {
    Waiting(Option<Waker>),
    Done(Outcome),
    Taken,
}

/// The two ends of a new read.
pub(crate) fn file_reading() -> (FileReading, FileReadEnd) {
    let state = Arc::new(Mutex::new(State::Waiting(None)));
    (FileReading(Arc::clone(&state)), FileReadEnd(state))
}

impl FileReadEnd {
    pub fn finish(&self, outcome: Outcome) {
        let mut state = self.0.lock();
        if let State::Waiting(waker) = &mut *state {
            let waker = waker.take();
            *state = State::Done(outcome);
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for FileReadEnd {
    fn drop(&mut self) {
        self.finish((ReadMemory::default(), Err(Errno::CANCELED)));
    }
}

impl Future for FileReading {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.0.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Done(outcome) => Poll::Ready(outcome),
            State::Waiting(_) => {
                *state = State::Waiting(Some(cx.waker().clone()));
                Poll::Pending
            }
            State::Taken => panic!("polled after it was ready"),
        }
    }
}
