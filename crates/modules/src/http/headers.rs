//! headers: configured header fields and trailers of responses.
//!   add_header NAME VALUE [always];               http, server, location, if in location
//!   add_trailer NAME VALUE [always];              http, server, location, if in location
//!   add_header_inherit on|off|merge;              http, server, location, if in location
//!   add_trailer_inherit on|off|merge;             http, server, location, if in location
//!   expires [modified] TIME;  expires @TIME;  expires epoch|max|off;
//!                                                 http, server, location, if in location
//! (<https://nginx.org/en/docs/http/ngx_http_headers_module.html>)
//!
//! Fields without `always`, and `expires` in any case, are added to responses with the usual statuses only. Trailers
//! need HTTP/1.1 and chunks; their values are computed at the end of the body.

use gale_protocol::response::ResponseField;
use std::any::Any;

use gale_base::{http_date, units};
use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, One, OneWith, Setting, Statement, Takes, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::filters::Fields;
use gale_http::request::response::{FieldName, ShortText};
use gale_http::variables::template::Template;
use gale_log::local_time;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_headers_filter",
    directives: DIRECTIVES,
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        filters: &[&Fields { applies: has_something, run: add_fields, trailers: add_trailers }],
        ..HttpPart::EMPTY
    }],
};

const PLACE: Contexts = Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION);

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "add_header",
        contexts: PLACE,
        takes: Takes::Between(2, 3),
        body: BlockBody::None,
        default: "",
        about: "Adds a field to the response header; with always, regardless of the response code.",
        store: &Custom(|conf: &mut Conf, builder, statement| {
            conf.headers.push(added(builder, statement)?);
            Ok(())
        }),
    },
    Directive {
        name: "add_trailer",
        contexts: PLACE,
        takes: Takes::Between(2, 3),
        body: BlockBody::None,
        default: "",
        about: "Adds a trailer field to the response; with always, regardless of the response code.",
        store: &Custom(|conf: &mut Conf, builder, statement| {
            conf.trailers.push(added(builder, statement)?);
            Ok(())
        }),
    },
    Directive {
        name: "add_header_inherit",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "on",
        about: "Sets whether add_header is inherited from the outer level: on (if there is none on this level), off, \
                or merge.",
        store: &One { parse: inherit, slot: slot!(Conf, header_inherit) },
    },
    Directive {
        name: "add_trailer_inherit",
        contexts: PLACE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "on",
        about: "Sets whether add_trailer is inherited from the outer level: on (if there is none on this level), off, \
                or merge.",
        store: &One { parse: inherit, slot: slot!(Conf, trailer_inherit) },
    },
    Directive {
        name: "expires",
        contexts: PLACE,
        takes: Takes::Between(1, 2),
        body: BlockBody::None,
        default: "off",
        about: "Sets the Expires and Cache-Control response header fields; off leaves them unchanged.",
        store: &OneWith { parse: expires, slot: slot!(Conf, expires) },
    },
];

#[derive(Default)]
struct Conf {
    headers: Vec<Added>,
    trailers: Vec<Added>,
    header_inherit: Setting<Inherit>,
    trailer_inherit: Setting<Inherit>,
    expires: Setting<Expires>,
}

#[derive(Clone)]
struct Added {
    name: FieldName,
    value: Template,
    always: bool,
}

/// Inheritance of fields from the outer level.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inherit {
    Nothing,
    /// All, if the level has none of its own.
    Instead,
    /// All, behind the level's own.
    Beside,
}

/// The argument of `expires`.
#[derive(Clone)]
enum Expires {
    Fixed(Lifetime),
    /// A text with variables, parsed for every response; `true` for `expires modified`.
    Dynamic(Template, bool),
}

/// Expiry of a response. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    Off,
    Epoch,
    Max,
    /// This long from now.
    Access(i64),
    /// This long from the file's modification.
    Modified(i64),
    /// At the next time that the local clock shows this time of day.
    Daily(u64),
}

fn added(builder: &mut Builder, statement: &Statement) -> Result<Added, Diagnostic> {
    let always = match statement.args.get(2) {
        None => false,
        Some(word) if word.text == "always" => true,
        Some(word) => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
    };
    Ok(Added {
        name: FieldName::from(statement.args[0].text.as_slice()),
        value: builder.http_mut().template(&statement.args[1])?,
        always,
    })
}

fn inherit(statement: &Statement) -> Result<Inherit, Diagnostic> {
    values::enumeration(statement, &[("off", Inherit::Nothing), ("on", Inherit::Instead), ("merge", Inherit::Beside)])
}

