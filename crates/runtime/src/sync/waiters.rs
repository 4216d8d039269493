//! Tasks that wait for the same event, woken in order of their arrival.
//!
//! Each has a ticket, and tickets ascend. A ticket that is not in the queue any more was chosen.

use std::collections::VecDeque;
use std::task::Waker;

/// Identifies a waiter.
pub type Ticket = u64;

/// A queue of tasks.
#[derive(Default)]
pub struct Waiters {
    /// Ascending by ticket.
    queue: VecDeque<(Ticket, Waker)>,
    next: Ticket,
}

impl Waiters {
    /// Adds a waiter at the end.
    pub fn join(&mut self, waker: &Waker) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        self.queue.push_back((ticket, waker.clone()));
        ticket
    }

    /// Replaces the waker of this ticket; returns the previous one, to be dropped when nothing is locked. `None` if the
    /// ticket was chosen.
    pub fn renew(&mut self, ticket: Ticket, waker: &Waker) -> Option<Waker> {
        let index = self.find(ticket).ok()?;
        Some(std::mem::replace(&mut self.queue[index].1, waker.clone()))
    }

    /// Chooses the waiter that came first; the caller wakes it.
    pub fn choose(&mut self) -> Option<Waker> {
        self.queue.pop_front().map(|(_, waker)| waker)
    }

    /// Chooses all waiters; the caller wakes them.
    pub fn choose_all(&mut self) -> VecDeque<(Ticket, Waker)> {
        std::mem::take(&mut self.queue)
    }

    /// Removes a waiter; returns its waker, to be dropped when nothing is locked. `None` if the ticket was chosen.
    pub fn leave(&mut self, ticket: Ticket) -> Option<Waker> {
        let index = self.find(ticket).ok()?;
        self.queue.remove(index).map(|(_, waker)| waker)
    }

    /// The next ticket: all smaller ones were given out.
    pub fn next(&self) -> Ticket {
        self.next
    }

    fn find(&self, ticket: Ticket) -> Result<usize, usize> {
        self.queue.binary_search_by_key(&ticket, |&(ticket, _)| ticket)
    }
}
