//! Datagrams by the batch: what the kernel tells of those that arrived, and what it is told of those that leave.

use std::io;
use std::net::IpAddr;

use super::SocketAddress;
use crate::memory::buffer::Lease;

/// How a datagram socket is made. Everything is off by default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DatagramOptions {
    /// The address of the socket. Without one it has a port of its own that nobody can foretell (the kernel chooses it
    /// by chance).
    pub local: Option<SocketAddress>,
    /// Whom it sends to; then it hears nobody else.
    pub peer: Option<SocketAddress>,
    /// Several sockets share `local`, and the kernel divides the senders among them (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// `local` may be an address that this machine does not have: `IP_TRANSPARENT`, which needs CAP_NET_ADMIN.
    pub transparent: bool,
    /// `SO_RCVBUF`, in bytes.
    pub receive_buffer: Option<usize>,
    /// `SO_SNDBUF`, in bytes.
    pub send_buffer: Option<usize>,
    /// [`Received::local`] is told (`IP_PKTINFO`).
    pub local_address: bool,
    /// [`Received::ecn`] is told (`IP_RECVTOS`).
    pub ecn: bool,
    /// The kernel joins datagrams of one sender that have the same length (`UDP_GRO`); [`Received::stride`] tells them
    /// apart. Then the buffers of a batch have to be large: 64 KiB.
    pub gro: bool,
}

/// How many datagrams one call receives or sends at most.
pub const BATCH_MAX: usize = 32;

/// What the network says of its congestion (RFC 3168, section 5): the last two bits of a packet's class of traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ecn {
    /// The sender understands this.
    Ect0 = 0b10,
    /// As `Ect0`; what else it says is between the ends (RFC 9331).
    Ect1 = 0b01,
    /// A router is congested.
    Ce = 0b11,
}

impl Ecn {
    /// The mark in a class of traffic; `None` if the sender does not take part.
    pub(crate) fn of_class(class: u8) -> Option<Ecn> {
        match class & 0b11 {
            0b10 => Some(Ecn::Ect0),
            0b01 => Some(Ecn::Ect1),
            0b11 => Some(Ecn::Ce),
            _ => None,
        }
    }
}

/// A datagram that has arrived, or several of the same sender that the kernel has joined.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// Who has sent it.
    pub source: SocketAddress,
    /// The address that it was sent to, if that was asked for (`local_address`). An IPv4 address is a mapped one where
    /// the socket is of IPv6.
    pub local: Option<IpAddr>,
    /// The bytes that are there.
    pub length: usize,
    /// The length of each datagram but the last one, which may be shorter; `length` where nothing was joined.
    pub stride: usize,
    /// How the packet was marked, if that was asked for (`ecn`).
    pub ecn: Option<Ecn>,
    /// It was longer than its buffer, and the rest is lost.
    pub is_truncated: bool,
}

impl Received {
    pub(crate) fn new(source: SocketAddress, length: usize) -> Self {
        Received { source, local: None, length, stride: length, ecn: None, is_truncated: false }
    }
}

/// A datagram that is to leave, or several of the same length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit<'a> {
    /// Where it goes; `None` is the peer of a connected socket.
    pub destination: Option<&'a SocketAddress>,
    /// The bytes.
    pub contents: &'a [u8],
    /// The contents are datagrams of so many bytes, the last one perhaps shorter, which the kernel or the network
    /// device divides (`UDP_SEGMENT`). At most 64 of them, and 65,507 bytes in all.
    pub segment_bytes: Option<u16>,
    /// The address that it leaves from, one of this machine's; `None` leaves that to the kernel.
    pub source: Option<IpAddr>,
    /// How the packet is marked.
    pub ecn: Option<Ecn>,
    /// The kernel may get it in one piece with its neighbours, as `segment_bytes` has it, where they go the same way
    /// and have the same length. Only for sockets of UDP: no other divides them again.
    pub may_join: bool,
}

impl<'a> Transmit<'a> {
    /// One datagram for `destination`.
    pub fn to(destination: &'a SocketAddress, contents: &'a [u8]) -> Self {
        Transmit { destination: Some(destination), ..Transmit::to_peer(contents) }
    }

    /// One datagram for the peer of a connected socket.
    pub fn to_peer(contents: &'a [u8]) -> Self {
        Transmit { destination: None, contents, segment_bytes: None, source: None, ecn: None, may_join: false }
    }

    /// Whether the kernel is told nothing of it but where it goes.
    pub(crate) fn is_bare(&self) -> bool {
        self.source.is_none() && self.ecn.is_none() && self.stride() == self.contents.len()
    }

    /// The length of each datagram but the last one, which may be shorter.
    fn stride(&self) -> usize {
        self.segment_bytes.map_or(usize::MAX, usize::from).min(self.contents.len())
    }

