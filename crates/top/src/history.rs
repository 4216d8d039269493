//! The last answers, and what they say together. Four are kept at most, however long it runs.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::figures::{Figures, Times};

/// How long times are looked back on: half of it at least, all of it at most.
const WINDOW: Duration = Duration::from_secs(30);

/// An answer, and when it came.
struct Look {
    figures: Figures,
    at: Instant,
}

/// The answers of one worker process.
#[derive(Default)]
pub struct History {
    now: Option<Rc<Look>>,
    before: Option<Rc<Look>>,
    /// The answer that times are counted from, and the one that is next for that.
    base: Option<Rc<Look>>,
    base_next: Option<Rc<Look>>,
}

impl History {
    /// Takes the next answer.
    pub fn take(&mut self, figures: Figures, at: Instant) {
        // A new worker process counts from nothing.
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

    /// The newest figures.
    ///
    /// # Panics
    /// Before there are any.
    pub fn figures(&self) -> &Figures {
        &self.now.as_ref().expect("shown when there is an answer").figures
    }

    /// How much a counter has grown per second since the answer before; none where nobody knows.
    pub fn rate(&self, count: impl Fn(&Figures) -> Option<u64>) -> Option<f64> {
        let (now, before) = (self.now.as_ref()?, self.before.as_ref()?);
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        let grown = count(&now.figures)?.checked_sub(count(&before.figures)?)?;
        (seconds > 0.0).then(|| grown as f64 / seconds)
    }

    /// How much a counter has grown in the window; all of it until there is one.
    pub fn recent(&self, count: impl Fn(&Figures) -> Option<u64>) -> Option<u64> {
        let now = count(self.figures())?;
        Some(now.saturating_sub(
            self.base.as_ref().and_then(|base| count(&base.figures)).filter(|&base| base <= now).unwrap_or(0),
        ))
    }

    /// A histogram of the window; of all there was until there is one.
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
