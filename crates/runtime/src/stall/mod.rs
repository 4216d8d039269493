//! Stalls: every turn of a loop is timed into a histogram. A turn over 10 ms is a stall; it is counted, and filed by
//! its cause. The watchdog files them ([`crate::watchdog`]); this file has the counters and the rules. By these figures
//! a site and the benchmarks check that no slow operation delays other requests (`bench/results/thread-pools.md`).
//!
//! The loop's thread writes times and current task, the watchdog's thread what it filed; any thread reads. Plain loads
//! and stores, no locked instructions.

pub(crate) mod calls;
pub(crate) mod turn_timer;
pub(crate) mod usage;
pub(crate) mod watched;

use std::fmt;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use gale_base::histogram::Snapshot;

use self::usage::ThreadUsage;

pub use self::calls::{MARKS, Waited};

/// A turn longer than this is a stall.
pub const STALL_THRESHOLD: Duration = Duration::from_millis(10);

/// A turn of this age is sampled, for comparison if it becomes a stall.
pub(crate) const SUSPECT_AGE: Duration = Duration::from_millis(5);

/// The cause of a stall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StallKind {
    /// It waited in a system call: for a disk, a pipe, memory.
    Blocked,
    /// It ran all the time.
    Computing,
    /// It waited for a lock (futex(2)).
    Lock,
    /// It could have run but had no processor: too few of them, a quota, a debugger. Not our fault.
    Preempted,
}

impl StallKind {
    /// All kinds, in the order of the counters.
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
    /// Number of stalls. One that goes on is counted after a second, as what it was until then.
    pub count: u64,
    /// Total time of those that have ended, each by what it was for the longest time.
    pub time: Duration,
}

/// Buckets for each power of two of nanoseconds: a quantile is right to within an eighth.
const STEPS: usize = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2^40 ns (18 minutes); longer turns count in the last bucket.
const BUCKETS: usize = 41 * STEPS;

/// A function that names a type of task, such as `std::any::type_name::<T>`.
pub(crate) type Name = fn() -> &'static str;

/// Stored as the time of the turn's beginning while the loop reads the clock. No turn begins at that time.
const BEGINS: u64 = u64::MAX;

