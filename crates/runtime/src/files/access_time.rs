//! The time of access of a file: reading may write it, and that may wait.
//!
//! The kernel notes when a file was read; with `relatime`, which is the default of all mounts, not every time but once after
//! each change and then once a day (mount(8)). On a disk that is a transaction, and while the journal has no room whoever
//! begins one waits: in `sendfile` as in a read that must not wait (`RWF_NOWAIT`), and also when everything is in memory.
//! So a read that will write the time of access is the pool's. Those that follow write nothing.
//!
//! When the next one will is told by the times that the file had when it was opened. Not where nothing is written at all
//! (`noatime`, read-only mounts, files marked so): there it is always due, and a read in the pool that left it as it was
//! tells that of its device, for a while. On a mount with `strictatime` every read writes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::Stat;

use crate::clock::{Moment, wall_anywhere};
use crate::mounts;

/// How often `relatime` writes it for a file that does not change.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The kernel's clock for files is a tick behind, and the time that it writes no newer than a change within the same tick.
const WRITTEN_JUST_NOW: Duration = Duration::from_secs(1);

/// Until when reads of an open file leave its time of access alone.
pub(super) struct AccessTime {
    settled_until_nanos: AtomicU64,
}

/// What has become of it after a read that was to write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Written {
    Yes,
    /// Nobody writes it here.
    No,
    /// It was, and the next read will write it again.
    Again,
}

impl AccessTime {
    /// Of a file that is not read on a loop, or nowhere else.
    pub const fn of_no_concern() -> AccessTime {
        AccessTime { settled_until_nanos: AtomicU64::new(u64::MAX) }
    }

    pub fn new(stat: &Stat, now: Moment) -> AccessTime {
        let time = AccessTime { settled_until_nanos: AtomicU64::new(0) };
        time.settle(stat, now);
        time
    }

    /// Whether the next read writes it, if reads do at all.
    #[inline]
    pub fn is_due(&self, now: Moment) -> bool {
        now.as_nanos() >= self.settled_until_nanos.load(Relaxed)
    }

    /// A read has been done, and this is what the kernel says now.
    pub fn note(&self, stat: &Stat, now: Moment) -> Written {
        self.settle(stat, now);
        let age = wall_anywhere().saturating_sub(Times::of(stat).accessed);
        match self.is_due(now) {
            false => Written::Yes,
            true if age > WRITTEN_JUST_NOW => Written::No,
            true => Written::Again,
        }
    }

    fn settle(&self, stat: &Stat, now: Moment) {
        let writes_always = mounts::any_strict() && mounts::is_strict(stat.st_dev as _);
        let rest = Times::of(stat).settled_for(wall_anywhere()).filter(|_| !writes_always);
        self.settled_until_nanos.store(rest.map_or(0, |rest| (now + rest).as_nanos()), Relaxed);
    }
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

    /// For how long from now on `relatime` writes nothing; none if the next read writes.
    fn settled_for(&self, wall: Duration) -> Option<Duration> {
        if self.accessed <= self.modified || self.accessed <= self.changed {
            return None;
        }
        DAY.checked_sub(wall.saturating_sub(self.accessed)).filter(|rest| !rest.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_after_a_change_and_then_once_a_day() {
        let at = Duration::from_secs;
        let settled_for = |accessed, modified, changed, wall| {
            Times { accessed: at(accessed), modified: at(modified), changed: at(changed) }.settled_for(at(wall))
        };
        let begin = 1_000_000_000;
        assert_eq!(settled_for(begin, begin, begin - 1, begin + 1), None, "changed in the same tick");
        assert_eq!(settled_for(begin, begin - 1, begin, begin + 1), None);
        assert_eq!(settled_for(begin, begin + 9, begin - 1, begin + 1), None, "changed in the future");
        assert_eq!(settled_for(begin, begin - 1, begin - 1, begin + 100), Some(DAY - at(100)));
        assert_eq!(settled_for(begin, begin - 1, begin - 1, begin + DAY.as_secs()), None);
        assert_eq!(settled_for(begin, begin - 1, begin - 1, begin - 100), Some(DAY), "read in the future");
        assert_eq!(settled_for(0, 0, 0, begin), None);
    }
}
