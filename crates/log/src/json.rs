//! `error_log … json`: a JSON object in each line. (RFC 8259)
//!
//! ```text
//! {"time":"2026-11-24T02:47:35.123+00:00","level":"error","pid":12,"tid":13,"connection":5,"message":"…","errno":2,
//!   "client":"192.0.2.1","server":"example.org","request":"GET / HTTP/1.1","host":"example.org"}
//! ```
//!
//! Each line is valid whatever a client has sent: invalid UTF-8 appears as U+FFFD, and control characters are escaped.
//! A line is at most as long as one in the text form. A value that does not fit is truncated, and the line says so
//! (`"truncated":true`).

use std::fmt::{self, Write as _};

use super::about::{About, Fields};
use super::line_time::local_time;
use super::now;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;

/// Longest end of a line; room for it is reserved.
const END: &str = ",\"truncated\":true}\n";

/// Parentheses that are examined for an error number; a client may send any number of them.
const ERRNO_CANDIDATES_MAX: usize = 8;

/// A line that is being written.
pub struct JsonLine {
    out: String,
    /// Longest length before its end.
    bytes_max: usize,
    is_cut: bool,
}

/// A whole line, at most `bytes_max` long.
pub(super) fn error_line(
    level: Level,
    connection: Option<u64>,
    message: &dyn fmt::Display,
    about: &dyn About,
    bytes_max: usize,
) -> String {
    let mut line =
        JsonLine { out: String::with_capacity(512), bytes_max: bytes_max.saturating_sub(END.len()), is_cut: false };
    let (seconds, milliseconds) = now();
    let thread = rustix::thread::gettid().as_raw_nonzero();
    let time = local_time(seconds).iso8601_with(milliseconds);
    // Writing to a string cannot fail.
    let (level, process) = (level.name(), std::process::id());
    let _ = write!(line.out, r#"{{"time":"{time}","level":"{level}","pid":{process},"tid":{thread}"#);
    if let Some(connection) = connection {
        line.add_number("connection", connection);
    }
    let message = message.to_string();
    // Three quarters for the message, the rest for its subject.
    let room = line.bytes_max.saturating_sub(line.out.len()) / 4 * 3;
    line.add_text("message", &message, room);
    if let Some(number) = errno_in(&message) {
        line.add_number("errno", number.into());
    }
    about.append_fields(&mut line);
    line.finish()
}

impl JsonLine {
    fn finish(mut self) -> String {
        self.out.push_str(if self.is_cut { END } else { "}\n" });
        self.out
    }

    /// Begins a field with a value of this length; `false` if there is no room.
    fn begin(&mut self, name: &str, bytes: usize) -> bool {
        let has_room = self.out.len() + name.len() + bytes + r#","":"#.len() <= self.bytes_max;
        if has_room {
            let _ = write!(self.out, r#","{name}":"#);
        } else {
            self.is_cut = true;
        }
        has_room
    }

    fn add_number(&mut self, name: &str, value: u64) {
        let digits = value.checked_ilog10().unwrap_or(0) as usize + 1;
        if self.begin(name, digits) {
            let _ = write!(self.out, "{value}");
        }
    }

    /// `room` excludes the quotes.
    fn add_text(&mut self, name: &str, value: &dyn fmt::Display, room: usize) {
        if self.begin(name, 2) {
            self.out.push('"');
            let bytes_max = (self.out.len() + room).min(self.bytes_max - 1);
            let mut escaped = Escaped { out: &mut self.out, bytes_max, is_cut: false };
            let _ = write!(escaped, "{value}");
            self.is_cut |= escaped.is_cut;
            self.out.push('"');
        }
    }
}

impl Fields for JsonLine {
    fn text(&mut self, _: &'static str, name: &'static str, value: &dyn fmt::Display, _: &'static str) -> fmt::Result {
        // Half of the remaining room, so that a long request leaves room for later fields.
        let room = self.bytes_max.saturating_sub(self.out.len()) / 2;
        self.add_text(name, value, room);
        Ok(())
    }

    fn number(&mut self, _: &'static str, name: &'static str, value: u64) -> fmt::Result {
        self.add_number(name, value);
        Ok(())
    }
}

/// Appends the contents of a JSON string.
struct Escaped<'l> {
    out: &'l mut String,
    bytes_max: usize,
    /// `true` once something did not fit; nothing more is appended.
    is_cut: bool,
}

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            if self.is_cut {
                break;
            }
            self.push(character);
        }
        Ok(())
    }
}

