//! Access times: reading a file may write its access time, and that may wait.
//!
//! With `relatime`, the default of all mounts, the kernel updates the access time with the first read after a change,
//! and once a day (mount(8)). On a disk the update is a transaction, which waits while the journal is full: in
//! `sendfile`, and in a read that must not wait (`RWF_NOWAIT`), even if all pages are in memory. So a read that will
//! update the access time goes to a pool. The following ones update nothing.
//!
//! The file's times tell whether the next read updates it. They are checked every tenth of a second while the file is
//! read. A file that was seen to change, such as a log, is read by the pool for ten seconds, since each change causes
//! one more update.
//!
//! A mount without access times (`noatime`, read-only) needs no checks. A file may be exempt for other reasons, such as
//! its attribute `A` or a frozen file system: it counts as exempt for a minute after a read in a pool that was due to
//! update and did not. With `strictatime` every read updates.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{AtFlags, Stat, StatxFlags};

use crate::mounts::{self, AccessTimes};

/// Interval after which `relatime` updates the access time of an unchanged file.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Upper bound of a tick of the kernel's clock for files, and of the age of a loop's clock.
const TICK_MAX: Duration = Duration::from_secs(1);

/// Time for which a file counts as exempt after a read that was due to update and did not.
const LEFT_ALONE_TIME: Duration = Duration::from_secs(60);

/// Time for which a check of the times is valid. A check takes a fiftieth of the time to copy 64 KiB.
const BELIEVED: Duration = Duration::from_millis(100);

/// Time for which a file counts as changing after a change was seen.
const RESTLESS_TIME: Duration = Duration::from_secs(10);

/// State of an open file that tells whether its next read updates the access time. Times are by the wall clock; if that
/// is set back, all periods count as over.
pub(super) struct AccessTime {
    /// Reads update nothing, or no loop reads the file.
    is_of_no_concern: AtomicBool,
    /// Every read updates it.
    is_strict: bool,
    /// Last check that found no update due.
    looked_nanos: AtomicU64,
    /// Time of the last change, and when that change was first seen.
    changed_nanos: AtomicU64,
    restless_from_nanos: AtomicU64,
    /// Last read that was due to update and did not.
    left_alone_from_nanos: AtomicU64,
}

impl AccessTime {
    /// For a file whose reads update nothing, or that no loop reads.
    pub const fn of_no_concern() -> AccessTime {
        AccessTime {
            is_of_no_concern: AtomicBool::new(true),
            is_strict: false,
            looked_nanos: AtomicU64::new(0),
            changed_nanos: AtomicU64::new(0),
            restless_from_nanos: AtomicU64::new(0),
            left_alone_from_nanos: AtomicU64::new(0),
        }
    }

    pub fn new(file: BorrowedFd<'_>, stat: &Stat, wall: Duration) -> AccessTime {
        let is_strict = mounts::any_strict() && access_times(file, stat.st_dev as _) == AccessTimes::Always;
        AccessTime::with_times(Times::of(stat), is_strict, wall)
    }

    fn with_times(times: Times, is_strict: bool, wall: Duration) -> AccessTime {
        let is_of_no_concern = AtomicBool::new(false);
        let time = AccessTime { is_of_no_concern, is_strict, ..AccessTime::of_no_concern() };
        time.changed_nanos.store(nanos(times.changed), Relaxed);
        time.is_due(times, wall);
        time
    }

    /// True if [`AccessTime::is_written`] has to be called.
    #[inline]
    pub fn may_be_due(&self, wall: Duration) -> bool {
        !self.is_of_no_concern.load(Relaxed) && !is_within(wall, &self.looked_nanos, BELIEVED)
    }

    /// True if the next read may update it, by the file's times and its mount.
    #[cold]
    pub fn is_written(&self, file: BorrowedFd<'_>, device: u64, wall: Duration) -> bool {
        match rustix::fs::fstat(file) {
            Ok(stat) if !self.is_due(Times::of(&stat), wall) => return false,
            _ => {}
        }
        let is_of_no_concern = access_times(file, device) == AccessTimes::Never;
        self.is_of_no_concern.store(is_of_no_concern, Relaxed);
        !is_of_no_concern
    }

    /// True if the next read of a file with these times updates.
    fn is_due(&self, times: Times, wall: Duration) -> bool {
        if self.changed_nanos.swap(nanos(times.changed), Relaxed) != nanos(times.changed) {
            self.restless_from_nanos.store(nanos(wall), Relaxed);
        }
        let is_due = self.is_strict
            || is_within(wall, &self.restless_from_nanos, RESTLESS_TIME)
            || times.due_at() <= wall + TICK_MAX && !is_within(wall, &self.left_alone_from_nanos, LEFT_ALONE_TIME);
        if !is_due {
            self.looked_nanos.store(nanos(wall), Relaxed);
        }
        is_due
    }

