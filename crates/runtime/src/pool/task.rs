//! One task of a pool and its result: a single allocation that the queue, the thread and the one who waits share.
//!
//! ```text
//!   Waiting ──► Running ──► Done ──► Taken          the result goes to whoever waits for it
//!      │           └──────► Unwanted                nobody waits any more: the thread drops the result
//!      └──► Abandoned                               nobody waits any more: never begins, the thread drops the task
//! ```
//!
//! What a task has captured and what it returns is dropped in the pool whenever nobody wants it: a loop never frees it.

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

/// What the queue and the threads know of a task.
pub(super) trait Job: Send + Sync {
    /// Runs it, or drops it when nobody wants it any more. Calls `freed` in between the end of the task and the
    /// delivery of its result, so that who gets that finds the thread free. Never panics.
    fn execute(&self, freed: &mut dyn FnMut(Ended));
    /// Ends it before it began.
    fn refuse(&self, error: PoolError);
    fn entry(&self) -> &QueueEntry;
}

/// How a task ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Completed,
    Panicked,
    /// Dropped without having begun.
    Cancelled,
}

/// A task as the queue sees it. Written only under the pool's lock.
pub(super) struct QueueEntry {
    pub submitted: Instant,
    standing: AtomicU8,
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Standing {
    /// It waits and counts.
    Counts,
    /// It only clears away and never counted.
    Clears,
    /// It waits to be dropped and counts no more.
    Abandoned,
    /// A thread has it.
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

/// The result of a task to come. Dropped before, it takes the task with it: one that has not begun never does, and
/// leaves the queue's count at once.
#[must_use = "the task is cancelled when its result is dropped"]
pub struct PoolTask<T> {
    stage: Stage<T>,
    /// Since when a loop waits for it.
    waits_since: Option<Moment>,
}

thread_local! {
    /// See [`take_pool_wait`].
    static WAITED_NS: Cell<u64> = const { Cell::new(0) };
}

/// How long tasks of pools have been waited for whose results were taken, or given up, on this thread since this was
/// asked last: whoever asks before and after a poll knows what that has waited for.
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
    /// It is waited for no more.
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

/// What the one who waits knows of a task.
pub(super) trait Outcome<T>: Send + Sync {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<T, PoolError>>;
    /// Nobody waits any more.
    fn abandon(&self);
}

pub(super) struct Task<T, F> {
    pool: Arc<Shared>,
    device: Device,
    entry: QueueEntry,
    /// Runs although nobody waits for the result.
    is_detached: bool,
    state: Mutex<State<T, F>>,
}

enum State<T, F> {
    /// Virtual time stands still as long as `outside` exists: to the end of the delivery.
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

    /// One that nobody waits for.
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
                // What the task has captured may panic when dropped, here and below.
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
        // What nobody wants may take long to drop, as a file that is closed: the thread is busy for so long.
        if matches!(*self.state.lock(), State::Unwanted) {
            let _ = boundary("pool task", || drop(result.take()));
        }
        freed(ended);
        if let Some(result) = result {
            let _ = boundary("pool task", || self.deliver(result));
        }
        // After the waking: virtual time may go on when nobody is outside any more.
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
                unreachable!("polled by one who has given it up")
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
