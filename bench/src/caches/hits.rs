//! cache-hits: hit rates of eviction policies: Gale's, other current ones, and nginx's. They are simulated, so the
//! figures are the same on every machine.

use serde::Serialize;

use super::eviction::{RULES, Trace};
use crate::Measured;
use crate::options::Options;
use crate::report::{self, Document};

/// Hits per thousand requests of a trace, in the order of [`RULES`].
#[derive(Debug, Serialize)]
struct Row {
    trace: String,
    hits: [u64; RULES.len()],
}

pub fn measure(_options: &Options) -> Measured {
    let mut rows = Vec::new();
    for exponent in [0.8, 1.0] {
        for (has_sizes, has_scans) in [(false, false), (false, true), (true, false), (true, true)] {
            let trace = Trace { exponent, has_scans, has_sizes };
            let hits = RULES.map(|(_, make)| trace.hits(&mut *make(trace.room())));
            let sizes = if has_sizes { ", sizes" } else { "" };
            let scans = if has_scans { ", scans" } else { "" };
            rows.push(Row { trace: format!("exponent {exponent:.1}{sizes}{scans}"), hits });
        }
    }
    let hits_of = |rule: usize| move |row: &Row| row.hits[rule].to_string();
    let columns = [hits_of(0), hits_of(1), hits_of(2), hits_of(3), hits_of(4)];
    let table = report::table_of(
        &rows,
        &[
            ("trace", &|row: &Row| row.trace.clone()),
            (RULES[0].0, &columns[0]),
            (RULES[1].0, &columns[1]),
            (RULES[2].0, &columns[2]),
            (RULES[3].0, &columns[3]),
            (RULES[4].0, &columns[4]),
        ],
    );
    let requests = Trace::REQUESTS;
    let body = format!(
        "Hits per thousand of {requests} requests for 50,000 keys; room for 1,000 of them (with sizes of 1 to 128, for \
         8,000). Scans are 2,000 keys, requested only once, after each 2,000 requests.\n\n{table}"
    );
    Ok((Document::new("cache-hits", "Hits by rule of eviction", &[], &body, &rows)?, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test of the index (`crates/http-cache/src/index.rs`) requires more hits than LRU. This one checks that the
    /// simulated policy is Gale's, with the figures of the index for the same traces.
    #[test]
    fn the_simulated_rule_of_gale_has_the_hits_of_its_index() {
        let of_gale = |exponent, has_scans, has_sizes| {
            let trace = Trace { exponent, has_scans, has_sizes };
            trace.hits(&mut *(RULES[0].1)(trace.room()))
        };
        assert_eq!((of_gale(1.0, true, false), of_gale(0.8, false, true)), (611, 239));
    }
}
