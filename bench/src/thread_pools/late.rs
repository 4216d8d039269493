//! late: clients of a file in memory that arrive after clients of the slow disk have used the server alone.
//!
//! Client 1 begins; 5 s later 50 clients arrive at once for a file that is in memory and was not requested meanwhile.
//! The first answers show how a server treats a file that it has not sent for seconds. Without client 1, the clients
//! arrive after the same time at an idle server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::data_set::{self, DataSet};
use super::rounds::{Results, Row, Runs, Target, percent_at_least};
use super::waits::{self, Waits};
use super::{
    CLIENT_1_CONNECTIONS, CLIENT_2_CONNECTIONS, CLIENT_2_P99_MAX, CLIENT_2_SHARE_MIN, Clients, Experiment, HOT_FILE,
    Site, Subject, WORKER_USER, stalls, with_aio,
};
use crate::Measured;
use crate::client::swarm::{self, Got};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{Program, Running};

/// Time from the first request of client 1 to the late clients.
const LATE_BY: Duration = Duration::from_secs(5);

/// Limit for the longest first answer. If it is longer without client 1, the limit is that time multiplied by
/// `FIRST_SHARE_MAX`.
const FIRST_MAX_MS: f64 = 100.0;
const FIRST_SHARE_MAX: f64 = 1.5;

#[derive(Debug, Serialize)]
struct Run {
    /// The late clients.
    clients: Got,
    client_1: Option<Got>,
    probe: Got,
    /// Share of the file in memory when they arrived, and at the end.
    in_memory_before: f64,
    in_memory_after: f64,
    waits: BTreeMap<String, Waits>,
}

impl Run {
    fn was_in_memory(&self) -> bool {
        self.in_memory_before == 1.0 && self.in_memory_after == 1.0
    }
}

pub fn measure(options: &Options) -> Measured {
    let experiment = Experiment { on_small_disk: true, ..options.experiment.clone() };
    let programs = with_aio(options.servers(Some(&["nginx", "gale"]))?)?;
    let site = Site::build(&experiment, experiment.data_mib << 20)?;
    eprintln!("writing {} MiB", experiment.data_mib);
    let data = DataSet::write(site.root(), experiment.data_mib << 20)?;
    let mut rows: Vec<Row<Run>> = Vec::new();
    for round in 1..=options.rounds {
        for subject in Subject::by_default(&programs) {
            let server = subject.start(&site, experiment.workers)?;
            let without = run(options, &server, &data, false)?;
            let with = run(options, &server, &data, true)?;
            eprintln!(
                "  round {round}, {}: first answers within {:.0} of {:.0} ms, {:.1} of {:.1} requests/s",
                server.label,
                with.clients.first_max_ms,
                without.clients.first_max_ms,
                with.clients.requests_per_second,
                without.clients.requests_per_second
            );
            Row::add(&mut rows, &server.label, without, with, stalls(&server.error_log()));
        }
    }
    let holds = rows.iter().flat_map(Row::runs).all(|run| run.clients.errors == 0);
    Ok((document(options, &experiment, &site, &programs, &rows)?, holds))
}

fn run(options: &Options, server: &Running, data: &DataSet, with_client_1: bool) -> Result<Run, String> {
    data.forget();
    let clients = Clients::of(server);
    clients.warm()?;
    let in_memory = || data_set::share_in_memory([data.directory.join(HOT_FILE)]);
    let (goes_on, ends) = (AtomicBool::new(false), AtomicBool::new(false));
    // The late clients end the run.
    let client_1_time = LATE_BY + options.late_time + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let client_1 = with_client_1.then(|| scope.spawn(|| clients.client_1(data, client_1_time, &ends)));
        let probe = scope.spawn(|| swarm::probe(&server.address, "/return", LATE_BY, &ends));
        let waits = scope.spawn(|| waits::watch(server.root, &ends));
        std::thread::sleep(LATE_BY);
        let before = in_memory();
        let late = clients.client_2(Duration::ZERO, options.late_time, &goes_on);
        let after = in_memory();
        ends.store(true, Ordering::Relaxed);
        let ended = "a client does not panic";
        Ok(Run {
            clients: late?,
            client_1: client_1.map(|client| client.join().expect(ended)).transpose()?,
            probe: probe.join().expect(ended)?,
            in_memory_before: before?,
            in_memory_after: after?,
            waits: waits.join().expect(ended),
        })
    })
}

impl Row<Run> {
    /// Returns the targets. Each run with client 1 is compared with the medians of the runs without it.
    fn targets(&self) -> Vec<Target> {
        let first = first_limit_ms(self.without(first_max_ms).median);
        let requests = CLIENT_2_SHARE_MIN * self.without(requests_per_second).median;
        let p99 = CLIENT_2_P99_MAX * self.without(p99_ms).median;
        let target = |text: &str, is_met: &dyn Fn(&Run) -> bool| Target {
            server: self.server.clone(),
            target: text.to_owned(),
            runs: Runs::of(self.with_client_1.iter().map(|run| run.was_in_memory().then(|| is_met(run)))),
        };
        vec![
            target("first answers ≤ 100 ms, or 1.5 ×", &|run| first_max_ms(run) <= first),
            target("requests/s ≥ 0.8 ×", &|run| requests_per_second(run) >= requests),
            target("p99 ≤ 1.5 ×", &|run| p99_ms(run) <= p99),
        ]
    }
}

/// Returns the limit for a first answer, given its time without client 1.
fn first_limit_ms(alone_ms: f64) -> f64 {
    if alone_ms <= FIRST_MAX_MS { FIRST_MAX_MS } else { FIRST_SHARE_MAX * alone_ms }
}

