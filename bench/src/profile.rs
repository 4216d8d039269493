//! profile: user-space time of a saturated worker by function, from `perf record`.
//!
//! Samples are taken by time, which works without hardware counters. The kernel is a single line, because the subject
//! is the server itself. Symbols are required: a stripped binary is a single line, too.

use std::collections::BTreeMap;
use std::process::Command;

use serde::Serialize;

use crate::Measured;
use crate::case::{Case, WARM_UP_TIME, measure_once};
use crate::client::ClientKind;
use crate::options::Options;
use crate::report::{self, Document, percent};
use crate::servers::Program;
use crate::syscalls::ids_of;

const SAMPLES_PER_SECOND: &str = "5000";
const SYMBOLS_MAX: usize = 40;

#[derive(Debug, Serialize)]
struct Profile {
    server: String,
    case: String,
    server_us: f64,
    user_us: f64,
    /// Ordered by share of the user-space time.
    symbols: Vec<Symbol>,
}

#[derive(Debug, Serialize)]
struct Symbol {
    name: String,
    object: String,
    share_of_user: f64,
    ns_per_request: f64,
}

/// Profiles the chosen servers, or nginx and Gale.
pub fn measure(options: &Options) -> Measured {
    let programs = options.servers(Some(&["nginx", "gale"]))?;
    let client = options.client.unwrap_or(ClientKind::Lean);
    let connections = options.connections[0];
    let mut cases = vec![
        Case::keepalive(options, client, connections),
        Case::file(options, client, connections),
        Case::short(options),
    ];
    cases.extend(Case::passed_on_if_chosen(options, client, connections)?);
    let cases = match options.cases {
        Some(_) => options.chosen_cases(cases)?,
        None => cases.into_iter().take(1).collect(),
    };
    let mut profiles = Vec::new();
    for case in &cases {
        eprintln!("{}:", case.title);
        for program in &programs {
            profiles.push(measure_one(options, case, program)?);
        }
    }
    let body: String = profiles.iter().map(Profile::markdown).collect();
    Ok((Document::new("profile", "User-space time by function", &programs, &body, &profiles)?, true))
}

fn measure_one(options: &Options, case: &Case, program: &Program) -> Result<Profile, String> {
    let server = program.start(case.setting())?;
    measure_once(case, &server, WARM_UP_TIME, None)?;
    let data = std::env::temp_dir().join(format!("gale-bench-{}.perf", std::process::id()));
    let mut command = Command::new("perf");
    command.args(["record", "--quiet", "-e", "cpu-clock", "-F", SAMPLES_PER_SECOND, "-o"]).arg(&data);
    command.args(["-p", &ids_of(&server.root.tree()).join(","), "--"]);
    let sample = measure_once(case, &server, options.run_time, Some(command))?;
    let mut report = Command::new("perf");
    report.args(["report", "--stdio", "--show-nr-samples", "--sort", "dso,symbol", "--field-separator", "\t", "-i"]);
    let output = report.arg(&data).output().map_err(|error| format!("perf: {error}"))?;
    let _ = std::fs::remove_file(&data);
    let counts = parse(&String::from_utf8_lossy(&output.stdout));
    let all: u64 = counts.values().sum();
    let user: u64 = counts.iter().filter(|((_, name), _)| !is_kernel(name)).map(|(_, count)| count).sum();
    if user == 0 {
        return Err(format!("{}: perf has no samples: {}", program.label, String::from_utf8_lossy(&output.stderr)));
    }
    let us_per_sample = sample.server_us / all as f64;
    let mut symbols: Vec<Symbol> = counts
        .into_iter()
        .filter(|((_, name), _)| !is_kernel(name))
        .map(|((object, name), count)| Symbol {
            name: name.trim_start_matches("[.] ").to_owned(),
            object,
            share_of_user: count as f64 / user as f64,
            ns_per_request: count as f64 * us_per_sample * 1000.0,
        })
        .collect();
    symbols.sort_by(|a, b| b.share_of_user.total_cmp(&a.share_of_user));
    let profile = Profile {
        server: program.label.clone(),
        case: case.title.clone(),
        server_us: sample.server_us,
        user_us: user as f64 * us_per_sample,
        symbols,
    };
    eprintln!("  {}: {:.2} of {:.2} µs in user space", profile.server, profile.user_us, profile.server_us);
    Ok(profile)
}

fn is_kernel(name: &str) -> bool {
    name.starts_with("[k]")
}

/// Returns samples by object and symbol, from lines of share, samples, object, symbol.
fn parse(text: &str) -> BTreeMap<(String, String), u64> {
    let mut counts = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split('\t').map(str::trim).collect();
        let [_, samples, object, symbol, ..] = fields[..] else {
            continue;
        };
        if let Ok(samples) = samples.parse::<u64>() {
            *counts.entry((object.to_owned(), symbol.to_owned())).or_default() += samples;
        }
    }
    counts
}

impl Profile {
    fn markdown(&self) -> String {
        let table = report::table_of(
            self.symbols.iter().take(SYMBOLS_MAX),
            &[
                ("user space", &|symbol: &Symbol| percent(symbol.share_of_user)),
                ("ns per request", &|symbol| format!("{:.0}", symbol.ns_per_request)),
                ("function", &|symbol| format!("`{}`", symbol.name)),
                ("in", &|symbol| symbol.object.clone()),
            ],
        );
        format!(
            "## {}, {}\n\n{:.2} µs per request, {:.2} of them in user space (with perf's own disturbance)\n\n{table}\n",
            self.server, self.case, self.server_us, self.user_us
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let text = "# To display\n#\n    12.50%\t  100\tgale  \t[.] gale::main \n  7.0%\t 56\t[kernel.kallsyms]\t[k] \
            tcp_ack\n\n";
        let counts = parse(text);
        assert_eq!(counts[&("gale".to_owned(), "[.] gale::main".to_owned())], 100);
        assert!(is_kernel("[k] tcp_ack"));
        assert_eq!(counts.len(), 2);
    }
}
