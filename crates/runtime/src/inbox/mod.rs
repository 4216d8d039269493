//! The inbox of a loop, through which other threads reach it: calls (bounded) and wakes of its tasks.
//!
//! The doorbell decides whether the loop must be woken (`inbox/doorbell.rs`). The bell is an eventfd, which the driver
//! watches. A write is an edge for epoll even if it happens before the wait begins, so it is never lost; the eventfd is
//! never read.

mod doorbell;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, Ordering::SeqCst};

use parking_lot::{Mutex, RwLock};
use rustix::event::{EventfdFlags, eventfd};

use crate::environment::Environment;
use crate::stall::Turns;
use crate::stall::watched::Watched;
use doorbell::Doorbell;

/// Limit of waiting calls: reload and administration send a handful, so more means that a loop is stuck.
const CALLS_MAX: usize = 4096;

/// Limit of concurrent loops of a process: all numbers that fit a waker, except the last, which marks foreign wakers.
pub(crate) const LOOPS_MAX: usize = (1 << LOOP_BITS) - 1;

/// Bits of a waker's word that hold the loop's number.
pub(crate) const LOOP_BITS: u32 = 10;

/// Work to be done on a loop's thread.
pub type Call = Box<dyn FnOnce() + Send>;

/// The reason why a call was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoteError {
    /// Too many calls are waiting.
    Full,
    /// The loop has ended.
    Closed,
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RemoteError::Full => "the event loop's inbox is full",
            RemoteError::Closed => "the event loop has ended",
        })
    }
}

impl std::error::Error for RemoteError {}

/// A handle to a loop for other threads.
#[derive(Clone)]
pub struct Remote {
    inbox: Arc<Inbox>,
}

impl Remote {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Self {
        Remote { inbox }
    }

    /// Runs `call` on the loop's thread between two turns, in the order of arrival. It may use everything that needs a
    /// loop (`spawn` for example). A call that was accepted but not run when the loop ends is dropped.
    pub fn run(&self, call: Call) -> Result<(), RemoteError> {
        self.inbox.send(|queue| {
            if queue.closed {
                return Err(RemoteError::Closed);
            }
            if queue.calls.len() >= CALLS_MAX {
                return Err(RemoteError::Full);
            }
            queue.calls.push_back(call);
            Ok(())
        })
    }

    /// The timings of the loop's turns.
    pub fn turns(&self) -> &Turns {
        &self.inbox.turns
    }

    /// Bytes that the loop had leased at the end of its last turn.
    pub fn leased_bytes(&self) -> usize {
        self.inbox.leased[0].load(Ordering::Relaxed)
    }

    /// The loop's limit of leased bytes.
    pub fn leased_bytes_max(&self) -> usize {
        self.inbox.leased[1].load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

#[derive(Default)]
struct Queue {
    calls: VecDeque<Call>,
    /// Words of wakers. Not bounded by a count, but by the tasks' operations: at most one per operation in flight
    /// elsewhere.
    wakes: Vec<u64>,
    closed: bool,
}

pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    doorbell: Doorbell,
    eventfd: OwnedFd,
    /// Number of [`Outside`] values.
    pub outside: AtomicUsize,
    pub turns: Turns,
    pub watched: Watched,
    /// Leased bytes at the end of the loop's last turn, and their limit.
    leased: [AtomicUsize; 2],
}

impl Inbox {
    /// An inbox for a loop on the calling thread, with this worker number.
    pub fn new(worker: usize) -> io::Result<Arc<Inbox>> {
        Ok(Arc::new(Inbox {
            queue: Mutex::new(Queue::default()),
            doorbell: Doorbell::new(),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            outside: AtomicUsize::new(0),
            turns: Turns::new(),
            watched: Watched::new(worker),
            leased: Default::default(),
        }))
    }

