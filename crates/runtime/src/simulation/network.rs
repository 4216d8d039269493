//! The network of a simulated world: listeners, connections, and the transfer of bytes between their ends.
//!
//! A connection consists of two ends. Bytes sent by one end are split into pieces that arrive at the other one later,
//! in order and within its window; reading makes room, which the sender learns later too. As with TCP on Linux: closing
//! an end with unread bytes resets the connection and may discard bytes on their way, and so does anything that arrives
//! at a closed end; bytes that arrived before a reset can still be read, then ECONNRESET follows, once.
//!
//! Limits: a direction holds its window at most, a listener its backlog.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::io::Errno;

use super::fate::{Event, Fate, Side};
use crate::executor::slots::{Key, Slots};
use crate::socket::SocketAddress;

/// Limit of bytes on their way or unread, unless windows are small.
const WINDOW: usize = 64 * 1024;
const SMALL_WINDOWS: [usize; 4] = [500, 1400, 4096, 10_000];

/// Maximum number of pieces of one send.
const SEGMENTS_MAX: usize = 6;

/// First port of clients.
const FIRST_PORT: u16 = 10_000;

/// Something that arrives at an end.
pub(crate) enum Arrival {
    /// Bytes; the number counts the pieces sent to this end.
    Data(u64, Vec<u8>),
    End,
    Reset,
    /// The connection is established.
    Accepted,
    Refused(Errno),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Connecting,
    /// Connecting has failed; the error is reported once.
    Failed(Errno),
    Open,
    /// Closed by its owner. It stays while the other end exists, to answer with resets.
    Closed,
}

struct End {
    /// For messages and the trace: client and server end have successive numbers.
    number: u64,
    other: Key,
    local: SocketAddress,
    remote: SocketAddress,
    state: State,
    /// Inode that identifies the descriptor.
    identity: Option<u64>,
    /// The slot in the loop's driver.
    slot: Option<Key>,
    /// Bytes that have arrived and were not read.
    unread: VecDeque<u8>,
    has_ended: bool,
    /// A reset has arrived; `Some` until it was reported.
    reset: Option<Errno>,
    was_reset: bool,
    /// Bytes that it may still send.
    credit: usize,
    has_shut_down: bool,
    resets_on_close: bool,
    /// Time at which the last sent piece arrives at the other end.
    last_arrival: u64,
    sent_pieces: u64,
    /// Number from which on pieces are lost on their way.
    lost_from: u64,
    /// The network has broken the connection.
    was_cut: bool,
}

pub(crate) struct Listening {
    address: SocketAddress,
    backlog: usize,
    queue: VecDeque<Key>,
    slots: Vec<Key>,
    is_closed: bool,
}

/// The meaning of a descriptor.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    End(Key),
    Listener(Key),
}

pub(crate) struct Network {
    ends: Slots<End>,
    listeners: Slots<Listening>,
    names: BTreeMap<u64, Named>,
    connections: u64,
    next_port: u16,
    /// Addresses of clients whose connection the network has broken.
    cut: Vec<SocketAddress>,
}

impl Network {
    pub fn new() -> Self {
        Network {
            ends: Slots::new(),
            listeners: Slots::new(),
            names: BTreeMap::new(),
            connections: 0,
            next_port: FIRST_PORT,
            cut: Vec::new(),
        }
    }

    fn end(&mut self, key: Key) -> &mut End {
        self.ends.get_mut(key).expect("a descriptor's end lives as long as it")
    }

    pub fn open_ends(&mut self) -> usize {
        let mut open = 0;
        self.ends.for_each(|_, end| open += usize::from(end.state != State::Closed));
        open
    }

    pub fn was_cut(&self, client: &SocketAddress) -> bool {
        self.cut.contains(client)
    }

    /// Makes a descriptor stand for an end or a listener.
    pub fn name(&mut self, identity: u64, named: Named) {
        if let Named::End(key) = named {
            self.end(key).identity = Some(identity);
        }
        self.names.insert(identity, named);
    }

    pub fn named(&self, identity: u64) -> Option<Named> {
        self.names.get(&identity).copied()
    }

