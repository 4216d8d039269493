//! Parser of `sticky cookie | route | learn …`.

use std::sync::Arc;
use std::time::Duration;

use bstr::{BString, ByteSlice};
use gale_base::units;
use gale_config::{Diagnostic, Statement, Word};
use gale_engine::configuration::{Builder, ZONE_BYTES_MIN, ZoneSize};
use gale_engine::variables::VariableId;
use gale_engine::variables::subject::Subject;
use gale_upstream::{
    CookieExpires, HasUpstreams, Sessions, Sticky, StickyCookie, StickyLearn, is_same_site, upstreams_of,
};

use crate::shared::variable_name;

/// Default time for which a learned session is kept after its last request.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(600);

const ZONE: &str = "sticky";

/// The session zone of one group, by name.
struct SessionZone(BString);

pub(super) fn sticky<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    if upstreams_of::<S>(builder).current().sticky.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    let (kind, parameters) = statement.args.split_first().expect("two arguments");
    let sticky = match &**kind.text {
        b"cookie" => Sticky::Cookie(cookie::<S>(builder, statement, parameters)?),
        b"route" => {
            let variable = |word: &Word| Ok(builder.variables::<S>().variable(variable_name(word)?, Some(word.span)));
            Sticky::Route(parameters.iter().map(variable).collect::<Result<_, Diagnostic>>()?)
        }
        b"learn" => Sticky::Learn(learn::<S>(builder, statement, parameters)?),
        _ => return Err(unknown_parameter(kind)),
    };
    upstreams_of::<S>(builder).current().sticky.set(sticky, Some(statement.span));
    Ok(())
}

fn unknown_parameter(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("unknown parameter \"{}\"", word.text)).at(word.span)
}

/// Sets a parameter that may be set only once.
fn set_once<T>(slot: &mut Option<T>, value: T, name: &str, statement: &Statement) -> Result<(), Diagnostic> {
    match slot.replace(value) {
        Some(_) => Err(statement.directive_error(&format!("parameter \"{name}\" is duplicate"))),
        None => Ok(()),
    }
}

fn cookie<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
    parameters: &[Word],
) -> Result<StickyCookie<S>, Diagnostic> {
    let (name, parameters) = parameters.split_first().expect("an argument");
    let wrong = |what: &str| statement.directive_error(what);
    if name.text.is_empty() {
        return Err(wrong("empty cookie name"));
    }
    let variables = builder.variables::<S>();
    let (mut domain, mut path, mut expires, mut same_site) = (None, None, None, None);
    let (mut http_only, mut secure) = (None, None);
    for word in parameters {
        let text: &[u8] = &word.text;
        let template = |value: &[u8]| Word { text: value.into(), ..word.clone() };
        if let Some(value) = text.strip_prefix(b"domain=") {
            if value.is_empty() {
                return Err(wrong("no value for \"domain\""));
            }
            set_once(&mut domain, variables.template(&template(value))?, "domain", statement)?;
        } else if let Some(value) = text.strip_prefix(b"path=") {
            if value.is_empty() {
                return Err(wrong("no value for \"path\""));
            }
            set_once(&mut path, value.into(), "path", statement)?;
        } else if let Some(value) = text.strip_prefix(b"expires=") {
            let time = match value {
                b"max" => Some(CookieExpires::Latest),
                _ => units::parse_time_seconds(value).map(CookieExpires::After),
            };
            let time = time.ok_or_else(|| wrong("invalid \"expires\" parameter value"))?;
            set_once(&mut expires, time, "expires", statement)?;
        } else if let Some(value) = text.strip_prefix(b"samesite=") {
            let value = variables.template(&template(value))?;
            if value.as_constant().is_some_and(|value| !is_same_site(value)) {
                return Err(wrong("invalid \"samesite\" parameter value"));
            }
            set_once(&mut same_site, value, "samesite", statement)?;
        } else if text == b"httponly" {
            set_once(&mut http_only, (), "httponly", statement)?;
        } else if text == b"secure" {
            set_once(&mut secure, (), "secure", statement)?;
        } else {
            return Err(unknown_parameter(word));
        }
    }
    let variable = variables.variable(&[b"cookie_", name.text.as_slice()].concat(), Some(name.span));
    Ok(StickyCookie {
        name: name.text.as_slice().into(),
        variable,
        domain,
        path,
        expires,
        is_http_only: http_only.is_some(),
        is_secure: secure.is_some(),
        same_site,
    })
}

