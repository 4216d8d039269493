//! The queue of a pool: first come, first served on each device, devices in turn.
//!
//! A data structure only, without threads, locks and clock: the pool reports which tasks run.
//!
//! One device may use all threads and the whole queue as long as no other needs them. While others wait it gets at most
//! half of each (rounded up). Threads and places that it already uses cannot be taken back, least of all when it hangs;
//! so if the others' half is in use, a *reserve* of the same size lends it to them:
//!
//! ```text
//!   threads=4     A alone          B comes            A answers again
//!   threads       A A A A          A A A A            A A B B
//!   reserve       . .              B B                . .
//! ```
//!
//! A device's tasks may stand in several queues (`Device::queues`), which are treated as devices of their own, except
//! for the reserve: the queues of one device hang together, so the reserve counts all of them as one device.
//!
//! Invariants: at most `threads` tasks run, and with the reserve half as many more; the devices other than the largest
//! always find half of the threads and of the queue; no thread is idle while a waiting task may run. With a single
//! thread there is no half to lend, and no reserve: tasks run strictly one after the other.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};

use super::device::{Device, Queue};

/// The tasks of one device queue.
struct Lane<J> {
    jobs: VecDeque<J>,
    /// Number of `jobs` that count: without abandoned tasks and values to drop.
    waiting: usize,
    /// Number of running tasks that count.
    running: usize,
    /// Number of threads busy for this device, with any job.
    busy: usize,
}

impl<J> Default for Lane<J> {
    fn default() -> Self {
        Lane { jobs: VecDeque::new(), waiting: 0, running: 0, busy: 0 }
    }
}

impl<J> Lane<J> {
    fn load(&self) -> usize {
        self.running + self.waiting
    }
}

pub(super) struct FairQueue<J> {
    threads_max: usize,
    queue_max: usize,
    /// Device queues that have jobs or busy threads.
    lanes: HashMap<Device, Lane<J>>,
    /// Device queues that have jobs, each once; the next one is first.
    turns: VecDeque<Device>,
    jobs: usize,
    waiting: usize,
    running: usize,
    busy: usize,
    /// The device that exceeds its share of the threads, with all its queues. There cannot be two, except after the
    /// pool was made smaller: then the second one is found when the first one is within its share again.
    over_share: Option<Device>,
    /// The same for threads and queue together.
    over_half: Option<Device>,
    /// The limits were changed.
    was_resized: bool,
}

/// A job for a thread.
pub(super) struct Taken<J> {
    pub job: J,
    pub device: Device,
    pub counts: bool,
}

impl<J> FairQueue<J> {
    pub fn new(threads_max: usize, queue_max: usize) -> Self {
        FairQueue {
            threads_max: threads_max.max(1),
            queue_max,
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            jobs: 0,
            waiting: 0,
            running: 0,
            busy: 0,
            over_share: None,
            over_half: None,
            was_resized: false,
        }
    }

    pub fn threads_max(&self) -> usize {
        self.threads_max
    }

    pub fn queue_max(&self) -> usize {
        self.queue_max
    }

    /// Changes the limits. Existing jobs stay, even beyond the new limits.
    pub fn resize(&mut self, threads_max: usize, queue_max: usize) {
        self.threads_max = threads_max.max(1);
        self.queue_max = queue_max;
        self.was_resized = true;
        self.over_share = self.largest_over(|lane| lane.busy, self.share());
        self.over_half = self.largest_over(Lane::load, self.half());
    }

    fn largest_over(&self, size: fn(&Lane<J>) -> usize, bound: usize) -> Option<Device> {
        let sizes = self.lanes.keys().map(|&device| (self.total(device, size), device));
        sizes.max_by_key(|&(size, _)| size).filter(|&(size, _)| size > bound).map(|(_, device)| device)
    }

    /// Number of jobs in the queue, whether they count or not.
    pub fn jobs(&self) -> usize {
        self.jobs
    }

    /// Number of waiting tasks.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Number of running tasks.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Limit of threads for one device while others wait.
    fn share(&self) -> usize {
        self.threads_max.div_ceil(2)
    }

    /// Limit of threads and queue together for one device while others wait.
    fn half(&self) -> usize {
        self.share().saturating_add(self.queue_max.div_ceil(2))
    }

