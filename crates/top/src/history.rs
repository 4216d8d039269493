//! The latest responses, and figures computed from several of them. At most four responses are kept.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::figures::{Figures, Times};

/// Window for times. At least half of it is covered, at most all of it.
const WINDOW: Duration = Duration::from_secs(30);

/// A response and the time at which it arrived.
struct Look {
    figures: Figures,
    at: Instant,
}

/// The responses of one worker process.
#[derive(Default)]
pub struct History {
    now: Option<Rc<Look>>,
    before: Option<Rc<Look>>,
    /// Start of the current window, and start of the next one.
    base: Option<Rc<Look>>,
    base_next: Option<Rc<Look>>,
}

impl History {
    /// Adds the next response.
    pub fn take(&mut self, figures: Figures, at: Instant) {
        // A new worker process starts with all counters at zero.
        if self.now.as_ref().is_some_and(|now| now.figures.pid() != figures.pid()) {
            *self = History::default();
        }
        let now = Rc::new(Look { figures, at });
        self.before = self.now.replace(Rc::clone(&now));
        let next = self.base_next.get_or_insert_with(|| Rc::clone(&now));
        if at.duration_since(next.at) >= WINDOW / 2 {
            self.base = Some(std::mem::replace(next, now));
        }
        if self.base.is_none() {
            self.base = self.before.clone();
        }
    }

    /// Returns the latest figures.
    ///
    /// # Panics
    /// If there are none yet.
    pub fn figures(&self) -> &Figures {
        &self.now.as_ref().expect("figures are shown after the first answer").figures
    }

    /// Returns the growth of a counter per second since the previous response, or `None` if it is unknown.
    pub fn rate(&self, count: impl Fn(&Figures) -> Option<u64>) -> Option<f64> {
        let (now, before) = (self.now.as_ref()?, self.before.as_ref()?);
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        let grown = count(&now.figures)?.checked_sub(count(&before.figures)?)?;
        (seconds > 0.0).then(|| grown as f64 / seconds)
    }

    /// Returns the growth of a counter within the window, or its total value if there is no window yet.
    pub fn recent(&self, count: impl Fn(&Figures) -> Option<u64>) -> Option<u64> {
        let now = count(self.figures())?;
        Some(now.saturating_sub(
            self.base.as_ref().and_then(|base| count(&base.figures)).filter(|&base| base <= now).unwrap_or(0),
        ))
    }

    /// Returns a histogram of the window, or of all values if there is no window yet.
    pub fn times(&self, find: impl for<'f> Fn(&'f Figures) -> Option<&'f Times>) -> Option<Times> {
        let now = find(self.figures())?;
        Some(match self.base.as_ref().and_then(|base| find(&base.figures)) {
            Some(base) if base.count < now.count => now.since(base),
            _ => now.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(pid: u64, total: u64) -> Figures {
        Figures::parse(&format!("{{\"nginx\":{{\"pid\":{pid}}},\"http/requests\":{{\"total\":{total}}}}}")).unwrap()
    }

    #[test]
    fn rates_are_of_two_answers_of_one_process() {
        let total = |figures: &Figures| Some(figures.requests.total);
        let (mut history, begin) = (History::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        history.take(figures(1, 100), at(0));
        assert_eq!((history.rate(total), history.recent(total)), (None, Some(100)));
        history.take(figures(1, 300), at(2));
        assert_eq!((history.rate(total), history.recent(total)), (Some(100.0), Some(200)));
        for second in 3..100 {
            history.take(figures(1, 300 + second), at(second));
        }
        let recent = history.recent(total).unwrap();
        assert!((15..=30).contains(&recent), "{recent}");
        history.take(figures(2, 5), at(101));
        assert_eq!((history.rate(total), history.recent(total)), (None, Some(5)));
        history.take(figures(2, 3), at(102));
        assert_eq!(history.rate(total), None, "counted anew");
    }
}
