//! Which idle connections a full worker closes to make room for new ones, found with bounded work.
//!
//! nginx keeps a queue of them and takes from its head. Here an idle connection takes no byte for that: a hand goes
//! round over the slots of all connections, looks at a few at a time, and of the idle ones that it sees those are
//! closed that have waited longest. With no more slots than it looks at, these are nginx's; with more, the longest of
//! a sample, and the next sample begins behind it. There is one hand for all listening sockets of a worker, so what is
//! looked at in a turn of the loop grows neither with the connections nor with the sockets; the turns that a search
//! takes grow with the slots.
//!
//! Invariant: every connection that may be closed has its slot in the stretch that is still to be looked at, or was
//! seen outside of it when it might not be closed yet, and is looked at again when that is over. What is looked at
//! leaves the stretch unless it may be closed and stays open; the slot of whoever becomes idle is taken into it. So
//! once the stretch is empty there is nobody to close, whichever socket's task has looked.

use std::cell::Cell;
use std::time::Duration;

use gale_runtime::Moment;

use crate::worker::Search;

/// How many slots are looked at in one go: some microseconds.
pub(super) const LOOKS_MAX: usize = 256;

/// How many are looked at in a turn of the loop: to find somebody, and to choose whom to close.
const LOOKS_PER_TURN: usize = 2 * LOOKS_MAX;

/// How many connections are closed at most to make room for one, as in nginx.
const REUSED_AT_ONCE: usize = 32;

/// How long a connection that may not be closed yet is not looked at again, at least: then all are looked at.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// The connections of a worker, as far as making room goes.
pub(super) struct ConnectionSlots<'c> {
    /// How many slots there are, vacant ones included.
    pub count: usize,
    pub now: Moment,
    /// The number of the loop's turn.
    pub turn: u64,
    /// From when on the connection in this slot may be closed; none if it is busy, or if there is none.
    pub may_close_at: &'c dyn Fn(usize) -> Option<Moment>,
}

/// Looks for connections that may be closed: one search for all who want room.
#[derive(Default)]
pub(super) struct Hand {
    unseen: Cell<Stretch>,
    /// When to look at all again, because of those that might not be closed yet when they were seen.
    later: Cell<Option<Moment>>,
    /// The turn of which these looks are left.
    turn: Cell<Option<u64>>,
    looks_left: Cell<usize>,
}

/// Slots one after the other, the first of all behind the last.
#[derive(Clone, Copy, Default)]
struct Stretch {
    first: usize,
    length: usize,
    /// How many slots there are in all.
    of: usize,
}

impl Stretch {
    fn all_from(first: usize, of: usize) -> Stretch {
        Stretch { first: if first < of { first } else { 0 }, length: of, of }
    }

    fn without_first(self) -> Stretch {
        let next = self.first + 1;
        let first = if next < self.of { next } else { 0 };
        Stretch { first, length: self.length.saturating_sub(1), of: self.of }
    }

    /// As long as it takes to hold this slot, too. (One that is new makes everything be looked at, when that is
    /// noticed.)
    fn with(self, slot: usize) -> Stretch {
        if self.length == 0 {
            return Stretch { first: slot, length: 1, of: self.of };
        }
        let end = if slot < self.first { slot + self.of } else { slot };
        let distance = end.saturating_sub(self.first);
        Stretch { length: self.length.max(distance + 1), ..self }
    }
}

impl Hand {
    /// The connection in this slot has become idle.
    pub fn note(&self, slot: usize) {
        self.unseen.set(self.unseen.get().with(slot));
    }

    /// Connections may be closed from another moment on than before: all are looked at again.
    pub fn begin_again(&self) {
        self.unseen.set(Stretch { of: 0, ..self.unseen.get() });
    }

