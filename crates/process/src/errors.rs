//! Messages of the process layer: levels, the log interface, and reports of failed builds.
//!
//! Time and process numbers are added by the log module. The texts are nginx's.

use std::fmt;
use std::io::{self, Write};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Diagnostic, Severity, Sources};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Logged at the end of a successful reload; nginx logs only its beginning.
pub(super) const IN_FORCE: &str = "the new configuration is in force";
/// Logged at the end of a failed reload, after its errors.
pub(super) const OLD_STAYS: &str = "the old configuration stays in force";

/// Maximum text of a report that is sent over a link, in bytes of JSON, so that with its framing it fits one packet.
const REPORT_BYTES_MAX: usize = 32 * 1024;
/// Maximum number of messages in such a report: each has framing of its own.
const REPORT_ENTRIES_MAX: usize = 256;

/// Destination of process messages. Implemented by the log module, which drops messages below the configured level.
pub trait ErrorLog: Send + Sync {
    /// Writes one message, given without time, level and process number. Never blocks for long, because the caller has
    /// other work. When this returns, an `emerg` message is written, unless the file blocks.
    fn write(&self, level: Level, message: &str);
}

/// `gale: [emerg] message` on standard error: the log before there is a configuration.
pub struct StderrLog {
    /// Name at the beginning of each line.
    pub program: String,
    /// Less severe messages are dropped.
    pub level: Level,
}

impl ErrorLog for StderrLog {
    fn write(&self, level: Level, message: &str) {
        if level <= self.level {
            say(&format!("{}: [{}] {message}\n", self.program, level.name()));
        }
    }
}

/// Keeps messages until a thread that writes them may be started, which is only after the change of user.
#[derive(Default)]
pub(super) struct KeptLog {
    messages: Mutex<Vec<(Level, String)>>,
}

impl KeptLog {
    /// Writes the kept messages to `log`, in order.
    pub fn pass_on(&self, log: &dyn ErrorLog) {
        for (level, message) in self.messages.lock().drain(..) {
            log.write(level, &message);
        }
    }
}

impl ErrorLog for KeptLog {
    fn write(&self, level: Level, message: &str) {
        self.messages.lock().push((level, message.to_owned()));
    }
}

/// Failure to send a signal or an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalError {
    /// nginx's level for it.
    pub level: Level,
    /// nginx's text.
    pub message: String,
}

impl fmt::Display for SignalError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "[{}] {}", self.level.name(), self.message)
    }
}

/// Errors and warnings of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Messages in the order in which they were found.
    pub entries: Vec<ReportEntry>,
}

/// One message of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportEntry {
    /// Severity.
    pub level: Level,
    /// nginx's text with its place: `unknown directive "lissten" in /etc/gale/gale.conf:12`.
    pub message: String,
    /// Source line, caret and hint for the terminal; may be empty. Not written to logs.
    pub detail: String,
}

impl Report {
    /// Returns a report of one message.
    pub fn new(level: Level, message: impl Into<String>) -> Report {
        let mut report = Report::default();
        report.push(level, message);
        report
    }

    /// Adds a message.
    pub fn push(&mut self, level: Level, message: impl Into<String>) {
        self.entries.push(ReportEntry { level, message: message.into(), detail: String::new() });
    }

    /// Adds a diagnostic of the configuration language, with its source line for the terminal.
    pub fn push_diagnostic(&mut self, diagnostic: &Diagnostic, sources: &Sources) {
        let level = match diagnostic.severity {
            Severity::Emerg => Level::Emerg,
            Severity::Warn => Level::Warn,
            Severity::Notice => Level::Notice,
        };
        // The rendered text begins with the line that is in `message`; the rest is for people.
        let rendered = diagnostic.render(sources, "");
        let detail = rendered.split_once('\n').map_or("", |(_, rest)| rest);
        self.entries.push(ReportEntry { level, message: diagnostic.line(sources), detail: detail.to_owned() });
    }

    /// True if there are no messages.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the report for the terminal, with a newline after every line.
    pub fn render(&self, program: &str) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            text.push_str(&format!("{program}: [{}] {}\n", entry.level.name(), entry.message));
            if !entry.detail.is_empty() {
                text.push_str(entry.detail.trim_end_matches('\n'));
                text.push('\n');
            }
        }
        text
    }

    /// Writes every message to `log`.
    pub fn log_to(&self, log: &dyn ErrorLog) {
        for entry in &self.entries {
            log.write(entry.level, &entry.message);
        }
    }

    /// Truncates the report to the size of one packet of a link, with a message that says so.
    pub(super) fn bounded(mut self) -> Report {
        let mut left = REPORT_BYTES_MAX;
        for (index, entry) in self.entries.iter_mut().enumerate() {
            let whole = cut(&mut entry.message, &mut left) & cut(&mut entry.detail, &mut left);
            if !whole || index + 1 == REPORT_ENTRIES_MAX {
                self.entries.truncate(index + 1);
                self.push(Level::Emerg, "the report is too long, the rest is omitted");
                break;
            }
        }
        self
    }
}

