//! The watchdog: a thread that observes the loops, reports the causes of stalls, and makes other loops accept
//! connections of a stalled one.
//!
//! It sleeps until a loop's timer expires in a turn that has become 5 to 10 ms old (`stall/turn_timer.rs`), and then
//! looks every 5 ms until the turn has ended. A turn of 5 ms is suspect and its thread is sampled (procfs and its
//! processor clock); one of 10 ms is a stall and is sampled at every look. It is filed as what it was for the longest
//! time, when it has ended or after a second. Loops only store the beginning and the code of a turn, and set the timer.
//!
//! While a loop stalls, the kernel still queues connections on sockets that only this loop accepts from (SO_REUSEPORT),
//! and may have reported one on a shared socket to it alone. At every look another loop that listens on the same
//! address is asked to accept them; see `ListenerDriver::accept_for_another`.
//!
//! A connection waits 5 to 20 ms for a stalled loop, not until the stall ends
//! (`docs/decisions/0011-accepting.md`), and a site learns which code held up its clients.
//!
//! It never waits for a loop. If procfs is not readable, a stall is filed when it has ended, by the loop's own
//! counters. Loops in virtual time are ignored.

use std::collections::{HashSet, VecDeque};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustix::net::sockopt;

use crate::environment::Environment;
use crate::inbox::{self, Inbox, Remote};
use crate::socket::{AcceptQueue, SocketAddress};
use crate::stall::turn_timer;
use crate::stall::watched::{WatchedListener, has_connection, monotonic_nanos};
use crate::stall::{EndedStall, STALL_THRESHOLD, SUSPECT_AGE, Sample, StallKind, Turns, judge};
use crate::time::Moment;

/// Interval of looks while a loop is in a long turn.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Minimum time between the two samples by which a thread is judged.
const JUDGED_NANOS_MIN: u64 = 3_000_000;

/// Age at which a stall is reported although it has not ended.
const REPORT_NANOS: u64 = 1_000_000_000;

/// Minimum time between two reports of a kind.
const REPORT_EVERY_NANOS: u64 = 60_000_000_000;

/// Number of stalls kept for [`last_stalls`].
const STALLS_KEPT_MAX: usize = 32;

/// A stall, for the log.
#[derive(Clone, Debug)]
pub struct Stall {
    /// The loop's [`crate::worker`].
    pub worker: usize,
    /// Beginning of its turn.
    pub began: Moment,
    /// Its cause.
    pub kind: StallKind,
    /// Its length, so far if it goes on.
    pub duration: Duration,
    /// True if it has ended.
    pub is_over: bool,
    /// The code that ran: the type of the task, as Rust names it.
    pub at: &'static str,
    /// Stalls of this kind, on all loops, since the last report.
    pub untold: u64,
}

type Reporter = Arc<dyn Fn(&Stall) + Send + Sync>;

static REPORTER: RwLock<Option<Reporter>> = RwLock::new(None);

/// Sets the function that reports stalls: one of each kind a minute at most. It is called on the watchdog's thread.
pub fn set_stall_reporter(reporter: impl Fn(&Stall) + Send + Sync + 'static) {
    let displaced = REPORTER.write().replace(Arc::new(reporter));
    drop(displaced);
}

/// The last stalls filed, of all loops, latest last. Only the watchdog's thread writes them, a few in a second at most.
static LAST: Mutex<VecDeque<Stall>> = Mutex::new(VecDeque::new());

/// The last stalls filed, latest last: a few dozen at most. A stall that goes on is included after a second.
pub fn last_stalls() -> Vec<Stall> {
    LAST.lock().iter().cloned().collect()
}

/// Keeps a stall for [`last_stalls`], in place of an earlier entry of the same stall.
fn keep(stall: &Stall) {
    let mut last = LAST.lock();
    last.retain(|kept| (kept.worker, kept.began) != (stall.worker, stall.began));
    if last.len() == STALLS_KEPT_MAX {
        last.pop_front();
    }
    last.push_back(stall.clone());
}

/// The loops of this process, each with its worker number and, through [`Remote::turns`], its counters: for a status
/// page.
pub fn workers() -> Vec<(usize, Remote)> {
    inbox::all().into_iter().map(|inbox| (inbox.watched.worker, Remote::new(inbox))).collect()
}

/// A listening socket and its queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerStatus {
    /// The local address.
    pub address: SocketAddress,
    /// The loop's [`crate::worker`], if it is the only one that accepts from it.
    pub worker: Option<usize>,
    /// Connections waiting to be accepted.
    pub waiting: u32,
    /// Limit of the queue: the argument of listen(2), as far as the kernel grants it.
    pub waiting_max: u32,
}

