//! Checks for unsafe configurations, independent of the server that uses them: known pitfalls, one file each.

mod access;
mod add_header;
mod alias;
mod conditions;
mod header_splitting;
mod host;
mod origins;
mod proxied_address;
mod shared_cache;

use gale_config::Sources;

use crate::report::{Finding, PLACES_MAX, Severity, SourceLine};
use crate::tree::Tree;
use crate::variables::Variables;

/// One check. `run` reports the index of a statement and a message.
struct Check {
    name: &'static str,
    severity: Severity,
    advice: &'static str,
    run: fn(&Tree<'_>, &Variables<'_, '_>, &mut dyn FnMut(usize, String)),
}

const CHECKS: &[&Check] = &[
    &alias::TRAVERSAL,
    &header_splitting::CHECK,
    &proxied_address::CHECK,
    &host::CHECK,
    &shared_cache::CHECK,
    &origins::EXPRESSION,
    &origins::NO_REFERER,
    &access::CHECK,
    &add_header::LOST,
    &add_header::SEVERAL_LINES,
    &conditions::CHECK,
];

/// Runs the checks and returns their findings, the most severe first, at most [`PLACES_MAX`] per check.
pub fn find(tree: &Tree<'_>, sources: &Sources) -> Vec<Finding> {
    let variables = Variables::new(tree);
    let mut findings = Vec::new();
    for check in CHECKS {
        let mut count = 0;
        (check.run)(tree, &variables, &mut |number, message| {
            let span = tree.nodes[number].statement.span;
            if count < PLACES_MAX
                && let Some(place) = SourceLine::of(span, sources)
            {
                count += 1;
                let Check { name, severity, advice, .. } = **check;
                findings.push(Finding { check: name, severity, message, advice, place });
            }
        });
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}
