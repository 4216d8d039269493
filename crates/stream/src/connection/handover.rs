//! Assigns each UDP session to a loop, and hands datagrams over between loops.
//!
//! All loops with the same address share a table of its sessions, split into parts with a lock each. A loop consults it
//! only for clients that have no session in that loop. Datagrams for another loop are collected until the end of a
//! batch and sent through a bounded queue. Datagrams without room in the queue are dropped and counted. A draining loop
//! opens no sessions and hands new clients to another loop.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use gale_process::ListenAddress;
use gale_runtime::mpsc;
use hashbrown::{DefaultHashBuilder, HashMap};
use parking_lot::Mutex;

use super::datagrams::Key;
use crate::session::datagrams::Arrived;

/// Maximum number of batches in the queue of a loop.
const BATCHES_MAX: usize = 64;

/// A batch with this many entries or bytes is sent at once.
const BATCH_MAX: usize = 64;
const BATCH_BYTES_MAX: usize = 256 * 1024;

/// Maximum number of bytes in the queue of a loop. One batch may exceed it.
const WAITING_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Maximum number of handovers of one datagram. The owner of its session may change in between.
pub(super) const TIMES_MAX: u8 = 4;

/// Parts of the table, each with a lock.
const PARTS: usize = 16;

/// Tables of this process, by address.
static TABLES: LazyLock<Mutex<HashMap<ListenAddress, Weak<Table>>>> = LazyLock::new(Mutex::default);

/// Datagrams of one sender for another loop.
pub(super) struct Handed {
    pub key: Key,
    pub bytes: Vec<u8>,
    pub stride: usize,
    pub times: u8,
}

/// The loop that owns a client's session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// This loop. The claim may be new.
    Own,
    /// The loop with this number.
    Other(usize),
    /// No loop: all of them are draining.
    Nobody,
}

/// The owners of all sessions at one address.
struct Table {
    hasher: DefaultHashBuilder,
    parts: [Mutex<HashMap<Key, usize>>; PARTS],
    loops: Mutex<Vec<Option<Entry>>>,
}

struct Entry {
    sender: mpsc::Sender<Vec<Handed>>,
    /// Bytes in its queue.
    waiting_bytes: Arc<AtomicUsize>,
    is_leaving: bool,
}

/// Datagrams collected for another loop.
struct Outgoing {
    owner: usize,
    batch: Vec<Handed>,
    bytes: usize,
}

/// A loop's handle on the table of an address. Dropping it releases the loop's entry and its sessions.
pub(super) struct Owners {
    table: Arc<Table>,
    owner: usize,
    outgoing: RefCell<Vec<Outgoing>>,
    is_leaving: Cell<bool>,
    dropped: Cell<u64>,
}

/// Receiving end of a loop's queue.
pub(super) struct Inbox {
    receiver: mpsc::Receiver<Vec<Handed>>,
    waiting_bytes: Arc<AtomicUsize>,
}

impl Inbox {
    /// Returns the next batch, or `None` when the loop has released its entry.
    pub async fn next(&mut self) -> Option<Vec<Handed>> {
        let batch = poll_fn(|context| self.receiver.poll_recv(context)).await?;
        self.waiting_bytes.fetch_sub(length_of(&batch), Ordering::Relaxed);
        Some(batch)
    }
}

