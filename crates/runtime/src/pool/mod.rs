//! Thread pools, for all work that would block a loop.
//!
//! A pool belongs to the process and can be used from any loop. Threads start when there is work and no thread is idle,
//! and end when they have been idle for a while. The number of waiting tasks is bounded; further ones are refused,
//! never delayed. A task may name the *device* that it will wait for: one that is slow or hangs occupies neither all
//! threads nor the whole queue (`queue.rs`). A panic ends only its task.
//!
//! A task whose result was dropped never begins (`task.rs`). It stops counting as waiting at once, and a thread drops
//! it when it is its turn. Nothing here blocks the caller, except [`ThreadPool::stop`] and [`stop_pools`]; a loop
//! itself starts only the first thread of a pool (`starter.rs`).

mod device;
mod queue;
mod registry;
mod retries;
mod simulated;
mod starter;
mod status;
mod task;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use gale_base::histogram::Histogram;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::environment::Environment;
use crate::executor::panics;
use crate::simulation::World;

use queue::{FairQueue, Taken};
use task::{Ended, Job, Outcome, QueueEntry, Standing, Task};

pub use device::Device;
pub use registry::{default_pool, named_pool, pools, stop_pools};
pub(crate) use simulated::{SimulatedPools, SimulatedThread};
pub use status::{PoolCounters, PoolDevice, PoolError, PoolStatus};
pub use task::{PoolTask, take_pool_wait};

/// Time after which an idle thread ends. Starting one takes some microseconds, so a thread that is needed only every
/// ten seconds has no measurable cost; and the threads of a burst (26 KiB each, user and kernel memory) are not kept
/// much longer than the burst lasts.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Limit of abandoned tasks that wait to be dropped, beyond the limit of the queue. A thread drops them when it is
/// their turn. If every thread hangs, further ones keep their place in the queue instead, so that clients that come and
/// leave cannot fill the memory.
const ABANDONED_MAX: usize = 4096;

/// A pool of threads. Clones are the same pool. When the last one is dropped, waiting tasks are still done, and then
/// the threads end in the background.
#[derive(Clone)]
pub struct ThreadPool {
    handle: Arc<Handle>,
}

impl ThreadPool {
    /// A pool of at most `threads` threads (at least 1) and `queue_max` waiting tasks. With 0 no task ever waits: as
    /// many run as there are threads. Starts no thread yet.
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

    /// Identifies the pool as long as it exists.
    pub fn identity(&self) -> usize {
        Arc::as_ptr(&self.handle) as usize
    }

    /// Runs `task` on a thread of the pool. It is queued now, not when the result is first awaited. Dropping the result
    /// cancels a task that has not begun; one that has begun runs to its end.
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

    /// Runs `task` without a result. Errors: as those of a result; then the task was dropped.
    pub fn detach(&self, device: Device, task: impl FnOnce() + Send + 'static) -> Result<(), PoolError> {
        self.in_this_world(|shared| {
            shared.submit(device, Arc::new(Task::detached(shared, device, Standing::Counts, task)))
        })
    }

    /// Drops `value` on a thread of the pool: a file whose closing may wait, or a large structure. It is never refused
    /// and takes no place in the queue, so the caller must bound the number of values (as that of open files is). If no
    /// thread can be started it is dropped here.
    pub fn dispose(&self, device: Device, value: impl Send + 'static) {
        self.in_this_world(|shared| shared.dispose(device, value));
    }

    /// Calls `f` with this pool, or with its stand-in on a simulated loop.
    fn in_this_world<R>(&self, f: impl FnOnce(&Arc<Shared>) -> R) -> R {
        match World::current() {
            None => f(&self.handle.shared),
            Some(world) => f(&world.pools.stand_in(&self.handle.shared)),
        }
    }

    /// Changes the limits. If there are more threads or tasks than these allow, nothing new begins until there are
    /// fewer; nothing is cancelled.
    pub fn resize(&self, threads: usize, queue_max: usize) {
        let shared = &self.handle.shared;
        let mut state = shared.state.lock();
        state.queue.resize(threads, queue_max);
        let surplus = if state.threads > state.queue.threads_allowed() { state.take_idle() } else { Vec::new() };
        let call = state.call_thread();
        drop(state);
        wake_all(surplus);
        // If there is no thread, the waiting tasks fail on their own.
        let _ = shared.answer(call);
    }

