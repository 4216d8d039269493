//! The time of access of a file: reading may write it, and that may wait.
//!
//! The kernel notes when a file was read; with `relatime`, which is the default of all mounts, not every time but once after
//! each change and then once a day (mount(8)). On a disk that is a transaction, and while the journal has no room whoever
//! begins one waits: in `sendfile` as in a read that must not wait (`RWF_NOWAIT`), also in one that is refused, and also when
//! everything is in memory. So a read that will write the time of access is the pool's. Those that follow write nothing.
//!
//! When the next one will is told by the times that the file had when it was opened or last read by a pool. Where its mount
//! writes nothing (`noatime`, read-only) it is of no concern. There are more reasons for not writing, as the attribute `A` of
//! a file and a file system that is frozen: so a read in a pool after which nothing has changed says that of its file, for a
//! while. On a mount with `strictatime` every read writes.
//!
//! Not known is a change that comes while a file is open: one that grows while it is sent may have its time written on a loop.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{AtFlags, Stat, StatxFlags};

use crate::mounts::{self, AccessTimes};

/// How often `relatime` writes it for a file that does not change.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The kernel's clock for files ticks slower than others, and the time of a turn of a loop is that of its beginning.
const TICK_MAX: Duration = Duration::from_secs(1);

/// How long it is not asked again after a read that has written nothing although it was due.
const LEFT_ALONE_TIME: Duration = Duration::from_secs(60);

const NEVER: u64 = u64::MAX;

/// When the next read of an open file writes its time of access, by the wall clock.
pub(super) struct AccessTime {
    due_at_nanos: AtomicU64,
    /// As it was seen last.
    accessed_nanos: AtomicU64,
    /// The mount does write it.
    is_confirmed: AtomicBool,
    /// Each read writes it.
    is_strict: bool,
}

impl AccessTime {
    /// Of a file that no loop reads, or whose reads write nothing.
    pub const fn of_no_concern() -> AccessTime {
        AccessTime::due_at(NEVER, Duration::ZERO)
    }

    const fn due_at(nanos: u64, accessed: Duration) -> AccessTime {
        AccessTime {
            due_at_nanos: AtomicU64::new(nanos),
            accessed_nanos: AtomicU64::new(accessed.as_nanos() as u64),
            is_confirmed: AtomicBool::new(false),
            is_strict: false,
        }
    }

    pub fn new(file: BorrowedFd<'_>, stat: &Stat) -> AccessTime {
        let times = Times::of(stat);
        if mounts::any_strict() && access_times(file, stat.st_dev as _) == AccessTimes::Always {
            return AccessTime { is_strict: true, ..AccessTime::due_at(0, times.accessed) };
        }
        AccessTime::due_at(nanos(times.due_at()), times.accessed)
    }

    /// Whether the next read may write it.
    #[inline]
    pub fn is_due(&self, wall: Duration) -> bool {
        nanos(wall + TICK_MAX) >= self.due_at_nanos.load(Relaxed)
    }

    /// Whether it is written at all where the file lies, if it is due; asked once.
    #[cold]
    pub fn is_written(&self, file: BorrowedFd<'_>, device: u64) -> bool {
        if self.is_confirmed.load(Relaxed) {
            return true;
        }
        if access_times(file, device) == AccessTimes::Never {
            self.due_at_nanos.store(NEVER, Relaxed);
            return false;
        }
        self.is_confirmed.store(true, Relaxed);
        true
    }

    /// A read for which it was due has been done, and this is what the kernel says now.
    pub fn note(&self, stat: &Stat, wall: Duration) {
        self.note_times(Times::of(stat), wall);
    }

    fn note_times(&self, times: Times, wall: Duration) {
        let due_at = if self.is_strict { Duration::ZERO } else { times.due_at() };
        let was_written = self.accessed_nanos.swap(nanos(times.accessed), Relaxed) != nanos(times.accessed);
        // Within a tick it is written once, and the time at which it is due may not have come for the kernel.
        let is_recent = |time: Duration| time <= wall && wall - time < TICK_MAX;
        let is_left_alone = !was_written && due_at <= wall && !is_recent(due_at) && !is_recent(times.accessed);
        self.due_at_nanos.store(nanos(if is_left_alone { wall + LEFT_ALONE_TIME } else { due_at }), Relaxed);
    }
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
        AccessTime::due_at(nanos(times.due_at()), times.accessed)
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
        assert!(!AccessTime::of_no_concern().is_due(BEGIN));
    }

    #[test]
    fn a_read_that_has_written_it_settles_it_and_one_that_has_not_does_for_a_while() {
        let old = times(BEGIN - DAY, BEGIN, BEGIN);
        let later = BEGIN + 10 * SECOND;
        let time = of(old);
        assert!(time.is_due(later));
        time.note_times(times(later, BEGIN, BEGIN), later);
        assert!(!time.is_due(later) && !time.is_due(later + DAY / 2) && time.is_due(later + DAY));
        // Nobody writes it.
        let time = of(old);
        time.note_times(old, later);
        assert!(!time.is_due(later) && time.is_due(later + LEFT_ALONE_TIME));
        // It was written a second ago, waited for the disk since, and the file has changed meanwhile.
        let time = of(old);
        time.note_times(times(later - 2 * SECOND, later, later), later);
        assert!(time.is_due(later));
    }

    #[test]
    fn within_a_tick_nothing_is_concluded() {
        // Changed and read in one tick: the next read writes it.
        let fresh = times(BEGIN, BEGIN, BEGIN);
        let time = of(fresh);
        time.note_times(fresh, BEGIN + Duration::from_millis(3));
        assert!(time.is_due(BEGIN + Duration::from_millis(3)));
        // The day is over, but for the kernel.
        let read = times(BEGIN, BEGIN - SECOND, BEGIN - SECOND);
        let time = of(read);
        time.note_times(read, BEGIN + DAY);
        assert!(time.is_due(BEGIN + DAY));
        // A time to come that nobody writes is not waited for.
        let future = times(BEGIN + DAY, BEGIN + DAY, BEGIN);
        let time = of(future);
        time.note_times(future, BEGIN);
        assert!(!time.is_due(BEGIN));
    }
}
