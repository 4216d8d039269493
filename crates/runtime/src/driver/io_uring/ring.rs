//! The ring itself: submission, waiting, and taking completions. Does not know sockets.
//!
//! Nothing stays in the submission queue across a call: an entry names a descriptor, which may later be another socket.
//! Entries that the kernel does not accept for want of memory are withdrawn and fail with ENOMEM, which is reported
//! like any other completion ([`Completion::was_refused`]). Completions that the kernel had no memory to keep are only
//! counted ([`Ring::has_lost`]): the driver has to find out whose they were.

use std::io;
use std::ptr::NonNull;
use std::time::Duration;

use io_uring::squeue;
use io_uring::types::BufRingEntry;

use crate::driver::{RingCounters, shortage};

/// Calls until cancelled operations have ended: each call ends about 20, and a loop has some thousands at most.
const CANCEL_CALLS_MAX: u32 = 100_000;

/// Calls until everything queued is submitted: one, or a few if an erroneous entry ends a batch or completions have to
/// be taken first. Each call submits at least one entry, unless the completion queue is full.
const SUBMIT_CALLS_MAX: u32 = 10_000;

/// Time that the loop waits for events after two calls in a row have refused operations: an operation that is wanted
/// again at once is tried a hundred times a second. The loop's doorbell may be among them, so calls from other threads
/// may be late by this time.
const REFUSED_WAIT: Duration = Duration::from_millis(10);

/// The two queues shared with the kernel, and the calls on them: the kernel's (`linux.rs`), or those of a simulated
/// world.
pub(crate) trait Queues {
    /// Adds an entry for the next call; false when the queue is full.
    ///
    /// # Safety
    ///
    /// As for [`Ring::push`].
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool;

    /// Number of entries that the kernel has not accepted yet.
    fn queued(&mut self) -> usize;

    /// Removes the entries that were not accepted from the queue.
    fn withdraw(&mut self);

    /// io_uring_enter(2): submits the queue, lets the kernel do its deferred work, and waits for a completion until
    /// `timeout` (for ever if `None`). Errors: the kernel's. ETIME is one.
    fn call(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Moves at most `max` completions to `into`.
    fn take(&mut self, into: &mut Vec<Completion>, max: usize);

    /// True if completions can be taken without a call.
    fn has_completions(&mut self) -> bool;

    /// True if a call is needed even if the loop does not wait.
    fn needs_call(&mut self) -> bool;

    /// True if the kernel reports deferred work, which the next call does.
    fn has_deferred_work(&mut self) -> bool;

    /// True if completions have overflowed their queue: the next call brings them.
    fn has_overflow(&mut self) -> bool;

    /// Number of completions lost for want of memory, since the queues were set up and modulo 2³².
    fn lost(&mut self) -> u32;

    /// Cancels all operations. Errors: the kernel's; `Unsupported` where it cannot do that.
    fn cancel_all(&mut self) -> io::Result<()>;

    /// True if an operation with this user data remains after all were cancelled: then a kernel thread is running it.
    fn has_operation(&mut self, user_data: u64) -> bool;

    /// Registers a ring of `count` provided buffers. Errors: the kernel's (EINVAL before 5.19).
    ///
    /// # Safety
    ///
    /// The entries, and the memory that those between head and tail name, must stay until the queues are dropped.
    unsafe fn register_buffers(&mut self, entries: NonNull<BufRingEntry>, count: u16, group: u16) -> io::Result<()>;

    /// Unregisters the buffers of this group. Errors: the kernel's.
    fn unregister_buffers(&mut self, group: u16) -> io::Result<()>;

    /// As [`crate::driver::Driver::next_event`].
    fn next_event(&self) -> Option<u64> {
        None
    }
}

/// The result of one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub user_data: u64,
    pub result: i32,
    pub flags: u32,
}

impl Completion {
    /// A flag that no kernel uses.
    const REFUSED: u32 = 1 << 14;

    /// The completion of an operation that the kernel had no memory to accept, or whose completion it has lost.
    pub fn refused(user_data: u64) -> Completion {
        Completion { user_data, result: -libc::ENOMEM, flags: Self::REFUSED }
    }

    /// True if the kernel had no memory to accept the operation, which was never begun, or has lost its completion. The
    /// result is ENOMEM then.
    pub fn was_refused(&self) -> bool {
        self.flags == Self::REFUSED
    }
}

pub(super) struct Ring<Q> {
    queues: Q,
    /// Completions taken early, and those of refused operations.
    stash: Vec<Completion>,
    /// User data of the entries queued since the last call that accepted all.
    queued: Vec<u64>,
    /// The last call with entries to submit has refused some.
    has_refused: bool,
    /// [`Queues::lost`] after the last call.
    lost: u32,
    /// Lost completions that were not handled yet.
    unhandled_lost: u32,
    pub counters: RingCounters,
}

impl<Q: Queues> Ring<Q> {
    pub fn new(queues: Q) -> Self {
        let counters = RingCounters::default();
        Ring { queues, stash: Vec::new(), queued: Vec::new(), has_refused: false, lost: 0, unhandled_lost: 0, counters }
    }

    pub fn queues(&mut self) -> &mut Q {
        &mut self.queues
    }

    pub fn next_event(&self) -> Option<u64> {
        self.queues.next_event()
    }

