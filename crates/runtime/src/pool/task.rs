//! A pool task and its result: a single allocation shared by the queue, the thread and the waiter.
//!
//! ```text
//!   Waiting ──► Running ──► Done ──► Taken          the waiter gets the result
//!      │           └──────► Unwanted                the waiter has left: the thread drops the result
//!      └──► Abandoned                               the waiter has left: never begins, the thread drops the task
//! ```
//!
//! Captured values and results are dropped in the pool if the waiter has left: a loop never frees them.

use std::cell::Cell;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Device, PoolError, Shared, on_a_loop};
use crate::environment::try_now;
use crate::executor::panics::boundary;
use crate::inbox::Outside;
use crate::time::Moment;

/// A task for the queue and the threads.
pub(super) trait Job: Send + Sync {
    /// Runs the task, or drops it if it was abandoned. Calls `freed` between the end of the task and the delivery of
    /// its result, so that the receiver of the result finds the thread free. Never panics.
    fn execute(&self, freed: &mut dyn FnMut(Ended));
    /// Fails the task before it began.
    fn refuse(&self, error: PoolError);
    fn entry(&self) -> &QueueEntry;
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Completed,
    Panicked,
    /// Dropped before it began.
    Cancelled,
}

/// The queue's view of a task. Written only under the pool's lock.
pub(super) struct QueueEntry {
    pub submitted: Instant,
    standing: AtomicU8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Standing {
    /// Waiting and counted.
    Counts,
    /// A value to drop; never counted.
    Clears,
    /// Waiting to be dropped; counts no more.
    Abandoned,
    /// Taken by a thread.
    Gone,
}

impl QueueEntry {
    pub fn new(standing: Standing) -> Self {
        QueueEntry { submitted: Instant::now(), standing: AtomicU8::new(standing as u8) }
    }

    pub fn standing(&self) -> Standing {
        match self.standing.load(Relaxed) {
            0 => Standing::Counts,
            1 => Standing::Clears,
            2 => Standing::Abandoned,
            _ => Standing::Gone,
        }
    }

    pub fn set(&self, standing: Standing) {
        self.standing.store(standing as u8, Relaxed);
    }
}

/// The future of a task's result. Dropping it cancels a task that has not begun, which at once stops counting as
/// waiting.
#[must_use = "the task is cancelled when its result is dropped"]
pub struct PoolTask<T> {
    stage: Stage<T>,
    /// Time since which a loop waits for it.
    waits_since: Option<Moment>,
}

thread_local! {
    /// See [`take_pool_wait`].
    static WAITED_NS: Cell<u64> = const { Cell::new(0) };
}

/// Time spent waiting for pool tasks whose results were taken or dropped on this thread, since the last call. Calling
/// it before and after a poll gives the waits of that poll.
pub fn take_pool_wait() -> Duration {
    Duration::from_nanos(WAITED_NS.take())
}

enum Stage<T> {
    Refused(PoolError),
    Submitted(Arc<dyn Outcome<T>>),
    Taken,
}

impl<T> PoolTask<T> {
    pub(super) fn refused(error: PoolError) -> Self {
        PoolTask { stage: Stage::Refused(error), waits_since: None }
    }

    pub(super) fn of(outcome: Arc<dyn Outcome<T>>) -> Self {
        PoolTask { stage: Stage::Submitted(outcome), waits_since: None }
    }
}

impl<T> PoolTask<T> {
    fn note_wait(&mut self) {
        if let Some(since) = self.waits_since.take()
            && let Some(now) = try_now()
        {
            let waited = u64::try_from(now.since(since).as_nanos()).unwrap_or(u64::MAX);
            WAITED_NS.set(WAITED_NS.get().saturating_add(waited));
        }
    }
}

impl<T> Unpin for PoolTask<T> {}

impl<T> Future for PoolTask<T> {
    type Output = Result<T, PoolError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Stage::Submitted(outcome) = &self.stage {
            let polled = outcome.poll(cx);
            if polled.is_ready() {
                self.stage = Stage::Taken;
                self.note_wait();
            } else if self.waits_since.is_none() {
                self.waits_since = try_now();
            }
            return polled;
        }
        match mem::replace(&mut self.stage, Stage::Taken) {
            Stage::Refused(error) => Poll::Ready(Err(error)),
            _ => panic!("polled after it was ready"),
        }
    }
}

impl<T> Drop for PoolTask<T> {
    fn drop(&mut self) {
        if let Stage::Submitted(outcome) = &self.stage {
            outcome.abandon();
            self.note_wait();
        }
    }
}

/// The waiter's view of a task.
pub(super) trait Outcome<T>: Send + Sync {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<T, PoolError>>;
    /// The waiter has left.
    fn abandon(&self);
}

