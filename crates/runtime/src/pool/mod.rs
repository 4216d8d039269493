//! Thread pools: where everything goes that would block a loop.
//!
//! A pool belongs to the process and may be used from any loop. Threads start when work comes and no thread is idle,
//! and end when they have been idle for a while. The number of tasks that wait is bounded; more are refused, never
//! delayed at the door. A task may name the *device* that it will wait for: one that is slow or hangs keeps neither all
//! threads nor the whole queue from the others (`queue.rs`). A panic ends its task only.
//!
//! A task whose result nobody wants any more never begins (`task.rs`). It stops counting as one that waits at once, and
//! is dropped when a thread comes to it. Nothing here blocks the caller, except [`ThreadPool::stop`] and
//! [`stop_pools`].

mod queue;
mod registry;
mod simulated;
mod task;

use std::cell::Cell;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use gale_base::histogram::{Histogram, Snapshot};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::environment::Environment;
use crate::executor::panics;
use crate::simulation::World;

use queue::{FairQueue, Taken};
use task::{Ended, Job, Outcome, QueueEntry, Standing, Task};

pub use registry::{default_pool, named_pool, pools, stop_pools};
pub(crate) use simulated::{SimulatedPools, SimulatedThread};
pub use task::{PoolTask, take_pool_wait};

/// How long a thread without work stays. Starting one takes some microseconds, so a thread that is needed only every
/// ten seconds costs nothing that can be measured; and what a burst has started (26 KiB for each thread, of user and
/// kernel) is not kept much longer than the burst lasts.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Tasks that were given up and wait to be dropped, beyond the bound of the queue. They are gone when a thread comes to
/// them; where every thread hangs, further ones keep their place in the queue instead, so that clients that come and
/// leave cannot fill the memory.
const ABANDONED_MAX: usize = 4096;

/// A pool of threads. Clones are the same pool. When the last one is dropped, what waits is still done, and then the
/// threads end; nobody waits for that.
#[derive(Clone)]
pub struct ThreadPool {
    handle: Arc<Handle>,
}

/// What a task will wait for: within a pool, tasks that name the same device come one after the other, and no device
/// keeps the pool from the others. It is a number that is compared and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Device {
    number: u64,
    line: Line,
}

/// The lines in which tasks of one device stand. Each has its turn and its half as if it were a device, but when the
/// device hangs they all do: so the reserve for other devices is counted for all of them together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Line {
    Own,
    Looks,
    Accesses,
    Writes,
}

impl Line {
    const ALL: [Line; 4] = [Line::Own, Line::Looks, Line::Accesses, Line::Writes];
}

impl Device {
    /// None in particular: computing, or a library that tells nothing. All such tasks together are treated as one
    /// device.
    pub const NONE: Device = Device::number(0);

    /// The device that a file lies on: `st_dev` of stat(2), [`crate::FileMetadata::device`].
    pub const fn number(number: u64) -> Device {
        Device { number, line: Line::Own }
    }

    /// The line of those that look what is in memory, and wait only when the device hangs.
    pub(crate) const fn looks(self) -> Device {
        Device { line: Line::Looks, ..self }
    }

    /// The line of those that do that and write a time of access, for which the file system may wait.
    pub(crate) const fn accesses(self) -> Device {
        Device { line: Line::Accesses, ..self }
    }

    /// The line of writes and of changes of names: they wait when the device has too much to write, and reads then do
    /// not.
    pub const fn writes(self) -> Device {
        Device { line: Line::Writes, ..self }
    }

    /// The same device, in each of its lines.
    fn lines(self) -> impl Iterator<Item = Device> {
        Line::ALL.into_iter().map(move |line| Device { line, ..self })
    }

    /// Something else that may be slow on its own: a server, a customer. Never equal to a device of files.
    pub const fn key(key: u64) -> Device {
        // The kernel's device numbers have 32 bits.
        Device::number(key | 1 << 63)
    }

