//! Completions that the kernel has lost, for want of memory to keep those that did not fit their queue.
//!
//! The kernel counts them, and does not say whose they were. So everything in flight is cancelled: what ends then was
//! not lost, and goes on as after any cancellation. What still counts as in flight has ended without a word, and what
//! it has received or sent is unknown: it fails with ENOMEM for whoever wanted it, so that its connection ends. Polls
//! move no data, and are wanted again. A fire-and-forget send says nothing when all of it has left, so of one that was
//! submitted with the call nothing is known: its connection ends, too.
//!
//! No cancellation waits for a receive or a send that a thread of the kernel works at. Nothing that is submitted here
//! needs one, but the kernel uses one where it has no memory for a poll. Such an operation still has its buffer, and
//! its completion may come: the loop fails then, as where nothing can be cancelled, and its process is replaced.
//!
//! No cancellation finds a read of a file that a disk is at, and the kernel cannot be asked for it: whether it is over
//! or its completion was lost looks the same, and memory that is freed too early would be written to. So a pool does
//! these reads anew, and what they had stays until the kernel tells of them after all, else as long as the process.
//! There are `file_reads::IN_FLIGHT_MAX` of them at most, and from then on pools do all reads.

use std::io;

use rustix::io::Errno;

use super::buffers::{Buffers, GROUP};
use super::operation::{KIND_LISTENER, Op, user_data};
use super::ring::{Completion, Queues};
use super::{IoUring, Kernel};
use crate::driver::shortage;

impl<K: Kernel> IoUring<K> {
    /// Cancels everything in flight, and adds what ends to `completions`. Errors: the kernel cannot do that (before
    /// 6.0), so nobody knows what has become of it.
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

    /// Ends what still counts as in flight after [`IoUring::cancel_all`], when all of its completions were handled.
    /// Errors: some of it has not ended.
    #[cold]
    pub(super) fn end_lost(&self) -> io::Result<()> {
        let lost_count = self.ring.borrow_mut().take_lost();
        if self.is_transfer_under_way() {
            shortage::note(lost_count.into(), self.file_reads.given_up() as u64);
            return Err(Errno::BADR.into());
        }
        // What has ended meanwhile was not lost.
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

    /// Whether a thread of the kernel works at a receive or a send, after all were cancelled: it may use their memory.
    pub(super) fn is_transfer_under_way(&self) -> bool {
        let mut in_flight = self.in_flight().into_iter();
        in_flight.any(|(op, user_data)| {
            matches!(op, Op::Recv | Op::Send) && self.ring.borrow_mut().queues().has_operation(user_data)
        })
    }

    /// What connections have in flight, as far as completions were handled.
    fn in_flight(&self) -> Vec<(Op, u64)> {
        let mut all = Vec::new();
        self.connections.borrow_mut().for_each(|key, connection| {
            let in_flight = connection.in_flight;
            all.extend(Op::ALL.into_iter().filter(|&op| in_flight.has(op)).map(|op| (op, user_data(op as u64, key))));
        });
        all
    }

    /// Registers buffers in the place of those of which some were lost with their completions. No receive is in flight.
    fn renew_buffers(&self) {
        let mut buffers = self.buffers.borrow_mut();
        let Some(old) = buffers.take() else { return };
        let mut ring = self.ring.borrow_mut();
        if ring.queues().unregister_buffers(GROUP).is_err() {
            *buffers = Some(old);
            return;
        }
        // Without buffers receives wait by polls.
        *buffers = Buffers::register(&mut ring, old.count(), old.size() as u32).ok();
    }
}