    /// Goes on with the search, and stays where it finds one that may be closed.
    pub fn find(&self, slots: &ConnectionSlots<'_>) -> Search {
        self.take_in(slots);
        loop {
            while self.unseen.get().length > 0 {
                // Whoever was accepted has what is left: one is chosen that makes room for it.
                if self.looks_left.get() <= LOOKS_MAX {
                    return Search::GoesOn;
                }
                if self.look(slots).is_some() {
                    return Search::Found;
                }
                self.step();
            }
            match self.later.get() {
                Some(later) if later <= slots.now => self.look_at_all(slots),
                later => return Search::InVain(later),
            }
        }
    }

    /// The slots of those to be closed now: of the idle ones that are seen the eighth that has waited longest, as
    /// nginx takes an eighth of all; as many as are wanted, if so many are seen. None are seen if this turn has had its
    /// looks.
    pub fn longest_idle(&self, slots: &ConnectionSlots<'_>, wanted: usize) -> Vec<usize> {
        self.take_in(slots);
        let mut idle: Vec<(Moment, usize)> = Vec::new();
        for _ in 0..slots.count.min(LOOKS_MAX).min(self.looks_left.get()) {
            let slot = self.unseen.get().first;
            if let Some(since) = self.look(slots) {
                idle.push((since, slot));
            }
            self.step();
        }
        idle.sort_unstable();
        let seen = idle.len();
        idle.truncate((seen / 8).min(REUSED_AT_ONCE).max(wanted));
        if idle.len() < seen {
            let behind = self.unseen.get().first;
            self.unseen.set(Stretch::all_from(behind, slots.count));
        }
        idle.into_iter().map(|(_, slot)| slot).collect()
    }

    /// A new turn has its own looks, and where there are new slots all are looked at.
    fn take_in(&self, slots: &ConnectionSlots<'_>) {
        if self.turn.replace(Some(slots.turn)) != Some(slots.turn) {
            self.looks_left.set(LOOKS_PER_TURN);
        }
        if self.unseen.get().of != slots.count {
            self.look_at_all(slots);
        }
    }

    fn look_at_all(&self, slots: &ConnectionSlots<'_>) {
        self.later.set(None);
        self.unseen.set(Stretch::all_from(self.unseen.get().first, slots.count));
    }

    /// Whether the connection at the first slot may be closed now, and since when; if only later, that is remembered.
    fn look(&self, slots: &ConnectionSlots<'_>) -> Option<Moment> {
        self.looks_left.set(self.looks_left.get() - 1);
        let time = (slots.may_close_at)(self.unseen.get().first)?;
        if time <= slots.now {
            return Some(time);
        }
        let time = time.max(slots.now + LOOK_PAUSE);
        self.later.set(Some(self.later.get().map_or(time, |earlier| earlier.min(time))));
        None
    }