/// The TCP sockets that the loops of this process accept from, each once: for a status page. A few system calls for
/// each, none of which waits.
pub fn listeners() -> Vec<ListenerStatus> {
    let mut known = HashSet::new();
    let mut listeners = Vec::new();
    for inbox in inbox::all() {
        for WatchedListener { socket, own_address } in inbox.watched.listeners() {
            // Loops may have different descriptors of one socket.
            let is_first = sockopt::socket_cookie(&socket).is_ok_and(|cookie| known.insert(cookie));
            let queue = is_first.then(|| AcceptQueue::of(socket.as_fd())).and_then(Result::ok);
            let Some(AcceptQueue { waiting, waiting_max }) = queue else { continue };
            let Ok(address) = SocketAddress::bound_to(&socket) else { continue };
            let worker = own_address.map(|_| inbox.watched.worker);
            listeners.push(ListenerStatus { address, worker, waiting, waiting_max });
        }
    }
    listeners.sort_by_cached_key(|listener| (listener.address.to_string(), listener.worker));
    // After a reload with fewer workers, one may have several sockets of an address.
    listeners.dedup_by(|next, first| {
        let is_same = (&next.address, next.worker) == (&first.address, first.worker);
        if is_same {
            first.waiting = first.waiting.saturating_add(next.waiting);
            first.waiting_max = first.waiting_max.saturating_add(next.waiting_max);
        }
        is_same
    });
    listeners
}

/// Starts the watchdog of this process, once; further calls do nothing.
///
/// Errors: no thread could be started.
pub fn start_watchdog() -> std::io::Result<()> {
    let mut is_started = STARTED.lock();
    if !*is_started {
        let run = || {
            crate::affinity::leave_processors();
            Watchdog::default().run();
        };
        thread::Builder::new().name("watchdog".into()).spawn(run)?;
        *is_started = true;
    }
    Ok(())
}

static STARTED: Mutex<bool> = Mutex::new(false);

/// True if the current turn of the loop with this number is a stall already, or the loop has ended.
pub(crate) fn is_stalled(index: usize) -> bool {
    inbox::of_loop(index).is_none_or(|inbox| {
        let began = inbox.turns.began();
        began != 0 && monotonic_nanos().saturating_sub(began) > STALL_THRESHOLD.as_nanos() as u64
    })
}

#[derive(Default)]
struct Watchdog {
    loops: Vec<WatchedLoop>,
    /// Version of the table of loops that `loops` was made from.
    version: Option<usize>,
    /// For each kind: time of the last report, and number of stalls since.
    reports: [(Option<u64>, u64); StallKind::ALL.len()],
    /// Index of the next loop to accept for another.
    turn: usize,
}

struct WatchedLoop {
    inbox: Arc<Inbox>,
    suspect: Option<Suspect>,
    /// At the last look a turn had not stored its beginning yet. It may have lost its processor after it had read the
    /// clock: then it does not set the timer again, though that has expired.
    was_beginning: bool,
}

/// A long turn.
struct Suspect {
    began: u64,
    last: Option<Sample>,
    /// The code that it ran at that time; empty if the turn may have ended before.
    at: &'static str,
    /// Time for which samples showed each [`StallKind`].
    spans: [Span; StallKind::ALL.len()],
    /// The kind that it was reported as while it went on.
    reported: Option<StallKind>,
}

/// Time for which a turn was of one kind, and the code that it ran when that began.
#[derive(Clone, Copy, Default)]
struct Span {
    nanos: u64,
    at: &'static str,
}

impl Suspect {
    fn new(began: u64, first: Option<Sample>, at: &'static str) -> Suspect {
        Suspect { began, last: first, at, spans: Default::default(), reported: None }
    }

    /// Notes what the turn was in this time.
    fn note(&mut self, kind: StallKind, nanos: u64, at: &'static str) {
        let span = &mut self.spans[kind as usize];
        if span.nanos == 0 {
            span.at = at;
        }
        span.nanos += nanos;
    }

    /// The kind that the turn was for the longest time, and its code; `None` if it was sampled once only.
    fn longest(&self) -> Option<(StallKind, &'static str)> {
        let kind = StallKind::ALL.into_iter().max_by_key(|kind| self.spans[*kind as usize].nanos)?;
        let span = self.spans[kind as usize];
        (span.nanos > 0).then_some((kind, span.at))
    }

    fn is_stall(&self, now: u64) -> bool {
        now.saturating_sub(self.began) > STALL_THRESHOLD.as_nanos() as u64
    }
}

