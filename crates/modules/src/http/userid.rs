//! userid: cookies that identify clients, in the form of mod_uid.
//!   userid on|v1|log|off;                                     http, server, location
//!   userid_service NUMBER;                                    http, server, location
//!   userid_name NAME;  userid_domain NAME | none;             http, server, location
//!   userid_path PATH;  userid_expires TIME | max | off;       http, server, location
//!   userid_p3p TEXT | none;  userid_mark CHARACTER | off;     http, server, location
//!   userid_flags off | FLAG ...;                              http, server, location
//!   $uid_got, $uid_set, $uid_reset
//! (<https://nginx.org/en/docs/http/ngx_http_userid_module.html>)
//!
//! An identifier has four numbers: the issuer (the server's address), the time, the counter (a loop of a process), and
//! a count. The cookie has their 16 bytes in base64. As in nginx, variables show the numbers in the machine's byte
//! order.

use std::cell::{Cell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::UNIX_EPOCH;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::{http_date, units};
use gale_config::{Body as Block, Contexts, Diagnostic, One, Setting, Statement, Takes, Updated, slot, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::filters::Change;
use gale_http::variables::Variable;
use gale_protocol::request::KnownHeader;
use gale_protocol::response::ResponseField;
use gale_runtime::SocketAddress;

use super::variables::cookie_of_line;
use crate::shared::base64;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_userid",
    directives: &[
        Directive {
            name: "userid",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "off",
            about: "Enables or disables setting cookies that identify clients, and logging the received ones: on, v1, \
                    log or off.",
            store: &One { parse: mode, slot: slot!(Conf, mode) },
        },
        Directive {
            name: "userid_service",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "",
            about: "Sets the service number in identifiers, different for each server; by default the server's \
                    address, or 0 with v1.",
            store: &One { parse: values::number, slot: slot!(Conf, service) },
        },
        Directive {
            name: "userid_name",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "uid",
            about: "Sets the name of the cookie.",
            store: &One { parse: values::string, slot: slot!(Conf, name) },
        },
        Directive {
            name: "userid_domain",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "none",
            about: "Sets the domain of the cookie.",
            store: &One { parse: text_or_none, slot: slot!(Conf, domain) },
        },
        Directive {
            name: "userid_path",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "/",
            about: "Sets the path of the cookie.",
            store: &One { parse: values::string, slot: slot!(Conf, path) },
        },
        Directive {
            name: "userid_expires",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "off",
            about: "Sets how long browsers keep the cookie: a time, max (until 2037), or off (until the browser is \
                    closed).",
            store: &One { parse: expires, slot: slot!(Conf, expires) },
        },
        Directive {
            name: "userid_p3p",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "none",
            about: "Sets the P3P response header field that is sent with the cookie.",
            store: &One { parse: text_or_none, slot: slot!(Conf, p3p) },
        },
        Directive {
            name: "userid_mark",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "off",
            about: "Sets a mark in the cookie; a cookie with a different mark is sent again, with the same identifier.",
            store: &One { parse: mark, slot: slot!(Conf, mark) },
        },
        Directive {
            name: "userid_flags",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Between(1, 3),
            body: Block::None,
            default: "off",
            about: "Sets flags of the cookie: secure, httponly, samesite=strict, samesite=lax, samesite=none.",
            store: &Updated { parse: flags, slot: slot!(Conf, flags) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("uid_got", append_got),
            Variable::named("uid_set", append_set),
            Variable::named("uid_reset", |_, _, _| true).changeable(),
        ],
        filters: &[&Change { applies: |conf: &Conf| conf.gives_cookies(), run: give_cookie }],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    mode: Setting<Mode>,
    service: Setting<u64>,
    name: Setting<BString>,
    /// Empty for none, like `p3p`.
    domain: Setting<BString>,
    path: Setting<BString>,
    expires: Setting<Expires>,
    p3p: Setting<BString>,
    mark: Setting<Option<u8>>,
    flags: Setting<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Off,
    Log,
    V1,
    On,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expires {
    /// A session cookie.
    Off,
    /// After this many seconds.
    After(u64),
    /// The latest date that old browsers support.
    Max,
}

/// Flags of a cookie, in the order in which they are written. The first one means none.
const FLAGS: [(&str, u32); 6] = [
    ("off", 0x01),
    ("secure", 0x02),
    ("httponly", 0x04),
    ("samesite=strict", SAME_SITE | 0x08),
    ("samesite=lax", SAME_SITE | 0x10),
    ("samesite=none", SAME_SITE | 0x20),
];

/// One bit that is common to all values of SameSite.
const SAME_SITE: u32 = 0x40;

fn mode(statement: &Statement) -> Result<Mode, Diagnostic> {
    values::enumeration(statement, &[("off", Mode::Off), ("log", Mode::Log), ("v1", Mode::V1), ("on", Mode::On)])
}

fn text_or_none(statement: &Statement) -> Result<BString, Diagnostic> {
    values::string(statement).map(|text| if text == "none" { BString::default() } else { text })
}

fn expires(statement: &Statement) -> Result<Expires, Diagnostic> {
    match &**statement.args[0].text {
        b"off" => Ok(Expires::Off),
        b"max" => Ok(Expires::Max),
        text => match units::parse_time_seconds(text) {
            Some(time) if time.is_zero() => Ok(Expires::Off),
            Some(time) => Ok(Expires::After(time.as_secs())),
            None => Err(statement.directive_error("invalid value")),
        },
    }
}

fn mark(statement: &Statement) -> Result<Option<u8>, Diagnostic> {
    match &**statement.args[0].text {
        b"off" => Ok(None),
        &[mark] if mark.is_ascii_alphanumeric() || mark == b'=' => Ok(Some(mark)),
        _ => Err(statement.directive_error("value must be \"off\" or a single letter, digit or \"=\"")),
    }
}

fn flags(builder: &mut Builder, statement: &Statement, earlier: Option<&u32>) -> Result<u32, Diagnostic> {
    values::bitmask(statement, &FLAGS, earlier, builder)
}

/// Number of characters of a cookie that hold the identifier; the rest of the last four characters is for the mark.
const ENCODED_BYTES: usize = 22;

/// Four numbers in native byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Uid([u8; 16]);

impl Uid {
    fn read(encoded: &[u8]) -> Option<Uid> {
        base64::decode(encoded)?.collect::<Vec<u8>>().try_into().ok().map(Uid)
    }

    /// Returns `true` if it was issued: the last number of such an identifier is never 0.
    fn is_given(self) -> bool {
        self.0[12..] != [0; 4]
    }

    fn encoded(self) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(24);
        base64::append(&mut encoded, &self.0);
        encoded
    }

    /// Returns `NAME=00001111222233334444555566667777`.
    fn shown(self, name: &BString) -> String {
        let number = |start: usize| u32::from_ne_bytes(self.0[start..start + 4].try_into().expect("four bytes"));
        format!("{name}={:08X}{:08X}{:08X}{:08X}", number(0), number(4), number(8), number(12))
    }
}

/// State of a client's cookie, shared by the request and its subrequests.
#[derive(Default)]
struct Known {
    /// `true` after the search for the cookie.
    is_read: bool,
    got: Option<Uid>,
    /// The whole value of the client's cookie.
    value: BString,
    set: Option<Uid>,
    /// `true` if the client's identifier is to be replaced.
    is_reset: bool,
}

type Note = Rc<RefCell<Known>>;

/// Returns the state of the client's cookie, parsed at the first call.
fn known(request: &Request, conf: &Conf) -> Note {
    let note: Note = request.shared_note();
    if std::mem::replace(&mut note.borrow_mut().is_read, true) {
        return note;
    }
    let lines = request.parsed.values(request.head.readable(), KnownHeader::Cookie);
    let found = lines.into_iter().find_map(|line| Some((line, cookie_of_line(line, conf.name.get())?)));
    if let Some((line, value)) = found {
        let what = match value.get(..ENCODED_BYTES).map(Uid::read) {
            None => Some("too short"),
            Some(None) => Some("invalid"),
            Some(Some(uid)) => {
                note.borrow_mut().got = Some(uid).filter(|uid| uid.is_given());
                None
            }
        };
        note.borrow_mut().value = value.into();
        if let Some(what) = what {
            request.log(Level::Error, format_args!("client sent {what} userid cookie \"{}\"", BStr::new(line)));
        }
    }
    note
}

impl Conf {
    fn gives_cookies(&self) -> bool {
        matches!(self.mode.get(), Mode::V1 | Mode::On)
    }

    fn choose(&self, request: &Request, note: &Note) {
        let (got, has_mark) = {
            let known = note.borrow();
            if known.set.is_some() {
                return;
            }
            let has_mark = |mark: &u8| known.value.get(ENCODED_BYTES..ENCODED_BYTES + 2) == Some(&[*mark, b'=']);
            (known.got, self.mark.get().as_ref().is_none_or(has_mark))
        };
        if let Some(got) = got {
            // Evaluated without a borrow, since the value may be any variable.
            let mut reset = Vec::new();
            request.append_named_variable(b"uid_reset", &mut reset);
            if matches!(&*reset, b"" | b"0") {
                note.borrow_mut().set = Some(got).filter(|_| !has_mark);
                return;
            }
            note.borrow_mut().is_reset = true;
            if reset == b"log" {
                let shown = got.shown(self.name.get());
                request.log(Level::Notice, format_args!("userid cookie \"{shown}\" was reset"));
            }
        }
        note.borrow_mut().set = Some(self.make(request));
    }

    fn make(&self, request: &Request) -> Uid {
        let is_v1 = *self.mode.get() == Mode::V1;
        // As in nginx, a number is truncated to 32 bits.
        let service = self.service.get_opt().map(|&service| service as u32);
        let time = gale_runtime::wall_seconds() as u32;
        let (start, count) = COUNTERS.with(|counters| counters.next(is_v1));
        let bytes = if is_v1 { u32::to_ne_bytes } else { u32::to_be_bytes };
        let service = match service {
            Some(service) => bytes(service),
            None if is_v1 => [0; 4],
            None => request.exchange().local_address().map_or([0; 4], own_number),
        };
        let mut uid = [0; 16];
        for (place, number) in uid.chunks_mut(4).zip([service, bytes(time), bytes(start), bytes(count)]) {
            place.copy_from_slice(&number);
        }
        Uid(uid)
    }

    /// Returns the value of `Set-Cookie`.
    fn field(&self, uid: Uid, known: &Known, now: u64) -> Vec<u8> {
        let mut field = Vec::with_capacity(128);
        field.extend_from_slice(self.name.get());
        field.push(b'=');
        let mut value = match known.got {
            // The client's own text: surplus bits in its last character stay.
            Some(_) if !known.is_reset => [&known.value[..ENCODED_BYTES], b"=="].concat(),
            _ => uid.encoded(),
        };
        if let Some(mark) = self.mark.get() {
            value[ENCODED_BYTES] = *mark;
        }
        field.extend_from_slice(&value);
        match self.expires.get() {
            Expires::Off => {}
            Expires::Max => field.extend_from_slice(b"; expires=Thu, 31-Dec-37 23:55:55 GMT"),
            Expires::After(seconds) => {
                field.extend_from_slice(b"; expires=");
                append_cookie_time(&mut field, now.saturating_add(*seconds));
            }
        }
        if !self.domain.get().is_empty() {
            field.extend_from_slice(b"; domain=");
            field.extend_from_slice(self.domain.get());
        }
        field.extend_from_slice(b"; path=");
        field.extend_from_slice(self.path.get());
        for (name, bits) in &FLAGS[1..] {
            if self.flags.get() & bits & !SAME_SITE != 0 {
                field.extend_from_slice(b"; ");
                field.extend_from_slice(name.as_bytes());
            }
        }
        field
    }
}

/// Returns the last four bytes of an address.
fn own_number(address: &SocketAddress) -> [u8; 4] {
    match address.inet().map(|address| address.ip()) {
        None => [0; 4],
        Some(IpAddr::V4(ip)) => ip.octets(),
        Some(IpAddr::V6(ip)) => ip.octets()[12..].try_into().expect("four of sixteen bytes"),
    }
}

/// Appends `Thu, 31-Dec-37 23:55:55 GMT`: old browsers know no other form, and no later year.
fn append_cookie_time(out: &mut Vec<u8>, seconds: u64) {
    const YEAR_SHORT_MAX: &[u8] = b"2037";
    let date = http_date::format(seconds);
    let year = &date[12..16];
    let year = if year > YEAR_SHORT_MAX { year } else { &year[2..] };
    for part in [&date[..7], b"-", &date[8..11], b"-", year, &date[16..]] {
        out.extend_from_slice(part);
    }
}

/// Counter of identifiers of a loop.
struct Counters {
    /// Identifies the counter: in the upper half when the first loop began, in units of 20 microseconds, plus one for
    /// each further loop; in the lower half the process.
    start: u32,
    v1: Cell<u32>,
    v2: Cell<u32>,
}

thread_local!(static COUNTERS: Counters = Counters::new());

/// The lowest byte is the version.
const FIRST_V1: u32 = 1;
const FIRST_V2: u32 = 0x0303_0302;
const STEP: u32 = 0x100;

impl Counters {
    fn new() -> Counters {
        /// Number of loops of this process that have begun.
        static LOOPS: AtomicU32 = AtomicU32::new(0);
        /// Value of the first of them.
        static BEGINNING: AtomicU32 = AtomicU32::new(0);
        let number = LOOPS.fetch_add(1, Ordering::Relaxed);
        let micros = gale_runtime::wall().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_micros());
        // A value that fits into 16 bits; 0 means unset.
        let own = micros / 20 + 1;
        let found = BEGINNING.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
        let start = found.map_or_else(|first| first, |_| own).wrapping_add(number);
        Counters { start: start << 16 | std::process::id(), v1: Cell::new(FIRST_V1), v2: Cell::new(FIRST_V2) }
    }

    fn next(&self, is_v1: bool) -> (u32, u32) {
        let (counter, first) = if is_v1 { (&self.v1, FIRST_V1) } else { (&self.v2, FIRST_V2) };
        let count = counter.get();
        counter.set(count.checked_add(STEP).unwrap_or(first));
        (self.start, count)
    }
}

fn append_got(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(conf) = request.scope().conf_of::<Conf>().filter(|conf| *conf.mode.get() != Mode::Off) else {
        return false;
    };
    let got = known(request, conf).borrow().got;
    append_shown(got, conf, out)
}

fn append_set(request: &Request, _: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(conf) = request.scope().conf_of::<Conf>().filter(|conf| conf.gives_cookies()) else { return false };
    let note = known(request, conf);
    conf.choose(request, &note);
    let set = note.borrow().set;
    append_shown(set, conf, out)
}

fn append_shown(uid: Option<Uid>, conf: &Conf, out: &mut Vec<u8>) -> bool {
    uid.is_some_and(|uid| {
        out.extend_from_slice(uid.shown(conf.name.get()).as_bytes());
        true
    })
}

fn give_cookie(request: &mut Request, conf: &Conf, _: &mut Body) {
    if !request.is_main() {
        return;
    }
    let note = known(request, conf);
    conf.choose(request, &note);
    let known = note.borrow();
    let Some(uid) = known.set else { return };
    let field = conf.field(uid, &known, gale_runtime::wall_seconds());
    request.response.add(ResponseField::SetCookie, field);
    if !conf.p3p.get().is_empty() {
        request.response.add(b"P3P", conf.p3p.get().as_slice());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conf() -> Conf {
        Conf {
            mode: Setting::of(Mode::On),
            service: Setting::new(),
            name: Setting::of("uid".into()),
            domain: Setting::of(BString::default()),
            path: Setting::of("/".into()),
            expires: Setting::of(Expires::Off),
            p3p: Setting::of(BString::default()),
            mark: Setting::of(None),
            flags: Setting::of(1),
        }
    }

    const UID: Uid = Uid([127, 0, 0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 2]);

    #[test]
    fn cookie_has_the_form_of_mod_uid() {
        let encoded = UID.encoded();
        assert_eq!(encoded, b"fwAAAQUGBwgJCgsMDQ4PAg==");
        assert_eq!(Uid::read(&encoded[..ENCODED_BYTES]), Some(UID));
        assert!(UID.is_given() && !Uid([0; 16]).is_given());
        assert_eq!(Uid::read(b"fwAAAQUGBwgJCgsMDQ4P-w"), None);
    }

    #[test]
    fn field_has_the_set_parameters() {
        let mut conf = conf();
        let text = |conf: &Conf, known: &Known| String::from_utf8(conf.field(UID, known, 784_111_777)).unwrap();
        assert_eq!(text(&conf, &Known::default()), "uid=fwAAAQUGBwgJCgsMDQ4PAg==; path=/");
        conf.expires = Setting::of(Expires::After(100));
        conf.domain = Setting::of("example.com".into());
        conf.mark = Setting::of(Some(b'z'));
        conf.flags = Setting::of(FLAGS[1].1 | FLAGS[2].1 | FLAGS[5].1);
        assert_eq!(
            text(&conf, &Known::default()),
            "uid=fwAAAQUGBwgJCgsMDQ4PAgz=; expires=Sun, 06-Nov-94 08:51:17 GMT; domain=example.com; path=/; secure; \
             httponly; samesite=none"
        );
        // A mark is added to the client's own cookie; it does not keep an identifier that is replaced.
        let mut known = Known { got: Some(UID), value: "AAAAAAAAAAAAAAAAAAAAAB==x".into(), ..Known::default() };
        assert!(text(&conf, &known).starts_with("uid=AAAAAAAAAAAAAAAAAAAAABz=;"));
        known.is_reset = true;
        assert!(text(&conf, &known).starts_with("uid=fwAAAQUGBwgJCgsMDQ4PAgz=;"));
    }

    #[test]
    fn years_after_2037_have_four_digits() {
        let time = |seconds| {
            let mut out = Vec::new();
            append_cookie_time(&mut out, seconds);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(time(2_145_916_555), "Thu, 31-Dec-37 23:55:55 GMT");
        assert_eq!(time(2_145_916_555 + 86_400), "Fri, 01-Jan-2038 23:55:55 GMT");
    }

    #[test]
    fn counters_keep_the_version_and_begin_anew() {
        let counters = Counters { start: 7, v1: Cell::new(u32::MAX - 0xfe), v2: Cell::new(u32::MAX - 0xfd) };
        assert_eq!((counters.next(true), counters.next(true)), ((7, u32::MAX - 0xfe), (7, FIRST_V1)));
        assert_eq!((counters.next(false), counters.next(false)), ((7, u32::MAX - 0xfd), (7, FIRST_V2)));
    }
}
