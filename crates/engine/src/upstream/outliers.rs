//! Outlier ejection: a peer whose errors or times stand out from those of its group gets no requests for a while.
//! (`outlier_ejection`, which nginx does not have)
//!
//! `max_fails` judges a peer by itself and at once; this compares it with the others over some seconds, so that what
//! all of them suffer from, a database that is slow, ejects nobody. No more than a share of the group is set aside,
//! fewer than three peers with enough requests are not compared, and a peer that is set aside again and again stays
//! away for longer.
//!
//! Workers count for themselves, and only in groups that have the directive.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::{Moment, now};

use super::Group;
use super::peer::{Padded, Peer, PeerState};
use crate::service::{Context, Service};

/// Peers are compared if there are so many that have had enough requests.
const COMPARED_MIN: usize = 3;

/// A mean time stands out only if it is longer by so much, too: some milliseconds are noise.
const SLOWER_BY_MIN: Duration = Duration::from_millis(20);

/// How many times as long as at first a peer is set aside at most.
const TIMES_MAX: u32 = 10;

/// What stands out, and what follows: `outlier_ejection`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlierSettings {
    /// How often peers are compared.
    pub interval: Duration,
    /// How many requests a peer has to have had in between.
    pub requests_min: u32,
    /// By how many percent points its share of errors has to be above that of the others.
    pub errors_percent: u32,
    /// How many times the median of the others its mean time to the header has to be.
    pub latency_factor: u32,
    /// For how long it is set aside the first time.
    pub time: Duration,
    /// How many percent of the group are set aside at most.
    pub max_percent: u32,
}

impl Default for OutlierSettings {
    fn default() -> OutlierSettings {
        OutlierSettings {
            interval: Duration::from_secs(10),
            requests_min: 20,
            errors_percent: 20,
            latency_factor: 3,
            time: Duration::from_secs(30),
            max_percent: 34,
        }
    }
}

/// What one worker has seen of a peer.
#[derive(Debug, Default)]
pub(super) struct Observed {
    requests: AtomicU32,
    errors: AtomicU32,
    /// Until the header of a response was there, of all requests together, in microseconds.
    time: AtomicU64,
}

impl Observed {
    pub fn note_response(&self, time: Duration) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.time.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// A request that came to nothing, or to an error (`had_response`).
    pub fn note_error(&self, had_response: bool) {
        if !had_response {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        self.errors.fetch_add(1, Ordering::Relaxed);
    }
}

/// What all workers have seen of a peer, since it is watched or in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    requests: u32,
    errors: u32,
    time: u64,
}

impl Sample {
    fn of(observed: &[Padded<Observed>]) -> Sample {
        observed.iter().fold(Sample::default(), |sum, Padded(worker)| Sample {
            requests: sum.requests.wrapping_add(worker.requests.load(Ordering::Relaxed)),
            errors: sum.errors.wrapping_add(worker.errors.load(Ordering::Relaxed)),
            time: sum.time.wrapping_add(worker.time.load(Ordering::Relaxed)),
        })
    }

    fn since(self, earlier: Sample) -> Sample {
        Sample {
            requests: self.requests.wrapping_sub(earlier.requests),
            errors: self.errors.wrapping_sub(earlier.errors),
            time: self.time.wrapping_sub(earlier.time),
        }
    }

    /// The mean time of those that had a response.
    fn mean_time(self) -> Duration {
        Duration::from_micros(self.time / u64::from(self.requests.saturating_sub(self.errors).max(1)))
    }

    fn error_percent(self) -> u32 {
        (u64::from(self.errors) * 100).checked_div(self.requests.into()).unwrap_or(0) as u32
    }
}

/// Why a peer stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// Its share of errors, and the median of the others', in percent.
    Errors(u32, u32),
    /// Its mean time, and the median of the others.
    Slow(Duration, Duration),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Errors(own, others) => {
                write!(f, "{own}% of its requests failed, {others}% of those to other servers")
            }
            Reason::Slow(own, others) => {
                write!(f, "its responses took {} ms, those of other servers {} ms", own.as_millis(), others.as_millis())
            }
        }
    }
}