    /// Whether files lie on it.
    fn is_of_files(self) -> bool {
        self != Device { line: self.line, ..Device::NONE } && self.number >> 63 == 0
    }
}

/// Why a task gave no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// The queue is full. The text is nginx's.
    Overflow {
        /// The pool's name.
        pool: Arc<str>,
        /// How many tasks wait.
        waiting: usize,
    },
    /// The task panicked; it was reported as every caught panic is.
    Panicked,
    /// The pool was stopped before the task began.
    Stopped,
    /// Not one thread could be started.
    NoThread(io::ErrorKind),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::Overflow { pool, waiting } => {
                write!(f, "thread pool \"{pool}\" queue overflow: {waiting} tasks waiting")
            }
            PoolError::Panicked => f.write_str("a task in a thread pool panicked"),
            PoolError::Stopped => f.write_str("the thread pool has stopped"),
            PoolError::NoThread(kind) => write!(f, "cannot start a thread: {kind}"),
        }
    }
}

impl std::error::Error for PoolError {}

impl From<PoolError> for io::Error {
    fn from(error: PoolError) -> Self {
        io::Error::other(error)
    }
}

/// What a pool is doing and has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolCounters {
    /// Threads that there are.
    pub threads: usize,
    /// Tasks being executed.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub waiting: usize,
    /// Tasks executed since the start, panics included.
    pub completed: u64,
    /// Of these, how many panicked.
    pub panicked: u64,
    /// Tasks that were given up before they began.
    pub cancelled: u64,
    /// Tasks refused because the queue was full.
    pub refused: u64,
    /// How often the system refused to start a thread.
    pub thread_failures: u64,
}

/// What a pool does for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolDevice {
    /// `st_dev` of stat(2).
    pub number: u64,
    /// Tasks being executed.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub waiting: usize,
}

/// A pool as the status page shows it.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// Its name. A pool that was replaced may still be there under the same name.
    pub name: Arc<str>,
    /// The limit of its threads.
    pub threads_max: usize,
    /// The limit of the tasks that wait.
    pub queue_max: usize,
    /// It takes no tasks any more and ends when those that it has are done.
    pub is_ending: bool,
    /// What it does.
    pub counters: PoolCounters,
    /// What it does for devices of files: each that something runs or waits for, once.
    pub devices: Vec<PoolDevice>,
    /// How long tasks have waited for a thread.
    pub wait_times: Snapshot,
    /// How long tasks have run.
    pub run_times: Snapshot,
}

impl ThreadPool {
    /// A pool of at most `threads` threads (at least 1) in which at most `queue_max` tasks wait. With 0 no task ever
    /// waits: as many run as there are threads. Starts no thread yet.
    pub fn new(name: &str, threads: usize, queue_max: usize) -> Self {
        Self::with_tuning(name, threads, queue_max, Tuning::default())
    }

    fn with_tuning(name: &str, threads: usize, queue_max: usize, tuning: Tuning) -> Self {
        panics::install();
        let shared = Shared::new(name.into(), threads, queue_max, tuning);
        registry::enter(&shared);
        ThreadPool { handle: Arc::new(Handle { shared }) }
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.handle.shared.name
    }