    /// Queues an operation for the next `enter`; a full queue is submitted first.
    ///
    /// # Safety
    ///
    /// The descriptor and memory that `entry` names must stay valid until it is submitted, and memory that the kernel
    /// uses later must stay in place until its completion.
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        self.counters.operations += 1;
        // SAFETY: the caller's promise.
        while !unsafe { self.queues.push(entry) } {
            // The error repeats when the turn ends and is reported there. The queue is empty after it.
            let _ = self.enter(Some(Duration::ZERO));
        }
        self.queued.push(entry.get_user_data());
    }

    /// True if a call is needed even if the loop does not wait.
    pub fn has_work(&mut self) -> bool {
        self.queues.needs_call()
    }

    /// True if the kernel reports deferred work, which the next call does.
    pub fn has_deferred_work(&mut self) -> bool {
        self.queues.has_deferred_work()
    }

    /// True if completions have overflowed their queue: the next call brings them.
    pub fn has_overflow(&mut self) -> bool {
        self.queues.has_overflow()
    }

    /// True if completions can be taken without a call.
    pub fn has_completions(&mut self) -> bool {
        !self.stash.is_empty() || self.queues.has_completions()
    }

    /// Submits the queue, lets the kernel do its deferred work, and waits for one completion until `timeout`.
    /// Afterwards the submission queue is empty, even after an error: operations for which the kernel has no memory are
    /// refused.
    ///
    /// Errors: the ring is unusable.
    pub fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let has_queued = !self.queued.is_empty();
        let mut result = Ok(());
        for _ in 0..SUBMIT_CALLS_MAX {
            let called = self.call(timeout);
            if self.queues.queued() == 0 {
                self.queued.clear();
                self.has_refused &= !has_queued;
                return called.or_else(|error| if is_memory_short(&error) { Ok(()) } else { Err(error) });
            }
            if let Err(error) = called {
                result = if is_memory_short(&error) { Ok(()) } else { Err(error) };
                break;
            }
            // Some kernels accept nothing while completions overflow their queue.
            self.queues.take(&mut self.stash, usize::MAX);
        }
        self.refuse(timeout);
        result
    }

    /// Completes the entries that the kernel has not accepted, with ENOMEM.
    #[cold]
    fn refuse(&mut self, timeout: Option<Duration>) {
        let refused = self.queues.queued();
        self.queues.withdraw();
        if std::mem::replace(&mut self.has_refused, true) {
            let wait = timeout.map_or(REFUSED_WAIT, |timeout| timeout.min(REFUSED_WAIT));
            // It submits nothing. If it fails, so does the next call.
            let _ = self.call(Some(wait));
        }
        self.counters.refused += refused as u64;
        shortage::note(refused as u64, 0);
        let first = self.queued.len() - refused;
        self.stash.extend(self.queued.drain(..).skip(first).map(Completion::refused));
    }

    fn call(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.counters.calls += 1;
        self.counters.overflows += u64::from(self.queues.has_overflow());
        // With completions at hand it does not wait.
        let called = self.queues.call(if self.stash.is_empty() { timeout } else { Some(Duration::ZERO) });
        let lost = self.queues.lost();
        if lost != self.lost {
            self.note_lost(lost.wrapping_sub(self.lost));
            self.lost = lost;
        }
        match called {
            // Timeout, signal, completions that have to be taken before more is submitted, or lost completions.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EBADR)) =>
            {
                Ok(())
            }
            result => result,
        }
    }

    #[cold]
    fn note_lost(&mut self, count: u32) {
        self.unhandled_lost = self.unhandled_lost.saturating_add(count);
        self.counters.lost += u64::from(count);
    }

    /// True if there are lost completions that were not handled yet.
    pub fn has_lost(&self) -> bool {
        self.unhandled_lost > 0
    }

    /// Returns the number of lost completions that were not handled yet, and resets it.
    pub fn take_lost(&mut self) -> u32 {
        std::mem::take(&mut self.unhandled_lost)
    }

    /// Moves at most `max` completions to `into`.
    pub fn take(&mut self, into: &mut Vec<Completion>, max: usize) {
        let stashed = self.stash.len().min(max);
        into.extend(self.stash.drain(..stashed));
        self.queues.take(into, max - stashed);
    }

    /// Puts the completions beyond `max` back for a later [`Ring::take`], in order, except those for which `is_done` is
    /// true.
    pub fn put_back(&mut self, taken: &mut Vec<Completion>, max: usize, is_done: impl Fn(&Completion) -> bool) {
        if taken.len() > max {
            let rest = taken.drain(max..).filter(|completion| !is_done(completion));
            self.stash.splice(..0, rest);
        }
    }

    /// Cancels all operations, waits until they have ended, and gives `handle` every completion; false if the kernel
    /// cannot do that (before 6.0). True does not include operations that a kernel thread is running
    /// ([`Queues::has_operation`]), nor file reads: one that has reached the disk is neither found nor waited for, and
    /// ends with its completion, which may come later.
    pub fn cancel_all(&mut self, handle: impl FnMut(&Completion)) -> bool {
        if self.queues.cancel_all().is_err() {
            return false;
        }
        // Cancellation only marks them: operations end when the kernel does its deferred work.
        self.drain(handle);
        true
    }

    /// Gives `handle` all completions so far.
    pub fn drain(&mut self, mut handle: impl FnMut(&Completion)) {
        let mut completions = Vec::new();
        for _ in 0..CANCEL_CALLS_MAX {
            let _ = self.enter(Some(Duration::ZERO));
            self.take(&mut completions, usize::MAX);
            completions.drain(..).for_each(|completion| handle(&completion));
            if !self.has_deferred_work() && !self.has_overflow() {
                break;
            }
        }
    }
}

/// True if the kernel had no memory for the entries to submit.
fn is_memory_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM))
}