/// Writes to standard error. Unlike `eprint!` this does not panic when the terminal is gone.
pub(super) fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Returns the text that nginx appends to messages about failed system calls, with a space before it: ` (98: Address
/// already in use)`.
pub fn errno_text(error: &io::Error) -> String {
    format!(" {}", OsErrorText(error))
}

/// Truncates a text to the bytes of JSON left in `left`; returns `true` if all of it fits.
fn cut(text: &mut String, left: &mut usize) -> bool {
    for (at, character) in text.char_indices() {
        let length = encoded_length(character);
        if length > *left {
            text.truncate(at);
            *left = 0;
            return false;
        }
        *left -= length;
    }
    true
}

/// Bytes of a character in a string of JSON. <https://www.rfc-editor.org/rfc/rfc8259#section-7>
fn encoded_length(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => "\\u0000".len(),
        _ => character.len_utf8(),
    }
}

/// Failure to open a resource: nginx's text, without the place in the configuration, which the caller knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceError {
    message: String,
}

impl ResourceError {
    /// Returns an error with this message.
    pub fn new(message: impl Into<String>) -> ResourceError {
        ResourceError { message: message.into() }
    }
}

impl fmt::Display for ResourceError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for ResourceError {}

impl From<ResourceError> for Diagnostic {
    /// Returns a diagnostic without a place: `Diagnostic::at` adds it.
    fn from(error: ResourceError) -> Diagnostic {
        Diagnostic::emerg(error.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_number_is_worded_as_nginx_does() {
        assert_eq!(errno_text(&io::Error::from_raw_os_error(98)), " (98: Address already in use)");
    }

    #[test]
    fn a_long_report_is_cut_and_says_so() {
        let mut report = Report::new(Level::Emerg, "é".repeat(REPORT_BYTES_MAX));
        report.push(Level::Emerg, "second");
        let bounded = report.bounded();
        assert!(bounded.entries[0].message.len() <= REPORT_BYTES_MAX);
        assert!(bounded.entries[1].message.contains("the rest is omitted"));
    }

    #[test]
    fn report_is_cut_by_its_length_in_json() {
        let texts = ["\0", "\"", "\\", "\n", "\u{1b}", "é", "x"];
        for text in texts {
            let entry = |_| ReportEntry {
                level: Level::Emerg,
                message: text.repeat(REPORT_BYTES_MAX),
                detail: text.repeat(REPORT_BYTES_MAX),
            };
            let report = Report { entries: (0..1000).map(entry).collect() }.bounded();
            let json = serde_json::to_vec(&report).expect("it can be written");
            assert!(json.len() < 2 * REPORT_BYTES_MAX, "{text:?}: {}", json.len());
            assert!(json.len() > REPORT_BYTES_MAX - 16, "{text:?}: {}", json.len());
        }
        let report = Report {
            entries: vec![ReportEntry { detail: "x".into(), ..Report::new(Level::Warn, "y").entries[0].clone() }; 1000],
        };
        assert_eq!(report.bounded().entries.len(), REPORT_ENTRIES_MAX + 1);
    }

    #[test]
    fn a_diagnostic_is_one_line_for_the_log_and_its_source_for_the_terminal() {
        let mut sources = Sources::new();
        let source = sources.add_file("/a.conf".as_ref(), b"lissten 80;\n".to_vec());
        let span = gale_config::Span { source, start: 0, end: 7 };
        let mut report = Report::default();
        report.push_diagnostic(&Diagnostic::emerg("unknown directive").at(span).hint("listen"), &sources);
        assert_eq!(report.entries[0].message, "unknown directive in /a.conf:1");
        assert!(report.entries[0].detail.contains("^^^^^^^"));
        assert!(!report.entries[0].detail.contains("unknown directive"));
    }

    #[test]
    fn details_follow_their_message_on_the_terminal_only() {
        let mut report = Report::new(Level::Emerg, "bad in a.conf:1");
        report.entries[0].detail = "    bad;\n    ^^^".into();
        assert_eq!(report.render("gale"), "gale: [emerg] bad in a.conf:1\n    bad;\n    ^^^\n");
    }
}
