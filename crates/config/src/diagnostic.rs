//! Configuration errors and warnings: message, place in the text, and a hint for the fix.
//!
//! The first line is byte for byte nginx's; the lines below it are additions:
//!
//! ```text
//! gale: [emerg] unknown directive "lissten" in /etc/gale/gale.conf:12
//!         lissten 80;
//!         ^^^^^^^
//! hint: did you mean "listen"?
//! ```
//!
//! Invariant: rendering never fails and its output is bounded, whatever bytes the source holds. Control characters are
//! replaced, and only the part of a long line around the span is shown.

use crate::source::{Source, Sources, Span};
use bstr::ByteSlice;
use std::fmt;

/// Maximum number of errors kept for one configuration.
pub const ERRORS_MAX: usize = 20;

/// Maximum number of characters shown of a source line.
const EXCERPT_MAX: usize = 120;

/// Severity of a diagnostic: the subset of nginx's log levels that configuration checks use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Information.
    Notice,
    /// The configuration is accepted, but probably does not do what was intended.
    Warn,
    /// The configuration is refused.
    Emerg,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Notice => "notice",
            Severity::Warn => "warn",
            Severity::Emerg => "emerg",
        })
    }
}

/// One error, warning or notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Severity.
    pub severity: Severity,
    /// Message in nginx's words, without ` in FILE:LINE`.
    pub message: String,
    /// Place in the configuration, if there is one.
    pub span: Option<Span>,
    /// A second place that explains the first.
    pub related: Option<Related>,
    /// Suggested fix, or the expected form.
    pub hint: Option<String>,
}

/// A second place, rendered as `note: TEXT in FILE:LINE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Related {
    /// Description of the place: `first set`, `the block opened`.
    pub text: String,
    /// Place in the configuration.
    pub span: Span,
}

impl Diagnostic {
    /// Creates an error that refuses the configuration.
    pub fn emerg(message: impl Into<String>) -> Self {
        Self::new(Severity::Emerg, message)
    }

    /// Creates a warning.
    pub fn warn(message: impl Into<String>) -> Self {
        Self::new(Severity::Warn, message)
    }

    /// Creates a notice.
    pub fn notice(message: impl Into<String>) -> Self {
        Self::new(Severity::Notice, message)
    }

    /// Adds the place.
    pub fn at(mut self, span: Span) -> Self {
        self.span = Some(span);
        self
    }

    /// Sets the place, if there is one: a default value has none.
    pub fn at_opt(mut self, span: Option<Span>) -> Self {
        self.span = span;
        self
    }

    /// Adds a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds a second place.
    pub fn related(mut self, text: impl Into<String>, span: Span) -> Self {
        self.related = Some(Related { text: text.into(), span });
        self
    }

    /// Returns the first line without `PROGRAM: [SEVERITY] `, as nginx writes it to an error log.
    pub fn line(&self, sources: &Sources) -> String {
        let message = printable(&self.message);
        match self.span.and_then(|span| sources.place(span)) {
            Some(place) => format!("{message} in {}", printable(&place)),
            None => message,
        }
    }

    /// Renders all lines, each ending with a newline: nginx's line, the source line, carets under the span, note and
    /// hint.
    pub fn render(&self, sources: &Sources, program: &str) -> String {
        let mut out = format!("{program}: [{}] {}\n", self.severity, self.line(sources));
        if let Some(span) = self.span
            && let Some(source) = sources.get(span.source)
        {
            out.push_str(&excerpt(source, span));
        }
        if let Some(related) = &self.related
            && let Some(place) = sources.place(related.span)
        {
            out.push_str(&format!("note: {} in {}\n", printable(&related.text), printable(&place)));
        }
        if let Some(hint) = &self.hint {
            out.push_str(&format!("hint: {}\n", printable(hint)));
        }
        out
    }

    fn new(severity: Severity, message: impl Into<String>) -> Self {
        Diagnostic { severity, message: message.into(), span: None, related: None, hint: None }
    }
}

/// A receiver of diagnostics: the engine's builder, or [`Diagnostics`].
pub trait Reporter {
    /// Reports one diagnostic.
    fn report(&mut self, diagnostic: Diagnostic);
}

/// Diagnostics in the order of reporting: at most [`ERRORS_MAX`] errors and as many milder ones, without duplicates.
#[derive(Clone, Debug, Default)]
pub struct Diagnostics {
    kept: Vec<Diagnostic>,
    errors: usize,
    milder: usize,
}

