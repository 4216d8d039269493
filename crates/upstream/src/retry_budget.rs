//! Limit on retries of a group's requests on other servers, as a share of the requests. Without it, servers in trouble
//! would get a multiple of their load (a retry storm).
//!
//! Each worker counts separately in a window that slides over [`WINDOW`]; the previous window counts in proportion to
//! its overlap. Allowed are a percentage of the requests and a fixed number a second, so light traffic is never
//! limited.

use std::time::Duration;

use gale_runtime::Moment;
use parking_lot::Mutex;

use super::peer::Padded;

/// Period in which requests and retries count.
const WINDOW: Duration = Duration::from_secs(10);

/// Interval of log messages about an exhausted budget, for each worker.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// `retry_budget`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBudgetSettings {
    /// Retries in percent of the requests.
    pub percent: u32,
    /// Additional retries a second, for each worker.
    pub min_per_second: u32,
}

impl Default for RetryBudgetSettings {
    /// Far more than a group with occasional failures needs.
    fn default() -> RetryBudgetSettings {
        RetryBudgetSettings { percent: 20, min_per_second: 100 }
    }
}

/// Decision on a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Allowed, and counted.
    Granted,
    /// Refused.
    Refused {
        /// `true` if the refusal should be logged.
        is_news: bool,
    },
}

#[derive(Debug)]
pub(super) struct RetryBudget {
    settings: RetryBudgetSettings,
    /// Counts by worker, each only locked by its worker.
    counts: Box<[Padded<Mutex<Counts>>]>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Start of the current window; `None` before the first request.
    began: Option<Moment>,
    now: Window,
    before: Window,
    told: Option<Moment>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Window {
    requests: u64,
    retries: u64,
}

impl RetryBudget {
    pub fn new(settings: RetryBudgetSettings, workers: usize) -> RetryBudget {
        RetryBudget { settings, counts: (0..workers).map(|_| Padded::default()).collect() }
    }

    /// Counts a request.
    pub fn note_request(&self, worker: usize, now: Moment) {
        let mut counts = self.counts[worker % self.counts.len()].0.lock();
        counts.slide(now);
        counts.now.requests += 1;
    }

    /// Asks for a retry.
    pub fn take_retry(&self, worker: usize, now: Moment) -> Retry {
        let mut counts = self.counts[worker % self.counts.len()].0.lock();
        let of_before = counts.slide(now);
        let weighted = |now: u64, before: u64| now as f64 + before as f64 * of_before;
        let requests = weighted(counts.now.requests, counts.before.requests);
        let retries = weighted(counts.now.retries, counts.before.retries);
        let of_time = f64::from(self.settings.min_per_second) * WINDOW.as_secs_f64();
        if retries + 1.0 <= requests * f64::from(self.settings.percent) / 100.0 + of_time {
            counts.now.retries += 1;
            return Retry::Granted;
        }
        let is_news = counts.told.is_none_or(|told| now.since(told) >= TOLD_EVERY);
        if is_news {
            counts.told = Some(now);
        }
        Retry::Refused { is_news }
    }
}

impl Counts {
    /// Advances to the current window. Returns the fraction of the previous one that still counts.
    fn slide(&mut self, now: Moment) -> f64 {
        let began = *self.began.get_or_insert(now);
        let windows = now.since(began).as_nanos() / WINDOW.as_nanos();
        if windows > 0 {
            self.before = if windows == 1 { self.now } else { Window::default() };
            self.now = Window::default();
            let count = u32::try_from(windows).unwrap_or(u32::MAX);
            self.began = Some(if windows == 1 { began + WINDOW * count } else { now });
        }
        let elapsed = self.began.map_or(Duration::ZERO, |began| now.since(began));
        1.0 - elapsed.as_secs_f64() / WINDOW.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_nanos(1) + Duration::from_secs(seconds)
    }

    fn budget(percent: u32, min_per_second: u32) -> RetryBudget {
        RetryBudget::new(RetryBudgetSettings { percent, min_per_second }, 2)
    }

    /// Number of retries that are granted now.
    fn granted(budget: &RetryBudget, now: Moment) -> usize {
        (0..10_000).take_while(|_| budget.take_retry(0, now) == Retry::Granted).count()
    }

    #[test]
    fn retries_are_a_share_of_the_requests_and_some_more() {
        let budget = budget(20, 1);
        assert_eq!(granted(&budget, at(0)), 10);
        (0..100).for_each(|_| budget.note_request(0, at(0)));
        assert_eq!(granted(&budget, at(0)), 20);
        // Each worker has its own budget.
        assert_eq!(budget.take_retry(1, at(0)), Retry::Granted);
    }

    #[test]
    fn old_requests_count_less_and_less() {
        let budget = budget(20, 1);
        (0..100).for_each(|_| budget.note_request(0, at(0)));
        assert_eq!(granted(&budget, at(0)), 30);
        // Half of the requests and of the retries: 10 + 10 - 15.
        assert_eq!(granted(&budget, at(15)), 5);
        assert_eq!(granted(&budget, at(1000)), 10);
    }

    #[test]
    fn a_used_budget_is_told_once_a_minute() {
        let budget = budget(0, 0);
        let refused = |seconds| budget.take_retry(0, at(seconds));
        assert_eq!(refused(0), Retry::Refused { is_news: true });
        assert_eq!(refused(59), Retry::Refused { is_news: false });
        assert_eq!(refused(60), Retry::Refused { is_news: true });
    }
}
