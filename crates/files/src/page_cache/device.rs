//! Condition of a device that files lie on.
//!
//! | condition | reads in flight | reads on a loop (`RWF_NOWAIT`) | `sendfile` |
//! |---|---|---|---|
//! | healthy | fewer than four | always | of pages that a fact of a second, or a read now, shows in memory |
//! | busy | four or more in two seconds | of pages known to be in memory | of pages that the helper holds |
//! | not answering | some, and none has ended for a while | of pages known to be in memory | never |
//!
//! A device is also busy for two seconds after a call on a loop has waited for it.
//!
//! Even a read that must not wait may do so: for a missing page it submits the read-ahead, and sleeps while the
//! device's queue is full. A read of a page in memory does the same if the kernel has marked that page and one ahead of
//! it is missing. So a loop asks a busy device only for pages that are known to be in memory, together with those ahead
//! of them.
//!
//! States are found by a hash of the device's number, without a lock. Devices that share a state count as one device.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gale_runtime::Moment;

/// Reads in flight from which on a device is busy. Loop devices and some flash memory have queues of four.
const BUSY_READS: u32 = 4;

/// Time for which a device stays busy after it had that many reads in flight, or after a call on a loop has waited for
/// it. Between two reads of its clients it may have none in flight.
const BUSY_TIME: Duration = Duration::from_secs(2);

/// Longest time without a completed read, while some are in flight, of a device that answers. Slow disks complete some
/// within tens of milliseconds, however many are in flight.
const SILENCE_MAX: Duration = Duration::from_millis(100);

/// Upper bound of the distance to a missing page for reads: half of the longest question, so that answers about larger
/// files are useful.
pub(super) const READ_AHEAD_BYTES_MAX: u64 = 2 << 20;

/// Condition of a device. A later one allows less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Condition {
    Healthy,
    Busy,
    NotAnswering,
}

impl Condition {
    /// Name on the status page.
    pub fn name(self) -> &'static str {
        match self {
            Condition::Healthy => "healthy",
            Condition::Busy => "busy",
            Condition::NotAnswering => "not answering",
        }
    }
}

/// One device. Aligned so that writes to one state do not take the cache line of another, which every request reads.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct DeviceState {
    /// `st_dev` of the first device with this state; 0 = none yet.
    pub(super) number: AtomicU64,
    /// Reads of pieces that were not in memory, and their total time.
    pub(super) reads_done: AtomicU64,
    pub(super) reads_nanos: AtomicU64,
    pub(super) reads: AtomicU32,
    /// Checks in flight on pool threads.
    pub(super) looks: AtomicU32,
    /// Time at which a read last ended, or the first one began.
    progress_at_nanos: AtomicU64,
    /// Time at which the device last answered; 0 = never.
    answered_at_nanos: AtomicU64,
    /// End of the time in which the device is busy.
    busy_until_nanos: AtomicU64,
    /// See [`DeviceState::read_ahead_bytes`]; 0 = not known yet.
    read_ahead_bytes: AtomicU64,
}

impl DeviceState {
    pub const fn new() -> Self {
        DeviceState {
            number: AtomicU64::new(0),
            reads_done: AtomicU64::new(0),
            reads_nanos: AtomicU64::new(0),
            reads: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            progress_at_nanos: AtomicU64::new(0),
            answered_at_nanos: AtomicU64::new(0),
            busy_until_nanos: AtomicU64::new(0),
            read_ahead_bytes: AtomicU64::new(0),
        }
    }

    #[inline]
    pub fn condition(&self, now: Moment) -> Condition {
        let reads = self.reads.load(Relaxed);
        if reads > 0 && now > Moment::from_nanos(self.progress_at_nanos.load(Relaxed)) + SILENCE_MAX {
            Condition::NotAnswering
        } else if now.as_nanos() < self.busy_until_nanos.load(Relaxed) {
            Condition::Busy
        } else {
            Condition::Healthy
        }
    }

    /// Notes that the device of this number is used.
    #[inline]
    pub fn note_asked(&self, number: u64) {
        if self.number.load(Relaxed) == 0 {
            self.number.store(number, Relaxed);
        }
    }