impl Diagnostics {
    /// Creates an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if the configuration must be refused.
    pub fn has_errors(&self) -> bool {
        self.errors > 0
    }

    /// Returns `true` if nothing was reported.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Iterates over the kept diagnostics in the order of reporting.
    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.kept.iter()
    }

    /// Returns the first error, the one at which nginx would have stopped.
    pub fn first_error(&self) -> Option<&Diagnostic> {
        self.kept.iter().find(|diagnostic| diagnostic.severity == Severity::Emerg)
    }

    /// Renders all kept diagnostics, and the number of further errors.
    pub fn render(&self, sources: &Sources, program: &str) -> String {
        let mut out: String = self.kept.iter().map(|diagnostic| diagnostic.render(sources, program)).collect();
        let more = self.errors.saturating_sub(ERRORS_MAX);
        if more > 0 {
            out.push_str(&format!("{program}: {more} more errors are not shown\n"));
        }
        out
    }
}

impl Reporter for Diagnostics {
    fn report(&mut self, diagnostic: Diagnostic) {
        if self.kept.contains(&diagnostic) {
            return;
        }
        let count = if diagnostic.severity == Severity::Emerg { &mut self.errors } else { &mut self.milder };
        *count += 1;
        if *count <= ERRORS_MAX {
            self.kept.push(diagnostic);
        }
    }
}

