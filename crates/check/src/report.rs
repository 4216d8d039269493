//! The result of a check.

use gale_config::{Sources, Span};
use serde::Serialize;

/// Maximum number of places reported per directive or check.
pub const PLACES_MAX: usize = 20;

/// The report on a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Number of files read.
    pub files: usize,
    /// Number of statements whose context is known.
    pub statements: usize,
    /// Errors for which Gale would refuse the configuration, apart from missing directives.
    pub problems: Vec<Problem>,
    /// The directives used, sorted by verdict and name.
    pub directives: Vec<Directive>,
    /// Unsafe settings, at most [`PLACES_MAX`] per check.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Returns `true` if Gale would accept the configuration, judging by its text alone.
    pub fn is_accepted(&self) -> bool {
        let is_there = |directive: &Directive| !matches!(directive.verdict, Verdict::Missing | Verdict::Unknown);
        self.problems.is_empty() && self.directives.iter().all(is_there)
    }
}

/// Support for a directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Not supported by Gale, but by nginx, its commercial edition or a module that nginx documents.
    Missing,
    /// Unknown to both: it belongs to another module, or is misspelled.
    Unknown,
    /// Supported, with a difference from nginx.
    Different,
    /// Accepted with a warning, without effect.
    NoEffect,
    /// Gale's own directive.
    Own,
    /// Supported, same as nginx.
    Same,
}

/// A directive used in the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Directive {
    /// Name.
    pub name: String,
    /// Support for the directive.
    pub verdict: Verdict,
    /// Number of occurrences.
    pub count: usize,
    /// The difference, a suggested spelling, or the owner of a missing directive.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Link to a page with details, relative to the documentation's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<String>,
    /// Places of use: for a missing or unknown directive up to [`PLACES_MAX`], otherwise only the first.
    pub places: Vec<SourceLine>,
}

/// A file, and a line in it counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLine {
    /// Name under which the file was read.
    pub file: String,
    /// Line.
    pub line: u32,
}

impl SourceLine {
    pub(crate) fn of(span: Span, sources: &Sources) -> Option<SourceLine> {
        let source = sources.get(span.source)?;
        Some(SourceLine { file: source.name(), line: source.position(span.start).line })
    }
}

/// An error of the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// Message in nginx's words.
    pub message: String,
    /// Suggested fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Place in the configuration, if there is one.
    pub place: Option<SourceLine>,
}

/// Severity of an unsafe setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A client can read, reach or send something that it must not.
    High,
    /// The risk depends on the application behind the server.
    Medium,
    /// The directive probably does not do what was intended.
    Low,
}

/// An unsafe setting.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// Severity.
    pub severity: Severity,
    /// Description of the problem.
    pub message: String,
    /// Safe alternative.
    pub advice: &'static str,
    /// Place in the configuration.
    pub place: SourceLine,
}
