//! Fire-and-forget sends: short responses that leave with the call that ends the turn, and have no waiter.
//!
//! To its sender such a send is like a write into the socket's buffer: done. A few bytes are copied, chunks are taken
//! over as they are. When the turn ends they become sends with `MSG_DONTWAIT`, which the kernel carries out while it
//! accepts them, and which complete silently if all is sent. So there is no task to wake and no state for the
//! connection: the memory is reused in the next turn, and the chunks are freed when the call has returned. If the
//! socket was full, a completion of the same call reports the rest, which becomes a usual send that the driver owns
//! (`Sending::is_owned`). Until then no other data may be sent on that connection: another send first sends these bytes
//! directly ([`FireAndForgetSends::take_back`]). A connection that is closed meanwhile stays until its rest has left; a
//! loop that ends may wait for that (`all_sent`), or the rest is lost.
//!
//! The driver's self-test verifies that the kernel works this way; if it does not, sends are queued instead. (If a
//! kernel did not report a partial send, its bytes would be sent twice.)

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::task::Waker;
use std::time::Duration;

use io_uring::squeue::Flags;
use io_uring::{opcode, types};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, sockopt};

use super::connection::{Connection, Expects, Mode, OWNED, Sending, Stage, is_temporary};
use super::operation::{KIND_FIRE_AND_FORGET_SEND, Op, Ops, kind_and_key, user_data};
use super::ring::{Completion, Queues, Ring};
use super::sockets::Sockets;
use super::{IoUring, Kernel, Linux};
use crate::driver::direct::OPERATIONS_PER_TURN;
use crate::driver::{Fresh, StreamDriver};
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::{Output, SLICES_MAX};

/// Bytes sent this way in a turn at most: 512 polls with responses of 2 KiB each.
const BYTES_PER_TURN_MAX: usize = 1024 * 1024;

/// Bytes of one connection's chunks at most: the kernel copies them in the call that ends the turn.
const CHUNKS_MAX: usize = 32 * 1024;

/// Time after which a peer that takes none of the rest loses the closed connection.
const UNSENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Limit of closed connections that wait to send their rest: each holds a descriptor that no stream counts.
const CLOSED_MAX: usize = 128;

/// Calls until every failed send is known: each returns a full queue, and there are at most as many completions as
/// operations in flight.
const OVERFLOW_CALLS_MAX: u32 = 100_000;

/// Bytes that the self-test sends: less than an empty socket takes.
const TEST_BYTES: usize = 64 * 1024;

/// Capacity in bytes that is kept from turn to turn.
const KEPT_MAX: usize = 128 * 1024;

#[derive(Default)]
pub(super) struct FireAndForgetSends {
    list: Vec<FireAndForgetSend>,
    /// The bytes of all copies, one after another.
    bytes: Vec<u8>,
    chunk_bytes: usize,
}

struct FireAndForgetSend {
    key: Key,
    descriptor: RawFd,
    what: What,
}

/// Content of a send.
enum What {
    /// A range of the copied bytes.
    Copy(Range<usize>),
    Chunks(Box<Sending>),
}

