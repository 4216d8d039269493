//! How the devices that files lie on behave: what is asked of them now, and whether calls that should not wait did.
//!
//! A look at what is in memory can itself wait: on a miss the kernel begins to read ahead, and whoever submits that sleeps
//! when the device's queue is full. So while several reads of a device are outstanding, it is *crowded*, and what is not
//! known to be in memory goes to a pool without a look. And a call that did wait although it should not (a *misprediction*)
//! makes its device *distrusted* for a while. For longer *memory is short* there: something had to be read, so one page that is
//! in memory tells nothing of others.
//!
//! A call that takes long has not always waited: on a busy machine the thread may have been held up. Only the kernel's count
//! of a thread's voluntary switches tells the two apart, and asking for it costs as much as a small read; so the first long
//! call makes its thread *suspicious*, and calls are counted from then on, for a while.
//!
//! States are found by a hash of the device's number, without a lock. Devices that share one are taken for one device,
//! which makes both more careful.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::residency::Residency;
use crate::time::{Moment, now_anywhere, system_now};

/// From so many outstanding reads on a device is crowded. A queue that is worth its name has room for dozens; those of loop
/// devices and of some flash memory have not.
const CROWDED_FROM: u32 = 4;

/// The same while it is distrusted.
const CROWDED_FROM_DISTRUSTED: u32 = 1;

/// A call on the loop that takes longer has waited, or its thread was held up.
const LONG_CALL: Duration = Duration::from_millis(5);

/// How long a thread is suspicious after a long call.
const SUSPICION_TIME: Duration = Duration::from_secs(10);

/// How long after that a device is distrusted.
const DISTRUST_TIME: Duration = Duration::from_secs(2);

/// How long after a read from a device, and after a device was first asked about, it is not taken for granted that memory holds
/// everything that is asked for there. A shortage of memory lasts, and to be careful for longer costs little: what is asked for
/// again and again is known anyway.
const SHORTAGE_TIME: Duration = Duration::from_secs(60);

/// How many threads of a pool may look for what is in memory at the same time, before what they look for stands in the
/// device's own line. A look takes a few microseconds, and is as bad as a read only on a device that hangs.
const LOOKS_MAX: u32 = 2;

/// The same of looks that write a time of access. As many as there are wait for the journal when that is stuck: the threads that
/// the pool lends to others then are for other devices, and this one's other lines have to find some, too.
const ACCESSES_MAX: u32 = 4;

const STATES: usize = 64;

/// What all loops know about files together.
pub(crate) struct Knowledge {
    pub residency: Residency,
    devices: [DeviceState; STATES],
}

/// One device.
#[derive(Default)]
pub(crate) struct DeviceState {
    /// Pieces that are being read because they were not in memory.
    reads: AtomicU32,
    looks: AtomicU32,
    accesses: AtomicU32,
    /// When one of these ended last, or the first of those under way began.
    access_progress_nanos: AtomicU64,
    /// When a piece was not in memory last, or a call took long; at the beginning, when somebody asked for the first time.
    missed_at_nanos: AtomicU64,
    distrusted_until_nanos: AtomicU64,
}

impl Knowledge {
    pub fn new(residency: Residency) -> Arc<Self> {
        Arc::new(Knowledge { residency, devices: [const { DeviceState::new() }; STATES] })
    }

    /// The device of this number (`st_dev`).
    pub fn device(&self, number: u64) -> &DeviceState {
        // Minor numbers of disks' partitions and of anonymous devices are consecutive.
        &self.devices[(number ^ number >> 8) as usize % STATES]
    }

    /// Counts a read of a piece that is not in memory, until the result is dropped.
    pub fn begin_read(self: &Arc<Self>, device: u64) -> Outstanding {
        let state = self.device(device);
        state.reads.fetch_add(1, Relaxed);
        state.note_miss(now_anywhere());
        Outstanding { knowledge: Arc::clone(self), device, count: |state| &state.reads }
    }

    /// Counts a look by a thread of a pool, if there may be one more.
    pub fn begin_look(self: &Arc<Self>, device: u64) -> Option<Outstanding> {
        self.begin(device, |state| &state.looks, LOOKS_MAX)
    }