impl Watchdog {
    fn run(mut self) {
        loop {
            let must_look = self.loops.iter().any(WatchedLoop::must_look_again);
            if turn_timer::wait(must_look.then_some(LOOK_EVERY)).is_err() {
                // The set of timers exists and is valid, so this is not expected.
                thread::sleep(LOOK_EVERY);
            }
            self.look();
        }
    }

    fn look(&mut self) {
        self.take_up_loops();
        let now = monotonic_nanos();
        let reports: Vec<Stall> = self.loops.iter_mut().filter_map(|each| each.look(now)).collect();
        for report in reports {
            self.report(now, report);
        }
        self.help(now);
    }

    fn take_up_loops(&mut self) {
        let version = inbox::version();
        if self.version.replace(version) == Some(version) {
            return;
        }
        let mut known = std::mem::take(&mut self.loops);
        for inbox in inbox::all() {
            let position = known.iter().position(|each| Arc::ptr_eq(&each.inbox, &inbox));
            let fresh = || WatchedLoop::new(inbox);
            self.loops.push(position.map_or_else(fresh, |position| known.swap_remove(position)));
        }
    }

    fn report(&mut self, now: u64, mut stall: Stall) {
        let (last, untold) = &mut self.reports[stall.kind as usize];
        if last.is_some_and(|last| now.saturating_sub(last) < REPORT_EVERY_NANOS) {
            *untold += 1;
            return;
        }
        *last = Some(now);
        stall.untold = std::mem::take(untold);
        // Called without the lock, and not trusted to return normally, like all foreign code.
        let reporter = REPORTER.read().clone();
        if let Some(reporter) = reporter {
            let _ = catch_unwind(AssertUnwindSafe(|| reporter(&stall))).map_err(std::mem::forget);
        }
    }

    /// Makes other loops accept the connections that wait for stalled loops.
    fn help(&mut self, now: u64) {
        let is_stalled = |each: &WatchedLoop| each.suspect.as_ref().is_some_and(|suspect| suspect.is_stall(now));
        let (stalled, others): (Vec<&WatchedLoop>, Vec<&WatchedLoop>) =
            self.loops.iter().partition(|each| is_stalled(each));
        if stalled.is_empty() || others.is_empty() {
            return;
        }
        let mut is_shared_waiting = false;
        for each in stalled {
            let listeners = each.inbox.watched.listeners();
            for WatchedListener { socket, own_address } in listeners {
                if !has_connection(&socket) {
                    continue;
                }
                let Some(address) = own_address else {
                    is_shared_waiting = true;
                    continue;
                };
                self.turn = self.turn.wrapping_add(1);
                let from = self.turn % others.len();
                let (before, after) = others.split_at(from);
                let helper = after.iter().chain(before).find(|other| other.inbox.watched.listens_alone_on(&address));
                if let Some(helper) = helper {
                    // If its inbox refuses, it or another one is asked at the next look.
                    let _ = Remote::new(Arc::clone(&helper.inbox)).run(Box::new(move || {
                        Environment::with(|environment| environment.driver.accept_for_another(&address, socket));
                    }));
                }
            }
        }
        if is_shared_waiting {
            for other in others {
                let _ = Remote::new(Arc::clone(&other.inbox)).run(Box::new(|| {
                    Environment::with(|environment| environment.driver.rearm_shared_listeners());
                }));
            }
        }
    }
}

impl WatchedLoop {
    fn new(inbox: Arc<Inbox>) -> WatchedLoop {
        WatchedLoop { inbox, suspect: None, was_beginning: false }
    }

    /// True if the next look must not wait for a timer.
    fn must_look_again(&self) -> bool {
        self.suspect.is_some() || self.was_beginning
    }

    /// Looks at the loop, and returns a stall to report.
    fn look(&mut self, now: u64) -> Option<Stall> {
        // In this order, so that a turn that stores its beginning in between is seen.
        self.was_beginning = self.inbox.turns.is_beginning();
        let began = self.inbox.turns.began();
        let ended = self.suspect.take_if(|suspect| suspect.began != began);
        let ended = ended.and_then(|suspect| self.end(suspect));
        // The current turn is looked at in any case: if its timer has expired already, nothing else wakes the watchdog
        // for it. If it was not looked at before, there is nothing to report yet.
        let present = self.look_at_turn(began, now);
        ended.or(present)
    }

