//! A peer: one address of a group, with its settings and its state.
//!
//! Settings are immutable; a change makes another list of peers. State (failures, times, connections) belongs to the
//! address in its group: all workers write to it, and it survives a new list and a reload. A request only writes to it
//! where settings require that: a response of a peer without failures writes nothing.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gale_runtime::{Moment, SocketAddress};
use gale_worker::traffic::{Handshakes, Traffic};
use parking_lot::Mutex;

use super::balance::{LeastTime, Metric};
use super::health::Health;
use super::outliers::{Ejection, Observed};

/// Settings of a `server`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// `weight`; at least one.
    pub weight: u32,
    /// `max_conns`: most concurrent requests; 0 for no limit.
    pub max_conns: u32,
    /// `max_fails`: failures that put it down; 0 for none.
    pub max_fails: u32,
    /// `fail_timeout`: time in which failures count, and time that it then stays down.
    pub fail_timeout: Duration,
    /// `slow_start`: time to regain its full weight after being down.
    pub slow_start: Duration,
    /// `backup`: used only if all primary servers are unavailable.
    pub is_backup: bool,
    /// `down`, `drain`
    pub standing: Standing,
    /// `route`: its name for `sticky`; unset for a hash of its address.
    pub route: Option<Arc<str>>,
}

/// Administrative state of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Standing {
    /// In use.
    #[default]
    Up,
    /// Used only by sessions bound to it (`drain`).
    Draining,
    /// Not used (`down`).
    Down,
}

impl Default for ServerSettings {
    /// nginx's defaults.
    fn default() -> ServerSettings {
        ServerSettings {
            weight: 1,
            max_conns: 0,
            max_fails: 1,
            fail_timeout: Duration::from_secs(10),
            slow_start: Duration::ZERO,
            is_backup: false,
            standing: Standing::Up,
            route: None,
        }
    }
}

/// One address of a group.
#[derive(Debug)]
pub(super) struct Peer {
    /// Number of its server, if that has a known address.
    pub server_id: Option<u64>,
    pub address: SocketAddress,
    /// Value for `$upstream_addr`.
    pub name: Arc<str>,
    /// Its `server` parameter as written; used by `hash consistent`.
    pub server: Arc<[u8]>,
    pub settings: Arc<ServerSettings>,
    /// Its name for `sticky`: its route, or the MD5 of its name. Empty in a group without sessions.
    pub session_id: Arc<str>,
    pub state: Arc<PeerState>,
}

/// Name of an address for `$upstream_addr`: `127.0.0.1:8080`, `[::1]:8080`, `unix:/run/app`.
pub(super) fn address_name(address: &SocketAddress) -> Arc<str> {
    match address {
        SocketAddress::Inet(address) => address.to_string().into(),
        SocketAddress::Unix(path) => {
            let path = path.as_deref().map(|path| path.to_string_lossy()).unwrap_or_default();
            format!("unix:{path}").into()
        }
    }
}

#[derive(Debug)]
#[repr(align(128))]
pub(super) struct PeerState {
    /// Failures that count.
    fails: AtomicU32,
    /// Weight lost through failures.
    weight_lost: AtomicU32,
    /// Time of the last failure, in nanoseconds of the loops' clock; 0 for never.
    failed: AtomicU64,
    /// Time of the last failure or retry.
    checked: AtomicU64,
    /// Time when it came up again: start of `slow_start`.
    recovered: AtomicU64,
    /// Requests in flight, if `max_conns` is set.
    limited: Padded<AtomicU32>,
    /// Requests in flight by worker, if the balancing method needs them.
    counted: OnceLock<Box<[Padded<AtomicU32>]>>,
    /// Mean time to the response header in milliseconds, if the method needs it.
    header_time: AtomicU32,
    /// Mean time to the end of the response.
    response_time: AtomicU32,
    /// Time when it was last chosen, with the resolution of `fail_timeout`.
    chosen: AtomicU64,
    inflight: Mutex<Inflight>,
    /// Results of active checks.
    pub health: Health,
    /// Workers' observations, if peers are compared.
    pub observed: OnceLock<Box<[Padded<Observed>]>>,
    /// Ejection as an outlier.
    pub ejection: Ejection,
    /// Requests or sessions.
    pub traffic: Traffic,
    /// TLS handshakes with it, if any.
    pub handshakes: OnceLock<Box<Handshakes>>,
    /// Failures.
    pub failures: Failures,
}

