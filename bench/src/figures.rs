//! figures: cost of statistics per request: zones with all counters and histograms, and traces with one in a hundred
//! sampled.
//!
//! Instructions per request are counted without and with them, as in `instructions`. The measurement fails if the cost
//! exceeds its bound. Peers of groups are always counted, so both sides include that.

use std::rc::Rc;

use serde::Serialize;

use crate::Measured;
use crate::backend::Backend;
use crate::instructions::{self, Asked, BATCH};
use crate::options::Options;
use crate::report::{self, Document, Spread};
use crate::servers::{SMALL_BODY, Setting, file_body};

/// Bound for all counters and histograms, relative to the instructions without them.
const ZONES_MAX: f64 = 1.01;
/// Bound for traces with one in a hundred sampled.
const TRACES_MAX: f64 = 1.02;

/// Repetitions, because the sampling of traces is random.
const TIMES: usize = 3;

/// A request and the statistics enabled for it.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    title: &'static str,
    path: &'static str,
    /// Configuration without statistics.
    off: Blocks,
    /// Configuration with them.
    on: Blocks,
    ratio_max: f64,
}

/// Directives for the http block and the server. `COLLECTOR` stands for the address that receives spans.
#[derive(Clone, Copy)]
struct Blocks {
    http: &'static str,
    server: &'static str,
}

const NONE: Blocks = Blocks { http: "", server: "" };

const CASES: [Case; 6] = [
    Case {
        name: "zone",
        title: "2-byte answer, a zone of the server",
        path: "/return",
        off: NONE,
        on: Blocks { server: "status_zone site;", ..NONE },
        ratio_max: ZONES_MAX,
    },
    Case {
        name: "zones",
        title: "2-byte answer, zones of server and location",
        path: "/counted",
        off: Blocks { server: "location = /counted { return 200 ok; }", ..NONE },
        on: Blocks { server: "status_zone site; location = /counted { status_zone counted; return 200 ok; }", ..NONE },
        ratio_max: ZONES_MAX,
    },
    Case {
        name: "file",
        title: "1 KiB file, zones of server and location",
        path: "/file",
        off: Blocks { server: "location = /file { }", ..NONE },
        on: Blocks { server: "status_zone site; location = /file { status_zone file; }", ..NONE },
        ratio_max: ZONES_MAX,
    },
    Case {
        name: "proxied",
        title: "2 bytes from a backend, zones of server and location",
        path: "/counted",
        off: Blocks { server: "location = /counted { PASS }", ..NONE },
        on: Blocks { server: "status_zone site; location = /counted { status_zone counted; PASS }", ..NONE },
        ratio_max: ZONES_MAX,
    },
    Case {
        name: "chance",
        title: "2-byte answer, one in a hundred traced by chance",
        path: "/return",
        off: NONE,
        on: Blocks {
            http: "otel_exporter { endpoint http://127.0.0.1:COLLECTOR/v1/traces; }",
            server: "otel_trace 1%;",
        },
        ratio_max: TRACES_MAX,
    },
    Case {
        name: "traces",
        title: "2-byte answer, one in a hundred traced by a variable",
        path: "/return",
        off: NONE,
        on: Blocks {
            http: "otel_exporter { endpoint http://127.0.0.1:COLLECTOR/v1/traces; } \
                   split_clients $otel_trace_id $sampled { 1% on; * off; }",
            server: "otel_trace $sampled;",
        },
        ratio_max: TRACES_MAX,
    },
];

const PASS: &str = "proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection \"\";";

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    case: &'static str,
    title: &'static str,
    /// Instructions per request.
    off: f64,
    on: f64,
    ratio_max: f64,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.on / self.off
    }

    fn holds(&self) -> bool {
        self.ratio() <= self.ratio_max
    }
}

/// Backends: one for proxied requests, and a collector of spans, which answers with an empty body.
struct Others {
    backend: Rc<Backend>,
    collector: Rc<Backend>,
}

/// Counts for Gale, or for the chosen servers.
pub fn measure(options: &Options) -> Measured {
    let programs = instructions::programs(options, &["gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let others = Others {
        backend: Backend::start(options.client_core, SMALL_BODY.len())?,
        collector: Backend::start(options.client_core, 0)?,
    };
    let mut rows = Vec::new();
    for program in &programs {
        for case in CASES.into_iter().filter(is_chosen) {
            let count = |blocks| {
                let asked = Asked {
                    path: &|_| case.path.to_owned(),
                    headers: &[],
                    content: case.content(),
                    is_short: false,
                    batch: BATCH,
                };
                let setting = others.setting(blocks);
                let counts: Result<Vec<f64>, String> =
                    (0..TIMES).map(|_| instructions::count_per_request(options, program, &setting, &asked)).collect();
                Ok::<f64, String>(Spread::of(counts?).median)
            };
            let (off, on) = (count(case.off)?, count(case.on)?);
            eprintln!("{}, {}: {off:.0}, {on:.0}", program.label, case.name);
            let Case { name, title, ratio_max, .. } = case;
            rows.push(Row { server: program.label.clone(), case: name, title, off, on, ratio_max });
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("request", &|row| row.title.to_owned()),
            ("off", &|row| format!("{:.0}", row.off)),
            ("on", &|row| format!("{:.0}", row.on)),
            ("ratio", &|row| format!("{:.3}", row.ratio())),
            ("may be", &|row| format!("{:.2}", row.ratio_max)),
        ],
    );
    let body = format!("Instructions in user space per request, median of {TIMES}.\n\n{table}");
    let holds = rows.iter().all(Row::holds);
    Ok((Document::new("figures", "Cost of status figures and traces", &programs, &body, &rows)?, holds))
}

impl Case {
    fn content(&self) -> Vec<u8> {
        match self.name {
            "file" => file_body(),
            // The body of the backend.
            "proxied" => vec![b'x'; SMALL_BODY.len()],
            _ => SMALL_BODY.to_vec(),
        }
    }
}

impl Others {
    fn setting(&self, blocks: Blocks) -> Setting {
        Setting {
            http: blocks.http.replace("COLLECTOR", &self.collector.port.to_string()),
            server: blocks.server.replace("PASS", PASS),
            backend: Some(self.backend.port),
            ..Setting::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_differ_only_by_the_figures_turned_on() {
        for case in CASES {
            let plain = case.on.server.replace("status_zone site; ", "").replace("status_zone site;", "");
            let plain = plain.replace("status_zone counted; ", "").replace("status_zone file; ", "");
            let plain = plain.replace("otel_trace $sampled;", "").replace("otel_trace 1%;", "");
            assert_eq!(plain, case.off.server, "{}", case.name);
        }
    }
}