    /// Tells pools apart as long as they exist.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.handle) as usize
    }

    /// Has `task` executed by a thread of the pool. It is queued now, not when the result is first waited for. Dropping
    /// the result cancels a task that has not begun; one that has is executed to its end.
    pub fn run<T, F>(&self, task: F) -> PoolTask<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.run_for(Device::NONE, task)
    }

    /// As [`ThreadPool::run`], for a task that will wait for this device.
    pub fn run_for<T, F>(&self, device: Device, task: F) -> PoolTask<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.in_this_world(|shared| {
            let task = Arc::new(Task::new(shared, device, task));
            match shared.submit(device, Arc::clone(&task) as Arc<dyn Job>) {
                Ok(()) => PoolTask::of(task as Arc<dyn Outcome<T>>),
                Err(error) => PoolTask::refused(error),
            }
        })
    }

    /// Has `task` executed although nobody waits for it. Errors: as those of a result; the task has been dropped then.
    pub fn detach(&self, device: Device, task: impl FnOnce() + Send + 'static) -> Result<(), PoolError> {
        self.in_this_world(|shared| {
            shared.submit(device, Arc::new(Task::detached(shared, device, Standing::Counts, task)))
        })
    }

    /// Has `value` dropped by a thread of the pool: a file whose closing may wait, a large structure. This is never
    /// refused and takes no place in the queue, so the caller must have a bound for it (that of open files, for
    /// example). Where there are no threads at all it is dropped here.
    pub fn dispose(&self, device: Device, value: impl Send + 'static) {
        self.in_this_world(|shared| shared.dispose(device, value));
    }

    /// Calls `f` with what does the work: this pool, or what stands for it on a simulated loop.
    fn in_this_world<R>(&self, f: impl FnOnce(&Arc<Shared>) -> R) -> R {
        match World::current() {
            None => f(&self.handle.shared),
            Some(world) => f(&world.pools.stand_in(&self.handle.shared)),
        }
    }

    /// Changes the limits. Where there are more threads or tasks now than these allow, nothing new begins until they
    /// are fewer; nothing is broken off.
    pub fn resize(&self, threads: usize, queue_max: usize) {
        let shared = &self.handle.shared;
        let mut state = shared.state.lock();
        state.queue.resize(threads, queue_max);
        let surplus = if state.threads > state.queue.threads_allowed() { state.take_idle() } else { Vec::new() };
        let call = state.call_thread();
        drop(state);
        wake_all(surplus);
        // Tasks that wait find out themselves when there is no thread.
        let _ = shared.answer(call);
    }

    /// The counters now.
    pub fn counters(&self) -> PoolCounters {
        self.handle.shared.state.lock().counters()
    }

    /// Limits, counters and times.
    pub fn status(&self) -> PoolStatus {
        self.handle.shared.status()
    }

    /// Refuses new tasks and waits at most `wait` for those that there are; then drops those that have not begun (their
    /// results are [`PoolError::Stopped`]). True if all threads have ended. Blocks: not for a loop.
    pub fn stop(&self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        self.handle.shared.begin_end();
        self.handle.shared.end(deadline)
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadPool({:?}, {:?})", self.name(), self.counters())
    }
}

/// The last one ends the pool.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.begin_end();
    }
}

/// What only tests change.
struct Tuning {
    idle_time: Duration,
    /// Of new threads; 0 = what is usual.
    stack_bytes: AtomicUsize,
    /// Its threads are events of a simulated world.
    is_simulated: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { idle_time: IDLE_TIME, stack_bytes: AtomicUsize::new(0), is_simulated: false }
    }
}

struct Shared {
    name: Arc<str>,
    tuning: Tuning,
    state: Mutex<State>,
    ended: Condvar,
    wait_times: Histogram,
    run_times: Histogram,
}

struct State {
    queue: FairQueue<Arc<dyn Job>>,
    threads: usize,
    /// Threads that have been started or woken for a task and have not looked yet.
    coming: usize,
    /// Those that rest; the last one is woken first, so that those that are not needed come to their end.
    idle: Vec<Arc<Condvar>>,
    /// Tasks in the queue that have stopped counting.
    abandoned: usize,
    completed: u64,
    panicked: u64,
    cancelled: u64,
    refused: u64,
    thread_failures: u64,
    is_ending: bool,
}

/// What a change of the state asks for, to be done without the lock.
enum Call {
    Nobody,
    Wake(Arc<Condvar>),
    /// It has been counted already.
    Start,
}

impl State {
    /// Who is to come when there may be something that can run.
    fn call_thread(&mut self) -> Call {
        if self.queue.jobs() <= self.coming || !self.queue.has_startable() {
            return Call::Nobody;
        }
        if let Some(signal) = self.idle.pop() {
            self.coming += 1;
            return Call::Wake(signal);
        }
        if self.threads >= self.queue.threads_allowed() {
            return Call::Nobody;
        }
        self.coming += 1;
        self.threads += 1;
        Call::Start
    }