impl FireAndForgetSends {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.bytes.len() + self.chunk_bytes + bytes <= BYTES_PER_TURN_MAX
    }

    /// Adds a copy of `bytes`, or appends it to the connection's send if that is the last one and a copy too. False
    /// otherwise, or if this turn has no room left. `may_have_one` = the connection may have a send here.
    pub fn add_copy(&mut self, key: Key, descriptor: RawFd, bytes: &[u8], may_have_one: bool) -> bool {
        if !self.has_room(bytes.len()) {
            return false;
        }
        let begin = self.bytes.len();
        match self.list.last_mut() {
            Some(FireAndForgetSend { key: last, what: What::Copy(range), .. })
                if *last == key && range.end == begin =>
            {
                range.end += bytes.len();
            }
            _ if may_have_one => return false,
            _ => self.list.push(FireAndForgetSend { key, descriptor, what: What::Copy(begin..begin + bytes.len()) }),
        }
        self.bytes.extend_from_slice(bytes);
        true
    }

    /// Adds chunks, for which there is room, of a connection that has no send here.
    fn add_chunks(&mut self, key: Key, descriptor: RawFd, sending: Box<Sending>) {
        self.chunk_bytes += sending.output.len_bytes();
        self.list.push(FireAndForgetSend { key, descriptor, what: What::Chunks(sending) });
    }

    /// Removes a connection's send, to be sent in another way. (Rare, so it is a linear search.)
    fn take_back(&mut self, key: Key) -> Option<Taken<'_>> {
        let index = self.list.iter().rposition(|send| send.key == key)?;
        Some(match self.list.swap_remove(index).what {
            What::Copy(range) => Taken::Copy(&self.bytes[range]),
            What::Chunks(sending) => Taken::Chunks(sending),
        })
    }

    /// Leaks the memory, which the kernel may still read: called when the self-test fails.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// Makes the entries. Nothing may be added until [`FireAndForgetSends::clear`].
    pub fn make_entries(&mut self, ring: &mut Ring<impl Queues>) {
        // MSG_WAITALL: a short send is an error, which the kernel reports.
        const FLAGS: i32 = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_WAITALL;
        for send in &mut self.list {
            let entry = match &mut send.what {
                What::Copy(range) => {
                    let bytes = &self.bytes[range.clone()];
                    let send = opcode::Send::new(types::Fd(send.descriptor), bytes.as_ptr(), bytes.len() as u32);
                    send.flags(FLAGS).build()
                }
                What::Chunks(sending) => sending.entry_with(send.descriptor, FLAGS),
            };
            let entry = entry.flags(Flags::SKIP_SUCCESS).user_data(user_data(KIND_FIRE_AND_FORGET_SEND, send.key));
            // SAFETY: the connection's slot owns the descriptor, and closing it takes the send back. The bytes and the
            // structures that describe chunks stay where they are until `clear`, and the kernel reads them only while
            // it accepts the entry.
            unsafe { ring.push(&entry) };
        }
    }

    pub fn is_of_fire_and_forget_send(completion: &Completion) -> bool {
        kind_and_key(completion.user_data).0 == KIND_FIRE_AND_FORGET_SEND
    }

    /// Forgets all sends: they have left, or their rests were handled.
    pub fn clear(&mut self) {
        self.list.clear();
        self.bytes.clear();
        self.chunk_bytes = 0;
        if self.bytes.capacity() > KEPT_MAX {
            self.bytes.shrink_to(KEPT_MAX);
            self.list.shrink_to(KEPT_MAX / size_of::<FireAndForgetSend>());
        }
    }
}

/// A send that was taken back.
enum Taken<'p> {
    Copy(&'p [u8]),
    Chunks(Box<Sending>),
}

impl<K: Kernel> IoUring<K> {
    /// As [`StreamDriver::try_send_copy`], for a connection on the ring.
    pub(super) fn try_send_copy_fire_and_forget(&self, key: Key, connection: &mut Connection, bytes: &[u8]) -> bool {
        let turn = self.turn.get();
        let may_have_one = connection.writes.is_of(turn);
        if !self.may_send_fire_and_forget.get()
            || connection.readiness.has_hung_up()
            || !connection.writes.take(turn, OPERATIONS_PER_TURN)
        {
            return false;
        }
        self.fire_and_forget_sends.borrow_mut().add_copy(key, connection.socket().as_raw_fd(), bytes, may_have_one)
    }

    /// As [`StreamDriver::try_send`], for a connection on the ring: takes all of `out`, or nothing.
    pub(super) fn try_send_fire_and_forget(&self, key: Key, connection: &mut Connection, out: &mut Output) -> bool {
        let turn = self.turn.get();
        let is_fit = out.len_bytes() <= CHUNKS_MAX && out.chunk_count() <= SLICES_MAX && !out.has_loan();
        // If the connection had a send here, its chunks would have to follow it.
        let is_fit = is_fit && self.may_send_fire_and_forget.get() && !connection.readiness.has_hung_up();
        if !is_fit || connection.writes.is_of(turn) {
            return false;
        }
        let mut sends = self.fire_and_forget_sends.borrow_mut();
        if !sends.has_room(out.len_bytes()) || !connection.writes.take(turn, OPERATIONS_PER_TURN) {
            return false;
        }
        let mut sending = self.sendings.borrow_mut().pop().unwrap_or_default();
        sending.output = std::mem::take(out);
        sends.add_chunks(key, connection.socket().as_raw_fd(), sending);
        true
    }

