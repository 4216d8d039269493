//! How many requests of a group are tried on another server: a share of them, so that servers in trouble do not get a
//! multiple of their load (a retry storm).
//!
//! Each worker counts for itself, in a window that slides over [`WINDOW`]: of the window before counts as much as lies
//! within that time. What may be tried anew is a percentage of the requests, and besides so many in a second whatever
//! the number of requests, so that little traffic never sees a budget.

use std::time::Duration;

use gale_runtime::Moment;
use parking_lot::Mutex;

use super::peer::Padded;

/// How far back requests and retries count.
const WINDOW: Duration = Duration::from_secs(10);

/// How often a worker says that a group's budget is used up.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// `retry_budget`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryBudgetSettings {
    /// How many of a hundred requests may be tried anew.
    pub percent: u32,
    /// How many more in a second, per worker.
    pub min_per_second: u32,
}

impl Default for RetryBudgetSettings {
    /// Much more than a group needs that fails now and then.
    fn default() -> RetryBudgetSettings {
        RetryBudgetSettings { percent: 20, min_per_second: 100 }
    }
}

/// Whether a request may be tried on another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// It may, and that counts.
    Granted,
    /// It may not.
    Refused {
        /// Whether that is to be told: now and then it is.
        is_news: bool,
    },
}

/// See the file's head.
#[derive(Debug)]
pub(super) struct RetryBudget {
    settings: RetryBudgetSettings,
    /// By worker; only that worker locks it.
    counts: Box<[Padded<Mutex<Counts>>]>,
}

#[derive(Debug, Default)]
struct Counts {
    /// When the window began; `None` before the first request.
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

    /// A request has come.
    pub fn note_request(&self, worker: usize, now: Moment) {
        let mut counts = self.counts[worker % self.counts.len()].0.lock();
        counts.slide(now);
        counts.now.requests += 1;
    }

    /// A request is to be tried anew.
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
    /// Goes on to the window of this time. Returns which part of the one before still counts.
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

    /// How many retries are granted now.
    fn granted(budget: &RetryBudget, now: Moment) -> usize {
        (0..10_000).take_while(|_| budget.take_retry(0, now) == Retry::Granted).count()
    }

    #[test]
    fn retries_are_a_share_of_the_requests_and_some_more() {
        let budget = budget(20, 1);
        assert_eq!(granted(&budget, at(0)), 10);
        (0..100).for_each(|_| budget.note_request(0, at(0)));
        assert_eq!(granted(&budget, at(0)), 20);
        // Another worker has its own.
        assert_eq!(budget.take_retry(1, at(0)), Retry::Granted);
    }

    #[test]
    fn what_lies_back_counts_less_and_less() {
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
