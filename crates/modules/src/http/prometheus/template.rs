//! Templates: user-defined metric families, made from the figures of the API; for sites that come from Angie, which has
//! this directive, and whose dashboards and alerts expect their own names.
//!
//! ```text
//!   prometheus_template site {
//!       'requests{zone="$1"}'  $p8s_value  path=~^/http/server_zones/([^/]+)/requests$  type=counter  help=Requests;
//!   }    │         │              │              │
//!        │         │              │              └ the figures, by their paths in the API
//!        │         │              └ the sample's value: a variable, for example a map of $p8s_value
//!        │         └ label values with variables, also the captures of the expression
//!        └ the family
//! ```
//!
//! A thread of the pool searches the figures, since there may be a million of them. The samples are written on the
//! loop, because their variables need the request, in pieces with the budget of bulk work.
//!
//! Invariant: scrapers can parse the output. Names are checked with the configuration, label values are escaped and
//! bounded, and a value that is not a number is left out.

use std::collections::HashSet;
use std::future::poll_fn;

use bstr::{BStr, ByteSlice};
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::regex::Regex;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template as Text;
use gale_http::request::Request;
use gale_runtime::{Effort, charge_units, poll_units};
use serde_json::Value;

use super::text::label;
use crate::http::api::{ROOTS, View, read_root};
use crate::shared::check_row;

/// Types of families that Prometheus knows.
const TYPES: &[&str] = &["counter", "gauge", "histogram", "summary", "untyped"];

/// Effort per sample: matching its regular expression again, its labels, its value.
const EFFORT: Effort = Effort { usual_nanos: 1_000, worst_nanos: 20_000 };

/// Number of samples that are written at once.
const SAMPLES_AT_ONCE: usize = 16;

pub(super) struct Template {
    name: Box<[u8]>,
    metrics: Vec<Metric>,
    families: Vec<Family>,
}

/// Contiguous samples with one header.
struct Family {
    name: Box<str>,
    kind: Option<&'static str>,
    help: Option<Box<str>>,
}

/// A row of a template.
struct Metric {
    family: usize,
    labels: Vec<(Box<str>, Text<Request>)>,
    value: Text<Request>,
    figures: Which,
}

/// Figures that a row makes samples of.
enum Which {
    /// None: there is one sample.
    Once,
    /// The figure at this path.
    At(Box<str>),
    /// Figures whose paths match. All of these paths begin with `prefix`.
    Matching { regex: Regex, prefix: Box<str> },
}

impl Which {
    /// Returns `true` if a figure below `root` may be among them.
    fn reaches(&self, root: &str) -> bool {
        let prefix = match self {
            Which::Once => return false,
            Which::At(path) => path,
            Which::Matching { prefix, .. } => prefix,
        };
        prefix.starts_with(root) || root.starts_with(&**prefix)
    }
}

/// A figure that a row makes a sample of.
pub(super) struct Found {
    metric: usize,
    path: String,
    value: String,
}

/// Value of the figure whose sample is being written.
pub(super) struct CurrentValue(String);

impl CurrentValue {
    /// Appends `$p8s_value`.
    pub fn append(request: &Request, out: &mut Vec<u8>) -> bool {
        let value = request.notes.get::<CurrentValue>();
        value.iter().for_each(|value| out.extend_from_slice(value.0.as_bytes()));
        value.is_some()
    }
}

impl Template {
    /// Parses `prometheus_template NAME { … }`. Errors in rows are added to the builder's notes.
    pub fn read(builder: &mut Builder, statement: &Statement) -> Template {
        let mut template =
            Template { name: (**statement.args[0].text).into(), metrics: Vec::new(), families: Vec::new() };
        let mut errors = Vec::new();
        for row in statement.body() {
            errors.extend(template.add(builder, row).err());
        }
        builder.note(errors);
        template
    }

