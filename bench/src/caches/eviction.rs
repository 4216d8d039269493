//! Simulators of cache eviction policies, to compare their hit rates. Each is a page long.
//!
//! They use keys and sizes only. Gale's policy is implemented here again in a few lines, because its index is not made
//! for use by a benchmark; the test of `http-cache/src/index.rs` expects the same figures from the index.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::zipf::Zipf;

/// An eviction policy with a cache of a given size.
pub trait Rule {
    /// Requests a key, which is stored if it is missing. Returns true for a hit.
    fn ask(&mut self, key: u64, size: u64) -> bool;
}

/// Name of a policy, and its constructor, which takes the size of the cache.
pub type Named = (&'static str, fn(u64) -> Box<dyn Rule>);

pub const RULES: [Named; 5] = [
    ("Gale", |room| Box::new(TwoQueues::new(room, 0))),
    ("S3-FIFO", |room| Box::new(TwoQueues::new(room, usize::MAX))),
    ("SIEVE", |room| Box::new(Sieve { room, ..Sieve::default() })),
    ("W-TinyLFU", |room| Box::new(WTinyLfu::new(room))),
    ("LRU", |room| Box::new(Lru { room, ..Lru::default() })),
];

/// Entries ordered by last use.
#[derive(Default)]
struct Recency {
    by_key: HashMap<u64, (u64, u64)>,
    by_time: BTreeMap<u64, u64>,
    now: u64,
    bytes: u64,
}

impl Recency {
    fn put(&mut self, key: u64, size: u64) {
        self.now += 1;
        self.by_key.insert(key, (self.now, size));
        self.by_time.insert(self.now, key);
        self.bytes += size;
    }

    /// Removes an entry and returns its size.
    fn take(&mut self, key: u64) -> Option<u64> {
        let (time, size) = self.by_key.remove(&key)?;
        self.by_time.remove(&time);
        self.bytes -= size;
        Some(size)
    }

    fn touch(&mut self, key: u64) -> bool {
        self.take(key).map(|size| self.put(key, size)).is_some()
    }

    fn oldest(&self) -> Option<u64> {
        self.by_time.first_key_value().map(|(_, &key)| key)
    }
}

/// nginx's policy: evicts the least recently used entry.
#[derive(Default)]
struct Lru {
    room: u64,
    entries: Recency,
}

impl Rule for Lru {
    fn ask(&mut self, key: u64, size: u64) -> bool {
        if self.entries.touch(key) {
            return true;
        }
        self.entries.put(key, size);
        while let Some(oldest) = self.entries.oldest().filter(|_| self.entries.bytes > self.room) {
            self.entries.take(oldest);
        }
        false
    }
}

/// S3-FIFO (Yang et al., SOSP 2023). Without ghosts it is Gale's policy.
struct TwoQueues {
    room: u64,
    bytes: u64,
    entries: HashMap<u64, Queued>,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    /// Keys that have left the small queue. `ghosts_max` bounds their number, as does the number of entries in the main
    /// queue.
    ghosts: Recency,
    ghosts_max: usize,
}

struct Queued {
    size: u64,
    hits: u8,
}

impl TwoQueues {
    fn new(room: u64, ghosts_max: usize) -> TwoQueues {
        let (entries, ghosts) = (HashMap::new(), Recency::default());
        TwoQueues { room, bytes: 0, entries, small: VecDeque::new(), main: VecDeque::new(), ghosts, ghosts_max }
    }

    fn evict(&mut self) {
        /// As in Gale.
        const STEPS_MAX: usize = 128;
        for step in 0.. {
            // The small queue is limited to a tenth of the entries.
            let is_small = self.main.is_empty() || self.small.len() * 10 > self.entries.len();
            let queue = if is_small { &mut self.small } else { &mut self.main };
            let Some(key) = queue.pop_front() else { return };
            let entry = self.entries.get_mut(&key).expect("what is queued is an entry");
            if entry.hits == 0 || step >= STEPS_MAX {
                self.bytes -= entry.size;
                self.entries.remove(&key);
                if is_small && self.ghosts_max > 0 {
                    self.remember(key);
                }
                return;
            }
            entry.hits = if is_small { 0 } else { entry.hits - 1 };
            self.main.push_back(key);
        }
    }

    fn remember(&mut self, key: u64) {
        self.ghosts.put(key, 0);
        while self.ghosts.by_key.len() > self.ghosts_max.min(self.main.len().max(1)) {
            let oldest = self.ghosts.oldest().expect("there are some");
            self.ghosts.take(oldest);
        }
    }
}

impl Rule for TwoQueues {
    fn ask(&mut self, key: u64, size: u64) -> bool {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.hits = (entry.hits + 1).min(3);
            return true;
        }
        self.entries.insert(key, Queued { size, hits: 0 });
        let was_ghost = self.ghosts.take(key).is_some();
        if was_ghost {
            self.main.push_back(key)
        } else {
            self.small.push_back(key)
        }
        self.bytes += size;
        while self.bytes > self.room {
            self.evict();
        }
        false
    }
}

/// SIEVE (Zhang et al., NSDI 2024): one queue, and a hand that moves from the oldest entry to the newest.
#[derive(Default)]
struct Sieve {
    room: u64,
    bytes: u64,
    entries: HashMap<u64, (u64, bool)>,
    queue: BTreeMap<u64, u64>,
    now: u64,
    hand: u64,
}

