//! Which idle connections a full worker closes to make room for new ones, found with bounded work.
//!
//! nginx keeps a queue of them and takes from its head. Here an idle connection takes no byte for that: a hand goes round
//! over the places of all connections, looks at a few at a time, and of the idle ones that it sees those are closed that
//! have waited longest. With no more places than it looks at, these are nginx's; with more, the longest of a sample, and the
//! next sample begins behind it. What a search does in a turn of the loop does not grow with the number of connections.
//!
//! Invariant: who has looked at all places in vain, and waits, misses nobody: a connection that becomes idle while the worker
//! is full is noted here, and whoever waits is woken.

use std::cell::Cell;

use gale_runtime::Moment;

/// How many places are looked at in one go: some microseconds.
pub(super) const LOOKS_MAX: usize = 256;

/// How many connections are closed at most to make room for one, as in nginx.
const REUSED_AT_ONCE: usize = 32;

/// The connections of a worker, as far as making room goes.
pub(super) struct Places<'c> {
    /// How many places there are, vacant ones included.
    pub count: usize,
    pub now: Moment,
    /// From when on the connection at this place may be closed; none if it is busy, or if there is none.
    pub may_close_at: &'c dyn Fn(usize) -> Option<Moment>,
}

impl Places<'_> {
    /// Whether the connection there may be closed now; if only later, that is remembered.
    fn may_close(&self, place: usize, later: &mut Option<Moment>) -> Option<Moment> {
        let time = (self.may_close_at)(place)?;
        if time > self.now {
            *later = Some(later.map_or(time, |earlier| earlier.min(time)));
            return None;
        }
        Some(time)
    }
}

/// One search over all places, which may take several turns.
pub(super) struct Round {
    /// How many places are still to be looked at.
    left: usize,
    /// When the first of those seen may be closed that may not yet.
    pub later: Option<Moment>,
}

impl Round {
    pub fn over(places: usize) -> Round {
        Round { left: places, later: None }
    }
}

/// What has come of a search so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    /// A connection that may be closed.
    Found,
    /// Nothing yet: the next turn looks on.
    GoesOn,
    /// Nothing, at any place.
    InVain,
}

/// Where the next search goes on.
#[derive(Default)]
pub(super) struct Hand {
    place: Cell<usize>,
    noted: Cell<Noted>,
}

/// The connections that have become idle since somebody has asked.
#[derive(Clone, Copy, Default)]
enum Noted {
    #[default]
    None,
    One(usize),
    Several,
}

impl Hand {
    /// The connection at this place has become idle.
    pub fn note(&self, place: usize) {
        self.noted.set(match self.noted.get() {
            Noted::None => Noted::One(place),
            Noted::One(known) if known == place => Noted::One(place),
            Noted::One(_) | Noted::Several => Noted::Several,
        });
    }

    /// Whether a search in vain need not be begun again: just one connection has changed since.
    pub fn has_noted_one(&self) -> bool {
        matches!(self.noted.get(), Noted::One(_))
    }

    /// Goes on with the search, and stays where it finds one that may be closed.
    pub fn find(&self, round: &mut Round, places: &Places<'_>) -> Search {
        for _ in 0..round.left.min(LOOKS_MAX) {
            let place = self.place.get();
            if place < places.count && places.may_close(place, &mut round.later).is_some() {
                return Search::Found;
            }
            self.step(places);
            round.left -= 1;
        }
        match self.noted.take() {
            Noted::One(place) if places.may_close(place, &mut round.later).is_some() => {
                self.place.set(place);
                return Search::Found;
            }
            Noted::None | Noted::One(_) => {}
            Noted::Several => round.left = places.count,
        }
        if round.left > 0 { Search::GoesOn } else { Search::InVain }
    }

    /// The places of those to be closed now: of the idle ones that are seen the eighth that has waited longest, as nginx
    /// takes an eighth of all; as many as are wanted, if so many are seen.
    pub fn longest_idle(&self, places: &Places<'_>, wanted: usize) -> Vec<usize> {
        let mut idle: Vec<(Moment, usize)> = Vec::new();
        for _ in 0..places.count.min(LOOKS_MAX) {
            let place = self.place.get();
            if let Some(since) = places.may_close(place, &mut None) {
                idle.push((since, place));
            }
            self.step(places);
        }
        idle.sort_unstable();
        idle.truncate((idle.len() / 8).min(REUSED_AT_ONCE).max(wanted));
        idle.into_iter().map(|(_, place)| place).collect()
    }

