//! How a device behaves that files lie on, and what may be done with them on a loop: one state for each device, one
//! question.
//!
//! | condition | when | `sendfile`, which waits for what is not in memory | a look, which is refused |
//! |---|---|---|---|
//! | healthy | nothing had to be read for a minute | what was seen a second ago; else its ends are asked for | yes |
//! | new | nobody had asked a minute ago | what was seen a second ago; else all of it is asked for | yes |
//! | memory short | something had to be read | what was seen in this tick; else all of it is asked for | yes |
//! | congested | four reads in flight, or a look has waited | what was seen in this tick | seen a second ago |
//! | evicting | reads in flight, and a belief was wrong lately | seen in this tick: all is asked for | the same |
//! | backing off | what was seen within a second had gone, or a call has waited | no | seen a second ago |
//! | silent | reads are in flight, and none has ended for a while | no | seen a tick ago |
//!
//! While something had to be read within a minute memory is taken to be short: a page that is there tells nothing of
//! those beside it, and what was there a moment ago may have gone, since each read takes memory for what is read ahead
//! as well. Even a look may wait, when many reads are in flight: on a miss the kernel begins to read ahead, and whoever
//! submits that sleeps while the device's queue is full. One that has waited makes the device congested for a while; it
//! says nothing of what is in constant use.
//!
//! A belief that is wrong is a `sendfile` that waits. A look finds that out without waiting: what was seen within a
//! second is not there. Then the device backs off, and what goes to clients is read, by calls that the kernel refuses
//! where they would wait; so it does after a `sendfile` that has waited. The time begins anew with each such finding,
//! and is twice as long if the last one is not long over. For a minute after that, as long as something is read, what
//! was seen at the beginning of a tick may have gone at its end: all of a part is asked for right before each
//! `sendfile`, once in a turn of the loop, which costs a part of what that saves. Only parts are asked for that were
//! seen in this tick, since to ask for what has gone begins a read. What such a look does not find makes the minute
//! begin anew, and the device does not back off: nothing would have waited. A file that is being written, and sent
//! meanwhile, is sent once, and the kernel evicts it first: while memory is short it is sent as if its device was
//! backing off.
//!
//! A device that is silent may hang: then a call that waits does so until it answers again. What is in constant use is
//! still read there: whoever has read it before has had the kernel read ahead, too.
//!
//! States are found by a hash of the device's number, without a lock. Devices that share one are taken for one device,
//! which makes both more careful.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::executor::budget::QUANTUM_BYTES;
use crate::time::Moment;

/// From so many reads in flight on a device is congested. A queue that is worth its name has room for dozens; those of
/// loop devices and of some flash memory have not.
const CONGESTED_FROM: u32 = 4;

/// How long after a read memory is taken to be short, after a wrong belief to be taken away quickly, and after it was
/// first asked about a device is new. A shortage lasts, and to be careful for longer costs little: what is asked for
/// again and again is known anyway.
const SHORTAGE_TIME: Duration = Duration::from_secs(60);

/// How long a device is taken for congested after a look has waited.
const CONGESTED_FOR: Duration = Duration::from_secs(2);

/// How long a device is given after a belief was wrong or a call has waited, at first and at most.
const BACK_OFF_MIN: Duration = Duration::from_secs(2);
const BACK_OFF_MAX: Duration = Duration::from_secs(32);

/// For so many ticks, about a second, it is believed that a part is still in memory: it has been used a moment ago, and
/// the kernel evicts first what was used longest ago. What has gone sooner shows that it is wrong to believe.
pub(super) const BELIEVED_TICKS: u16 = 4;

/// The same while memory is short, or many reads take it from each other: what is in constant use is looked at four
/// times a second.
const BELIEVED_TICKS_SHORT: u16 = 0;

/// For so many, about a second, a part is worth an attempt that is refused if it is not in memory any more. What was
/// seen before that may have gone, and then the attempt begins to read, for which the device's queue may have no room.
const WORTH_TRYING_TICKS: u16 = 4;

