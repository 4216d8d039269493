//! Health of a cache's disk: decides whether requests wait for it.
//!
//! A request that has waited for `cache_disk_timeout` goes to its server. What that tells about the disk depends on
//! other requests meanwhile:
//!
//! | meanwhile the disk has | it is | and so |
//! |---|---|---|
//! | answered another request | saturated, or slow | requests continue to wait for it, each up to the timeout |
//! | answered no request | silent | only one request a second waits for it, until it answers |
//!
//! Only an operation that had to wait for the disk counts as an answer: data found in memory tells nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use gale_files::{has_device_answered_since, is_device_reading};
use gale_runtime::{Device, Moment, now_anywhere, watch_waiting};
use parking_lot::Mutex;

/// Interval at which a silent disk is tried.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Health of a cache's disk, see the head of the file.
#[derive(Default)]
pub struct Disk {
    /// Time at which it became silent, in nanoseconds; 0 if it is not.
    silent_since: AtomicU64,
    next_try: AtomicU64,
    /// Time of its last answer; 0 = never.
    answered_at: AtomicU64,
    /// Time at which the last write ended; 0 = never. The data may have gone no further than to memory.
    written_at: AtomicU64,
    /// Calls in progress that may be waiting for it.
    calls: AtomicU32,
    /// The device that was found silent: a cache may span several.
    silent_device: Mutex<Option<Device>>,
}

impl Disk {
    /// True if a request may wait for the disk. One request a second may try a silent one.
    pub fn may_try(&self, now: Moment) -> bool {
        if self.is_well() {
            return true;
        }
        let (now, next) = (now.as_nanos(), self.next_try.load(Relaxed));
        let then = now + TRY_EVERY.as_nanos() as u64;
        now >= next && self.next_try.compare_exchange(next, then, Relaxed, Relaxed).is_ok()
    }

    /// Makes a call that may wait for the disk, on a thread of a pool. If the thread has waited, the disk has answered.
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

    /// Notes that data was found in memory. A silent disk for which no call waits then counts as answering again: while
    /// all data is in memory, no call could show that it answers.
    pub fn note_tried(&self) {
        if self.silent_since.load(Relaxed) != 0
            && self.calls.load(Relaxed) == 0
            && !self.is_well()
            && !self.is_reading()
        {
            self.note_alive(now_anywhere());
        }
    }

    /// Notes an answer.
    pub fn note_alive(&self, now: Moment) {
        self.answered_at.fetch_max(now.as_nanos(), Relaxed);
        if self.silent_since.load(Relaxed) != 0 {
            self.silent_since.store(0, Relaxed);
        }
    }

    /// Notes the end of a write that a call has waited for.
    pub fn note_written(&self, now: Moment) {
        self.written_at.fetch_max(now.as_nanos(), Relaxed);
    }

    /// True if it has answered since then: this cache, or any other reader of the device.
    pub fn has_answered_since(&self, device: Device, then: Moment) -> bool {
        self.answered_at.load(Relaxed) > then.as_nanos() || has_device_answered_since(device, then)
    }

    /// True if a write has ended since then.
    pub fn has_written_since(&self, then: Moment) -> bool {
        self.written_at.load(Relaxed) > then.as_nanos()
    }

    /// Notes that a request has waited for this device in vain, and no other one got an answer. True if the disk was
    /// not silent before.
    pub fn note_silent(&self, device: Device, now: Moment) -> bool {
        let now = now.as_nanos().max(1);
        self.next_try.store(now + TRY_EVERY.as_nanos() as u64, Relaxed);
        *self.silent_device.lock() = Some(device);
        self.silent_since.compare_exchange(0, now, Relaxed, Relaxed).is_ok()
    }

    /// True if the disk is not silent.
    pub fn is_well(&self) -> bool {
        let silent_since = self.silent_since.load(Relaxed);
        if silent_since == 0 {
            return true;
        }
        // The request that started a read answered since may be gone.
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

/// A call in progress; dropped also if the call panics.
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
    fn answer_from_memory_does_not_end_silence_of_a_disk() {
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
