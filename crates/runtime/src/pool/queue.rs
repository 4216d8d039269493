//! Which task of a pool runs next, and which is refused: first come, first served on each device, devices in turn.
//!
//! A data structure only: it knows no threads, no locks and no clock, and takes the pool's word for what runs.
//!
//! One device may hold all threads and the whole queue as long as nobody else wants them. While others wait it gets no
//! more than half of each (rounded up). What it already holds cannot be taken from it, least of all when it hangs; so
//! the half that belongs to the others, if it is taken, is lent by a *reserve* of the same size:
//!
//! ```text
//!   threads=4     A alone          B comes            A answers again
//!   threads       A A A A          A A A A            A A B B
//!   reserve       . .              B B                . .
//! ```
//!
//! A device's tasks may stand in several queues (`Device::queues`), which are devices of their own here, but for the
//! reserve: those of one device hang together, and what they have taken of the others' half is lent for all of them.
//!
//! Invariants: at most `threads` tasks run, and with the reserve half as many more; the devices other than the largest
//! always find half of the threads and of the queue; a thread never rests while a task waits that may run. With a
//! single thread there is no half to lend, and no reserve: tasks run strictly one after the other.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};

use super::device::{Device, Queue};

/// The tasks of one device.
struct Lane<J> {
    jobs: VecDeque<J>,
    /// Of `jobs`, those that count: not those that only clear away.
    waiting: usize,
    /// Tasks that run and count.
    running: usize,
    /// Threads that are busy for this device, whatever with.
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
    /// Those that have jobs or busy threads.
    lanes: HashMap<Device, Lane<J>>,
    /// The devices that have jobs, each once, the next one first.
    turns: VecDeque<Device>,
    jobs: usize,
    waiting: usize,
    running: usize,
    busy: usize,
    /// The device that has more than its share of the threads, with all its queues. There cannot be two, except after
    /// the pool was made smaller: then the other one is found when this one has no more than its share.
    over_share: Option<Device>,
    /// The same for threads and queue together.
    over_half: Option<Device>,
    /// Its limits have been changed.
    was_resized: bool,
}

/// A job that a thread is to take on.
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

    /// Changes the limits. What is there stays, also when it is more than they allow now.
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

    /// Jobs, whether they count or not.
    pub fn jobs(&self) -> usize {
        self.jobs
    }

    /// Tasks that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Tasks that run.
    pub fn running(&self) -> usize {
        self.running
    }

    /// What one device may have of the threads while others wait.
    fn share(&self) -> usize {
        self.threads_max.div_ceil(2)
    }

    /// What one device may have of threads and queue while others wait.
    fn half(&self) -> usize {
        self.share().saturating_add(self.queue_max.div_ceil(2))
    }

    /// For each queue of a device of files that something runs or waits for: its number, what runs, and what waits.
    pub fn device_loads(&self) -> impl Iterator<Item = (u64, usize, usize)> + '_ {
        let of_files = self.lanes.iter().filter(|(device, _)| device.is_of_files());
        of_files.map(|(device, lane)| (device.number, lane.running, lane.waiting))
    }

    fn lane(&self, device: Device) -> Option<&Lane<J>> {
        self.lanes.get(&device)
    }

    /// Of all queues of the device.
    fn total(&self, device: Device, size: impl Fn(&Lane<J>) -> usize) -> usize {
        device.queues().filter_map(|queue| self.lane(queue)).map(size).sum()
    }

    /// Whether this is the device that has more than its share of the threads.
    fn is_over_share(&self, device: Device) -> bool {
        self.over_share.is_some_and(|over| over.number == device.number)
    }

    /// How many threads there may be: more than `threads_max` while one device has more than its share of them.
    pub fn threads_allowed(&self) -> usize {
        let Some(over) = self.over_share else { return self.threads_max };
        let reserved = self.threads_max - self.share();
        self.threads_max.max(self.total(over, |lane| lane.busy).saturating_add(reserved))
    }

    /// Whether there is room for one more task of this device; if not, how many tasks wait.
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

    /// Appends a job. One that does not count takes nobody's place and was not asked for admission.
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

    /// A job that waits counts no more.
    pub fn discount(&mut self, device: Device) {
        let lane = self.lanes.get_mut(&device).expect("a lane with a job that waits");
        lane.waiting -= 1;
        self.waiting -= 1;
        self.note_load(device);
    }

    /// Whether a thread would find a job that may run now.
    pub fn has_startable(&self) -> bool {
        if self.busy < self.threads_max {
            // Two devices that have their share of the threads have all of them; so one of those that wait has not.
            return !self.turns.is_empty();
        }
        let Some(over) = self.over_share else { return false };
        let reserved = self.threads_max - self.share();
        let others_wait = || self.turns.iter().take(Queue::ALL.len() + 1).any(|&device| !self.is_over_share(device));
        self.busy - self.total(over, |lane| lane.busy) < reserved && others_wait()
    }

    /// The next job for a thread that is free. `counts` says of it whether it still does.
    pub fn take(&mut self, counts: impl FnOnce(&J) -> bool) -> Option<Taken<J>> {
        if !self.has_startable() {
            return None;
        }
        // At most three queues can have their share of the threads, and the device that lends has four; they are passed
        // over.
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

    /// A thread is done with what it took.
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

    /// Takes everything that waits.
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
        self.over_share = self.who_is_over(self.over_share, device, |lane| lane.busy, self.share());
    }

    fn note_load(&mut self, device: Device) {
        self.over_half = self.who_is_over(self.over_half, device, Lane::load, self.half());
    }

    /// The device that has more than this, when it was `known` before something of `device` changed.
    fn who_is_over(
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