/// The turns of one loop so far.
pub struct Turns {
    buckets: [AtomicU64; BUCKETS],
    stalls: AtomicU64,
    longest: AtomicU64,
    total: AtomicU64,
    /// Time at which the current turn began, by the monotonic clock; 0 while the loop waits, [`BEGINS`] while it reads
    /// the clock.
    began: AtomicU64,
    /// A [`Name`]: the code that runs in the current turn. Null at first.
    at: AtomicPtr<()>,
    /// Time at which the current or an earlier turn began, and the thread's resource usage at that time.
    marked_at: AtomicU64,
    marked: [AtomicU64; 3],
    last_stall: LastStall,
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
            marked_at: AtomicU64::new(0),
            marked: [const { AtomicU64::new(0) }; 3],
            last_stall: LastStall::default(),
            filed: [const { (AtomicU64::new(0), AtomicU64::new(0)) }; StallKind::ALL.len()],
        }
    }

    /// Announces that a turn is about to read the clock, so a loop that loses its processor before it stores the time
    /// differs from one that waits. Only for the loop's thread, as the next five.
    #[inline]
    pub(crate) fn announce(&self) {
        self.began.store(BEGINS, Ordering::Relaxed);
    }

    /// Notes that a turn has begun.
    #[inline]
    pub(crate) fn begin(&self, now: u64) {
        self.began.store(now, Ordering::Relaxed);
    }

    /// Stores the thread's usage at the beginning of a turn: a few hundred times a second at most.
    pub(crate) fn mark(&self, now: u64, usage: ThreadUsage) {
        let figures = [usage.run.as_nanos() as u64, usage.voluntary_switches, usage.involuntary_switches];
        self.marked_at.store(now, Ordering::Relaxed);
        self.marked.iter().zip(figures).for_each(|(kept, figure)| kept.store(figure, Ordering::Relaxed));
    }

    #[inline]
    pub(crate) fn end(&self, began: u64, now: u64) {
        let nanos = now.saturating_sub(began);
        if nanos > STALL_THRESHOLD.as_nanos() as u64 {
            self.end_stall(began, now, ThreadUsage::now());
        }
        self.began.store(0, Ordering::Release);
        self.record(nanos);
    }

    /// Notes the code that runs from now on.
    #[inline]
    pub(crate) fn note(&self, name: Name) {
        self.at.store(name as *mut (), Ordering::Relaxed);
    }

    #[cold]
    fn end_stall(&self, began: u64, now: u64, usage: ThreadUsage) {
        let marked = self.marked.each_ref().map(|kept| kept.load(Ordering::Relaxed));
        let [run, voluntary_switches, involuntary_switches] = marked;
        let marked = ThreadUsage { run: Duration::from_nanos(run), voluntary_switches, involuntary_switches };
        let since_mark = Duration::from_nanos(now.saturating_sub(self.marked_at.load(Ordering::Relaxed)));
        let last = &self.last_stall;
        last.nanos.store(now.saturating_sub(began), Ordering::Relaxed);
        last.run.store(usage.run.as_nanos() as u64, Ordering::Relaxed);
        last.sleeps.store(usage.voluntary_switches, Ordering::Relaxed);
        last.guess.store(judge_all(since_mark, &marked, &usage) as u8, Ordering::Relaxed);
        last.began.store(began, Ordering::Release);
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

    /// Time at which the current turn began; 0 while the loop waits, or reads the clock for the next turn.
    pub(crate) fn began(&self) -> u64 {
        match self.began.load(Ordering::Acquire) {
            BEGINS => 0,
            began => began,
        }
    }

    /// True if a turn begins and has not stored its time yet.
    pub(crate) fn is_beginning(&self) -> bool {
        self.began.load(Ordering::Relaxed) == BEGINS
    }

    /// The turn that began at this time, if it was a stall and is the last stall that has ended.
    pub(crate) fn ended_stall(&self, began: u64) -> Option<EndedStall> {
        let last = &self.last_stall;
        let is_last = last.began.load(Ordering::Acquire) == began;
        is_last.then(|| EndedStall {
            nanos: last.nanos.load(Ordering::Relaxed),
            run: last.run.load(Ordering::Relaxed),
            sleeps: last.sleeps.load(Ordering::Relaxed),
            guess: StallKind::ALL[last.guess.load(Ordering::Relaxed) as usize],
        })
    }

    /// Name of the code that the loop is running.
    pub(crate) fn at(&self) -> &'static str {
        let name = self.at.load(Ordering::Relaxed);
        if name.is_null() {
            return "";
        }
        // SAFETY: `note` stores only `Name`s; functions are never freed.
        let name = unsafe { std::mem::transmute::<*mut (), Name>(name) };
        name().trim_end_matches("::{{closure}}")
    }

    /// Counts a stall. Only for the watchdog's thread, as the next.
    pub(crate) fn file(&self, kind: StallKind) {
        add(&self.filed[kind as usize].0, 1);
    }

    /// Adds the length of a stall.
    pub(crate) fn file_time(&self, kind: StallKind, nanos: u64) {
        add(&self.filed[kind as usize].1, nanos);
    }

    /// The stalls filed as this kind. One that goes on or has just ended may be in
    /// [`Turns::stalls`] and not here.
    pub fn filed(&self, kind: StallKind) -> Filed {
        let (count, nanos) = &self.filed[kind as usize];
        Filed { count: count.load(Ordering::Relaxed), time: Duration::from_nanos(nanos.load(Ordering::Relaxed)) }
    }

    /// Number of turns.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    /// Number of turns longer than [`STALL_THRESHOLD`].
    pub fn stalls(&self) -> u64 {
        self.stalls.load(Ordering::Relaxed)
    }

    /// The longest turn.
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    /// Total time of turns, without waiting for events.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.total.load(Ordering::Relaxed))
    }

    /// Histogram of the turns' times.
    pub fn times(&self) -> Snapshot {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        Snapshot::of_counts(counts, self.total.load(Ordering::Relaxed), self.longest.load(Ordering::Relaxed))
    }

    /// A duration that the fraction `quantile` (0 to 1) of all turns did not exceed, rounded up to its bucket's end.
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

/// The last stall that has ended. `began` is written last and read first.
#[derive(Default)]
struct LastStall {
    began: AtomicU64,
    nanos: AtomicU64,
    run: AtomicU64,
    sleeps: AtomicU64,
    /// The index of a kind in [`StallKind::ALL`].
    guess: AtomicU8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EndedStall {
    pub nanos: u64,
    /// Processor time of the thread at its end, in nanoseconds, and number of its sleeps.
    pub run: u64,
    pub sleeps: u64,
    /// The cause, as far as the thread itself can tell.
    pub guess: StallKind,
}

/// A sample of a thread. Times in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sample {
    pub at: u64,
    pub state: ThreadState,
    /// Processor time used.
    pub run: u64,
    /// Time spent waiting for a processor, without a current wait.
    pub delay: u64,
    pub sleeps: u64,
}

