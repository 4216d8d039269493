//! How files reached the clients: figures for a status page. Each loop counts for itself, without locked instructions;
//! anybody adds the figures up.

use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

/// By what way a piece of a file got to where it is sent from: the rungs of the ladder, the cheapest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung {
    /// It was in the memory cache of open files.
    Memory,
    /// Read on the loop, because the kernel had it in memory.
    Read,
    /// Sent by `sendfile`, because it was found in memory.
    Sendfile,
    /// Read by a thread of a pool.
    Pool,
    /// Read by an io_uring.
    Ring,
    /// Read or sent on the loop whatever that takes: `aio off`.
    Blocking,
}

impl Rung {
    /// All of them, in the order of the figures.
    pub const ALL: [Rung; 6] = [Rung::Memory, Rung::Read, Rung::Sendfile, Rung::Pool, Rung::Ring, Rung::Blocking];

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Memory => "memory",
            Rung::Read => "read",
            Rung::Sendfile => "sendfile",
            Rung::Pool => "pool",
            Rung::Ring => "io_uring",
            Rung::Blocking => "blocking",
        }
    }
}

/// What else is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A look found the piece in memory.
    Hit,
    /// A look did not.
    Miss,
    /// A piece went to a pool without a look.
    Unlooked,
    /// Such a piece was in memory after all.
    PoolHit,
    /// A call on the loop took over 5 ms.
    LongCall,
    /// And that was because it waited.
    Misprediction,
    /// A read that was wanted was under way for somebody else.
    Shared,
}

const EVENTS: usize = 7;

/// The figures, of one loop or of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileCounters {
    /// Pieces by rung, in the order of [`Rung::ALL`].
    pub pieces: [u64; Rung::ALL.len()],
    /// Their bytes.
    pub bytes: [u64; Rung::ALL.len()],
    /// Looks that found the piece in memory: probes before `sendfile`, and reads that need not wait.
    pub probe_hits: u64,
    /// Looks that did not.
    pub probe_misses: u64,
    /// Pieces that went to a pool without a look, because their device had much to do or the look would have written
    /// the file's time of access.
    pub unlooked: u64,
    /// How many of these were in memory after all.
    pub pool_hits: u64,
    /// Calls on a loop that took over 5 ms, for whatever reason: mostly because others had the processor. While none is
    /// timed a turn of the loop over 100 ms with calls in it counts as one.
    pub long_calls: u64,
    /// How many of these have waited, as far as can be told, although they should not have.
    pub mispredictions: u64,
    /// Reads that nobody had to begin, because they were under way for somebody else.
    pub shared_reads: u64,
}

/// Of one thread, which alone writes.
struct Own {
    pieces: [AtomicU64; Rung::ALL.len()],
    bytes: [AtomicU64; Rung::ALL.len()],
    events: [AtomicU64; EVENTS],
}

/// All threads that have counted, also those that have ended: a reload makes a few more.
static ALL: Mutex<Vec<Arc<Own>>> = Mutex::new(Vec::new());

/// Threads that ended before their figures were added to the first one's; see `register`.
const KEPT_MAX: usize = 64;

thread_local! {
    static OWN: OnceCell<Arc<Own>> = const { OnceCell::new() };
}

/// The figures of all loops since the start of the process.
pub fn file_counters() -> FileCounters {
    sum(ALL.lock().iter())
}

fn sum<'a>(all: impl Iterator<Item = &'a Arc<Own>>) -> FileCounters {
    let mut total = FileCounters::default();
    for own in all {
        for rung in 0..Rung::ALL.len() {
            total.pieces[rung] += own.pieces[rung].load(Relaxed);
            total.bytes[rung] += own.bytes[rung].load(Relaxed);
        }
        let event = |event: Event| own.events[event as usize].load(Relaxed);
        total.probe_hits += event(Event::Hit);
        total.probe_misses += event(Event::Miss);
        total.unlooked += event(Event::Unlooked);
        total.pool_hits += event(Event::PoolHit);
        total.long_calls += event(Event::LongCall);
        total.mispredictions += event(Event::Misprediction);
        total.shared_reads += event(Event::Shared);
    }
    total
}

/// Counts a piece of so many bytes.
#[inline]
pub fn count_piece(rung: Rung, bytes: u64) {
    with_own(|own| {
        add(&own.pieces[rung as usize], 1);
        add(&own.bytes[rung as usize], bytes);
    });
}

#[inline]
pub(crate) fn count_event(event: Event) {
    with_own(|own| add(&own.events[event as usize], 1));
}

#[inline]
fn with_own(f: impl FnOnce(&Own)) {
    // A thread that ends counts no more.
    let _ = OWN.try_with(|own| f(own.get_or_init(register)));
}

#[cold]
fn register() -> Arc<Own> {
    let zeros = || [const { AtomicU64::new(0) }; Rung::ALL.len()];
    let own = Arc::new(Own { pieces: zeros(), bytes: zeros(), events: [const { AtomicU64::new(0) }; EVENTS] });
    let mut all = ALL.lock();
    if all.len() >= KEPT_MAX {
        retire(&mut all);
    }
    all.push(Arc::clone(&own));
    own
}

/// Adds the figures of threads that have ended together.
fn retire(all: &mut Vec<Arc<Own>>) {
    let (ended, running): (Vec<_>, Vec<_>) = all.drain(..).partition(|own| Arc::strong_count(own) == 1);
    *all = running;
    let mut ended = ended.into_iter();
    let Some(first) = ended.next() else { return };
    for own in ended {
        let pairs = |of: fn(&Own) -> &[AtomicU64]| {
            of(&first).iter().zip(of(&own)).for_each(|(to, from)| {
                add(to, from.load(Relaxed));
            })
        };
        pairs(|own| &own.pieces);
        pairs(|own| &own.bytes);
        pairs(|own| &own.events);
    }
    all.push(first);
}

/// Only one thread writes.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed) + amount, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_have_counted_is_kept_when_they_have_ended() {
        let before = file_counters();
        for _ in 0..2 * KEPT_MAX {
            std::thread::spawn(|| {
                count_piece(Rung::Ring, 100);
                count_event(Event::Shared);
            })
            .join()
            .unwrap();
        }
        let after = file_counters();
        let ring = Rung::Ring as usize;
        // Other tests of this program may count, too.
        assert!(after.pieces[ring] >= before.pieces[ring] + 2 * KEPT_MAX as u64);
        assert!(after.bytes[ring] >= before.bytes[ring] + 200 * KEPT_MAX as u64);
        assert!(after.shared_reads >= before.shared_reads + 2 * KEPT_MAX as u64);
        assert!(ALL.lock().len() <= KEPT_MAX + 1);
    }
}