    fn add(&mut self, builder: &mut Builder, row: &Statement) -> Result<(), Diagnostic> {
        check_row(row)?;
        let [value, parameters @ ..] = row.args.as_slice() else {
            return Err(row.error("invalid number of metric parameters"));
        };
        let (name, labels) = parse_name(&row.name)?;
        let labels = labels.into_iter().map(|(label, text)| {
            let word = Word { text: text.into(), ..row.name.clone() };
            Ok((label, builder.variables::<Request>().template(&word)?))
        });
        let labels = labels.collect::<Result<Vec<_>, Diagnostic>>()?;
        if !is_variable(&value.text) {
            return Err(Diagnostic::emerg(format!("metric value \"{}\" isn't a variable", value.text)).at(value.span));
        }
        let value = builder.variables::<Request>().template(value)?;
        let (mut figures, mut kind, mut help) = (Which::Once, None, None);
        for word in parameters {
            let wrong = |what: &str| Diagnostic::emerg(what).at(word.span);
            match word.text.split_once_str("=") {
                Some((b"path" | b"type" | b"help", b"")) => {
                    return Err(Diagnostic::emerg(format!("empty metric parameter \"{}\"", word.text)).at(word.span));
                }
                Some((b"path", b"~")) => return Err(wrong("empty regex in metric matching path")),
                Some((b"path", path)) => figures = which(builder, word, path)?,
                Some((b"type", wanted)) => {
                    let known = TYPES.iter().find(|known| known.as_bytes() == wanted);
                    let hint = "the types are counter, gauge, histogram, summary and untyped";
                    kind = Some(*known.ok_or_else(|| wrong("invalid metric type").hint(hint))?);
                }
                Some((b"help", text)) => help = Some(escape_help(text)),
                _ => return Err(Diagnostic::emerg(format!("invalid metric parameter \"{}\"", word.text)).at(word.span)),
            }
        }
        // Rows of one family are grouped wherever they are written; the first row that sets its type or help counts.
        let family = self.families.iter().position(|known| *known.name == *name).unwrap_or_else(|| {
            self.families.push(Family { name, kind: None, help: None });
            self.families.len() - 1
        });
        let said = &mut self.families[family];
        said.kind = said.kind.or(kind);
        said.help = said.help.take().or(help);
        self.metrics.push(Metric { family, labels, value, figures });
        Ok(())
    }

    /// Searches all figures for those that rows make samples of; runs in a thread. A figure belongs to the first row
    /// that matches. The error is that of an expression that took too many steps.
    pub fn gather(&self, view: &View) -> Result<Vec<Found>, String> {
        let mut walk = Walk { template: self, rows: Vec::new(), found: Vec::new(), error: None };
        for (metric, row) in self.metrics.iter().enumerate() {
            if let Which::Once = row.figures {
                walk.found.push(Found { metric, path: String::new(), value: String::new() });
            }
        }
        for root in ROOTS {
            let mut path = format!("/{}", root.join("/"));
            let rows = self.metrics.iter().enumerate().filter(|(_, row)| row.figures.reaches(&path));
            walk.rows = rows.map(|(metric, _)| metric).collect();
            if let (false, Some(value)) = (walk.rows.is_empty(), read_root(view, root)) {
                walk.look(&value, &mut path);
            }
        }
        if let Some(error) = walk.error {
            return Err(error);
        }
        let mut found = walk.found;
        found.sort_by_key(|found| (self.metrics[found.metric].family, found.metric));
        Ok(found)
    }

    pub async fn write(&self, request: &mut Request, found: Vec<Found>) -> String {
        let mut text = format!("# Prometheus template \"{}\"\n", label(&self.name));
        let mut family = None;
        for (place, found) in found.into_iter().enumerate() {
            if place % SAMPLES_AT_ONCE == 0 {
                poll_fn(|context| poll_units(context, EFFORT, SAMPLES_AT_ONCE)).await;
                charge_units(EFFORT, SAMPLES_AT_ONCE);
            }
            let metric = &self.metrics[found.metric];
            let begins = family != Some(metric.family);
            if metric.write(request, found, &self.families[metric.family], begins, &mut text) {
                family = Some(metric.family);
            }
        }
        request.notes.take::<CurrentValue>();
        request.forget_match();
        text
    }
}

impl Metric {
    /// Writes a sample, after the header of its family if it is the first. Returns `false` if the value is not a
    /// number.
    fn write(&self, request: &mut Request, found: Found, family: &Family, begins: bool, out: &mut String) -> bool {
        match &self.figures {
            Which::Once => {
                request.notes.take::<CurrentValue>();
                request.forget_match();
            }
            Which::At(_) => {
                request.notes.put(CurrentValue(found.value));
                request.forget_match();
            }
            Which::Matching { regex, .. } => {
                request.notes.put(CurrentValue(found.value));
                // The expression has matched before.
                if let Ok(Some(matched)) = regex.find(found.path.as_bytes()) {
                    request.take_match(matched, found.path.as_bytes());
                }
            }
        }
        let value = self.value.evaluate(request);
        let Some(value) = std::str::from_utf8(&value).ok().filter(|text| is_number(text)) else { return false };
        let name = &family.name;
        if begins {
            family.help.iter().for_each(|help| out.push_str(&format!("# HELP {name} {help}\n")));
            family.kind.iter().for_each(|kind| out.push_str(&format!("# TYPE {name} {kind}\n")));
        }
        out.push_str(name);
        for (place, (key, text)) in self.labels.iter().enumerate() {
            out.push_str(if place == 0 { "{" } else { "," });
            out.push_str(&format!("{key}=\"{}\"", label(&text.evaluate(request))));
        }
        out.push_str(if self.labels.is_empty() { " " } else { "} " });
        out.push_str(value);
        out.push('\n');
        true
    }
}

