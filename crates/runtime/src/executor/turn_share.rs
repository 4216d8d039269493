//! Long computations in short pieces: all of them together have a bounded share of every turn.
//!
//! Whoever compresses, searches or parses more than a few microseconds' worth asks before each piece. What does not fit into
//! this turn's share stands in line, first come, first served; so however many compute, others wait for one share, and at
//! most for one piece that took longer than expected. What a piece will take is first guessed and then known from those
//! before it. (In virtual time no piece takes any; the guess stays, and the order is the same every time.)

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::environment::Environment;

/// What all computations of a turn may take together: a tenth of what counts as a stall.
const SHARE_NANOS: u64 = 1_000_000;

/// How long a piece should take: several fit into a turn.
const PIECE_NANOS: u64 = 500_000;

/// How long one may take at worst: a stall is far, even on a machine that is busy.
const PIECE_NANOS_WORST: u64 = 2_000_000;

/// Of fewer units than this, what a piece takes says nothing about what a unit takes.
const UNITS_KNOWN_MIN: usize = 256;

/// What a unit of work takes, in nanoseconds; a unit is a byte, as a rule.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// On the whole.
    pub usual_nanos: u64,
    /// For the worst input that there is.
    pub worst_nanos: u64,
}

impl Effort {
    /// How many units should make a piece, at most.
    pub fn units_at_once(self) -> usize {
        let usual = PIECE_NANOS / self.usual_nanos.max(1);
        let worst = PIECE_NANOS_WORST / self.worst_nanos.max(1);
        usual.min(worst).max(1) as usize
    }
}

/// Somebody who computes in pieces. Dropped, it leaves the line.
pub struct TurnShare {
    effort: Effort,
    /// What a unit has taken of late.
    unit_nanos: u64,
    /// When the piece under way began, and what was charged for it.
    piece: (u64, u64),
    /// While it stands in line, and until it notices that its turn has come.
    place: Option<Rc<Place>>,
}

struct Place {
    nanos: u64,
    has_come: Cell<bool>,
    waker: RefCell<Waker>,
}

impl TurnShare {
    /// For work of this kind.
    pub fn new(effort: Effort) -> TurnShare {
        TurnShare { effort, unit_nanos: effort.usual_nanos.max(1), piece: (0, 0), place: None }
    }

    /// How many units should make a piece, at most.
    pub fn units_at_once(&self) -> usize {
        self.effort.units_at_once()
    }

    /// Ready when a piece of so many units may be computed now: do it, and call [`TurnShare::done`]. One that is larger than
    /// the whole share has a turn for itself.
    pub fn poll(&mut self, context: &mut Context<'_>, units: usize) -> Poll<()> {
        let nanos = (units as u64).saturating_mul(self.unit_nanos);
        Environment::with(|environment| {
            let line = &environment.computing;
            match &self.place {
                Some(place) if !place.has_come.get() => {
                    place.waker.borrow_mut().clone_from(context.waker());
                    return Poll::Pending;
                }
                // Somebody before it has taken longer than expected: it comes first in the next turn.
                Some(place) if line.has_overrun.get() => {
                    place.has_come.set(false);
                    place.waker.borrow_mut().clone_from(context.waker());
                    line.waiting.borrow_mut().push_front(Rc::clone(place));
                    return Poll::Pending;
                }
                Some(_) => self.place = None,
                None if line.waiting.borrow().is_empty() && line.try_spend(nanos) => {}
                None => {
                    let waker = RefCell::new(context.waker().clone());
                    let place = Rc::new(Place { nanos, has_come: Cell::new(false), waker });
                    line.waiting.borrow_mut().push_back(Rc::clone(&place));
                    self.place = Some(place);
                    return Poll::Pending;
                }
            }
            self.piece = (environment.clock.read(), nanos);
            Poll::Ready(())
        })
    }

    /// A piece of so many units has been computed.
    pub fn done(&mut self, units: usize) {
        Environment::with(|environment| {
            let (began, charged) = self.piece;
            let taken = environment.clock.read().saturating_sub(began);
            environment.computing.overrun(taken.saturating_sub(charged));
            // Up at once, and slowly down.
            if taken > 0 && units >= UNITS_KNOWN_MIN {
                let decayed = self.unit_nanos - self.unit_nanos / 8;
                self.unit_nanos = decayed.max(taken / units as u64).max(1);
            }
        });
    }
}

/// Those that wait for a share of a later turn. As many as there are tasks, at most.
#[derive(Default)]
pub(crate) struct Line {
    spent_nanos: Cell<u64>,
    /// The share has been used up by pieces that took longer than expected.
    has_overrun: Cell<bool>,
    waiting: RefCell<VecDeque<Rc<Place>>>,
}

impl Line {
    /// Hands out the share of the turn that begins.
    pub fn begin_turn(&self) {
        self.spent_nanos.set(0);
        self.has_overrun.set(false);
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
            if !has_left && !self.try_spend(first.nanos) {
                return None;
            }
            let first = waiting.pop_front();
            if !has_left {
                return first;
            }
        }
    }

    fn try_spend(&self, nanos: u64) -> bool {
        let spent = self.spent_nanos.get();
        let fits = spent == 0 || spent.saturating_add(nanos) <= SHARE_NANOS;
        if fits {
            self.spend(nanos.max(1));
        }
        fits
    }

    fn overrun(&self, nanos: u64) {
        self.spend(nanos);
        if nanos > 0 && self.spent_nanos.get() > SHARE_NANOS {
            self.has_overrun.set(true);
        }
    }

    fn spend(&self, nanos: u64) {
        self.spent_nanos.set(self.spent_nanos.get().saturating_add(nanos));
    }
}