    /// Calls all that rest.
    fn take_idle(&mut self) -> Vec<Arc<Condvar>> {
        self.coming += self.idle.len();
        std::mem::take(&mut self.idle)
    }

    fn take(&mut self) -> Option<Taken<Arc<dyn Job>>> {
        let abandoned = &mut self.abandoned;
        self.queue.take(|job| {
            let standing = job.entry().standing();
            job.entry().set(Standing::Gone);
            *abandoned -= usize::from(standing == Standing::Abandoned);
            standing == Standing::Counts
        })
    }

    fn counters(&self) -> PoolCounters {
        PoolCounters {
            threads: self.threads,
            running: self.queue.running(),
            waiting: self.queue.waiting(),
            completed: self.completed,
            panicked: self.panicked,
            cancelled: self.cancelled,
            refused: self.refused,
            thread_failures: self.thread_failures,
        }
    }
}

fn wake_all(signals: Vec<Arc<Condvar>>) {
    for signal in signals {
        signal.notify_one();
    }
}

impl Shared {
    fn new(name: Arc<str>, threads: usize, queue_max: usize, tuning: Tuning) -> Arc<Self> {
        Arc::new(Shared {
            name,
            tuning,
            state: Mutex::new(State {
                queue: FairQueue::new(threads, queue_max),
                threads: 0,
                coming: 0,
                idle: Vec::new(),
                abandoned: 0,
                completed: 0,
                panicked: 0,
                cancelled: 0,
                refused: 0,
                thread_failures: 0,
                is_ending: false,
            }),
            ended: Condvar::new(),
            wait_times: Histogram::new(),
            run_times: Histogram::new(),
        })
    }

    fn submit(self: &Arc<Self>, device: Device, job: Arc<dyn Job>) -> Result<(), PoolError> {
        let counts = job.entry().standing() == Standing::Counts;
        let mut state = self.state.lock();
        // What only clears away is taken as long as there is a thread for it.
        if state.is_ending && (counts || state.threads == 0) {
            return Err(PoolError::Stopped);
        }
        if counts && self.tuning.is_simulated && World::current().is_some_and(|world| world.refuses_task()) {
            state.refused += 1;
            return Err(PoolError::Overflow { pool: Arc::clone(&self.name), waiting: state.queue.waiting() });
        }
        if counts && let Err(waiting) = state.queue.admit(device) {
            state.refused += 1;
            return Err(PoolError::Overflow { pool: Arc::clone(&self.name), waiting });
        }
        state.queue.push(device, job, counts);
        let call = state.call_thread();
        drop(state);
        self.answer(call)
    }

    fn dispose(self: &Arc<Self>, device: Device, value: impl Send + 'static) {
        let task = Task::detached(self, device, Standing::Clears, move || drop(value));
        // Refused, the task has been dropped, and the value with it.
        let _ = self.submit(device, Arc::new(task));
    }

    /// Nobody waits for this task any more. It stays where it is, for a thread to drop.
    fn discount(&self, device: Device, entry: &QueueEntry) {
        let mut state = self.state.lock();
        if entry.standing() == Standing::Counts && state.abandoned < ABANDONED_MAX {
            entry.set(Standing::Abandoned);
            state.abandoned += 1;
            state.queue.discount(device);
        }
    }

    fn answer(self: &Arc<Self>, call: Call) -> Result<(), PoolError> {
        match call {
            Call::Nobody => Ok(()),
            Call::Wake(signal) => {
                signal.notify_one();
                Ok(())
            }
            Call::Start => self.start_thread(),
        }
    }

