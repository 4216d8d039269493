//! gzip: responses are compressed while they are sent.
//!   gzip on|off;                                             http, server, location, if in location
//!   gzip_comp_level LEVEL;  gzip_min_length LENGTH;          http, server, location
//!   gzip_types TYPE ...;  gzip_buffers NUMBER SIZE;          http, server, location
//!   gzip_vary on|off;  gzip_http_version 1.0|1.1;            http, server, location
//!   gzip_proxied WHEN ...;  gzip_disable REGEX ...;          http, server, location
//!   $gzip_ratio
//! (<https://nginx.org/en/docs/http/ngx_http_gzip_module.html>)
//!
//! Whether the client takes gzip is asked by `gunzip` and `gzip_static`, too. It compresses in bounded pieces on the loop
//! ([`Transformed`]); what a compressor needs (some 300 KiB) is taken with the first byte and kept for the next response.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use flate2::{Compress, Compression, FlushCompress, Status};
use gale_base::http_date;
use gale_config::{
    Body as BlockBody, Custom, Diagnostic, ManyWith, One, OneWith, Place, Setting, Statement, Takes, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::http::body::Body;
use gale_engine::http::filters::Change;
use gale_engine::http::media_types::MediaTypes;
use gale_engine::http::regex::Regex;
use gale_engine::http::request::Request;
use gale_engine::http::response::ResponseHead;
use gale_engine::http::transform::{ROOM_BYTES, Step, Transform, Transformed, Until};
use gale_engine::http::variables::Variable;
use gale_engine::module::{ConfType, Directive, Module};
use gale_protocol::http1::{KnownHeader, Version};
use gale_runtime::Effort;

/// See the file's head.
pub const MODULE: Module = Module {
    name: "http_gzip_filter",
    directives: DIRECTIVES,
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    variables: &[Variable::named("gzip_ratio", |request, _, out| ratio(request, out))],
    filters: &[&Change { applies: |conf: &Conf| *conf.gzip.get(), run: compress }],
    ..Module::EMPTY
};

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "gzip",
        place: Place::ANYWHERE.or(Place::IF_IN_LOCATION),
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Whether responses are compressed.",
        store: &One { parse: values::flag, slot: slot!(Conf, gzip) },
    },
    Directive {
        name: "gzip_buffers",
        place: Place::ANYWHERE,
        takes: Takes::Exactly(2),
        body: BlockBody::None,
        default: "32 4k",
        about: "How much is compressed before it is sent, at most: number and size; more than 64k counts as 64k.",
        store: &One { parse: buffers, slot: slot!(Conf, buffer_bytes) },
    },
    Directive {
        name: "gzip_comp_level",
        place: Place::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "1",
        about: "How hard to compress, from 1 to 9.",
        store: &One { parse: |statement| values::number_between(statement, 1, 9), slot: slot!(Conf, level) },
    },
    Directive {
        name: "gzip_min_length",
        place: Place::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "20",
        about: "Responses that are known to be shorter go out as they are.",
        store: &One { parse: values::number, slot: slot!(Conf, min_length) },
    },
    Directive {
        name: "gzip_types",
        place: Place::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "text/html",
        about: "The media types to compress, beside text/html; * for all.",
        store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, types) },
    },
    Directive {
        name: "gzip_vary",
        place: Place::ANYWHERE,
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Whether \"Vary: Accept-Encoding\" is sent where gzip, gunzip or gzip_static decide.",
        store: &One { parse: values::flag, slot: slot!(Conf, vary) },
    },
    Directive {
        name: "gzip_http_version",
        place: Place::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "1.1",
        about: "The version of HTTP that a client must speak to get gzip.",
        store: &One { parse: http_version, slot: slot!(Conf, http_version) },
    },
    Directive {
        name: "gzip_proxied",
        place: Place::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "off",
        about: "When requests that came through a proxy (with a Via field) get gzip.",
        store: &OneWith { parse: proxied, slot: slot!(Conf, proxied) },
    },
    Directive {
        name: "gzip_disable",
        place: Place::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "",
        about: "Clients that get no gzip, by their User-Agent: regular expressions, or msie6.",
        store: &Custom(disable),
    },
];

#[derive(Default)]
struct Conf {
    gzip: Setting<bool>,
    buffer_bytes: Setting<usize>,
    level: Setting<u64>,
    min_length: Setting<u64>,
    types: Setting<Vec<MediaTypes>>,
    vary: Setting<bool>,
    http_version: Setting<Version>,
    proxied: Setting<u32>,
    disabled: Setting<Vec<Arc<Regex>>>,
    msie6_disabled: Setting<bool>,
}