    fn step(&self, places: &Places<'_>) {
        let next = self.place.get() + 1;
        self.place.set(if next < places.count { next } else { 0 });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Connections by their places, and how often one was looked at.
    struct Worker {
        may_close_at: Vec<Option<Moment>>,
        now: Moment,
        looks: Cell<usize>,
    }

    impl Worker {
        fn new(may_close_at: Vec<Option<Moment>>) -> Worker {
            Worker { may_close_at, now: second(1000), looks: Cell::new(0) }
        }

        fn with<T>(&self, act: impl FnOnce(&Places<'_>) -> T) -> T {
            let may_close_at = |place: usize| {
                self.looks.set(self.looks.get() + 1);
                self.may_close_at.get(place).copied().flatten()
            };
            act(&Places { count: self.may_close_at.len(), now: self.now, may_close_at: &may_close_at })
        }

        /// Searches to the end; how often it had to look on.
        fn search(&self, hand: &Hand, round: &mut Round) -> (Search, usize) {
            let mut turns = 0;
            loop {
                let before = self.looks.get();
                let search = self.with(|places| hand.find(round, places));
                assert!(self.looks.get() - before <= LOOKS_MAX + 1, "bounded in every turn");
                if search != Search::GoesOn {
                    return (search, turns);
                }
                turns += 1;
            }
        }
    }

    fn second(number: u64) -> Moment {
        Moment::from_nanos(0) + Duration::from_secs(number)
    }

    #[test]
    fn a_few_connections_are_taken_in_nginx_s_order() {
        // The one at place 0 is the last to have become idle; those at odd places are busy.
        let idle = |place: u64| place.is_multiple_of(2).then(|| second(500 - place));
        let worker = Worker::new((0..200).map(idle).collect());
        let hand = Hand::default();
        let closed = worker.with(|places| hand.longest_idle(places, 1));
        assert_eq!(closed, (0..12).map(|number| 198 - 2 * number).collect::<Vec<_>>());
        assert_eq!(worker.looks.get(), 200);
    }

    #[test]
    fn what_is_done_for_a_new_connection_does_not_grow_with_the_number_of_others() {
        const COUNT: usize = 10_000;
        let mut worker = Worker::new((0..COUNT as u64).map(|place| Some(second(place % 997))).collect());
        let hand = Hand::default();
        // One after the other, as each is accepted and is busy from then on.
        let mut closed = 0;
        for _ in 0..COUNT / LOOKS_MAX {
            worker.looks.set(0);
            assert_eq!(worker.search(&hand, &mut Round::over(COUNT)), (Search::Found, 0));
            let places = worker.with(|places| hand.longest_idle(places, 1));
            assert!(worker.looks.get() <= 2 * LOOKS_MAX, "{}", worker.looks.get());
            closed += places.len();
            places.into_iter().for_each(|place| worker.may_close_at[place] = None);
        }
        assert_eq!(closed, COUNT / LOOKS_MAX * REUSED_AT_ONCE, "room for as many");
    }

    #[test]
    fn a_lonely_idle_connection_is_found_turn_by_turn() {
        const COUNT: usize = 10_000;
        let mut worker = Worker::new(vec![None; COUNT]);
        worker.may_close_at[COUNT - 1] = Some(second(1));
        let hand = Hand::default();
        let turns = (COUNT - 1) / LOOKS_MAX;
        assert_eq!(worker.search(&hand, &mut Round::over(COUNT)), (Search::Found, turns));
        assert_eq!(worker.with(|places| hand.longest_idle(places, 1)), [COUNT - 1]);
        assert_eq!(worker.looks.get(), COUNT + LOOKS_MAX);
    }

    #[test]
    fn who_waits_is_told_of_the_one_that_becomes_idle() {
        const COUNT: usize = 10_000;
        let mut worker = Worker::new(vec![None; COUNT]);
        worker.may_close_at[7] = Some(second(2000));
        let hand = Hand::default();
        let mut round = Round::over(COUNT);
        assert_eq!(worker.search(&hand, &mut round).0, Search::InVain);
        assert_eq!(round.later, Some(second(2000)));
        // One that is busy again has cost one look.
        worker.looks.set(0);
        hand.note(5000);
        assert!(hand.has_noted_one());
        assert_eq!((worker.search(&hand, &mut round), worker.looks.get()), ((Search::InVain, 0), 1));
        worker.may_close_at[5000] = Some(second(999));
        hand.note(5000);
        assert_eq!((worker.search(&hand, &mut round), worker.looks.get()), ((Search::Found, 0), 2));
        assert_eq!(worker.with(|places| hand.longest_idle(places, 1)), [5000]);
    }

    #[test]
    fn of_several_that_become_idle_none_is_missed() {
        let mut worker = Worker::new(vec![None; 1000]);
        let hand = Hand::default();
        let mut round = Round::over(1000);
        assert_eq!(worker.search(&hand, &mut round).0, Search::InVain);
        // The last one is busy again before anybody looks.
        worker.may_close_at[300] = Some(second(1));
        hand.note(300);
        hand.note(900);
        assert!(!hand.has_noted_one());
        assert_eq!(worker.search(&hand, &mut round).0, Search::Found);
        assert_eq!(worker.with(|places| hand.longest_idle(places, 1)), [300]);
    }

    #[test]
    fn a_worker_without_connections_has_nobody_to_close() {
        let worker = Worker::new(Vec::new());
        let hand = Hand::default();
        assert_eq!(worker.search(&hand, &mut Round::over(0)).0, Search::InVain);
        assert!(worker.with(|places| hand.longest_idle(places, 1)).is_empty());
    }
}