    fn start_thread(self: &Arc<Self>) -> Result<(), PoolError> {
        if self.tuning.is_simulated {
            // Without a world the loop has ended, and what waits is dropped with it.
            if let Some(world) = World::current() {
                world.plan_thread(SimulatedThread::new(self));
            }
            return Ok(());
        }
        let shared = Arc::clone(self);
        // A NUL cannot be in a thread's name, but the configuration may have put one in the pool's.
        let name = format!("pool {}", self.name).replace('\0', "");
        let mut builder = std::thread::Builder::new().name(name);
        let stack_bytes = self.tuning.stack_bytes.load(Relaxed);
        if stack_bytes > 0 {
            builder = builder.stack_size(stack_bytes);
        }
        let Err(error) = builder.spawn(move || {
            crate::affinity::leave_processors();
            shared.work();
        }) else {
            return Ok(());
        };
        let mut state = self.state.lock();
        state.threads -= 1;
        state.coming -= 1;
        state.thread_failures += 1;
        if state.threads > 0 {
            // Those that run will come to it.
            return Ok(());
        }
        let jobs = state.drain();
        drop(state);
        let error = PoolError::NoThread(error.kind());
        jobs.iter().for_each(|job| job.refuse(error.clone()));
        Err(error)
    }

    /// The life of one thread.
    fn work(self: &Arc<Self>) {
        IS_OF_A_POOL.set(true);
        let signal = Arc::new(Condvar::new());
        let mut state = self.state.lock();
        state.coming -= 1;
        loop {
            if let Some(taken) = state.take() {
                // There may be work for another one: it need not be whoever submitted it who starts the threads.
                let call = state.call_thread();
                drop(state);
                // Refused: there is one less, and this one runs.
                let _ = self.answer(call);
                self.execute(&taken);
                state = self.state.lock();
            } else if state.must_end_thread() || !self.rest(&mut state, &signal) {
                break;
            }
        }
        state.threads -= 1;
        let others = if state.is_ending { state.take_idle() } else { Vec::new() };
        drop(state);
        wake_all(others);
        self.ended.notify_all();
    }

    fn execute(&self, taken: &Taken<Arc<dyn Job>>) {
        let begun = Instant::now();
        let mut freed = |ended: Ended| {
            let ran = begun.elapsed();
            if taken.counts && ended != Ended::Cancelled {
                self.wait_times.record(begun - taken.job.entry().submitted);
                self.run_times.record(ran);
            }
            let mut state = self.state.lock();
            state.queue.finish(taken.device, taken.counts);
            state.cancelled += u64::from(ended == Ended::Cancelled);
            state.completed += u64::from(taken.counts && ended != Ended::Cancelled);
            state.panicked += u64::from(ended == Ended::Panicked);
        };
        taken.job.execute(&mut freed);
    }

    /// Waits to be called; false when that has lasted too long.
    fn rest(&self, state: &mut MutexGuard<'_, State>, signal: &Arc<Condvar>) -> bool {
        let deadline = Instant::now() + self.tuning.idle_time;
        state.idle.push(Arc::clone(signal));
        loop {
            let timed_out = signal.wait_until(state, deadline).timed_out();
            let Some(index) = state.idle.iter().rposition(|resting| Arc::ptr_eq(resting, signal)) else {
                state.coming -= 1;
                return true;
            };
            if timed_out {
                state.idle.remove(index);
                return false;
            }
        }
    }

    /// Takes no tasks any more; what waits is done first.
    fn begin_end(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        let idle = state.take_idle();
        drop(state);
        wake_all(idle);
    }

