//! Stalls: every turn of a loop is timed into a histogram; a turn over 10 ms is a stall, is counted, and is filed by
//! what held it up. The filing is the watchdog's ([`crate::watchdog`]); this file has the figures and the judgement.
//!
//! The loop's thread writes the times and what it is at, the watchdog's thread what it filed; anybody reads. Plain
//! loads and stores, no locked instructions.

pub(crate) mod turn_timer;
pub(crate) mod watched;

use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use gale_base::histogram::Snapshot;

/// A turn longer than this is a stall.
pub const STALL_THRESHOLD: Duration = Duration::from_millis(10);

/// A turn of this age is looked at closely, so that there is something to compare with when it becomes a stall.
pub(crate) const SUSPECT_AGE: Duration = Duration::from_millis(5);

/// What held a loop up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StallKind {
    /// It waited in a system call: for a disk, a pipe, memory.
    Blocked,
    /// It ran all the time.
    Computing,
    /// It waited for a lock (futex(2)).
    Lock,
    /// It could have run and was not let: too few processors, a quota, a debugger. Not our fault.
    Preempted,
}

impl StallKind {
    /// All of them, in the order of the figures.
    pub const ALL: [StallKind; 4] = [StallKind::Blocked, StallKind::Computing, StallKind::Lock, StallKind::Preempted];
}

impl fmt::Display for StallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StallKind::Blocked => "blocked",
            StallKind::Computing => "computing",
            StallKind::Lock => "waiting for a lock",
            StallKind::Preempted => "preempted",
        })
    }
}

/// The stalls of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Filed {
    /// How many there were, with one that goes on.
    pub count: u64,
    /// How long those took together that have ended.
    pub time: Duration,
}

/// Each power of two of nanoseconds is divided into this many buckets: a quantile is right to within an eighth.
const STEPS: usize = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2^40 ns (18 minutes); longer turns count in the last bucket.
const BUCKETS: usize = 41 * STEPS;

/// A function that names a type of task, such as `std::any::type_name::<T>`.
pub(crate) type Name = fn() -> &'static str;

/// The turns of one loop so far.
pub struct Turns {
    buckets: [AtomicU64; BUCKETS],
    stalls: AtomicU64,
    longest: AtomicU64,
    total: AtomicU64,
    /// When the present turn began, by the monotonic clock; 0 while the loop waits.
    began: AtomicU64,
    /// A [`Name`]: what the present turn is at. Null at first.
    at: AtomicPtr<()>,
    /// Beginning and nanoseconds of the last stall that has ended. Written in this order, read in the other.
    last_stall_nanos: AtomicU64,
    last_stall_began: AtomicU64,
    filed: [(AtomicU64, AtomicU64); StallKind::ALL.len()],
}

impl Turns {
    pub(crate) fn new() -> Self {
        Turns {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            stalls: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            total: AtomicU64::new(0),
            began: AtomicU64::new(0),
            at: AtomicPtr::new(std::ptr::null_mut()),
            last_stall_nanos: AtomicU64::new(0),
            last_stall_began: AtomicU64::new(0),
            filed: [const { (AtomicU64::new(0), AtomicU64::new(0)) }; StallKind::ALL.len()],
        }
    }

    /// A turn begins. Called by the loop's thread only, as the three that follow.
    #[inline]
    pub(crate) fn begin(&self, now: u64) {
        self.began.store(now, Ordering::Relaxed);
    }

    /// The turn that began at `began` is over.
    #[inline]
    pub(crate) fn end(&self, began: u64, now: u64) {
        let nanos = now.saturating_sub(began);
        if nanos > STALL_THRESHOLD.as_nanos() as u64 {
            self.last_stall_nanos.store(nanos, Ordering::Relaxed);
            self.last_stall_began.store(began, Ordering::Release);
        }
        self.began.store(0, Ordering::Release);
        self.record(nanos);
    }

    /// Notes what runs from now on.
    #[inline]
    pub(crate) fn note(&self, name: Name) {
        self.at.store(name as *mut (), Ordering::Relaxed);
    }

    fn record(&self, nanos: u64) {
        add(&self.buckets[bucket(nanos)], 1);
        add(&self.total, nanos);
        if nanos > self.longest.load(Ordering::Relaxed) {
            self.longest.store(nanos, Ordering::Relaxed);
        }
        if nanos > STALL_THRESHOLD.as_nanos() as u64 {
            add(&self.stalls, 1);
        }
    }

    /// When the present turn began; 0 while the loop waits.
    pub(crate) fn began(&self) -> u64 {
        self.began.load(Ordering::Acquire)
    }

    /// How long the turn took that began then, if it has ended and was a stall, and none has ended since.
    pub(crate) fn ended_stall(&self, began: u64) -> Option<u64> {
        let is_last = self.last_stall_began.load(Ordering::Acquire) == began;
        is_last.then(|| self.last_stall_nanos.load(Ordering::Relaxed))
    }