    /// How many of these, the first one included, the kernel can get in one piece, and by what it divides them.
    pub(crate) fn join(transmits: &[Transmit<'_>]) -> (usize, Option<u16>) {
        let first = &transmits[0];
        let stride = first.stride();
        let Some(segment_bytes) = u16::try_from(stride).ok().filter(|&stride| first.may_join && stride > 0) else {
            return (1, first.segment_bytes);
        };
        let mut bytes = first.contents.len();
        let goes_along = |next: &&Transmit<'_>| {
            let length = next.contents.len();
            let is_last = length > 0 && length < stride && next.stride() == length;
            let joins = next.may_join
                && (next.destination, next.source, next.ecn) == (first.destination, first.source, first.ecn)
                && bytes.is_multiple_of(stride)
                && (next.stride() == stride || is_last)
                && bytes + length <= SEGMENTS_BYTES_MAX.min(SEGMENTS_MAX * stride);
            bytes += length;
            joins
        };
        match 1 + transmits[1..].iter().take_while(goes_along).count() {
            1 => (1, first.segment_bytes),
            count => (count, Some(segment_bytes)),
        }
    }
}

/// How many segments the kernel takes in one piece (`UDP_MAX_SEGMENTS`), and how many bytes (RFC 768, RFC 791: a packet
/// has 65,535, of which 28 are headers).
const SEGMENTS_MAX: usize = 64;
const SEGMENTS_BYTES_MAX: usize = 65_507;

/// Datagrams that arrived together, in one lease.
#[derive(Debug)]
pub struct ReceiveBatch {
    lease: Option<Lease>,
    received: Vec<Received>,
    count_max: usize,
    bytes_each: usize,
}

impl ReceiveBatch {
    /// Buffers for `count_max` datagrams (1 to [`BATCH_MAX`]) of at most `bytes_each`. Allocates nothing yet. Together
    /// they should not be more than a lease of the largest class has, [`crate::LEASE_CLASSES`].
    pub fn new(count_max: usize, bytes_each: usize) -> Self {
        assert!((1..=BATCH_MAX).contains(&count_max) && bytes_each > 0);
        ReceiveBatch { lease: None, received: Vec::new(), count_max, bytes_each }
    }

    /// How many there are; each may be several (see [`Received::stride`]).
    pub fn len(&self) -> usize {
        self.received.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.received.is_empty()
    }

    /// What arrived, with its bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&Received, &[u8])> {
        let memory = self.lease.as_deref().unwrap_or_default();
        self.received.iter().zip(memory.chunks(self.bytes_each)).map(|(one, buffer)| (one, &buffer[..one.length]))
    }

    /// Forgets the datagrams and returns their memory.
    pub fn clear(&mut self) {
        self.lease = None;
        self.received.clear();
    }

    /// The buffers, all of them free, at most so many.
    pub(crate) fn prepare(&mut self, count_max: usize, is_bare: bool) -> io::Result<(Room<'_>, &mut Vec<Received>)> {
        self.received.clear();
        let lease = match self.lease.take() {
            Some(lease) => lease,
            None => Lease::new(self.count_max * self.bytes_each)?,
        };
        let memory = &mut **self.lease.insert(lease);
        let count = self.count_max.min(count_max);
        Ok((Room { memory, bytes_each: self.bytes_each, count, is_bare }, &mut self.received))
    }
}

/// Buffers for datagrams.
pub(crate) struct Room<'a> {
    /// Divided into `count` buffers of `bytes_each`.
    pub memory: &'a mut [u8],
    pub bytes_each: usize,
    pub count: usize,
    /// Of the next datagram nothing is asked but its bytes: not even who has sent it.
    pub is_bare: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_joined_while_the_kernel_can_divide_them() {
        let memory = [0; 65_507];
        let one = |length: usize| Transmit { may_join: true, ..Transmit::to_peer(&memory[..length]) };
        let several = |length: usize, segment| Transmit { segment_bytes: Some(segment), ..one(length) };
        let alone = |length: usize| Transmit { may_join: false, ..one(length) };
        let marked = |length: usize| Transmit { ecn: Some(Ecn::Ce), ..one(length) };
        for (transmits, joined) in [
            (vec![one(10)], (1, None)),
            (vec![one(10), one(10), one(10)], (3, Some(10))),
            (vec![one(10), one(10), one(7), one(7)], (3, Some(10))),
            (vec![one(10), one(11)], (1, None)),
            (vec![one(10), one(0), one(10)], (1, None)),
            (vec![one(0), one(0)], (1, None)),
            (vec![one(10), alone(10)], (1, None)),
            (vec![alone(10), one(10)], (1, None)),
            (vec![one(10), marked(10)], (1, None)),
            (vec![several(30, 10), one(10), several(25, 10), one(10)], (3, Some(10))),
            (vec![several(25, 10), one(10)], (1, Some(10))),
            (vec![one(10), several(6, 3)], (1, None)),
            (vec![one(30_000), one(30_000), one(30_000)], (2, Some(30_000))),
            (vec![several(63, 1), one(1), one(1)], (2, Some(1))),
        ] {
            assert_eq!(Transmit::join(&transmits), joined, "{:?}", transmits.iter().map(|one| one.contents.len()));
        }
    }
}
