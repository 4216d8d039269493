//! Batches of datagrams: metadata of received ones, and options of those to send.

use std::io;
use std::net::IpAddr;

use super::SocketAddress;
use crate::memory::buffer::Lease;

/// Options of a datagram socket. Everything is off by default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DatagramOptions {
    /// The local address. Without one the kernel chooses a random, unpredictable port.
    pub local: Option<SocketAddress>,
    /// The peer to connect to; then only its datagrams are received.
    pub peer: Option<SocketAddress>,
    /// Several sockets may share `local`, and the kernel distributes the senders among them (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// `local` may be an address that this machine does not have: `IP_TRANSPARENT`, which needs CAP_NET_ADMIN.
    pub transparent: bool,
    /// `SO_RCVBUF`, in bytes.
    pub receive_buffer: Option<usize>,
    /// `SO_SNDBUF`, in bytes.
    pub send_buffer: Option<usize>,
    /// Fill in [`Received::local`] (`IP_PKTINFO`).
    pub local_address: bool,
    /// Fill in [`Received::ecn`] (`IP_RECVTOS`).
    pub ecn: bool,
    /// The kernel joins datagrams of one sender that have the same length (`UDP_GRO`); [`Received::stride`] divides
    /// them again. The buffers of a batch then have to be large: 64 KiB.
    pub gro: bool,
}

/// Datagrams that one call receives or sends at most.
pub const BATCH_MAX: usize = 32;

/// Congestion mark of a packet (RFC 3168, section 5): the last two bits of its traffic class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ecn {
    /// The sender supports congestion marks.
    Ect0 = 0b10,
    /// As `Ect0`; its further meaning is defined between the ends (RFC 9331).
    Ect1 = 0b01,
    /// A router is congested.
    Ce = 0b11,
}

impl Ecn {
    /// The mark in a traffic class; `None` if the sender does not support marks.
    pub(crate) fn of_class(class: u8) -> Option<Ecn> {
        match class & 0b11 {
            0b10 => Some(Ecn::Ect0),
            0b01 => Some(Ecn::Ect1),
            0b11 => Some(Ecn::Ce),
            _ => None,
        }
    }
}

/// A datagram that has arrived, or several of the same sender joined by the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// Address of the sender.
    pub source: SocketAddress,
    /// Address that it was sent to, if requested (`local_address`). On an IPv6 socket an IPv4 address is mapped.
    pub local: Option<IpAddr>,
    /// Number of bytes received.
    pub length: usize,
    /// Length of each datagram except the last one, which may be shorter; `length` if nothing was joined.
    pub stride: usize,
    /// Congestion mark of the packet, if requested (`ecn`).
    pub ecn: Option<Ecn>,
    /// The datagram was longer than its buffer, and the rest is lost.
    pub is_truncated: bool,
}

impl Received {
    pub(crate) fn new(source: SocketAddress, length: usize) -> Self {
        Received { source, local: None, length, stride: length, ecn: None, is_truncated: false }
    }
}

/// A datagram to send, or several of the same length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit<'a> {
    /// Destination; `None` for the peer of a connected socket.
    pub destination: Option<&'a SocketAddress>,
    /// The bytes.
    pub contents: &'a [u8],
    /// The contents are datagrams of this length, the last one perhaps shorter, which the kernel or the network device
    /// divides (`UDP_SEGMENT`). At most 64 of them, and 65,507 bytes in all.
    pub segment_bytes: Option<u16>,
    /// Source address, one of this machine's; `None` leaves the choice to the kernel.
    pub source: Option<IpAddr>,
    /// Congestion mark of the packet.
    pub ecn: Option<Ecn>,
    /// The kernel may get it in one piece with its neighbours, as with `segment_bytes`, if they have the same route and
    /// length. Only for UDP sockets: no others divide them again.
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

    /// True if it needs no control messages.
    pub(crate) fn is_bare(&self) -> bool {
        self.source.is_none() && self.ecn.is_none() && self.stride() == self.contents.len()
    }

    /// Length of each datagram except the last one, which may be shorter.
    fn stride(&self) -> usize {
        self.segment_bytes.map_or(usize::MAX, usize::from).min(self.contents.len())
    }

    /// Number of these, including the first one, that can go to the kernel in one piece, and its segment length.
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

/// Limits of segments (`UDP_MAX_SEGMENTS`) and bytes in one piece (RFC 768, RFC 791: a packet has 65,535, of which 28
/// are headers).
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
    /// they should fit a lease of the largest class, [`crate::LEASE_CLASSES`].
    pub fn new(count_max: usize, bytes_each: usize) -> Self {
        assert!((1..=BATCH_MAX).contains(&count_max) && bytes_each > 0);
        ReceiveBatch { lease: None, received: Vec::new(), count_max, bytes_each }
    }

    /// Number of entries; each may be several datagrams (see [`Received::stride`]).
    pub fn len(&self) -> usize {
        self.received.len()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.received.is_empty()
    }

    /// The entries with their bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&Received, &[u8])> {
        let memory = self.lease.as_deref().unwrap_or_default();
        self.received.iter().zip(memory.chunks(self.bytes_each)).map(|(one, buffer)| (one, &buffer[..one.length]))
    }

    /// Drops the datagrams and returns their memory.
    pub fn clear(&mut self) {
        self.lease = None;
        self.received.clear();
    }

    /// At most `count_max` empty buffers, and the list for their metadata.
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
    /// Consists of `count` buffers of `bytes_each`.
    pub memory: &'a mut [u8],
    pub bytes_each: usize,
    pub count: usize,
    /// Only the bytes of the next datagram are wanted, without its source.
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