impl Rule for Sieve {
    fn ask(&mut self, key: u64, size: u64) -> bool {
        if let Some((_, was_visited)) = self.entries.get_mut(&key) {
            *was_visited = true;
            return true;
        }
        while self.bytes + size > self.room {
            let Some((&at, &key)) = self.queue.range(self.hand..).next().or_else(|| self.queue.first_key_value())
            else {
                return false;
            };
            self.hand = at + 1;
            let (own, was_visited) = self.entries.get_mut(&key).expect("what is queued is an entry");
            if !std::mem::take(was_visited) {
                self.bytes -= *own;
                self.entries.remove(&key);
                self.queue.remove(&at);
            }
        }
        self.now += 1;
        self.queue.insert(self.now, key);
        self.entries.insert(key, (size, false));
        self.bytes += size;
        false
    }
}

/// W-TinyLFU (Einziger et al., 2017), divided as in Caffeine: a window of 1 %, then a probation segment and a protected
/// one of four fifths. An entry that leaves the window is admitted if it was requested more often than the entry to be
/// evicted for it.
struct WTinyLfu {
    room: u64,
    window: Recency,
    probation: Recency,
    protected: Recency,
    sketch: Sketch,
}

impl WTinyLfu {
    fn new(room: u64) -> WTinyLfu {
        let part = Recency::default;
        WTinyLfu { room, window: part(), probation: part(), protected: part(), sketch: Sketch::new() }
    }

    fn window_max(&self) -> u64 {
        (self.room / 100).max(1)
    }

    fn bytes(&self) -> u64 {
        self.window.bytes + self.probation.bytes + self.protected.bytes
    }

    fn protect(&mut self, key: u64, size: u64) {
        self.protected.put(key, size);
        while self.protected.bytes > (self.room - self.window_max()) * 4 / 5 {
            let oldest = self.protected.oldest().expect("it has bytes");
            let size = self.protected.take(oldest).expect("it is the oldest");
            self.probation.put(oldest, size);
        }
    }

    /// Admits an entry that has left the window in place of others, or drops it.
    fn admit(&mut self, candidate: u64, size: u64) {
        while self.bytes() + size > self.room {
            let part = if self.probation.bytes > 0 { &mut self.probation } else { &mut self.protected };
            let Some(victim) = part.oldest() else { return };
            if self.sketch.count(candidate) <= self.sketch.count(victim) {
                return;
            }
            part.take(victim);
        }
        self.probation.put(candidate, size);
    }
}

impl Rule for WTinyLfu {
    fn ask(&mut self, key: u64, size: u64) -> bool {
        self.sketch.add(key);
        if self.window.touch(key) || self.protected.touch(key) {
            return true;
        }
        if let Some(size) = self.probation.take(key) {
            self.protect(key, size);
            return true;
        }
        self.window.put(key, size);
        while self.window.bytes > self.window_max() {
            let oldest = self.window.oldest().expect("it has bytes");
            let size = self.window.take(oldest).expect("it is the oldest");
            self.admit(oldest, size);
        }
        false
    }
}

/// Approximate request counts: four rows of counters up to 15, which are halved periodically.
struct Sketch {
    rows: [Vec<u8>; 4],
    added: u32,
}

impl Sketch {
    const WIDTH: usize = 4096;

    /// Ten times the number of entries that fit.
    const HALVED_AFTER: u32 = 10_000;

    fn new() -> Sketch {
        Sketch { rows: std::array::from_fn(|_| vec![0; Self::WIDTH]), added: 0 }
    }

    fn place(key: u64, row: usize) -> usize {
        let seeds = [0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0x27D4_EB2F_1656_67C5];
        let mixed = (key ^ (key >> 31)).wrapping_add(1).wrapping_mul(seeds[row]);
        (mixed >> 40) as usize % Self::WIDTH
    }

    fn add(&mut self, key: u64) {
        for (row, counters) in self.rows.iter_mut().enumerate() {
            let counter = &mut counters[Self::place(key, row)];
            *counter = (*counter + 1).min(15);
        }
        self.added += 1;
        if self.added == Self::HALVED_AFTER {
            self.added /= 2;
            self.rows.iter_mut().flatten().for_each(|counter| *counter /= 2);
        }
    }

    fn count(&self, key: u64) -> u8 {
        let counts = self.rows.iter().enumerate().map(|(row, counters)| counters[Self::place(key, row)]);
        counts.min().unwrap_or(0)
    }
}

/// A trace: requests for 50,000 keys with a Zipf distribution. With scans, each 2,000 of them are followed by as many
/// requests for keys that are never used again. All entries have size 1, or sizes of 1 to 128.
#[derive(Clone, Copy)]
pub struct Trace {
    pub exponent: f64,
    pub has_scans: bool,
    pub has_sizes: bool,
}

impl Trace {
    /// Number of requests that count: all except those of scans.
    pub const REQUESTS: u64 = 100_000;

    /// Size of the cache.
    pub fn room(self) -> u64 {
        if self.has_sizes { 8000 } else { 1000 }
    }

    fn size(self, key: u64) -> u64 {
        if self.has_sizes { 1 << (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 61) } else { 1 }
    }

    /// Returns the hits per thousand requests with this policy. The result is deterministic.
    pub fn hits(self, rule: &mut dyn Rule) -> u64 {
        let mut zipf = Zipf::new(50_000, self.exponent);
        let (mut hits, mut once) = (0, 1 << 40);
        for number in 0..Self::REQUESTS {
            let key = zipf.next();
            hits += u64::from(rule.ask(key, self.size(key)));
            let scanned = if self.has_scans && number % 2000 == 1999 { 2000 } else { 0 };
            for _ in 0..scanned {
                once += 1;
                rule.ask(once, self.size(once));
            }
        }
        hits * 1000 / Self::REQUESTS
    }
}
