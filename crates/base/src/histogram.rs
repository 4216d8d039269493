//! A histogram of durations with fixed buckets. There are 8 buckets per power of two, so a quantile is at most 12.5 %
//! too high; a [`FineHistogram`], for benchmarks, has 128, which makes that less than 1 %.
//!
//! Never allocates after creation and never loses a value: the buckets reach from 1 ns to the end of `u64` (584 years).
//! Invariant: bucket bounds never overlap and grow with the index. Recording takes a few relaxed atomic operations.
//!
//! ```text
//! With 8 buckets per power of two (3 bits):
//! index    0 … 7      8 … 15          16 … 23           24 …
//! value    0 … 7 ns   8 … 15 step 1   16 … 31 step 2    32 … 63 step 4 …
//! ```

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Base-2 logarithm of the number of buckets within one power of two.
const STEP_BITS: u32 = 3;
const FINE_STEP_BITS: u32 = 7;

/// A histogram that any thread may record into and read at any time. With the default number of buckets it takes 4 KiB.
#[derive(Debug)]
pub struct Histogram<const BITS: u32 = STEP_BITS> {
    buckets: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// A histogram with 128 buckets per power of two: quantiles are less than 1 % too high, and it takes 58 KiB.
pub type FineHistogram = Histogram<FINE_STEP_BITS>;

/// A snapshot of a [`FineHistogram`].
pub type FineSnapshot = Snapshot<FINE_STEP_BITS>;

/// The number of buckets within one power of two.
const fn steps(bits: u32) -> usize {
    1 << bits
}

/// The total number of buckets: one for each value below `steps`, then `steps` for every power of two from there on.
const fn bucket_count(bits: u32) -> usize {
    steps(bits) * (65 - bits as usize)
}

impl Histogram {
    /// An empty histogram.
    pub fn new() -> Self {
        Self::default()
    }
}

impl<const BITS: u32> Histogram<BITS> {
    /// Records one duration.
    pub fn record(&self, duration: Duration) {
        self.record_ns(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Records one duration, given in nanoseconds.
    pub fn record_ns(&self, duration_ns: u64) {
        self.buckets[bucket_of(BITS, duration_ns)].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(duration_ns, Relaxed);
        if duration_ns > self.max_ns.load(Relaxed) {
            self.max_ns.fetch_max(duration_ns, Relaxed);
        }
    }

    /// Returns a copy of the counts. A value recorded at the same time may be included only in part.
    pub fn snapshot(&self) -> Snapshot<BITS> {
        Snapshot {
            counts: self.buckets.iter().map(|bucket| bucket.load(Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Relaxed),
            max_ns: self.max_ns.load(Relaxed),
        }
    }
}

impl<const BITS: u32> Default for Histogram<BITS> {
    fn default() -> Self {
        Histogram {
            buckets: (0..bucket_count(BITS)).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        }
    }
}

/// The counts of a [`Histogram`] at one moment, or of several added up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot<const BITS: u32 = STEP_BITS> {
    counts: Box<[u64]>,
    sum_ns: u64,
    max_ns: u64,
}

/// Bounds of [`Snapshot::cumulative`]: the first is 2^14 ns (16 µs); each further one is four times as long, up to
/// 17 s.
const FIRST_BOUND_BITS: u32 = 14;
const BOUNDS: u32 = 11;

impl Snapshot {
    /// Builds a snapshot from counts kept elsewhere: those of the first buckets, the sum and the largest value in
    /// nanoseconds.
    pub fn of_counts(counts: impl Iterator<Item = u64>, sum_ns: u64, max_ns: u64) -> Self {
        let mut snapshot = Snapshot { sum_ns, max_ns, ..Snapshot::empty() };
        snapshot.counts.iter_mut().zip(counts).for_each(|(bucket, count)| *bucket = count);
        snapshot
    }

    /// A snapshot without values, to [`add`](Self::add) others to.
    pub fn empty() -> Self {
        Snapshot { counts: vec![0; bucket_count(STEP_BITS)].into(), sum_ns: 0, max_ns: 0 }
    }
}

impl<const BITS: u32> Snapshot<BITS> {
    /// Adds the values of another snapshot, for example another worker's.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts.iter()) {
            *mine = mine.saturating_add(*theirs);
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The number of recorded values.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |total, &count| total.saturating_add(count))
    }

    /// The sum of all values.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The largest value, not rounded to a bucket.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max_ns)
    }

    /// The mean of all values, or zero if there are none.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.sum_ns.checked_div(self.count()).unwrap_or(0))
    }

    /// Returns the duration that `share` of the values (0.0 to 1.0) do not exceed, rounded up to the end of its bucket,
    /// or zero if there are no values.
    pub fn quantile(&self, share: f64) -> Duration {
        let count = self.count();
        // The rank is at least 1, so that share 0.0 means the smallest value.
        let rank = ((count as f64 * share.clamp(0.0, 1.0)).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0u64;
        for (index, &in_bucket) in self.counts.iter().enumerate() {
            seen = seen.saturating_add(in_bucket);
            if seen >= rank {
                return Duration::from_nanos(last_of_bucket(BITS, index).min(self.max_ns));
            }
        }
        Duration::ZERO
    }

    /// Returns a few upper bounds with the number of values below each; the last entry has no bound. The bounds
    /// coincide with bucket bounds, so the numbers are exact.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<Duration>, u64)> + '_ {
        let bounds = bounds_ns().map(|bound| (Some(Duration::from_nanos(bound)), bucket_of(BITS, bound)));
        let (mut seen, mut begin) = (0u64, 0);
        bounds.chain([(None, self.counts.len())]).map(move |(bound, end)| {
            seen = self.counts[begin..end].iter().fold(seen, |sum, &count| sum.saturating_add(count));
            begin = end;
            (bound, seen)
        })
    }

    /// Returns the non-empty buckets: the largest duration that belongs to each, and its count.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(index, &count)| (Duration::from_nanos(last_of_bucket(BITS, index)), count))
    }
}

