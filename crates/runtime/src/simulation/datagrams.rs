//! Datagrams of a simulated world: sockets by address, and what is on its way between them.
//!
//! As in any network one arrives whole, or not at all, or twice, or behind one that was sent later: each takes its own time.
//! Where nobody listens, a sender who is connected is told (ECONNREFUSED), once.
//!
//! Bound: a socket holds some datagrams; what comes on top is lost.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::fate::{Event, Fate};
use crate::executor::parked::Parked;
use crate::executor::slots::{Key, Slots};
use crate::net::SocketAddress;

/// How many datagrams a socket holds that nobody has received: about what the kernel's buffer has room for.
const ARRIVED_MAX: usize = 256;

/// Where the ports of sockets begin that were not given one.
const FIRST_PORT: u16 = 20_000;

/// The length of a datagram and its sender.
pub(crate) type Received = Result<(usize, SocketAddress), Errno>;

pub(crate) struct Datagrams {
    sockets: Slots<Socket>,
    next_port: u16,
}

struct Socket {
    local: SocketAddress,
    peer: Option<SocketAddress>,
    arrived: VecDeque<(Vec<u8>, SocketAddress)>,
    error: Option<Errno>,
    reader: Parked,
}

impl Datagrams {
    pub fn new() -> Self {
        Datagrams { sockets: Slots::new(), next_port: FIRST_PORT }
    }

    pub fn open(&mut self, local: Option<&SocketAddress>, peer: Option<&SocketAddress>) -> Result<Key, Errno> {
        let any = SocketAddress::Inet(SocketAddr::new(IpAddr::from(Ipv4Addr::LOCALHOST), 0));
        let mut local = local.cloned().unwrap_or(any);
        if let SocketAddress::Inet(inet) = &mut local
            && inet.port() == 0
        {
            inet.set_port(self.next_port);
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_PORT);
        }
        if self.find(&local, |_| true).is_some() {
            return Err(Errno::ADDRINUSE);
        }
        let (arrived, peer) = (VecDeque::new(), peer.cloned());
        Ok(self.sockets.insert(Socket { local, peer, arrived, error: None, reader: Parked::new() }))
    }

    /// Returns who waited, to be dropped when nothing is borrowed.
    pub fn close(&mut self, key: Key) -> Option<Waker> {
        self.sockets.remove(key).and_then(|mut socket| socket.reader.take())
    }

    pub fn address(&mut self, key: Key) -> SocketAddress {
        self.socket(key).local.clone()
    }

    pub fn send(&mut self, fate: &Fate, key: Key, bytes: &[u8], to: Option<&SocketAddress>) -> Result<(), Errno> {
        let socket = self.socket(key);
        if let Some(errno) = socket.error.take() {
            return Err(errno);
        }
        let to = to.or(socket.peer.as_ref()).ok_or(Errno::DESTADDRREQ)?;
        fate.note_bytes("send a datagram", 0, bytes);
        let copies = match fate.strikes(|faults| faults.datagram_losses) {
            true => 0,
            false => 1 + u32::from(fate.strikes(|faults| faults.datagram_copies)),
        };
        for _ in 0..copies {
            let event = Event::Datagram { to: to.clone(), from: socket.local.clone(), bytes: bytes.to_vec() };
            fate.plan(fate.latency(), event);
        }
        Ok(())
    }

    /// Gives the datagram to whom it is for; returns who waits for it, or for the news that nobody is there.
    pub fn handle_arrival(
        &mut self,
        fate: &Fate,
        to: &SocketAddress,
        from: SocketAddress,
        bytes: Vec<u8>,
    ) -> Option<Waker> {
        fate.note("datagram arrives", 0, bytes.len());
        if let Some(key) = self.find(to, |socket| socket.peer.as_ref().is_none_or(|peer| *peer == from)) {
            let socket = self.socket(key);
            if socket.arrived.len() < ARRIVED_MAX {
                socket.arrived.push_back((bytes, from));
            }
            return socket.reader.take();
        }
        let key = self.find(&from, |socket| socket.peer.as_ref() == Some(to))?;
        let socket = self.socket(key);
        socket.error = Some(Errno::CONNREFUSED);
        socket.reader.take()
    }

    /// The next datagram; or has the task woken, and says what is to be dropped when nothing is borrowed.
    pub fn poll_recv(&mut self, key: Key, cx: &mut Context<'_>, into: &mut [u8]) -> (Poll<Received>, Option<Waker>) {
        let socket = self.socket(key);
        if let Some(errno) = socket.error.take() {
            return (Poll::Ready(Err(errno)), None);
        }
        let Some((bytes, from)) = socket.arrived.pop_front() else {
            return (Poll::Pending, socket.reader.park(cx.waker()));
        };
        let length = bytes.len().min(into.len());
        into[..length].copy_from_slice(&bytes[..length]);
        (Poll::Ready(Ok((length, from))), None)
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