    fn step(&self) {
        self.unseen.set(self.unseen.get().without_first());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = 10_000;

    /// Connections by their slots, and how often one was looked at.
    struct Worker {
        may_close_at: Vec<Option<Moment>>,
        now: Moment,
        turn: u64,
        looks: Cell<usize>,
        hand: Hand,
    }

    impl Worker {
        fn new(may_close_at: Vec<Option<Moment>>) -> Worker {
            Worker { may_close_at, now: second(1000), turn: 0, looks: Cell::new(0), hand: Hand::default() }
        }

        fn with<T>(&self, act: impl FnOnce(&Hand, &ConnectionSlots<'_>) -> T) -> T {
            let may_close_at = |slot: usize| {
                self.looks.set(self.looks.get() + 1);
                self.may_close_at[slot]
            };
            let (count, now, turn) = (self.may_close_at.len(), self.now, self.turn);
            act(&self.hand, &ConnectionSlots { count, now, turn, may_close_at: &may_close_at })
        }

        fn find(&self) -> Search {
            self.with(|hand, slots| hand.find(slots))
        }

        fn longest_idle(&self) -> Vec<usize> {
            self.with(|hand, slots| hand.longest_idle(slots, 1))
        }

        /// Closes idle connections for one that was accepted; how many.
        fn make_room(&mut self) -> usize {
            let chosen = self.longest_idle();
            chosen.iter().for_each(|&slot| self.may_close_at[slot] = None);
            chosen.len()
        }

        fn become_idle(&mut self, slot: usize, may_close_at: Moment) {
            self.may_close_at[slot] = Some(may_close_at);
            self.hand.note(slot);
        }

        fn next_turn(&mut self) {
            assert!(self.looks.take() <= LOOKS_PER_TURN, "bounded in every turn");
            self.turn += 1;
        }

        /// Searches to the end; how many more turns that took.
        fn search(&mut self) -> (Search, usize) {
            for turns in 0.. {
                let search = self.find();
                if search != Search::GoesOn {
                    return (search, turns);
                }
                self.next_turn();
            }
            unreachable!("it comes to an end");
        }
    }

    fn second(number: u64) -> Moment {
        Moment::from_nanos(0) + Duration::from_secs(number)
    }

    #[test]
    fn a_few_connections_are_taken_in_nginx_s_order() {
        // The one in slot 0 is the last to have become idle; those in odd ones are busy.
        let idle = |slot: u64| slot.is_multiple_of(2).then(|| second(500 - slot));
        let worker = Worker::new((0..200).map(idle).collect());
        assert_eq!(worker.longest_idle(), (0..12).map(|number| 198 - 2 * number).collect::<Vec<_>>());
        assert_eq!(worker.looks.get(), 200);
    }

    #[test]
    fn what_is_done_for_a_new_connection_does_not_grow_with_the_number_of_others() {
        let mut worker = Worker::new((0..MANY as u64).map(|slot| Some(second(slot % 997))).collect());
        // One after the other, as each is accepted and is busy from then on.
        let mut closed = 0;
        for _ in 0..MANY / LOOKS_MAX {
            assert_eq!(worker.search(), (Search::Found, 0));
            closed += worker.make_room();
            worker.next_turn();
        }
        assert_eq!(closed, MANY / LOOKS_MAX * REUSED_AT_ONCE, "room for as many");
    }

    #[test]
    fn a_lonely_idle_connection_is_found_turn_by_turn() {
        let mut worker = Worker::new(vec![None; MANY]);
        worker.may_close_at[MANY - 1] = Some(second(1));
        assert_eq!(worker.search(), (Search::Found, (MANY - 1) / LOOKS_MAX));
        assert_eq!(worker.longest_idle(), [MANY - 1]);
    }

    #[test]
    fn who_waits_is_told_of_the_one_that_becomes_idle() {
        let mut worker = Worker::new(vec![None; MANY]);
        worker.may_close_at[7] = Some(second(2000));
        let in_vain = Search::InVain(Some(second(2000)));
        assert_eq!(worker.search().0, in_vain);
        worker.next_turn();
        // One that is busy again has cost one look, however many sockets are waited at.
        worker.hand.note(5000);
        assert_eq!((worker.search(), worker.search(), worker.looks.get()), ((in_vain, 0), (in_vain, 0), 1));
        worker.become_idle(5000, second(999));
        assert_eq!((worker.search(), worker.looks.get()), ((Search::Found, 0), 2));
        assert_eq!(worker.longest_idle(), [5000]);
    }

    #[test]
    fn who_may_be_closed_later_is_found_then() {
        let mut worker = Worker::new(vec![None; 1000]);
        worker.may_close_at[7] = Some(second(1060));
        assert_eq!(worker.search().0, Search::InVain(Some(second(1060))));
        worker.become_idle(300, second(1005));
        assert_eq!(worker.search().0, Search::InVain(Some(second(1005))), "an earlier one moves it");
        worker.now = second(1005);
        assert_eq!(worker.search().0, Search::Found);
        assert_eq!(worker.make_room(), 1);
        assert_eq!(worker.search().0, Search::InVain(Some(second(1060))));
        // A new configuration protects it no longer.
        worker.may_close_at[7] = Some(second(1));
        worker.hand.begin_again();
        assert_eq!(worker.search().0, Search::Found);
    }

    #[test]
    fn of_several_that_become_idle_none_is_missed() {
        for (one, other) in [(300, 900), (900, 300), (0, 999), (999, 0)] {
            let mut worker = Worker::new(vec![None; 1000]);
            assert_eq!(worker.search().0, Search::InVain(None));
            worker.become_idle(one, second(1));
            // This one is busy again before anybody looks.
            worker.hand.note(other);
            assert_eq!(worker.search().0, Search::Found);
            assert_eq!(worker.longest_idle(), [one]);
        }
    }

    #[test]
    fn a_place_that_is_new_is_looked_at() {
        let mut worker = Worker::new(vec![None; 100]);
        assert_eq!(worker.search().0, Search::InVain(None));
        worker.hand.note(90);
        worker.may_close_at.resize(200, None);
        worker.become_idle(5, second(1));
        worker.become_idle(150, second(1));
        assert_eq!((worker.search().0, worker.longest_idle().len()), (Search::Found, 1));
        assert_eq!(worker.search().0, Search::Found, "the other one");
    }

    #[test]
    fn one_socket_s_search_is_not_led_astray_by_what_another_accepts() {
        for lonely in (0..MANY).step_by(97) {
            let mut worker = Worker::new(vec![None; MANY]);
            worker.may_close_at[lonely] = Some(second(1));
            // One is in the middle of its search when another one, who had found somebody before, closes what it sees.
            for _ in 0..20 {
                let _ = worker.find();
                worker.next_turn();
            }
            let is_closed = worker.make_room() == 1;
            assert_eq!(worker.search().0, if is_closed { Search::InVain(None) } else { Search::Found }, "{lonely}");
        }
    }

    #[test]
    fn nobody_looks_in_vain_while_there_is_one_to_close() {
        const COUNT: usize = 1500;
        let mut random: u64 = 1;
        let mut below = |max: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % max
        };
        let mut worker = Worker::new(vec![None; COUNT]);
        let mut ended_in_vain = 0;
        for _ in 0..100_000 {
            let slot = below(worker.may_close_at.len());
            match below(40) {
                0 => worker.become_idle(slot, worker.now),
                1 => worker.become_idle(slot, worker.now + Duration::from_millis(below(50) as u64)),
                2..8 => worker.may_close_at[slot] = None,
                8 => drop(worker.make_room()),
                9 => worker.now = worker.now + Duration::from_millis(1),
                10 if below(500) == 0 => worker.may_close_at.push(None),
                10..25 => worker.next_turn(),
                _ => {
                    let Search::InVain(again) = worker.find() else { continue };
                    ended_in_vain += 1;
                    // Who may be closed now was seen when that was not so, a moment ago.
                    let soon = worker.now + LOOK_PAUSE;
                    for time in worker.may_close_at.iter().flatten() {
                        assert!(again.is_some_and(|again| worker.now < again && again <= soon.max(*time)));
                    }
                }
            }
            // Few are idle at a time, so that it is often in vain.
            if below(100) == 0 {
                worker.may_close_at.fill(None);
            }
        }
        assert!(ended_in_vain > 1000, "{ended_in_vain}");
    }

    #[test]
    fn fifty_sockets_have_no_more_looks_in_a_turn_than_one() {
        let mut worker = Worker::new(vec![None; MANY]);
        for turn in 0..200 {
            worker.become_idle(turn * 7919 % MANY, second(1));
            worker.become_idle(turn * 104_729 % MANY, second(1));
            for _ in 0..50 {
                if worker.find() == Search::Found {
                    worker.make_room();
                }
            }
            worker.next_turn();
        }
    }

    #[test]
    fn a_worker_without_connections_has_nobody_to_close() {
        let mut worker = Worker::new(Vec::new());
        assert_eq!(worker.search().0, Search::InVain(None));
        assert!(worker.longest_idle().is_empty());
    }
}
