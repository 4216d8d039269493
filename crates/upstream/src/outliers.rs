//! Outlier ejection: a peer whose error rate or response time stands out in its group gets no requests for a while.
//! (`outlier_ejection`, which nginx does not have)
//!
//! `max_fails` judges each peer alone and at once; this compares peers over some seconds, so a problem that affects all
//! of them, such as a slow database, ejects none. Only a share of the group can be ejected, fewer than three peers with
//! enough requests are not compared, and a peer that is ejected repeatedly stays away longer.
//!
//! Workers count separately, and only in groups with the directive.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::{Moment, now};
use gale_worker::service::{Context, Service};

use super::Group;
use super::peer::{Padded, Peer, PeerState};

/// Fewest peers with enough requests for a comparison.
const COMPARED_MIN: usize = 3;

/// Least difference of mean times; some milliseconds are noise.
const SLOWER_BY_MIN: Duration = Duration::from_millis(20);

/// Longest ejection, as a multiple of the first one.
const TIMES_MAX: u32 = 10;

/// `outlier_ejection`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlierSettings {
    /// Interval between comparisons.
    pub interval: Duration,
    /// Fewest requests in an interval for a peer to be compared.
    pub requests_min: u32,
    /// Percentage points by which a peer's error rate has to exceed the others' median.
    pub errors_percent: u32,
    /// Factor by which a peer's mean time to the header has to exceed the others' median.
    pub latency_factor: u32,
    /// Duration of the first ejection.
    pub time: Duration,
    /// Most peers ejected, in percent of the group.
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

/// One worker's observations of a peer.
#[derive(Debug, Default)]
pub(super) struct Observed {
    requests: AtomicU32,
    errors: AtomicU32,
    /// Sum of the times to the response header, in microseconds.
    time: AtomicU64,
}

impl Observed {
    pub fn note_response(&self, time: Duration) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.time.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Counts a request that failed, or whose response was an error (`had_response`).
    pub fn note_error(&self, had_response: bool) {
        if !had_response {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        self.errors.fetch_add(1, Ordering::Relaxed);
    }
}

/// All workers' observations of a peer, in total or in an interval.
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

    /// Mean time of the requests with a response.
    fn mean_time(self) -> Duration {
        Duration::from_micros(self.time / u64::from(self.requests.saturating_sub(self.errors).max(1)))
    }

    fn error_percent(self) -> u32 {
        (u64::from(self.errors) * 100).checked_div(self.requests.into()).unwrap_or(0) as u32
    }
}

/// Reason why a peer is an outlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// Its error rate and the others' median, in percent.
    Errors(u32, u32),
    /// Its mean time and the others' median.
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

/// Outliers among the samples, worst first.
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

/// Median, which is robust against outliers. Needs at least one value.
fn median<T: Ord + Copy>(values: impl Iterator<Item = T>) -> T {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable();
    values[values.len() / 2]
}

/// Service that compares the peers of a group.
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

/// Earlier totals by the address of the peer's state, which is held so that the address stays unique.
type Known = HashMap<usize, (Arc<PeerState>, Sample)>;

impl OutlierWatch {
    /// Compares the peers by their requests since the last call and ejects outliers. Returns log messages.
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

#[derive(Debug, Default)]
pub(super) struct Ejection {
    /// End, in nanoseconds of the loops' clock.
    until: AtomicU64,
    /// Consecutive ejections.
    times: AtomicU32,
}

impl Ejection {
    pub fn is_on(&self, now: Moment) -> bool {
        now.as_nanos() < self.until.load(Ordering::Relaxed)
    }

    /// Ejects the peer and returns for how long.
    fn begin(&self, now: Moment, first_time: Duration) -> Duration {
        let times = self.times.load(Ordering::Relaxed).saturating_add(1).min(TIMES_MAX);
        self.times.store(times, Ordering::Relaxed);
        let time = first_time.saturating_mul(times);
        self.until.store((now + time).as_nanos(), Ordering::Relaxed);
        time
    }

    /// Resets the count of consecutive ejections.
    fn forget(&self) {
        if self.times.load(Ordering::Relaxed) > 0 {
            self.times.store(0, Ordering::Relaxed);
        }
    }
}

impl PeerState {
    /// Begins to record observations, by worker.
    pub fn observe(&self, workers: usize) {
        self.observed.get_or_init(|| (0..workers).map(|_| Padded::default()).collect());
    }

    /// A worker's observations; `None` if peers are not compared.
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
    fn slowness_of_all_peers_ejects_none() {
        assert!(found(&[sample(100, 50, 900), sample(100, 55, 950), sample(100, 60, 1200)]).is_empty());
        assert!(found(&[sample(100, 0, 1), sample(100, 0, 2), sample(100, 0, 15)]).is_empty(), "some milliseconds");
    }

    #[test]
    fn peers_with_few_requests_are_not_judged_and_two_are_not_compared() {
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