fn expires(builder: &mut Builder, statement: &Statement) -> Result<Expires, Diagnostic> {
    let (word, is_modified) = match statement.args.as_slice() {
        [modified, word] if modified.text == "modified" => (word, true),
        [first, _] => return Err(statement.directive_error("invalid value").at(first.span)),
        words => (&words[0], false),
    };
    let template = builder.http_mut().template(word)?;
    match template.as_constant() {
        None => Ok(Expires::Dynamic(template, is_modified)),
        Some(text) => Lifetime::parse(text, is_modified)
            .map(Expires::Fixed)
            .map_err(|message| statement.directive_error(message).at(word.span)),
    }
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let of_module = "the settings are this module's";
    let conf: &mut Conf = conf.downcast_mut().expect(of_module);
    if let Some(parent) = parent {
        let parent: &Conf = parent.downcast_ref().expect(of_module);
        take_over(&mut conf.headers, &parent.headers, *conf.header_inherit.get());
        take_over(&mut conf.trailers, &parent.trailers, *conf.trailer_inherit.get());
    }
    Ok(())
}

fn take_over(own: &mut Vec<Added>, outer: &[Added], inherit: Inherit) {
    match inherit {
        Inherit::Beside => own.extend_from_slice(outer),
        Inherit::Instead if own.is_empty() => own.extend_from_slice(outer),
        Inherit::Instead | Inherit::Nothing => {}
    }
}

fn has_something(conf: &Conf) -> bool {
    let expires = !matches!(conf.expires.get(), Expires::Fixed(Lifetime::Off));
    expires || !conf.headers.is_empty() || !conf.trailers.is_empty()
}

/// Returns `true` for the statuses to which `expires` and fields without `always` apply.
fn is_usual(status: u16) -> bool {
    matches!(status, 200 | 201 | 204 | 206 | 301 | 302 | 303 | 304 | 307 | 308)
}

fn add_fields(request: &mut Request, conf: &Conf) {
    if !request.is_main() {
        return;
    }
    let is_usual = is_usual(request.response.status);
    if is_usual {
        set_expires(request, conf.expires.get());
    }
    for added in conf.headers.iter().filter(|added| added.always || is_usual) {
        let value = added.value.text(request);
        add_field(request, &added.name, &value);
    }
    // Trailers of a server stay.
    request.response.has_trailers |= conf.trailers.iter().any(|added| added.always || is_usual);
}

/// Adds a field; an empty value means that it is left out.
fn add_field(request: &mut Request, name: &FieldName, value: &[u8]) {
    let response = &mut request.response;
    if name.known() == Some(ResponseField::LastModified) {
        // The field replaces the file's date, and later filters use the new one. If the response does not show that
        // date, the field is an ordinary one.
        response.clear_last_modified();
        response.last_modified = http_date::parse(value);
        if response.tells_last_modified() {
            return;
        }
    } else if name.known() == Some(ResponseField::ETag) {
        response.etag = ShortText::from_slice(value);
        return;
    }
    if !value.is_empty() {
        response.add(name.clone(), value);
    }
}

fn add_trailers(request: &Request, conf: &Conf) {
    let is_usual = is_usual(request.response.status);
    for added in conf.trailers.iter().filter(|added| added.always || is_usual) {
        let value = added.value.evaluate(request);
        if !value.is_empty() {
            request.add_trailer(&added.name, value);
        }
    }
}

/// Sets the fields of `expires`. As in nginx, a text with variables whose value is invalid has no effect.
fn set_expires(request: &mut Request, expires: &Expires) {
    let lifetime = match expires {
        Expires::Fixed(lifetime) => Ok(*lifetime),
        Expires::Dynamic(template, is_modified) => Lifetime::parse(&template.evaluate(request), *is_modified),
    };
    if lifetime == Ok(Lifetime::Off) {
        return;
    }
    let now = gale_runtime::wall_seconds();
    let fields = lifetime.ok().and_then(|lifetime| lifetime.fields(now, request.response.last_modified));
    if let Some((expires, cache_control)) = fields {
        request.response.set(ResponseField::Expires, &expires);
        request.response.set(ResponseField::CacheControl, cache_control);
    }
}

/// Largest supported time, in seconds: some 290 years, so that no sum with a date overflows.
const TIME_MAX: u64 = i32::MAX as u64 * 4;

const DAY: u64 = 24 * 60 * 60;

