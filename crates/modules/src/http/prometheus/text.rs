//! Text formats for scrapers: Prometheus' format 0.0.4, and OpenMetrics 1.0 for those that ask for it.
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>,
//! <https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md>)
//!
//! Invariant: a label's value is escaped and bounded, whatever the configuration contains.

use std::fmt::{Display, Write};
use std::time::Duration;

use gale_base::crc32;
use gale_base::histogram::Snapshot;
use gale_worker::traffic::Times;

/// Maximum length of a label's value, in bytes. A longer one is truncated and gets a checksum, which keeps it unique.
const LABEL_BYTES_MAX: usize = 256;

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus' own, 0.0.4.
    Prometheus,
    /// OpenMetrics, 1.0.0.
    OpenMetrics,
}

impl Format {
    /// Returns the format that these values of `Accept` prefer; Prometheus' own if both have the same quality, or none.
    pub fn wanted<'v>(values: impl Iterator<Item = &'v [u8]>) -> Format {
        let (mut open, mut plain) = (0, 0);
        for range in values.flat_map(|value| value.split(|&byte| byte == b',')) {
            let mut parts = range.split(|&byte| byte == b';').map(<[u8]>::trim_ascii);
            let media_type = parts.next().unwrap_or_default().to_ascii_lowercase();
            let parameters: Vec<&[u8]> = parts.collect();
            let quality = parameters.iter().find_map(|parameter| parameter.strip_prefix(b"q="));
            let quality = quality.map_or(1000, thousandths);
            let is_other_version = parameters.iter().any(|parameter| {
                parameter.strip_prefix(b"version=").is_some_and(|version| version.trim_ascii() != b"1.0.0")
            });
            match &*media_type {
                b"application/openmetrics-text" if !is_other_version => open = quality.max(open),
                b"text/plain" | b"text/*" | b"*/*" => plain = quality.max(plain),
                _ => {}
            }
        }
        if open > plain { Format::OpenMetrics } else { Format::Prometheus }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Parses a quality from 0 to 1000; returns 0 if it is invalid.
fn thousandths(text: &[u8]) -> u32 {
    let text = std::str::from_utf8(text).ok().and_then(|text| text.parse::<f32>().ok());
    text.filter(|quality| (0.0..=1.0).contains(quality)).map_or(0, |quality| (quality * 1000.0) as u32)
}

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Monotonic; its samples end in `_total`.
    Counter,
    /// A current value.
    Gauge,
    /// Counts in buckets.
    Histogram,
}

/// Output of one family.
pub(super) struct Out {
    pub text: String,
    format: Format,
    name: &'static str,
    kind: Kind,
}

impl Out {
    pub fn new(format: Format) -> Out {
        Out { text: String::new(), format, name: "", kind: Kind::Gauge }
    }

    /// Begins this family. `name` has no `_total`.
    pub fn begin(&mut self, name: &'static str, kind: Kind, help: &str) {
        (self.name, self.kind) = (name, kind);
        let suffix = if kind == Kind::Counter && self.format == Format::Prometheus { "_total" } else { "" };
        let word = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.put(format_args!("# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {word}\n"));
    }

