//! Datagrams of a simulated world: sockets by address, and the datagrams between them.
//!
//! As in any network a datagram arrives whole, not at all, twice, or after one that was sent later: each has a delay of
//! its own. If no socket has the address, a connected sender gets ECONNREFUSED, once.
//!
//! A socket holds a bounded number of datagrams; further ones are lost.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::fate::{Event, Fate};
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Ecn, Received, Room, Transmit};

/// Datagrams that a socket holds until they are received: about as many as fit the kernel's buffer.
const ARRIVED_MAX: usize = 256;

/// First port for sockets without one.
const FIRST_PORT: u16 = 20_000;

#[derive(Clone)]
pub(crate) struct Datagram {
    to: SocketAddress,
    from: SocketAddress,
    bytes: Vec<u8>,
    ecn: Option<Ecn>,
}

pub(crate) struct Datagrams {
    sockets: Slots<Socket>,
    next_port: u16,
}

struct Socket {
    local: SocketAddress,
    options: DatagramOptions,
    arrived: VecDeque<Datagram>,
    error: Option<Errno>,
    reader: Parked,
}

impl Datagrams {
    pub fn new() -> Self {
        Datagrams { sockets: Slots::new(), next_port: FIRST_PORT }
    }

    pub fn open(&mut self, options: &DatagramOptions) -> Result<Key, Errno> {
        let any = SocketAddress::Inet(SocketAddr::new(IpAddr::from(Ipv4Addr::LOCALHOST), 0));
        let mut local = options.local.clone().unwrap_or(any);
        if let SocketAddress::Inet(inet) = &mut local
            && inet.port() == 0
        {
            inet.set_port(self.next_port);
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_PORT);
        }
        if self.find(&local, |_| true).is_some() {
            return Err(Errno::ADDRINUSE);
        }
        let (arrived, options) = (VecDeque::new(), options.clone());
        Ok(self.sockets.insert(Socket { local, options, arrived, error: None, reader: Parked::new() }))
    }

    /// Returns the waker of the reader, to be dropped when nothing is borrowed.
    pub fn close(&mut self, key: Key) -> Option<Waker> {
        self.sockets.remove(key).and_then(|mut socket| socket.reader.take())
    }

    pub fn address(&mut self, key: Key) -> SocketAddress {
        self.socket(key).local.clone()
    }

    pub fn send(&mut self, fate: &Fate, key: Key, transmit: &Transmit<'_>) -> Result<(), Errno> {
        let socket = self.socket(key);
        if let Some(errno) = socket.error.take() {
            return Err(errno);
        }
        let to = transmit.destination.or(socket.options.peer.as_ref()).ok_or(Errno::DESTADDRREQ)?;
        let from = socket.source(transmit.source);
        let segment_bytes = transmit.segment_bytes.map_or(usize::MAX, usize::from).max(1);
        let whole = transmit.contents.is_empty().then_some(&[][..]);
        for bytes in transmit.contents.chunks(segment_bytes).chain(whole) {
            fate.note_bytes("send a datagram", 0, bytes);
            let copies = match fate.strikes(|faults| faults.datagram_losses) {
                true => 0,
                false => 1 + u32::from(fate.strikes(|faults| faults.datagram_copies)),
            };
            let datagram = Datagram { to: to.clone(), from: from.clone(), bytes: bytes.to_vec(), ecn: transmit.ecn };
            for _ in 0..copies {
                fate.plan(fate.latency(), Event::Datagram(datagram.clone()));
            }
        }
        Ok(())
    }

    /// Delivers the datagram; returns the waker of its receiver, or of the sender that gets an error because there is
    /// none.
    pub fn handle_arrival(&mut self, fate: &Fate, datagram: Datagram) -> Option<Waker> {
        let Datagram { to, from, bytes, .. } = &datagram;
        fate.note("datagram arrives", 0, bytes.len());
        let hears = |socket: &Socket| socket.options.peer.as_ref().is_none_or(|peer| peer == from);
        if let Some(key) = self.find(to, hears).or_else(|| self.find(&wildcard(to)?, hears)) {
            let socket = self.socket(key);
            if socket.arrived.len() < ARRIVED_MAX {
                socket.arrived.push_back(datagram);
            }
            return socket.reader.take();
        }
        let key = self.find(from, |socket| socket.options.peer.as_ref() == Some(to))?;
        let socket = self.socket(key);
        socket.error = Some(Errno::CONNREFUSED);
        socket.reader.take()
    }

    /// Receives the next datagrams, or registers the task; also returns the displaced waker, to be dropped when nothing
    /// is borrowed.
    pub fn poll_recv(
        &mut self,
        fate: &Fate,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> (Poll<Result<(), Errno>>, Option<Waker>) {
        let socket = self.socket(key);
        if let Some(errno) = socket.error.take() {
            return (Poll::Ready(Err(errno)), None);
        }
        let bytes_each = room.bytes_each;
        for index in 0..room.count {
            let Some(first) = socket.arrived.pop_front() else { break };
            let mut one = Received::new(first.from.clone(), first.bytes.len());
            one.stride = one.length.max(1);
            one.local = first.to.inet().filter(|_| socket.options.local_address).map(|to| to.ip());
            one.ecn = first.ecn.filter(|_| socket.options.ecn);
            let mut bytes = first.bytes.clone();
            while socket.options.gro && bytes.len() % one.stride == 0 && fate.random.chance(500) {
                let is_alike = |next: &&Datagram| {
                    (&next.from, &next.to, next.ecn) == (&first.from, &first.to, first.ecn)
                        && (1..=one.stride).contains(&next.bytes.len())
                        && bytes.len() + next.bytes.len() <= bytes_each
                };
                if socket.arrived.front().filter(is_alike).is_none() {
                    break;
                }
                bytes.extend(socket.arrived.pop_front().expect("checked above").bytes);
            }
            one.is_truncated = bytes.len() > bytes_each;
            one.length = bytes.len().min(bytes_each);
            room.memory[index * bytes_each..][..one.length].copy_from_slice(&bytes[..one.length]);
            received.push(one);
        }
        if received.is_empty() {
            return (Poll::Pending, socket.reader.park(cx.waker()));
        }
        (Poll::Ready(Ok(())), None)
    }

    fn socket(&mut self, key: Key) -> &mut Socket {
        self.sockets.get_mut(key).expect("an open datagram socket owns its slot")
    }

    fn find(&mut self, local: &SocketAddress, is_fit: impl Fn(&Socket) -> bool) -> Option<Key> {
        let mut found = None;
        self.sockets.for_each(|key, socket| {
            if socket.local == *local && is_fit(socket) {
                found = Some(key);
            }
        });
        found
    }
}

impl Socket {
    /// Source address of its datagrams: a socket on all addresses uses one of them, unless the sender chooses it.
    fn source(&self, chosen: Option<IpAddr>) -> SocketAddress {
        let SocketAddress::Inet(mut local) = self.local else { return self.local.clone() };
        if let Some(ip) = chosen {
            local.set_ip(ip);
        } else if local.ip().is_unspecified() {
            local.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        SocketAddress::Inet(local)
    }
}

/// The address of a socket that receives at all addresses.
fn wildcard(address: &SocketAddress) -> Option<SocketAddress> {
    let port = address.inet()?.port();
    Some(SocketAddress::Inet(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)))
}
