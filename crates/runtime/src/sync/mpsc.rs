//! A bounded queue from any threads to one task.
//!
//! A sender that finds it full waits in line or takes its value back. Room that somebody in the line has been given is
//! not taken by whoever comes later, so values of senders that wait leave in the order of their coming.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

pub use super::Closed;
use super::waiters::{Ticket, Waiters};

/// Both ends of a queue of `capacity` values, at least one.
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

/// Puts values into the queue; cloned for each thread or task that does.
pub struct Sender<T> {
    shared: Arc<Mutex<State<T>>>,
}

/// Takes values from the queue. Dropped, it drops them, and the senders are told.
pub struct Receiver<T> {
    shared: Arc<Mutex<State<T>>>,
}

/// Why a value was not taken, with the value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrySendError<T> {
    /// There is no room now.
    Full(T),
    /// The receiver has gone.
    Closed(T),
}

struct State<T> {
    queue: VecDeque<T>,
    capacity: usize,
    /// Room that senders from the line have been given and have not used yet.
    granted: usize,
    /// One for each task that sends and waits.
    waiting: Waiters,
    receiver: Option<Waker>,
    is_receiver_gone: bool,
    senders: usize,
}

impl<T> State<T> {
    fn has_room(&self) -> bool {
        self.queue.len() + self.granted < self.capacity
    }

    /// Gives free room to the first in the line, who is to be woken.
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

    /// Puts a value into the queue, and waits for room if there is none. For tasks. Gives the value back if the
    /// receiver has gone; dropping the future drops it.
    pub fn send(&self, value: T) -> Sending<'_, T> {
        Sending { sender: self, value: Some(value), ticket: None }
    }

    /// Whether the receiver has gone.
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

/// Waits until a value is in the queue; see [`Sender::send`].
pub struct Sending<'a, T> {
    sender: &'a Sender<T>,
    value: Option<T>,
    ticket: Option<Ticket>,
}

/// The value never moves while it is pinned: nobody is given a pinned reference to it.
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
        // The room that it was given is for the next one.
        state.granted -= 1;
        let next = state.grant();
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }
}

impl<T> Receiver<T> {
    /// The next value; `None` when the queue is empty and all senders have gone.
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

    /// The next value if there is one now; `Err(Closed)` when the queue is empty and all senders have gone.
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
