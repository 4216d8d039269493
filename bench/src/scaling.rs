//! scaling: cost of a request with two workers compared with one.
//!
//! Both variants run on both cores with two clients on each core, so that only the number of workers differs. Waiting
//! for locks shows as futex calls and as sleeps; futex calls of the watchdog are excluded. With two workers each has a
//! share of the load, so it waits more often and finds less when it wakes. To separate this from locks and shared cache
//! lines, two servers of one worker each are measured, too (*apart*): they share nothing, and every core has a client
//! of each.

use serde::Serialize;

use crate::Measured;
use crate::case::{self, Case, Row, Subject};
use crate::client::ClientKind;
use crate::options::Options;
use crate::report::{self, Document, Spread, percent};
use crate::servers::{Kind, Program};
use crate::syscalls::{self, Whose};

const WORKERS: usize = 2;

#[derive(Debug, Serialize)]
struct Pair {
    server: String,
    one: Row,
    two: Row,
    /// Two servers of one worker each.
    apart: Row,
    /// CPU time per request with two workers, divided by that with one, by round.
    ratio: Spread,
    /// The same, divided by that of two servers.
    ratio_to_apart: Spread,
    /// Futex calls of two workers without the watchdog, per 1,000 requests; `None` if perf could not count.
    futex_calls: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Table {
    case: &'static str,
    title: String,
    pairs: Vec<Pair>,
}

pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let client = options.client.unwrap_or(ClientKind::Wrk);
    let cases = vec![Case::keepalive(options, client, options.connections[0]), Case::short(options)];
    let mut tables = Vec::new();
    for case in options.chosen_cases(cases)? {
        let pairs = measure_case(options, &case, &programs)?;
        tables.push(Table { case: case.name, title: case.title, pairs });
    }
    let body: String = tables.iter().map(|table| table.markdown(options)).collect();
    let errors = |pair: &Pair| pair.one.errors() + pair.two.errors() + pair.apart.errors();
    let holds = tables.iter().all(|table| table.pairs.iter().all(|pair| errors(pair) == 0));
    Ok((Document::new("scaling", "One worker and two", &programs, &(body + NOTES), &tables)?, holds))
}

const NOTES: &str = "\
Server µs: CPU time per request, median (least – greatest); ratio: two workers to one, round by round. Sleeps: how \
often a thread of the server waited, preempted: how often it was made to, futex: calls of all but the watchdog, each \
in 1,000 requests. Busiest: the share of the busier one of two workers in their CPU time. Apart: two servers of one \
worker each, which share nothing, and which a client of either core asks; with half of the load for each, a worker \
waits more often and finds less when it wakes, and that alone is between one and these.\n";

fn measure_case(options: &Options, case: &Case, programs: &[Program]) -> Result<Vec<Pair>, String> {
    let on_all_cores = |workers| {
        let case = case.clone().on_all_cores(options, workers);
        Case { clients: case.client_cores.len() * WORKERS, ..case }
    };
    let (one, two) = (on_all_cores(1), on_all_cores(WORKERS));
    let has_workers = |program: &&Program| program.kind != Kind::Floor;
    let programs: Vec<Program> = programs.iter().filter(has_workers).cloned().collect();
    let subjects = |program: &Program| {
        let [alone, two] = [&one, &two].map(|case| Subject::new(program, case.setting()));
        [alone.clone(), two, Subject { servers: WORKERS, ..alone }]
    };
    let servers: Vec<Subject> = programs.iter().flat_map(subjects).collect();
    // In this case, the number of workers only determines how many threads the distribution considers.
    let mut rows = case::measure_in_turn(options, &two, &servers)?.into_iter();
    let mut pairs = Vec::new();
    for program in &programs {
        let [one, two_row, apart] = std::array::from_fn(|_| rows.next().expect("three rows for each"));
        let ratio_to = |other: &Row| {
            let rounds = other.samples.iter().zip(&two_row.samples);
            Spread::of(rounds.map(|(other, two)| two.server_us / other.server_us))
        };
        pairs.push(Pair {
            server: program.label.clone(),
            ratio: ratio_to(&one),
            ratio_to_apart: ratio_to(&apart),
            futex_calls: futex_calls(options, &two, program),
            one,
            two: two_row,
            apart,
        });
    }
    Ok(pairs)
}

fn futex_calls(options: &Options, case: &Case, program: &Program) -> Option<f64> {
    let counted = program.start(case.setting()).and_then(|server| {
        let (calls, sample) = syscalls::count_with_perf(case, &server, &["futex"], Whose::AllButWatchdog, options)?;
        let calls = calls.get("futex").ok_or("perf cannot count them")?;
        Ok(*calls as f64 * 1000.0 / sample.figures.requests as f64)
    });
    counted.map_err(|error| eprintln!("note: {}: no futex calls: {error}", program.label)).ok()
}

impl Table {
    fn markdown(&self, options: &Options) -> String {
        let of_two = |pair: &Pair, figure: fn(&case::Sample) -> f64| format!("{:.1}", pair.two.median(figure));
        let table = report::table_of(
            &self.pairs,
            &[
                ("server", &|pair: &Pair| pair.server.clone()),
                ("one, server µs", &|pair| pair.one.spread(|sample| sample.server_us).to_string()),
                ("two, server µs", &|pair| pair.two.spread(|sample| sample.server_us).to_string()),
                ("ratio", &|pair| pair.ratio.to_string()),
                ("apart, server µs", &|pair| pair.apart.spread(|sample| sample.server_us).to_string()),
                ("two to apart", &|pair| pair.ratio_to_apart.to_string()),
                ("one, requests/s", &|pair| {
                    format!("{:.0}", pair.one.median(|sample| sample.figures.requests_per_second))
                }),
                ("two, requests/s", &|pair| {
                    format!("{:.0}", pair.two.median(|sample| sample.figures.requests_per_second))
                }),
                ("one, sleeps", &|pair| format!("{:.1}", pair.one.median(|sample| sample.voluntary_switches))),
                ("two, sleeps", &|pair| of_two(pair, |sample| sample.voluntary_switches)),
                ("apart, sleeps", &|pair| format!("{:.1}", pair.apart.median(|sample| sample.voluntary_switches))),
                ("two, preempted", &|pair| of_two(pair, |sample| sample.involuntary_switches)),
                ("two, futex", &|pair| pair.futex_calls.map_or("–".to_owned(), |calls| format!("{calls:.3}"))),
                ("two, busiest", &|pair| percent(pair.two.median(|sample| sample.busiest_worker))),
            ],
        );
        let (rounds, seconds) = (options.rounds, options.run_time.as_secs());
        format!("## {}\n\n{rounds} rounds of {seconds} s, everything on both cores\n\n{table}\n", self.title)
    }
}