fn first_max_ms(run: &Run) -> f64 {
    run.clients.first_max_ms
}

fn requests_per_second(run: &Run) -> f64 {
    run.clients.requests_per_second
}

fn p99_ms(run: &Run) -> f64 {
    run.clients.p99_ms
}

fn document(
    options: &Options,
    experiment: &Experiment,
    site: &Site,
    programs: &[Program],
    rows: &[Row<Run>],
) -> Result<Document, String> {
    // Median and worst with client 1, and median without it.
    let three = |row: &Row<Run>, figure: fn(&Run) -> f64, worst: fn(Spread) -> f64| {
        let (with, without) = (row.with(figure), row.without(figure));
        format!("{:.1} ({:.1}) / {:.1}", with.median, worst(with), without.median)
    };
    let table = report::table_of(
        rows,
        &[
            ("server", &|row: &Row<Run>| row.server.clone()),
            ("longest first answer ms", &|row| three(row, first_max_ms, |spread| spread.greatest)),
            ("requests/s", &|row| three(row, requests_per_second, |spread| spread.least)),
            ("p99 ms", &|row| three(row, p99_ms, |spread| spread.greatest)),
            ("client 1 MiB/s", &|row| {
                let bytes = |run: &Run| run.client_1.map_or(0.0, |got| got.bytes_per_second);
                format!("{:.0}", row.with(bytes).median / f64::from(1 << 20))
            }),
            ("probe p99 ms", &|row| three(row, |run| run.probe.p99_ms, |spread| spread.greatest)),
            ("in memory", &|row| {
                let least = |run: &Run| run.in_memory_before.min(run.in_memory_after);
                percent_at_least(row.runs().map(least).fold(1.0, f64::min))
            }),
            ("stalls logged", &|row| row.stalls.len().to_string()),
            ("loops waited over 20 ms for", &|row| {
                waits::text(&waits::together(row.with_client_1.iter().map(|run| &run.waits)))
            }),
            ("errors", &|row| row.runs().map(|run| run.clients.errors).sum::<u64>().to_string()),
        ],
    );
    let is_whole = site.cage.limits_memory && site.cage.limits_disk;
    let targets: Vec<Target> = if is_whole { rows.iter().flat_map(Row::<Run>::targets).collect() } else { Vec::new() };
    let judgement = match is_whole {
        true => report::table_of(
            &targets,
            &[
                ("server", &|target: &Target| target.server.clone()),
                ("target", &|target| target.target.clone()),
                ("met", &|target| target.runs.text()),
            ],
        ),
        false => "The targets say something only with little memory and a slow disk: not judged.\n".to_owned(),
    };
    let body = format!(
        "{}Client 1: {CLIENT_1_CONNECTIONS} connections that ask for random ones of {} MiB of files of 4 MiB. {} s \
         after it has begun, {CLIENT_2_CONNECTIONS} clients come at once for one file of 4 MiB that is in memory and \
         was not asked for meanwhile, for {} s; {}, {}, {} workers as {WORKER_USER}, files of root's, the default of \
         `aio` where no other is named. {} rounds: the median and (in parentheses) the worst with client 1, then the \
         median without it.\n\n{table}\n{judgement}\n{NOTES}",
        site.notes(),
        experiment.data_mib,
        LATE_BY.as_secs(),
        options.late_time.as_secs(),
        site.memory(experiment),
        site.disk(experiment),
        experiment.workers,
        options.rounds,
    );
    let title = "Clients that come late for a file in memory, beside a slow disk";
    Document::new("late", title, programs, &body, Results { rows, targets: &targets })
}

const NOTES: &str = "\
Longest first answer: of the first answers to the 50 clients; one that had not come at the end counts with the time \
that its client had waited. Met: in how many runs with client 1, each compared with the medians without it. In \
memory: the least share of the file's pages when the clients came or at the end of a run (mincore); a run in which a \
page was missing is not judged. Stalls and waits are those of event loops, over 20 ms.\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first_max_ms: f64, requests_per_second: f64, p99_ms: f64) -> Run {
        Run {
            clients: Got { first_max_ms, requests_per_second, p99_ms, ..Got::default() },
            client_1: None,
            probe: Got::default(),
            in_memory_before: 1.0,
            in_memory_after: 1.0,
            waits: BTreeMap::new(),
        }
    }

    fn missed(without_client_1: Run, with_client_1: Vec<Run>) -> Vec<Runs> {
        let row =
            Row { server: "a".to_owned(), without_client_1: vec![without_client_1], with_client_1, stalls: Vec::new() };
        row.targets().into_iter().map(|target| target.runs).collect()
    }

    #[test]
    fn a_first_answer_has_a_limit_of_its_own_where_it_takes_long_alone() {
        assert_eq!([30.0, 100.0, 200.0].map(first_limit_ms), [100.0, 100.0, 300.0]);
    }

    #[test]
    fn each_run_is_judged_by_each_target() {
        let with = vec![run(99.0, 800.0, 60.0), run(101.0, 800.0, 61.0), run(99.0, 799.0, 60.0)];
        let runs = |missed| Runs { judged: 3, missed };
        assert_eq!(missed(run(50.0, 1000.0, 40.0), with), [runs(1), runs(1), runs(1)]);
    }

    #[test]
    fn a_run_with_missing_pages_is_not_judged() {
        let with = Run { in_memory_after: 0.9, ..run(5000.0, 1.0, 5000.0) };
        assert_eq!(missed(run(50.0, 1000.0, 40.0), vec![with]), [Runs::default(); 3]);
    }
}
