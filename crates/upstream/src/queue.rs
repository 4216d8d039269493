//! Queue of requests that wait for an available peer (`queue`): bounded, over all workers, first come first served.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#queue>)
//!
//! A request that ends wakes the longest waiting one. Changes that only depend on time (a peer may be retried) are
//! checked twice a second.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use gale_runtime::{Moment, now, oneshot, timeout};
use parking_lot::Mutex;

use super::Group;
use super::selection::{Chosen, NoPeer, Selection};

/// Interval of checks whether a peer has become available.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// `queue`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// Most waiting requests.
    pub requests_max: usize,
    /// Longest wait.
    pub timeout: Duration,
}

impl QueueSettings {
    /// Default of the timeout.
    pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
}

/// Queue of requests that wait for an available peer.
#[derive(Debug)]
pub(super) struct Queue {
    settings: QueueSettings,
    waiting: AtomicUsize,
    /// Waiting requests to wake, in order. Those that have left are skipped.
    waiters: Mutex<VecDeque<oneshot::Sender<()>>>,
    /// Requests rejected because the queue was full.
    overflows: AtomicU64,
}

/// Figures of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFigures {
    /// Waiting requests.
    pub waiting: usize,
    /// Most waiting requests.
    pub requests_max: usize,
    /// Requests rejected because the queue was full.
    pub overflows: u64,
}

impl Queue {
    pub fn new(settings: QueueSettings) -> Queue {
        Queue { settings, waiting: AtomicUsize::new(0), waiters: Mutex::default(), overflows: AtomicU64::new(0) }
    }

    /// Current figures.
    pub fn figures(&self) -> QueueFigures {
        QueueFigures {
            waiting: self.waiting.load(Ordering::SeqCst),
            requests_max: self.settings.requests_max,
            overflows: self.overflows.load(Ordering::Relaxed),
        }
    }

    /// Resets the count of rejected requests.
    pub fn reset_figures(&self) {
        self.overflows.store(0, Ordering::Relaxed);
    }

    /// `true` if a request waits.
    pub fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Wakes the first waiting request.
    pub fn wake_one(&self) {
        if !self.has_waiting() {
            return;
        }
        let mut waiters = self.waiters.lock();
        while let Some(waiter) = waiters.pop_front() {
            if waiter.send(()).is_ok() {
                return;
            }
        }
    }

    /// Wakes all waiting requests.
    pub fn wake_all(&self) {
        let waiters = std::mem::take(&mut *self.waiters.lock());
        for waiter in waiters {
            // The receiver may have left.
            let _ = waiter.send(());
        }
    }

    fn enter(&self) -> Option<QueuedRequest<'_>> {
        let enter = |waiting| (waiting < self.settings.requests_max).then_some(waiting + 1);
        if self.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_err() {
            self.overflows.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let mut queued = QueuedRequest { queue: self, woken: None };
        queued.line_up(false);
        Some(queued)
    }
}

struct QueuedRequest<'q> {
    queue: &'q Queue,
    woken: Option<oneshot::Receiver<()>>,
}

impl QueuedRequest<'_> {
    /// Joins the line, at its front if the request was woken in vain.
    fn line_up(&mut self, in_front: bool) {
        let (sender, receiver) = oneshot::channel();
        self.woken = Some(receiver);
        let mut waiters = self.queue.waiters.lock();
        // Bounds the entries of requests that have left.
        if waiters.len() > 2 * self.queue.settings.requests_max {
            waiters.retain(|waiter| !waiter.is_closed());
        }
        if in_front {
            waiters.push_front(sender);
        } else {
            waiters.push_back(sender);
        }
    }

    /// Waits for a wake-up, for the next check, or for the deadline.
    async fn changed(&mut self, deadline: Moment) {
        let Some(woken) = &mut self.woken else { return };
        let pause = deadline.since(now()).min(LOOK_AGAIN_AFTER);
        if timeout(pause, woken).await.is_ok() {
            self.woken = None;
        }
    }
}

impl Drop for QueuedRequest<'_> {
    fn drop(&mut self) {
        self.queue.waiting.fetch_sub(1, Ordering::SeqCst);
        // Passes on a wake-up that this request does not need.
        let woken = self.woken.take().and_then(|mut woken| woken.try_recv().ok().flatten());
        if woken.is_some() {
            self.queue.wake_one();
        }
    }
}

impl Selection {
    /// `true` if waiting may help when no peer is available: the group has a queue and this is the first attempt. All
    /// requests in the queue wait for the same, any peer.
    pub fn can_wait(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.common.queue.is_some()) && self.is_first_try()
    }

    /// The next peer to try; if none is available, waits in the group's queue.
    ///
    /// # Errors
    /// No peer is available, and the group has no queue, or it is full, or the wait timed out.
    pub async fn wait(&mut self) -> Result<Chosen, NoPeer> {
        let error = match self.next() {
            Ok(chosen) => return Ok(chosen),
            Err(error) => error,
        };
        let group = self.group.clone().filter(|_| self.can_wait()).ok_or(error)?;
        self.wait_in_queue(&group).await
    }

    async fn wait_in_queue(&mut self, group: &Arc<Group>) -> Result<Chosen, NoPeer> {
        let queue = group.common.queue.as_ref().ok_or(NoPeer::NoneAlive)?;
        let mut queued = queue.enter().ok_or(NoPeer::QueueFull)?;
        let deadline = now() + queue.settings.timeout;
        loop {
            // After entering, so that no change is missed.
            self.look_anew(group.view());
            let now = now();
            if let Ok(chosen) = self.next_at(now) {
                return Ok(chosen);
            }
            if now >= deadline {
                return Err(NoPeer::QueueTimedOut);
            }
            if queued.woken.is_none() {
                queued.line_up(true);
                continue;
            }
            queued.changed(deadline).await;
        }
    }
}
