//! The ring itself: submission, waiting, and taking completions. Knows no sockets.
//!
//! Nothing stays in the submission queue across a call: an entry names a descriptor, which may mean another socket
//! later. What the kernel does not take for want of memory is taken out of the queue again, and has failed with ENOMEM:
//! whoever wanted it hears of it like of every other end of an operation ([`Completion::was_refused`]). Completions
//! that the kernel had no memory to keep are counted ([`Ring::has_lost`]): only the driver can find out whose they
//! were.

use std::io;
use std::ptr::NonNull;
use std::time::Duration;

use io_uring::squeue;
use io_uring::types::BufRingEntry;

use crate::driver::{RingCounters, shortage};

/// Calls until cancelled operations have ended: each ends a score of them, and a loop has some thousands at most.
const CANCEL_CALLS_MAX: u32 = 100_000;

/// Calls until everything queued is submitted: one, or a few where an entry in error ends a batch, or completions have
/// to be taken before more is submitted. Each takes an entry at least, or there is no more room in the completion
/// queue.
const SUBMIT_CALLS_MAX: u32 = 10_000;

/// How long the loop waits for events after a call has refused operations and the one before has, too: what is wanted
/// again at once is tried a hundred times in a second. The loop's doorbell may be among it, so calls from other threads
/// come late by this.
const REFUSED_WAIT: Duration = Duration::from_millis(10);

/// The two queues that a program shares with the kernel, and the calls on them: the kernel's (`linux.rs`), or those of
/// a simulated world.
pub(crate) trait Queues {
    /// Adds an entry to what the next call submits; false when there is no room for it.
    ///
    /// # Safety
    ///
    /// As for [`Ring::push`].
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool;

    /// How many entries have not been taken yet.
    fn queued(&mut self) -> usize;

    /// Takes out of the queue again what has not been taken.
    fn withdraw(&mut self);

    /// io_uring_enter(2): submits what is queued, has the kernel do its deferred work, and waits for a completion until
    /// `timeout` (for ever if `None`). Errors: the kernel's. ETIME is one.
    fn call(&mut self, timeout: Option<Duration>) -> io::Result<()>;

    /// Moves at most `max` completions to `into`.
    fn take(&mut self, into: &mut Vec<Completion>, max: usize);

    /// Whether completions can be taken without a call.
    fn has_completions(&mut self) -> bool;

    /// Whether a call is needed although nobody wants to wait.
    fn needs_call(&mut self) -> bool;

    /// Whether the kernel says that it has more to do when it is called again.
    fn has_deferred_work(&mut self) -> bool;

    /// Whether there are completions that did not fit their queue: the next call brings them.
    fn has_overflow(&mut self) -> bool;

    /// How many completions the kernel had no memory to keep, since the queues were set up and modulo 2³²: nobody
    /// will see them.
    fn lost(&mut self) -> u32;

    /// Cancels all operations. Errors: the kernel's; `Unsupported` where it cannot do that.
    fn cancel_all(&mut self) -> io::Result<()>;

    /// Whether there is such an operation, after all were cancelled: then a thread of the kernel works at it.
    fn has_operation(&mut self, user_data: u64) -> bool;

    /// Has the kernel take buffers from a ring of `count` entries. Errors: the kernel's (EINVAL before 5.19).
    ///
    /// # Safety
    ///
    /// The entries, and the memory that those between head and tail name, stay until the queues are dropped.
    unsafe fn register_buffers(&mut self, entries: NonNull<BufRingEntry>, count: u16, group: u16) -> io::Result<()>;

    /// Has the kernel forget the buffers of this group. Errors: the kernel's.
    fn unregister_buffers(&mut self, group: u16) -> io::Result<()>;

    /// As [`crate::driver::Driver::next_event`].
    fn next_event(&self) -> Option<u64> {
        None
    }
}

/// What became of one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub user_data: u64,
    pub result: i32,
    pub flags: u32,
}

impl Completion {
    /// A flag that no kernel uses.
    const REFUSED: u32 = 1 << 14;

    /// Of an operation that the kernel had no memory to take, or to tell the end of.
    pub fn refused(user_data: u64) -> Completion {
        Completion { user_data, result: -libc::ENOMEM, flags: Self::REFUSED }
    }