/// Failures of a peer; rare, so all workers write here.
#[derive(Debug, Default)]
pub(super) struct Failures {
    attempts: AtomicU64,
    /// Times that failures have put it down.
    downs: AtomicU64,
    /// Start of the current downtime, in nanoseconds of the loops' clock; 0 if it is up.
    down_since: AtomicU64,
    /// Earlier downtime, in milliseconds.
    downtime: AtomicU64,
}

/// Failure statistics of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FailureFigures {
    pub attempts: u64,
    pub downs: u64,
    pub down_since: Option<Moment>,
    pub downtime: Duration,
}

impl Failures {
    pub fn note_attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    fn note_down(&self, now: Moment) {
        let since = now.as_nanos().max(1);
        if self.down_since.compare_exchange(0, since, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.downs.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note_up(&self, now: Moment) {
        if self.down_since.load(Ordering::Relaxed) > 0 {
            let since = self.down_since.swap(0, Ordering::Relaxed);
            let time = now.as_nanos().saturating_sub(since) / 1_000_000;
            if since > 0 {
                self.downtime.fetch_add(time, Ordering::Relaxed);
            }
        }
    }

    pub fn figures(&self, now: Moment) -> FailureFigures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let down_since = Some(read(&self.down_since)).filter(|&since| since > 0).map(Moment::from_nanos);
        let before = Duration::from_millis(read(&self.downtime));
        FailureFigures {
            attempts: read(&self.attempts),
            downs: read(&self.downs),
            down_since,
            downtime: before + down_since.map_or(Duration::ZERO, |since| now.since(since)),
        }
    }

    pub fn reset(&self) {
        [&self.attempts, &self.downs, &self.downtime]
            .into_iter()
            .for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// Requests of a peer without a response, for `least_time … inflight`. Times are in milliseconds.
#[derive(Debug, Default)]
struct Inflight {
    requests: u64,
    /// Sum of their waiting times until `changed`.
    waited: u64,
    changed: u64,
    /// Mean waiting time.
    time: u32,
}

/// Exponential moving average: one slow response changes little.
fn moving_average(average: u32, value: u32) -> u32 {
    if average == 0 { value } else { (0.5 + f64::from(value) * 0.05 + f64::from(average) * 0.95) as u32 }
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

fn in_milliseconds(moment: Moment) -> u64 {
    moment.as_nanos() / 1_000_000
}

/// A value on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Padded<T>(pub T);

impl PeerState {
    /// State of a new peer.
    pub fn new() -> PeerState {
        PeerState {
            fails: AtomicU32::new(0),
            weight_lost: AtomicU32::new(0),
            failed: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            recovered: AtomicU64::new(0),
            limited: Padded::default(),
            counted: OnceLock::new(),
            header_time: AtomicU32::new(0),
            response_time: AtomicU32::new(0),
            chosen: AtomicU64::new(0),
            inflight: Mutex::default(),
            health: Health::default(),
            observed: OnceLock::new(),
            ejection: Ejection::default(),
            traffic: Traffic::default(),
            handshakes: OnceLock::new(),
            failures: Failures::default(),
        }
    }

    /// Resets the failures that count.
    pub fn forget_failures(&self) {
        if self.fails.load(Ordering::Relaxed) > 0 {
            self.fails.store(0, Ordering::Relaxed);
        }
    }

    /// Resets failures and restores the full weight.
    pub fn recover(&self, now: Moment) {
        self.forget_failures();
        self.failures.note_up(now);
        self.weight_lost.store(0, Ordering::Relaxed);
    }

    /// Starts `slow_start`.
    pub fn begin_slowly(&self, now: Moment) {
        self.recovered.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Begins to count requests, by worker.
    pub fn count_requests(&self, workers: usize) {
        self.counted.get_or_init(|| (0..workers).map(|_| Padded::default()).collect());
    }

    /// Requests in flight, over all workers.
    pub fn requests(&self) -> u32 {
        // A request may end on another worker than it began on, so only the sum is meaningful.
        self.counted
            .get()
            .into_iter()
            .flatten()
            .fold(0, |sum: u32, count| sum.wrapping_add(count.0.load(Ordering::Relaxed)))
    }

    pub fn begin_request(&self, worker: usize) {
        if let Some(count) = self.count_of(worker) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn end_request(&self, worker: usize) {
        if let Some(count) = self.count_of(worker) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub fn measure_header(&self, time: Duration) {
        measure(&self.header_time, time);
    }

    pub fn measure_response(&self, time: Duration) {
        measure(&self.response_time, time);
    }

    /// Updates the mean waiting time of requests without a response.
    pub fn measure_inflight(&self, now: Moment) {
        let mut inflight = self.inflight.lock();
        if let Some(mean) = inflight.waited.checked_div(inflight.requests) {
            let waited = mean + in_milliseconds(now).saturating_sub(inflight.changed);
            inflight.time = moving_average(inflight.time, u32::try_from(waited).unwrap_or(u32::MAX));
        }
    }

    pub fn begin_inflight(&self, now: Moment) {
        self.inflight.lock().change(now, |requests| requests + 1);
    }

    /// Ends a request that has waited for `time`, answered or not.
    pub fn end_inflight(&self, now: Moment, time: Duration) {
        let mut inflight = self.inflight.lock();
        inflight.change(now, |requests| requests.saturating_sub(1));
        let own = u64::from(milliseconds(time));
        inflight.waited = if inflight.requests == 0 { 0 } else { inflight.waited.saturating_sub(own) };
    }

    fn count_of(&self, worker: usize) -> Option<&AtomicU32> {
        let counted = self.counted.get().filter(|counted| !counted.is_empty())?;
        Some(&counted[worker % counted.len()].0)
    }
}

fn measure(average: &AtomicU32, time: Duration) {
    let next = |average| Some(moving_average(average, milliseconds(time)));
    let _ = average.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
}

impl Inflight {
    fn change(&mut self, now: Moment, requests: impl FnOnce(u64) -> u64) {
        let now = in_milliseconds(now);
        self.waited += now.saturating_sub(self.changed).saturating_mul(self.requests);
        self.changed = now;
        self.requests = requests(self.requests);
    }
}

/// Cap of measured times, in milliseconds. Among slower peers the number of requests decides.
const TIME_MAX: u32 = 5000;

/// Resolution of times, so that peers with similar times are chosen in turn.
const TIME_STEP: u32 = 20;

impl Peer {
    /// Estimated time to finish its requests and one more, in milliseconds.
    pub fn estimated_time(&self, how: LeastTime, now: Moment) -> u64 {
        let state = &*self.state;
        let time = match how.metric {
            // Sessions have no header; their header time is the time to connect or to the first byte.
            Metric::Connect | Metric::Header => &state.header_time,
            Metric::LastByte => &state.response_time,
        };
        let mut time = time.load(Ordering::Relaxed);
        // A slow peer gets another chance: its time halves for each `fail_timeout` in which it was not chosen.
        let idle = now.since(Moment::from_nanos(state.chosen.load(Ordering::Relaxed)));
        if idle > self.settings.fail_timeout {
            let halvings = idle.as_secs() / (self.settings.fail_timeout.as_secs() + 1);
            time = u32::try_from(halvings).ok().and_then(|halvings| time.checked_shr(halvings)).unwrap_or(0);
        }
        if how.counts_inflight {
            let inflight = state.inflight.lock();
            if inflight.requests > 0 {
                time = time.max(inflight.time);
            }
        }
        let time = if time > TIME_MAX { TIME_MAX } else { time + TIME_STEP - time % TIME_STEP };
        u64::from(time) * (1 + u64::from(state.requests()))
    }

    /// Notes that it was chosen, in a group whose method uses times.
    pub fn note_chosen(&self, now: Moment) {
        let last = &self.state.chosen;
        if now.since(Moment::from_nanos(last.load(Ordering::Relaxed))) > self.settings.fail_timeout {
            last.store(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// `true` if it has reached `max_conns`.
    pub fn is_full(&self) -> bool {
        let max = self.settings.max_conns;
        max > 0 && self.state.limited.0.load(Ordering::Relaxed) >= max
    }

    /// Takes a place within `max_conns`; `false` if there is none.
    pub fn take_place(&self) -> bool {
        let max = self.settings.max_conns;
        let take = |count| (count < max).then_some(count + 1);
        max == 0 || self.state.limited.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Frees a place.
    pub fn leave_place(&self) {
        if self.settings.max_conns > 0 {
            self.state.limited.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// `true` if failures have put it down. It is tried once each time `fail_timeout` has passed.
    pub fn is_failed(&self, now: Moment) -> bool {
        let max = self.settings.max_fails;
        max > 0
            && self.state.fails.load(Ordering::Relaxed) >= max
            && now.since(Moment::from_nanos(self.state.checked.load(Ordering::Relaxed))) <= self.settings.fail_timeout
    }

    /// Begins a use, which is a trial once in each `fail_timeout`. Returns `false` if the peer is down and another
    /// worker has just begun the trial.
    pub fn begin_use(&self, now: Moment) -> bool {
        let checked = self.state.checked.load(Ordering::Relaxed);
        if now.since(Moment::from_nanos(checked)) <= self.settings.fail_timeout {
            return true;
        }
        let fails = self.state.fails.load(Ordering::Relaxed);
        if fails == 0 {
            // No failures, so no trial.
            return true;
        }
        let begun =
            self.state.checked.compare_exchange(checked, now.as_nanos(), Ordering::Relaxed, Ordering::Relaxed).is_ok();
        begun || self.settings.max_fails == 0 || fails < self.settings.max_fails
    }

    /// Records a failure; `true` if it puts the peer down.
    pub fn fail(&self, now: Moment) -> bool {
        let fails = self.state.fails.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.state.failed.store(now.as_nanos(), Ordering::Relaxed);
        self.state.checked.store(now.as_nanos(), Ordering::Relaxed);
        self.state.chosen.store(now.as_nanos(), Ordering::Relaxed);
        let ServerSettings { weight, max_fails, .. } = *self.settings;
        if max_fails > 0 && fails >= max_fails {
            self.state.failures.note_down(now);
        }
        let Some(loss) = weight.checked_div(max_fails) else { return false };
        let lose = |lost: u32| Some(lost.saturating_add(loss).min(weight));
        let _ = self.state.weight_lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lose);
        fails >= max_fails
    }

    /// Records a success. After a trial the failures are forgotten.
    pub fn succeed(&self, now: Moment) {
        let fails = self.state.fails.load(Ordering::Relaxed);
        if fails > 0 && self.state.failed.load(Ordering::Relaxed) < self.state.checked.load(Ordering::Relaxed) {
            self.forget_failures();
            self.state.failures.note_up(now);
            if self.settings.max_fails > 0 && fails >= self.settings.max_fails {
                self.state.recovered.store(now.as_nanos(), Ordering::Relaxed);
            }
        }
    }

    /// `true` if it has failures that count.
    pub fn has_failures(&self) -> bool {
        self.state.fails.load(Ordering::Relaxed) > 0
    }

    /// Resets the failures that count.
    pub fn forget_failures(&self) {
        self.state.forget_failures();
    }

    /// Current weight in `unit`s: reduced by failures and during `slow_start`.
    pub fn effective_weight(&self, now: Moment, unit: i64) -> i64 {
        let lost = self.state.weight_lost.load(Ordering::Relaxed);
        let weight = i64::from(self.settings.weight.saturating_sub(lost)) * unit;
        if self.settings.slow_start.is_zero() {
            return weight;
        }
        let recovered = self.state.recovered.load(Ordering::Relaxed);
        let elapsed = now.since(Moment::from_nanos(recovered));
        if recovered == 0 || elapsed >= self.settings.slow_start {
            return weight;
        }
        let share = elapsed.as_secs_f64() / self.settings.slow_start.as_secs_f64();
        weight.min((f64::from(self.settings.weight) * unit as f64 * share) as i64)
    }

    /// Regains one of its lost weight, each time it was available for a choice.
    pub fn regain_weight(&self) {
        if self.state.weight_lost.load(Ordering::Relaxed) > 0 {
            let regain = |lost: u32| lost.checked_sub(1);
            let _ = self.state.weight_lost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, regain);
        }
    }
}

/// Identity of a peer in a group: its address, and the number of earlier peers with the same one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PeerId {
    pub address: SocketAddress,
    pub occurrence: u32,
}