    pub fn listen(&mut self, address: &SocketAddress, backlog: usize) -> Result<Key, Errno> {
        let mut address = address.clone();
        if let SocketAddress::Inet(inet) = &mut address
            && inet.port() == 0
        {
            inet.set_port(self.take_port());
        }
        let mut in_use = false;
        self.listeners.for_each(|_, listener| in_use |= !listener.is_closed && listener.address == address);
        if in_use {
            return Err(Errno::ADDRINUSE);
        }
        Ok(self.listeners.insert(Listening {
            address,
            backlog,
            queue: VecDeque::new(),
            slots: Vec::new(),
            is_closed: false,
        }))
    }

    pub fn stop_listening(&mut self, fate: &Fate, address: &SocketAddress) {
        let Some(key) = self.find_listener(address) else { return };
        let listener = self.listener(key);
        listener.is_closed = true;
        for end in std::mem::take(&mut listener.queue) {
            self.cut(fate, end);
            self.close(fate, end);
        }
    }

    fn listener(&mut self, key: Key) -> &mut Listening {
        self.listeners.get_mut(key).expect("a listener is never removed")
    }

    fn take_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(FIRST_PORT);
        port
    }

    pub fn listener_address(&mut self, key: Key) -> SocketAddress {
        self.listener(key).address.clone()
    }

    pub fn attach_listener(&mut self, key: Key, slot: Key) {
        self.listener(key).slots.push(slot);
    }

    pub fn detach_listener(&mut self, key: Key, slot: Key) {
        self.listener(key).slots.retain(|&own| own != slot);
    }

    fn find_listener(&mut self, address: &SocketAddress) -> Option<Key> {
        let (mut exact, mut wildcard) = (None, None);
        self.listeners.for_each(|key, listener| match (&listener.address, address) {
            _ if listener.is_closed => {}
            (own, wanted) if own == wanted => exact = Some(key),
            (SocketAddress::Inet(own), SocketAddress::Inet(wanted))
                if own.ip().is_unspecified() && own.port() == wanted.port() =>
            {
                wildcard = Some(key);
            }
            _ => {}
        });
        exact.or(wildcard)
    }

    /// Begins a connection and returns the client's end.
    pub fn connect(&mut self, fate: &Fate, address: &SocketAddress, local: Option<&SocketAddress>) -> Key {
        let local = match (local, address) {
            (Some(local), _) => local.clone(),
            (None, SocketAddress::Unix(_)) => SocketAddress::Unix(None),
            (None, SocketAddress::Inet(peer)) => {
                let ip = if peer.ip().is_unspecified() { IpAddr::from([127, 0, 0, 1]) } else { peer.ip() };
                SocketAddress::Inet(SocketAddr::new(ip, self.take_port()))
            }
        };
        let number = 2 * self.connections;
        self.connections += 1;
        let client = self.ends.insert(End::new(number, local.clone(), address.clone(), State::Connecting));
        let failure = if fate.strikes(|faults| faults.connect_failures) {
            Some(*fate.random.pick(&[Errno::CONNREFUSED, Errno::HOSTUNREACH, Errno::TIMEDOUT]))
        } else {
            None
        };
        fate.note("connect", number, 0);
        match (failure, self.find_listener(address)) {
            (None, Some(listener)) => {
                let server = self.ends.insert(End::new(number + 1, address.clone(), local, State::Open));
                self.end(server).other = client;
                self.end(client).other = server;
                for end in [client, server] {
                    self.end(end).credit = window(fate);
                }
                fate.plan(fate.latency(), Event::Incoming { listener, end: server });
                if fate.strikes(|faults| faults.cuts) {
                    fate.plan(fate.within(fate.faults().cut_within), Event::Cut { end: server });
                }
            }
            (failure, _) => {
                let errno = failure.unwrap_or(Errno::CONNREFUSED);
                fate.plan(fate.latency(), Event::Arrival { end: client, arrival: Arrival::Refused(errno) });
            }
        }
        client
    }

    /// Handles the arrival of a connection at its listener.
    pub fn handle_incoming(&mut self, fate: &Fate, key: Key, end: Key) {
        let listener = self.listeners.get_mut(key).expect("a listener is never removed");
        let Some(server) = self.ends.get_mut(end) else { return };
        if listener.is_closed || listener.queue.len() >= listener.backlog {
            server.send(fate, Arrival::Refused(Errno::CONNREFUSED));
            server.state = State::Closed;
            self.forget_closed(end);
            return;
        }
        fate.note("incoming", server.number, listener.queue.len());
        listener.queue.push_back(end);
        for &slot in &listener.slots {
            fate.plan(fate.lateness(), Event::ListenerReady { slot });
        }
        server.send(fate, Arrival::Accepted);
    }

    pub fn has_queued(&mut self, key: Key) -> bool {
        !self.listener(key).queue.is_empty()
    }

    /// The next connection in a listener's queue, with the peer's address.
    pub fn accept(&mut self, fate: &Fate, key: Key) -> io::Result<Option<(Key, SocketAddress)>> {
        if !self.has_queued(key) {
            return Ok(None);
        }
        if fate.strikes(|faults| faults.accept_failures) {
            fate.note("accept fails", 0, 0);
            return Err(fate.random.pick(&[Errno::MFILE, Errno::NFILE]).to_owned().into());
        }
        while let Some(end) = self.listener(key).queue.pop_front() {
            if fate.strikes(|faults| faults.accept_aborts) {
                self.cut(fate, end);
                self.close(fate, end);
                continue;
            }
            let server = self.end(end);
            fate.note("accept", server.number, 0);
            return Ok(Some((end, server.remote.clone())));
        }
        Ok(None)
    }

    pub fn attach(&mut self, key: Key, slot: Key) {
        self.end(key).slot = Some(slot);
    }

    pub fn detach(&mut self, key: Key) {
        self.end(key).slot = None;
    }

    pub fn addresses(&mut self, key: Key) -> (SocketAddress, SocketAddress) {
        let end = self.end(key);
        (end.local.clone(), end.remote.clone())
    }

    pub fn number(&mut self, key: Key) -> u64 {
        self.end(key).number
    }

    pub fn poll_connected(&mut self, key: Key) -> Option<Result<(), Errno>> {
        let end = self.end(key);
        match end.state {
            State::Connecting => None,
            State::Failed(errno) => Some(Err(errno)),
            State::Open | State::Closed => Some(Ok(())),
        }
    }

    /// True if a receive would not wait.
    pub fn is_readable(&mut self, key: Key) -> bool {
        let end = self.end(key);
        !end.unread.is_empty() || end.has_ended || end.was_reset || matches!(end.state, State::Failed(_))
    }

    pub fn is_hung_up(&mut self, key: Key) -> bool {
        let end = self.end(key);
        end.has_ended || end.was_reset
    }

    pub fn is_broken(&mut self, key: Key) -> bool {
        let end = self.end(key);
        end.was_reset || end.has_ended && end.has_shut_down
    }

    /// True if a send would not wait; takes no error.
    pub fn is_writable(&mut self, key: Key) -> bool {
        let end = self.end(key);
        end.was_reset || end.has_shut_down || end.state == State::Open && end.credit > 0
    }

    pub fn was_reset(&mut self, key: Key) -> bool {
        self.end(key).was_reset
    }

    /// Receives into `into`, perhaps less. `Err(AGAIN)` if no data has arrived.
    pub fn receive(&mut self, fate: &Fate, key: Key, into: &mut [u8]) -> Result<usize, Errno> {
        let end = self.end(key);
        if end.unread.is_empty() {
            if let Some(errno) = end.reset.take() {
                return Err(errno);
            }
            return if end.has_ended || end.was_reset { Ok(0) } else { Err(Errno::AGAIN) };
        }
        let mut count = end.unread.len().min(into.len());
        if fate.strikes(|faults| faults.short_reads) {
            count = fate.random.up_to(count);
        }
        for (to, byte) in into.iter_mut().zip(end.unread.drain(..count)) {
            *to = byte;
        }
        fate.note_bytes("receive", end.number, &into[..count]);
        fate.plan(fate.latency(), Event::Room { end: end.other, bytes: count });
        Ok(count)
    }

    /// Number of bytes that a send would take at most; an error is reported at once.
    pub fn room(&mut self, key: Key) -> Result<usize, Errno> {
        let end = self.end(key);
        match end {
            End { was_reset: true, .. } => Err(end.reset.take().unwrap_or(Errno::PIPE)),
            End { has_shut_down: true, .. } => Err(Errno::PIPE),
            End { state: State::Open, credit: 1.., .. } => Ok(end.credit),
            _ => Err(Errno::AGAIN),
        }
    }

    /// Sends bytes, for which there is room.
    pub fn send(&mut self, fate: &Fate, key: Key, bytes: &[u8]) {
        let end = self.end(key);
        end.credit -= bytes.len();
        fate.note_bytes("send", end.number, bytes);
        let pieces = if fate.strikes(|faults| faults.segments) { fate.random.up_to(SEGMENTS_MAX) } else { 1 };
        let mut rest = bytes;
        for left in (1..=pieces).rev() {
            let length = if left == 1 { rest.len() } else { fate.random.below(rest.len() as u64 + 1) as usize };
            let (piece, later) = rest.split_at(length);
            rest = later;
            if !piece.is_empty() {
                let number = end.sent_pieces;
                end.sent_pieces += 1;
                end.send(fate, Arrival::Data(number, piece.to_vec()));
            }
        }
    }

    pub fn shut_down(&mut self, fate: &Fate, key: Key) -> Result<(), Errno> {
        let end = self.end(key);
        if end.was_reset {
            return Err(Errno::NOTCONN);
        }
        if !std::mem::replace(&mut end.has_shut_down, true) {
            fate.note("shut down", end.number, 0);
            end.send(fate, Arrival::End);
        }
        Ok(())
    }

    pub fn set_resets_on_close(&mut self, key: Key) {
        self.end(key).resets_on_close = true;
    }

    /// Closes an end, whose descriptor is closed too.
    pub fn close(&mut self, fate: &Fate, key: Key) {
        let end = self.end(key);
        let identity = end.identity.take();
        end.slot = None;
        let state = std::mem::replace(&mut end.state, State::Closed);
        let is_broken = end.was_reset || matches!(state, State::Failed(_));
        let resets = end.resets_on_close || !end.unread.is_empty() || state == State::Connecting;
        fate.note(if resets { "close by reset" } else { "close" }, end.number, end.unread.len());
        end.unread.clear();
        if resets && !is_broken {
            self.reset_other(fate, key);
        } else if !is_broken && !std::mem::replace(&mut end.has_shut_down, true) {
            end.send(fate, Arrival::End);
        }
        self.names.retain(|name, _| Some(*name) != identity);
        self.forget_closed(key);
    }

    /// Removes a connection whose ends are both closed; pieces on their way are ignored.
    fn forget_closed(&mut self, key: Key) {
        let other = self.end(key).other;
        if self.ends.get_mut(other).is_none_or(|other| other.state == State::Closed) {
            self.ends.remove(other);
            self.ends.remove(key);
        }
    }

    /// Sends a reset, which may overtake data sent before.
    fn reset_other(&mut self, fate: &Fate, key: Key) {
        let end = self.end(key);
        let (other, sent, number) = (end.other, end.sent_pieces, end.number);
        end.has_shut_down = true;
        end.send(fate, Arrival::Reset);
        if fate.faults() != super::Faults::NONE && fate.random.chance(500) {
            let kept = fate.random.below(sent + 1);
            fate.note("takes back from", number, kept as usize);
            if let Some(other) = self.ends.get_mut(other) {
                other.lost_from = other.lost_from.min(kept);
            }
        }
    }

    /// Breaks a connection: both ends are reset, and data on its way is lost.
    pub fn cut(&mut self, fate: &Fate, key: Key) {
        let Some(server) = self.ends.get_mut(key) else { return };
        fate.note("cut", server.number, 0);
        let (client, remote) = (server.other, server.remote.clone());
        self.cut.push(remote);
        for key in [key, client] {
            if let Some(end) = self.ends.get_mut(key) {
                end.was_cut = true;
                end.lost_from = 0;
                end.handle(fate, Arrival::Reset);
            }
        }
    }

    pub fn handle_arrival(&mut self, fate: &Fate, key: Key, arrival: Arrival) {
        let Some(end) = self.ends.get_mut(key) else { return };
        if end.was_cut {
            return;
        }
        if end.state != State::Closed {
            end.handle(fate, arrival);
            return;
        }
        // It will never be read: reset the sender.
        let other = end.other;
        if let Arrival::Data(..) = arrival
            && self.ends.get_mut(other).is_some_and(|other| !other.was_reset)
        {
            self.reset_other(fate, key);
        }
    }

    pub fn handle_room(&mut self, fate: &Fate, key: Key, bytes: usize) {
        if let Some(end) = self.ends.get_mut(key) {
            end.credit += bytes;
            end.tell(fate, Side::Write);
        }
    }
}