/// Returns `true` if scrapers can parse a value: a number that is too large would make them reject the whole scrape.
fn is_number(text: &str) -> bool {
    let is_special = || ["+inf", "-inf", "inf", "nan"].iter().any(|special| text.eq_ignore_ascii_case(special));
    text.parse().is_ok_and(|number: f64| number.is_finite() || is_special())
}

struct Walk<'t> {
    template: &'t Template,
    /// Rows that may match the current object.
    rows: Vec<usize>,
    found: Vec<Found>,
    error: Option<String>,
}

impl Walk<'_> {
    /// Visits a value and its members. An object or list counts as the number of its members, at its path with a slash
    /// at the end.
    fn look(&mut self, value: &Value, path: &mut String) {
        // An expression that takes too many steps on one path may do so on all others.
        if self.error.is_some() {
            return;
        }
        let length = path.len();
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    path.push('/');
                    path.push_str(name);
                    self.look(member, path);
                    path.truncate(length);
                }
                self.note(format!("{path}/"), || members.len().to_string());
            }
            Value::Array(members) => {
                let mut taken = HashSet::new();
                for (index, member) in members.iter().enumerate() {
                    let name = member_name(index, member);
                    // Two members with one name, such as the same server twice in a group, get different suffixes.
                    let name = if taken.contains(&name) { format!("{name}#{index}") } else { name };
                    path.push('/');
                    path.push_str(&name);
                    taken.insert(name);
                    self.look(member, path);
                    path.truncate(length);
                }
                self.note(format!("{path}/"), || members.len().to_string());
            }
            Value::Null => {}
            Value::Bool(value) => self.note(path.clone(), || u8::from(*value).to_string()),
            Value::Number(value) => self.note(path.clone(), || value.to_string()),
            Value::String(value) => self.note(path.clone(), || value.clone()),
        }
    }

    fn note(&mut self, path: String, value: impl FnOnce() -> String) {
        for &metric in &self.rows {
            let is_match = match &self.template.metrics[metric].figures {
                Which::Once => Ok(false),
                Which::At(wanted) => Ok(**wanted == *path),
                Which::Matching { regex, .. } => regex.is_match(path.as_bytes()),
            };
            match is_match {
                Ok(true) => return self.found.push(Found { metric, path, value: value() }),
                Ok(false) => {}
                Err(error) => self.error = Some(error),
            }
        }
    }
}

/// Returns the name of a list's member in a path: its distinguishing field, or its number.
fn member_name(index: usize, member: &Value) -> String {
    let named = ["server", "device", "address", "name", "id", "worker"].iter().find_map(|key| member.get(key));
    match named {
        Some(Value::String(name)) => name.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => index.to_string(),
    }
}

/// Parses `path=PATH` and `path=~REGEX`.
fn which(builder: &mut Builder, word: &Word, path: &[u8]) -> Result<Which, Diagnostic> {
    let Some(expression) = path.strip_prefix(b"~") else {
        return Ok(Which::At(path.to_str_lossy().into()));
    };
    let regex = builder.variables::<Request>().regex(word, expression, false)?;
    let prefix = prefix_of(regex.pattern());
    Ok(Which::Matching { regex, prefix })
}

/// Returns a prefix of all texts that an expression matches.
fn prefix_of(pattern: &str) -> Box<str> {
    let Some(rest) = pattern.strip_prefix('^').filter(|rest| !rest.contains('|')) else { return "".into() };
    let end = rest.find(|letter| ".*+?()[]{}|\\^$".contains(letter)).unwrap_or(rest.len());
    let mut prefix = &rest[..end];
    if rest[end..].starts_with(['*', '?', '{']) {
        // The last letter is optional.
        prefix = prefix.char_indices().next_back().map_or("", |(last, _)| &prefix[..last]);
    }
    prefix.into()
}