    pub fn begin_read(&self, now: Moment) {
        if self.reads.load(Relaxed) == 0 {
            self.progress_at_nanos.fetch_max(now.as_nanos(), Relaxed);
        }
        if self.reads.fetch_add(1, Relaxed) + 1 >= BUSY_READS {
            self.stay_busy(now);
        }
    }

    /// Notes the end of a read.
    pub fn note_progress(&self, now: Moment) {
        self.progress_at_nanos.fetch_max(now.as_nanos(), Relaxed);
    }

    /// Notes the time of a read of a piece that was not in memory.
    pub fn note_read(&self, time: Duration, now: Moment) {
        self.note_progress(now);
        self.answered_at_nanos.fetch_max(now.as_nanos(), Relaxed);
        self.reads_done.fetch_add(1, Relaxed);
        self.reads_nanos.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// True if a read has ended since then.
    pub fn has_answered_since(&self, then: Moment) -> bool {
        self.answered_at_nanos.load(Relaxed) > then.as_nanos()
    }

    /// Distance to a missing page within which a read of pages in memory may trigger read-ahead: a mark in one window
    /// triggers the next one, and a window is twice the device's `read_ahead_kb` for a file that is read sequentially.
    pub fn read_ahead_bytes(&self) -> u64 {
        let known = self.read_ahead_bytes.load(Relaxed);
        if known > 0 {
            return known;
        }
        let bytes = (read_ahead_kib(self.number.load(Relaxed)) << 12).max(1);
        self.read_ahead_bytes.store(bytes, Relaxed);
        bytes
    }

    /// Makes the device busy for a while.
    pub fn stay_busy(&self, now: Moment) {
        self.busy_until_nanos.fetch_max((now + BUSY_TIME).as_nanos(), Relaxed);
    }
}

/// `read_ahead_kb` of the device, or of the disk if it is a partition. If the kernel has none (btrfs, overlayfs, no
/// sysfs), the maximum. Reads sysfs, which waits for no device.
fn read_ahead_kib(device: u64) -> u64 {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let paths =
        [format!("/sys/class/bdi/{number}/read_ahead_kb"), format!("/sys/dev/block/{number}/../bdi/read_ahead_kb")];
    let read = |path: &String| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    paths.iter().find_map(read).unwrap_or(READ_AHEAD_BYTES_MAX >> 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Moment = Moment::from_nanos(1_000_000_000);
    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn device_with_four_reads_in_flight_is_busy_for_two_seconds() {
        let device = DeviceState::new();
        (0..3).for_each(|_| device.begin_read(BEGIN));
        assert_eq!(device.condition(BEGIN), Condition::Healthy);
        device.begin_read(BEGIN);
        device.reads.store(0, Relaxed);
        assert_eq!(device.condition(BEGIN + (BUSY_TIME - MILLISECOND)), Condition::Busy);
        assert_eq!(device.condition(BEGIN + BUSY_TIME), Condition::Healthy);
    }

    #[test]
    fn device_that_ends_no_read_does_not_answer() {
        let device = DeviceState::new();
        device.begin_read(BEGIN);
        assert_eq!(device.condition(BEGIN + SILENCE_MAX), Condition::Healthy);
        let late = BEGIN + SILENCE_MAX + MILLISECOND;
        assert_eq!(device.condition(late), Condition::NotAnswering);
        device.begin_read(late);
        assert_eq!(device.condition(late), Condition::NotAnswering, "another read is no answer");
        device.note_read(MILLISECOND, late);
        assert_eq!(device.condition(late), Condition::Healthy);
        assert!(device.has_answered_since(BEGIN) && !device.has_answered_since(late));
    }

    #[test]
    fn first_read_after_a_pause_has_its_time() {
        let device = DeviceState::new();
        let later = BEGIN + 1000 * MILLISECOND;
        device.begin_read(later);
        assert_eq!(device.condition(later + SILENCE_MAX), Condition::Healthy);
    }
}