impl End {
    fn new(number: u64, local: SocketAddress, remote: SocketAddress, state: State) -> End {
        End {
            number,
            // A key that matches nothing, until the other end exists.
            other: Key { index: u32::MAX, generation: 0 },
            local,
            remote,
            state,
            identity: None,
            slot: None,
            unread: VecDeque::new(),
            has_ended: false,
            reset: None,
            was_reset: false,
            credit: 0,
            has_shut_down: false,
            resets_on_close: false,
            last_arrival: 0,
            sent_pieces: 0,
            lost_from: u64::MAX,
            was_cut: false,
        }
    }

    /// Sends something to the other end, where it arrives after everything sent before.
    fn send(&mut self, fate: &Fate, arrival: Arrival) {
        let nanos = fate.now() + fate.latency().as_nanos() as u64;
        self.last_arrival = self.last_arrival.max(nanos);
        fate.plan_at(self.last_arrival, Event::Arrival { end: self.other, arrival });
    }

    fn handle(&mut self, fate: &Fate, arrival: Arrival) {
        if self.was_reset {
            return;
        }
        match arrival {
            Arrival::Data(number, bytes) => {
                if number >= self.lost_from {
                    return;
                }
                fate.note("arrives", self.number, bytes.len());
                self.unread.extend(bytes);
                self.tell(fate, Side::Read);
            }
            Arrival::End => {
                // After lost data the end of the stream is not seen.
                if self.lost_from != u64::MAX {
                    return;
                }
                fate.note("end arrives", self.number, 0);
                self.has_ended = true;
                self.tell(fate, Side::Read);
                self.tell(fate, Side::HangUp);
            }
            Arrival::Reset => {
                fate.note("reset arrives", self.number, 0);
                self.reset = Some(Errno::CONNRESET);
                self.was_reset = true;
                if self.state == State::Connecting {
                    self.state = State::Failed(Errno::CONNRESET);
                }
                [Side::Read, Side::Write, Side::HangUp].into_iter().for_each(|side| self.tell(fate, side));
            }
            Arrival::Accepted => {
                if self.state == State::Connecting {
                    self.state = State::Open;
                    self.tell(fate, Side::Write);
                }
            }
            Arrival::Refused(errno) => {
                fate.note("refused", self.number, 0);
                self.state = State::Failed(errno);
                self.was_reset = true;
                self.tell(fate, Side::Write);
            }
        }
    }

    fn tell(&self, fate: &Fate, side: Side) {
        if let Some(slot) = self.slot {
            fate.plan(fate.lateness(), Event::Ready { slot, side });
        }
    }
}

fn window(fate: &Fate) -> usize {
    if fate.strikes(|faults| faults.small_windows) { *fate.random.pick(&SMALL_WINDOWS) } else { WINDOW }
}

/// Time from a spurious EAGAIN to the wake-up.
pub(crate) fn storm(fate: &Fate) -> Duration {
    fate.within(fate.faults().late_max)
}