impl Lifetime {
    /// Parses a time. The error is nginx's message.
    fn parse(text: &[u8], is_modified: bool) -> Result<Lifetime, &'static str> {
        let time = |text| units::parse_time_seconds(text).map(|time| time.as_secs()).ok_or("invalid value");
        match text {
            b"epoch" if !is_modified => return Ok(Lifetime::Epoch),
            b"max" if !is_modified => return Ok(Lifetime::Max),
            b"off" if !is_modified => return Ok(Lifetime::Off),
            [b'@', _rest @ ..] if is_modified => {
                return Err("daily time cannot be used with \"modified\" parameter");
            }
            [b'@', rest @ ..] => {
                return match time(rest)? {
                    time @ ..=DAY => Ok(Lifetime::Daily(time)),
                    _ => Err("daily time value must be less than 24 hours"),
                };
            }
            _ => {}
        }
        let (sign, text) = match text {
            [b'-', rest @ ..] => (-1, rest),
            [b'+', rest @ ..] => (1, rest),
            _ => (1, text),
        };
        let seconds = sign * time(text)?.min(TIME_MAX) as i64;
        Ok(if is_modified { Lifetime::Modified(seconds) } else { Lifetime::Access(seconds) })
    }

    /// Returns the values of Expires and Cache-Control.
    fn fields(self, now: u64, modified: Option<u64>) -> Option<([u8; 29], String)> {
        let now = now.min(i64::MAX as u64 / 2) as i64;
        let (expires, is_past) = match self {
            Lifetime::Off => return None,
            Lifetime::Epoch => return Some((http_date::format(1), "no-cache".to_owned())),
            // The last day of 32-bit clocks; ten years.
            Lifetime::Max => return Some((*b"Thu, 31 Dec 2037 23:55:55 GMT", "max-age=315360000".to_owned())),
            Lifetime::Access(0) | Lifetime::Modified(0) => (now, false),
            Lifetime::Access(time) => (now + time, time < 0),
            Lifetime::Modified(time) => {
                (modified.map_or(now, |modified| modified.min(i64::MAX as u64 / 2) as i64) + time, time < 0)
            }
            Lifetime::Daily(time) => (next_time_of_day(now as u64, time) as i64, false),
        };
        let cache_control = match expires - now {
            age @ 0.. if !is_past => format!("max-age={age}"),
            _ => "no-cache".to_owned(),
        };
        Some((http_date::format(expires.max(0) as u64), cache_control))
    }
}

/// Returns the next moment at which the local clock shows `time`.
fn next_time_of_day(now: u64, time: u64) -> u64 {
    let next = |day: u64| {
        let next = (now + day).saturating_sub(local_time(now).seconds_of_day()) + time;
        // Daylight saving time may begin or end before that moment.
        let off = (next + DAY).saturating_sub(local_time(next).seconds_of_day()) + time % DAY;
        if off.abs_diff(next + DAY) <= DAY / 2 { off - DAY } else { next }
    };
    let today = next(0);
    if today > now { today } else { next(DAY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_700_000_000;

    fn fields(text: &str, is_modified: bool) -> (i64, String) {
        let lifetime = Lifetime::parse(text.as_bytes(), is_modified).unwrap();
        let (expires, cache_control) = lifetime.fields(NOW, Some(NOW - 100)).unwrap();
        (http_date::parse(&expires).unwrap() as i64 - NOW as i64, cache_control)
    }

    #[test]
    fn lifetimes_are_nginx_s() {
        let is =
            |fields: (i64, String), seconds, cache_control: &str| assert_eq!(fields, (seconds, cache_control.into()));
        is(fields("1h", false), 3600, "max-age=3600");
        is(fields("+1h 1m", false), 3660, "max-age=3660");
        is(fields("-1", false), -1, "no-cache");
        is(fields("0", false), 0, "max-age=0");
        is(fields("150", true), 50, "max-age=50");
        is(fields("50", true), -50, "no-cache");
        is(fields("0", true), 0, "max-age=0");
        is(fields("-50", true), -150, "no-cache");
        is(fields("epoch", false), 1 - NOW as i64, "no-cache");
        let (expires, cache_control) = Lifetime::Max.fields(NOW, None).unwrap();
        assert_eq!((&expires, &*cache_control), (b"Thu, 31 Dec 2037 23:55:55 GMT", "max-age=315360000"));
        assert_eq!(Lifetime::Modified(60).fields(NOW, None), Lifetime::Access(60).fields(NOW, None));
        assert_eq!(Lifetime::Off.fields(NOW, None), None);
    }

    #[test]
    fn wrong_lifetimes_give_nginx_s_errors() {
        for (text, is_modified, message) in [
            ("", false, "invalid value"),
            ("soon", false, "invalid value"),
            ("max", true, "invalid value"),
            ("@", false, "invalid value"),
            ("@25h", false, "daily time value must be less than 24 hours"),
            ("@1h", true, "daily time cannot be used with \"modified\" parameter"),
        ] {
            assert_eq!(Lifetime::parse(text.as_bytes(), is_modified), Err(message), "{text}");
        }
        assert_eq!(Lifetime::parse(b"@24h", false), Ok(Lifetime::Daily(DAY)));
        // No sum overflows, however long the time.
        let longest = Lifetime::parse(b"9223372036854775807s", false).unwrap();
        assert!(longest.fields(u64::MAX, Some(u64::MAX)).is_some());
    }

    #[test]
    fn a_time_of_day_is_today_or_tomorrow() {
        for time in [0, 1, 3600, 12 * 3600, DAY - 1, DAY] {
            let next = next_time_of_day(NOW, time);
            assert!(next > NOW && next <= NOW + DAY + 3600, "{time}");
            assert_eq!(local_time(next).seconds_of_day(), time % DAY, "{time}");
        }
    }
}
