//! Balancing by a hash of the client's address (`ip_hash`) or of a key (`hash`, `hash … consistent`): equal requests go
//! to the same peer while that is available. All three are bit for bit nginx's, and thus those of memcached's clients.

use gale_base::crc32::{Crc32, crc32};
use gale_runtime::Moment;
use smallvec::SmallVec;

use super::TRIES_MAX;
use crate::peer::Peer;
use crate::peers::{PeerSet, View};
use crate::selection::{Selection, Tried};

/// Progress of one request's hash.
#[derive(Debug)]
pub(crate) struct Hashing {
    how: How,
    tries: u32,
}

#[derive(Debug)]
enum How {
    Address {
        /// The bytes that are hashed.
        address: SmallVec<[u8; 16]>,
        hash: u32,
    },
    Key {
        key: SmallVec<[u8; 64]>,
        hash: u32,
        rehashes: u32,
    },
    /// Index among the group's points; `None` for an empty key.
    Consistent {
        point: Option<usize>,
    },
}

impl Hashing {
    /// By IP address: three bytes of an IPv4 address, all of an IPv6 address, zeros for a client without one.
    pub fn by_address(address: &[u8]) -> Hashing {
        let address: SmallVec<[u8; 16]> = match address {
            [] => SmallVec::from_slice(&[0; 3]),
            [first @ .., _] if first.len() == 3 => SmallVec::from_slice(first),
            whole => SmallVec::from_slice(whole),
        };
        Hashing { how: How::Address { address, hash: 89 }, tries: 0 }
    }

    /// The algorithm of `Cache::Memcached`.
    pub fn by_key(key: &[u8]) -> Hashing {
        Hashing { how: How::Key { key: SmallVec::from_slice(key), hash: 0, rehashes: 0 }, tries: 0 }
    }

    /// The algorithm of `Cache::Memcached::Fast` (ketama).
    pub fn consistent(key: &[u8], primary: &PeerSet) -> Hashing {
        let points = primary.points.as_ref().filter(|_| !key.is_empty());
        let point = points.map(|points| points.find(crc32(key)));
        Hashing { how: How::Consistent { point }, tries: 0 }
    }

    /// The next peer of a set that the hash leads to.
    fn next(&mut self, set: &PeerSet) -> Option<usize> {
        let hash = match &mut self.how {
            How::Address { address, hash } => {
                *hash = address.iter().fold(*hash, |hash, &byte| (hash * 113 + u32::from(byte)) % 6271);
                *hash
            }
            How::Key { key, hash, rehashes } => {
                let mut sum = Crc32::new();
                if *rehashes > 0 {
                    sum = sum.update(rehashes.to_string().as_bytes());
                }
                *hash = hash.wrapping_add(sum.update(key).finish() >> 16 & 0x7fff);
                *rehashes += 1;
                *hash
            }
            How::Consistent { .. } => return None,
        };
        Some(set.at_weight(u64::from(hash) % set.total_weight))
    }

    /// `true` if the hash cannot be used any more, so that peers are chosen in turn.
    fn is_over(&self, set: &PeerSet) -> bool {
        let is_useless = match &self.how {
            How::Address { .. } => false,
            How::Key { key, .. } => key.is_empty(),
            How::Consistent { point } => point.is_none(),
        };
        is_useless || self.tries > TRIES_MAX || set.peers.len() < 2
    }
}

impl Selection {
    pub(super) fn pick_by_hash(&self, hashing: &mut Hashing, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = view.peers.set(self.in_backup);
        let is_consistent = matches!(hashing.how, How::Consistent { .. });
        if set.peers.is_empty() {
            return None;
        }
        if !(hashing.is_over(set) || is_consistent && self.in_backup) {
            if let Some(bound) = self.bound_peer(set, now, lost) {
                return Some(bound);
            }
            while hashing.tries <= TRIES_MAX {
                let found = match &mut hashing.how {
                    How::Consistent { point: Some(point) } => {
                        let found = self.pick_at_point(*point, view, now, lost);
                        if found.is_none() {
                            *point = point.wrapping_add(1);
                        }
                        found
                    }
                    _ => hashing.next(set).filter(|&index| self.is_candidate(set, index, now, lost)),
                };
                if found.is_some() {
                    return found;
                }
                hashing.tries += 1;
            }
        }
        self.pick_in_turn(view, now, lost)
    }

    /// Chooses in turn among the peers of the server that owns a point.
    fn pick_at_point(&self, point: usize, view: &View, now: Moment, lost: &Tried) -> Option<usize> {
        let set = &view.peers.primary;
        let peers = set.points.as_ref()?.peers_at(point);
        let candidates = peers.iter().map(|&index| index as usize);
        let candidates = candidates.filter(|&index| self.is_candidate(set, index, now, lost));
        view.cursors()[0].round(set, view.common.weight_unit, now, candidates, None)
    }
}

