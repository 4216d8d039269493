//! The simulated driver: sockets of a simulated world (`crate::simulation`) in place of the kernel's.
//!
//! It behaves in every way that the two real drivers may: an operation is tried when its socket is ready, as with
//! epoll, or is in flight and completes later, as with io_uring, with bytes received ahead of the reader and an
//! [`Output`] on loan. Chance decides for each operation which it is, and whether it is short, returns a spurious
//! EAGAIN, or wakes in vain. In no case is a byte lost, duplicated or reordered.
//!
//! Its only system calls make descriptors that serve as names. It panics instead of waiting for ever, because no event
//! from outside could end the wait: a task hangs.

mod datagrams;
mod listeners;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::io::Errno;

use super::direct::SEND_MAX;
use super::{Driver, End, FileDriver, Fresh, Released, StreamDriver};
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::simulation::{Event, Named, Side, World, storm};
use crate::socket::{ConnectError, ConnectOptions, ConnectStep, SocketAddress};

/// Bytes that a receive in flight takes at most, like a buffer of the ring.
const RECEIVED_MAX: usize = 4096;

/// Bytes on loan at most, as with io_uring.
const QUEUED_SEND_MAX: usize = 32 * 1024;

pub(crate) struct Simulated {
    world: Rc<World>,
    sockets: RefCell<Slots<Socket>>,
    listeners: RefCell<Slots<Listening>>,
    tickets: Cell<u32>,
}

struct Socket {
    descriptor: OwnedFd,
    end: Key,
    is_receiving: bool,
    /// Data of a receive in flight that was not read yet.
    received: Vec<u8>,
    receive_error: Option<Errno>,
    /// A receive in flight has found the end of the stream, which later receives find again.
    has_ended: bool,
    sending: Option<Sending>,
    /// Spurious wake-ups that are planned for each side. At most one each: more would multiply.
    will_be_told: [bool; 3],
    reader: Parked,
    writer: Parked,
    closed_waiter: Parked,
}

struct Sending {
    ticket: u32,
    output: Output,
    state: SendState,
}

#[derive(Clone, Copy)]
enum SendState {
    /// Nothing has been sent yet.
    Waits,
    /// The send has happened, but its completion was not reported yet.
    Untold(Result<usize, Errno>),
    Complete(Result<usize, Errno>),
}

struct Listening {
    _socket: Arc<OwnedFd>,
    listener: Key,
    will_be_told: bool,
    acceptor: Parked,
}

impl Simulated {
    pub fn new(world: Rc<World>) -> Self {
        Simulated {
            world,
            sockets: RefCell::new(Slots::new()),
            listeners: RefCell::new(Slots::new()),
            tickets: Cell::new(0),
        }
    }

    fn with<T>(&self, key: Key, f: impl FnOnce(&mut Socket) -> T) -> T {
        f(self.sockets.borrow_mut().get_mut(key).expect("an open stream owns its slot"))
    }

    /// Parks the task until there is an event for this side of the socket.
    fn park(&self, key: Key, cx: &mut Context<'_>, side: Side) -> Poll<io::Result<usize>> {
        let displaced = self.with(key, |socket| socket.waiter(side).park(cx.waker()));
        drop(displaced);
        if self.world.fate.strikes(|faults| faults.spurious_wakes) {
            self.will_tell(key, side);
        }
        Poll::Pending
    }

    /// True if to return a spurious EAGAIN; a wake-up follows later.
    fn hesitates(&self, key: Key, side: Side) -> bool {
        let hesitates = self.world.fate.strikes(|faults| faults.would_block);
        if hesitates {
            self.will_tell(key, side);
        }
        hesitates
    }

    /// Plans a wake-up of this side, with or without an event.
    fn will_tell(&self, key: Key, side: Side) {
        if !self.with(key, |socket| std::mem::replace(&mut socket.will_be_told[side as usize], true)) {
            self.world.fate.plan(storm(&self.world.fate), Event::Ready { slot: key, side });
        }
    }

    fn completes_later(&self) -> bool {
        self.world.fate.strikes(|faults| faults.completions)
    }

