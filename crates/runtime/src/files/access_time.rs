//! The time of access of a file: reading may write it, and that may wait.
//!
//! The kernel notes when a file was read; with `relatime`, which is the default of all mounts, not every time but once
//! after each change and then once a day (mount(8)). On a disk that is a transaction, and while the journal has no room
//! whoever begins one waits: in `sendfile` as in a read that must not wait (`RWF_NOWAIT`), also in one that is refused,
//! and also when everything is in memory. So a read that will write the time of access is the pool's. Those that follow
//! write nothing.
//!
//! When the next one will is told by the times that the file had when it was opened or last read by a pool. Where its
//! mount writes nothing (`noatime`, read-only) it is of no concern. There are more reasons for not writing, as the
//! attribute `A` of a file and a file system that is frozen: so a read in a pool after which nothing has changed says
//! that of its file, for a while. On a mount with `strictatime` every read writes.
//!
//! A change that comes while a file is open, as of a log that grows while it is sent, makes a read write once more. So
//! what is known is believed for [`BELIEVED`] only, and then the file is looked at again, which waits for nothing. One
//! that has changed is likely to go on: for a while all its reads are the pool's. (Until that is found out a read on a
//! loop may write.)

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{AtFlags, Stat, StatxFlags};

use crate::files::mounts::{self, AccessTimes};

/// How often `relatime` writes it for a file that does not change.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The kernel's clock for files ticks slower than others, and the time of a turn of a loop is that of its beginning.
const TICK_MAX: Duration = Duration::from_secs(1);

/// How long it is not asked again after a read that has written nothing although it was due.
const LEFT_ALONE_TIME: Duration = Duration::from_secs(60);

/// How long it is believed that a file is as it was seen last: to look again takes a fiftieth of the time in which 64
/// KiB are copied, and whoever reads them that often does so for longer.
const BELIEVED: Duration = Duration::from_millis(100);

/// How long a file is taken for one that changes after it was seen to.
const RESTLESS_TIME: Duration = Duration::from_secs(10);

const NEVER: u64 = u64::MAX;

/// When the next read of an open file writes its time of access, by the wall clock.
pub(super) struct AccessTime {
    /// For so long from then on no read does, as far as is known. When the clock has been set back, that is over.
    believed_from_nanos: AtomicU64,
    believed_for_nanos: AtomicU64,
    due_at_nanos: AtomicU64,
    restless_from_nanos: AtomicU64,
    /// As they were seen last.
    accessed_nanos: AtomicU64,
    changed_nanos: AtomicU64,
    /// The mount does write it.
    is_confirmed: AtomicBool,
    /// Each read writes it.
    is_strict: bool,
}

impl AccessTime {
    /// Of a file that no loop reads, or whose reads write nothing.
    pub const fn of_no_concern() -> AccessTime {
        AccessTime {
            believed_from_nanos: AtomicU64::new(0),
            believed_for_nanos: AtomicU64::new(NEVER),
            due_at_nanos: AtomicU64::new(NEVER),
            restless_from_nanos: AtomicU64::new(0),
            accessed_nanos: AtomicU64::new(0),
            changed_nanos: AtomicU64::new(0),
            is_confirmed: AtomicBool::new(false),
            is_strict: false,
        }
    }

    pub fn new(file: BorrowedFd<'_>, stat: &Stat, wall: Duration) -> AccessTime {
        let is_strict = mounts::any_strict() && access_times(file, stat.st_dev as _) == AccessTimes::Always;
        AccessTime::with_times(Times::of(stat), is_strict, wall)
    }

    fn with_times(times: Times, is_strict: bool, wall: Duration) -> AccessTime {
        let time = AccessTime { is_strict, ..AccessTime::of_no_concern() };
        time.accessed_nanos.store(nanos(times.accessed), Relaxed);
        time.changed_nanos.store(nanos(times.changed), Relaxed);
        time.expect_at(time.due_at(times, wall), wall);
        time
    }

    /// Whether it has to be asked if the next read writes it ([`AccessTime::is_written`]).
    #[inline]
    pub fn may_be_due(&self, wall: Duration) -> bool {
        !is_within(wall, &self.believed_from_nanos, self.believed_for_nanos.load(Relaxed))
    }

    /// Whether the next read may write it, by what is known of the file and where it lies.
    #[cold]
    pub fn is_written(&self, file: BorrowedFd<'_>, device: u64, wall: Duration) -> bool {
        if !self.is_confirmed.load(Relaxed) {
            if access_times(file, device) == AccessTimes::Never {
                self.settle(Duration::MAX, Duration::ZERO, Duration::MAX);
                return false;
            }
            self.is_confirmed.store(true, Relaxed);
        }
        if self.is_due(wall) {
            return true;
        }
        if let Ok(stat) = rustix::fs::fstat(file) {
            self.note_seen(Times::of(&stat), wall);
        }
        self.is_due(wall)
    }