/// Points of a server of weight one.
const POINTS_PER_WEIGHT: u64 = 160;

/// Most points of a group: 32 MiB. With larger weights each server has fewer points in proportion.
const POINTS_MAX: u64 = 4 << 20;

/// Points of `hash … consistent`: each server has many on a circle, and a key belongs to the next point.
#[derive(Debug)]
pub(crate) struct Points {
    /// Hash and server index, ascending by hash.
    points: Box<[(u32, u32)]>,
    /// Peers by server; a host name may have several addresses.
    servers: Box<[Box<[u32]>]>,
}

impl Points {
    pub fn new(peers: &[Peer], total_weight: u64) -> Points {
        Points::at_most(POINTS_MAX, peers, total_weight)
    }

    fn at_most(points_max: u64, peers: &[Peer], total_weight: u64) -> Points {
        let mut servers: Vec<Vec<u32>> = Vec::new();
        let mut numbers = std::collections::HashMap::new();
        let wanted = total_weight.saturating_mul(POINTS_PER_WEIGHT);
        let mut points = Vec::with_capacity(wanted.min(points_max) as usize);
        for (index, peer) in (0..).zip(peers) {
            let number = *numbers.entry(&*peer.server).or_insert_with(|| {
                servers.push(Vec::new());
                servers.len() - 1
            });
            servers[number].push(index);
            let mut count = u64::from(peer.settings.weight) * POINTS_PER_WEIGHT;
            if wanted > points_max {
                count = (u128::from(count) * u128::from(points_max) / u128::from(wanted)).max(1) as u64;
            }
            let base = server_sum(&peer.server);
            let mut previous: u32 = 0;
            for _ in 0..count {
                previous = base.update(&previous.to_le_bytes()).finish();
                points.push((previous, number as u32));
            }
        }
        points.sort_by_key(|&(hash, _)| hash);
        points.dedup_by_key(|&mut (hash, _)| hash);
        Points { points: points.into(), servers: servers.into_iter().map(Into::into).collect() }
    }

    /// The first point at or behind a hash; after the last one the circle starts again.
    fn find(&self, hash: u32) -> usize {
        self.points.partition_point(|&(point, _)| point < hash)
    }

    /// The peers of the server that owns a point.
    fn peers_at(&self, point: usize) -> &[u32] {
        match self.points.len() {
            0 => &[],
            count => &self.servers[self.points[point % count].1 as usize],
        }
    }
}

/// CRC that the points of a server start from: of its host, a zero and its port.
fn server_sum(server: &[u8]) -> Crc32 {
    let is_unix = server.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"unix:"));
    let digits = server.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let colon = server.len().checked_sub(digits + 1).filter(|&colon| server[colon] == b':');
    let (host, port): (&[u8], &[u8]) = match colon {
        _ if is_unix => (&server[5..], b""),
        Some(colon) => (&server[..colon], &server[colon + 1..]),
        None => (server, b""),
    };
    Crc32::new().update(host).update(b"\0").update(port)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gale_runtime::SocketAddress;

    use super::*;
    use crate::ServerSettings;
    use crate::peer::PeerState;

    fn peer(name: &str, weight: u32) -> Peer {
        Peer {
            server_id: None,
            address: SocketAddress::unix(name),
            name: name.into(),
            server: name.as_bytes().into(),
            settings: Arc::new(ServerSettings { weight, ..ServerSettings::default() }),
            session_id: Arc::default(),
            state: Arc::new(PeerState::new()),
        }
    }

    #[test]
    fn weights_that_would_make_too_many_points_make_fewer_in_proportion() {
        let of = |points: &Points, server| points.points.iter().filter(|point| point.1 == server).count();
        let peers = [peer("a", 3_000_000_000), peer("b", 1_000_000_000), peer("c", 1)];
        let points = Points::at_most(4000, &peers, 4_000_000_001);
        assert_eq!([0, 1, 2].map(|server| of(&points, server)), [2999, 999, 1]);
        let points = Points::at_most(4000, &peers[2..], 1);
        assert_eq!(of(&points, 0), 160);
    }

    #[test]
    fn a_server_is_told_apart_by_its_host_and_its_port() {
        let sum = |server: &str| server_sum(server.as_bytes()).finish();
        let of = |bytes: &[u8]| Crc32::new().update(bytes).finish();
        assert_eq!(sum("127.0.0.1:8080"), of(b"127.0.0.1\08080"));
        assert_eq!(sum("127.0.0.1"), of(b"127.0.0.1\0"));
        assert_eq!(sum("[::1]"), of(b"[::1]\0"));
        assert_eq!(sum("unix:/tmp/s:80"), of(b"/tmp/s:80\0"));
        assert_eq!(sum(":80"), of(b"\080"));
    }
}