/// The same on a device that may hang, where the attempt would wait with it.
const WORTH_TRYING_TICKS_SILENT: u16 = 1;

/// For so long a device on which reads are in flight may end none of them, before it is taken for silent. Slow disks
/// end some within tens of milliseconds, however many there are.
const SILENT_AFTER: Duration = Duration::from_millis(100);

/// What one `sendfile` may take at most: what a stream sends at once (to ask about more would be in vain), and, while
/// memory may be short, what a loop waits for at once if a belief was wrong.
const SENDFILE_MAX: u64 = QUANTUM_BYTES as u64;
const SENDFILE_MAX_SHORT: u64 = 256 * 1024;

/// How a device behaves. What comes later allows less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Condition {
    /// Memory holds what is asked for.
    Healthy,
    /// Nobody knows whether it does.
    New,
    /// Something had to be read lately.
    MemoryShort,
    /// Several reads are in flight, or a look has waited.
    Congested,
    /// Reads are in flight, and a belief was wrong lately: what is read takes the memory of what was.
    Evicting,
    /// A belief was wrong: a look has found that, or a call that should not have waited did.
    BackingOff,
    /// Reads are in flight, and none ends.
    Silent,
}

/// What would be done on the loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// A read that is refused where it would wait (`RWF_NOWAIT`).
    Look,
    /// `sendfile`.
    Send,
}

/// Whether it may be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Permission {
    Yes,
    /// If a look finds the first and the last byte of the part.
    AskForEnds,
    /// If a look finds all of the part.
    AskForAll,
    No,
}

impl Condition {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Condition::Healthy => "healthy",
            Condition::New => "new",
            Condition::MemoryShort => "memory short",
            Condition::Congested => "congested",
            Condition::Evicting => "evicting",
            Condition::BackingOff => "backing off",
            Condition::Silent => "silent",
        }
    }

    /// May this be done on the loop with a part of a file? `was_seen` says whether it was seen in memory, so many ticks
    /// ago at most.
    #[inline]
    pub fn permits(self, call: Call, mut was_seen: impl FnMut(u16) -> bool) -> Permission {
        use Permission::*;
        match (call, self) {
            (Call::Look, Condition::Healthy | Condition::New | Condition::MemoryShort) => Yes,
            (Call::Look, Condition::Congested | Condition::Evicting | Condition::BackingOff)
                if was_seen(WORTH_TRYING_TICKS) =>
            {
                Yes
            }
            (Call::Look, Condition::Silent) if was_seen(WORTH_TRYING_TICKS_SILENT) => Yes,
            (Call::Send, Condition::Healthy | Condition::New) if was_seen(BELIEVED_TICKS) => Yes,
            (Call::Send, Condition::Healthy) => AskForEnds,
            (Call::Send, Condition::MemoryShort | Condition::Congested) if was_seen(BELIEVED_TICKS_SHORT) => Yes,
            (Call::Send, Condition::Evicting) if was_seen(BELIEVED_TICKS_SHORT) => AskForAll,
            (Call::Send, Condition::New | Condition::MemoryShort) => AskForAll,
            _ => No,
        }
    }

    /// How many bytes one `sendfile` may take.
    pub fn sendfile_max(self) -> u64 {
        if self <= Condition::New { SENDFILE_MAX } else { SENDFILE_MAX_SHORT }
    }
}

/// One device. Padded: what is written about one is not on a cache line of another's, which every request reads.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct DeviceState {
    /// `st_dev` of the first device that it was asked for; 0 = none yet.
    pub(super) number: AtomicU64,
    /// Pieces that had to be read, and how long that took together: of those that are done.
    pub(super) reads_done: AtomicU64,
    pub(super) reads_nanos: AtomicU64,
    /// Pieces that are being read because they were not in memory.
    pub(super) reads: AtomicU32,
    /// Looks by threads of a pool, and those of them that write a time of access.
    pub(super) looks: AtomicU32,
    pub(super) access_looks: AtomicU32,
    /// When somebody asked for the first time.
    asked_at_nanos: AtomicU64,
    /// When a read ended last, or began when there was none.
    progress_at_nanos: AtomicU64,
    /// When a read ended last; 0 = never.
    answered_at_nanos: AtomicU64,
    /// When a piece was not in memory last, or a call took long; 0 = never.
    missed_at_nanos: AtomicU64,
    congested_until_nanos: AtomicU64,
    /// When a belief was wrong last, or a call waited; 0 = never.
    wrong_at_nanos: AtomicU64,
    back_off_until_nanos: AtomicU64,
    back_off_nanos: AtomicU64,
}