impl Owners {
    /// Registers this loop in the table of the address.
    pub fn join(address: &ListenAddress) -> (Owners, Inbox) {
        let table = {
            let mut tables = TABLES.lock();
            tables.retain(|_, table| table.strong_count() > 0);
            match tables.get(address).and_then(Weak::upgrade) {
                Some(table) => table,
                None => {
                    let table = Arc::new(Table {
                        hasher: DefaultHashBuilder::default(),
                        parts: Default::default(),
                        loops: Mutex::default(),
                    });
                    tables.insert(address.clone(), Arc::downgrade(&table));
                    table
                }
            }
        };
        let (sender, receiver) = mpsc::channel(BATCHES_MAX);
        let waiting_bytes = Arc::<AtomicUsize>::default();
        let owner = {
            let mut loops = table.loops.lock();
            let free = loops.iter().position(Option::is_none).unwrap_or_else(|| {
                loops.push(None);
                loops.len() - 1
            });
            loops[free] = Some(Entry { sender, waiting_bytes: Arc::clone(&waiting_bytes), is_leaving: false });
            free
        };
        let (outgoing, is_leaving, dropped) = (RefCell::default(), Cell::new(false), Cell::new(0));
        (Owners { table, owner, outgoing, is_leaving, dropped }, Inbox { receiver, waiting_bytes })
    }

    fn part(&self, key: &Key) -> &Mutex<HashMap<Key, usize>> {
        &self.table.parts[self.table.hasher.hash_one(key) as usize % PARTS]
    }

    /// Returns the owner of this client's session. A client without owner is claimed for this loop: two loops that
    /// receive from it at once must not open a session each.
    pub fn claim(&self, key: &Key) -> Owner {
        let mut part = self.part(key).lock();
        match part.get(key) {
            Some(&owner) if owner == self.owner && self.is_leaving.get() => {
                part.remove(key);
                drop(part);
                self.heir()
            }
            None if self.is_leaving.get() => {
                drop(part);
                self.heir()
            }
            Some(&owner) if owner == self.owner => Owner::Own,
            Some(&owner) => Owner::Other(owner),
            None => {
                part.insert(key.clone(), self.owner);
                Owner::Own
            }
        }
    }

    /// Returns a loop that is not draining.
    fn heir(&self) -> Owner {
        let loops = self.table.loops.lock();
        let stays = |owner: &Option<Entry>| owner.as_ref().is_some_and(|owner| !owner.is_leaving);
        loops.iter().position(stays).map_or(Owner::Nobody, Owner::Other)
    }

    /// Stops opening sessions in this loop. Existing ones continue.
    pub fn leave(&self) {
        self.is_leaving.set(true);
        if let Some(owner) = &mut self.table.loops.lock()[self.owner] {
            owner.is_leaving = true;
        }
    }

    /// Removes this client from the table if this loop owns it.
    pub fn release(&self, key: &Key) {
        let mut part = self.part(key).lock();
        if part.get(key) == Some(&self.owner) {
            part.remove(key);
        }
    }

    /// Queues datagrams for the loop with this number. They are sent by the next [`Owners::flush`] at the latest.
    pub fn hand_over(&self, owner: usize, handed: Handed) {
        let mut all = self.outgoing.borrow_mut();
        let place = all.iter().position(|outgoing| outgoing.owner == owner).unwrap_or_else(|| {
            all.push(Outgoing { owner, batch: Vec::new(), bytes: 0 });
            all.len() - 1
        });
        all[place].bytes += handed.bytes.len();
        all[place].batch.push(handed);
        if all[place].batch.len() >= BATCH_MAX || all[place].bytes >= BATCH_BYTES_MAX {
            self.send(all.swap_remove(place));
        }
    }

    pub fn flush(&self) {
        if self.outgoing.borrow().is_empty() {
            return;
        }
        self.outgoing.take().into_iter().for_each(|outgoing| self.send(outgoing));
    }

