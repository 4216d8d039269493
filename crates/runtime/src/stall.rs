//! Stalls: every turn of a loop is timed into a histogram; a turn over 10 ms is a stall and counted.
//!
//! One writer (the loop's thread), any number of readers; plain loads and stores, no locked instructions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A turn longer than this is a stall.
pub const STALL_THRESHOLD: Duration = Duration::from_millis(10);

/// Each power of two of nanoseconds is divided into this many buckets: a quantile is right to within an eighth.
const STEPS: usize = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2^40 ns (18 minutes); longer turns count in the last bucket.
const BUCKETS: usize = 41 * STEPS;

/// The turns of one loop so far.
pub struct Turns {
    buckets: [AtomicU64; BUCKETS],
    stalls: AtomicU64,
    longest: AtomicU64,
    total: AtomicU64,
}

impl Turns {
    pub(crate) fn new() -> Self {
        Turns {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            stalls: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            total: AtomicU64::new(0),
        }
    }

    /// Called by the loop's thread only.
    pub(crate) fn record(&self, nanos: u64) {
        add(&self.buckets[bucket(nanos)], 1);
        add(&self.total, nanos);
        if nanos > self.longest.load(Ordering::Relaxed) {
            self.longest.store(nanos, Ordering::Relaxed);
        }
        if nanos > STALL_THRESHOLD.as_nanos() as u64 {
            add(&self.stalls, 1);
        }
    }

    /// How many turns there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    /// How many turns took longer than [`STALL_THRESHOLD`].
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// The longest turn.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    /// The time spent in turns altogether (not waiting for events).
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.total.load(Ordering::Relaxed))
    }

    /// A duration that the share `quantile` (0 to 1) of all turns did not exceed, rounded up to its bucket's end.
    pub fn quantile(&self, quantile: f64) -> Duration {
        let count = self.count();
        let rank = (count as f64 * quantile.clamp(0.0, 1.0)).ceil() as u64;
        let mut seen = 0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen += bucket.load(Ordering::Relaxed);
            if seen >= rank && seen > 0 {
                return Duration::from_nanos(bucket_end(index));
            }
        }
        Duration::ZERO
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed) + amount, Ordering::Relaxed);
}

fn bucket(nanos: u64) -> usize {
    if nanos < STEPS as u64 {
        return nanos as usize;
    }
    let exponent = 63 - nanos.leading_zeros();
    let step = (nanos >> (exponent - STEP_BITS)) as usize & (STEPS - 1);
    ((exponent - STEP_BITS + 1) as usize * STEPS + step).min(BUCKETS - 1)
}

fn bucket_end(index: usize) -> u64 {
    if index < STEPS {
        return index as u64;
    }
    let exponent = (index / STEPS) as u32 + STEP_BITS - 1;
    let width = 1u64 << (exponent - STEP_BITS);
    (1u64 << exponent) + (index % STEPS) as u64 * width + width - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_within_its_bucket() {
        for nanos in (0..5000).chain([1 << 20, (1 << 30) + 12345, 9_999_999]) {
            let index = bucket(nanos);
            assert!(nanos <= bucket_end(index), "{nanos} in {index}");
            assert!(index == 0 || nanos > bucket_end(index - 1), "{nanos} in {index}");
        }
    }

    #[test]
    fn turns_over_ten_milliseconds_are_stalls() {
        let turns = Turns::new();
        turns.record(9_000_000);
        turns.record(11_000_000);
        assert_eq!((turns.count(), turns.stalls()), (2, 1));
        assert_eq!(turns.longest(), Duration::from_millis(11));
        assert!(turns.quantile(0.5) >= Duration::from_millis(9));
        assert!(turns.quantile(0.5) < Duration::from_millis(11));
    }
}