impl DeviceState {
    pub const fn new() -> Self {
        DeviceState {
            number: AtomicU64::new(0),
            reads_done: AtomicU64::new(0),
            reads_nanos: AtomicU64::new(0),
            reads: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            access_looks: AtomicU32::new(0),
            asked_at_nanos: AtomicU64::new(0),
            progress_at_nanos: AtomicU64::new(0),
            answered_at_nanos: AtomicU64::new(0),
            missed_at_nanos: AtomicU64::new(0),
            congested_until_nanos: AtomicU64::new(0),
            wrong_at_nanos: AtomicU64::new(0),
            back_off_until_nanos: AtomicU64::new(0),
            back_off_nanos: AtomicU64::new(0),
        }
    }

    #[inline]
    pub fn condition(&self, now: Moment) -> Condition {
        let reads = self.reads.load(Relaxed);
        if reads > 0 && now > Moment::from_nanos(self.progress_at_nanos.load(Relaxed)) + SILENT_AFTER {
            Condition::Silent
        } else if now.as_nanos() < self.back_off_until_nanos.load(Relaxed) {
            Condition::BackingOff
        } else if reads > 0 && was_lately(&self.wrong_at_nanos, now) {
            Condition::Evicting
        } else if reads >= CONGESTED_FROM || now.as_nanos() < self.congested_until_nanos.load(Relaxed) {
            Condition::Congested
        } else if reads > 0 || self.is_memory_short(now) {
            Condition::MemoryShort
        } else if self.is_new(now) {
            Condition::New
        } else {
            Condition::Healthy
        }
    }

    #[inline]
    fn is_memory_short(&self, now: Moment) -> bool {
        was_lately(&self.missed_at_nanos, now)
    }

    /// The device of this number is asked for something.
    #[inline]
    pub fn note_asked(&self, number: u64) {
        if self.number.load(Relaxed) == 0 {
            self.number.store(number, Relaxed);
        }
    }

    /// A piece that is not in memory is about to be read.
    pub fn begin_read(&self, now: Moment) {
        self.note_miss(now);
        self.count_read(now);
    }

    /// A piece is about to be read that may be in memory.
    pub fn count_read(&self, now: Moment) {
        if self.reads.load(Relaxed) == 0 {
            self.progress_at_nanos.store(now.as_nanos(), Relaxed);
        }
        self.reads.fetch_add(1, Relaxed);
    }

    /// A read is over.
    pub fn note_progress(&self, now: Moment) {
        self.progress_at_nanos.fetch_max(now.as_nanos(), Relaxed);
    }