    /// Looks at the turn that began at `began`, and returns it as a stall to report while it goes on.
    fn look_at_turn(&mut self, began: u64, now: u64) -> Option<Stall> {
        if began == 0 || now.saturating_sub(began) < SUSPECT_AGE.as_nanos() as u64 {
            return None;
        }
        let (inbox, turns, watched) = (&self.inbox, &self.inbox.turns, &self.inbox.watched);
        let suspect = self.suspect.get_or_insert_with(|| {
            let first = watched.sample();
            let at = Some(turns.at()).filter(|_| turns.began() == began).unwrap_or_default();
            Suspect::new(began, first, at)
        });
        if !suspect.is_stall(now) {
            return None;
        }
        if let Some(before) = suspect.last
            && now >= before.at + JUDGED_NANOS_MIN
            && let Some(sample) = watched.sample()
        {
            let at = turns.at();
            // The sample belongs to this turn only if that still goes on.
            if turns.began() != began {
                return None;
            }
            suspect.note(judge(&before, &sample), sample.at.saturating_sub(before.at), at);
            (suspect.last, suspect.at) = (Some(sample), at);
        }
        let age = now.saturating_sub(began);
        if age < REPORT_NANOS || suspect.reported.is_some() {
            return None;
        }
        let (kind, at) = suspect.longest()?;
        suspect.reported = Some(kind);
        turns.file(kind);
        let stall = stall(inbox, kind, at, began, age, false);
        keep(&stall);
        Some(stall)
    }

    /// Ends a suspect turn. The time after its last sample is judged by that and the thread's usage at its end; most
    /// stalls are so short that this is all of it. If it was sampled too late for that, since the watchdog had no
    /// processor either, the loop's own judgement counts.
    fn end(&self, mut suspect: Suspect) -> Option<Stall> {
        let turns: &Turns = &self.inbox.turns;
        let EndedStall { nanos, run, sleeps, guess } = turns.ended_stall(suspect.began)?;
        let ended_at = suspect.began + nanos;
        if let Some(last) = suspect.last.filter(|last| ended_at >= last.at + JUDGED_NANOS_MIN) {
            // It may have waited for a processor since: then preemption is more likely.
            let delay = self.inbox.watched.sample().map_or(last.delay, |now| now.delay);
            let kind = judge(&last, &Sample { at: ended_at, state: last.state, run, delay, sleeps });
            suspect.note(kind, ended_at - last.at, suspect.at);
        }
        let (kind, at) = suspect.longest().unwrap_or((guess, suspect.at));
        if suspect.reported.is_none() {
            turns.file(kind);
        }
        turns.file_time(kind, nanos);
        let stall = stall(&self.inbox, kind, at, suspect.began, nanos, true);
        keep(&stall);
        suspect.reported.is_none().then_some(stall)
    }
}