    /// Stores the loop's leased bytes and their limit. Only for the loop's thread.
    pub fn note_leased(&self, leased: usize, leased_max: usize) {
        self.leased[0].store(leased, Ordering::Relaxed);
        self.leased[1].store(leased_max, Ordering::Relaxed);
    }

    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    fn send(&self, push: impl FnOnce(&mut Queue) -> Result<(), RemoteError>) -> Result<(), RemoteError> {
        push(&mut self.queue.lock())?;
        if self.doorbell.announce() {
            // Fails only when the counter is at its maximum, which is an event as well.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Announces that the loop is about to wait; false if a message has arrived and it must not.
    pub fn may_sleep(&self) -> bool {
        self.doorbell.may_sleep()
    }

    pub fn is_pending(&self) -> bool {
        self.doorbell.is_pending()
    }

    pub fn awake(&self) {
        self.doorbell.awake();
    }

    /// Takes at most `calls_max` calls and all wakes into the vectors, which are empty.
    pub fn take(&self, calls_max: usize, calls: &mut Vec<Call>, wakes: &mut Vec<u64>) {
        if !self.doorbell.answer() {
            return;
        }
        let mut queue = self.queue.lock();
        std::mem::swap(wakes, &mut queue.wakes);
        let count = queue.calls.len().min(calls_max);
        calls.extend(queue.calls.drain(..count));
        if !queue.calls.is_empty() {
            self.doorbell.answer_again();
        }
    }

    pub fn close(&self) {
        let calls = {
            let mut queue = self.queue.lock();
            queue.closed = true;
            queue.wakes.clear();
            std::mem::take(&mut queue.calls)
        };
        drop(calls);
    }
}

/// An operation outside of a loop in virtual time (in a thread pool) that keeps the loop's clock from moving. Loops in
/// real time do not keep the count.
pub(crate) struct Outside(Option<Arc<Inbox>>);

impl Outside {
    pub fn begin() -> Self {
        let inbox = Environment::try_with(|environment| {
            // Tasks of a simulated pool run within the loop.
            let counts = environment.clock.is_virtual() && environment.simulation.is_none();
            counts.then(|| Arc::clone(&environment.inbox))
        });
        let inbox = inbox.flatten();
        if let Some(inbox) = &inbox {
            inbox.outside.fetch_add(1, SeqCst);
        }
        Outside(inbox)
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(inbox) = &self.0 {
            inbox.outside.fetch_sub(1, SeqCst);
            // The loop may wait for exactly this, without a task to wake.
            let _ = inbox.send(|_| Ok(()));
        }
    }
}

/// The loops of this process by their number.
static LOOPS: [RwLock<Option<Arc<Inbox>>>; LOOPS_MAX] = [const { RwLock::new(None) }; LOOPS_MAX];

/// Upper bound of the numbers of loops, exclusive.
static LOOPS_END: AtomicUsize = AtomicUsize::new(0);

/// Incremented whenever a loop begins or ends.
static VERSION: AtomicUsize = AtomicUsize::new(0);

/// Version of the table of loops: equal numbers mean equal tables.
pub(crate) fn version() -> usize {
    VERSION.load(SeqCst)
}

pub(crate) fn all() -> Vec<Arc<Inbox>> {
    LOOPS[..LOOPS_END.load(SeqCst)].iter().filter_map(|slot| slot.read().clone()).collect()
}

pub(crate) fn of_loop(index: usize) -> Option<Arc<Inbox>> {
    LOOPS[index].read().clone()
}

/// Registers a loop and returns its number.
pub(crate) fn register(inbox: &Arc<Inbox>) -> io::Result<usize> {
    for (index, slot) in LOOPS.iter().enumerate() {
        let Some(mut slot) = slot.try_write() else {
            continue;
        };
        if slot.is_none() {
            *slot = Some(Arc::clone(inbox));
            LOOPS_END.fetch_max(index + 1, SeqCst);
            VERSION.fetch_add(1, SeqCst);
            return Ok(index);
        }
    }
    Err(io::Error::other("too many event loops in one process"))
}

pub(crate) fn unregister(index: usize) {
    let inbox = LOOPS[index].write().take();
    VERSION.fetch_add(1, SeqCst);
    drop(inbox);
}

/// Runs `call` on every loop, except those whose inbox is full: they are stuck anyway.
pub(crate) fn call_all(call: fn()) {
    for inbox in all() {
        let _ = Remote::new(inbox).run(Box::new(call));
    }
}

/// Wakes a task of another loop. If that has ended, it, or its successor under the same number, ignores the word or
/// sees one spurious wake.
pub(crate) fn wake_remote(index: usize, word: u64) {
    if let Some(inbox) = of_loop(index) {
        let _ = inbox.send(|queue| {
            if !queue.closed {
                queue.wakes.push(word);
            }
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(inbox: &Inbox) -> bool {
        let mut counter = [0; 8];
        rustix::io::read(&inbox.eventfd, &mut counter).is_ok()
    }

    #[test]
    fn the_descriptor_is_written_once_per_sleep_and_never_to_a_loop_that_is_awake() {
        let inbox = Inbox::new(0).unwrap();
        let remote = Remote::new(Arc::clone(&inbox));
        remote.run(Box::new(|| ())).unwrap();
        assert!(!readable(&inbox));
        assert!(!inbox.may_sleep(), "something is pending");
        let (mut calls, mut wakes) = (Vec::new(), Vec::new());
        inbox.take(10, &mut calls, &mut wakes);
        assert_eq!(calls.len(), 1);
        assert!(inbox.may_sleep());
        remote.run(Box::new(|| ())).unwrap();
        assert!(readable(&inbox));
        remote.run(Box::new(|| ())).unwrap();
        assert!(!readable(&inbox));
    }

    #[test]
    fn calls_are_bounded_and_refused_after_the_end() {
        let inbox = Inbox::new(0).unwrap();
        let remote = Remote::new(Arc::clone(&inbox));
        for _ in 0..CALLS_MAX {
            remote.run(Box::new(|| ())).unwrap();
        }
        assert_eq!(remote.run(Box::new(|| ())), Err(RemoteError::Full));
        inbox.close();
        assert_eq!(remote.run(Box::new(|| ())), Err(RemoteError::Closed));
    }
}