/// Those that stand out among these, the worst first.
fn outliers(samples: &[Sample], settings: &OutlierSettings) -> Vec<(usize, Reason)> {
    let has_enough = |sample: &&Sample| sample.requests >= settings.requests_min.max(1);
    if samples.iter().filter(has_enough).count() < COMPARED_MIN {
        return Vec::new();
    }
    let reason = |index: usize, sample: &Sample| {
        let others = samples.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, sample)| sample);
        let others = || others.clone().filter(has_enough);
        let others_percent = median(others().map(|other| other.error_percent()));
        if sample.error_percent() >= others_percent + settings.errors_percent {
            return Some(Reason::Errors(sample.error_percent(), others_percent));
        }
        let others_time = median(others().map(|other| other.mean_time()));
        let is_slow = sample.mean_time() > others_time * settings.latency_factor
            && sample.mean_time() > others_time + SLOWER_BY_MIN
            && sample.requests > sample.errors;
        is_slow.then(|| Reason::Slow(sample.mean_time(), others_time))
    };
    let candidates = samples.iter().enumerate().filter(|(_, sample)| has_enough(sample));
    let mut found: Vec<(usize, Reason)> =
        candidates.filter_map(|(index, sample)| Some((index, reason(index, sample)?))).collect();
    found.sort_by_key(|(_, reason)| match reason {
        Reason::Errors(own, _) => (0, u128::from(u32::MAX - own)),
        Reason::Slow(own, _) => (1, u128::MAX - own.as_micros()),
    });
    found
}