    /// Forgets the sends of this turn: they have left, or their rests were handled.
    pub(super) fn clear_fire_and_forget_sends(&self) {
        // Dropping a chunk runs foreign code, so the list is not borrowed then.
        let mut list = std::mem::take(&mut self.fire_and_forget_sends.borrow_mut().list);
        for send in list.drain(..) {
            if let What::Chunks(sending) = send.what {
                self.keep(sending);
            }
        }
        let mut sends = self.fire_and_forget_sends.borrow_mut();
        sends.list = list;
        sends.clear();
    }

    /// Sends the connection's bytes of this turn now, before another operation on it. `is_last` as in
    /// [`StreamDriver::try_send`].
    pub(super) fn send_fire_and_forget_now(&self, key: Key, connection: &mut Connection, is_last: bool) {
        let mut sends = self.fire_and_forget_sends.borrow_mut();
        if sends.is_empty() || !connection.writes.is_of(self.turn.get()) {
            return;
        }
        let Some(taken) = sends.take_back(key) else { return };
        if matches!(connection.stage, Stage::Resetting(_)) {
            return;
        }
        self.send_taken(key, connection, taken, is_last);
    }

    /// Sends bytes that were taken back; the ring sends the part that the socket does not accept.
    ///
    /// After an error the ring sends all of them: the socket may be intact (ENOBUFS, ENOMEM), and without them the peer
    /// would take later data in their place. If the socket is broken, the ring's send fails, which marks the connection
    /// as broken.
    fn send_taken(&self, key: Key, connection: &mut Connection, taken: Taken<'_>, is_last: bool) {
        match taken {
            Taken::Copy(bytes) => {
                let sent = self.sockets.send_now(connection.socket().as_fd(), bytes, is_last).unwrap_or(0);
                self.owe_copy(key, connection, &bytes[sent..]);
            }
            Taken::Chunks(sending) => {
                let sent = self.sockets.send_chunks_now(connection.socket().as_fd(), &sending.output, is_last);
                let sent = sent.map_or(0, |(sent, _)| sent);
                self.owe(key, connection, sending, sent);
            }
        }
    }

    /// Sends a copy of `rest` on the ring as soon as the socket accepts it.
    fn owe_copy(&self, key: Key, connection: &mut Connection, rest: &[u8]) {
        if rest.is_empty() {
            return;
        }
        // The sender counts these bytes as sent, so they are kept even if the worker's limit of leases is reached.
        let mut kept = Buffer::new();
        kept.append_past_limit(rest);
        let mut sending = self.sendings.borrow_mut().pop().unwrap_or_default();
        sending.output.push(kept.take_lease().expect("there is a rest"));
        self.owe(key, connection, sending, 0);
    }

    /// Sends the bytes after the first `sent` on the ring as soon as the socket accepts them.
    fn owe(&self, key: Key, connection: &mut Connection, mut sending: Box<Sending>, sent: usize) {
        sending.output.consume(sent);
        if sending.output.is_empty() {
            return self.keep(sending);
        }
        sending.ticket = OWNED;
        sending.offered = sending.output.len_bytes();
        connection.busy().sending = Some(sending);
        self.request(key, connection, Op::Send);
    }

    /// True if a closed connection has to stay until the driver has sent its rest.
    pub(super) fn must_stay(&self, connection: &mut Connection) -> bool {
        let is_owing = connection.sending().is_some_and(|sending| sending.is_owned());
        if !is_owing || !matches!(connection.stage, Stage::Open(_)) {
            return false;
        }
        connection.change_stage(Stage::linger);
        // A Unix socket has no such timeout: its peer takes the rest, or leaves, or newer ones displace it
        // (`stay_closed`).
        let _ = self.sockets.set_user_timeout(connection.socket().as_fd(), UNSENT_TIMEOUT.as_millis() as u32);
        true
    }