fn learn<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
    parameters: &[Word],
) -> Result<StickyLearn, Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let wrong = |what: &str| statement.directive_error(what);
    let (mut zone, mut timeout, mut after_header) = (None, None, false);
    let (mut lookup, mut create) = (Vec::new(), Vec::new());
    for word in parameters {
        let text: &[u8] = &word.text;
        if let Some(value) = text.strip_prefix(b"zone=") {
            if zone.is_some() {
                return Err(wrong("duplicate zone"));
            }
            zone = Some(zone_size(value).map_err(wrong)?);
        } else if let Some(value) = text.strip_prefix(b"timeout=") {
            if timeout.is_some() {
                return Err(wrong("duplicate timeout"));
            }
            let time = units::parse_time(value).filter(|time| !time.is_zero());
            timeout = Some(time.ok_or_else(|| wrong("invalid timeout"))?);
        } else if let Some(value) = text.strip_prefix(b"create=") {
            create.push(variable::<S>(builder, statement, word, value, "create")?);
        } else if let Some(value) = text.strip_prefix(b"lookup=") {
            lookup.push(variable::<S>(builder, statement, word, value, "lookup")?);
        } else if text == b"header" {
            after_header = true;
        } else {
            return Err(unknown_parameter(word));
        }
    }
    let missing = |name: &str| wrong(&format!("\"{name}\" parameter is not specified"));
    if lookup.is_empty() {
        return Err(missing("lookup"));
    }
    if create.is_empty() {
        return Err(missing("create"));
    }
    let zone = zone.ok_or_else(|| missing("zone"))?;
    let sessions = sessions::<S>(builder, statement, &zone)?;
    Ok(StickyLearn { lookup, create, after_header, sessions, timeout: timeout.unwrap_or(TIMEOUT_DEFAULT) })
}

fn variable<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
    word: &Word,
    value: &[u8],
    parameter: &str,
) -> Result<VariableId, Diagnostic> {
    let name = value
        .strip_prefix(b"$")
        .filter(|name| !name.is_empty())
        .ok_or_else(|| statement.directive_error(&format!("missing variable in the \"{parameter}\" parameter")))?;
    Ok(builder.variables::<S>().variable(name, Some(word.span)))
}

fn zone_size(text: &[u8]) -> Result<ZoneSize, &'static str> {
    let (name, size) = text.split_once_str(":").ok_or("zone size is not specified")?;
    if name.is_empty() {
        return Err("zone name is not specified");
    }
    let bytes = units::parse_size(size).and_then(|bytes| usize::try_from(bytes).ok()).ok_or("invalid zone size")?;
    if bytes < ZONE_BYTES_MIN {
        return Err("zone is too small");
    }
    Ok(ZoneSize { name: name.into(), bytes })
}

/// Returns the sessions of a zone, which belongs to one group.
fn sessions<S: Subject>(
    builder: &mut Builder,
    statement: &Statement,
    size: &ZoneSize,
) -> Result<Arc<Sessions>, Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let group = BString::from(upstreams_of::<S>(builder).current().name().to_vec());
    let zone = builder.declare_zone::<SessionZone>(ZONE, size, statement.span)?;
    if let Some(SessionZone(other)) = zone.declared() {
        let message = format!("sticky zone \"{}\" is already used in upstream \"{other}\"", size.name);
        return Err(statement.error(message));
    }
    zone.declare(SessionZone(group));
    size.hold(builder, ZONE, statement.span, Sessions::new)
}