pub(super) struct Task<T, F> {
    pool: Arc<Shared>,
    device: Device,
    entry: QueueEntry,
    /// Runs even without a waiter.
    is_detached: bool,
    state: Mutex<State<T, F>>,
}

enum State<T, F> {
    /// Virtual time stands still while `outside` exists: until the result was delivered.
    Waiting {
        task: F,
        waker: Option<Waker>,
        outside: Outside,
    },
    Abandoned {
        task: F,
        outside: Outside,
    },
    Running {
        waker: Option<Waker>,
    },
    Unwanted,
    Done(Result<T, PoolError>),
    Taken,
}

impl<T, F> Task<T, F>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    pub fn new(pool: &Arc<Shared>, device: Device, task: F) -> Self {
        Task {
            pool: Arc::clone(pool),
            device,
            entry: QueueEntry::new(Standing::Counts),
            is_detached: false,
            state: Mutex::new(State::Waiting { task, waker: None, outside: Outside::begin() }),
        }
    }

    /// A task without a result.
    pub fn detached(pool: &Arc<Shared>, device: Device, standing: Standing, task: F) -> Self {
        Task { entry: QueueEntry::new(standing), is_detached: true, ..Task::new(pool, device, task) }
    }

    fn deliver(&self, result: Result<T, PoolError>) {
        let mut state = self.state.lock();
        if let State::Running { waker } = &mut *state {
            let waker = waker.take();
            *state = State::Done(result);
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        } else {
            drop(state);
            drop(result);
        }
    }
}

impl<T, F> Job for Task<T, F>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    fn execute(&self, freed: &mut dyn FnMut(Ended)) {
        let mut state = self.state.lock();
        let (task, outside) = match mem::replace(&mut *state, State::Unwanted) {
            State::Waiting { task, waker, outside } => {
                if !self.is_detached {
                    *state = State::Running { waker };
                }
                (task, outside)
            }
            State::Abandoned { task, outside } => {
                drop(state);
                // Dropping captured values may panic, here and below.
                let _ = boundary("pool task", || drop(task));
                freed(Ended::Cancelled);
                return drop(outside);
            }
            other => {
                *state = other;
                drop(state);
                return freed(Ended::Cancelled);
            }
        };
        drop(state);
        let mut result = Some(boundary("pool task", task).map_err(|_| PoolError::Panicked));
        let ended = if matches!(result, Some(Ok(_))) { Ended::Completed } else { Ended::Panicked };
        // Dropping an unwanted result may take long, as when it closes a file: the thread is busy for that time.
        if matches!(*self.state.lock(), State::Unwanted) {
            let _ = boundary("pool task", || drop(result.take()));
        }
        freed(ended);
        if let Some(result) = result {
            let _ = boundary("pool task", || self.deliver(result));
        }
        // After the wake-up: virtual time may go on when no `Outside` is left.
        drop(outside);
    }

    fn refuse(&self, error: PoolError) {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Waiting { task, waker, outside } => {
                *state = State::Done(Err(error));
                drop(state);
                let _ = boundary("pool task", || drop(task));
                waker.into_iter().for_each(Waker::wake);
                drop(outside);
            }
            State::Abandoned { task, outside } => {
                drop(state);
                let _ = boundary("pool task", || drop(task));
                drop(outside);
            }
            other => *state = other,
        }
    }

    fn entry(&self) -> &QueueEntry {
        &self.entry
    }
}

impl<T, F> Outcome<T> for Task<T, F>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<T, PoolError>> {
        let mut state = self.state.lock();
        match &mut *state {
            State::Waiting { waker, .. } | State::Running { waker } => {
                if waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    return Poll::Pending;
                }
                let displaced = waker.replace(cx.waker().clone());
                drop(state);
                drop(displaced);
                Poll::Pending
            }
            State::Done(_) => match mem::replace(&mut *state, State::Taken) {
                State::Done(result) => Poll::Ready(result),
                _ => unreachable!("it was done a moment ago, under the same lock"),
            },
            State::Abandoned { .. } | State::Unwanted | State::Taken => {
                unreachable!("polled after it was abandoned")
            }
        }
    }

    fn abandon(&self) {
        let mut state = self.state.lock();
        match mem::replace(&mut *state, State::Unwanted) {
            State::Waiting { task, waker, outside } => {
                *state = State::Abandoned { task, outside };
                drop(state);
                drop(waker);
                self.pool.discount(self.device, &self.entry);
            }
            State::Done(Ok(result)) => {
                drop(state);
                if mem::needs_drop::<T>() && on_a_loop() {
                    self.pool.dispose(self.device, result);
                }
            }
            State::Running { waker } => {
                drop(state);
                drop(waker);
            }
            other => *state = other,
        }
    }
}