    /// Counts a connection that is closed but still has bytes to send. If there are too many, the oldest is closed.
    pub(super) fn stay_closed(&self, key: Key) {
        self.staying.update(|staying| staying + 1);
        let oldest = {
            let mut closed = self.closed.borrow_mut();
            closed.push_back(key);
            if closed.len() > CLOSED_MAX { closed.pop_front() } else { None }
        };
        let Some(oldest) = oldest else { return };
        // Most have long gone.
        let is_lingering = |connection: &mut Connection| matches!(connection.stage, Stage::Lingering(_));
        let is_there = self.connections.borrow_mut().get_mut(oldest).is_some_and(is_lingering);
        if is_there {
            self.close(oldest);
        }
    }

    /// Removes a closed connection that stayed. Returns the task that waits for the last one.
    pub(super) fn leave_closed(&self) -> Option<Waker> {
        self.staying.update(|staying| staying - 1);
        if self.staying.get() == 0 { self.all_sent_waiter.borrow_mut().take() } else { None }
    }

    /// Takes all completions of the call if there were fire-and-forget sends: the failed ones have to be known before
    /// anything is added again.
    pub(super) fn take_failed_fire_and_forget_sends(
        &self,
        ring: &mut Ring<impl Queues>,
        completions: &mut Vec<Completion>,
    ) -> io::Result<()> {
        if self.fire_and_forget_sends.borrow().is_empty() {
            return Ok(());
        }
        ring.take(completions, usize::MAX);
        for _ in 0..OVERFLOW_CALLS_MAX {
            if !ring.has_overflow() {
                return Ok(());
            }
            ring.enter(Some(Duration::ZERO))?;
            ring.take(completions, usize::MAX);
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    /// Queues the rests of failed sends. Comes before all other completions: those wake tasks, and may close
    /// connections.
    pub(super) fn handle_failed_fire_and_forget_sends(&self, completions: &[Completion]) {
        if self.fire_and_forget_sends.borrow().is_empty() {
            return;
        }
        for completion in completions {
            if let (KIND_FIRE_AND_FORGET_SEND, key) = kind_and_key(completion.user_data) {
                self.handle_failed_fire_and_forget_send(key, completion);
            }
        }
    }

    /// Breaks off the connections of this turn's sends: completions were lost, so their results are unknown.
    #[cold]
    pub(super) fn break_off_fire_and_forget_sends(&self) {
        let keys: Vec<Key> = self.fire_and_forget_sends.borrow().list.iter().map(|send| send.key).collect();
        for key in keys {
            let mut connections = self.connections.borrow_mut();
            let Some(connection) = connections.get_mut(key) else { continue };
            self.break_off(connection, Errno::NOMEM);
            let wakers = connection.take_all_wakers();
            drop(connections);
            wakers.into_iter().flatten().for_each(Waker::wake);
        }
    }

    fn handle_failed_fire_and_forget_send(&self, key: Key, completion: &Completion) {
        let mut connections = self.connections.borrow_mut();
        let Some(connection) = connections.get_mut(key) else { return };
        if completion.was_refused() {
            // A direct call takes no memory of the ring.
            if let Some(taken) = self.fire_and_forget_sends.borrow_mut().take_back(key) {
                self.send_taken(key, connection, taken, false);
            }
            return;
        }
        let result = completion.result;
        let sent = match usize::try_from(result) {
            Ok(sent) => sent,
            Err(_) if is_temporary(Errno::from_raw_os_error(-result)) => 0,
            // The connection is broken, and no other operation may report it: a peer that only stops reading is no
            // event for the receive in flight, and some kernels forget an end that came right behind data (liburing's
            // issue 1549).
            Err(_) => {
                self.break_off(connection, Errno::from_raw_os_error(-result));
                let wakers = connection.take_all_wakers();
                drop(connections);
                return wakers.into_iter().flatten().for_each(Waker::wake);
            }
        };
        match self.fire_and_forget_sends.borrow_mut().take_back(key) {
            Some(Taken::Copy(bytes)) => self.owe_copy(key, connection, bytes.get(sent..).unwrap_or_default()),
            Some(Taken::Chunks(sending)) => self.owe(key, connection, sending, sent),
            None => {}
        }
    }
}

impl IoUring<Linux> {
    /// Tests whether the kernel refuses at once, and reports exactly, the part that a full socket does not take: first
    /// for a send that fits in part, then for one that does not fit at all. If it does not, sends are queued.
    pub(super) fn test_fire_and_forget_sends(
        &self,
        pair: impl Fn() -> Result<(OwnedFd, OwnedFd), Errno>,
    ) -> io::Result<()> {
        for in_chunks in [false, true] {
            if self.may_send_fire_and_forget.get() {
                self.test_fire_and_forget_sends_of(in_chunks, pair()?)?;
            }
        }
        Ok(())
    }

    fn test_fire_and_forget_sends_of(&self, in_chunks: bool, (near, far): (OwnedFd, OwnedFd)) -> io::Result<()> {
        sockopt::set_socket_send_buffer_size(&near, 1)?;
        let near = self.attach(near, Fresh::Connected);
        self.connections.borrow_mut().get_mut(near).expect("just attached").mode = Mode::Ring(Expects::Messages);
        const FIRST: usize = if TEST_BYTES > CHUNKS_MAX { CHUNKS_MAX } else { TEST_BYTES };
        let first = if in_chunks { &[0; TEST_BYTES][..FIRST] } else { &[0; TEST_BYTES][..] };
        let tested = self.test_fire_and_forget_send(near, first, in_chunks).and_then(|rest| match rest {
            Some(rest) if rest > 0 && rest < first.len() => {
                let is_refused = self.test_fire_and_forget_send(near, b"answer", in_chunks)? == Some(6);
                Ok(is_refused && drain(&far)? == first.len() - rest)
            }
            _ => Ok(false),
        });
        self.close(near);
        self.may_send_fire_and_forget.set(tested?);
        Ok(())
    }

    /// Sends fire-and-forget. Returns the bytes that the driver then had to send itself; `None` if the kernel has
    /// reported nothing.
    fn test_fire_and_forget_send(&self, near: Key, bytes: &'static [u8], in_chunks: bool) -> io::Result<Option<usize>> {
        self.turn.update(|turn| turn.wrapping_add(1));
        let taken = if in_chunks {
            let mut out = Output::new();
            let (one, other) = bytes.split_at(bytes.len() / 2);
            out.push(one);
            out.push(other);
            self.try_send(near, &mut out, false)?
        } else {
            self.try_send_copy(near, bytes, false)?
        };
        if taken != bytes.len() {
            return Ok(None);
        }
        self.make_entries();
        let mut completions = Vec::new();
        {
            let mut ring = self.ring.borrow_mut();
            ring.enter(Some(Duration::ZERO))?;
            self.take_failed_fire_and_forget_sends(&mut ring, &mut completions)?;
        }
        self.handle_failed_fire_and_forget_sends(&completions);
        completions.iter().for_each(|completion| self.handle_completion(completion));
        let mut connections = self.connections.borrow_mut();
        let connection = connections.get_mut(near).expect("attached by the caller");
        let rest = connection.take_sending().map(|sending| sending.offered);
        connection.wanted = Ops::default();
        match rest {
            Some(_) => self.clear_fire_and_forget_sends(),
            None => self.fire_and_forget_sends.borrow_mut().leak(),
        }
        Ok(rest)
    }
}

/// Receives all data that has arrived and returns its length.
fn drain(socket: &OwnedFd) -> io::Result<usize> {
    let mut received = 0;
    loop {
        match net::recv(socket, &mut [0; 4096], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::AGAIN) => return Ok(received),
            Ok((count, _)) => received += count,
            Err(errno) => return Err(errno.into()),
        }
    }
}
