//! Fire-and-forget sends: short answers that leave with the call that ends the turn, and whose end nobody waits for.
//!
//! Such a send is to its sender what a write into the socket's buffer is: done. A few bytes are copied here, chunks are
//! taken over as they are; when the turn ends they become sends with `MSG_DONTWAIT`, which the kernel carries out while
//! it takes them, and which say nothing when all is sent. So there is nothing to wake and nothing to remember of a
//! connection: the memory serves the next turn, and the chunks go when the call has returned. What a full socket did
//! not take is told by a completion of the same call; its rest becomes a usual send, which the driver owns
//! (`Sending::is_owned`). Until then nothing else may be sent on that connection: whoever wants to has this sent
//! directly first ([`FireAndForgetSends::take_back`]). A connection that is closed meanwhile stays until its rest has
//! left; whoever ends a loop may wait for that (`all_sent`), or it is lost.
//!
//! That the kernel works this way is tried out by the driver's self-test; where it does not, sends are queued instead.
//! (A kernel that forgot of what it had sent a part would have us send that twice.)

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::task::Waker;
use std::time::Duration;

use io_uring::squeue::Flags;
use io_uring::{opcode, types};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, sockopt};

use super::connection::{Connection, OWNED, Sending, is_temporary};
use super::operation::{KIND_FIRE_AND_FORGET_SEND, Op, Ops, kind_and_key, user_data};
use super::ring::{Completion, Queues, Ring};
use super::sockets::Sockets;
use super::{IoUring, Kernel, Linux};
use crate::driver::direct::OPERATIONS_PER_TURN;
use crate::driver::{Fresh, StreamDriver};
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::{Output, SLICES_MAX};

/// Bytes that are sent so in a turn at most: a turn's 512 polls with answers of 2 KiB each.
const BYTES_PER_TURN_MAX: usize = 1024 * 1024;

/// The chunks of a connection have so many bytes together at most: the kernel copies them in the call that ends the
/// turn.
const CHUNKS_MAX: usize = 32 * 1024;

/// How long a peer may take nothing of what was left for it when its connection was closed.
const UNSENT_TIMEOUT: Duration = Duration::from_secs(60);

/// How many closed connections may wait for room for what is left: each holds a descriptor that no stream answers for.
const CLOSED_MAX: usize = 128;

/// Calls until every send that failed is known: each brings a full queue, and the kernel has as many completions at
/// most as there are operations in flight.
const OVERFLOW_CALLS_MAX: u32 = 100_000;

/// What the self-test sends to a socket that is not full, and does not hold so much.
const TEST_BYTES: usize = 64 * 1024;

/// Memory that is kept from turn to turn, in bytes.
const KEPT_MAX: usize = 128 * 1024;

/// The fire-and-forget sends of one turn.
#[derive(Default)]
pub(super) struct FireAndForgetSends {
    list: Vec<FireAndForgetSend>,
    /// The bytes of all copies, one after another.
    bytes: Vec<u8>,
    /// How many bytes the chunks have.
    chunk_bytes: usize,
}

struct FireAndForgetSend {
    key: Key,
    descriptor: RawFd,
    what: What,
}

/// What is sent.
enum What {
    /// This part of the copies.
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

    /// Adds a copy of `bytes`, behind what the connection has if that is the last one, and a copy. False when that is
    /// not so, or there is no room in this turn. `may_have_one` = the connection may have a send here.
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

    /// Takes a connection's send out again, for who has to send it in another way. (Rare, so it is searched for.)
    fn take_back(&mut self, key: Key) -> Option<Taken<'_>> {
        let index = self.list.iter().rposition(|send| send.key == key)?;
        Some(match self.list.swap_remove(index).what {
            What::Copy(range) => Taken::Copy(&self.bytes[range]),
            What::Chunks(sending) => Taken::Chunks(sending),
        })
    }

    /// Gives up the memory that the kernel may still look at after all: when the self-test finds that it works
    /// otherwise.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// Makes the entries. Until [`FireAndForgetSends::clear`] nothing may be added.
    pub fn make_entries(&mut self, ring: &mut Ring<impl Queues>) {
        // MSG_WAITALL: a short send is an error, of which the kernel tells.
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
            // SAFETY: the connection's slot owns the descriptor, and whoever closes it takes the send back. The bytes,
            // and what the entry says of chunks, stay where they are until `clear`, and the kernel looks at them while
            // it takes the entry, not later.
            unsafe { ring.push(&entry) };
        }
    }

    /// Whether a completion tells of a fire-and-forget send that failed.
    pub fn is_of_fire_and_forget_send(completion: &Completion) -> bool {
        kind_and_key(completion.user_data).0 == KIND_FIRE_AND_FORGET_SEND
    }

    /// All are sent, or their rests taken care of.
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