    /// Takes the data of a receive in flight.
    fn take_received(&self, key: Key, into: &mut Buffer, max: usize) -> Option<io::Result<usize>> {
        self.with(key, |socket| {
            if let Some(errno) = socket.receive_error.take() {
                return Some(Err(errno.into()));
            }
            let count = socket.received.len().min(max);
            if count == 0 {
                return None;
            }
            let appended = into.append(&socket.received[..count]);
            if appended.is_ok() {
                socket.received.drain(..count);
            }
            Some(appended.map(|()| count))
        })
    }

    /// Receives data that has arrived; `Err(AGAIN)` without any.
    fn receive(&self, end: Key, into: &mut Buffer, max: usize) -> io::Result<usize> {
        let spare = into.spare(max)?;
        let received = self.world.network.borrow_mut().receive(&self.world.fate, end, spare);
        into.commit(received.unwrap_or(0));
        Ok(received?)
    }

    /// Sends bytes from the front of `chunks` and returns how many.
    fn send<'b>(&self, end: Key, chunks: impl Iterator<Item = &'b [u8]>) -> Result<usize, Errno> {
        let fate = &self.world.fate;
        let mut network = self.world.network.borrow_mut();
        let room = network.room(end)?.min(SEND_MAX);
        let mut bytes: Vec<u8> = chunks.flatten().copied().take(room).collect();
        if fate.strikes(|faults| faults.short_writes) {
            bytes.truncate(fate.random.up_to(bytes.len()));
        }
        network.send(fate, end, &bytes);
        Ok(bytes.len())
    }

    /// Result of the send in flight: `None` if there is none and `out` is to be sent.
    fn poll_sending(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Option<Poll<io::Result<usize>>> {
        let result = self.with(key, |socket| {
            Some(match socket.sending.as_ref()?.state {
                SendState::Complete(result) => Some((result, socket.sending.take().expect("checked above"))),
                SendState::Waits | SendState::Untold(_) => None,
            })
        });
        let Some(complete) = result else {
            out.forget_loan();
            return None;
        };
        let Some((result, mut sending)) = complete else {
            return Some(self.park(key, cx, Side::Write));
        };
        sending.output.consume(result.unwrap_or(0));
        if !out.take_back(sending.ticket, &mut sending.output) {
            // The send of another queue: now `out` is sent.
            out.forget_loan();
            return None;
        }
        Some(Poll::Ready(result.map_err(io::Error::from)))
    }

    /// Lends `out` to a send in flight, which happens now or later.
    fn lend(&self, key: Key, end: Key, out: &mut Output) {
        let fate = &self.world.fate;
        let ticket = self.tickets.get().wrapping_add(1);
        self.tickets.set(ticket);
        let output = out.lend(ticket);
        let mut state = SendState::Waits;
        if fate.random.chance(500) {
            match self.send(end, output.chunks()) {
                Err(Errno::AGAIN) => {}
                result => state = SendState::Untold(result),
            }
        }
        fate.plan(fate.within(fate.faults().late_max), Event::Ready { slot: key, side: Side::Write });
        self.with(key, |socket| socket.sending = Some(Sending { ticket, output, state }));
    }

    /// Closes a connection's end; memory on loan comes back later.
    fn close_end(&self, end: Key, sending: Option<Sending>) {
        let fate = &self.world.fate;
        if let Some(sending) = sending {
            fate.plan(fate.within(fate.faults().late_max), Event::Release { _memory: sending.output });
        }
        self.world.network.borrow_mut().close(fate, end);
    }

    /// Continues the operations in flight of a socket and wakes its waiter.
    fn handle_ready(&self, key: Key, side: Side) {
        let mut sockets = self.sockets.borrow_mut();
        // The socket was closed meanwhile.
        let Some(socket) = sockets.get_mut(key) else { return };
        let number = self.world.network.borrow_mut().number(socket.end);
        self.world.fate.note(side.name(), number, 0);
        socket.will_be_told[side as usize] = false;
        match side {
            Side::Read if socket.is_receiving => self.complete_receive(socket),
            Side::Write => self.complete_send(socket),
            _ => {}
        }
        let waker = socket.waiter(side).take();
        drop(sockets);
        waker.into_iter().for_each(Waker::wake);
    }

    fn complete_receive(&self, socket: &mut Socket) {
        let mut bytes = [0; RECEIVED_MAX];
        let result = self.world.network.borrow_mut().receive(&self.world.fate, socket.end, &mut bytes);
        socket.is_receiving = result == Err(Errno::AGAIN);
        match result {
            Ok(0) => socket.has_ended = true,
            Ok(count) => socket.received.extend(&bytes[..count]),
            Err(Errno::AGAIN) => {}
            Err(errno) => socket.receive_error = Some(errno),
        }
    }

    fn complete_send(&self, socket: &mut Socket) {
        let Some(sending) = &mut socket.sending else { return };
        sending.state = match sending.state {
            SendState::Waits => match self.send(socket.end, sending.output.chunks()) {
                Err(Errno::AGAIN) => SendState::Waits,
                result => SendState::Complete(result),
            },
            SendState::Untold(result) | SendState::Complete(result) => SendState::Complete(result),
        };
    }

    fn handle(&self, event: Event) {
        match self.world.handle(event) {
            Some(Event::Ready { slot, side }) => self.handle_ready(slot, side),
            Some(Event::ListenerReady { slot }) => {
                let acceptor = self.listeners.borrow_mut().get_mut(slot).and_then(|listening| {
                    listening.will_be_told = false;
                    listening.acceptor.take()
                });
                acceptor.into_iter().for_each(Waker::wake);
            }
            // Memory on loan is returned by dropping the event; operations belong to the simulated ring.
            _ => {}
        }
    }

    pub(crate) fn accept(&self, listener: Key) -> io::Result<Option<(OwnedFd, SocketAddress)>> {
        let accepted = self.world.network.borrow_mut().accept(&self.world.fate, listener)?;
        accepted.map(|(end, peer)| Ok((self.world.descriptor(Named::End(end))?, peer))).transpose()
    }
}

