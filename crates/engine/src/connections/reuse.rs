//! Selection of idle connections that a full worker closes to make room, with bounded work.
//!
//! nginx keeps a queue of idle connections and takes from its head. Here an idle connection needs no memory for that: a
//! clock hand moves over the slots of all connections, examines a few at a time, and closes the idle ones among them
//! that have waited longest. If all slots fit one look, the result is nginx's; otherwise it is the longest idle of a
//! sample, and the next sample follows. All listening sockets of a worker share one hand, so the work in a turn grows
//! neither with connections nor with sockets; the number of turns that a search takes grows with the slots.
//!
//! Invariant: each connection that may be closed is in the stretch yet to be examined, or was seen when it could not be
//! closed yet, and is examined again after that time. Examined slots leave the stretch unless the connection may be
//! closed and stays open; the slot of a connection that becomes idle is added. So an empty stretch means that there is
//! nothing to close, whichever socket's task has searched.

use std::cell::Cell;
use std::time::Duration;

use gale_runtime::Moment;
use gale_worker::Search;

/// Slots examined in one go: some microseconds.
pub(super) const LOOKS_MAX: usize = 256;

/// Slots examined in a turn of the loop: to find a connection, and to choose those to close.
const LOOKS_PER_TURN: usize = 2 * LOOKS_MAX;

/// Most connections closed to make room for one, as in nginx.
const REUSED_AT_ONCE: usize = 32;

/// Shortest time until all slots are examined again for connections that could not be closed yet.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// A worker's connections, as seen by the search for room.
pub(super) struct ConnectionSlots<'c> {
    /// Number of slots, including vacant ones.
    pub count: usize,
    pub now: Moment,
    /// Number of the loop's turn.
    pub turn: u64,
    /// Time from which the connection in a slot may be closed; `None` if it is busy or the slot vacant.
    pub may_close_at: &'c dyn Fn(usize) -> Option<Moment>,
}

/// Search for connections that may be closed, shared by all tasks that need room.
#[derive(Default)]
pub(super) struct Hand {
    unseen: Cell<Stretch>,
    /// Time when connections that could not be closed yet may be closable: all slots are then examined again.
    later: Cell<Option<Moment>>,
    /// Turn that `looks_left` refers to.
    turn: Cell<Option<u64>>,
    looks_left: Cell<usize>,
}

/// Consecutive slots, wrapping around.
#[derive(Clone, Copy, Default)]
struct Stretch {
    first: usize,
    length: usize,
    /// Total number of slots.
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

    /// Extends the stretch to include this slot. (A new slot causes all to be examined, once the new number is
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
    /// Notes that the connection in this slot has become idle.
    pub fn note(&self, slot: usize) {
        self.unseen.set(self.unseen.get().with(slot));
    }

    /// Examines all slots again, because connections may now be closed at other times.
    pub fn begin_again(&self) {
        self.unseen.set(Stretch { of: 0, ..self.unseen.get() });
    }

    /// Continues the search, and stops at a connection that may be closed.
    pub fn find(&self, slots: &ConnectionSlots<'_>) -> Search {
        self.take_in(slots);
        loop {
            while self.unseen.get().length > 0 {
                // The remaining looks are for choosing, once a connection was accepted.
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

    /// Slots of the connections to close now: of the idle ones seen, the eighth that has waited longest (nginx takes an
    /// eighth of all), but at least `wanted`, if that many are seen. Empty if this turn has used up its looks.
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

    /// Resets the looks in a new turn, and examines all slots if their number has changed.
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

    /// Examines the first slot: returns since when its connection may be closed, if it may be now. A later time is
    /// remembered.
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

    /// Connections by slot, with the number of looks at them.
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

        /// Closes idle connections for a new one; returns their number.
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

        /// Searches to the end; returns the number of additional turns.
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
        // The connection in slot 0 became idle last; those in odd slots are busy.
        let idle = |slot: u64| slot.is_multiple_of(2).then(|| second(500 - slot));
        let worker = Worker::new((0..200).map(idle).collect());
        assert_eq!(worker.longest_idle(), (0..12).map(|number| 198 - 2 * number).collect::<Vec<_>>());
        assert_eq!(worker.looks.get(), 200);
    }

    #[test]
    fn work_for_a_new_connection_does_not_grow_with_the_number_of_connections() {
        let mut worker = Worker::new((0..MANY as u64).map(|slot| Some(second(slot % 997))).collect());
        // One after the other; each accepted connection is busy from then on.
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
    fn search_finds_the_connection_that_becomes_idle() {
        let mut worker = Worker::new(vec![None; MANY]);
        worker.may_close_at[7] = Some(second(2000));
        let in_vain = Search::InVain(Some(second(2000)));
        assert_eq!(worker.search().0, in_vain);
        worker.next_turn();
        // A connection that is busy again costs one look, however many sockets wait.
        worker.hand.note(5000);
        assert_eq!((worker.search(), worker.search(), worker.looks.get()), ((in_vain, 0), (in_vain, 0), 1));
        worker.become_idle(5000, second(999));
        assert_eq!((worker.search(), worker.looks.get()), ((Search::Found, 0), 2));
        assert_eq!(worker.longest_idle(), [5000]);
    }

    #[test]
    fn connection_that_may_be_closed_later_is_found_then() {
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
            // This one is busy again before it is examined.
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
    fn search_of_one_socket_is_unaffected_by_accepts_of_another() {
        for lonely in (0..MANY).step_by(97) {
            let mut worker = Worker::new(vec![None; MANY]);
            worker.may_close_at[lonely] = Some(second(1));
            // One task is in the middle of its search when another, which had found a connection before, closes it.
            for _ in 0..20 {
                let _ = worker.find();
                worker.next_turn();
            }
            let is_closed = worker.make_room() == 1;
            assert_eq!(worker.search().0, if is_closed { Search::InVain(None) } else { Search::Found }, "{lonely}");
        }
    }

    #[test]
    fn search_succeeds_while_a_connection_may_be_closed() {
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
                    // A connection that may be closed now was seen a moment ago, when it could not be closed.
                    let soon = worker.now + LOOK_PAUSE;
                    for time in worker.may_close_at.iter().flatten() {
                        assert!(again.is_some_and(|again| worker.now < again && again <= soon.max(*time)));
                    }
                }
            }
            // Few are idle at a time, so that searches often fail.
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
    fn worker_without_connections_has_none_to_close() {
        let mut worker = Worker::new(Vec::new());
        assert_eq!(worker.search().0, Search::InVain(None));
        assert!(worker.longest_idle().is_empty());
    }
}