    fn send(&self, Outgoing { owner, batch, bytes }: Outgoing) {
        let count: u64 = batch.iter().map(|handed| Arrived::count_of(handed.bytes.len(), handed.stride)).sum();
        let loops = self.table.loops.lock();
        let sent = loops.get(owner).and_then(Option::as_ref).is_some_and(|owner| {
            if owner.waiting_bytes.load(Ordering::Relaxed) >= WAITING_BYTES_MAX {
                return false;
            }
            owner.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
            let sent = owner.sender.try_send(batch).is_ok();
            if !sent {
                owner.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
            sent
        });
        if !sent {
            self.dropped.set(self.dropped.get() + count);
        }
    }

    /// Returns the number of datagrams dropped since the last call.
    pub fn take_dropped(&self) -> u64 {
        self.dropped.take()
    }
}

fn length_of(batch: &[Handed]) -> usize {
    batch.iter().map(|handed| handed.bytes.len()).sum()
}

impl Drop for Owners {
    fn drop(&mut self) {
        self.table.loops.lock()[self.owner] = None;
        for part in &self.table.parts {
            part.lock().retain(|_, owner| *owner != self.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use gale_runtime::SocketAddress;

    use super::*;

    fn key(port: u16) -> Key {
        let address = |port: u16| SocketAddress::Inet(([127, 0, 0, 1], port).into());
        (address(port), address(53))
    }

    fn handed(port: u16) -> Handed {
        Handed { key: key(port), bytes: vec![1], stride: 1, times: 1 }
    }

    #[test]
    fn session_of_another_loop_is_known_until_it_is_over() {
        let address = ListenAddress::Inet(([127, 0, 0, 1], 1).into());
        let (one, _) = Owners::join(&address);
        let (other, _) = Owners::join(&address);
        assert_eq!((one.claim(&key(9)), other.claim(&key(9))), (Owner::Own, Owner::Other(one.owner)));
        other.release(&key(9));
        assert_eq!(other.claim(&key(9)), Owner::Other(one.owner));
        one.release(&key(9));
        assert_eq!((other.claim(&key(9)), one.claim(&key(9))), (Owner::Own, Owner::Other(other.owner)));
        drop(other);
        assert_eq!(one.claim(&key(9)), Owner::Own);
    }

    #[test]
    fn batches_without_room_are_counted() {
        let address = ListenAddress::Inet(([127, 0, 0, 1], 2).into());
        let (one, _) = Owners::join(&address);
        let (other, mut inbox) = Owners::join(&address);
        for _ in 0..BATCHES_MAX + 2 {
            one.hand_over(other.owner, handed(9));
            one.hand_over(other.owner, handed(10));
            one.flush();
        }
        assert_eq!(one.take_dropped(), 4);
        let batch = inbox.receiver.try_recv().unwrap().unwrap();
        assert_eq!(batch.iter().map(|handed| handed.key.clone()).collect::<Vec<_>>(), [key(9), key(10)]);
    }

    #[test]
    fn bytes_that_wait_are_bounded() {
        let address = ListenAddress::Inet(([127, 0, 0, 1], 3).into());
        let (one, _) = Owners::join(&address);
        let (other, _inbox) = Owners::join(&address);
        let long = || Handed { bytes: vec![0; 60_000], stride: 60_000, ..handed(9) };
        let fit = WAITING_BYTES_MAX / (5 * 60_000) + 1;
        for _ in 0..fit * 5 {
            one.hand_over(other.owner, long());
        }
        one.flush();
        assert_eq!(one.take_dropped(), 0);
        one.hand_over(other.owner, long());
        one.flush();
        assert_eq!(one.take_dropped(), 1);
    }

    #[test]
    fn a_loop_that_leaves_hands_new_clients_to_one_that_stays() {
        let address = ListenAddress::Inet(([127, 0, 0, 1], 4).into());
        let (leaving, _) = Owners::join(&address);
        let (staying, _) = Owners::join(&address);
        assert_eq!(leaving.claim(&key(9)), Owner::Own);
        leaving.leave();
        // A claim means that this loop has no session that accepts more datagrams.
        assert_eq!(leaving.claim(&key(9)), Owner::Other(staying.owner));
        assert_eq!(leaving.claim(&key(10)), Owner::Other(staying.owner));
        assert_eq!((staying.claim(&key(9)), staying.claim(&key(10))), (Owner::Own, Owner::Own));
        drop(staying);
        assert_eq!(leaving.claim(&key(11)), Owner::Nobody);
    }
}