/// The bounds of [`Snapshot::cumulative`] in nanoseconds, without the last entry, which has none.
fn bounds_ns() -> impl Iterator<Item = u64> {
    (0..BOUNDS).map(|number| 1 << (FIRST_BOUND_BITS + 2 * number))
}

fn bucket_of(bits: u32, value: u64) -> usize {
    let steps = steps(bits);
    if value < steps as u64 {
        return value as usize;
    }
    let exponent = value.ilog2();
    let shift = exponent - bits;
    let step = (value >> shift) as usize & (steps - 1);
    (shift as usize + 1) * steps + step
}

/// The largest value that belongs to the bucket.
fn last_of_bucket(bits: u32, index: usize) -> u64 {
    let steps = steps(bits);
    if index < steps {
        return index as u64;
    }
    let shift = (index / steps - 1) as u32;
    let first = ((steps + index % steps) as u64) << shift;
    first + ((1u64 << shift) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_adjoin_from_zero_to_the_largest_value() {
        for bits in [STEP_BITS, FINE_STEP_BITS] {
            for index in 0..bucket_count(bits) {
                let last = last_of_bucket(bits, index);
                assert_eq!(bucket_of(bits, last), index);
                if index + 1 < bucket_count(bits) {
                    assert_eq!(bucket_of(bits, last + 1), index + 1);
                } else {
                    assert_eq!(last, u64::MAX);
                }
            }
        }
    }

    #[test]
    fn an_empty_histogram_answers_zero() {
        let snapshot = Histogram::new().snapshot();
        assert_eq!(snapshot.count(), 0);
        assert_eq!(snapshot.quantile(0.99), Duration::ZERO);
        assert_eq!(snapshot.mean(), Duration::ZERO);
    }

    #[test]
    fn quantiles_of_a_thousand_microseconds() {
        let histogram = Histogram::new();
        for microseconds in 1..=1000 {
            histogram.record(Duration::from_micros(microseconds));
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 1000);
        assert_eq!(snapshot.max(), Duration::from_millis(1));
        assert_eq!(snapshot.mean(), Duration::from_nanos(500_500));
        assert_eq!(snapshot.quantile(1.0), Duration::from_millis(1));
        let median = snapshot.quantile(0.5).as_nanos();
        assert!((500_000..=562_500).contains(&median), "{median}");
    }

    #[test]
    fn a_value_counts_below_every_bound_that_is_longer() {
        let histogram = Histogram::new();
        for value in [0, 16_383, 16_384, 1 << 20, 1 << 34, u64::MAX] {
            histogram.record_ns(value);
        }
        let snapshot = histogram.snapshot();
        let counts: Vec<_> =
            snapshot.cumulative().map(|(bound, count)| (bound.map(|bound| bound.as_nanos()), count)).collect();
        assert_eq!(counts[..3], [(Some(1 << 14), 2), (Some(1 << 16), 3), (Some(1 << 18), 3)]);
        assert_eq!(counts[3..5], [(Some(1 << 20), 3), (Some(1 << 22), 4)]);
        assert_eq!(counts[10..], [(Some(1 << 34), 4), (None, 6)]);
        let again = Snapshot::of_counts(snapshot.counts.iter().copied(), snapshot.sum_ns, snapshot.max_ns);
        assert_eq!(again, snapshot);
    }

    #[test]
    fn snapshots_of_several_workers_add_up() {
        let (one, two) = (Histogram::new(), Histogram::new());
        one.record_ns(10);
        two.record_ns(1_000);
        let mut sum = Snapshot::empty();
        sum.add(&one.snapshot());
        sum.add(&two.snapshot());
        assert_eq!((sum.count(), sum.sum(), sum.max().as_nanos()), (2, Duration::from_nanos(1_010), 1_000));
        assert_eq!(sum.buckets().map(|(_, count)| count).collect::<Vec<_>>(), [1, 1]);
    }

    proptest! {
        #[test]
        fn a_quantile_is_too_high_by_one_step_at_most(
            values in proptest::collection::vec(any::<u64>(), 1..50),
            share in 0.0..=1.0f64,
        ) {
            let (histogram, fine) = (Histogram::new(), FineHistogram::default());
            values.iter().for_each(|&value| histogram.record_ns(value));
            values.iter().for_each(|&value| fine.record_ns(value));
            let mut sorted = values;
            sorted.sort_unstable();
            let rank = ((sorted.len() as f64 * share).ceil() as usize).max(1);
            let exact = u128::from(sorted[rank - 1]);
            let found = histogram.snapshot().quantile(share).as_nanos();
            prop_assert!(found >= exact && found <= exact + exact / 8, "{} {}", found, exact);
            let found = fine.snapshot().quantile(share).as_nanos();
            prop_assert!(found >= exact && found <= exact + exact / 128, "{} {}", found, exact);
        }
    }
}
