//! rounds: runs of each server with and without client 1, and the number of runs that missed a target.

use serde::Serialize;

use crate::report::Spread;

#[derive(Debug, Serialize)]
pub struct Row<R> {
    pub server: String,
    pub without_client_1: Vec<R>,
    pub with_client_1: Vec<R>,
    /// Error log lines about stalls of over 20 ms that are the server's fault.
    pub stalls: Vec<String>,
}

impl<R> Row<R> {
    /// Adds a round to the row of this server. A missing row is added.
    pub fn add(rows: &mut Vec<Row<R>>, server: &str, without: R, with: R, stalls: Vec<String>) {
        let place = rows.iter().position(|row| row.server == server).unwrap_or_else(|| {
            let (without_client_1, with_client_1) = (Vec::new(), Vec::new());
            rows.push(Row { server: server.to_owned(), without_client_1, with_client_1, stalls: Vec::new() });
            rows.len() - 1
        });
        let row = &mut rows[place];
        row.without_client_1.push(without);
        row.with_client_1.push(with);
        row.stalls.extend(stalls);
    }

    pub fn runs(&self) -> impl Iterator<Item = &R> {
        self.without_client_1.iter().chain(&self.with_client_1)
    }

    pub fn with(&self, figure: impl Fn(&R) -> f64) -> Spread {
        Spread::of(self.with_client_1.iter().map(figure))
    }

    pub fn without(&self, figure: impl Fn(&R) -> f64) -> Spread {
        Spread::of(self.without_client_1.iter().map(figure))
    }
}

#[derive(Debug, Serialize)]
pub struct Results<'a, R> {
    pub rows: &'a [Row<R>],
    pub targets: &'a [Target],
}

#[derive(Debug, Serialize)]
pub struct Target {
    pub server: String,
    pub target: String,
    #[serde(flatten)]
    pub runs: Runs,
}

/// Number of runs that are valid for a target, and of those that missed it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Runs {
    pub judged: usize,
    pub missed: usize,
}

impl Runs {
    /// Counts runs, given whether each met the target; `None` for a run that is invalid for it.
    pub fn of(runs: impl IntoIterator<Item = Option<bool>>) -> Runs {
        runs.into_iter().flatten().fold(Runs::default(), |runs, is_met| Runs {
            judged: runs.judged + 1,
            missed: runs.missed + usize::from(!is_met),
        })
    }

    pub fn text(self) -> String {
        match self {
            Runs { judged: 0, .. } => "not judged".to_owned(),
            Runs { judged, missed: 0 } => format!("yes, in {judged} of {judged}"),
            Runs { judged, missed } => format!("no, missed in {missed} of {judged}"),
        }
    }
}

/// Formats a share in percent, rounded down: only all of it is 100 %.
pub fn percent_at_least(share: f64) -> String {
    format!("{:.1} %", (share * 1000.0).floor() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_one_server_make_one_row() {
        let mut rows = Vec::new();
        for (server, without, with) in [("a", 1.0, 2.0), ("b", 5.0, 6.0), ("a", 3.0, 4.0)] {
            Row::add(&mut rows, server, without, with, vec![format!("{server} stalled")]);
        }
        assert_eq!((rows.len(), rows[0].stalls.len()), (2, 2));
        assert_eq!((rows[0].without(|run| *run).median, rows[0].with(|run| *run).median), (2.0, 3.0));
        assert_eq!(rows[0].runs().count(), 4);
    }

    #[test]
    fn runs_that_say_nothing_are_not_judged() {
        let runs = Runs::of([Some(true), None, Some(false), Some(true)]);
        assert_eq!((runs, runs.text().as_str()), (Runs { judged: 3, missed: 1 }, "no, missed in 1 of 3"));
        assert_eq!(Runs::of([Some(true)]).text(), "yes, in 1 of 1");
        assert_eq!(Runs::of([None, None]).text(), "not judged");
    }

    #[test]
    fn a_share_below_one_is_never_all() {
        assert_eq!(percent_at_least(1.0), "100.0 %");
        assert_eq!(percent_at_least(0.999_99), "99.9 %");
    }
}