fn buffers(statement: &Statement) -> Result<usize, Diagnostic> {
    let (count, size) = values::buffers(statement)?;
    Ok(usize::try_from(count.saturating_mul(size)).unwrap_or(usize::MAX))
}

fn http_version(statement: &Statement) -> Result<Version, Diagnostic> {
    values::enumeration(statement, &[("1.0", Version::Http10), ("1.1", Version::Http11)])
}

/// What `gzip_proxied` may list; a bit each.
mod when {
    pub const EXPIRED: u32 = 1;
    pub const NO_CACHE: u32 = 1 << 1;
    pub const NO_STORE: u32 = 1 << 2;
    pub const PRIVATE: u32 = 1 << 3;
    pub const NO_LAST_MODIFIED: u32 = 1 << 4;
    pub const NO_ETAG: u32 = 1 << 5;
    pub const AUTH: u32 = 1 << 6;
    pub const ANY: u32 = 1 << 7;
    pub const OFF: u32 = 1 << 8;
}

fn proxied(builder: &mut Builder, statement: &Statement) -> Result<u32, Diagnostic> {
    let choices = [
        ("off", when::OFF),
        ("expired", when::EXPIRED),
        ("no-cache", when::NO_CACHE),
        ("no-store", when::NO_STORE),
        ("private", when::PRIVATE),
        ("no_last_modified", when::NO_LAST_MODIFIED),
        ("no_etag", when::NO_ETAG),
        ("auth", when::AUTH),
        ("any", when::ANY),
    ];
    values::bitmask(statement, &choices, builder)
}

/// Several of a level add up.
fn disable(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut expressions = conf.disabled.take().unwrap_or_default();
    for word in &statement.args {
        if word.text == "msie6" {
            conf.msie6_disabled.set(true, Some(word.span));
        } else {
            expressions.push(Arc::new(builder.http_mut().regex(word, &word.text, true)?));
        }
    }
    conf.disabled.set(expressions, Some(statement.span));
    Ok(())
}

/// Old browsers and expressions are inherited apart.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    let of_module = "the settings are this module's";
    let conf: &mut Conf = conf.downcast_mut().expect(of_module);
    if let Some(parent) = parent {
        let parent: &Conf = parent.downcast_ref().expect(of_module);
        conf.disabled.inherit(&parent.disabled);
        conf.msie6_disabled.inherit(&parent.msie6_disabled);
    }
    Ok(())
}

fn compress(request: &mut Request, conf: &Conf, body: &mut Body) {
    let head = &request.response;
    let length = head.content_length.or_else(|| body.length());
    if !matches!(head.status, 200 | 403 | 404)
        || head.field(b"content-encoding").is_some_and(|value| !value.is_empty())
        || length.is_some_and(|length| length < *conf.min_length.get())
        || !MediaTypes::contain(conf.types.get(), &head.content_type)
    {
        return;
    }
    note_vary(request);
    if !is_accepted(request) {
        return;
    }
    request.response.add(b"Content-Encoding", b"gzip");
    request.response.will_change();
    let totals = Rc::new(Totals::default());
    request.notes.put(Rc::clone(&totals));
    let deflate = Deflate { level: zlib_level(*conf.level.get()), compressor: None, totals };
    let room_bytes = room_for(length).min(*conf.buffer_bytes.get());
    *body = Body::Stream(Box::new(Transformed::new(std::mem::take(body), deflate, room_bytes)));
}

/// The answer depends on what the client accepts: `gzip_vary`.
pub fn note_vary(request: &mut Request) {
    let is_on = request.scope().conf_of::<Conf>().is_some_and(|conf| *conf.vary.get());
    if is_on && request.response.field(b"vary") != Some(b"Accept-Encoding") {
        request.response.add(b"Vary", b"Accept-Encoding");
    }
}

/// Whether `Vary` is to be sent where the answer depends on what the client accepts.
pub fn has_vary(request: &Request) -> bool {
    request.scope().conf_of::<Conf>().is_some_and(|conf| *conf.vary.get())
}

/// Whether the client may be given gzip: it accepts it, and nothing in the configuration stands against it. A part of its
/// answer may not: the whole is compressed.
pub fn is_accepted(request: &Request) -> bool {
    let Some(conf) = request.scope().conf_of::<Conf>() else { return false };
    let agent = request.header(KnownHeader::UserAgent);
    request.is_main()
        && request.header(KnownHeader::AcceptEncoding).is_some_and(accepts_gzip)
        && !(conf.msie6_disabled.get_opt() == Some(&true) && request.browser().is_msie6())
        && request.version() >= *conf.http_version.get()
        && (request.header(KnownHeader::Via).is_none() || is_for_proxies(request, *conf.proxied.get()))
        && !agent.is_some_and(|agent| is_disabled(conf, agent))
}

