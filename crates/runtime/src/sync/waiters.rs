//! Tasks that wait for the same thing, woken in the order in which they came.
//!
//! Each has a ticket, and tickets grow. Who is not in the queue any more has been chosen.

use std::collections::VecDeque;
use std::task::Waker;

/// Names one who waits.
pub(crate) type Ticket = u64;

#[derive(Default)]
pub(crate) struct Waiters {
    /// By ticket.
    queue: VecDeque<(Ticket, Waker)>,
    next: Ticket,
}

impl Waiters {
    /// Takes a place at the end.
    pub fn join(&mut self, waker: &Waker) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        self.queue.push_back((ticket, waker.clone()));
        ticket
    }

    /// Whoever still waits with this ticket is to be woken by this waker from now on; returns the one before, to be
    /// dropped when nothing is locked. `None` if it has been chosen.
    pub fn renew(&mut self, ticket: Ticket, waker: &Waker) -> Option<Waker> {
        let index = self.find(ticket).ok()?;
        Some(std::mem::replace(&mut self.queue[index].1, waker.clone()))
    }

    /// Chooses the one who has waited longest, to be woken.
    pub fn choose(&mut self) -> Option<Waker> {
        self.queue.pop_front().map(|(_, waker)| waker)
    }

    /// Chooses all, to be woken.
    pub fn choose_all(&mut self) -> VecDeque<(Ticket, Waker)> {
        std::mem::take(&mut self.queue)
    }

    /// Gives the place up; returns its waker, to be dropped when nothing is locked. `None` if the ticket has been
    /// chosen.
    pub fn leave(&mut self, ticket: Ticket) -> Option<Waker> {
        let index = self.find(ticket).ok()?;
        self.queue.remove(index).map(|(_, waker)| waker)
    }

    /// The ticket of whoever comes next: all that are smaller have come.
    pub fn next(&self) -> Ticket {
        self.next
    }

    fn find(&self, ticket: Ticket) -> Result<usize, usize> {
        self.queue.binary_search_by_key(&ticket, |&(ticket, _)| ticket)
    }
}
