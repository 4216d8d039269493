//! lookups: growth of the cost of a request with the number of locations, values of a map, and networks of a geo.
//!
//! Instructions per request are counted, as in `instructions`, for a server with ten entries and for one with
//! thousands. Requests use all entries in turn. Growth of more than a tenth fails the measurement, except for regular
//! expressions: these must be tried one by one, so the cost of each is reported.

use serde::Serialize;

use crate::Measured;
use crate::instructions::{self, Asked, BATCH};
use crate::options::Options;
use crate::report::{self, Document};
use crate::servers::{SMALL_BODY, Setting};

/// Entries in the smaller configuration.
const FEW: u32 = 10;

/// Maximum ratio of the costs with many and with few entries.
const RATIO_MAX: f64 = 1.1;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Name of the entries.
    what: &'static str,
    many: u32,
    /// Directives of the http block with this number of entries.
    http: fn(u32) -> String,
    /// The same for the server.
    server: fn(u32) -> String,
    /// Target of a request that uses the entry with this number.
    target: fn(u32) -> String,
    may_grow: bool,
}

const CASES: [Case; 4] = [
    Case {
        name: "prefixes",
        what: "prefix locations",
        many: 10_000,
        http: |_| String::new(),
        server: |count| lines(count, |number| format!("location /p{number:06}/ {{ return 200 ok; }}")),
        target: |number| format!("/p{number:06}/x"),
        may_grow: false,
    },
    Case {
        name: "map",
        what: "values of a map",
        many: 100_000,
        http: |count| format!("map $arg_k $value {{ {} }}", lines(count, |number| format!("k{number:06} ok;"))),
        server: |_| "location = /map { return 200 $value; }".to_owned(),
        target: |number| format!("/map?k=k{number:06}"),
        may_grow: false,
    },
    Case {
        name: "geo",
        what: "networks of a geo",
        many: 100_000,
        http: |count| {
            format!("geo $arg_a $value {{ {} }}", lines(count, |number| format!("{}/24 ok;", network(number))))
        },
        server: |_| "location = /geo { return 200 $value; }".to_owned(),
        target: |number| format!("/geo?a={}", network(number)),
        may_grow: false,
    },
    Case {
        name: "expressions",
        what: "regular expressions of locations",
        many: 200,
        http: |_| String::new(),
        server: |count| lines(count, |number| format!("location ~ ^/r{number:06}/ {{ return 200 ok; }}")),
        target: |number| format!("/r{number:06}/x"),
        may_grow: true,
    },
];

fn lines(count: u32, line: impl Fn(u32) -> String) -> String {
    (0..count).map(|number| line(number) + "\n").collect()
}

/// Returns 101.0.0.0, 101.0.1.0 and so on.
fn network(number: u32) -> String {
    let [_, first, second, third] = number.to_be_bytes();
    format!("{}.{second}.{third}.0", 101 + first)
}

#[derive(Debug, Serialize)]
struct Row {
    server: String,
    case: &'static str,
    what: &'static str,
    few: u32,
    many: u32,
    /// Instructions per request.
    with_few: f64,
    with_many: f64,
    may_grow: bool,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.with_many / self.with_few
    }

    fn holds(&self) -> bool {
        self.may_grow || self.ratio() <= RATIO_MAX
    }

    /// Returns the cost of an additional entry: on average, half of the additional entries are tried.
    fn each(&self) -> f64 {
        (self.with_many - self.with_few) / (f64::from(self.many - self.few) / 2.0)
    }
}

/// Counts for Gale, or for the chosen servers.
pub fn measure(options: &Options) -> Measured {
    let programs = instructions::programs(options, &["gale"])?;
    let is_chosen = |case: &Case| options.cases.as_ref().is_none_or(|names| names.iter().any(|name| name == case.name));
    let mut rows = Vec::new();
    for program in &programs {
        for case in CASES.into_iter().filter(is_chosen) {
            let count = |number_of: u32| {
                let path = |request: u32| (case.target)(spread(request, number_of));
                let content = SMALL_BODY.to_vec();
                let asked = Asked { path: &path, headers: &[], content, is_short: false, batch: BATCH };
                let (http, server) = ((case.http)(number_of), (case.server)(number_of));
                let setting = Setting { http, server, ..Setting::default() };
                instructions::count_per_request(options, program, &setting, &asked)
            };
            let (with_few, with_many) = (count(FEW)?, count(case.many)?);
            eprintln!("{}, {}: {with_few:.0}, {with_many:.0}", program.label, case.name);
            let (server, case_name) = (program.label.clone(), case.name);
            let Case { what, many, may_grow, .. } = case;
            rows.push(Row { server, case: case_name, what, few: FEW, many, with_few, with_many, may_grow });
        }
    }
    let table = report::table_of(
        &rows,
        &[
            ("server", &|row: &Row| row.server.clone()),
            ("looked up", &|row| row.what.to_owned()),
            ("with ten", &|row| format!("{:.0}", row.with_few)),
            ("with many", &|row| format!("{:.0} ({})", row.with_many, row.many)),
            ("ratio", &|row| format!("{:.2}", row.ratio())),
            ("may be", &|row| if row.may_grow { "any".to_owned() } else { format!("{RATIO_MAX:.1}") }),
        ],
    );
    let expressions: String = rows
        .iter()
        .filter(|row| row.may_grow)
        .map(|row| format!("\n{}: each expression that is tried costs {:.0} instructions.\n", row.server, row.each()))
        .collect();
    let body =
        format!("Instructions in user space per request, spread over all that there is.\n\n{table}{expressions}");
    let holds = rows.iter().all(Row::holds);
    Ok((Document::new("lookups", "Lookups among few and among many", &programs, &body, &rows)?, holds))
}

/// Returns the entry of `count` that a request uses: all in turn, with consecutive requests far apart.
fn spread(request: u32, count: u32) -> u32 {
    (u64::from(request) * 7919 % u64::from(count)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_different() {
        let networks: std::collections::HashSet<String> = (0..100_000).map(network).collect();
        assert_eq!(networks.len(), 100_000);
        assert!(networks.contains("101.0.1.0") && networks.contains("102.0.0.0"));
    }

    #[test]
    fn requests_are_spread_over_everything() {
        for count in [FEW, 200, 10_000, 100_000] {
            let asked: std::collections::HashSet<u32> = (0..count).map(|request| spread(request, count)).collect();
            assert_eq!(asked.len() as u32, count);
        }
    }
}
