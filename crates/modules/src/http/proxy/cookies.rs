//! `proxy_cookie_domain`, `proxy_cookie_path` and `proxy_cookie_flags`: changes of the cookies that a server sets.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_cookie_domain>)

use bstr::ByteSlice;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::Builder;
use gale_http::configuration::builder::InHttp;
use gale_http::request::Request;
use gale_http::variables::regex::Regex;
use gale_http::variables::template::Template;

use super::Conf;
use super::redirect::{Rule, replace, replace_prefix, rule};

/// Rules for an attribute of cookies.
#[derive(Clone, Default)]
pub(super) struct Rewrites(Option<Vec<Rule>>);

/// Rules for the flags of cookies.
#[derive(Clone, Default)]
pub(super) struct CookieFlags(Option<Vec<FlagRule>>);

#[derive(Clone)]
struct FlagRule {
    cookie: Name,
    flags: Vec<FlagChange>,
}

/// Cookies that a rule applies to.
#[derive(Clone)]
enum Name {
    Exact(Template),
    Matching(Regex),
}

#[derive(Clone)]
enum FlagChange {
    Fixed(Flag),
    /// A name with variables.
    Evaluated(Template),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flag {
    Secure(bool),
    HttpOnly(bool),
    /// `None` removes the attribute.
    SameSite(Option<SameSite>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SameSite {
    Strict,
    Lax,
    None,
}

pub(super) fn cookie_domain(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    add(&mut conf.cookie_domains, builder, statement, |builder, from, to| {
        // As in nginx, the dot before a domain is ignored.
        let without_dot = |word: &Word| {
            let mut word = word.clone();
            if word.text.starts_with(b".") {
                word.text.remove(0);
            }
            word
        };
        match from.text.strip_prefix(b"~") {
            Some(expression) => {
                let http = builder.http_mut();
                let regex = http.regex(from, expression, true)?;
                Ok(Rule::Regex(regex, http.template(&without_dot(to))?))
            }
            None => rule(builder, &without_dot(from), &without_dot(to)),
        }
    })
}

pub(super) fn cookie_path(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    add(&mut conf.cookie_paths, builder, statement, rule)
}

fn add(
    rewrites: &mut Rewrites,
    builder: &mut Builder,
    statement: &Statement,
    make: fn(&mut Builder, &Word, &Word) -> Result<Rule, Diagnostic>,
) -> Result<(), Diagnostic> {
    if matches!(&rewrites.0, Some(rules) if rules.is_empty()) {
        return Err(statement.directive_error("is duplicate"));
    }
    match &statement.args[..] {
        [word] if &**word.text == b"off" => {
            if rewrites.0.is_some() {
                return Err(statement.directive_error("is duplicate"));
            }
            rewrites.0 = Some(Vec::new());
        }
        [word] => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
        [from, to, ..] => {
            let rule = make(builder, from, to)?;
            rewrites.0.get_or_insert_default().push(rule);
        }
        [] => unreachable!("an argument at least"),
    }
    Ok(())
}

pub(super) fn cookie_flags(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let rules = &mut conf.cookie_flags.0;
    if matches!(rules, Some(rules) if rules.is_empty()) {
        return Err(statement.directive_error("is duplicate"));
    }
    let (cookie, flags) = statement.args.split_first().expect("an argument at least");
    if flags.is_empty() {
        if &**cookie.text != b"off" {
            return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", cookie.text)).at(cookie.span));
        }
        if rules.is_some() {
            return Err(statement.directive_error("is duplicate"));
        }
        *rules = Some(Vec::new());
        return Ok(());
    }
    let http = builder.http_mut();
    let name = match cookie.text.strip_prefix(b"~") {
        Some(expression) => Name::Matching(http.regex(cookie, expression, true)?),
        None => Name::Exact(http.template(cookie)?),
    };
    let mut changes = Vec::with_capacity(flags.len());
    for word in flags {
        if word.text.contains(&b'$') {
            changes.push(FlagChange::Evaluated(builder.http_mut().template(word)?));
        } else if let Some(flag) = Flag::parse(&word.text) {
            changes.push(FlagChange::Fixed(flag));
        } else {
            // nginx reports this at the first cookie.
            let message = format!("unknown cookie flag \"{}\" is ignored", word.text);
            builder.note([Diagnostic::warn(message).at(word.span)]);
        }
    }
    rules.get_or_insert_default().push(FlagRule { cookie: name, flags: changes });
    Ok(())
}

impl Flag {
    fn parse(text: &[u8]) -> Option<Flag> {
        Some(match &*text.to_ascii_lowercase() {
            b"secure" => Flag::Secure(true),
            b"nosecure" => Flag::Secure(false),
            b"httponly" => Flag::HttpOnly(true),
            b"nohttponly" => Flag::HttpOnly(false),
            b"samesite=strict" => Flag::SameSite(Some(SameSite::Strict)),
            b"samesite=lax" => Flag::SameSite(Some(SameSite::Lax)),
            b"samesite=none" => Flag::SameSite(Some(SameSite::None)),
            b"nosamesite" => Flag::SameSite(None),
            _ => return None,
        })
    }
}

impl Rewrites {
    pub fn inherit(&mut self, parent: &Rewrites) {
        if self.0.is_none() {
            self.0.clone_from(&parent.0);
        }
    }

    fn rules(&self) -> &[Rule] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl CookieFlags {
    pub fn inherit(&mut self, parent: &CookieFlags) {
        if self.0.is_none() {
            self.0.clone_from(&parent.0);
        }
    }
}

/// An attribute of a cookie: `Path=/`, `Secure`.
struct Attribute {
    name: Vec<u8>,
    value: Option<Vec<u8>>,
}

impl Attribute {
    fn is(&self, name: &[u8]) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }
}

/// Returns the changed value of a `Set-Cookie`, or `None` if it stays the same.
pub(super) fn rewrite(
    request: &Request,
    value: &[u8],
    domains: &Rewrites,
    paths: &Rewrites,
    flags: &CookieFlags,
) -> Option<Vec<u8>> {
    let flag_rules = flags.0.as_deref().unwrap_or_default();
    if domains.rules().is_empty() && paths.rules().is_empty() && flag_rules.is_empty() {
        return None;
    }
    let mut attributes: Vec<Attribute> = value.split(|&byte| byte == b';').map(attribute).collect();
    let mut is_changed = false;
    for attribute in attributes.iter_mut().skip(1) {
        let rewritten = match &attribute.value {
            Some(value) if attribute.is(b"domain") => rewrite_domain(request, value, domains.rules()),
            Some(value) if attribute.is(b"path") => rewrite_path(request, value, paths.rules()),
            _ => None,
        };
        if let Some(value) = rewritten {
            attribute.value = Some(value);
            is_changed = true;
        }
    }
    is_changed |= change_flags(request, flag_rules, &mut attributes);
    is_changed.then(|| join(&attributes))
}

fn attribute(text: &[u8]) -> Attribute {
    let text = text.trim_ascii();
    match text.find_byte(b'=') {
        Some(equals) => Attribute {
            name: text[..equals].trim_ascii_end().into(),
            value: Some(text[equals + 1..].trim_ascii().into()),
        },
        None => Attribute { name: text.into(), value: None },
    }
}

fn rewrite_domain(request: &Request, value: &[u8], rules: &[Rule]) -> Option<Vec<u8>> {
    let (dot, bare) = value.split_at(usize::from(value.starts_with(b".")));
    rules.iter().find_map(|rule| match rule {
        Rule::Prefix(from, to) => {
            let from = from.text(request);
            bare.eq_ignore_ascii_case(&from).then(|| [dot, &to.evaluate(request)].concat())
        }
        Rule::Regex(regex, to) => replace(request, regex, to, value),
        Rule::Default => None,
    })
}

fn rewrite_path(request: &Request, value: &[u8], rules: &[Rule]) -> Option<Vec<u8>> {
    rules.iter().find_map(|rule| match rule {
        Rule::Prefix(from, to) => replace_prefix(request, from, to, value),
        Rule::Regex(regex, to) => replace(request, regex, to, value),
        Rule::Default => None,
    })
}

/// Changes the flags. Returns `true` if one has changed.
fn change_flags(request: &Request, rules: &[FlagRule], attributes: &mut Vec<Attribute>) -> bool {
    let Some(cookie) = attributes.first() else { return false };
    let applies = |rule: &&FlagRule| match &rule.cookie {
        Name::Exact(name) => cookie.name == *name.text(request),
        Name::Matching(regex) => regex.is_match(&cookie.name).unwrap_or(false),
    };
    let Some(rule) = rules.iter().find(applies) else { return false };
    for change in &rule.flags {
        let flag = match change {
            FlagChange::Fixed(flag) => Some(*flag),
            FlagChange::Evaluated(text) => Flag::parse(&text.text(request)),
        };
        match flag {
            Some(Flag::Secure(is_on)) => set_flag(attributes, b"Secure", is_on),
            Some(Flag::HttpOnly(is_on)) => set_flag(attributes, b"HttpOnly", is_on),
            Some(Flag::SameSite(site)) => {
                let value = site.map(|site| match site {
                    SameSite::Strict => b"Strict".to_vec(),
                    SameSite::Lax => b"Lax".to_vec(),
                    SameSite::None => b"None".to_vec(),
                });
                let place = attributes.iter().position(|attribute| attribute.is(b"samesite"));
                match (place, value) {
                    (Some(place), Some(value)) => attributes[place].value = Some(value),
                    (Some(place), None) => drop(attributes.remove(place)),
                    (None, Some(value)) => {
                        attributes.push(Attribute { name: b"SameSite".to_vec(), value: Some(value) })
                    }
                    (None, None) => {}
                }
            }
            None => {}
        }
    }
    true
}

fn set_flag(attributes: &mut Vec<Attribute>, name: &[u8], is_on: bool) {
    let is_there = attributes.iter().skip(1).any(|attribute| attribute.is(name));
    if is_on && !is_there {
        attributes.push(Attribute { name: name.to_vec(), value: None });
    } else if !is_on && is_there {
        let mut index = 0;
        attributes.retain(|attribute| {
            index += 1;
            index == 1 || !attribute.is(name)
        });
    }
}

fn join(attributes: &[Attribute]) -> Vec<u8> {
    let mut text = Vec::new();
    for (index, attribute) in attributes.iter().enumerate() {
        if index > 0 {
            text.extend_from_slice(b"; ");
        }
        text.extend_from_slice(&attribute.name);
        if let Some(value) = &attribute.value {
            text.push(b'=');
            text.extend_from_slice(value);
        }
    }
    text
}
