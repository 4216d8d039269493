//! `match NAME { … }`: conditions on the response to a health check.
//!   status [!] CODE | CODE-CODE ...;
//!   header [!] NAME;  header NAME = | != | ~ | !~ VALUE;
//!   body ~ | !~ EXPRESSION;
//!   require $VARIABLE ...;
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html#match>)

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use bstr::{BStr, BString};
use gale_base::units;
use gale_config::{Diagnostic, Span, Statement, Word};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::request::response::Field;
use gale_http::variables::regex::Regex;
use gale_http::variables::template::Template;
use gale_http_upstream::client::Answer;

use super::Conf;
use crate::shared::check_row;
use crate::shared::limits::invalid_parameter;

/// Maximum length of a body that is tested, in bytes, as in nginx.
const BODY_MAX: usize = 256 * 1024;

pub(super) struct Match {
    name: BString,
    span: Span,
    tests: Vec<Test>,
}

enum Test {
    Status { codes: Vec<RangeInclusive<u16>>, is_negated: bool },
    HasHeader { name: BString, is_negated: bool },
    Header { name: BString, value: Text, is_negated: bool },
    Body { expression: Regex, is_negated: bool },
    Require(Vec<Template>),
}

/// Text that a value is compared with.
enum Text {
    Same(BString),
    Expression(Regex),
}

/// The test that a response failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mismatch {
    Status(u16),
    Header(BString),
    Body,
    Variable,
}

impl Mismatch {
    /// Returns the action for messages.
    pub fn action(&self) -> &'static str {
        match self {
            Mismatch::Status(_) => "checking status code",
            Mismatch::Header(_) => "checking header",
            Mismatch::Body => "checking body",
            Mismatch::Variable => "checking required variables",
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Status(status) => write!(f, "unexpected status {status}")?,
            Mismatch::Header(name) => write!(f, "unexpected header \"{name}\"")?,
            Mismatch::Body => f.write_str("unexpected body")?,
            Mismatch::Variable => f.write_str("a variable is empty or \"0\"")?,
        }
        write!(f, " while {}", self.action())
    }
}

/// Parses `match NAME { … }`.
pub(super) fn match_block(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let name = &statement.args[0];
    if let Some(first) = conf.matches.iter().find(|known| known.name == name.text) {
        let error = Diagnostic::emerg(format!("duplicate match \"{}\"", name.text)).at(name.span);
        return Err(error.related("first defined", first.span));
    }
    let tests = statement.body().iter().map(|row| test(builder, row)).collect::<Result<_, _>>()?;
    conf.matches.push(Arc::new(Match { name: name.text.clone(), span: name.span, tests }));
    Ok(())
}

fn test(builder: &mut Builder, row: &Statement) -> Result<Test, Diagnostic> {
    check_row(row)?;
    let wrong_count = || row.error(format!("invalid number of arguments in \"{}\" directive", row.name.text));
    match (&**row.name.text, row.args.as_slice()) {
        (b"status" | b"header" | b"body" | b"require", []) => Err(wrong_count()),
        (b"status", [not, codes @ ..]) if not.text == "!" && !codes.is_empty() => status(codes, true),
        (b"status", codes) => status(codes, false),
        (b"header", [name]) => Ok(Test::HasHeader { name: name.text.clone(), is_negated: false }),
        (b"header", [not, name]) if not.text == "!" => {
            Ok(Test::HasHeader { name: name.text.clone(), is_negated: true })
        }
        (b"header", [name, operator, value]) => {
            let name = name.text.clone();
            let (value, is_negated) = match &**operator.text {
                b"=" => (Text::Same(value.text.clone()), false),
                b"!=" => (Text::Same(value.text.clone()), true),
                _ => {
                    let (expression, is_negated) = expression(operator, value)?;
                    (Text::Expression(expression), is_negated)
                }
            };
            Ok(Test::Header { name, value, is_negated })
        }
        (b"body", [operator, value]) => {
            let (expression, is_negated) = expression(operator, value)?;
            Ok(Test::Body { expression, is_negated })
        }
        (b"header" | b"body", _) => Err(wrong_count()),
        (b"require", variables) => {
            let variables = variables.iter().map(|word| {
                if !word.text.starts_with(b"$") {
                    let message = format!("invalid variable name \"{}\"", word.text);
                    return Err(Diagnostic::emerg(message).at(word.span));
                }
                builder.http_mut().template(word)
            });
            Ok(Test::Require(variables.collect::<Result<_, _>>()?))
        }
        (name, _) => Err(Diagnostic::emerg(format!("unknown directive \"{}\"", BStr::new(name))).at(row.name.span)),
    }
}