    /// Continues this family, whose header was written before.
    pub fn go_on(&mut self, name: &'static str, kind: Kind) {
        (self.name, self.kind) = (name, kind);
    }

    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        let suffix = if self.kind == Kind::Counter { "_total" } else { "" };
        self.line(suffix, labels, None, value);
    }

    /// Writes a histogram of the request or session times of a zone or peer.
    pub fn times(&mut self, labels: &[(&str, &str)], times: Times<'_>) {
        self.histogram(labels, times.cumulative(), times.sum());
    }

    /// Writes a histogram of Gale's own times.
    pub fn own_times(&mut self, labels: &[(&str, &str)], times: &Snapshot) {
        self.histogram(labels, times.cumulative(), times.sum());
    }

    fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        cumulative: impl Iterator<Item = (Option<Duration>, u64)>,
        sum: Duration,
    ) {
        let mut count = 0;
        for (bound, not_above) in cumulative {
            let bound = bound.map_or("+Inf".to_owned(), |bound| seconds(bound).to_string());
            self.line("_bucket", labels, Some(("le", &bound)), not_above);
            count = not_above;
        }
        self.line("_sum", labels, None, seconds(sum));
        self.line("_count", labels, None, count);
    }

    /// Ends the output.
    pub fn end(&mut self) {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
    }

    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], last: Option<(&str, &str)>, value: impl Display) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let mut begin = '{';
        for (name, label) in labels.iter().copied().chain(last) {
            self.text.push(begin);
            begin = ',';
            self.text.push_str(name);
            self.text.push_str("=\"");
            self.text.push_str(label);
            self.text.push('"');
        }
        let end = if begin == '{' { "" } else { "}" };
        self.put(format_args!("{end} {value}\n"));
    }

    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        self.text.write_fmt(text).expect("a string takes everything");
    }
}

/// Returns seconds, the base unit of times.
pub(super) fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// Returns a name as a label's value: invalid UTF-8 replaced, special characters escaped, and long names truncated.
pub(super) fn label(name: &[u8]) -> Box<str> {
    let text = String::from_utf8_lossy(name);
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if escaped.len() >= LABEL_BYTES_MAX {
            let _ = write!(escaped, "~{:08x}", crc32::crc32(name));
            break;
        }
        match letter {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            letter => escaped.push(letter),
        }
    }
    escaped.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_the_one_that_is_wanted_more() {
        let wanted = |text: &'static str| Format::wanted([text.as_bytes()].into_iter());
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;\
            q=0.4,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for text in
            [prometheus, "application/openmetrics-text", "Application/OpenMetrics-Text; version=1.0.0, */*;q=0.1"]
        {
            assert_eq!(wanted(text), Format::OpenMetrics, "{text}");
        }
        for text in [
            "",
            "*/*",
            "text/plain",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=x",
            "application/openmetrics-text;q=nan",
            "application/openmetrics-text;version=0.0.1",
            "application/openmetrics-text;q=0.3,text/plain;q=0.5",
            ";;;=,q=",
        ] {
            assert_eq!(wanted(text), Format::Prometheus, "{text}");
        }
    }

    #[test]
    fn labels_are_escaped_and_bounded() {
        assert_eq!(&*label(b"a\"\\\n\xff\tb"), "a\\\"\\\\\\n\u{fffd}\tb");
        let (long, other) = (label(&[b'"'; 10_000]), label(&[b'"'; 10_001]));
        assert!(long.len() < LABEL_BYTES_MAX + 12 && long != other, "{long}");
        assert!(!long.trim_end_matches(|letter: char| letter == '~' || letter.is_ascii_hexdigit()).is_empty());
    }

    #[test]
    fn samples_are_lines_of_their_family() {
        for (format, expected) in [
            (
                Format::Prometheus,
                "# HELP a_requests_total Requests.\n# TYPE a_requests_total counter\n\
                 a_requests_total{zone=\"z\",code=\"2xx\"} 5\n\
                 # HELP b Now.\n# TYPE b gauge\nb 1.5\n",
            ),
            (
                Format::OpenMetrics,
                "# HELP a_requests Requests.\n# TYPE a_requests counter\na_requests_total{zone=\"z\",code=\"2xx\"} 5\n\
                 # HELP b Now.\n# TYPE b gauge\nb 1.5\n# EOF\n",
            ),
        ] {
            let mut out = Out::new(format);
            out.begin("a_requests", Kind::Counter, "Requests.");
            out.sample(&[("zone", "z"), ("code", "2xx")], 5);
            out.begin("b", Kind::Gauge, "Now.");
            out.sample(&[], 1.5);
            out.end();
            assert_eq!(out.text, expected);
        }
    }
}