    /// Number, running and waiting tasks of each queue of a device of files.
    pub fn device_loads(&self) -> impl Iterator<Item = (u64, usize, usize)> + '_ {
        let of_files = self.lanes.iter().filter(|(device, _)| device.is_of_files());
        of_files.map(|(device, lane)| (device.number, lane.running, lane.waiting))
    }

    fn lane(&self, device: Device) -> Option<&Lane<J>> {
        self.lanes.get(&device)
    }

    /// Sum over all queues of the device.
    fn total(&self, device: Device, size: impl Fn(&Lane<J>) -> usize) -> usize {
        device.queues().filter_map(|queue| self.lane(queue)).map(size).sum()
    }

    /// True if this device exceeds its share of the threads.
    fn is_over_share(&self, device: Device) -> bool {
        self.over_share.is_some_and(|over| over.number == device.number)
    }

    /// Limit of threads: more than `threads_max` while one device exceeds its share of them.
    pub fn threads_allowed(&self) -> usize {
        let Some(over) = self.over_share else { return self.threads_max };
        let reserved = self.threads_max - self.share();
        self.threads_max.max(self.total(over, |lane| lane.busy).saturating_add(reserved))
    }

    /// Admits one more task of this device, or not: then the error is the number of waiting tasks.
    pub fn admit(&self, device: Device) -> Result<(), usize> {
        let load = self.running + self.waiting;
        if load < self.threads_max {
            return Ok(());
        }
        let own_load = self.lane(device).map_or(0, Lane::load);
        let room = self.threads_max.saturating_add(self.queue_max);
        let admitted = if own_load < self.half() {
            let over = || self.over_half.filter(|over| over.number != device.number);
            let others = || over().map(|over| load - self.total(over, Lane::load));
            load < room || others().is_some_and(|others| others < room - self.half())
        } else {
            load < room && self.total(device, |lane| lane.waiting) == self.waiting
        };
        if admitted { Ok(()) } else { Err(load - self.threads_max) }
    }

    /// Appends a job. One that does not count takes no place and needs no admission.
    pub fn push(&mut self, device: Device, job: J, counts: bool) {
        let lane = self.lanes.entry(device).or_default();
        if lane.jobs.is_empty() {
            self.turns.push_back(device);
        }
        lane.jobs.push_back(job);
        self.jobs += 1;
        if counts {
            lane.waiting += 1;
            self.waiting += 1;
            self.note_load(device);
        }
    }

    /// Notes that a waiting job does not count any more.
    pub fn discount(&mut self, device: Device) {
        let lane = self.lanes.get_mut(&device).expect("a lane with a job that waits");
        lane.waiting -= 1;
        self.waiting -= 1;
        self.note_load(device);
    }

    /// True if a thread would find a job that may run now.
    pub fn has_startable(&self) -> bool {
        if self.busy < self.threads_max {
            // Two device queues at their share use all threads; so one of those that wait is below it.
            return !self.turns.is_empty();
        }
        let Some(over) = self.over_share else { return false };
        let reserved = self.threads_max - self.share();
        let others_wait = || self.turns.iter().take(Queue::ALL.len() + 1).any(|&device| !self.is_over_share(device));
        self.busy - self.total(over, |lane| lane.busy) < reserved && others_wait()
    }

    /// Takes the next job for a free thread. `counts` tells whether it still counts.
    pub fn take(&mut self, counts: impl FnOnce(&J) -> bool) -> Option<Taken<J>> {
        if !self.has_startable() {
            return None;
        }
        // At most three queues can be at their share; the lending device has four. They are skipped.
        let lends = self.busy >= self.threads_max;
        let device = (0..self.turns.len()).find_map(|_| {
            let device = self.turns.pop_front()?;
            let is_alone = self.turns.is_empty() && !lends;
            let has_share = self.lane(device).is_some_and(|lane| lane.busy >= self.share());
            if has_share && !is_alone || lends && self.is_over_share(device) {
                self.turns.push_back(device);
                return None;
            }
            Some(device)
        })?;
        let lane = self.lanes.get_mut(&device).expect("a device with jobs has a lane");
        let job = lane.jobs.pop_front().expect("a device that has its turn has a job");
        if !lane.jobs.is_empty() {
            self.turns.push_back(device);
        }
        let counts = counts(&job);
        lane.busy += 1;
        lane.waiting -= usize::from(counts);
        lane.running += usize::from(counts);
        self.jobs -= 1;
        self.busy += 1;
        self.waiting -= usize::from(counts);
        self.running += usize::from(counts);
        self.note_busy(device);
        Some(Taken { job, device, counts })
    }

    /// Notes that a thread has finished a job.
    pub fn finish(&mut self, device: Device, counts: bool) {
        let lane = self.lanes.get_mut(&device).expect("a device with busy threads has a lane");
        lane.busy -= 1;
        lane.running -= usize::from(counts);
        self.busy -= 1;
        self.running -= usize::from(counts);
        self.note_busy(device);
        self.note_load(device);
        if self.lane(device).is_some_and(|lane| lane.busy == 0 && lane.jobs.is_empty()) {
            self.lanes.remove(&device);
        }
    }

    /// Takes all waiting jobs.
    pub fn drain(&mut self) -> Vec<J> {
        self.turns.clear();
        (self.jobs, self.waiting) = (0, 0);
        let mut jobs = Vec::new();
        for lane in self.lanes.values_mut() {
            lane.waiting = 0;
            jobs.extend(lane.jobs.drain(..));
        }
        self.lanes.retain(|_, lane| lane.busy > 0);
        self.resize(self.threads_max, self.queue_max);
        jobs
    }

    fn note_busy(&mut self, device: Device) {
        self.over_share = self.device_over_limit(self.over_share, device, |lane| lane.busy, self.share());
    }

    fn note_load(&mut self, device: Device) {
        self.over_half = self.device_over_limit(self.over_half, device, Lane::load, self.half());
    }

    /// The device that exceeds a limit, after `device` has changed; `known` is the one before.
    fn device_over_limit(
        &self,
        known: Option<Device>,
        device: Device,
        size: fn(&Lane<J>) -> usize,
        bound: usize,
    ) -> Option<Device> {
        let is_over = || self.total(device, size) > bound;
        match known {
            Some(other) if other.number != device.number => known,
            _ if is_over() => Some(device),
            Some(_) if self.was_resized => self.largest_over(size, bound),
            _ => None,
        }
    }
}