    fn is_due(&self, wall: Duration) -> bool {
        nanos(wall + TICK_MAX) >= self.due_at_nanos.load(Relaxed)
    }

    /// A read for which it was due has been done, and this is what the kernel says now.
    pub fn note(&self, stat: &Stat, wall: Duration) {
        self.note_read(Times::of(stat), wall);
    }

    fn note_read(&self, times: Times, wall: Duration) {
        let was_due_at = if self.is_strict { Duration::ZERO } else { times.due_at() };
        let was_written = self.accessed_nanos.swap(nanos(times.accessed), Relaxed) != nanos(times.accessed);
        // Within a tick it is written once, and the time at which it is due may not have come for the kernel.
        let is_recent = |time: Duration| time <= wall && wall - time < TICK_MAX;
        let is_left_alone = !was_written && was_due_at <= wall && !is_recent(was_due_at) && !is_recent(times.accessed);
        let due_at = self.due_at(times, wall);
        if is_left_alone {
            self.settle(wall + LEFT_ALONE_TIME, wall, LEFT_ALONE_TIME - TICK_MAX);
        } else {
            self.expect_at(due_at, wall);
        }
    }

    /// Nothing has been read, and this is what the kernel says.
    fn note_seen(&self, times: Times, wall: Duration) {
        self.accessed_nanos.store(nanos(times.accessed), Relaxed);
        self.expect_at(self.due_at(times, wall), wall);
    }

    /// When the next read writes, of a file that has these times now.
    fn due_at(&self, times: Times, wall: Duration) -> Duration {
        if self.changed_nanos.swap(nanos(times.changed), Relaxed) != nanos(times.changed) {
            self.restless_from_nanos.store(nanos(wall), Relaxed);
        }
        let is_restless = is_within(wall, &self.restless_from_nanos, nanos(RESTLESS_TIME));
        if self.is_strict || is_restless { Duration::ZERO } else { times.due_at() }
    }

    fn expect_at(&self, due_at: Duration, wall: Duration) {
        self.settle(due_at, wall, due_at.saturating_sub(wall + TICK_MAX).min(BELIEVED));
    }

    fn settle(&self, due_at: Duration, believed_from: Duration, believed_for: Duration) {
        self.due_at_nanos.store(nanos(due_at), Relaxed);
        self.believed_from_nanos.store(nanos(believed_from), Relaxed);
        self.believed_for_nanos.store(nanos(believed_for), Relaxed);
    }
}

/// Whether so much time has not passed yet since `from`. Before `from` it has: the wall clock was set.
#[inline]
fn is_within(wall: Duration, from: &AtomicU64, nanoseconds: u64) -> bool {
    nanos(wall).wrapping_sub(from.load(Relaxed)) < nanoseconds
}

/// What its mount writes. Where nothing is known, as `relatime`.
#[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
fn access_times(file: BorrowedFd<'_>, device: u64) -> AccessTimes {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let mount = rustix::fs::statx(file, c"", flags, StatxFlags::MNT_ID).ok();
    mounts::access_times(mount.map(|stat| stat.stx_mnt_id), device)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(NEVER)
}

/// The times of a file, since the epoch; before that is as old.
#[derive(Clone, Copy)]
struct Times {
    accessed: Duration,
    modified: Duration,
    changed: Duration,
}

impl Times {
    #[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
    fn of(stat: &Stat) -> Times {
        let time = |seconds: i64, nanos: u32| {
            u64::try_from(seconds).map_or(Duration::ZERO, |seconds| Duration::new(seconds, nanos))
        };
        Times {
            accessed: time(stat.st_atime as i64, stat.st_atime_nsec as u32),
            modified: time(stat.st_mtime as i64, stat.st_mtime_nsec as u32),
            changed: time(stat.st_ctime as i64, stat.st_ctime_nsec as u32),
        }
    }