fn is_variable(text: &[u8]) -> bool {
    let Some(name) = text.strip_prefix(b"$") else { return false };
    let name = name.strip_prefix(b"{").and_then(|name| name.strip_suffix(b"}")).unwrap_or(name);
    !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

/// The name of a family, and its labels: each with the name and the text of its value.
type NameAndLabels = (Box<str>, Vec<(Box<str>, Vec<u8>)>);

/// Parses `NAME` or `NAME{LABEL="VALUE",…}`.
fn parse_name(word: &Word) -> Result<NameAndLabels, Diagnostic> {
    let (name, labels) = word.text.split_once_str("{").map_or((&**word.text, None), |(name, rest)| (name, Some(rest)));
    let invalid = |what: &str| Diagnostic::emerg(format!("invalid {what} \"{}\"", word.text)).at(word.span);
    if name.contains(&b'$') {
        let message = format!("invalid metric name: \"{}\" - only labels can contain variables", BStr::new(name));
        return Err(Diagnostic::emerg(message).at(word.span));
    }
    let name = identifier(name, b"_:").ok_or_else(|| invalid("metric name"))?;
    let Some(labels) = labels else { return Ok((name, Vec::new())) };
    let hint = "labels are written {zone=\"$1\",kind=\"http\"}; only their values can contain variables";
    let labels = parse_labels(labels).ok_or_else(|| invalid("metric labels").hint(hint))?;
    Ok((name, labels))
}

fn identifier(text: &[u8], besides_letters: &[u8]) -> Option<Box<str>> {
    let is_letter = |byte: &u8| byte.is_ascii_alphabetic() || besides_letters.contains(byte);
    let (first, rest) = text.split_first()?;
    let is_valid = is_letter(first) && rest.iter().all(|byte| is_letter(byte) || byte.is_ascii_digit());
    is_valid.then(|| String::from_utf8_lossy(text).into())
}

/// Parses the text between the braces around labels.
fn parse_labels(text: &[u8]) -> Option<Vec<(Box<str>, Vec<u8>)>> {
    let mut rest = text.trim_ascii();
    let mut labels: Vec<(Box<str>, Vec<u8>)> = Vec::new();
    while rest != b"}" {
        let (name, value) = rest.split_once_str("=")?;
        let name = identifier(name.trim_ascii(), b"_")?;
        if labels.iter().any(|(known, _)| *known == name) {
            return None;
        }
        let (value, behind) = unquote(value.trim_ascii_start().strip_prefix(b"\"")?)?;
        labels.push((name, value));
        let behind = behind.trim_ascii_start();
        rest = match behind.strip_prefix(b",") {
            Some(behind) => behind.trim_ascii_start(),
            None if behind == b"}" => behind,
            None => return None,
        };
    }
    Some(labels)
}

/// Returns a value up to its closing quotation mark, and the rest of the text.
fn unquote(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let (mut value, mut rest) = (Vec::new(), text);
    loop {
        let (byte, behind) = match rest {
            [b'"', behind @ ..] => return Some((value, behind)),
            [b'\\', b'n', behind @ ..] => (b'\n', behind),
            [b'\\', byte @ (b'\\' | b'"'), behind @ ..] => (*byte, behind),
            [byte, behind @ ..] => (*byte, behind),
            [] => return None,
        };
        value.push(byte);
        rest = behind;
    }
}

/// Escapes a help text for its line.
fn escape_help(text: &[u8]) -> Box<str> {
    text.to_str_lossy().replace('\\', "\\\\").replace('\n', "\\n").into()
}

/// Logs the reason why there are no samples.
pub(super) fn report(request: &Request, error: &str) {
    request.log(Level::Alert, format_args!("{error} while collecting metrics for Prometheus"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_parsed_as_they_are_written() {
        let labels = |text: &str| -> Option<Vec<(String, String)>> {
            let labels = parse_labels(text.as_bytes())?.into_iter();
            Some(labels.map(|(name, value)| (name.into(), String::from_utf8(value).unwrap())).collect())
        };
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(labels("}"), Some(vec![]));
        assert_eq!(labels("zone=\"$1\"}"), Some(vec![pair("zone", "$1")]));
        assert_eq!(labels(" a = \"x,}\\\"\\\\\\n\" , b=\"\", }"), Some(vec![pair("a", "x,}\"\\\n"), pair("b", "")]));
        for wrong in [
            "",
            "a",
            "a=}",
            "a=\"x}",
            "a=\"x\"",
            "a=\"x\" b=\"y\"}",
            "1=\"x\"}",
            "a:b=\"x\"}",
            "a=\"\",a=\"\"}",
            "$a=\"x\"}",
            "a=\"x\"}}",
            "a=\"x\"} 5",
            ",}",
            "=\"\"}",
        ] {
            assert_eq!(labels(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_roots_that_an_expression_can_match_are_looked_through() {
        for (pattern, prefix) in [
            ("^/http/server_zones/([^/]+)/requests$", "/http/server_zones/"),
            ("^/http/caches?/x", "/http/cache"),
            ("^/(http|stream)/", ""),
            ("^/http/(a|b)", ""),
            ("http", ""),
            ("^/x$", "/x"),
            ("^", ""),
            ("^*", ""),
            ("(?i)^/HTTP", ""),
            ("^/a\\.b", "/a"),
        ] {
            assert_eq!(&*prefix_of(pattern), prefix, "{pattern}");
        }
    }
}
