//! A signal between tasks of one loop.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::waiters::{Ticket, Waiters};

/// Wakes tasks of its loop that wait for a change of some state, which they then check themselves.
///
/// A notification without a waiter is kept, one at most, so a task that checks, finds nothing and then waits misses
/// none.
#[derive(Default)]
pub struct Notify {
    state: RefCell<State>,
    _not_send: PhantomData<Rc<()>>,
}

#[derive(Default)]
struct State {
    waiting: Waiters,
    is_kept: bool,
    /// Chosen waiters with a smaller ticket were notified together with all others.
    all_before: Ticket,
}

impl Notify {
    /// Without waiters, and without a kept notification.
    pub fn new() -> Self {
        Notify::default()
    }

    /// Wakes the task that has waited longest; if there is none, the next one to wait goes on at once.
    pub fn notify_one(&self) {
        let mut state = self.state.borrow_mut();
        let waker = state.waiting.choose();
        state.is_kept |= waker.is_none();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Wakes all waiting tasks. Nothing is kept for later ones.
    pub fn notify_all(&self) {
        let mut state = self.state.borrow_mut();
        state.all_before = state.waiting.next();
        let all = state.waiting.choose_all();
        drop(state);
        all.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Waits for a notification, from the first poll on. If the future is dropped after `notify_one` has chosen it, the
    /// next waiter gets the notification.
    pub fn notified(&self) -> Notified<'_> {
        Notified { notify: self, ticket: None }
    }
}

/// The future of [`Notify::notified`].
pub struct Notified<'a> {
    notify: &'a Notify,
    ticket: Option<Ticket>,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.notify.state.borrow_mut();
        match self.ticket {
            Some(ticket) => {
                if let Some(displaced) = state.waiting.renew(ticket, cx.waker()) {
                    drop(state);
                    drop(displaced);
                    return Poll::Pending;
                }
            }
            None if std::mem::take(&mut state.is_kept) => {}
            None => {
                let ticket = state.waiting.join(cx.waker());
                drop(state);
                self.ticket = Some(ticket);
                return Poll::Pending;
            }
        }
        drop(state);
        self.ticket = None;
        Poll::Ready(())
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.notify.state.borrow_mut();
        let left = state.waiting.leave(ticket);
        let is_passed_on = left.is_none() && ticket >= state.all_before;
        drop(state);
        drop(left);
        if is_passed_on {
            self.notify.notify_one();
        }
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}