    /// Notes a read that was due to update; `stat` was taken after it.
    pub fn note(&self, stat: &Stat, wall: Duration) {
        self.note_read(Times::of(stat), wall);
    }

    fn note_read(&self, times: Times, wall: Duration) {
        // Within a tick the kernel updates once, and another read will update again. An update that is due in the next
        // tick is not due for the kernel yet.
        let is_recent = |time: Duration| time <= wall && wall - time < TICK_MAX;
        let due_at = times.due_at();
        if due_at <= wall && !is_recent(due_at) && !is_recent(times.accessed) {
            self.left_alone_from_nanos.store(nanos(wall), Relaxed);
        }
        self.is_due(times, wall);
    }
}

/// True if less than `time` has passed since `from`.
#[inline]
fn is_within(wall: Duration, from: &AtomicU64, time: Duration) -> bool {
    nanos(wall).wrapping_sub(from.load(Relaxed)) < nanos(time)
}

/// The access time mode of the mount of this file; `relatime` if it is unknown.
#[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
fn access_times(file: BorrowedFd<'_>, device: u64) -> AccessTimes {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let mount = rustix::fs::statx(file, c"", flags, StatxFlags::MNT_ID).ok();
    mounts::access_times(mount.map(|stat| stat.stx_mnt_id), device)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Times of a file since the epoch; earlier ones count as the epoch.
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

    /// Time from which on `relatime` updates; the kernel compares whole seconds.
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

    /// For a file with these times.
    fn of(accessed: Duration, changed: Duration) -> AccessTime {
        AccessTime::with_times(Times { accessed, modified: changed, changed }, false, BEGIN)
    }

    impl AccessTime {
        fn is_due_with(&self, accessed: Duration, changed: Duration, wall: Duration) -> bool {
            self.is_due(Times { accessed, modified: changed, changed }, wall)
        }

        fn note_with(&self, accessed: Duration, changed: Duration, wall: Duration) {
            self.note_read(Times { accessed, modified: changed, changed }, wall);
        }
    }

    #[test]
    fn time_is_written_after_a_change_and_then_once_a_day() {
        let due_at = |accessed, modified, changed| Times { accessed, modified, changed }.due_at();
        assert_eq!(due_at(BEGIN, BEGIN, BEGIN - SECOND), Duration::ZERO, "changed in the same tick");
        assert_eq!(due_at(BEGIN, BEGIN - SECOND, BEGIN), Duration::ZERO);
        assert_eq!(due_at(BEGIN, BEGIN + DAY, BEGIN - SECOND), Duration::ZERO, "changed in the future");
        assert_eq!(due_at(BEGIN + SECOND / 2, BEGIN, BEGIN), BEGIN + DAY, "in whole seconds");
        assert!(!AccessTime::of_no_concern().may_be_due(BEGIN));
    }

    #[test]
    fn look_at_the_times_holds_for_a_moment_and_not_when_the_clock_is_set_back() {
        let time = of(BEGIN, BEGIN - SECOND);
        assert!(!time.may_be_due(BEGIN + BELIEVED / 2) && time.may_be_due(BEGIN + BELIEVED));
        assert!(time.may_be_due(BEGIN - SECOND));
    }

    #[test]
    fn file_that_changes_is_due_until_it_has_rested() {
        let time = of(BEGIN, BEGIN - SECOND);
        let (later, grown) = (BEGIN + 2 * SECOND, BEGIN + SECOND);
        assert!(time.is_due_with(later, grown, later), "it may grow on");
        time.note_with(later, grown, later + 2 * SECOND);
        assert!(time.is_due_with(later, grown, later + RESTLESS_TIME / 2));
        assert!(!time.is_due_with(later, grown, later + RESTLESS_TIME));
    }

    #[test]
    fn read_that_wrote_the_time_settles_it_for_a_day() {
        let (time, later) = (of(BEGIN - DAY, BEGIN), BEGIN + 10 * SECOND);
        assert!(time.is_due_with(BEGIN - DAY, BEGIN, later));
        time.note_with(later, BEGIN, later);
        assert!(!time.is_due_with(later, BEGIN, later + DAY / 2) && time.is_due_with(later, BEGIN, later + DAY));
    }

    #[test]
    fn read_that_wrote_nothing_settles_it_for_a_minute() {
        let (time, later) = (of(BEGIN - DAY, BEGIN), BEGIN + 10 * SECOND);
        time.note_with(BEGIN - DAY, BEGIN, later);
        assert!(!time.is_due_with(BEGIN - DAY, BEGIN, later));
        assert!(time.is_due_with(BEGIN - DAY, BEGIN, later + LEFT_ALONE_TIME));
    }

    #[test]
    fn read_within_a_tick_of_the_change_settles_nothing() {
        let time = of(BEGIN, BEGIN);
        time.note_with(BEGIN, BEGIN, BEGIN + SECOND / 2);
        assert!(time.is_due_with(BEGIN, BEGIN, BEGIN + SECOND / 2));
    }
}