impl Socket {
    fn waiter(&mut self, side: Side) -> &mut Parked {
        match side {
            Side::Read => &mut self.reader,
            Side::Write => &mut self.writer,
            Side::HangUp => &mut self.closed_waiter,
        }
    }
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Read => "ready to read",
            Side::Write => "ready to write",
            Side::HangUp => "hung up",
        }
    }
}

impl StreamDriver for Simulated {
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        let end = self.world.network.borrow_mut().connect(&self.world.fate, address, options.local.as_ref());
        let descriptor = self.world.descriptor(Named::End(end));
        let descriptor = descriptor.map_err(|error| ConnectError { step: ConnectStep::Socket, error })?;
        Ok((descriptor, Fresh::Connecting))
    }

    fn attach(&self, socket: OwnedFd, _fresh: Fresh) -> Key {
        let Named::End(end) = self.world.named(&socket) else { panic!("a listening socket is no stream") };
        let key = self.sockets.borrow_mut().insert(Socket {
            descriptor: socket,
            end,
            is_receiving: false,
            received: Vec::new(),
            receive_error: None,
            has_ended: false,
            sending: None,
            will_be_told: [false; 3],
            reader: Parked::new(),
            writer: Parked::new(),
            closed_waiter: Parked::new(),
        });
        self.world.network.borrow_mut().attach(end, key);
        key
    }

    fn descriptor(&self, key: Key) -> RawFd {
        self.with(key, |socket| socket.descriptor.as_raw_fd())
    }

    /// A name has no socket options. Options change when packets leave, which is random here anyway.
    fn kernel_socket(&self, _key: Key) -> Option<RawFd> {
        None
    }

    fn release(&self, key: Key) -> io::Result<Released> {
        let socket = self.sockets.borrow_mut().remove(key).ok_or(io::ErrorKind::NotConnected)?;
        let Socket { descriptor, end, received, receive_error, sending, reader, writer, closed_waiter, .. } = socket;
        drop((reader, writer, closed_waiter));
        if let Some(sending) = sending {
            // The number of bytes that will have left is unknown.
            self.close_end(end, Some(sending));
            return Err(Errno::BUSY.into());
        }
        self.world.network.borrow_mut().detach(end);
        let mut ahead = Buffer::new();
        ahead.append_past_limit(&received);
        Ok(Released { socket: descriptor, received: ahead, error: receive_error })
    }

    fn close(&self, key: Key) {
        if let Some(Socket { end, sending, .. }) = self.sockets.borrow_mut().remove(key) {
            self.close_end(end, sending);
        }
    }

    fn poll_readable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (end, is_receiving, has_input) = self.with(key, |socket| {
            let has_input = !socket.received.is_empty() || socket.receive_error.is_some() || socket.has_ended;
            (socket.end, socket.is_receiving, has_input)
        });
        if has_input {
            return Poll::Ready(Ok(()));
        }
        if is_receiving || self.hesitates(key, Side::Read) || !self.world.network.borrow_mut().is_readable(end) {
            return self.park(key, cx, Side::Read).map_ok(drop);
        }
        Poll::Ready(Ok(()))
    }

    fn has_input(&self, key: Key) -> bool {
        self.with(key, |socket| {
            let has_received = !socket.received.is_empty() || socket.receive_error.is_some() || socket.has_ended;
            has_received || self.world.network.borrow_mut().is_readable(socket.end)
        })
    }

    fn poll_writable(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (end, sending) =
            self.with(key, |socket| (socket.end, socket.sending.as_ref().map(|sending| sending.state)));
        match sending {
            Some(SendState::Complete(_)) => return Poll::Ready(Ok(())),
            Some(SendState::Waits | SendState::Untold(_)) => return self.park(key, cx, Side::Write).map_ok(drop),
            None => {}
        }
        let is_full = self.world.network.borrow_mut().room(end) == Err(Errno::AGAIN);
        if is_full || self.hesitates(key, Side::Write) {
            return self.park(key, cx, Side::Write).map_ok(drop);
        }
        Poll::Ready(Ok(()))
    }

    fn is_full(&self, key: Key) -> bool {
        let end = self.with(key, |socket| socket.end);
        self.world.network.borrow_mut().room(end) == Err(Errno::AGAIN)
    }

    fn poll_recv(&self, key: Key, cx: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        if let Some(received) = self.take_received(key, into, max) {
            return Poll::Ready(received);
        }
        let (end, is_receiving, has_ended) =
            self.with(key, |socket| (socket.end, socket.is_receiving, socket.has_ended));
        if is_receiving || self.hesitates(key, Side::Read) {
            return self.park(key, cx, Side::Read);
        }
        let is_readable = self.world.network.borrow_mut().is_readable(end);
        if !has_ended && max <= RECEIVED_MAX && self.completes_later() {
            self.with(key, |socket| socket.is_receiving = true);
            if is_readable {
                let fate = &self.world.fate;
                fate.plan(fate.within(fate.faults().late_max), Event::Ready { slot: key, side: Side::Read });
            }
            return self.park(key, cx, Side::Read);
        }
        if !is_readable {
            return self.park(key, cx, Side::Read);
        }
        Poll::Ready(self.receive(end, into, max))
    }

    fn poll_send(&self, key: Key, cx: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        if out.is_empty() {
            return Poll::Ready(Ok(0));
        }
        if let Some(polled) = self.poll_sending(key, cx, out) {
            return polled;
        }
        if out.is_empty() {
            // All its data was on loan to a connection that has gone.
            return Poll::Ready(Ok(0));
        }
        if self.hesitates(key, Side::Write) {
            return self.park(key, cx, Side::Write);
        }
        let end = self.with(key, |socket| socket.end);
        if !out.more_follows() && out.len_bytes() <= QUEUED_SEND_MAX && self.completes_later() {
            self.lend(key, end, out);
            return self.park(key, cx, Side::Write);
        }
        match self.send(end, out.chunks()) {
            Err(Errno::AGAIN) => self.park(key, cx, Side::Write),
            result => {
                out.consume(result.unwrap_or(0));
                Poll::Ready(result.map_err(io::Error::from))
            }
        }
    }

    fn try_send(&self, key: Key, out: &mut Output, _is_last: bool) -> io::Result<usize> {
        let (end, is_sending) = self.with(key, |socket| (socket.end, socket.sending.is_some()));
        if is_sending || out.is_empty() || self.world.fate.strikes(|faults| faults.would_block) {
            return Ok(0);
        }
        match self.send(end, out.chunks()) {
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
            Ok(sent) => {
                out.consume(sent);
                Ok(sent)
            }
        }
    }

    fn try_send_copy(&self, key: Key, bytes: &[u8], _is_last: bool) -> io::Result<usize> {
        let (end, is_sending) = self.with(key, |socket| (socket.end, socket.sending.is_some()));
        if is_sending || bytes.is_empty() || self.world.fate.strikes(|faults| faults.would_block) {
            return Ok(0);
        }
        match self.send(end, std::iter::once(bytes)) {
            Err(Errno::AGAIN) => Ok(0),
            result => Ok(result?),
        }
    }

    fn poll_sendfile(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        // A send whose waiter has gone still comes first.
        if let Some(Poll::Pending) = self.poll_sending(key, cx, &mut Output::new()) {
            return Poll::Pending;
        }
        if self.hesitates(key, Side::Write) {
            return self.park(key, cx, Side::Write);
        }
        let end = self.with(key, |socket| socket.end);
        let fate = &self.world.fate;
        let mut network = self.world.network.borrow_mut();
        let mut length = match network.room(end) {
            Ok(room) => room.min(SEND_MAX).min(length),
            Err(Errno::AGAIN) => {
                drop(network);
                return self.park(key, cx, Side::Write);
            }
            Err(errno) => return Poll::Ready(Err(errno.into())),
        };
        if length > 0 && fate.strikes(|faults| faults.short_writes) {
            length = fate.random.up_to(length);
        }
        let bytes = self.world.read_to_send(file, *offset, length)?;
        *offset += bytes.len() as u64;
        network.send(fate, end, &bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_connected(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let end = self.with(key, |socket| socket.end);
        let connected = self.world.network.borrow_mut().poll_connected(end);
        match connected {
            None => self.park(key, cx, Side::Write).map_ok(drop),
            Some(result) => Poll::Ready(result.map_err(io::Error::from)),
        }
    }

    fn poll_peer_closed(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let end = self.with(key, |socket| socket.end);
        if self.world.network.borrow_mut().is_hung_up(end) {
            return Poll::Ready(Ok(()));
        }
        self.park(key, cx, Side::HangUp).map_ok(drop)
    }

    fn has_hung_up(&self, key: Key) -> bool {
        let end = self.with(key, |socket| socket.end);
        self.world.network.borrow_mut().is_hung_up(end)
    }

    fn is_broken(&self, key: Key) -> bool {
        let end = self.with(key, |socket| socket.end);
        self.world.network.borrow_mut().is_broken(end)
    }

    fn poll_splice_in(
        &self,
        _key: Key,
        _cx: &mut Context<'_>,
        _pipe: BorrowedFd<'_>,
        _max: usize,
    ) -> Poll<io::Result<usize>> {
        unreachable!("a simulated socket is not the kernel's")
    }

    fn poll_splice_out(
        &self,
        _key: Key,
        _cx: &mut Context<'_>,
        _pipe: BorrowedFd<'_>,
        _max: usize,
    ) -> Poll<io::Result<usize>> {
        unreachable!("a simulated socket is not the kernel's")
    }

    fn shutdown_write(&self, key: Key) -> io::Result<()> {
        let end = self.with(key, |socket| socket.end);
        Ok(self.world.network.borrow_mut().shut_down(&self.world.fate, end)?)
    }

    fn set_linger_reset(&self, key: Key) -> io::Result<()> {
        let end = self.with(key, |socket| socket.end);
        self.world.network.borrow_mut().set_resets_on_close(end);
        Ok(())
    }

    fn address(&self, key: Key, end: End) -> io::Result<SocketAddress> {
        let own = self.with(key, |socket| socket.end);
        let (local, remote) = self.world.network.borrow_mut().addresses(own);
        Ok(match end {
            End::Local => local,
            End::Peer => remote,
        })
    }
}

impl FileDriver for Simulated {}

impl Driver for Simulated {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn next_event(&self) -> Option<u64> {
        self.world.fate.next_event()
    }

    /// Handles the events that are due; the loop advances the clock.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<usize> {
        assert!(timeout.is_some(), "the simulated world stands still: tasks wait, and nothing will ever happen");
        self.world.fate.begin_turn();
        let before = self.world.fate.planned();
        let mut count = 0;
        while let Some(event) = self.world.fate.take_due(before) {
            self.handle(event);
            count += 1;
        }
        Ok(count)
    }
}
