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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Device = Device::number(1);
    const B: Device = Device::number(2);
    const C: Device = Device::number(3);

    /// Pushes if there is room.
    fn submit(queue: &mut FairQueue<u32>, device: Device, number: u32) -> Result<(), usize> {
        queue.admit(device)?;
        queue.push(device, number, true);
        Ok(())
    }

    fn submit_all(queue: &mut FairQueue<u32>, device: Device, numbers: impl IntoIterator<Item = u32>) {
        numbers.into_iter().for_each(|number| submit(queue, device, number).expect("room"));
    }

    fn take(queue: &mut FairQueue<u32>) -> Option<u32> {
        queue.take(|_| true).map(|taken| taken.job)
    }

    /// What threads take when there is nothing else to do.
    fn take_all(queue: &mut FairQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| take(queue)).collect()
    }

    #[test]
    fn tasks_of_one_device_come_in_order_and_devices_in_turn() {
        let mut queue = FairQueue::new(100, 0);
        submit_all(&mut queue, A, [1, 2, 3, 4]);
        submit_all(&mut queue, B, [11, 12]);
        submit_all(&mut queue, C, [21]);
        assert_eq!(take_all(&mut queue), [1, 11, 21, 2, 12, 3, 4]);
    }

    #[test]
    fn alone_a_device_has_every_thread_and_the_whole_queue() {
        let mut queue = FairQueue::new(4, 3);
        submit_all(&mut queue, A, 0..7);
        assert_eq!(submit(&mut queue, A, 7), Err(3));
        assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
        queue.finish(A, true);
        assert_eq!(take_all(&mut queue), [4]);
    }

    #[test]
    fn while_others_wait_a_device_has_half_of_the_threads() {
        let mut queue = FairQueue::new(4, 100);
        submit_all(&mut queue, A, 0..6);
        submit_all(&mut queue, B, 10..16);
        assert_eq!(take_all(&mut queue), [0, 10, 1, 11]);
        // B hangs. What A leaves goes to A, although B waits as well.
        queue.finish(A, true);
        queue.finish(A, true);
        assert_eq!(take_all(&mut queue), [2, 3]);
    }

    #[test]
    fn a_device_that_hangs_with_every_thread_leaves_a_reserve_of_half() {
        let mut queue = FairQueue::new(4, 100);
        submit_all(&mut queue, A, 0..10);
        assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
        assert_eq!(queue.threads_allowed(), 6);
        submit_all(&mut queue, B, 10..20);
        assert_eq!(take_all(&mut queue), [10, 11]);
        queue.finish(B, true);
        assert_eq!(take_all(&mut queue), [12]);
        submit_all(&mut queue, C, [21]);
        queue.finish(B, true);
        assert_eq!(take_all(&mut queue), [13]);
        queue.finish(B, true);
        assert_eq!(take_all(&mut queue), [21], "the others take turns in the reserve");
        // A answers: its debt is paid before anything of it begins.
        queue.finish(A, true);
        assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![], 5));
        queue.finish(A, true);
        assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![], 4));
        queue.finish(A, true);
        assert_eq!(take_all(&mut queue), [4]);
    }

    #[test]
    fn a_device_that_hangs_in_all_its_lines_leaves_the_reserve_to_others() {
        let mut queue = FairQueue::new(4, 0);
        submit_all(&mut queue, A, [0, 1]);
        submit_all(&mut queue, A.looks(), [2]);
        submit_all(&mut queue, A.writes(), [3]);
        assert_eq!(take_all(&mut queue), [0, 2, 3, 1]);
        assert_eq!((submit(&mut queue, A, 4), submit(&mut queue, A.looks(), 4)), (Err(0), Err(0)));
        submit_all(&mut queue, B, [10, 11]);
        assert_eq!(submit(&mut queue, B, 12), Err(2));
        assert_eq!((queue.threads_allowed(), take_all(&mut queue)), (6, vec![10, 11]));
        // What waits of A gets nothing of the reserve.
        queue.push(A.looks(), 5, true);
        queue.finish(B, true);
        assert_eq!((take(&mut queue), queue.threads_allowed()), (None, 6));
        (0..2).for_each(|_| queue.finish(A, true));
        assert_eq!((take(&mut queue), queue.threads_allowed()), (Some(5), 5));
    }

    #[test]
    fn writes_that_hang_leave_half_of_the_threads_to_reads_of_the_device() {
        let mut queue = FairQueue::new(4, 100);
        submit_all(&mut queue, A.writes(), 0..6);
        submit_all(&mut queue, A, 10..16);
        assert_eq!(take_all(&mut queue), [0, 10, 1, 11]);
        queue.finish(A, true);
        assert_eq!(take_all(&mut queue), [12]);
    }

    #[test]
    fn a_queue_that_one_device_has_filled_has_room_for_others() {
        let mut queue = FairQueue::new(2, 4);
        submit_all(&mut queue, A, 0..6);
        assert_eq!(take_all(&mut queue), [0, 1]);
        assert_eq!(submit(&mut queue, A, 6), Err(4));
        submit_all(&mut queue, B, [10, 11, 12]);
        assert_eq!(submit(&mut queue, B, 13), Err(7));
        assert_eq!(submit(&mut queue, C, 20), Err(7));
    }

    #[test]
    fn while_others_wait_a_device_has_half_of_the_queue() {
        let mut queue = FairQueue::new(2, 4);
        submit_all(&mut queue, A, [0, 1]);
        submit_all(&mut queue, B, [10]);
        submit_all(&mut queue, A, [2]);
        assert_eq!(submit(&mut queue, A, 3), Err(2));
        submit_all(&mut queue, B, [11, 12]);
        assert_eq!(submit(&mut queue, B, 13), Err(4));
    }

    #[test]
    fn without_a_queue_there_is_room_for_as_many_as_can_run() {
        let mut queue = FairQueue::new(4, 0);
        submit_all(&mut queue, A, 0..4);
        assert_eq!(submit(&mut queue, A, 4), Err(0));
        assert_eq!(take_all(&mut queue), [0, 1, 2, 3]);
        submit_all(&mut queue, B, [10, 11]);
        assert_eq!(submit(&mut queue, B, 12), Err(2));
        assert_eq!(take_all(&mut queue), [10, 11]);
    }

    #[test]
    fn what_runs_and_waits_is_told_of_devices_of_files() {
        let mut queue = FairQueue::new(1, 100);
        submit_all(&mut queue, A, 0..3);
        submit_all(&mut queue, A.looks(), [3]);
        submit_all(&mut queue, Device::NONE, [4]);
        submit_all(&mut queue, Device::key(1), [5]);
        assert_eq!(take_all(&mut queue), [0]);
        let mut loads: Vec<_> = queue.device_loads().collect();
        loads.sort_unstable();
        assert_eq!(loads, [(1, 0, 1), (1, 1, 2)]);
    }

    #[test]
    fn a_single_thread_does_one_thing_at_a_time() {
        let mut queue = FairQueue::new(1, 2);
        submit_all(&mut queue, A, 0..2);
        submit_all(&mut queue, B, [10]);
        assert_eq!((take_all(&mut queue), queue.threads_allowed()), (vec![0], 1));
        queue.finish(A, true);
        assert_eq!(take_all(&mut queue), [10]);
    }

    #[test]
    fn what_does_not_count_takes_no_room() {
        let mut queue = FairQueue::new(1, 1);
        submit_all(&mut queue, A, [0, 1]);
        queue.push(A, 2, false);
        assert_eq!((queue.jobs(), queue.waiting()), (3, 2));
        assert_eq!(submit(&mut queue, A, 3), Err(1));
        queue.discount(A);
        submit_all(&mut queue, A, [3]);
        let taken: Vec<(u32, bool)> = std::iter::from_fn(|| {
            let taken = queue.take(|&job| job == 0 || job == 3)?;
            queue.finish(taken.device, taken.counts);
            Some((taken.job, taken.counts))
        })
        .collect();
        assert_eq!(taken, [(0, true), (1, false), (2, false), (3, true)]);
        assert_eq!((queue.jobs(), queue.waiting(), queue.running(), queue.lanes.len()), (0, 0, 0, 0));
    }

    #[test]
    fn a_smaller_pool_still_lends_to_others_what_a_device_holds() {
        let mut queue = FairQueue::new(8, 8);
        submit_all(&mut queue, A, 0..8);
        assert_eq!(take_all(&mut queue).len(), 8);
        queue.resize(2, 8);
        submit_all(&mut queue, B, [10, 11]);
        assert_eq!(take_all(&mut queue), [10]);
        queue.resize(16, 8);
        assert_eq!(take_all(&mut queue), [11]);
    }

    #[test]
    fn a_smaller_pool_remembers_who_hangs_when_another_one_had_more_than_its_share_too() {
        for b_runs in 0..20 {
            let mut queue = FairQueue::new(64, 64);
            submit_all(&mut queue, A, 0..40);
            submit_all(&mut queue, B, 100..120);
            assert_eq!(take_all(&mut queue).len(), 60);
            queue.resize(16, 8);
            // B gets on, A does not.
            (0..20 - b_runs).for_each(|_| queue.finish(B, true));
            queue.push(C, 200, true);
            assert_eq!(take(&mut queue), (b_runs < 8).then_some(200), "{b_runs} of B run on");
            assert_eq!(queue.threads_allowed(), 48);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Submit(u64),
        Take,
        Finish(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..7u64).prop_map(Step::Submit),
            4 => Just(Step::Take),
            2 => any::<usize>().prop_map(Step::Finish),
        ];
        proptest::collection::vec(step, 1..200)
    }

    /// Four devices, one of which has four queues.
    fn queue_of(number: u64) -> Device {
        match number {
            4 => A.looks(),
            5 => A.accesses(),
            6 => A.writes(),
            number => Device::number(number),
        }
    }

    /// Whatever happens: the bounds hold, order within a device is kept, and no thread rests while something may run.
    fn check(threads: usize, length: usize, steps: Vec<Step>) {
        let mut queue = FairQueue::new(threads, length);
        let mut running: Vec<Device> = Vec::new();
        let mut last_taken: HashMap<Device, u32> = HashMap::new();
        for (number, step) in (1..).zip(steps) {
            match step {
                Step::Submit(device) => {
                    let _ = submit(&mut queue, queue_of(device), number);
                }
                Step::Take => {
                    let could = queue.has_startable();
                    let taken = queue.take(|_| true);
                    assert_eq!(taken.is_some(), could);
                    if let Some(Taken { job, device, .. }) = taken {
                        assert!(last_taken.insert(device, job).is_none_or(|last| last < job), "out of order");
                        running.push(device);
                    }
                }
                Step::Finish(index) if !running.is_empty() => {
                    let device = running.swap_remove(index % running.len());
                    queue.finish(device, true);
                }
                Step::Finish(_) => {}
            }
            assert_eq!(queue.running(), running.len());
            assert!(running.len() <= threads + threads / 2, "{} run of {threads}", running.len());
            assert!(running.len() <= queue.threads_allowed());
            assert!(queue.waiting() + running.len() <= threads + length + threads / 2 + length / 2);
            assert!(queue.busy >= threads || queue.waiting() == 0 || queue.has_startable(), "a thread rests");
            let jobs: Vec<usize> = queue.lanes.values().map(|lane| lane.jobs.len()).filter(|&jobs| jobs > 0).collect();
            assert_eq!((jobs.iter().sum(), jobs.len()), (queue.jobs(), queue.turns.len()));
        }
    }

    proptest! {
        #[test]
        fn bounds_and_order_hold(threads in 1..9usize, length in 0..9usize, steps in steps()) {
            check(threads, length, steps);
        }

        #[test]
        fn others_always_find_half(threads in 2..9usize, length in 0..9usize, steps in steps()) {
            let mut queue = FairQueue::new(threads, length);
            // One device does whatever it likes and never ends anything.
            for step in steps {
                match step {
                    Step::Submit(number) => {
                        let device = [A, A.looks(), A.accesses(), A.writes()][number as usize % 4];
                        let _ = submit(&mut queue, device, 0);
                    }
                    _ => drop(take(&mut queue)),
                }
            }
            let half = threads / 2;
            for number in 0..half as u32 {
                prop_assert_eq!(submit(&mut queue, B, number + 1), Ok(()));
            }
            let begun = take_all(&mut queue).into_iter().filter(|&number| number > 0).count();
            prop_assert_eq!(begun, half);
        }
    }
}