/// The value in the middle: one that is far off does not move it. There is at least one.
fn median<T: Ord + Copy>(values: impl Iterator<Item = T>) -> T {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// Compares the peers of a group.
pub(super) struct OutlierWatch {
    pub group: Arc<Group>,
    pub settings: OutlierSettings,
}

impl Service for OutlierWatch {
    async fn run(context: Context<OutlierWatch>) {
        let mut known = HashMap::new();
        let interval = context.settings().settings.interval;
        context
            .every(interval, async || {
                for line in context.settings().look(&mut known, now()) {
                    context.log(Level::Warn, line);
                }
            })
            .await;
    }
}

/// What was seen of each peer before, and the peer, whose address no other one gets as long as it is here.
type Known = HashMap<usize, (Arc<PeerState>, Sample)>;

impl OutlierWatch {
    /// Compares the peers by what they did since the last time, and sets those aside that stand out. What is to be told
    /// of it.
    fn look(&self, known: &mut Known, now: Moment) -> Vec<String> {
        let view = self.group.view_of(0);
        let peers: Vec<&Peer> = view.peers.primary.peers.iter().chain(&view.peers.backup.peers).collect();
        let key = |peer: &Peer| Arc::as_ptr(&peer.state) as usize;
        let totals: Vec<Sample> = peers.iter().map(|peer| Sample::of(peer.state.observed())).collect();
        let first = known.is_empty();
        let samples: Vec<Sample> = peers
            .iter()
            .zip(&totals)
            .map(|(peer, total)| known.get(&key(peer)).map_or(Sample::default(), |(_, earlier)| total.since(*earlier)))
            .collect();
        let now_known = peers.iter().zip(totals).map(|(peer, total)| (key(peer), (Arc::clone(&peer.state), total)));
        *known = now_known.collect();
        if first {
            return Vec::new();
        }
        let found = outliers(&samples, &self.settings);
        for (index, sample) in samples.iter().enumerate() {
            let stands_out = found.iter().any(|(outlier, _)| *outlier == index);
            if sample.requests >= self.settings.requests_min && !stands_out {
                peers[index].state.ejection.forget();
            }
        }
        let ejected = peers.iter().filter(|peer| peer.state.ejection.is_on(now)).count();
        let room = (peers.len() * self.settings.max_percent as usize / 100).saturating_sub(ejected);
        let found = found.into_iter().filter(|(index, _)| !peers[*index].state.ejection.is_on(now)).take(room);
        let eject = |(index, reason): (usize, Reason)| {
            let peer = peers[index];
            let time = peer.state.ejection.begin(now, self.settings.time);
            if !peer.settings.slow_start.is_zero() {
                peer.state.begin_slowly(now + time);
            }
            let (name, group) = (&peer.name, self.group.name());
            format!("upstream server {name} in upstream \"{group}\" is ejected for {} s: {reason}", time.as_secs())
        };
        found.map(eject).collect()
    }
}

/// Whether a peer is set aside.
#[derive(Debug, Default)]
pub(super) struct Ejection {
    /// Until when, in nanoseconds of the loops' clock.
    until: AtomicU64,
    /// How often in a row.
    times: AtomicU32,
}

impl Ejection {
    pub fn is_on(&self, now: Moment) -> bool {
        now.as_nanos() < self.until.load(Ordering::Relaxed)
    }

    /// From now on it is, for as long as this says.
    fn begin(&self, now: Moment, first_time: Duration) -> Duration {
        let times = self.times.load(Ordering::Relaxed).saturating_add(1).min(TIMES_MAX);
        self.times.store(times, Ordering::Relaxed);
        let time = first_time.saturating_mul(times);
        self.until.store((now + time).as_nanos(), Ordering::Relaxed);
        time
    }

    /// It does as the others do.
    fn forget(&self) {
        if self.times.load(Ordering::Relaxed) > 0 {
            self.times.store(0, Ordering::Relaxed);
        }
    }
}

impl PeerState {
    /// From now on so many workers take down what it does.
    pub fn observe(&self, workers: usize) {
        self.observed.get_or_init(|| (0..workers).map(|_| Padded::default()).collect());
    }

    /// What a worker has seen of it; `None` if nobody compares it.
    pub fn observed_by(&self, worker: usize) -> Option<&Observed> {
        let observed = self.observed.get().filter(|observed| !observed.is_empty())?;
        Some(&observed[worker % observed.len()].0)
    }

    fn observed(&self) -> &[Padded<Observed>] {
        self.observed.get().map_or(&[], |observed| observed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(requests: u32, errors: u32, mean_ms: u64) -> Sample {
        Sample { requests, errors, time: mean_ms * 1000 * u64::from(requests - errors) }
    }

    fn found(samples: &[Sample]) -> Vec<usize> {
        outliers(samples, &OutlierSettings::default()).into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_peer_stands_out_by_its_errors_or_its_time() {
        let usual = sample(100, 1, 10);
        assert_eq!(found(&[usual, usual, sample(100, 30, 10), usual]), [2]);
        assert_eq!(found(&[sample(100, 0, 200), usual, usual]), [0]);
        assert_eq!(found(&[usual, sample(100, 0, 200), usual, sample(100, 40, 10), sample(100, 100, 0)]), [4, 3, 1]);
    }

    #[test]
    fn what_all_suffer_from_ejects_nobody() {
        assert!(found(&[sample(100, 50, 900), sample(100, 55, 950), sample(100, 60, 1200)]).is_empty());
        assert!(found(&[sample(100, 0, 1), sample(100, 0, 2), sample(100, 0, 15)]).is_empty(), "some milliseconds");
    }

    #[test]
    fn who_has_had_few_requests_is_not_judged_and_two_are_not_compared() {
        let usual = sample(100, 0, 10);
        assert!(found(&[usual, usual, usual, sample(19, 19, 0)]).is_empty());
        assert!(found(&[usual, usual, sample(19, 19, 0)]).is_empty());
        assert!(found(&[usual, sample(100, 90, 10)]).is_empty());
        assert!(found(&[]).is_empty());
    }

    #[test]
    fn a_peer_that_is_ejected_again_stays_away_for_longer() {
        let (ejection, second) = (Ejection::default(), Duration::from_secs(1));
        let start = Moment::from_nanos(1);
        assert!(!ejection.is_on(start));
        let times: Vec<u64> = (0..12).map(|_| ejection.begin(start, second).as_secs()).collect();
        assert_eq!(times, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]);
        assert!(ejection.is_on(start + second * 9) && !ejection.is_on(start + second * 10));
        ejection.forget();
        assert_eq!(ejection.begin(start, second), second);
    }
}
