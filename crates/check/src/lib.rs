//! What becomes of an nginx configuration in Gale: which directives mean the same, which differ and how, which are not
//! there; and what is unsafe in it, with any server.
//!
//! ```text
//! Statements ──▶ Tree ──┬── survey ◀── directive tables, differences (docs/configuration.md)
//!                       │           documented: what nginx documents and its source does not contain
//!                       └── findings, a file per check
//!                                  └──▶ Report ──▶ text, JSON
//! ```
//!
//! Reads texts only: nothing that a configuration names is opened, so that one of another machine can be read, too.
//! Invariant: a report is bounded by the number of names, checks and [`PLACES_MAX`], not by the length of a text.
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

/// Reads what was parsed of a configuration whose directives are these tables'.
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
