//! Compatibility report for an nginx configuration: directives that work the same in Gale, differ, or are missing; and
//! settings that are unsafe with any server.
//!
//! ```text
//! Statements ──▶ Tree ──┬── survey ◀── directive tables, differences (docs/configuration.md)
//!                       │           documented: directives of nginx's documentation that its source lacks
//!                       └── findings, a file per check
//!                                  └──▶ Report ──▶ text, JSON
//! ```
//!
//! Reads only text: no file that the configuration names is opened, so a configuration from another machine can be
//! checked. Invariant: the size of a report is bounded by the number of names, checks and [`PLACES_MAX`], not by the
//! size of the text.
#![forbid(unsafe_code)]

mod differences;
mod documented;
mod expression;
mod findings;
mod print;
mod report;
mod survey;
mod tree;
mod variables;

use gale_config::{Parsed, Sources, Tables};

pub use self::differences::{Difference, Differences};
pub use self::report::{Directive, Finding, PLACES_MAX, Problem, Report, Severity, SourceLine, Verdict};

/// Checks a parsed configuration against the directive tables.
pub fn check<Cx>(parsed: &Parsed, sources: &Sources, tables: &Tables<Cx>) -> Report {
    let tree = tree::Tree::new(&parsed.statements);
    let (directives, problems) = survey::survey(&tree, sources, tables);
    Report {
        files: sources.iter().filter(|(_, source)| source.path().is_some()).count(),
        statements: tree.nodes.len(),
        problems,
        directives,
        findings: findings::find(&tree, sources),
    }
}
