//! One value, from any thread to a task.
//!
//! ```
//! # use gale_runtime::{EventLoop, LoopOptions, oneshot};
//! let (sender, receiver) = oneshot::channel();
//! let thread = std::thread::spawn(move || sender.send(6 * 7));
//! let answer = EventLoop::new(LoopOptions::default()).unwrap().run(receiver);
//! assert_eq!(answer, Ok(42));
//! # thread.join().unwrap().unwrap();
//! ```

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

pub use super::Closed;

/// The two ends.
pub fn channel<T: Send>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Mutex::new(State { value: None, receiver: Side::Alive(None), sender: Side::Alive(None) }));
    (Sender { shared: Arc::clone(&shared) }, Receiver { shared })
}

/// The sending end. Dropping it without a value wakes the receiver.
pub struct Sender<T> {
    shared: Arc<Mutex<State<T>>>,
}

/// The future of the value: `Err(Closed)` if the sender was dropped without one.
pub struct Receiver<T> {
    shared: Arc<Mutex<State<T>>>,
}

struct State<T> {
    value: Option<T>,
    receiver: Side,
    sender: Side,
}

/// The state of one end, with the waker of its waiting task.
enum Side {
    Alive(Option<Waker>),
    Gone,
}

impl Side {
    fn is_gone(&self) -> bool {
        matches!(self, Side::Gone)
    }

    fn take_waker(&mut self) -> Option<Waker> {
        match self {
            Side::Alive(waker) => waker.take(),
            Side::Gone => None,
        }
    }

    /// Parks a waker; returns the previous one, to be dropped when nothing is locked.
    fn park(&mut self, waker: &Waker) -> Option<Waker> {
        std::mem::replace(self, Side::Alive(Some(waker.clone()))).take_waker()
    }
}

impl<T> Sender<T> {
    /// Sends the value; returns it if the receiver was dropped. A receiver that is dropped later drops it.
    pub fn send(self, value: T) -> Result<(), T> {
        let mut state = self.shared.lock();
        if state.receiver.is_gone() {
            return Err(value);
        }
        state.value = Some(value);
        Ok(())
        // Dropping this sender wakes the receiver.
    }

    /// True if the receiver was dropped.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().receiver.is_gone()
    }

    /// Ready when the receiver was dropped.
    pub fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.shared.lock();
        if state.receiver.is_gone() {
            return Poll::Ready(());
        }
        let displaced = state.sender.park(cx.waker());
        drop(state);
        drop(displaced);
        Poll::Pending
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let displaced = std::mem::replace(&mut state.sender, Side::Gone);
        let receiver = state.receiver.take_waker();
        drop(state);
        drop(displaced);
        receiver.into_iter().for_each(Waker::wake);
    }
}

impl<T> Receiver<T> {
    /// The value if it was sent; `Err(Closed)` if it will never come, or was taken.
    pub fn try_recv(&mut self) -> Result<Option<T>, Closed> {
        let mut state = self.shared.lock();
        match state.value.take() {
            None if state.sender.is_gone() => Err(Closed),
            value => Ok(value),
        }
    }
}

impl<T> Future for Receiver<T> {
    type Output = Result<T, Closed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, Closed>> {
        let mut state = self.shared.lock();
        if let Some(value) = state.value.take() {
            return Poll::Ready(Ok(value));
        }
        if state.sender.is_gone() {
            return Poll::Ready(Err(Closed));
        }
        let displaced = state.receiver.park(cx.waker());
        drop(state);
        drop(displaced);
        Poll::Pending
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let displaced = std::mem::replace(&mut state.receiver, Side::Gone);
        let sender = state.sender.take_waker();
        let value = state.value.take();
        drop(state);
        drop((displaced, value));
        sender.into_iter().for_each(Waker::wake);
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("oneshot::Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("oneshot::Receiver")
    }
}
