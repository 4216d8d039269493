//! Counters of the ways in which files reached clients, for a status page. Each loop counts for itself ([`Tally`]); any
//! thread sums them up.

use gale_base::tally::Tally;

/// The way in which a piece of a file was delivered: the rungs of the ladder, cheapest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rung {
    /// From the memory cache of open files.
    Memory,
    /// Read on the loop, from the page cache.
    Read,
    /// Sent by `sendfile`, after a check found it in memory.
    Sendfile,
    /// Read by a thread of a pool.
    Pool,
    /// Read by an io_uring.
    Ring,
    /// Read or sent on the loop even if that blocks (`aio off`).
    Blocking,
}

impl Rung {
    /// All rungs, in the order of the counters.
    pub const ALL: [Rung; 6] = [Rung::Memory, Rung::Read, Rung::Sendfile, Rung::Pool, Rung::Ring, Rung::Blocking];

    /// Display name.
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

/// Other counted events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A check found the piece in memory.
    Hit,
    /// A check did not find the piece in memory.
    Miss,
    /// A piece went to a pool unchecked.
    Unlooked,
    /// An unchecked piece was in memory after all.
    PoolHit,
    /// A call on a loop has waited.
    Misprediction,
    /// A wanted read was in flight for another request already.
    Shared,
    /// A question to the page cache helper.
    Question,
    /// An answer of the helper: in memory.
    ResidentAnswer,
}

const EVENTS: usize = 8;

/// Counters of one loop or of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileCounters {
    /// Pieces by rung, in the order of [`Rung::ALL`].
    pub pieces: [u64; Rung::ALL.len()],
    /// Their bytes.
    pub bytes: [u64; Rung::ALL.len()],
    /// Checks that found the piece in memory: probes before `sendfile`, and reads that need not wait.
    pub probe_hits: u64,
    /// Checks that did not.
    pub probe_misses: u64,
    /// Pieces that went to a pool unchecked, because their device was busy or the check would have updated the file's
    /// access time.
    pub unlooked: u64,
    /// Unchecked pieces that were in memory after all.
    pub pool_hits: u64,
    /// Stalls of loops in which the thread slept and file system calls were made, which should not have waited.
    pub mispredictions: u64,
    /// Reads that were in flight for another request already.
    pub shared_reads: u64,
    /// Questions to the page cache helper: pieces on busy devices without a known state.
    pub questions: u64,
    /// Answers that the piece, or its beginning, was in memory.
    pub resident_answers: u64,
}

const RUNGS: usize = Rung::ALL.len();

/// Pieces by rung, then their bytes by rung, then events.
static ALL: Tally<{ 2 * RUNGS + EVENTS }> = Tally::new();

/// Counters of all loops since the start of the process.
pub fn file_counters() -> FileCounters {
    let sums = ALL.sums();
    let event = |event: Event| sums[2 * RUNGS + event as usize];
    FileCounters {
        pieces: std::array::from_fn(|rung| sums[rung]),
        bytes: std::array::from_fn(|rung| sums[RUNGS + rung]),
        probe_hits: event(Event::Hit),
        probe_misses: event(Event::Miss),
        unlooked: event(Event::Unlooked),
        pool_hits: event(Event::PoolHit),
        mispredictions: event(Event::Misprediction),
        shared_reads: event(Event::Shared),
        questions: event(Event::Question),
        resident_answers: event(Event::ResidentAnswer),
    }
}

/// Counts a piece of `bytes` bytes.
#[inline]
pub fn count_piece(rung: Rung, bytes: u64) {
    let own = ALL.own();
    own.add(rung as usize, 1);
    own.add(RUNGS + rung as usize, bytes);
}

#[inline]
pub(crate) fn count_event(event: Event) {
    ALL.own().add(2 * RUNGS + event as usize, 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_ended_threads_are_kept() {
        const THREADS: u64 = 20;
        let before = file_counters();
        for _ in 0..THREADS {
            std::thread::spawn(|| {
                count_piece(Rung::Ring, 100);
                count_event(Event::Shared);
            })
            .join()
            .unwrap();
        }
        let after = file_counters();
        let ring = Rung::Ring as usize;
        // Other tests of this program may count too.
        assert!(after.pieces[ring] >= before.pieces[ring] + THREADS);
        assert!(after.bytes[ring] >= before.bytes[ring] + 100 * THREADS);
        assert!(after.shared_reads >= before.shared_reads + THREADS);
    }
}
