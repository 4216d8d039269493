//! How the disk of a cache is: whether requests should wait for it at all.
//!
//! A request that has waited as long as it may goes to its server. What that says of the disk depends on what the disk
//! did meanwhile:
//!
//! | meanwhile | the disk is | so |
//! |---|---|---|
//! | it has answered somebody | saturated, or slow | others go on waiting for it, each for as long as it may |
//! | it has answered nobody | silent | others do not wait for it, but for one in a second, until it answers |
//!
//! Only what has waited for the disk is an answer: what was found in memory says nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gale_runtime::files::{has_device_answered_since, is_device_reading};
use gale_runtime::{Device, Moment, now_anywhere, watch_waiting};
use parking_lot::Mutex;

/// How often a disk that does not answer is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// How a cache's disk is: whether requests should wait for it at all.
#[derive(Default)]
pub struct Disk {
    /// Since when nothing has come back from it, as nanoseconds; 0 if it is well.
    silent_since: AtomicU64,
    next_try: AtomicU64,
    /// When something came back last; 0 = never.
    answered_at: AtomicU64,
    /// When a write has ended last; 0 = never. It may have gone no further than to memory.
    written_at: AtomicU64,
    /// Calls of threads that may be waiting for it.
    calls: AtomicU32,
    /// Which one was found silent: a cache may lie on several.
    silent_device: Mutex<Option<Device>>,
}

impl Disk {
    /// Whether a request may wait for it. While it does not answer, one in a second tries.
    pub fn may_try(&self, now: Moment) -> bool {
        if self.is_well() {
            return true;
        }
        let (now, next) = (now.as_nanos(), self.next_try.load(Relaxed));
        let then = now + TRY_EVERY.as_nanos() as u64;
        now >= next && self.next_try.compare_exchange(next, then, Relaxed, Relaxed).is_ok()
    }

    /// Makes a call that may wait for it, on a thread of a pool. If the thread has waited, the disk has answered.
    pub fn watch<T>(&self, call: impl FnOnce() -> T) -> T {
        let counted = Call::begin(&self.calls);
        let (result, has_waited) = watch_waiting(call);
        drop(counted);
        match has_waited {
            true => self.note_alive(now_anywhere()),
            false => self.note_tried(),
        }
        result
    }

    /// Something was found in memory. Where all of it is there nobody can wait for the disk: if nobody does, it is as
    /// good as well.
    pub fn note_tried(&self) {
        if self.silent_since.load(Relaxed) != 0
            && self.calls.load(Relaxed) == 0
            && !self.is_well()
            && !self.is_reading()
        {
            self.note_alive(now_anywhere());
        }
    }

    /// It has answered.
    pub fn note_alive(&self, now: Moment) {
        self.answered_at.fetch_max(now.as_nanos(), Relaxed);
        if self.silent_since.load(Relaxed) != 0 {
            self.silent_since.store(0, Relaxed);
        }
    }

    /// A write has ended that somebody has waited for.
    pub fn note_written(&self, now: Moment) {
        self.written_at.fetch_max(now.as_nanos(), Relaxed);
    }

    /// Whether it has answered since then: this cache, or anybody who reads from the device.
    pub fn has_answered_since(&self, device: Device, then: Moment) -> bool {
        self.answered_at.load(Relaxed) > then.as_nanos() || has_device_answered_since(device, then)
    }

    /// Whether it has ended a write since then.
    pub fn has_written_since(&self, then: Moment) -> bool {
        self.written_at.load(Relaxed) > then.as_nanos()
    }

    /// A request has waited for this device as long as it may, and nothing has come back meanwhile. True if that is
    /// news.
    pub fn note_silent(&self, device: Device, now: Moment) -> bool {
        let now = now.as_nanos().max(1);
        self.next_try.store(now + TRY_EVERY.as_nanos() as u64, Relaxed);
        *self.silent_device.lock() = Some(device);
        self.silent_since.compare_exchange(0, now, Relaxed, Relaxed).is_ok()
    }

    /// Whether it answers.
    pub fn is_well(&self) -> bool {
        let silent_since = self.silent_since.load(Relaxed);
        if silent_since == 0 {
            return true;
        }
        // Nobody may be left who waits for what was read since.
        let device = *self.silent_device.lock();
        let answers = device.is_some_and(|device| has_device_answered_since(device, Moment::from_nanos(silent_since)));
        if answers {
            let _ = self.silent_since.compare_exchange(silent_since, 0, Relaxed, Relaxed);
        }
        answers
    }

    fn is_reading(&self) -> bool {
        self.silent_device.lock().is_some_and(is_device_reading)
    }
}

/// A call that is under way, also if it panics.
struct Call<'a>(&'a AtomicU32);

impl<'a> Call<'a> {
    fn begin(calls: &'a AtomicU32) -> Call<'a> {
        calls.fetch_add(1, Relaxed);
        Call(calls)
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_in_memory_is_no_answer_while_others_wait() {
        let (disk, device) = (Disk::default(), Device::key(18));
        let began = now_anywhere();
        let is_silent = || !disk.is_well() && !disk.has_answered_since(device, began);
        assert!(disk.note_silent(device, began) && !disk.note_silent(device, began));
        let (begun, ends) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| disk.watch(|| (begun.wait(), ends.wait())));
            begun.wait();
            assert_eq!(disk.watch(|| 6 * 7), 42);
            assert!(is_silent());
            ends.wait();
        });
        assert!(disk.is_well() && disk.has_answered_since(device, began));
        assert!(disk.note_silent(device, began));
        disk.watch(|| ());
        assert!(disk.is_well(), "no request waits for it");
    }

    #[test]
    fn a_silent_disk_is_tried_once_in_a_second() {
        let (disk, now) = (Disk::default(), Moment::from_nanos(1));
        assert!(disk.may_try(now) && disk.may_try(now));
        disk.note_silent(Device::key(18), now);
        let later = now + TRY_EVERY;
        assert!(!disk.may_try(now) && disk.may_try(later) && !disk.may_try(later));
        disk.note_alive(later);
        assert!(disk.may_try(later) && disk.may_try(later));
    }
}