impl Escaped<'_> {
    fn push(&mut self, character: char) {
        let before = self.out.len();
        match character {
            '"' => self.out.push_str("\\\""),
            '\\' => self.out.push_str("\\\\"),
            '\n' => self.out.push_str("\\n"),
            '\r' => self.out.push_str("\\r"),
            '\t' => self.out.push_str("\\t"),
            // Control characters, and the two that some readers take for line ends.
            other if other.is_control() || matches!(other, '\u{2028}' | '\u{2029}') => {
                let _ = write!(self.out, "\\u{:04x}", u32::from(other));
            }
            other => self.out.push(other),
        }
        if self.out.len() > self.bytes_max {
            self.out.truncate(before);
            self.is_cut = true;
        }
    }
}

/// Number of the system error in a message: the last one that occurs with its words, `(2: No such file or directory)`.
fn errno_in(message: &str) -> Option<u32> {
    message.rmatch_indices('(').take(ERRNO_CANDIDATES_MAX).find_map(|(start, _)| {
        let (digits, _) = message[start + 1..].split_once(": ")?;
        let number: u16 = digits.parse().ok().filter(|&number| number > 0)?;
        let told = OsErrorText(&std::io::Error::from_raw_os_error(number.into())).to_string();
        message[start..].starts_with(&told).then_some(number.into())
    })
}

#[cfg(test)]
mod tests {
    use super::super::about::Describe;
    use super::super::{ERROR_LINE_MAX, Level};
    use super::*;
    use bstr::BStr;

    struct Client<'c>(&'c [u8]);

    impl Describe for Client<'_> {
        fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
            fields.text(", client: ", "client", &"192.0.2.1", "")?;
            fields.text(", request: \"", "request", &BStr::new(self.0), "\"")?;
            fields.number(", bytes: ", "bytes", 7)?;
            fields.text(", host: \"", "host", &"h", "\"")
        }
    }

    fn line(message: &str, request: &[u8]) -> String {
        let line = error_line(Level::Error, Some(5), &message, &Client(request), ERROR_LINE_MAX);
        assert!(line.len() <= ERROR_LINE_MAX && line.ends_with("}\n") && line.matches('\n').count() == 1, "{line}");
        line
    }

    #[test]
    fn a_line_is_an_object_with_the_parts_of_the_text_form() {
        let line = line("open() \"/x\" failed (2: No such file or directory)", b"GET /x HTTP/1.1");
        assert!(line.starts_with(r#"{"time":""#) && line.contains(r#"","level":"error","pid":"#), "{line}");
        let end = r#","connection":5,"message":"open() \"/x\" failed (2: No such file or directory)","errno":2,"#;
        assert!(line.contains(end), "{line}");
        assert!(
            line.ends_with("\"client\":\"192.0.2.1\",\"request\":\"GET /x HTTP/1.1\",\"bytes\":7,\"host\":\"h\"}\n")
        );
        let none = error_line(Level::Info, None, &"x", &(), ERROR_LINE_MAX);
        assert!(none.ends_with("\"message\":\"x\"}\n") && !none.contains("connection"), "{none}");
    }

    #[test]
    fn hostile_bytes_are_escaped() {
        let line = line("a\"b\\c\nd\re\tf\u{1b}[g\u{85}h\u{2028}\0", b"\xff\xfe \x7f");
        assert!(line.contains(r#""message":"a\"b\\c\nd\re\tf\u001b[g\u0085h\u2028\u0000""#), "{line}");
        assert!(line.contains("\"request\":\"\u{fffd}\u{fffd} \\u007f\""), "{line}");
    }

    #[test]
    fn a_long_line_is_cut_and_still_an_object() {
        for long in ["x".repeat(10_000), "\0".repeat(10_000), "\u{e9}\u{1f600}".repeat(5000), "\\\"".repeat(9999)] {
            let whole = line("short", long.as_bytes());
            assert!(whole.ends_with(",\"bytes\":7,\"host\":\"h\",\"truncated\":true}\n"), "{whole}");
            let whole = line(&long, long.as_bytes());
            assert!(whole.ends_with(",\"bytes\":7,\"host\":\"h\",\"truncated\":true}\n"), "{whole}");
        }
        // Even with hardly any room.
        for bytes_max in 0..400 {
            let line = error_line(Level::Error, Some(u64::MAX), &"message", &Client(b"GET"), bytes_max);
            assert!(line.ends_with("}\n") && line.matches('"').count().is_multiple_of(2), "{line}");
            assert!(line.len() <= bytes_max.max(160), "{line}");
        }
    }

    #[test]
    fn the_number_of_an_error_is_that_of_its_words() {
        assert_eq!(errno_in("recv() failed (104: Connection reset by peer) while reading"), Some(104));
        assert_eq!(errno_in("open() \"(13: Permission denied)\" failed (2: No such file or directory)"), Some(2));
        assert_eq!(errno_in("open() \"x\" failed (2: made up)"), None);
        assert_eq!(errno_in("no error (at all) (0: Success) (-1: x) (99999: y"), None);
        assert_eq!(errno_in(&"(1: ".repeat(10_000)), None);
    }
}
