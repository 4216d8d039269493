//! Thread pools: where everything goes that would block a loop.
//!
//! A pool belongs to the process and may be used from any loop. Threads start when work comes and no thread is idle. The
//! number of tasks that wait is bounded; more are refused, never delayed at the door. A panic ends its task only.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use crate::environment::Environment;
use crate::inbox::Outside;
use crate::panics::{self, boundary};
use crate::simulation::World;

/// nginx's implicit pool: `thread_pool default threads=32 max_queue=65536`.
const DEFAULT_THREADS: usize = 32;
const DEFAULT_QUEUE_MAX: usize = 65536;

/// A named pool of threads. Clones are the same pool; it stops when the last one is dropped.
#[derive(Clone)]
pub struct ThreadPool {
    handle: Arc<Handle>,
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
    /// Threads started.
    pub threads: usize,
    /// Tasks being executed.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub waiting: usize,
    /// Tasks executed since the start, panics and those that nobody wanted any more included.
    pub completed: u64,
    /// Tasks refused because the queue was full.
    pub refused: u64,
}

impl ThreadPool {
    /// A pool of at most `threads` threads (at least 1) in which at most `queue_max` tasks wait. With 0 no task ever waits:
    /// as many run as there are threads. Starts no thread yet.
    pub fn new(name: &str, threads: usize, queue_max: usize) -> Self {
        panics::install();
        let shared = Shared {
            name: name.into(),
            threads_max: threads.max(1),
            queue_max,
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            ended: Condvar::new(),
        };
        ThreadPool { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
    }

    /// The pool's name.
    pub fn name(&self) -> &str {
        &self.handle.shared.name
    }

    /// Has `task` executed by a thread of the pool. It is queued now, not when the result is first waited for; dropping
    /// the result detaches the task and does not stop it.
    pub fn run<T, F>(&self, task: F) -> PoolTask<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.enqueue(task, Abandoned::Runs)
    }

    /// As [`ThreadPool::run`], for tasks that are worth nothing but their result: when that has been dropped before a
    /// thread comes to the task, it is dropped too.
    pub fn run_while_wanted<T, F>(&self, task: F) -> PoolTask<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.enqueue(task, Abandoned::Dropped)
    }

    fn enqueue<T, F>(&self, task: F, abandoned: Abandoned) -> PoolTask<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let completion = Arc::new(Completion { state: Mutex::new(CompletionState::Waiting(None)) });
        let promise = Promise { completion: Some(Arc::clone(&completion)), _outside: Outside::begin() };
        let job = JobOf { task: Some(task), abandoned, result: None, promise };
        let shared = &self.handle.shared;
        let submitted = match World::current() {
            None => shared.submit(Box::new(job)),
            Some(world) => world.submit(&shared.name, shared.threads_max, shared.queue_max, Box::new(job)),
        };
        if let Err(error) = submitted {
            // In place of the `Stopped` that the dropped job has left.
            *completion.state.lock() = CompletionState::Done(Err(error));
        }
        PoolTask { completion }
    }

    /// The counters now.
    pub fn counters(&self) -> PoolCounters {
        let state = self.handle.shared.state.lock();
        PoolCounters {
            threads: state.threads,
            running: state.running,
            waiting: state.jobs.len(),
            completed: state.completed,
            refused: state.refused,
        }
    }

    /// Refuses new tasks, drops those that wait (their results are [`PoolError::Stopped`]) and waits at most `wait` for
    /// those that run. True if all threads have ended. Blocks: not for a loop.
    pub fn stop(&self, wait: Duration) -> bool {
        let shared = &self.handle.shared;
        shared.begin_stop();
        let deadline = Instant::now() + wait;
        let mut state = shared.state.lock();
        while state.threads > 0 {
            if shared.ended.wait_until(&mut state, deadline).timed_out() {
                return state.threads == 0;
            }
        }
        true
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ThreadPool({:?}, {:?})", self.name(), self.counters())
    }
}

fn default_place() -> &'static RwLock<ThreadPool> {
    static DEFAULT: OnceLock<RwLock<ThreadPool>> = OnceLock::new();
    DEFAULT.get_or_init(|| RwLock::new(ThreadPool::new("default", DEFAULT_THREADS, DEFAULT_QUEUE_MAX)))
}

/// The pool named `default`.
pub fn default_pool() -> ThreadPool {
    default_place().read().clone()
}

/// Replaces the pool named `default`; tasks of the old one are finished by its threads.
pub fn set_default_pool(pool: ThreadPool) {
    let old = std::mem::replace(&mut *default_place().write(), pool);
    drop(old);
}

/// The result of a task to come.
#[must_use = "the task runs anyway, but its result is lost"]
pub struct PoolTask<T> {
    completion: Arc<Completion<T>>,
}

impl<T> Future for PoolTask<T> {
    type Output = Result<T, PoolError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.completion.state.lock();
        match &mut *state {
            CompletionState::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => Poll::Pending,
            CompletionState::Waiting(place) => {
                let displaced = place.replace(cx.waker().clone());
                drop(state);
                drop(displaced);
                Poll::Pending
            }
            CompletionState::Done(_) => match std::mem::replace(&mut *state, CompletionState::Taken) {
                CompletionState::Done(result) => Poll::Ready(result),
                _ => unreachable!("it was done a moment ago, under the same lock"),
            },
            CompletionState::Taken => panic!("polled after it was ready"),
        }
    }
}

