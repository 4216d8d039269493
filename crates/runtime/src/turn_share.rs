//! Long computations in short pieces: all of them together have a bounded share of every turn.
//!
//! Whoever compresses, searches or hashes more than a few microseconds' worth asks before each piece and says about how
//! long that takes. What does not fit into this turn's share stands in line, first come, first served; so however many
//! compute, others wait for one share at most. The cost is an estimate of the caller's and no clock is read: a simulated
//! loop computes in the same order every time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::environment::Environment;

/// What all computations of a turn may take together, in microseconds: a tenth of what counts as a stall.
const SHARE_MICROS: u32 = 1000;

/// The longest piece that should be asked for, in microseconds: several fit into a turn.
pub const PIECE_MICROS: u32 = 500;

/// Somebody who computes in pieces. Dropped, it leaves the line.
#[derive(Default)]
pub struct TurnShare {
    /// While it stands in line, and until it notices that its turn has come.
    place: Option<Rc<Place>>,
}

struct Place {
    micros: u32,
    has_come: Cell<bool>,
    waker: RefCell<Waker>,
}

impl TurnShare {
    /// Ready when a piece that takes about `micros` microseconds may be computed now. A piece that is larger than the whole
    /// share has a turn for itself.
    pub fn poll(&mut self, context: &mut Context<'_>, micros: u32) -> Poll<()> {
        if let Some(place) = &self.place {
            if !place.has_come.get() {
                place.waker.borrow_mut().clone_from(context.waker());
                return Poll::Pending;
            }
            self.place = None;
            return Poll::Ready(());
        }
        Environment::with(|environment| {
            let line = &environment.computing;
            if line.waiting.borrow().is_empty() && line.try_spend(micros) {
                return Poll::Ready(());
            }
            let waker = RefCell::new(context.waker().clone());
            let place = Rc::new(Place { micros, has_come: Cell::new(false), waker });
            line.waiting.borrow_mut().push_back(Rc::clone(&place));
            self.place = Some(place);
            Poll::Pending
        })
    }
}

/// Those that wait for a share of a later turn. As many as there are tasks, at most.
#[derive(Default)]
pub(crate) struct Line {
    spent_micros: Cell<u32>,
    waiting: RefCell<VecDeque<Rc<Place>>>,
}

impl Line {
    /// Hands out the share of the turn that begins.
    pub fn begin_turn(&self) {
        self.spent_micros.set(0);
        while let Some(place) = self.next() {
            place.has_come.set(true);
            place.waker.borrow().wake_by_ref();
        }
    }

    /// Whether the next turn has something to compute.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.borrow().is_empty()
    }

    /// The first in line, if what it asks for fits in.
    fn next(&self) -> Option<Rc<Place>> {
        let mut waiting = self.waiting.borrow_mut();
        loop {
            let first = waiting.front()?;
            let has_left = Rc::strong_count(first) == 1;
            if !has_left && !self.try_spend(first.micros) {
                return None;
            }
            let first = waiting.pop_front();
            if !has_left {
                return first;
            }
        }
    }

    fn try_spend(&self, micros: u32) -> bool {
        let spent = self.spent_micros.get();
        let fits = spent == 0 || spent.saturating_add(micros) <= SHARE_MICROS;
        if fits {
            self.spent_micros.set(spent.saturating_add(micros.max(1)));
        }
        fits
    }
}
