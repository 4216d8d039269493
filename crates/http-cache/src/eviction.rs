//! Chooses the entry to evict: S3-FIFO, without its ghost queue.
//!
//! ```text
//!   new ──► small ──requested again──► main ──► evicted, unless requested since: then once more round
//!             └──── not requested ──► evicted
//! ```
//!
//! Entries requested once, by a scan for example, pass through the small queue and displace no entry that is requested
//! often. A hit only sets two bits and moves no entry. (Yang et al., "FIFO queues are all you need for cache eviction",
//! SOSP 2023; see `docs/decisions/0029-cache-storage.md`.)

/// A slot's number: the place of an entry in its shard.
pub type Slot = u32;

/// An entry that the queues link.
pub trait Linked {
    /// Its place in them.
    fn links(&mut self) -> &mut Links;
}

/// No slot.
const NONE: Slot = Slot::MAX;

/// The small queue holds one entry in this many.
const SMALL_SHARE: usize = 10;

/// Maximum number of entries moved before one is evicted: it keeps the section under the lock short.
const STEPS_MAX: usize = 128;

/// Maximum count of hits.
const HITS_MAX: u8 = 3;

/// An entry's place in the queues.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    newer: Slot,
    older: Slot,
    hits: u8,
    queue: Queue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    None,
    Small,
    Main,
}

impl Default for Links {
    fn default() -> Links {
        Links { newer: NONE, older: NONE, hits: 0, queue: Queue::None }
    }
}

impl Links {
    /// Counts a request for the entry.
    pub fn note_hit(&mut self) {
        self.hits = (self.hits + 1).min(HITS_MAX);
    }

    /// True if the slot holds an entry.
    pub fn is_queued(&self) -> bool {
        self.queue != Queue::None
    }
}

/// The queues of a shard.
pub struct Queues {
    small: List,
    main: List,
}

#[derive(Clone, Copy)]
struct List {
    newest: Slot,
    oldest: Slot,
    length: usize,
}

impl Default for Queues {
    /// The empty queues of a shard.
    fn default() -> Queues {
        let empty = List { newest: NONE, oldest: NONE, length: 0 };
        Queues { small: empty, main: empty }
    }
}

impl Queues {
    /// Queues a new entry.
    pub fn add<E: Linked>(&mut self, slots: &mut [E], slot: Slot) {
        slots[slot as usize].links().hits = 0;
        self.link(slots, slot, Queue::Small);
    }

    /// Takes an entry out of its queue.
    pub fn remove<E: Linked>(&mut self, slots: &mut [E], slot: Slot) {
        let Links { newer, older, queue, .. } = *slots[slot as usize].links();
        let list = match queue {
            Queue::None => return,
            Queue::Small => &mut self.small,
            Queue::Main => &mut self.main,
        };
        match newer {
            NONE => list.newest = older,
            newer => slots[newer as usize].links().older = older,
        }
        match older {
            NONE => list.oldest = newer,
            older => slots[older as usize].links().newer = newer,
        }
        list.length -= 1;
        *slots[slot as usize].links() = Links::default();
    }

    /// The entry to evict. If all entries are requested all the time, the oldest one is chosen after some steps.
    pub fn victim<E: Linked>(&mut self, slots: &mut [E]) -> Option<Slot> {
        for step in 0.. {
            let from_small =
                self.main.length == 0 || self.small.length * SMALL_SHARE > self.small.length + self.main.length;
            let list = if from_small { self.small } else { self.main };
            let slot = list.oldest;
            if slot == NONE {
                return None;
            }
            let hits = slots[slot as usize].links().hits;
            if hits == 0 || step >= STEPS_MAX {
                return Some(slot);
            }
            self.remove(slots, slot);
            slots[slot as usize].links().hits = if from_small { 0 } else { hits - 1 };
            self.link(slots, slot, Queue::Main);
        }
        None
    }

    fn link<E: Linked>(&mut self, slots: &mut [E], slot: Slot, queue: Queue) {
        let list = if queue == Queue::Small { &mut self.small } else { &mut self.main };
        let before = std::mem::replace(&mut list.newest, slot);
        list.length += 1;
        let links = slots[slot as usize].links();
        (links.newer, links.older, links.queue) = (NONE, before, queue);
        match before {
            NONE => list.oldest = slot,
            before => slots[before as usize].links().newer = slot,
        }
    }
}