struct Completion<T> {
    state: Mutex<CompletionState<T>>,
}

enum CompletionState<T> {
    Waiting(Option<Waker>),
    Done(Result<T, PoolError>),
    Taken,
}

impl<T> Completion<T> {
    /// The first result counts.
    fn complete(&self, result: Result<T, PoolError>) {
        let mut state = self.state.lock();
        if let CompletionState::Waiting(waker) = &mut *state {
            let waker = waker.take();
            *state = CompletionState::Done(result);
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        }
    }
}

/// The duty to complete: with `Stopped` when dropped before.
struct Promise<T> {
    completion: Option<Arc<Completion<T>>>,
    /// Ends after the waking: virtual time may go on when nobody is outside any more.
    _outside: Outside,
}

impl<T> Promise<T> {
    /// Whether somebody still holds the other end.
    fn is_wanted(&self) -> bool {
        self.completion.as_ref().is_some_and(|completion| Arc::strong_count(completion) > 1)
    }

    fn keep(&mut self, result: Result<T, PoolError>) {
        if let Some(completion) = self.completion.take() {
            completion.complete(result);
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.keep(Err(PoolError::Stopped));
    }
}

/// A task in the queue. Between running and delivering the thread counts as free, so that who gets the result finds room.
pub(crate) trait Job: Send {
    fn run(&mut self);
    fn deliver(self: Box<Self>);
}

/// What becomes of a task whose result has been dropped before it began.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Abandoned {
    Runs,
    Dropped,
}

struct JobOf<T, F> {
    task: Option<F>,
    abandoned: Abandoned,
    result: Option<Result<T, PoolError>>,
    promise: Promise<T>,
}

impl<T: Send, F: FnOnce() -> T + Send> Job for JobOf<T, F> {
    fn run(&mut self) {
        let task = self.task.take().expect("a job runs once");
        let wanted = self.abandoned == Abandoned::Runs || self.promise.is_wanted();
        // The destructor of what the task has captured may panic as well.
        let outcome = boundary("pool task", || if wanted { Ok(task()) } else { Err(PoolError::Stopped) });
        self.result = Some(outcome.unwrap_or(Err(PoolError::Panicked)));
    }

    fn deliver(mut self: Box<Self>) {
        let result = self.result.take().expect("a job is delivered after it has run");
        self.promise.keep(result);
    }
}

struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        // What waits is finished first: a detached task is still a promise.
        state.stopping = true;
        drop(state);
        self.shared.work.notify_all();
    }
}

struct Shared {
    name: Arc<str>,
    threads_max: usize,
    queue_max: usize,
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Box<dyn Job>>,
    threads: usize,
    idle: usize,
    running: usize,
    completed: u64,
    refused: u64,
    stopping: bool,
}

impl Shared {
    fn submit(self: &Arc<Self>, job: Box<dyn Job>) -> Result<(), PoolError> {
        let mut state = self.state.lock();
        let refusal = if state.stopping {
            Some(PoolError::Stopped)
        } else if state.running + state.jobs.len() >= self.threads_max.saturating_add(self.queue_max) {
            state.refused += 1;
            let waiting = (state.running + state.jobs.len()).saturating_sub(self.threads_max);
            Some(PoolError::Overflow { pool: Arc::clone(&self.name), waiting })
        } else {
            None
        };
        if let Some(error) = refusal {
            drop(state);
            drop(job);
            return Err(error);
        }
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() || state.threads == self.threads_max {
            drop(state);
            self.work.notify_one();
            return Ok(());
        }
        state.threads += 1;
        drop(state);
        self.start_thread()
    }

    fn start_thread(self: &Arc<Self>) -> Result<(), PoolError> {
        let shared = Arc::clone(self);
        // A NUL cannot be in a thread's name, but the configuration may have put one in the pool's.
        let name = format!("pool {}", self.name).replace('\0', "");
        let builder = std::thread::Builder::new().name(name);
        let Err(error) = builder.spawn(move || shared.work()) else {
            return Ok(());
        };
        let mut state = self.state.lock();
        state.threads -= 1;
        if state.threads > 0 {
            // Those that run will come to it.
            return Ok(());
        }
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        drop(jobs);
        Err(PoolError::NoThread(error.kind()))
    }

    /// The life of one thread.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(mut job) = state.jobs.pop_front() {
                state.running += 1;
                drop(state);
                job.run();
                state = self.state.lock();
                state.running -= 1;
                state.completed += 1;
                drop(state);
                // A result that nobody waits for any more is dropped here, and its destructor may panic.
                let _ = boundary("pool task", || job.deliver());
                state = self.state.lock();
            } else if state.stopping {
                break;
            } else {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
            }
        }
        state.threads -= 1;
        drop(state);
        self.ended.notify_all();
    }

    fn begin_stop(&self) {
        let mut state = self.state.lock();
        state.stopping = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        self.work.notify_all();
        drop(jobs);
    }
}

/// Whether the calling thread runs a loop, so that it must not block.
pub(crate) fn on_a_loop() -> bool {
    Environment::try_with(|_| ()).is_some()
}