/// State of a thread (proc_pid_stat(5)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ThreadState {
    /// Running or runnable.
    Runnable,
    /// Sleeping in a system call: futex(2), in which every lock waits, or another.
    Asleep { in_futex: bool },
    /// Stopped by a signal or a debugger.
    Stopped,
}

/// The cause of a stall, from two samples in one turn.
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

/// The same, from the thread's usage before and after its turn, `time` apart: there may be waits for events between the
/// two, so a voluntary switch tells little.
fn judge_all(time: Duration, before: &ThreadUsage, after: &ThreadUsage) -> StallKind {
    if after.run.saturating_sub(before.run) >= time / 2 {
        StallKind::Computing
    } else if after.involuntary_switches > before.involuntary_switches {
        StallKind::Preempted
    } else {
        StallKind::Blocked
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
        let ended = |began| turns.ended_stall(began).map(|stall| stall.nanos);
        turns.begin(7);
        assert_eq!((turns.began(), ended(7)), (7, None));
        turns.end(7, 20_000_007);
        assert_eq!((turns.began(), ended(7)), (0, Some(20_000_000)));
        turns.begin(30_000_000);
        turns.end(30_000_000, 30_000_001);
        assert_eq!((ended(7), ended(30_000_000)), (Some(20_000_000), None));
    }

    #[test]
    fn turn_reports_its_current_work() {
        fn name<T>(_: T) -> Name {
            std::any::type_name::<T>
        }
        async fn work() {}
        let turns = Turns::new();
        assert_eq!(turns.at(), "");
        turns.note(name(work()));
        assert_eq!(turns.at(), concat!(module_path!(), "::turn_reports_its_current_work::work"));
    }

    #[test]
    fn loop_reports_the_cause_of_a_finished_stall_by_its_own_usage() {
        let usage = |millis, voluntary_switches, involuntary_switches| ThreadUsage {
            run: Duration::from_millis(millis),
            voluntary_switches,
            involuntary_switches,
        };
        let guess = |run: u64, voluntary: u64, involuntary: u64| {
            let turns = Turns::new();
            turns.mark(1_000_000, usage(300, 7, 9));
            turns.begin(4_000_000);
            turns.end_stall(4_000_000, 99_000_000, usage(300 + run, 7 + voluntary, 9 + involuntary));
            turns.ended_stall(4_000_000).map(|stall| stall.guess)
        };
        assert_eq!(guess(60, 1, 3), Some(StallKind::Computing));
        assert_eq!(guess(10, 1, 3), Some(StallKind::Preempted));
        assert_eq!(guess(10, 2, 0), Some(StallKind::Blocked));
    }

    const ASLEEP: ThreadState = ThreadState::Asleep { in_futex: false };

    /// A sample at `at` ms: the thread has run `run` ms and waited `delay` ms for a processor.
    fn seen(at: u64, state: ThreadState, run: u64, delay: u64, sleeps: u64) -> Sample {
        let nanos = |ms: u64| ms * 1_000_000;
        Sample { at: nanos(at), state, run: nanos(run), delay: nanos(delay), sleeps }
    }

    #[test]
    fn sleeping_thread_is_blocked_or_waits_for_a_lock() {
        let first = seen(0, ThreadState::Runnable, 0, 0, 0);
        assert_eq!(judge(&first, &seen(10, ASLEEP, 4, 0, 1)), StallKind::Blocked);
        let in_futex = ThreadState::Asleep { in_futex: true };
        assert_eq!(judge(&first, &seen(10, in_futex, 9, 0, 1)), StallKind::Lock);
    }

    #[test]
    fn running_thread_is_computing() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 60, 3, 7)), StallKind::Computing);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 55, 8, 7)), StallKind::Computing);
    }

    #[test]
    fn runnable_thread_that_does_not_run_is_preempted() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        // It has waited and runs again; it still waits, which the kernel has not added yet; it is in a debugger.
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 52, 11, 7)), StallKind::Preempted);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 50, 3, 7)), StallKind::Preempted);
        assert_eq!(judge(&first, &seen(110, ThreadState::Stopped, 50, 3, 8)), StallKind::Preempted);
        // A short sleep is not the cause.
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 51, 9, 8)), StallKind::Preempted);
    }

    #[test]
    fn thread_that_sleeps_repeatedly_is_blocked() {
        let first = seen(100, ThreadState::Runnable, 50, 3, 7);
        assert_eq!(judge(&first, &seen(110, ThreadState::Runnable, 52, 4, 20)), StallKind::Blocked);
    }
}