    /// The current counters.
    pub fn counters(&self) -> PoolCounters {
        self.handle.shared.state.lock().counters()
    }

    /// Limits, counters and times.
    pub fn status(&self) -> PoolStatus {
        self.handle.shared.status()
    }

    /// Refuses new tasks and waits at most `wait` for the existing ones; then drops those that have not begun (their
    /// result is [`PoolError::Stopped`]). True if all threads have ended. Blocks: not for a loop.
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

/// Owned by all clones; dropping the last one ends the pool.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.begin_end();
    }
}

/// Parameters that only tests change.
struct Tuning {
    idle_time: Duration,
    /// Stack size of new threads; 0 = the default.
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
    /// Threads that were started or woken for a task and have not looked for it yet.
    coming: usize,
    /// Idle threads; the last one is woken first, so that surplus threads reach their idle time.
    idle: Vec<Arc<Condvar>>,
    /// Tasks in the queue that do not count any more.
    abandoned: usize,
    completed: u64,
    panicked: u64,
    cancelled: u64,
    refused: u64,
    thread_failures: u64,
    is_ending: bool,
}

/// An action that a change of the state demands, to be done without the lock.
enum Call {
    Nobody,
    Wake(Arc<Condvar>),
    /// Start a thread, which is counted already.
    Start {
        /// There is no other thread, so tasks are refused if it cannot be started.
        is_only: bool,
    },
}

impl State {
    /// The thread to call when there may be a task that can run.
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
        Call::Start { is_only: self.threads == 1 }
    }

    /// Takes all idle threads, to be woken.
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
        // Values to dispose of are accepted as long as there is a thread.
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
        // If refused, the task was dropped, and the value with it.
        let _ = self.submit(device, Arc::new(task));
    }

    /// Abandons a task whose result was dropped. It stays in the queue, for a thread to drop.
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
            Call::Start { is_only } => {
                let is_handed_over = !is_only && !self.tuning.is_simulated && on_a_loop();
                if is_handed_over && starter::start_thread_for(self) { Ok(()) } else { self.start_thread() }
            }
        }
    }

    fn start_thread(self: &Arc<Self>) -> Result<(), PoolError> {
        if self.tuning.is_simulated {
            // Without a world the loop has ended, and waiting tasks are dropped with it.
            if let Some(world) = World::current() {
                world.plan_thread(SimulatedThread::new(self));
            }
            return Ok(());
        }
        let shared = Arc::clone(self);
        // A thread's name cannot contain a NUL, but the configuration may have put one in the pool's.
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
            // The running threads will take the tasks.
            return Ok(());
        }
        let jobs = state.drain();
        drop(state);
        let error = PoolError::NoThread(error.kind());
        jobs.iter().for_each(|job| job.refuse(error.clone()));
        Err(error)
    }

    /// The body of a thread.
    fn work(self: &Arc<Self>) {
        IS_OF_A_POOL.set(true);
        starter::start();
        let signal = Arc::new(Condvar::new());
        let mut state = self.state.lock();
        state.coming -= 1;
        loop {
            if let Some(taken) = state.take() {
                // There may be work for another thread, which the submitter need not start.
                let call = state.call_thread();
                drop(state);
                // If that fails there is one thread less, but this one runs.
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

    /// Waits to be woken; false after the idle time.
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

    /// Refuses new tasks; waiting ones are still done.
    fn begin_end(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        let idle = state.take_idle();
        drop(state);
        wake_all(idle);
    }

    /// Waits until the threads have ended, at most until the deadline, and then drops tasks that have not begun.
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

    /// Takes all tasks that have not begun.
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

/// True if the calling thread runs a loop, so that it must not block.
pub(crate) fn on_a_loop() -> bool {
    Environment::try_with(|_| ()).is_some()
}

/// True if the calling thread belongs to a pool, so that it may block.
pub fn on_a_pool_thread() -> bool {
    // False while the thread ends, when only destructors run.
    IS_OF_A_POOL.try_with(Cell::get).unwrap_or(false)
}