    /// From when on `relatime` writes; the kernel compares whole seconds.
    fn due_at(&self) -> Duration {
        if self.accessed <= self.modified || self.accessed <= self.changed {
            return Duration::ZERO;
        }
        Duration::from_secs(self.accessed.as_secs()) + DAY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Duration = Duration::from_secs(1_000_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn times(accessed: Duration, modified: Duration, changed: Duration) -> Times {
        Times { accessed, modified, changed }
    }

    /// Of a file with these times.
    fn of(times: Times) -> AccessTime {
        AccessTime::with_times(times, false, BEGIN)
    }

    #[test]
    fn it_is_written_after_a_change_and_then_once_a_day() {
        let due_at = |accessed, modified, changed| times(accessed, modified, changed).due_at();
        assert_eq!(due_at(BEGIN, BEGIN, BEGIN - SECOND), Duration::ZERO, "changed in the same tick");
        assert_eq!(due_at(BEGIN, BEGIN - SECOND, BEGIN), Duration::ZERO);
        assert_eq!(due_at(BEGIN, BEGIN + DAY, BEGIN - SECOND), Duration::ZERO, "changed in the future");
        let accessed = BEGIN + Duration::from_millis(900);
        assert_eq!(due_at(accessed, BEGIN, BEGIN), BEGIN + DAY, "in whole seconds");
        let time = of(times(accessed, BEGIN, BEGIN));
        assert!(!time.is_due(accessed) && !time.is_due(BEGIN + DAY - 2 * SECOND));
        assert!(time.is_due(BEGIN + DAY - SECOND), "for the kernel a moment later");
        assert!(!AccessTime::of_no_concern().may_be_due(BEGIN));
    }

    #[test]
    fn what_is_known_is_asked_again_and_a_file_that_changes_is_left_to_threads_for_a_while() {
        let (read, millisecond) = (times(BEGIN, BEGIN - SECOND, BEGIN - SECOND), Duration::from_millis(1));
        let time = of(read);
        assert!(!time.may_be_due(BEGIN + BELIEVED - millisecond) && time.may_be_due(BEGIN + BELIEVED));
        let seen = BEGIN + BELIEVED;
        time.note_seen(read, seen);
        assert!(!time.is_due(seen) && !time.may_be_due(seen + BELIEVED - millisecond));
        // It has grown, and somebody else has read it since.
        let grown = seen + BELIEVED;
        let now = times(grown, grown - millisecond, grown - millisecond);
        time.note_seen(now, grown);
        assert!(time.is_due(grown) && time.may_be_due(grown));
        time.note_read(now, grown + 2 * SECOND);
        assert!(time.is_due(grown + 2 * SECOND), "it may grow on, and is not one whose time nobody writes");
        time.note_read(now, grown + RESTLESS_TIME);
        assert!(!time.is_due(grown + RESTLESS_TIME));
    }

    #[test]
    fn a_clock_that_was_set_back_has_it_asked_again() {
        let read = times(BEGIN, BEGIN - SECOND, BEGIN - SECOND);
        let time = of(read);
        time.note_seen(read, BEGIN + DAY / 2);
        let before = BEGIN + DAY / 3;
        assert!(time.may_be_due(before));
        time.note_seen(read, before);
        assert!(!time.may_be_due(before) && !time.is_due(before));
        // It is no longer taken for one that changes, either.
        let changed = times(before + SECOND, before, before);
        time.note_seen(changed, before + SECOND);
        assert!(time.is_due(before + SECOND));
        time.note_seen(changed, before);
        assert!(!time.is_due(before));
    }

    #[test]
    fn a_read_that_has_written_it_settles_it_and_one_that_has_not_does_for_a_while() {
        let old = times(BEGIN - DAY, BEGIN, BEGIN);
        let later = BEGIN + 10 * SECOND;
        let time = of(old);
        assert!(time.is_due(later));
        time.note_read(times(later, BEGIN, BEGIN), later);
        assert!(!time.is_due(later) && !time.is_due(later + DAY / 2) && time.is_due(later + DAY));
        // Nobody writes it.
        let time = of(old);
        time.note_read(old, later);
        assert!(!time.is_due(later) && time.is_due(later + LEFT_ALONE_TIME));
        // It was written a second ago, waited for the disk since, and the file has changed meanwhile.
        let time = of(old);
        time.note_read(times(later - 2 * SECOND, later, later), later);
        assert!(time.is_due(later));
    }

    #[test]
    fn within_a_tick_nothing_is_concluded() {
        // Changed and read in one tick: the next read writes it.
        let fresh = times(BEGIN, BEGIN, BEGIN);
        let time = of(fresh);
        time.note_read(fresh, BEGIN + Duration::from_millis(3));
        assert!(time.is_due(BEGIN + Duration::from_millis(3)));
        // The day is over, but for the kernel.
        let read = times(BEGIN, BEGIN - SECOND, BEGIN - SECOND);
        let time = of(read);
        time.note_read(read, BEGIN + DAY);
        assert!(time.is_due(BEGIN + DAY));
        // A time to come that nobody writes is not waited for.
        let future = times(BEGIN + DAY, BEGIN + DAY, BEGIN);
        let time = of(future);
        time.note_read(future, BEGIN);
        assert!(!time.is_due(BEGIN));
    }
}