    /// Waits until the threads have ended, at most until the deadline, and then drops what has not begun.
    fn end(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while state.threads > 0 {
            if self.ended.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        let have_ended = state.threads == 0;
        let jobs = state.drain();
        drop(state);
        jobs.iter().for_each(|job| job.refuse(PoolError::Stopped));
        have_ended
    }

    fn status(&self) -> PoolStatus {
        let state = self.state.lock();
        let (threads_max, queue_max) = (state.queue.threads_max(), state.queue.queue_max());
        let (is_ending, counters) = (state.is_ending, state.counters());
        let loads: Vec<_> = state.queue.device_loads().collect();
        drop(state);
        let mut devices: Vec<PoolDevice> = Vec::new();
        for (number, running, waiting) in loads {
            match devices.iter_mut().find(|device| device.number == number) {
                Some(device) => (device.running, device.waiting) = (device.running + running, device.waiting + waiting),
                None => devices.push(PoolDevice { number, running, waiting }),
            }
        }
        PoolStatus {
            name: Arc::clone(&self.name),
            threads_max,
            queue_max,
            is_ending,
            counters,
            devices,
            wait_times: self.wait_times.snapshot(),
            run_times: self.run_times.snapshot(),
        }
    }
}

impl State {
    fn must_end_thread(&self) -> bool {
        (self.is_ending && self.queue.jobs() == 0) || self.threads > self.queue.threads_allowed()
    }