    /// The same of a look that writes a time of access.
    pub fn begin_access(self: &Arc<Self>, device: u64) -> Option<Access> {
        let access = Access(self.begin(device, |state| &state.accesses, ACCESSES_MAX)?);
        let state = self.device(device);
        if state.accesses.load(Relaxed) == 1 {
            state.note_access_progress();
        }
        Some(access)
    }

    fn begin(self: &Arc<Self>, device: u64, count: fn(&DeviceState) -> &AtomicU32, most: u32) -> Option<Outstanding> {
        let counted = count(self.device(device));
        counted.fetch_update(Relaxed, Relaxed, |before| (before < most).then_some(before + 1)).ok()?;
        Some(Outstanding { knowledge: Arc::clone(self), device, count })
    }
}

impl DeviceState {
    const fn new() -> Self {
        DeviceState {
            reads: AtomicU32::new(0),
            looks: AtomicU32::new(0),
            accesses: AtomicU32::new(0),
            access_progress_nanos: AtomicU64::new(0),
            missed_at_nanos: AtomicU64::new(0),
            distrusted_until_nanos: AtomicU64::new(0),
        }
    }

    /// Whether a look at something unknown may wait.
    #[inline]
    pub fn is_crowded(&self, now: Moment) -> bool {
        let reads = self.reads.load(Relaxed);
        reads >= CROWDED_FROM || reads >= CROWDED_FROM_DISTRUSTED && self.is_distrusted(now)
    }

    /// Whether something had to be read lately, so memory is short, or was: then one page that is there tells nothing of those
    /// beside it.
    #[inline]
    pub fn is_memory_short(&self, now: Moment) -> bool {
        let missed_at = self.missed_at_nanos.load(Relaxed);
        if missed_at == 0 {
            self.note_miss(now);
            return true;
        }
        now <= Moment::from_nanos(missed_at) + SHORTAGE_TIME || self.reads.load(Relaxed) > 0
    }

    /// Whether those who look and write a time of access wait for the file system: none has come to its end for a while.
    pub fn are_accesses_stuck(&self, now: Moment) -> bool {
        let progress = Moment::from_nanos(self.access_progress_nanos.load(Relaxed));
        self.accesses.load(Relaxed) > 0 && now > progress + LONG_CALL
    }

    fn note_access_progress(&self) {
        self.access_progress_nanos.store(now_anywhere().as_nanos(), Relaxed);
    }

    /// A piece was not in memory, or a call took so long that it may not have been.
    pub fn note_miss(&self, now: Moment) {
        self.missed_at_nanos.store(now.as_nanos(), Relaxed);
    }

    /// Whether a call that should not wait did so lately.
    #[inline]
    pub fn is_distrusted(&self, now: Moment) -> bool {
        now.as_nanos() < self.distrusted_until_nanos.load(Relaxed)
    }

    /// A call that should not wait did.
    pub fn distrust(&self, now: Moment) {
        self.distrusted_until_nanos.store((now + DISTRUST_TIME).as_nanos(), Relaxed);
    }
}

/// How a call went that should not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Quick,
    /// It took long, for whatever reason.
    Long,
    /// It has waited.
    Waited,
}

thread_local! {
    static SUSPICIOUS_UNTIL: Cell<Moment> = const { Cell::new(Moment::from_nanos(0)) };
}

/// Calls something that should not wait, and judges whether it did.
#[inline]
pub(crate) fn watch<T>(call: impl FnOnce() -> T) -> (T, Verdict) {
    let begun = system_now();
    let before = (begun < SUSPICIOUS_UNTIL.get()).then(voluntary_switches);
    let result = call();
    let ended = system_now();
    if ended <= begun + LONG_CALL {
        return (result, Verdict::Quick);
    }
    SUSPICIOUS_UNTIL.set(ended + SUSPICION_TIME);
    let has_waited = before.is_some_and(|before| voluntary_switches() > before);
    (result, if has_waited { Verdict::Waited } else { Verdict::Long })
}