    /// A piece that was not in memory was read in this time.
    pub fn note_read(&self, time: Duration, now: Moment) {
        self.note_miss(now);
        self.note_progress(now);
        self.answered_at_nanos.fetch_max(now.as_nanos(), Relaxed);
        self.reads_done.fetch_add(1, Relaxed);
        self.reads_nanos.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// Whether a read has ended since then.
    pub fn has_answered_since(&self, then: Moment) -> bool {
        self.answered_at_nanos.load(Relaxed) > then.as_nanos()
    }

    #[inline]
    fn is_new(&self, now: Moment) -> bool {
        let asked_at = self.asked_at_nanos.load(Relaxed);
        if asked_at == 0 {
            self.asked_at_nanos.store(now.as_nanos(), Relaxed);
        }
        asked_at == 0 || now <= Moment::from_nanos(asked_at) + SHORTAGE_TIME
    }

    /// A piece was not in memory, or a call took so long that it may not have been.
    pub fn note_miss(&self, now: Moment) {
        self.missed_at_nanos.store(now.as_nanos(), Relaxed);
    }

    /// A look waited, for room in the device's queue.
    pub fn note_full(&self, now: Moment) {
        self.congested_until_nanos.fetch_max((now + CONGESTED_FOR).as_nanos(), Relaxed);
    }

    /// A look has not found what was believed to be in memory. Where everything is looked for before it is sent, that
    /// goes on.
    pub fn note_wrong_belief(&self, now: Moment) {
        match self.condition(now) {
            Condition::Evicting => self.wrong_at_nanos.store(now.as_nanos(), Relaxed),
            _ => self.back_off(now),
        }
    }

    /// What was believed to be in memory had gone, or a call that should not wait did. Each such finding says that it
    /// is too early to believe again.
    pub fn back_off(&self, now: Moment) {
        let until = Moment::from_nanos(self.back_off_until_nanos.load(Relaxed));
        let last = Duration::from_nanos(self.back_off_nanos.load(Relaxed));
        let time = if now < until {
            last
        } else if now < until + last {
            (2 * last).min(BACK_OFF_MAX)
        } else {
            BACK_OFF_MIN
        };
        self.wrong_at_nanos.store(now.as_nanos(), Relaxed);
        self.back_off_nanos.store(time.as_nanos() as u64, Relaxed);
        self.back_off_until_nanos.fetch_max((now + time).as_nanos(), Relaxed);
    }
}

/// Whether something was within [`SHORTAGE_TIME`]; 0 stands for never.
#[inline]
fn was_lately(at_nanos: &AtomicU64, now: Moment) -> bool {
    let at = at_nanos.load(Relaxed);
    at != 0 && now <= Moment::from_nanos(at) + SHORTAGE_TIME
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Moment = Moment::from_nanos(1_000_000_000);
    const INSTANT: Duration = Duration::from_nanos(1);

    #[test]
    fn device_without_reads_for_a_minute_is_healthy() {
        let device = DeviceState::new();
        assert_eq!(device.condition(BEGIN), Condition::New);
        assert_eq!(device.condition(BEGIN + SHORTAGE_TIME), Condition::New);
        device.note_miss(BEGIN);
        assert_eq!(device.condition(BEGIN + SHORTAGE_TIME), Condition::MemoryShort);
        let later = BEGIN + SHORTAGE_TIME + INSTANT;
        assert_eq!(device.condition(later), Condition::Healthy);
        device.begin_read(later);
        assert_eq!(device.condition(later), Condition::MemoryShort);
        (1..CONGESTED_FROM).for_each(|_| device.begin_read(later));
        assert_eq!(device.condition(later), Condition::Congested);
        device.back_off(later);
        assert_eq!(device.condition(later), Condition::BackingOff);
        let (trusted, is_over) = (later + SHORTAGE_TIME + INSTANT, later + BACK_OFF_MIN);
        device.note_progress(is_over);
        assert_eq!(device.condition(is_over), Condition::Evicting);
        device.note_progress(trusted);
        assert_eq!(device.condition(trusted), Condition::Congested);
    }

    #[test]
    fn device_on_which_a_look_waited_is_congested_for_a_while() {
        let device = DeviceState::new();
        device.note_full(BEGIN);
        assert_eq!(device.condition(BEGIN + (CONGESTED_FOR - INSTANT)), Condition::Congested);
        assert_ne!(device.condition(BEGIN + CONGESTED_FOR), Condition::Congested);
    }

    #[test]
    fn device_that_ends_none_of_its_reads_is_silent_until_it_does() {
        let device = DeviceState::new();
        let is_silent = |now: Moment| device.condition(now) == Condition::Silent;
        device.begin_read(BEGIN);
        // Another one, which begins later, says nothing.
        device.begin_read(BEGIN + SILENT_AFTER);
        let later = BEGIN + SILENT_AFTER + INSTANT;
        assert!(!is_silent(BEGIN + SILENT_AFTER) && is_silent(later));
        device.back_off(later);
        assert!(is_silent(later));
        device.note_read(SILENT_AFTER, later);
        assert!(!is_silent(later + SILENT_AFTER) && is_silent(later + SILENT_AFTER + INSTANT));
        device.reads.store(0, Relaxed);
        assert!(!is_silent(later + SHORTAGE_TIME));
        // For one that was idle the time begins anew.
        device.begin_read(later + SHORTAGE_TIME);
        assert!(!is_silent(later + SHORTAGE_TIME + SILENT_AFTER));
    }

    #[test]
    fn device_has_answered_when_a_read_has_ended_and_not_when_one_begins() {
        let device = DeviceState::new();
        assert!(!device.has_answered_since(Moment::from_nanos(0)));
        device.begin_read(BEGIN + INSTANT);
        assert!(!device.has_answered_since(BEGIN));
        device.note_read(INSTANT, BEGIN + 2 * INSTANT);
        assert!(device.has_answered_since(BEGIN) && !device.has_answered_since(BEGIN + 2 * INSTANT));
    }

    #[test]
    fn device_that_waits_again_is_given_twice_the_time() {
        let device = DeviceState::new();
        let is_backing_off = |now: Moment| device.condition(now) == Condition::BackingOff;
        let mut now = BEGIN;
        for time in [2, 4, 8, 16, 32, 32].map(Duration::from_secs) {
            device.back_off(now);
            // While it backs off the time begins anew, and is no longer.
            let last = now + time / 2;
            device.back_off(last);
            let end = last + time;
            assert!(is_backing_off(last + (time - INSTANT)) && !is_backing_off(end), "{time:?}");
            now = end + INSTANT;
        }
        now = now + 2 * BACK_OFF_MAX;
        device.back_off(now);
        assert!(!is_backing_off(now + BACK_OFF_MIN));
    }

    #[test]
    fn device_where_all_is_looked_for_is_not_given_time_by_what_a_look_does_not_find() {
        let device = DeviceState::new();
        device.begin_read(BEGIN);
        device.note_wrong_belief(BEGIN);
        assert_eq!(device.condition(BEGIN), Condition::BackingOff);
        let mut now = BEGIN + BACK_OFF_MIN;
        for _ in 0..3 {
            device.note_progress(now);
            assert_eq!(device.condition(now), Condition::Evicting);
            device.note_wrong_belief(now);
            now = now + SHORTAGE_TIME;
        }
        device.note_progress(now);
        device.back_off(now);
        assert_eq!(device.condition(now), Condition::BackingOff, "a call has waited");
    }

    #[test]
    fn what_may_be_done_depends_on_what_a_wrong_guess_would_cost() {
        use Condition::*;
        use Permission::*;
        let permits = |condition: Condition, call: Call, age: Option<u16>| {
            condition.permits(call, |ticks| age.is_some_and(|age| age <= ticks))
        };
        let sent =
            |condition| [Some(0), Some(1), Some(4), Some(5), None].map(|age| permits(condition, Call::Send, age));
        assert_eq!(sent(Healthy), [Yes, Yes, Yes, AskForEnds, AskForEnds]);
        assert_eq!(sent(New), [Yes, Yes, Yes, AskForAll, AskForAll]);
        assert_eq!(sent(MemoryShort), [Yes, AskForAll, AskForAll, AskForAll, AskForAll]);
        assert_eq!(sent(Congested), [Yes, No, No, No, No]);
        assert_eq!(sent(Evicting), [AskForAll, No, No, No, No]);
        assert_eq!((sent(BackingOff), sent(Silent)), ([No; 5], [No; 5]));
        let looked = |condition| [Some(1), Some(4), Some(5), None].map(|age| permits(condition, Call::Look, age));
        assert_eq!([Healthy, New, MemoryShort].map(looked), [[Yes; 4]; 3]);
        assert_eq!([Congested, Evicting, BackingOff].map(looked), [[Yes, Yes, No, No]; 3]);
        assert_eq!(looked(Silent), [Yes, No, No, No]);
    }
}