    /// Whether the kernel had no memory to take the operation, which was never begun, or to tell its end. The result is
    /// ENOMEM then.
    pub fn was_refused(&self) -> bool {
        self.flags == Self::REFUSED
    }
}

pub(super) struct Ring<Q> {
    queues: Q,
    /// Completions that had to make room, and those of what was refused.
    stash: Vec<Completion>,
    /// The user data of what was queued since the last call that took everything.
    queued: Vec<u64>,
    /// The last call that had something to submit has refused some of it.
    has_refused: bool,
    /// [`Queues::lost`] after the last call.
    lost: u32,
    /// How many of these were not seen to.
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
    /// The descriptor and the memory that `entry` names must be what is meant until it is submitted, and memory that
    /// the kernel reads or writes later must stay in place until its completion.
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        self.counters.operations += 1;
        // SAFETY: the caller's promise.
        while !unsafe { self.queues.push(entry) } {
            // An error comes again when the turn ends, and is told there. It leaves nothing in the queue.
            let _ = self.enter(Some(Duration::ZERO));
        }
        self.queued.push(entry.get_user_data());
    }

    /// Whether a call is needed although nobody wants to wait.
    pub fn has_work(&mut self) -> bool {
        self.queues.needs_call()
    }

    /// Whether the kernel says that it has more to do when it is called again.
    pub fn has_deferred_work(&mut self) -> bool {
        self.queues.has_deferred_work()
    }

    /// Whether there are completions that did not fit their queue: the next call brings them.
    pub fn has_overflow(&mut self) -> bool {
        self.queues.has_overflow()
    }

    /// Whether completions can be taken without a call.
    pub fn has_completions(&mut self) -> bool {
        !self.stash.is_empty() || self.queues.has_completions()
    }

    /// Submits what is queued, lets the kernel do its deferred work, and waits for one completion until `timeout`.
    /// Whatever it returns, the submission queue is empty then: what the kernel has no memory for is refused.
    ///
    /// Errors: those of a ring that cannot be used.
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
            // Some kernels take nothing while completions do not fit their queue.
            self.queues.take(&mut self.stash, usize::MAX);
        }
        self.refuse(timeout);
        result
    }

    /// Ends what the kernel has not taken.
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
        // With completions at hand there is nothing to wait for.
        let called = self.queues.call(if self.stash.is_empty() { timeout } else { Some(Duration::ZERO) });
        let lost = self.queues.lost();
        if lost != self.lost {
            self.note_lost(lost.wrapping_sub(self.lost));
            self.lost = lost;
        }
        match called {
            // The time is over, a signal, completions that have to be taken before more is submitted, or that are lost.
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

    /// Whether completions are lost whose operations were not seen to.
    pub fn has_lost(&self) -> bool {
        self.unhandled_lost > 0
    }

    /// How many completions are lost whose operations are seen to now.
    pub fn take_lost(&mut self) -> u32 {
        std::mem::take(&mut self.unhandled_lost)
    }

    /// Moves at most `max` completions to `into`.
    pub fn take(&mut self, into: &mut Vec<Completion>, max: usize) {
        let stashed = self.stash.len().min(max);
        into.extend(self.stash.drain(..stashed));
        self.queues.take(into, max - stashed);
    }

    /// Leaves what came beyond `max` for a later [`Ring::take`], in its order, but for what `is_done` says was seen to.
    pub fn put_back(&mut self, taken: &mut Vec<Completion>, max: usize, is_done: impl Fn(&Completion) -> bool) {
        if taken.len() > max {
            let rest = taken.drain(max..).filter(|completion| !is_done(completion));
            self.stash.splice(..0, rest);
        }
    }

    /// Cancels all operations and waits until they have ended; false where the kernel cannot do that (before 6.0).
    /// Gives `handle` what completes meanwhile. True says nothing of those that a thread of the kernel works at
    /// ([`Queues::has_operation`]), nor of reads of files: one that a disk is at is neither found nor waited for, and
    /// over when `handle` has had its completion, which may come later.
    pub fn cancel_all(&mut self, handle: impl FnMut(&Completion)) -> bool {
        if self.queues.cancel_all().is_err() {
            return false;
        }
        // Cancelling only announces it: the operations end when the kernel does its deferred work.
        self.drain(handle);
        true
    }

    /// Gives `handle` all that has completed.
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

/// Whether the kernel had no memory for what was to be submitted.
fn is_memory_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM))
}