fn stall(inbox: &Inbox, kind: StallKind, at: &'static str, began: u64, nanos: u64, is_over: bool) -> Stall {
    let (worker, began) = (inbox.watched.worker, Moment::from_nanos(began));
    Stall { worker, began, kind, duration: Duration::from_nanos(nanos), is_over, at, untold: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stall::usage::ThreadUsage;

    #[test]
    fn stall_that_ends_before_it_is_filed_is_reported_with_its_earlier_work() {
        let inbox = Inbox::new(3).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        let (began, suspect_at, ended) = (1_000_000, 7_000_000, 13_000_000);
        inbox.turns.begin(began);
        inbox.turns.note(|| "something long");
        assert!(look.look(suspect_at).is_none());
        inbox.turns.note(|| "something else");
        inbox.turns.end(began, ended);
        let stall = look.look(ended).expect("it was long");
        assert_eq!((stall.at, stall.duration, stall.is_over), ("something long", Duration::from_millis(12), true));
        assert_eq!(inbox.turns.filed(stall.kind).count, 1);
        let kept = |stall: &Stall| (stall.worker, stall.began) == (3, Moment::from_nanos(began)) && stall.is_over;
        assert!(last_stalls().iter().any(kept));
    }

    #[test]
    fn a_turn_that_is_long_already_when_a_stall_is_seen_to_be_over_is_suspect_at_once() {
        let inbox = Inbox::new(5).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        inbox.turns.begin(1_000_000);
        assert!(look.look(7_000_000).is_none());
        inbox.turns.end(1_000_000, 13_000_000);
        inbox.turns.begin(13_000_001);
        // The watchdog had no processor until the timer of the second turn had expired.
        let stall = look.look(24_000_000).expect("the first was long");
        assert_eq!(stall.duration, Duration::from_millis(12));
        assert_eq!(look.suspect.map(|suspect| suspect.began), Some(13_000_001));
    }

    #[test]
    fn a_turn_that_loses_its_processor_before_it_says_when_it_began_is_looked_at_until_it_is_over() {
        let inbox = Inbox::new(6).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        inbox.turns.announce();
        assert!(look.look(20_000_000).is_none());
        assert!(look.must_look_again(), "its timer has expired");
        assert!(look.suspect.is_none(), "its age is unknown");
        inbox.turns.begin(1_000_000);
        assert!(look.look(25_000_000).is_none());
        assert!(look.must_look_again());
        inbox.turns.end(1_000_000, 27_000_000);
        let stall = look.look(30_000_000).expect("it was long");
        assert_eq!(stall.duration, Duration::from_millis(26));
        assert!(!look.must_look_again(), "the loop waits");
    }

    #[test]
    fn a_stall_in_which_the_thread_hardly_ran_is_not_computing_however_late_the_watchdog_looks() {
        let inbox = Inbox::new(4).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        // The first sample is taken in real time, long after this turn.
        let (began, ended) = (1_000_000, 99_000_000);
        inbox.turns.mark(began, ThreadUsage::now());
        inbox.turns.begin(began);
        look.suspect = Some(Suspect::new(began, inbox.watched.sample(), ""));
        inbox.turns.end(began, ended);
        let stall = look.look(ended).expect("it was long");
        assert_ne!(stall.kind, StallKind::Computing);
        assert_eq!(inbox.turns.filed(StallKind::Computing).count, 0);
    }

    #[test]
    fn a_stall_is_filed_as_what_it_was_for_the_longest_time() {
        let inbox = Inbox::new(8).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        let (began, ended) = (1_000_000, 41_000_000);
        inbox.turns.begin(began);
        let mut suspect = Suspect::new(began, None, "first");
        suspect.note(StallKind::Preempted, 6_000_000, "first");
        suspect.note(StallKind::Blocked, 5_000_000, "second");
        suspect.note(StallKind::Computing, 3_000_000, "third");
        suspect.note(StallKind::Blocked, 5_000_000, "fourth");
        look.suspect = Some(suspect);
        inbox.turns.end(began, ended);
        let stall = look.look(ended).expect("it was long");
        assert_eq!((stall.kind, stall.at), (StallKind::Blocked, "second"));
        let filed = StallKind::ALL.map(|kind| inbox.turns.filed(kind).count);
        assert_eq!((filed[StallKind::Blocked as usize], filed.iter().sum::<u64>()), (1, 1));
        assert_eq!(inbox.turns.filed(StallKind::Blocked).time, Duration::from_millis(40));
    }

    #[test]
    fn a_stall_that_goes_on_is_filed_and_reported_once() {
        let inbox = Inbox::new(9).unwrap();
        let mut look = WatchedLoop::new(Arc::clone(&inbox));
        let began = 1_000_000;
        inbox.turns.begin(began);
        let mut suspect = Suspect::new(began, None, "first");
        suspect.note(StallKind::Preempted, 6_000_000, "first");
        look.suspect = Some(suspect);
        assert!(look.look(began + REPORT_NANOS / 2).is_none(), "it is young");
        let stall = look.look(began + REPORT_NANOS).expect("it is a second old");
        assert_eq!((stall.kind, stall.is_over), (StallKind::Preempted, false));
        look.suspect.as_mut().unwrap().note(StallKind::Lock, REPORT_NANOS, "second");
        let ended = began + 2 * REPORT_NANOS;
        inbox.turns.end(began, ended);
        assert!(look.look(ended).is_none(), "it was reported");
        let of = |kind| (inbox.turns.filed(kind).count, inbox.turns.filed(kind).time);
        assert_eq!(of(StallKind::Preempted), (1, Duration::ZERO));
        assert_eq!(of(StallKind::Lock), (0, Duration::from_secs(2)));
        let kept = |stall: &Stall| (stall.worker, stall.kind, stall.at, stall.is_over);
        assert!(last_stalls().iter().any(|stall| kept(stall) == (9, StallKind::Lock, "second", true)));
    }

    #[test]
    fn some_dozens_of_stalls_are_kept_each_once() {
        let of = |number: u64, is_over| Stall {
            worker: 77,
            began: Moment::from_nanos(number),
            kind: StallKind::Computing,
            duration: Duration::from_secs(1),
            is_over,
            at: "something",
            untold: 0,
        };
        for number in 0..100 {
            keep(&of(number, false));
            keep(&of(number, true));
        }
        let stalls = last_stalls();
        assert!(stalls.len() <= STALLS_KEPT_MAX);
        let own: Vec<&Stall> = stalls.iter().filter(|stall| stall.worker == 77).collect();
        // The other test of this file may have kept one meanwhile.
        assert!(own.len() >= STALLS_KEPT_MAX - 1 && own.iter().all(|stall| stall.is_over));
    }
}
