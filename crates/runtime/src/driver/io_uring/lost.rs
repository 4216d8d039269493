//! Recovers from completions that the kernel has lost because it had no memory to keep those that overflowed their
//! queue.
//!
//! The kernel counts lost completions but does not identify them. So everything in flight is cancelled. An operation
//! that completes then was not lost, and goes on as after any cancellation. The rest has ended silently, and the number
//! of bytes it received or sent is unknown: it fails with ENOMEM, so its connection ends. Polls move no data and are
//! armed again. A fire-and-forget send is silent when all of it has left, so the result of one that was submitted with
//! the call is unknown: its connection ends too.
//!
//! Cancellation does not wait for a receive or send that a kernel thread is running. No operation here needs such a
//! thread, but the kernel uses one if it has no memory for a poll. The operation still uses its buffer, and its
//! completion may come: then the loop fails, as on kernels that cannot cancel everything, and its process is replaced.
//!
//! Cancellation does not find a file read that has reached the disk, and the kernel cannot be asked about it: a read in
//! flight and one whose completion was lost look the same, and memory freed too early would be overwritten. So a pool
//! repeats these reads, and their memory stays until the kernel completes them after all, or else as long as the
//! process. There are at most `file_reads::IN_FLIGHT_MAX` of them; then pools do all reads.

use std::io;

use rustix::io::Errno;

use super::buffers::{Buffers, GROUP};
use super::operation::{KIND_LISTENER, Op, user_data};
use super::ring::{Completion, Queues};
use super::{IoUring, Kernel};
use crate::driver::shortage;

impl<K: Kernel> IoUring<K> {
    /// Cancels everything in flight and appends the completions to `completions`. Errors: the kernel cannot do that
    /// (before 6.0), so the fate of the operations is unknown.
    #[cold]
    pub(super) fn cancel_all(&self, completions: &mut Vec<Completion>) -> io::Result<()> {
        let mut ring = self.ring.borrow_mut();
        ring.take(completions, usize::MAX);
        if ring.cancel_all(|completion| completions.push(*completion)) {
            return Ok(());
        }
        shortage::note(ring.take_lost().into(), self.file_reads.given_up() as u64);
        Err(Errno::BADR.into())
    }

    /// Ends the operations that still count as in flight after [`IoUring::cancel_all`] and the handling of its
    /// completions. Errors: some transfers have not ended.
    #[cold]
    pub(super) fn end_lost(&self) -> io::Result<()> {
        let lost_count = self.ring.borrow_mut().take_lost();
        if self.is_transfer_under_way() {
            shortage::note(lost_count.into(), self.file_reads.given_up() as u64);
            return Err(Errno::BADR.into());
        }
        // Operations that have completed meanwhile were not lost.
        let mut completions = Vec::new();
        self.ring.borrow_mut().drain(|completion| completions.push(*completion));
        completions.iter().for_each(|completion| self.handle_completion(completion));
        self.is_inbox_armed.set(false);
        self.file_reads.give_up_in_flight();
        for key in self.listeners.in_flight() {
            let ended = Completion { user_data: user_data(KIND_LISTENER, key), result: -libc::ECANCELED, flags: 0 };
            self.listeners.handle_completion(key, &ended);
        }
        for (op, user_data) in self.in_flight() {
            self.handle_completion(&match op {
                Op::Recv | Op::Send => Completion::refused(user_data),
                _ => Completion { user_data, result: -libc::ECANCELED, flags: 0 },
            });
        }
        self.renew_buffers();
        shortage::note(lost_count.into(), self.file_reads.given_up() as u64);
        Ok(())
    }

    /// True if a kernel thread is running a receive or a send after all were cancelled: it may use their memory.
    pub(super) fn is_transfer_under_way(&self) -> bool {
        let mut in_flight = self.in_flight().into_iter();
        in_flight.any(|(op, user_data)| {
            matches!(op, Op::Recv | Op::Send) && self.ring.borrow_mut().queues().has_operation(user_data)
        })
    }

    /// Operations of connections in flight, by the completions handled so far.
    fn in_flight(&self) -> Vec<(Op, u64)> {
        let mut all = Vec::new();
        self.connections.borrow_mut().for_each(|key, connection| {
            all.extend(connection.in_flight.ops().map(|op| (op, user_data(op as u64, key))));
        });
        all
    }

    /// Registers new buffers, because some of the old ones were lost with their completions. No receive is in flight.
    fn renew_buffers(&self) {
        let mut buffers = self.buffers.borrow_mut();
        let Some(old) = buffers.take() else { return };
        let mut ring = self.ring.borrow_mut();
        if ring.queues().unregister_buffers(GROUP).is_err() {
            *buffers = Some(old);
            return;
        }
        // Without buffers, receives wait by polls.
        *buffers = Buffers::register(&mut ring, old.count(), old.size() as u32).ok();
    }
}
