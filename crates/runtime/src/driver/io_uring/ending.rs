//! Ends operations in flight: of a connection that moves to another loop or is closed, and of all connections when
//! their loop ends.
//!
//! The kernel keeps a closed connection open, and uses its memory, until its last operation has completed. So the slot
//! stays, and the operations are cancelled.

use std::io;
use std::os::fd::OwnedFd;
use std::task::Waker;
use std::time::Duration;

use super::connection::{InFlight, Receive, Stage};
use super::operation::{KIND_FILE_READ, Op, Ops, kind_and_key, user_data};
use super::ring::Completion;
use super::sockets::Sockets;
use super::{CANCEL_CALLS_MAX, IoUring, Kernel, Request};
use crate::executor::slots::Key;

/// Number of waits for the operations of closed connections when a loop ends, and the length of each: a second in all.
const CLOSE_CALLS_MAX: u32 = 100;
pub(super) const CLOSE_PAUSE: Duration = Duration::from_millis(10);

impl<K: Kernel> IoUring<K> {
    /// Ends all transfers of a connection, with a few calls: the receive in flight is cancelled and its data kept, a
    /// queued send is submitted and completes. Errors: if a transfer is still in flight then.
    pub(super) fn settle(&self, key: Key) -> io::Result<()> {
        for _ in 0..CANCEL_CALLS_MAX {
            let mut completions = Vec::new();
            {
                let mut connections = self.connections.borrow_mut();
                let connection = connections.get_mut(key).ok_or(io::ErrorKind::NotConnected)?;
                let is_send_wanted = connection.wanted.has(Op::Send);
                connection.wanted = Ops::default();
                if is_send_wanted {
                    connection.wanted.add(Op::Send);
                }
                if connection.in_flight.note_ending(Receive::Ending) {
                    connection.wanted.add(Op::EndRecv);
                }
                if connection.wanted.is_empty()
                    && !connection.in_flight.has(Op::Recv)
                    && !connection.in_flight.has(Op::Send)
                {
                    return match connection.sending() {
                        Some(sending) if sending.result != Some(Ok(sending.offered)) => Err(send_under_way()),
                        _ => Ok(()),
                    };
                }
                let mut ring = self.ring.borrow_mut();
                connection.make_entries(key, &mut ring, self.receive_options());
                ring.enter(Some(Duration::ZERO))?;
                ring.take(&mut completions, usize::MAX);
            }
            completions.iter().for_each(|completion| self.handle_completion(completion));
        }
        Err(send_under_way())
    }

    /// Submits the last cancellations and waits until closed connections have nothing in flight. False if that takes
    /// too long.
    pub(super) fn finish_closed(&self) -> bool {
        self.make_entries();
        self.finish(|| self.connections.borrow().len() == 0 && self.file_reads.all_given_up())
    }

    /// Waits until `is_over`, for a bounded time.
    fn finish(&self, is_over: impl Fn() -> bool) -> bool {
        for call in 0..CLOSE_CALLS_MAX {
            // Most operations end within the first calls, without a wait.
            let is_first = call < 2;
            if is_over() {
                return true;
            }
            let mut completions = Vec::new();
            {
                let mut ring = self.ring.borrow_mut();
                if ring.enter(Some(if is_first { Duration::ZERO } else { CLOSE_PAUSE })).is_err() {
                    return false;
                }
                ring.take(&mut completions, usize::MAX);
            }
            completions.iter().for_each(|completion| self.handle_completion(completion));
        }
        false
    }

    /// Takes the socket out of a slot, which stays for the operations in flight; the caller cancels them.
    pub(super) fn take_socket(&self, key: Key) -> Option<(OwnedFd, InFlight)> {
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(key)?;
        let (socket, waiter) = match std::mem::replace(&mut connection.stage, Stage::Closed) {
            Stage::Open(socket) | Stage::Resetting(socket) => (socket, None),
            Stage::Lingering(socket) => (socket, self.leave_closed()),
            Stage::Closed => return None,
        };
        connection.wanted = Ops::default();
        let wakers = connection.take_all_wakers();
        let received = connection.busy.as_mut().map(|busy| std::mem::take(&mut busy.received));
        let sending = connection.take_sending_of_ours();
        let in_flight = connection.in_flight;
        let removed = in_flight.is_empty().then(|| connections.remove(key));
        drop(connections);
        drop((wakers, received, sending, removed));
        waiter.into_iter().for_each(Waker::wake);
        Some((socket, in_flight))
    }

    /// Cancels operations of a closed socket when the turn ends: until they end the kernel keeps the connection open,
    /// and the peer does not see its end.
    pub(super) fn cancel(&self, key: Key, in_flight: InFlight) {
        self.requests.borrow_mut().extend(in_flight.ops().map(|op| Request::Cancel(user_data(op as u64, key))));
    }

    /// Cancels the operations of a closed connection again. The kernel did not find one to cancel: it has completed, or
    /// is between two attempts. Or there was no memory for the cancellation.
    pub(super) fn cancel_again(&self, key: Key) {
        let mut connections = self.connections.borrow_mut();
        let Some(connection) = connections.get_mut(key) else { return };
        if matches!(connection.stage, Stage::Closed) {
            self.cancel(key, connection.in_flight);
        } else if connection.is_receive_ending() {
            self.request(key, connection, Op::EndRecv);
        }
    }
}

fn send_under_way() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "data is still being sent")
}

impl<K: Kernel> Drop for IoUring<K> {
    fn drop(&mut self) {
        let handle = |completion: &Completion| {
            if let (KIND_FILE_READ, key) = kind_and_key(completion.user_data) {
                self.file_reads.handle_completion(key, completion);
            }
        };
        self.file_reads.give_up_begun();
        // No turn follows, so the completions left over from the last one are handled here; one may return a descriptor
        // that the kernel did not close.
        let mut completions = Vec::new();
        self.ring.borrow_mut().take(&mut completions, usize::MAX);
        completions.iter().for_each(|completion| self.handle_completion(completion));
        // No turn follows that would close them.
        self.closing.take().into_iter().for_each(|socket| self.sockets.close(socket));
        // All streams were dropped before; only operations in flight are left of them.
        let is_cancelled = self.ring.borrow_mut().cancel_all(handle);
        let is_over = if is_cancelled { !self.is_transfer_under_way() } else { self.finish_closed() };
        // No cancellation ends a disk operation: if it takes longer, its memory is leaked. So is the memory of
        // abandoned reads, whose completions may be lost.
        self.finish(|| self.file_reads.all_given_up());
        self.file_reads.forget_memory();
        if !is_over {
            // The kernel may still read the memory of sends, and fill buffers.
            self.connections.borrow_mut().for_each(|_, connection| std::mem::forget(connection.take_sending()));
            std::mem::forget(self.buffers.borrow_mut().take());
        }
    }
}