fn status(words: &[Word], is_negated: bool) -> Result<Test, Diagnostic> {
    let codes = words.iter().map(|word| {
        let code = |text: &[u8]| match units::parse_number(text) {
            Some(code @ 100..=999) => Some(code as u16),
            _ => None,
        };
        let range = match word.text.iter().position(|&byte| byte == b'-') {
            Some(dash) => code(&word.text[..dash]).zip(code(&word.text[dash + 1..])),
            None => code(&word.text).map(|code| (code, code)),
        };
        let range = range.filter(|(first, last)| first <= last);
        range
            .map(|(first, last)| first..=last)
            .ok_or_else(|| Diagnostic::emerg(format!("invalid status \"{}\"", word.text)).at(word.span))
    });
    Ok(Test::Status { codes: codes.collect::<Result<_, _>>()?, is_negated })
}

/// Parses an expression behind `~`, `!~`, `~*` or `!~*`; also returns `true` if it is negated.
fn expression(operator: &Word, value: &Word) -> Result<(Regex, bool), Diagnostic> {
    let (is_negated, is_caseless) = match &**operator.text {
        b"~" => (false, false),
        b"~*" => (false, true),
        b"!~" => (true, false),
        b"!~*" => (true, true),
        _ => return Err(invalid_parameter(operator)),
    };
    let expression = Regex::compile(&value.text, is_caseless);
    Ok((expression.map_err(|error| Diagnostic::emerg(error).at(value.span))?, is_negated))
}

impl Match {
    pub fn find(matches: &[Arc<Match>], name: &Word) -> Result<Arc<Match>, Diagnostic> {
        let found = matches.iter().find(|known| known.name == name.text);
        let unknown = || Diagnostic::emerg(format!("unknown match \"{}\"", name.text)).at(name.span);
        found.cloned().ok_or_else(unknown)
    }

    pub fn name(&self) -> &BStr {
        self.name.as_ref()
    }

    /// Returns the number of bytes of a body that are tested.
    pub fn body_max(&self) -> usize {
        let looks_at_body = self.tests.iter().any(|test| matches!(test, Test::Body { .. }));
        if looks_at_body { BODY_MAX } else { 0 }
    }

    /// Checks that a response passes all tests; `request` provides its variables.
    pub fn check(&self, answer: &Answer, request: &Request) -> Result<(), Mismatch> {
        self.tests.iter().try_for_each(|test| test.check(answer, request))
    }
}

/// Checks a response without a `match`: only its status.
pub(super) fn check_status(answer: &Answer) -> Result<(), Mismatch> {
    match answer.head.status {
        200..=399 => Ok(()),
        status => Err(Mismatch::Status(status)),
    }
}

impl Test {
    fn check(&self, answer: &Answer, request: &Request) -> Result<(), Mismatch> {
        let (passes, mismatch) = match self {
            Test::Status { codes, is_negated } => {
                let status = answer.head.status;
                (codes.iter().any(|codes| codes.contains(&status)) != *is_negated, Mismatch::Status(status))
            }
            Test::HasHeader { name, is_negated } => {
                (fields(answer, name).next().is_some() != *is_negated, Mismatch::Header(name.clone()))
            }
            // The field must exist, even for a negated test.
            Test::Header { name, value, is_negated } => {
                let passes = fields(answer, name).any(|field| value.fits(&field.value) == Some(!is_negated));
                (passes, Mismatch::Header(name.clone()))
            }
            Test::Body { expression, is_negated } => {
                (expression.is_match(&answer.body).ok() == Some(!is_negated), Mismatch::Body)
            }
            Test::Require(variables) => {
                let is_true = |text: &Template| !matches!(&*text.text(request), b"" | b"0");
                (variables.iter().all(is_true), Mismatch::Variable)
            }
        };
        if passes { Ok(()) } else { Err(mismatch) }
    }
}

/// Returns the fields with this name.
fn fields<'a>(answer: &'a Answer, name: &'a BString) -> impl Iterator<Item = &'a Field> {
    answer.head.fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name))
}

impl Text {
    /// Returns `true` if a value matches, or `None` if an expression takes too many steps.
    fn fits(&self, value: &[u8]) -> Option<bool> {
        match self {
            Text::Same(text) => Some(text == value),
            Text::Expression(expression) => expression.is_match(value).ok(),
        }
    }
}
