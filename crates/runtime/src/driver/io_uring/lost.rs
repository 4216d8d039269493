//! Completions that the kernel has lost, for want of memory to keep those that did not fit their queue.
//!
//! The kernel counts them, and does not say whose they were. So everything in flight is cancelled: what ends then was
//! not lost, and goes on as after any cancellation. What still counts as in flight has ended without a word, and what
//! it has received or sent is unknown: it fails with ENOMEM for whoever wanted it, so that its connection ends. Polls
//! move no data, and are wanted again. A fire-and-forget send says nothing when all of it has left, so of one that was
//! submitted with the call nothing is known: its connection ends, too.
//!
//! The cancellation ends all that waits for a socket at once. Only an operation that a thread of the kernel works at
//! would take longer, and nothing that is submitted here needs one. Should there be one all the same, the loop waits
//! [`CANCEL_WAIT_MAX`] for it, goes on with what has ended, and cancels again in its next turn. What has not ended
//! after [`CANCELS_MAX`] turns, a second of such waits, never does: the loop fails, as where nothing can be cancelled,
//! and its process is replaced.
//!
//! No cancellation finds a read of a file that a disk is at, and the kernel cannot be asked for it: whether it is over
//! or its completion was lost looks the same, and memory that is freed too early would be written to. So a pool does
//! these reads anew, and what they had stays until the kernel tells of them after all, else as long as the process.
//! There are `file_reads::IN_FLIGHT_MAX` of them at most, and from then on pools do all reads.

use std::cell::Cell;
use std::io;
use std::time::Duration;

use rustix::io::Errno;

use super::buffers::{Buffers, GROUP};
use super::operation::{KIND_LISTENER, Op, user_data};
use super::ring::{Completion, Queues};
use super::{IoUring, Kernel};
use crate::driver::shortage;

/// How long a turn waits for a cancellation: other connections wait with it.
const CANCEL_WAIT_MAX: Duration = Duration::from_millis(1);

/// How many turns cancel before the loop gives up.
const CANCELS_MAX: u32 = 1000;

/// Cancellations of everything that were not over in their turn.
#[derive(Default)]
pub(super) struct OpenCancels {
    count: Cell<u32>,
    /// The completions that had been lost by then.
    lost: Cell<u32>,
}

impl<K: Kernel> IoUring<K> {
    /// Whether completions were lost since everything was cancelled last.
    pub(super) fn has_newly_lost(&self) -> bool {
        self.ring.borrow().unhandled_lost() != self.open_cancels.lost.get()
    }

    /// Cancels everything in flight, and adds what ends to `completions`; false when that has to be done again in the
    /// next turn. Errors: the kernel cannot do that (before 6.0), or something does not end, so nobody knows what has
    /// become of it.
    #[cold]
    pub(super) fn cancel_all(&self, completions: &mut Vec<Completion>) -> io::Result<bool> {
        let mut ring = self.ring.borrow_mut();
        ring.take(completions, usize::MAX);
        let OpenCancels { count, lost } = &self.open_cancels;
        match ring.cancel_all(CANCEL_WAIT_MAX, |completion| completions.push(*completion)) {
            Ok(()) => {
                count.set(0);
                lost.set(0);
                Ok(true)
            }
            Err(error) if error.raw_os_error() == Some(libc::ETIME) && count.get() + 1 < CANCELS_MAX => {
                count.set(count.get() + 1);
                lost.set(ring.unhandled_lost());
                Ok(false)
            }
            Err(_) => {
                shortage::note(ring.take_lost().into(), self.file_reads.given_up() as u64);
                Err(Errno::BADR.into())
            }
        }
    }

    /// Ends what still counts as in flight after [`IoUring::cancel_all`], when all of its completions were handled.
    #[cold]
    pub(super) fn end_lost(&self) {
        let lost_count = self.ring.borrow_mut().take_lost();
        self.is_inbox_armed.set(false);
        self.file_reads.give_up_in_flight();
        for key in self.listeners.in_flight() {
            let ended = Completion { user_data: user_data(KIND_LISTENER, key), result: -libc::ECANCELED, flags: 0 };
            self.listeners.handle_completion(key, &ended);
        }
        let mut lost = Vec::new();
        self.connections.borrow_mut().for_each(|key, connection| {
            let in_flight = connection.in_flight;
            lost.extend(Op::ALL.into_iter().filter(|&op| in_flight.has(op)).map(|op| (op, user_data(op as u64, key))));
        });
        for (op, user_data) in lost {
            self.handle_completion(&match op {
                Op::Recv | Op::Send => Completion::refused(user_data),
                _ => Completion { user_data, result: -libc::ECANCELED, flags: 0 },
            });
        }
        self.renew_buffers();
        shortage::note(lost_count.into(), self.file_reads.given_up() as u64);
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
