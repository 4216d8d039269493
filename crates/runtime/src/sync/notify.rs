//! A signal between tasks of one loop.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::waiters::{Ticket, Waiters};

/// Wakes tasks of its loop that wait for something to have changed. Whoever is woken looks for itself what that is.
///
/// A notification that finds nobody is kept, one at most, so that whoever looks, finds nothing and then waits misses
/// none.
#[derive(Default)]
pub struct Notify {
    state: RefCell<State>,
    _not_send: PhantomData<Rc<()>>,
}

#[derive(Default)]
struct State {
    waiting: Waiters,
    /// A notification is kept.
    is_kept: bool,
    /// Who has a smaller ticket and was chosen was so together with all others.
    all_before: Ticket,
}

impl Notify {
    /// Nobody waits, and no notification is kept.
    pub fn new() -> Self {
        Notify::default()
    }

    /// Wakes the task that has waited longest; if none waits, the next one to wait goes on at once.
    pub fn notify_one(&self) {
        let mut state = self.state.borrow_mut();
        let waker = state.waiting.choose();
        state.is_kept |= waker.is_none();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Wakes all tasks that wait now. Nothing is kept for others.
    pub fn notify_all(&self) {
        let mut state = self.state.borrow_mut();
        state.all_before = state.waiting.next();
        let all = state.waiting.choose_all();
        drop(state);
        all.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Waits for a notification, from the first poll on. If it is dropped after `notify_one` has chosen it, that goes
    /// to the next one.
    pub fn notified(&self) -> Notified<'_> {
        Notified { notify: self, ticket: None }
    }
}

/// Waits for a notification; see [`Notify::notified`].
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