/// What was taken back.
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
            || connection.hung_up
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
        // A connection that may have a send here would need its chunks behind that.
        if !is_fit || !self.may_send_fire_and_forget.get() || connection.hung_up || connection.writes.is_of(turn) {
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

    /// The fire-and-forget sends have left, or their rests are taken care of.
    pub(super) fn clear_fire_and_forget_sends(&self) {
        // Nobody knows what the owner of a chunk does when it goes.
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

    /// Sends what the connection has here in this turn, before something else is done with it. `is_last` as in
    /// [`StreamDriver::try_send`].
    pub(super) fn send_fire_and_forget_now(&self, key: Key, connection: &mut Connection, is_last: bool) {
        let mut sends = self.fire_and_forget_sends.borrow_mut();
        if sends.is_empty() || !connection.writes.is_of(self.turn.get()) {
            return;
        }
        let Some(taken) = sends.take_back(key) else { return };
        if connection.is_reset {
            return;
        }
        self.send_taken(key, connection, taken, is_last);
    }

    /// Sends what was taken back; the ring sends what the socket does not take.
    ///
    /// After an error that is everything: the socket may be whole (ENOBUFS, ENOMEM), and what came next would be taken
    /// for what is missing. If it is broken, the ring's send fails, which breaks the connection off.
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

    /// Has the ring send a copy of `rest` as soon as the socket takes it.
    fn owe_copy(&self, key: Key, connection: &mut Connection, rest: &[u8]) {
        if rest.is_empty() {
            return;
        }
        // The bytes count as sent already, so they are kept even where the worker's memory for buffers is exhausted.
        let mut kept = Buffer::new();
        kept.append_past_limit(rest);
        let mut sending = self.sendings.borrow_mut().pop().unwrap_or_default();
        sending.output.push(kept.take_lease().expect("there is a rest"));
        self.owe(key, connection, sending, 0);
    }

    /// Has the ring send what is behind the first `sent` bytes as soon as the socket takes it.
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

    /// Whether a connection that is closed has to stay for what the driver still has to send.
    pub(super) fn must_stay(&self, connection: &mut Connection) -> bool {
        let is_owing = connection.sending().is_some_and(|sending| sending.is_owned());
        if !is_owing || connection.is_reset || connection.is_closing {
            return false;
        }
        connection.is_closing = true;
        // A Unix socket has no such bound: its peer takes the rest, or leaves, or there are others (`stay_closed`).
        let _ = self.sockets.set_user_timeout(connection.socket().as_fd(), UNSENT_TIMEOUT.as_millis() as u32);
        true
    }

    /// Notes a closed connection that stays. The oldest of too many gives way.
    pub(super) fn stay_closed(&self, key: Key) {
        self.staying.update(|staying| staying + 1);
        let oldest = {
            let mut closed = self.closed.borrow_mut();
            closed.push_back(key);
            if closed.len() > CLOSED_MAX { closed.pop_front() } else { None }
        };
        let Some(oldest) = oldest else { return };
        // Most have long gone.
        let is_there = self.connections.borrow_mut().get_mut(oldest).is_some_and(|connection| connection.is_closing);
        if is_there {
            self.close(oldest);
        }
    }

    /// A closed connection that stayed goes. Returns who waits for that, if it was the last one.
    pub(super) fn leave_closed(&self) -> Option<Waker> {
        self.staying.update(|staying| staying - 1);
        if self.staying.get() == 0 { self.all_sent_waiter.borrow_mut().take() } else { None }
    }

    /// Takes all completions that the call has brought about, when there were fire-and-forget sends: which of
    /// them failed has to be known before anything is added again.
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

    /// Has what failed sends have left sent later. Comes before all other completions: those wake, and may close.
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

    /// Completions are lost: whether the sends have left of which nothing was told is unknown.
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

    /// A fire-and-forget send has failed, or was not sent to its end.
    fn handle_failed_fire_and_forget_send(&self, key: Key, completion: &Completion) {
        let mut connections = self.connections.borrow_mut();
        let Some(connection) = connections.get_mut(key) else { return };
        if completion.was_refused() {
            // A call of its own takes no memory of the ring's.
            if let Some(taken) = self.fire_and_forget_sends.borrow_mut().take_back(key) {
                self.send_taken(key, connection, taken, false);
            }
            return;
        }
        let result = completion.result;
        let sent = match usize::try_from(result) {
            Ok(sent) => sent,
            Err(_) if is_temporary(Errno::from_raw_os_error(-result)) => 0,
            // The connection is broken, and nobody else might say so: a peer that only reads no more is no event for
            // the receive in flight, and some kernels forget an end that came right behind data (liburing's issue
            // 1549).
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
    /// Tries whether the kernel refuses at once, and tells exactly, what a full socket does not take: of a send that
    /// fits in part, and then of one that does not fit at all. Where that is not so, sends are queued.
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
        self.connections.borrow_mut().get_mut(near).expect("just attached").is_on_ring = true;
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

    /// Sends fire-and-forget, and says how much of it the driver then had to send itself; `None` if the kernel has said
    /// nothing.
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

/// Receives all that has arrived, and says how much that was.
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
