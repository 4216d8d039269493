//! accept: distribution of connections to two workers: with one shared socket, `reuseport`, or `accept_mutex on`.
//!
//! Two clients open short connections. Everything runs on both cores, because the distribution matters only where
//! workers compete. It is measured by the workers' CPU time, since every connection takes the same work.

use serde::Serialize;

use crate::Measured;
use crate::case::{self, Case, Row, Subject};
use crate::options::Options;
use crate::report::{self, Document, percent};
use crate::servers::{Accepting, Setting};

const WORKERS: usize = 2;
const ACCEPTING_MODES: [Accepting; 3] = [Accepting::Shared, Accepting::Reuseport, Accepting::Mutex];

#[derive(Debug, Serialize)]
struct WayRow {
    way: &'static str,
    #[serde(flatten)]
    row: Row,
}

/// Measures every server that has these modes, in each of them.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let case = Case::short(options).on_all_cores(options, WORKERS);
    let mut servers = Vec::new();
    let mut ways = Vec::new();
    for program in &programs {
        for way in ACCEPTING_MODES {
            servers.push(Subject::new(program, Setting { accepting: way, ..case.setting() }));
            ways.push(way.name());
        }
    }
    let rows = case::measure_in_turn(options, &case, &servers)?;
    let rows: Vec<WayRow> = ways.into_iter().zip(rows).map(|(way, row)| WayRow { way, row }).collect();
    let holds = rows.iter().all(|row| row.row.errors() == 0);
    let body = markdown(options, &case, &rows);
    Ok((Document::new("accept", "Ways of accepting", &programs, &body, &rows)?, holds))
}

fn markdown(options: &Options, case: &Case, rows: &[WayRow]) -> String {
    let median = |row: &WayRow, figure: fn(&case::Sample) -> f64| format!("{:.0}", row.row.median(figure));
    let table = report::table_of(
        rows,
        &[
            ("server", &|row: &WayRow| row.row.server.clone()),
            ("sockets", &|row| row.way.to_owned()),
            ("requests/s", &|row| median(row, |sample| sample.figures.requests_per_second)),
            ("latency mean µs", &|row| median(row, |sample| sample.figures.latency_mean_us)),
            ("deviation µs", &|row| median(row, |sample| sample.figures.latency_deviation_us)),
            ("p99 µs", &|row| median(row, |sample| sample.figures.latency_p99_us)),
            ("busiest worker", &|row| percent(row.row.median(|sample| sample.busiest_worker))),
            ("server µs", &|row| row.row.spread(|sample| sample.server_us).to_string()),
            ("sleeps per 1000", &|row| median(row, |sample| sample.voluntary_switches)),
            ("errors", &|row| row.row.errors().to_string()),
        ],
    );
    format!(
        "## {}\n\n{} rounds of {} s\n\n{table}\n\
         Busiest worker: its share of the CPU time of both; 50 % is even. Sleeps: how often a thread of the server \
         waited, in 1,000 requests. Server µs: CPU time per request.\n",
        case.title,
        options.rounds,
        options.run_time.as_secs()
    )
}