/// An expression that runs into PCRE2's limits does not match, as in nginx.
fn is_disabled(conf: &Conf, agent: &[u8]) -> bool {
    let expressions = conf.disabled.get_opt().into_iter().flatten();
    expressions.into_iter().any(|expression| matches!(expression.find(agent), Ok(Some(_))))
}

/// Whether a list of codings has gzip, with a weight above zero. (RFC 9110 §12.5.3, as nginx reads it: `*` is nothing to
/// it, and the first gzip counts)
fn accepts_gzip(list: &[u8]) -> bool {
    let mut from = 0;
    let rest = loop {
        let Some(at) = find_caseless(&list[from..], b"gzip") else { return false };
        let at = from + at;
        if at == 0 || matches!(list[at - 1], b',' | b' ') {
            break &list[at + 4..];
        }
        from = at + 4;
    };
    let rest = rest.trim_ascii_start();
    match rest.split_first() {
        None | Some((b',', _)) => true,
        Some((b';', parameters)) => {
            let parameters = parameters.trim_ascii_start();
            match parameters.split_first() {
                None => true,
                Some((b'q' | b'Q', value)) => value.strip_prefix(b"=").is_some_and(has_weight),
                Some(_) => false,
            }
        }
        Some(_) => false,
    }
}

/// Whether a weight (`0.5`) is above zero, and none that cannot be.
fn has_weight(text: &[u8]) -> bool {
    let end = text.iter().position(|byte| matches!(byte, b',' | b' ')).unwrap_or(text.len());
    match &text[..end] {
        b"1" => true,
        [whole @ (b'0' | b'1'), b'.', digits @ ..] if digits.len() <= 3 && digits.iter().all(u8::is_ascii_digit) => {
            (*whole == b'1') != digits.iter().any(|&digit| digit != b'0')
        }
        _ => false,
    }
}

fn find_caseless(text: &[u8], lower_case: &[u8]) -> Option<usize> {
    text.windows(lower_case.len()).position(|window| window.eq_ignore_ascii_case(lower_case))
}

/// Whether the answer to a proxy is one that `gzip_proxied` names.
fn is_for_proxies(request: &Request, when: u32) -> bool {
    let asks = |flag| when & flag != 0;
    if asks(when::OFF) || asks(when::ANY) {
        return !asks(when::OFF);
    }
    if asks(when::AUTH) && request.header(KnownHeader::Authorization).is_some() {
        return true;
    }
    let head = &request.response;
    if let Some(expires) = head.field(b"expires") {
        let date = head.field(b"date").map_or_else(|| Some(gale_runtime::wall_seconds()), http_date::parse);
        let expired = http_date::parse(expires).zip(date).is_some_and(|(expires, date)| expires < date);
        return asks(when::EXPIRED) && expired;
    }
    if head.field(b"cache-control").is_some() {
        let says = |flag, word: &[u8]| asks(flag) && cache_control_has(head, word);
        return says(when::NO_CACHE, b"no-cache")
            || says(when::NO_STORE, b"no-store")
            || says(when::PRIVATE, b"private");
    }
    !(asks(when::NO_LAST_MODIFIED) && head.last_modified.is_some() || asks(when::NO_ETAG) && !head.etag.is_empty())
}

fn cache_control_has(head: &ResponseHead, word: &[u8]) -> bool {
    let fields = head.fields.iter().filter(|field| field.name.eq_ignore_ascii_case(b"cache-control"));
    let mut words = fields.flat_map(|field| field.value.split(|&byte| byte == b','));
    words.any(|part| {
        let end = part.iter().position(|&byte| byte == b'=').unwrap_or(part.len());
        part[..end].trim_ascii().eq_ignore_ascii_case(word)
    })
}

/// How many bytes went in and came out, when all have; in the request's notes, for `$gzip_ratio`.
#[derive(Default)]
struct Totals {
    taken: Cell<u64>,
    made: Cell<u64>,
}

/// `$gzip_ratio`: with two digits, rounded.
fn ratio(request: &Request, out: &mut Vec<u8>) -> bool {
    let totals = request.notes.get::<Rc<Totals>>().map_or((0, 0), |totals| (totals.taken.get(), totals.made.get()));
    let (taken, made @ 1..) = totals else { return false };
    let hundredths = (taken * 1000 / made + 5) / 10;
    out.extend_from_slice(format!("{}.{:02}", hundredths / 100, hundredths % 100).as_bytes());
    true
}

/// zlib-rs takes less time than zlib and compresses more, but for level 1, which is quicker still and compresses much less:
/// who asks for nginx's lowest level gets the next one.
fn zlib_level(level: u64) -> u32 {
    (level as u32).max(2)
}