/// How often this thread has waited for something.
fn voluntary_switches() -> i64 {
    // SAFETY: zeros are a valid `rusage`, and the call fills in the one that it is given.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nvcsw as i64
    }
}

/// Something that a device is asked for.
pub(crate) struct Outstanding {
    knowledge: Arc<Knowledge>,
    device: u64,
    count: fn(&DeviceState) -> &AtomicU32,
}

impl Drop for Outstanding {
    fn drop(&mut self) {
        (self.count)(self.knowledge.device(self.device)).fetch_sub(1, Relaxed);
    }
}

/// The same of a look that writes a time of access.
pub(crate) struct Access(Outstanding);

impl Drop for Access {
    fn drop(&mut self) {
        self.0.knowledge.device(self.0.device).note_access_progress();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_reads_crowd_a_device_and_one_is_enough_when_it_is_distrusted() {
        let knowledge = Knowledge::new(Residency::with_slots(16));
        let now = Moment::from_nanos(1_000_000_000);
        let mut reads: Vec<Outstanding> = (1..CROWDED_FROM).map(|_| knowledge.begin_read(5)).collect();
        let device = knowledge.device(5);
        assert!(!device.is_crowded(now));
        reads.push(knowledge.begin_read(5));
        assert!(device.is_crowded(now) && !knowledge.device(6).is_crowded(now));
        reads.truncate(1);
        assert!(!device.is_crowded(now));
        device.distrust(now);
        assert!(device.is_crowded(now) && device.is_distrusted(now));
        assert!(!device.is_distrusted(now + DISTRUST_TIME) && !device.is_crowded(now + DISTRUST_TIME));
        drop(reads);
        assert!(!device.is_crowded(now));
    }

    #[test]
    fn memory_is_short_for_a_while_after_a_read() {
        let knowledge = Knowledge::new(Residency::with_slots(16));
        let device = knowledge.device(5);
        let begin = now_anywhere();
        assert!(device.is_memory_short(begin), "nobody knows");
        assert!(!device.is_memory_short(begin + 2 * SHORTAGE_TIME));
        let read = knowledge.begin_read(5);
        let later = now_anywhere() + SHORTAGE_TIME;
        assert!(device.is_memory_short(later + SHORTAGE_TIME), "it still lasts");
        drop(read);
        assert!(device.is_memory_short(now_anywhere()));
        assert!(!device.is_memory_short(later + Duration::from_nanos(1)));
    }

    #[test]
    fn a_call_that_waits_is_told_from_one_that_computes_once_there_is_suspicion() {
        let wait = || watch(|| std::thread::sleep(2 * LONG_CALL)).1;
        let compute = || {
            let begun = system_now();
            watch(|| while system_now() - begun < 2 * LONG_CALL {}).1
        };
        std::thread::spawn(move || {
            assert_eq!((compute(), compute()), (Verdict::Long, Verdict::Long));
            assert_eq!(wait(), Verdict::Waited);
        })
        .join()
        .unwrap();
        std::thread::spawn(move || assert_eq!((wait(), wait()), (Verdict::Long, Verdict::Waited))).join().unwrap();
    }

    #[test]
    fn looks_are_few() {
        let knowledge = Knowledge::new(Residency::with_slots(16));
        let looks: Vec<_> = (0..LOOKS_MAX).map(|_| knowledge.begin_look(5).expect("room")).collect();
        assert!(knowledge.begin_look(5).is_none() && knowledge.begin_look(6).is_some());
        drop(looks);
        assert!(knowledge.begin_look(5).is_some());
        let accesses: Vec<_> = (0..ACCESSES_MAX).map(|_| knowledge.begin_access(5).expect("room")).collect();
        assert!(knowledge.begin_access(5).is_none() && knowledge.begin_look(5).is_some());
        let are_stuck = |device, time| knowledge.device(device).are_accesses_stuck(now_anywhere() + time);
        assert!(are_stuck(5, 2 * LONG_CALL) && !are_stuck(6, 2 * LONG_CALL) && !are_stuck(5, Duration::ZERO));
        drop(accesses);
        assert!(!are_stuck(5, 2 * LONG_CALL) && knowledge.begin_access(5).is_some());
    }
}
