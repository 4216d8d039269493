//! What there is to say of a configuration.

use gale_config::{Sources, Span};
use serde::Serialize;

/// The most places that are told of one thing.
pub const PLACES_MAX: usize = 20;

/// What is said of a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// How many files were read.
    pub files: usize,
    /// How many statements there are whose meaning is known.
    pub statements: usize,
    /// Why Gale would refuse the configuration, apart from directives that are not there.
    pub problems: Vec<Problem>,
    /// Each directive that occurs, by what becomes of it and by name.
    pub directives: Vec<Directive>,
    /// What is unsafe, of each check the first [`PLACES_MAX`].
    pub findings: Vec<Finding>,
}

impl Report {
    /// Whether Gale would take the configuration, as far as its text tells.
    pub fn is_accepted(&self) -> bool {
        let is_there = |directive: &Directive| !matches!(directive.verdict, Verdict::Missing | Verdict::Unknown);
        self.problems.is_empty() && self.directives.iter().all(is_there)
    }
}

/// What becomes of a directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// nginx, its commercial edition or a module that it documents has it, Gale does not have it.
    Missing,
    /// Neither has it: it is another module's, or mistyped.
    Unknown,
    /// It is accepted, and means something else in some way.
    Different,
    /// It is accepted with a warning and does nothing.
    NoEffect,
    /// Gale's own.
    Own,
    /// It means the same.
    Same,
}

/// A directive as it occurs in a configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Directive {
    /// Its name.
    pub name: String,
    /// What becomes of it.
    pub verdict: Verdict,
    /// How often it occurs.
    pub count: usize,
    /// What differs, what may have been meant, or who has what is missing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Where to read on, in the documentation's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<String>,
    /// Where it occurs: all places of one that is not there, else the first; [`PLACES_MAX`] at most.
    pub places: Vec<SourceLine>,
}

/// A file and a line in it, from 1 on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLine {
    /// The file's name as it was read.
    pub file: String,
    /// The line.
    pub line: u32,
}

impl SourceLine {
    pub(crate) fn of(span: Span, sources: &Sources) -> Option<SourceLine> {
        sources.knows(span).then(|| {
            let source = sources.get(span.source);
            SourceLine { file: source.name(), line: source.position(span.start).line }
        })
    }
}

/// An error of the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct Problem {
    /// nginx's words.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Where it is.
    pub place: Option<SourceLine>,
}

/// How bad something unsafe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Somebody can read, reach or send what he should not.
    High,
    /// It depends on what stands behind.
    Medium,
    /// It probably does not do what was meant.
    Low,
}

/// Something unsafe.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// The name of the check.
    pub check: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What is unsafe.
    pub message: String,
    /// What to write instead.
    pub advice: &'static str,
    /// Where it is.
    pub place: SourceLine,
}