    /// Takes everything that has not begun.
    fn drain(&mut self) -> Vec<Arc<dyn Job>> {
        let jobs = self.queue.drain();
        jobs.iter().for_each(|job| job.entry().set(Standing::Gone));
        self.abandoned = 0;
        jobs
    }
}

thread_local! {
    static IS_OF_A_POOL: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread runs a loop, so that it must not block.
pub(crate) fn on_a_loop() -> bool {
    Environment::try_with(|_| ()).is_some()
}

/// Whether the calling thread is one of a pool, so that it may block.
pub(crate) fn on_a_pool_thread() -> bool {
    // Asked while the thread ends, it is one that runs destructors only.
    IS_OF_A_POOL.try_with(Cell::get).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Longer than any machine needs; only a failed test waits so long.
    const DEADLINE: Duration = Duration::from_secs(60);

    impl Shared {
        fn wait_until(&self, is_true: impl Fn(&State) -> bool) {
            let deadline = Instant::now() + DEADLINE;
            let mut state = self.state.lock();
            while !is_true(&state) {
                assert!(!self.ended.wait_until(&mut state, deadline).timed_out(), "waited in vain");
            }
        }
    }

    #[test]
    fn idle_threads_end_and_new_ones_come() {
        let tuning = Tuning { idle_time: Duration::from_millis(1), ..Tuning::default() };
        let pool = ThreadPool::with_tuning("test", 3, 10, tuning);
        for _ in 0..3 {
            let (sender, receiver) = mpsc::channel();
            for _ in 0..3 {
                let sender = sender.clone();
                pool.detach(Device::NONE, move || sender.send(()).unwrap()).unwrap();
            }
            drop(sender);
            assert_eq!(receiver.iter().count(), 3);
            pool.handle.shared.wait_until(|state| state.threads == 0);
            assert!(pool.handle.shared.state.lock().idle.is_empty());
        }
    }

    #[test]
    fn the_thread_that_rested_last_is_woken_first() {
        let pool = ThreadPool::new("test", 8, 10);
        let (sender, receiver) = mpsc::channel();
        // Two at the same time, then one after the other.
        let both = Arc::new(std::sync::Barrier::new(2));
        for _ in 0..2 {
            let (sender, both) = (sender.clone(), Arc::clone(&both));
            pool.detach(Device::NONE, move || drop((both.wait(), sender.send(std::thread::current().id())))).unwrap();
        }
        let threads = [receiver.recv().unwrap(), receiver.recv().unwrap()];
        assert_ne!(threads[0], threads[1]);
        let shared = Arc::clone(&pool.handle.shared);
        let deadline = Instant::now() + DEADLINE;
        let mut used = Vec::new();
        for _ in 0..10 {
            while shared.state.lock().idle.len() < 2 {
                assert!(Instant::now() < deadline, "the threads do not come to rest");
                std::thread::yield_now();
            }
            let sender = sender.clone();
            pool.detach(Device::NONE, move || sender.send(std::thread::current().id()).unwrap()).unwrap();
            used.push(receiver.recv().unwrap());
        }
        assert_eq!(used, [used[0]; 10]);
    }

    /// No thread can have a stack of this size: there are not as many addresses.
    const STACK_TOO_LARGE: usize = 1 << 60;

    #[test]
    fn without_a_single_thread_tasks_are_refused_until_there_is_one() {
        let pool = ThreadPool::new("test", 3, 10);
        let tuning = &pool.handle.shared.tuning;
        tuning.stack_bytes.store(STACK_TOO_LARGE, Relaxed);
        for failures in 1..3 {
            assert!(matches!(pool.detach(Device::NONE, || ()), Err(PoolError::NoThread(_))));
            let counters = pool.counters();
            assert_eq!((counters.threads, counters.waiting, counters.thread_failures), (0, 0, failures));
        }
        tuning.stack_bytes.store(0, Relaxed);
        let (sender, receiver) = mpsc::channel();
        pool.detach(Device::NONE, move || sender.send("done").unwrap()).unwrap();
        assert_eq!(receiver.recv(), Ok("done"));
    }

    #[test]
    fn a_thread_that_cannot_be_started_is_no_failure_while_another_runs() {
        let pool = ThreadPool::new("test", 3, 10);
        let (sender, receiver) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let begun = sender.clone();
        pool.detach(Device::NONE, move || {
            begun.send(0).unwrap();
            let _ = released.recv();
        })
        .unwrap();
        assert_eq!(receiver.recv(), Ok(0));
        pool.handle.shared.tuning.stack_bytes.store(STACK_TOO_LARGE, Relaxed);
        for number in 1..4 {
            let sender = sender.clone();
            pool.detach(Device::NONE, move || sender.send(number).unwrap()).unwrap();
        }
        let counters = pool.counters();
        assert_eq!((counters.threads, counters.waiting, counters.thread_failures), (1, 3, 3));
        drop(release);
        assert_eq!(receiver.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_smaller_pool_ends_the_threads_that_rest_and_a_larger_one_starts_some() {
        let pool = ThreadPool::new("test", 4, 100);
        let shared = Arc::clone(&pool.handle.shared);
        let occupy = |count: usize| {
            let (release, released) = mpsc::channel::<()>();
            let released = Arc::new(Mutex::new(released));
            let (begun, has_begun) = mpsc::channel();
            for _ in 0..count {
                let (released, begun) = (Arc::clone(&released), begun.clone());
                let task = move || {
                    begun.send(()).unwrap();
                    let _ = released.lock().recv();
                };
                pool.detach(Device::NONE, task).unwrap();
            }
            (release, has_begun)
        };
        let (release, has_begun) = occupy(4);
        (0..4).for_each(|_| has_begun.recv().unwrap());
        pool.resize(2, 100);
        drop(release);
        shared.wait_until(|state| state.threads == 2);

        let (release, has_begun) = occupy(5);
        (0..2).for_each(|_| has_begun.recv().unwrap());
        assert_eq!(pool.counters().waiting, 3);
        pool.resize(5, 100);
        (0..3).for_each(|_| has_begun.recv().unwrap());
        assert_eq!((pool.counters().threads, pool.counters().waiting), (5, 0));
        drop(release);
    }

    #[test]
    fn what_is_given_up_stops_counting_up_to_a_bound() {
        let pool = ThreadPool::new("test", 1, usize::MAX);
        let (release, released) = mpsc::channel::<()>();
        let running = pool.run(move || released.recv());
        let waiting: Vec<_> = (0..ABANDONED_MAX + 2).map(|_| pool.run(|| ())).collect();
        assert!(pool.counters().running + pool.counters().waiting == waiting.len() + 1);
        drop(waiting);
        let shared = &pool.handle.shared;
        assert_eq!(shared.state.lock().abandoned, ABANDONED_MAX);
        assert_eq!(pool.counters().running + pool.counters().waiting, 3);
        drop(release);
        shared.begin_end();
        shared.wait_until(|state| state.threads == 0);
        drop(running);
        let counters = pool.counters();
        assert_eq!((counters.completed, counters.cancelled), (1, ABANDONED_MAX as u64 + 2));
        assert_eq!(shared.state.lock().abandoned, 0);
    }
}
