//! `proxy_redirect`: replaces URLs of the server in `Location` and `Refresh` by URLs of this one.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_redirect>)

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_engine::variables::subject::Subject;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::variables::regex::Regex;
use gale_http::variables::template::Template;

use super::Conf;
use super::target::{Pass, Written};

#[derive(Clone, Default)]
pub(super) struct Redirects(Option<Said>);

#[derive(Clone)]
enum Said {
    Off,
    Rules(Vec<Rule>),
}

/// A replacement of a text.
#[derive(Clone)]
pub(super) enum Rule {
    /// The default: the URL of `proxy_pass` is replaced by that of the location.
    Default,
    /// A prefix and its replacement.
    Prefix(Template, Template),
    /// An expression, and the replacement of the whole text.
    Regex(Regex, Template),
}

/// Parses `proxy_redirect`.
pub(super) fn proxy_redirect(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let said = &mut conf.redirects.0;
    if matches!(said, Some(Said::Off)) {
        return Err(statement.directive_error("is duplicate"));
    }
    let rule = match &statement.args[..] {
        [word] if &**word.text == b"off" => {
            if said.is_some() {
                return Err(statement.directive_error("is duplicate"));
            }
            *said = Some(Said::Off);
            return Ok(());
        }
        [word] if &**word.text == b"default" => {
            let message = match &conf.pass {
                Some(pass) if pass.written().is_some() => None,
                Some(_) => {
                    Some("\"proxy_redirect default\" cannot be used with \"proxy_pass\" directive with variables")
                }
                None => Some("\"proxy_redirect default\" should be placed after the \"proxy_pass\" directive"),
            };
            if let Some(message) = message {
                return Err(Diagnostic::emerg(message).at(word.span));
            }
            Rule::Default
        }
        [word] => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
        [from, to, ..] => rule(builder, from, to)?,
        [] => unreachable!("an argument at least"),
    };
    match said {
        Some(Said::Rules(rules)) => rules.push(rule),
        _ => *said = Some(Said::Rules(vec![rule])),
    }
    Ok(())
}

/// Parses a prefix, or an expression behind a tilde, and the replacement.
pub(super) fn rule(builder: &mut Builder, from: &Word, to: &Word) -> Result<Rule, Diagnostic> {
    let http = builder.http_mut();
    Ok(match from.text.strip_prefix(b"~") {
        Some(expression) => {
            let (expression, is_caseless) = match expression.strip_prefix(b"*") {
                Some(expression) => (expression, true),
                None => (expression, false),
            };
            let regex = http.regex(from, expression, is_caseless)?;
            Rule::Regex(regex, http.template(to)?)
        }
        None => Rule::Prefix(http.template(from)?, http.template(to)?),
    })
}

impl Redirects {
    pub fn inherit(&mut self, parent: &Redirects) {
        if self.0.is_none() {
            self.0.clone_from(&parent.0);
        }
    }

    /// Returns the replaced text, or `None` if the rule does not apply.
    pub fn apply(&self, request: &Request, value: &[u8], pass: Option<&Pass>) -> Option<Vec<u8>> {
        match &self.0 {
            Some(Said::Off) => None,
            None => apply_default(value, pass),
            Some(Said::Rules(rules)) => rules.iter().find_map(|rule| match rule {
                Rule::Default => apply_default(value, pass),
                Rule::Prefix(from, to) => replace_prefix(request, from, to, value),
                Rule::Regex(regex, to) => replace(request, regex, to, value),
            }),
        }
    }
}

/// Replaces the URL of `proxy_pass` at the beginning by the location.
fn apply_default(value: &[u8], pass: Option<&Pass>) -> Option<Vec<u8>> {
    let Written { url, location, has_uri } = pass?.written()?;
    let (rest, replacement) = if has_uri {
        (value.strip_prefix(url)?, location.unwrap_or_default())
    } else {
        (value.strip_prefix(url)?.strip_prefix(b"/")?, &b"/"[..])
    };
    Some([replacement, rest].concat())
}

/// Returns the text with its prefix replaced.
pub(super) fn replace_prefix(request: &Request, from: &Template, to: &Template, text: &[u8]) -> Option<Vec<u8>> {
    let rest = text.strip_prefix(&*from.text(request))?;
    let mut replaced = to.evaluate(request);
    replaced.extend_from_slice(rest);
    Some(replaced)
}

/// Returns the replacement of a text that an expression matches.
pub(super) fn replace(request: &Request, regex: &Regex, to: &Template, text: &[u8]) -> Option<Vec<u8>> {
    match regex.find(text) {
        Ok(Some(matched)) => {
            request.take_match(matched, text);
            Some(to.evaluate(request))
        }
        Ok(None) => None,
        Err(error) => {
            request.log(Level::Alert, format_args!("{error} on \"{}\"", text.as_bstr()));
            None
        }
    }
}