impl<'d> IntoIterator for &'d Diagnostics {
    type Item = &'d Diagnostic;
    type IntoIter = std::slice::Iter<'d, Diagnostic>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Escapes control characters, so that a message stays on one line and cannot disturb a terminal.
fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Renders the source line of the span's first byte and the line with carets, or nothing if the source line is blank.
fn excerpt(source: &Source, span: Span) -> String {
    const INDENT: &str = "    ";
    let (line, line_start) = source.line_around(span.start);
    if line.trim().is_empty() {
        return String::new();
    }
    let from = (span.start as usize).saturating_sub(line_start).min(line.len());
    let to = (span.end as usize).saturating_sub(line_start).clamp(from, line.len());

    let before = shown(&line[..from]);
    let marked = shown(&line[from..to]);
    let after = shown(&line[to..]);
    // The text before the span tells the reader where it is, so the text after it is cut first.
    let before_shown = tail(&before, EXCERPT_MAX / 2);
    let marked_shown = &marked[..marked.len().min(EXCERPT_MAX / 2)];
    let room = EXCERPT_MAX - before_shown.len() - marked_shown.len();
    let after_shown = if marked_shown.len() < marked.len() { &[] } else { &after[..after.len().min(room)] };

    let is_cut = |whole: &[char], part: &[char]| if part.len() < whole.len() { "…" } else { "" };
    let left = is_cut(&before, before_shown);
    let right = if marked_shown.len() < marked.len() { "…" } else { is_cut(&after, after_shown) };
    let text: String = [before_shown, marked_shown, after_shown].concat().into_iter().collect();
    // Tabs stay tabs, so that the carets line up whatever the width of a tab.
    let padding: String = before_shown.iter().map(|&c| if c == '\t' { '\t' } else { ' ' }).collect();
    let padding = format!("{}{padding}", if left.is_empty() { "" } else { " " });
    let carets = "^".repeat(marked_shown.len().max(1));
    format!("{INDENT}{left}{}{right}\n{INDENT}{padding}{carets}\n", text.trim_end())
}

/// The characters of a piece of a line, one per column. Invalid UTF-8 and control characters become `�`.
fn shown(bytes: &[u8]) -> Vec<char> {
    bytes.chars().map(|c| if c.is_control() && c != '\t' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn tail(chars: &[char], count: usize) -> &[char] {
    &chars[chars.len().saturating_sub(count)..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    fn rendered(text: &[u8], start: u32, end: u32) -> String {
        let mut sources = Sources::new();
        let source = sources.add_file(Path::new("/etc/gale/gale.conf"), text.to_vec());
        Diagnostic::emerg("wrong").at(Span { source, start, end }).render(&sources, "gale")
    }

    #[test]
    fn an_error_shows_its_line_and_carets() {
        let mut sources = Sources::new();
        let text = b"server {\n    lissten 80;\n}\n";
        let source = sources.add_file(Path::new("/etc/gale/gale.conf"), text.to_vec());
        let span = Span { source, start: 13, end: 20 };
        let error = Diagnostic::emerg("unknown directive \"lissten\"").at(span).hint("did you mean \"listen\"?");
        assert_eq!(
            error.render(&sources, "gale"),
            "gale: [emerg] unknown directive \"lissten\" in /etc/gale/gale.conf:2\n\
             \x20       lissten 80;\n\
             \x20       ^^^^^^^\n\
             hint: did you mean \"listen\"?\n"
        );
    }

    #[test]
    fn tabs_stay_under_tabs() {
        assert_eq!(
            rendered(b"\tlisten\t80x;\n", 8, 11),
            "gale: [emerg] wrong in /etc/gale/gale.conf:1\n    \tlisten\t80x;\n    \t      \t^^^\n"
        );
    }

    #[test]
    fn characters_of_several_bytes_count_once() {
        let text = "root /häuser/x;";
        let start = text.find('x').unwrap() as u32;
        assert_eq!(
            rendered(text.as_bytes(), start, start + 1),
            "gale: [emerg] wrong in /etc/gale/gale.conf:1\n    root /häuser/x;\n                 ^\n"
        );
        assert!(
            rendered(b"root \xff\xfe\x1b[0m;", 5, 7).contains("\n    root \u{fffd}\u{fffd}\u{fffd}[0m;\n         ^^\n")
        );
    }

    #[test]
    fn a_span_over_several_lines_is_marked_in_its_first() {
        assert_eq!(
            rendered(b"a 'one\r\ntwo';\r\n", 2, 12),
            "gale: [emerg] wrong in /etc/gale/gale.conf:1\n    a 'one\n      ^^^^\n"
        );
    }

    #[test]
    fn the_end_of_a_file_has_a_caret_or_no_excerpt() {
        assert_eq!(rendered(b"a", 1, 1), "gale: [emerg] wrong in /etc/gale/gale.conf:1\n    a\n     ^\n");
        assert_eq!(rendered(b"a\n", 2, 2), "gale: [emerg] wrong in /etc/gale/gale.conf:2\n");
        assert_eq!(rendered(b"", 0, 0), "gale: [emerg] wrong in /etc/gale/gale.conf:1\n");
    }

    #[test]
    fn of_a_long_line_the_part_round_the_span_is_shown() {
        let mut text = vec![b'a'; 1_000];
        text.extend(b" HERE ");
        text.extend(vec![b'b'; 100_000]);
        let out = rendered(&text, 1_001, 1_005);
        let lines: Vec<_> = out.lines().collect();
        assert!(lines[1].starts_with("    …aaa") && lines[1].ends_with("bbb…"), "{}", lines[1]);
        assert_eq!(lines[1].chars().skip_while(|&c| c != 'H').take(4).collect::<String>(), "HERE");
        let here = lines[1].chars().position(|c| c == 'H');
        assert_eq!(lines[2].chars().position(|c| c == '^'), here);
        assert!(out.len() < 500);
    }

    #[test]
    fn a_note_names_the_second_place() {
        let mut sources = Sources::new();
        let source = sources.add_file(Path::new("a.conf"), b"a;\na;\n".to_vec());
        let (first, second) = (Span { source, start: 0, end: 1 }, Span { source, start: 3, end: 4 });
        let error = Diagnostic::emerg("\"a\" directive is duplicate").at(second).related("first set", first);
        assert!(error.render(&sources, "gale").ends_with("    a;\n    ^\nnote: first set in a.conf:1\n"));
    }

    #[test]
    fn a_message_stays_on_one_line() {
        let text = Diagnostic::warn("unknown directive \"a\nb\x1b\"").render(&Sources::new(), "gale");
        assert_eq!(text, "gale: [warn] unknown directive \"a\\nb\\u{1b}\"\n");
    }

    #[test]
    fn a_collection_keeps_twenty_errors_and_none_twice() {
        let mut all = Diagnostics::new();
        for number in 0..25 {
            all.report(Diagnostic::emerg(format!("error {number}")));
            all.report(Diagnostic::emerg("error 0"));
        }
        all.report(Diagnostic::warn("careful"));
        assert_eq!(all.iter().count(), ERRORS_MAX + 1);
        assert_eq!(all.first_error().unwrap().message, "error 0");
        assert!(all.render(&Sources::new(), "gale").ends_with("gale: 5 more errors are not shown\n"));
    }

    proptest! {
        #[test]
        fn any_bytes_and_spans_render(
            text in proptest::collection::vec(any::<u8>(), 0..300),
            start in 0..320u32,
            length in 0..320u32,
        ) {
            let out = rendered(&text, start, start + length);
            prop_assert!(out.starts_with("gale: [emerg] wrong in /etc/gale/gale.conf:"));
            prop_assert!(out.lines().count() <= 3);
        }
    }
}