/// How much memory for what is made: what is made of a short body leaves in one piece.
fn room_for(length: Option<u64>) -> usize {
    let known = length.and_then(|length| usize::try_from(length).ok());
    known.map_or(*ROOM_BYTES.end(), |length| length.clamp(*ROOM_BYTES.start(), *ROOM_BYTES.end()))
}

/// zlib's deflate in gzip's frame.
struct Deflate {
    level: u32,
    /// From the first byte to the last one.
    compressor: Option<Compress>,
    totals: Rc<Totals>,
}

impl Transform for Deflate {
    /// Measured with zlib-rs 0.6 on a 3 GHz core: text, and a text of two letters, on which long searches find nothing.
    fn effort(&self) -> Effort {
        let (usual_nanos, worst_nanos) = match self.level {
            ..=3 => (13, 25),
            4..=5 => (18, 30),
            6..=7 => (30, 150),
            _ => (45, 2500),
        };
        Effort { usual_nanos, worst_nanos }
    }

    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> io::Result<Step> {
        let level = self.level;
        let compressor = self.compressor.get_or_insert_with(|| take_spare(level));
        let (taken, made) = (compressor.total_in(), compressor.total_out());
        let flush = match until {
            Until::MoreInput => FlushCompress::None,
            Until::Flush => FlushCompress::Sync,
            Until::End => FlushCompress::Finish,
        };
        let status = compressor.compress(input, room, flush).map_err(io::Error::other)?;
        let (taken_in_all, made_in_all) = (compressor.total_in(), compressor.total_out());
        let step = Step {
            taken: (taken_in_all - taken) as usize,
            made: (made_in_all - made) as usize,
            is_done: match until {
                // Room is left when nothing is.
                Until::MoreInput | Until::Flush => ((made_in_all - made) as usize) < room.len(),
                Until::End => status == Status::StreamEnd,
            },
        };
        if status == Status::StreamEnd {
            self.totals.taken.set(taken_in_all);
            self.totals.made.set(made_in_all);
            self.give_back();
        }
        Ok(step)
    }
}

impl Deflate {
    fn give_back(&mut self) {
        if let Some(compressor) = self.compressor.take() {
            let spare = (self.level, compressor);
            // A worker that ends has no use for it.
            let _ = SPARE.try_with(|spares| {
                let mut spares = spares.borrow_mut();
                if spares.len() == SPARE_MAX {
                    spares.remove(0);
                }
                spares.push(spare);
            });
        }
    }
}

impl Drop for Deflate {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// How many compressors a worker keeps: one is in use at a time, if bodies are in memory.
const SPARE_MAX: usize = 2;

/// zlib's largest window.
const WINDOW_BITS: u8 = 15;

thread_local! {
    /// Compressors with their levels; making one costs more than compressing a few kilobytes.
    static SPARE: RefCell<Vec<(u32, Compress)>> = const { RefCell::new(Vec::new()) };
}

fn take_spare(level: u32) -> Compress {
    let spare = SPARE.with_borrow_mut(|spares| {
        let place = spares.iter().position(|(of, _)| *of == level)?;
        Some(spares.swap_remove(place).1)
    });
    match spare {
        Some(mut compressor) => {
            compressor.reset();
            compressor
        }
        None => Compress::new_gzip(Compression::new(level), WINDOW_BITS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codings_are_read_as_nginx_reads_them() {
        for list in [
            "gzip",
            "GZIP",
            "gzip, deflate",
            "deflate,gzip",
            "deflate, gzip",
            "gzip;q=1",
            "gzip;q=1.000",
            "gzip; q=0.001",
            "gzip ; Q=0.5, x",
            "gzip;q=0.1 ",
            "xgzip, gzip",
            "gzip;",
            "gzip; ",
        ] {
            assert!(accepts_gzip(list.as_bytes()), "{list}");
        }
        for list in [
            "",
            "gzi",
            "*",
            "xgzip",
            "gzipx",
            "gzip/1",
            "gzip;q=0",
            "gzip;q=0.000",
            "gzip;q=1.001",
            "gzip;q=2",
            "gzip;q=0.0001",
            "gzip;q",
            "gzip;q=",
            "gzip;x=1",
            "gzip;q=.5",
            "gzip;q=0.x",
            "deflate;gzip",
            "gzip;q=10",
        ] {
            assert!(!accepts_gzip(list.as_bytes()), "{list}");
        }
    }

    #[test]
    fn directives_of_cache_control_are_words() {
        let mut head = ResponseHead::default();
        head.add(b"Cache-Control", b"max-age=3, Private=\"x\"");
        head.add(b"cache-control", b"no-cache");
        assert!(cache_control_has(&head, b"private") && cache_control_has(&head, b"no-cache"));
        assert!(!cache_control_has(&head, b"no-store") && !cache_control_has(&head, b"age"));
    }
}
