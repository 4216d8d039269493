//! A bounded queue from any threads to one task.
//!
//! A sender that finds it full waits or takes its value back. Room that was granted to a waiting sender is not taken by
//! later ones, so values of waiting senders keep their order.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

pub use super::Closed;
use super::waiters::{Ticket, Waiters};

/// The two ends of a queue for `capacity` values, at least one.
pub fn channel<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    assert!(capacity > 0, "a queue without room");
    let state = State {
        queue: VecDeque::new(),
        capacity,
        granted: 0,
        waiting: Waiters::default(),
        receiver: None,
        is_receiver_gone: false,
        senders: 1,
    };
    let shared = Arc::new(Mutex::new(state));
    (Sender { shared: Arc::clone(&shared) }, Receiver { shared })
}

/// The sending end; cloned for each thread or task that sends.
pub struct Sender<T> {
    shared: Arc<Mutex<State<T>>>,
}

/// The receiving end. Dropping it drops the values, and sending fails from then on.
pub struct Receiver<T> {
    shared: Arc<Mutex<State<T>>>,
}

/// The reason why a value was not queued, with the value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrySendError<T> {
    /// There is no room now.
    Full(T),
    /// The receiver was dropped.
    Closed(T),
}

struct State<T> {
    queue: VecDeque<T>,
    capacity: usize,
    /// Number of places granted to waiting senders that were not used yet.
    granted: usize,
    /// One for each waiting sender.
    waiting: Waiters,
    receiver: Option<Waker>,
    is_receiver_gone: bool,
    senders: usize,
}

impl<T> State<T> {
    fn has_room(&self) -> bool {
        self.queue.len() + self.granted < self.capacity
    }

    /// Grants a free place to the first waiting sender, and returns its waker.
    fn grant(&mut self) -> Option<Waker> {
        if !self.has_room() {
            return None;
        }
        let waker = self.waiting.choose()?;
        self.granted += 1;
        Some(waker)
    }
}

impl<T> Sender<T> {
    /// Puts a value into the queue if there is room.
    pub fn try_send(&self, value: T) -> Result<(), TrySendError<T>> {
        let mut state = self.shared.lock();
        if state.is_receiver_gone {
            return Err(TrySendError::Closed(value));
        }
        if !state.has_room() {
            return Err(TrySendError::Full(value));
        }
        state.queue.push_back(value);
        let receiver = state.receiver.take();
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Queues a value, and waits for room if there is none. For tasks. Returns the value if the receiver was dropped;
    /// dropping the future drops it.
    pub fn send(&self, value: T) -> Sending<'_, T> {
        Sending { sender: self, value: Some(value), ticket: None }
    }

    /// True if the receiver was dropped.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().is_receiver_gone
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.shared.lock().senders += 1;
        Sender { shared: Arc::clone(&self.shared) }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.senders -= 1;
        let receiver = if state.senders == 0 { state.receiver.take() } else { None };
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
    }
}

/// The future of [`Sender::send`].
pub struct Sending<'a, T> {
    sender: &'a Sender<T>,
    value: Option<T>,
    ticket: Option<Ticket>,
}

/// The value is never pinned: there is no pinned reference to it.
impl<T> Unpin for Sending<'_, T> {}

impl<T> Future for Sending<'_, T> {
    type Output = Result<(), T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), T>> {
        let sender = self.sender;
        let mut state = sender.shared.lock();
        if state.is_receiver_gone {
            self.ticket = None;
            return Poll::Ready(Err(self.value.take().expect("polled after it was ready")));
        }
        match self.ticket {
            Some(ticket) => match state.waiting.renew(ticket, cx.waker()) {
                Some(displaced) => {
                    drop(state);
                    drop(displaced);
                    return Poll::Pending;
                }
                None => state.granted -= 1,
            },
            None if state.has_room() => {}
            None => {
                self.ticket = Some(state.waiting.join(cx.waker()));
                return Poll::Pending;
            }
        }
        self.ticket = None;
        state.queue.push_back(self.value.take().expect("polled after it was ready"));
        let receiver = state.receiver.take();
        drop(state);
        receiver.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }
}

impl<T> Drop for Sending<'_, T> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.sender.shared.lock();
        let left = state.waiting.leave(ticket);
        if state.is_receiver_gone || left.is_some() {
            drop(state);
            drop(left);
            return;
        }
        // Its granted place goes to the next sender.
        state.granted -= 1;
        let next = state.grant();
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }
}

impl<T> Receiver<T> {
    /// The next value; `None` when the queue is empty and all senders were dropped.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.shared.lock();
        if let Some(value) = state.queue.pop_front() {
            let sender = state.grant();
            drop(state);
            sender.into_iter().for_each(Waker::wake);
            return Poll::Ready(Some(value));
        }
        if state.senders == 0 {
            return Poll::Ready(None);
        }
        let displaced = state.receiver.replace(cx.waker().clone());
        drop(state);
        drop(displaced);
        Poll::Pending
    }

    /// Waits for the next value; see [`Receiver::poll_recv`].
    pub async fn recv(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_recv(cx)).await
    }

    /// The next value if there is one; `Err(Closed)` when the queue is empty and all senders were dropped.
    pub fn try_recv(&mut self) -> Result<Option<T>, Closed> {
        match self.poll_recv(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(value)) => Ok(Some(value)),
            Poll::Ready(None) => Err(Closed),
            Poll::Pending => Ok(None),
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_receiver_gone = true;
        let values = std::mem::take(&mut state.queue);
        let senders = state.waiting.choose_all();
        let own = state.receiver.take();
        drop(state);
        drop((values, own));
        senders.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("mpsc::Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("mpsc::Receiver")
    }
}
