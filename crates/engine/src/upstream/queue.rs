//! Requests that wait until a peer can be chosen (`queue`): a bounded number, of all workers, first come first served.
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html#queue>)
//!
//! A request that ends wakes the one that has waited for longest. What only time changes (a peer that may be tried
//! again) is looked at twice a second.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use gale_runtime::{Moment, now, oneshot, timeout};
use parking_lot::Mutex;

use super::Group;
use super::selection::{Chosen, NoPeer, Selection};

/// How often it is looked whether a peer can be chosen by now.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// `queue`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// How many requests may wait.
    pub requests_max: usize,
    /// How long each of them does.
    pub timeout: Duration,
}

impl QueueSettings {
    /// How long requests wait when nothing is said of it.
    pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
}

/// See the file's head.
#[derive(Debug)]
pub(super) struct Queue {
    settings: QueueSettings,
    /// How many wait.
    waiting: AtomicUsize,
    /// Who is to be woken, the first one first. Those that have gone are passed over.
    waiters: Mutex<VecDeque<oneshot::Sender<()>>>,
    /// How many were turned away because it was full.
    overflows: AtomicU64,
}

/// How a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFigures {
    /// How many requests wait.
    pub waiting: usize,
    /// How many may.
    pub requests_max: usize,
    /// How many were turned away because it was full.
    pub overflows: u64,
}

impl Queue {
    pub fn new(settings: QueueSettings) -> Queue {
        Queue { settings, waiting: AtomicUsize::new(0), waiters: Mutex::default(), overflows: AtomicU64::new(0) }
    }

    /// How it is now.
    pub fn figures(&self) -> QueueFigures {
        QueueFigures {
            waiting: self.waiting.load(Ordering::SeqCst),
            requests_max: self.settings.requests_max,
            overflows: self.overflows.load(Ordering::Relaxed),
        }
    }

    /// Forgets how many were turned away.
    pub fn reset_figures(&self) {
        self.overflows.store(0, Ordering::Relaxed);
    }

    /// Whether any request waits.
    pub fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Something has changed for one request.
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

    /// Something has changed for all of them.
    pub fn wake_all(&self) {
        let waiters = std::mem::take(&mut *self.waiters.lock());
        for waiter in waiters {
            // One that has gone needs nothing.
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

/// A request that waits.
struct QueuedRequest<'q> {
    queue: &'q Queue,
    woken: Option<oneshot::Receiver<()>>,
}

impl QueuedRequest<'_> {
    /// Stands in the line, again in front if it was woken for nothing.
    fn line_up(&mut self, in_front: bool) {
        let (sender, receiver) = oneshot::channel();
        self.woken = Some(receiver);
        let mut waiters = self.queue.waiters.lock();
        // Those that have gone since are few more than those that may wait.
        if waiters.len() > 2 * self.queue.settings.requests_max {
            waiters.retain(|waiter| !waiter.is_closed());
        }
        if in_front {
            waiters.push_front(sender);
        } else {
            waiters.push_back(sender);
        }
    }

    /// Waits until something has changed, or time may have changed something.
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
        // It was woken, and does not need it any more.
        let woken = self.woken.take().and_then(|mut woken| woken.try_recv().ok().flatten());
        if woken.is_some() {
            self.queue.wake_one();
        }
    }
}

impl Selection {
    /// Whether it may help to wait when there is no peer: the group has a queue, and this is the first try. In the
    /// queue all wait for the same, any peer.
    pub fn can_wait(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.common.queue.is_some()) && self.is_first_try()
    }

    /// The next peer to try; if there is none, waits in the queue of the group until there is.
    ///
    /// # Errors
    /// There is none, and the group has no queue, or that is full, or it has taken too long.
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
            // After it has entered: what changes from now on is not missed.
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