    /// What the loop was at when this was asked.
    pub(crate) fn at(&self) -> &'static str {
        let name = self.at.load(Ordering::Relaxed);
        if name.is_null() {
            return "";
        }
        // SAFETY: only `note` stores anything else than null, and that is a `Name`; functions are there for ever.
        let name = unsafe { std::mem::transmute::<*mut (), Name>(name) };
        name().trim_end_matches("::{{closure}}")
    }

    /// Counts a stall. Called by the watchdog's thread only, as the next.
    pub(crate) fn file(&self, kind: StallKind) {
        add(&self.filed[kind as usize].0, 1);
    }

    /// Adds the length of a stall that was filed before.
    pub(crate) fn file_time(&self, kind: StallKind, nanos: u64) {
        add(&self.filed[kind as usize].1, nanos);
    }

    /// The stalls that were filed as of this kind. One that lies between two looks of the watchdog is in
    /// [`Turns::stalls`] and not here.
    pub fn filed(&self, kind: StallKind) -> Filed {
        let (count, nanos) = &self.filed[kind as usize];
        Filed { count: count.load(Ordering::Relaxed), time: Duration::from_nanos(nanos.load(Ordering::Relaxed)) }
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

    /// How long the turns took, for reading.
    pub fn times(&self) -> Snapshot {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        Snapshot::of_counts(counts, self.total.load(Ordering::Relaxed), self.longest.load(Ordering::Relaxed))
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

/// What was seen of a thread at one moment. Times in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sample {
    pub at: u64,
    pub state: ThreadState,
    /// Processor time that it has had.
    pub run: u64,
    /// Time that it has waited for a processor, without a wait that goes on.
    pub delay: u64,
    /// How often it has gone to sleep.
    pub sleeps: u64,
}

/// What the kernel says of a thread (proc_pid_stat(5)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ThreadState {
    /// Runs or could run.
    Runnable,
    /// Sleeps in a system call; in futex(2), which every lock comes down to, or another.
    Asleep { in_futex: bool },
    /// By a signal or a debugger.
    Stopped,
}

/// What held a thread up that was seen at two moments of one turn.
pub(crate) fn judge(first: &Sample, last: &Sample) -> StallKind {
    match last.state {
        ThreadState::Asleep { in_futex: true } => StallKind::Lock,
        ThreadState::Asleep { in_futex: false } => StallKind::Blocked,
        ThreadState::Stopped => StallKind::Preempted,
        ThreadState::Runnable => {
            let time = last.at.saturating_sub(first.at);
            let run = last.run.saturating_sub(first.run);
            let delay = last.delay.saturating_sub(first.delay);
            let slept = time.saturating_sub(run).saturating_sub(delay);
            if run >= time / 2 {
                StallKind::Computing
            } else if last.sleeps > first.sleeps && slept > delay {
                // It happens to be awake between two waits.
                StallKind::Blocked
            } else {
                StallKind::Preempted
            }
        }
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
        let times = turns.times();
        assert_eq!((times.count(), times.sum(), times.max()), (2, Duration::from_millis(20), turns.longest()));
        assert_eq!(times.quantile(0.5), turns.quantile(0.5));
    }

    #[test]
    fn a_stall_that_has_ended_is_known_by_its_beginning() {
        let turns = Turns::new();
        turns.begin(7);
        assert_eq!((turns.began(), turns.ended_stall(7)), (7, None));
        turns.end(7, 20_000_007);
        assert_eq!((turns.began(), turns.ended_stall(7)), (0, Some(20_000_000)));
        turns.begin(30_000_000);
        turns.end(30_000_000, 30_000_001);
        assert_eq!((turns.ended_stall(7), turns.ended_stall(30_000_000)), (Some(20_000_000), None));
    }

    #[test]
    fn a_turn_tells_what_it_is_at() {
        fn name<T>(_: T) -> Name {
            std::any::type_name::<T>
        }
        async fn work() {}
        let turns = Turns::new();
        assert_eq!(turns.at(), "");
        turns.note(name(work()));
        assert_eq!(turns.at(), concat!(module_path!(), "::a_turn_tells_what_it_is_at::work"));
    }

    const ASLEEP: ThreadState = ThreadState::Asleep { in_futex: false };

    /// A thread after `at` ms, of which it ran `run` and waited `delay` for a processor.
    fn seen(at: u64, state: ThreadState, run: u64, delay: u64, sleeps: u64) -> Sample {
        let nanos = |ms: u64| ms * 1_000_000;
        Sample { at: nanos(at), state, run: nanos(run), delay: nanos(delay), sleeps }
    }

    #[test]
    fn who_sleeps_is_blocked_or_waits_for_a_lock() {
        let first = seen(0, ThreadState::Runnable, 0, 0, 0);
        assert_eq!(judge(&first, &seen(10, ASLEEP, 4, 0, 1)), StallKind::Blocked);
        let in_futex = ThreadState::Asleep { in_futex: true };
        assert_eq!(judge(&first, &seen(10, in_futex, 9, 0, 1)), StallKind::Lock);
    }

    #[test]
    fn who_runs_is_computing() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 60, 3, 7)), StallKind::Computing);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 55, 8, 7)), StallKind::Computing);
    }

    #[test]
    fn who_could_run_and_does_not_is_preempted() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        // It has waited and runs again; it still waits, which the kernel has not added up; it is in a debugger.
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 52, 11, 7)), StallKind::Preempted);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 50, 3, 7)), StallKind::Preempted);
        assert_eq!(judge(&first, &seen(110, ThreadState::Stopped, 50, 3, 8)), StallKind::Preempted);
        // A short sleep does not make it the sleep's fault.
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 51, 9, 8)), StallKind::Preempted);
    }

    #[test]
    fn who_sleeps_again_and_again_is_blocked() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 52, 4, 20)), StallKind::Blocked);
    }
}
