//! gzip: compression of responses while they are sent.
//!   gzip on|off;                                             http, server, location, if in location
//!   gzip_comp_level LEVEL;  gzip_min_length LENGTH;          http, server, location
//!   gzip_types TYPE ...;  gzip_buffers NUMBER SIZE;          http, server, location
//!   gzip_vary on|off;  gzip_http_version 1.0|1.1;            http, server, location
//!   gzip_proxied WHEN ...;  gzip_disable REGEX ...;          http, server, location
//!   $gzip_ratio
//! (<https://nginx.org/en/docs/http/ngx_http_gzip_module.html>)
//!
//! `gunzip` and `gzip_static` use [`is_accepted`], too. A short body is gathered and compressed at once, by libdeflate;
//! others in bounded pieces, by zlib-rs ([`Transformed`]). Both run on the loop, never longer than one piece of work
//! may take. A compressor (some 300 KiB) is allocated for the first byte and reused for the next response.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use flate2::{Compress, Compression, FlushCompress, Status};
use gale_base::http_date;
use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, ManyWith, One, Setting, Statement, Takes, Updated, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::media_types::MediaTypes;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError};
use gale_http::request::filters::Change;
use gale_http::request::response::ResponseHead;
use gale_http::request::transform::{ROOM_BYTES, Step, Transform, Transformed, Until};
use gale_http::variables::Variable;
use gale_http::variables::regex::Regex;
use gale_protocol::request::{KnownHeader, Version};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Effort};
use libdeflater::{CompressionLvl, Compressor};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_gzip_filter",
    directives: DIRECTIVES,
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[Variable::named("gzip_ratio", |request, _, out| ratio(request, out))],
        filters: &[&Change { applies: |conf: &Conf| *conf.gzip.get(), run: compress }],
        ..HttpPart::EMPTY
    }],
};

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "gzip",
        contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Enables or disables gzipping of responses.",
        store: &One { parse: values::flag, slot: slot!(Conf, gzip) },
    },
    Directive {
        name: "gzip_buffers",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(2),
        body: BlockBody::None,
        default: "32 4k",
        about: "Sets the number and size of the buffers used to compress a response.",
        store: &One { parse: buffers, slot: slot!(Conf, buffer_bytes) },
    },
    Directive {
        name: "gzip_comp_level",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "1",
        about: "Sets the gzip compression level, from 1 to 9.",
        store: &One { parse: |statement| values::number_between(statement, 1, 9), slot: slot!(Conf, level) },
    },
    Directive {
        name: "gzip_min_length",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "20",
        about: "Sets the minimum length of a response that is gzipped, as given by Content-Length.",
        store: &One { parse: values::size, slot: slot!(Conf, min_length) },
    },
    Directive {
        name: "gzip_types",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "text/html",
        about: "Sets the MIME types of responses that are gzipped, in addition to text/html; * matches any type.",
        store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, types) },
    },
    Directive {
        name: "gzip_vary",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Flag,
        body: BlockBody::None,
        default: "off",
        about: "Enables or disables \"Vary: Accept-Encoding\" if gzip, gunzip or gzip_static is active.",
        store: &One { parse: values::flag, slot: slot!(Conf, vary) },
    },
    Directive {
        name: "gzip_http_version",
        contexts: Contexts::ANYWHERE,
        takes: Takes::Exactly(1),
        body: BlockBody::None,
        default: "1.1",
        about: "Sets the minimum HTTP version of a request required to compress the response.",
        store: &One { parse: http_version, slot: slot!(Conf, http_version) },
    },
    Directive {
        name: "gzip_proxied",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "off",
        about: "Sets when responses to proxied requests (those with a Via field) are gzipped.",
        store: &Updated { parse: proxied, slot: slot!(Conf, proxied) },
    },
    Directive {
        name: "gzip_disable",
        contexts: Contexts::ANYWHERE,
        takes: Takes::AtLeast(1),
        body: BlockBody::None,
        default: "",
        about: "Disables gzipping for requests whose User-Agent matches one of the regular expressions, or msie6.",
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

/// Bits of the conditions in `gzip_proxied`.
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

fn proxied(builder: &mut Builder, statement: &Statement, earlier: Option<&u32>) -> Result<u32, Diagnostic> {
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
    values::bitmask(statement, &choices, earlier, builder)
}

/// Parses `gzip_disable`; several of a level add up.
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

/// Inherits the user agents and the expression of `gzip_disable` separately.
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
    if !matches!(head.status, 200 | 304 | 403 | 404)
        || head.field(ResponseField::ContentEncoding).is_some_and(|value| !value.is_empty())
        || length.is_some_and(|length| length < *conf.min_length.get())
        || !MediaTypes::contain(conf.types.get(), &head.content_type)
    {
        return;
    }
    add_vary(request, *conf.vary.get());
    if !is_accepted_by(request, conf) {
        return;
    }
    request.response.add(ResponseField::ContentEncoding, b"gzip");
    request.response.will_change();
    let totals = Rc::new(Totals::default());
    request.notes.put(Rc::clone(&totals));
    let level = *conf.level.get() as u32;
    let room_bytes = room_for(length).min(*conf.buffer_bytes.get());
    let deflate = Deflate {
        level,
        gather_max: gather_max(level, length, body.length(), *conf.buffer_bytes.get()),
        gathered: Buffer::new(),
        stream: None,
        totals,
    };
    *body = Body::Stream(Box::new(Transformed::new(std::mem::take(body), deflate, room_bytes)));
}

/// Returns the number of bytes of a body to gather for compressing them at once: at most one piece of work, and all or
/// nothing if the length is known. A body from another server is not delayed for more bytes than zlib would hold back.
/// `room` is the size of `gzip_buffers`.
fn gather_max(level: u32, announced: Option<u64>, at_hand: Option<u64>, room: usize) -> usize {
    let at_once = whole_effort(level).units_at_once().min(room);
    let fits = |length: u64| usize::try_from(length).is_ok_and(|length| length <= at_once);
    match announced {
        Some(length) if !fits(length) => 0,
        _ if at_hand.is_some() => at_once,
        _ => at_once.min(GATHERED_MAX_OF_STREAM),
    }
}

/// zlib emits its first block after 16 Ki literals and matches, which takes more text than this.
const GATHERED_MAX_OF_STREAM: usize = 32 * 1024;

/// Notes for `gzip_vary` that the response depends on `Accept-Encoding`.
pub fn note_vary(request: &mut Request) {
    let is_on = has_vary(request);
    add_vary(request, is_on);
}

fn add_vary(request: &mut Request, is_on: bool) {
    let says_so = |value: &[u8]| value.eq_ignore_ascii_case(b"accept-encoding");
    if is_on && !request.response.values(ResponseField::Vary).any(says_so) {
        request.response.add(ResponseField::Vary, b"Accept-Encoding");
    }
}

/// Returns `true` if a response that depends on `Accept-Encoding` gets a `Vary` field.
pub fn has_vary(request: &Request) -> bool {
    request.scope().conf_of::<Conf>().is_some_and(|conf| *conf.vary.get())
}

/// Returns `true` if the client accepts gzip and the configuration allows it. Never for a subrequest, whose output is
/// compressed as part of the whole response.
pub fn is_accepted(request: &Request) -> bool {
    request.scope().conf_of::<Conf>().is_some_and(|conf| is_accepted_by(request, conf))
}

fn is_accepted_by(request: &Request, conf: &Conf) -> bool {
    request.is_main()
        && request.header(KnownHeader::AcceptEncoding).is_some_and(accepts_gzip)
        && !(conf.msie6_disabled.get_opt() == Some(&true) && request.browser().is_msie6())
        && request.version() >= *conf.http_version.get()
        && (request.header(KnownHeader::Via).is_none() || is_for_proxies(request, *conf.proxied.get()))
        && !is_disabled(conf, request)
}

/// Returns `true` if `gzip_disable` matches. An expression that exceeds PCRE2's limits does not match, as in nginx.
fn is_disabled(conf: &Conf, request: &Request) -> bool {
    let Some(expressions) = conf.disabled.get_opt() else { return false };
    let agent = request.header(KnownHeader::UserAgent);
    agent.is_some_and(|agent| expressions.iter().any(|expression| expression.is_match(agent) == Ok(true)))
}

/// Returns `true` if `Accept-Encoding` has gzip with a weight above zero. (RFC 9110 §12.5.3, as nginx reads it: `*` is
/// ignored, and the first gzip counts)
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

/// Returns `true` if a weight (`0.5`) is valid and above zero.
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

/// Returns `true` if `gzip_proxied` allows this response to a proxy.
fn is_for_proxies(request: &Request, when: u32) -> bool {
    let asks = |flag| when & flag != 0;
    if asks(when::OFF) || asks(when::ANY) {
        return !asks(when::OFF);
    }
    if asks(when::AUTH) && request.header(KnownHeader::Authorization).is_some() {
        return true;
    }
    let head = &request.response;
    if let Some(expires) = head.field(ResponseField::Expires) {
        let date = head.field(ResponseField::Date).map_or_else(|| Some(gale_runtime::wall_seconds()), http_date::parse);
        let expired = http_date::parse(expires).zip(date).is_some_and(|(expires, date)| expires < date);
        return asks(when::EXPIRED) && expired;
    }
    if head.has(ResponseField::CacheControl) {
        let says = |flag, word: &[u8]| asks(flag) && cache_control_has(head, word);
        return says(when::NO_CACHE, b"no-cache")
            || says(when::NO_STORE, b"no-store")
            || says(when::PRIVATE, b"private");
    }
    !(asks(when::NO_LAST_MODIFIED) && head.tells_last_modified() || asks(when::NO_ETAG) && !head.etag.is_empty())
}

fn cache_control_has(head: &ResponseHead, word: &[u8]) -> bool {
    let values = head.values(ResponseField::CacheControl);
    let mut words = values.flat_map(|value| value.split(|&byte| byte == b','));
    words.any(|part| {
        let end = part.iter().position(|&byte| byte == b'=').unwrap_or(part.len());
        part[..end].trim_ascii().eq_ignore_ascii_case(word)
    })
}

/// Numbers of bytes before and after compression, set at the end of the body; a note for `$gzip_ratio`.
#[derive(Default)]
struct Totals {
    taken: Cell<u64>,
    made: Cell<u64>,
}

impl Totals {
    fn set(&self, taken: u64, made: u64) {
        self.taken.set(taken);
        self.made.set(made);
    }
}

/// Appends `$gzip_ratio`, rounded to two digits.
fn ratio(request: &Request, out: &mut Vec<u8>) -> bool {
    let totals = request.notes.get::<Rc<Totals>>().map_or((0, 0), |totals| (totals.taken.get(), totals.made.get()));
    let (taken, made @ 1..) = totals else { return false };
    let hundredths = (taken * 1000 / made + 5) / 10;
    out.extend_from_slice(format!("{}.{:02}", hundredths / 100, hundredths % 100).as_bytes());
    true
}

/// Returns the size of the output buffer: the output of a short body leaves in one piece, even if it is not shorter.
fn room_for(length: Option<u64>) -> usize {
    let known = length.and_then(|length| usize::try_from(length).ok());
    let room = |length: usize| length.saturating_add(length / 1024 + FRAME_BYTES);
    known.map_or(*ROOM_BYTES.end(), room).clamp(*ROOM_BYTES.start(), *ROOM_BYTES.end())
}

/// gzip's header and trailer, and the headers of a few blocks.
const FRAME_BYTES: usize = 48;

/// Deflate in gzip's format.
///
/// ```text
///   gathering ── end of body ──────────────────────────────────▶ compressed at once, by libdeflate
///        └───── too much, a flush, or too little room ───▶ streaming: gathered bytes, then the input, by zlib-rs
/// ```
struct Deflate {
    level: u32,
    /// Maximum number of bytes to gather; 0 while streaming.
    gather_max: usize,
    gathered: Buffer,
    /// Compressor; while streaming, from the first byte to the last one.
    stream: Option<Compress>,
    totals: Rc<Totals>,
}

impl Transform for Deflate {
    fn effort(&self) -> Effort {
        if self.gather_max > 0 { whole_effort(self.level) } else { stream_effort(self.level) }
    }

    /// Gathering costs no units.
    fn units(&self, input: &[u8], until: Until, _: usize) -> usize {
        match (self.gather_max > 0, until) {
            (true, Until::End) => self.gathered.len(),
            (true, Until::MoreInput) if self.may_gather(input) => 0,
            (_, Until::Pause) => 0,
            _ if !self.gathered.is_empty() => self.next_of_stream(self.gathered.readable()).len(),
            _ => self.next_of_stream(input).len(),
        }
    }

    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
        if until == Until::Pause {
            // zlib's pending output could be forced out by a flush only, which costs bytes.
            return Ok(Step { consumed: 0, produced: 0, units: 0, is_done: true });
        }
        if self.gather_max > 0 {
            if until == Until::MoreInput && self.may_gather(input) {
                self.gathered.append(input)?;
                return Ok(Step { consumed: input.len(), produced: 0, units: 0, is_done: true });
            }
            if until == Until::End
                && let Some(made) = compress_whole(self.level, self.gathered.readable(), room)
            {
                let units = self.gathered.len();
                self.totals.set(units as u64, made as u64);
                self.gathered.clear();
                return Ok(Step { consumed: 0, produced: made, units, is_done: true });
            }
            self.gather_max = 0;
        }
        if self.gathered.is_empty() {
            return self.step_of_stream(input, until, room);
        }
        let mut gathered = std::mem::take(&mut self.gathered);
        let step = self.step_of_stream(gathered.readable(), Until::MoreInput, room)?;
        gathered.consume(step.consumed);
        self.gathered = gathered;
        Ok(Step { consumed: 0, is_done: false, ..step })
    }
}

impl Deflate {
    fn may_gather(&self, input: &[u8]) -> bool {
        self.gathered.len() + input.len() <= self.gather_max
    }

    /// Returns the part of the input that one step takes at most.
    fn next_of_stream<'i>(&self, input: &'i [u8]) -> &'i [u8] {
        &input[..input.len().min(stream_effort(self.level).units_at_once())]
    }

    fn step_of_stream(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
        let input = self.next_of_stream(input);
        let level = zlib_level(self.level);
        let stream = self.stream.get_or_insert_with(|| take_spare(level));
        let (taken, made) = (stream.total_in(), stream.total_out());
        let flush = match until {
            Until::MoreInput | Until::Pause => FlushCompress::None,
            Until::Flush => FlushCompress::Sync,
            Until::End => FlushCompress::Finish,
        };
        let status = stream.compress(input, room, flush).map_err(|error| BodyError::Other(error.to_string()))?;
        let (taken_in_all, made_in_all) = (stream.total_in(), stream.total_out());
        let (taken, made) = ((taken_in_all - taken) as usize, (made_in_all - made) as usize);
        let is_done = match until {
            // Unused room means that zlib has no more output.
            Until::MoreInput | Until::Pause | Until::Flush => made < room.len(),
            Until::End => status == Status::StreamEnd,
        };
        if status == Status::StreamEnd {
            self.totals.set(taken_in_all, made_in_all);
            self.give_back();
        }
        Ok(Step { consumed: taken, produced: made, units: taken, is_done })
    }

    fn give_back(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Fails only while the thread ends, which needs no spare compressors.
            let _ = SPARE.try_with(|spares| keep(&mut spares.borrow_mut(), (zlib_level(self.level), stream)));
        }
    }
}

impl Drop for Deflate {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// Effort of libdeflate, measured on a 3 GHz core: usual for text, worst of a text of two letters, of random bytes and
/// of patterns.
fn whole_effort(level: u32) -> Effort {
    let (usual_nanos, worst_nanos) = match level {
        ..=1 => (4, 12),
        2..=3 => (6, 15),
        4..=5 => (9, 25),
        6 => (12, 40),
        7 => (16, 60),
        _ => (50, 450),
    };
    Effort { usual_nanos, worst_nanos }
}

/// Effort of zlib-rs 0.6, measured likewise.
fn stream_effort(level: u32) -> Effort {
    let (usual_nanos, worst_nanos) = match level {
        ..=3 => (13, 25),
        4..=5 => (18, 30),
        6..=7 => (30, 150),
        _ => (45, 2500),
    };
    Effort { usual_nanos, worst_nanos }
}

/// Returns the level for zlib-rs. It is faster than zlib and compresses better, except at level 1, which is faster
/// still and compresses much worse; nginx's level 1 therefore becomes level 2.
fn zlib_level(level: u32) -> u32 {
    level.max(2)
}

/// Maximum number of spare compressors of each kind in a worker: one is in use at a time if bodies are in memory.
const SPARE_MAX: usize = 2;

/// zlib's largest window.
const WINDOW_BITS: u8 = 15;

thread_local! {
    /// Spare compressors with their levels; creating one costs more than compressing a few kilobytes.
    static SPARE: RefCell<Vec<(u32, Compress)>> = const { RefCell::new(Vec::new()) };
    /// Compressors of whole bodies; none is in use between two steps.
    static WHOLE: RefCell<Vec<(u32, Compressor)>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a compressor; the oldest one is dropped if there are too many.
fn keep<T>(spares: &mut Vec<T>, spare: T) {
    if spares.len() == SPARE_MAX {
        spares.remove(0);
    }
    spares.push(spare);
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

/// Compresses a body at once. Returns the length, or `None` if the output does not fit.
fn compress_whole(level: u32, body: &[u8], room: &mut [u8]) -> Option<usize> {
    WHOLE.with_borrow_mut(|compressors| {
        let place = compressors.iter().position(|(of, _)| *of == level).unwrap_or_else(|| {
            let level_of_library = CompressionLvl::new(level as i32).expect("it knows all of gzip's levels, and more");
            keep(compressors, (level, Compressor::new(level_of_library)));
            compressors.len() - 1
        });
        compressors[place].1.gzip_compress(body, room).ok()
    })
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

    /// Compresses these pieces with output buffers of this size. Returns the output, and `true` if it was compressed at
    /// once.
    fn compressed(level: u32, gather_max: usize, room_bytes: usize, pieces: &[(&[u8], Until)]) -> (Vec<u8>, bool) {
        let totals = Rc::default();
        let mut deflate = Deflate { level, gather_max, gathered: Buffer::new(), stream: None, totals };
        let (mut out, mut room) = (Vec::new(), vec![0; room_bytes]);
        for &(piece, until) in pieces.iter().chain(&[(&b""[..], Until::End)]) {
            let mut rest = piece;
            loop {
                let units = deflate.units(rest, until, room_bytes);
                let step = deflate.step(rest, until, &mut room).unwrap();
                assert!(step.units <= units, "{step:?}, {units}");
                out.extend_from_slice(&room[..step.produced]);
                rest = &rest[step.consumed..];
                if step.is_done && rest.is_empty() {
                    break;
                }
            }
        }
        let taken: usize = pieces.iter().map(|(piece, _)| piece.len()).sum();
        assert_eq!((deflate.totals.taken.get(), deflate.totals.made.get()), (taken as u64, out.len() as u64));
        (out, deflate.gather_max > 0)
    }

    #[test]
    fn gathered_body_becomes_a_stream_when_it_must() {
        let text: Vec<u8> = (0..100_000_u32).flat_map(|number| number.to_string().into_bytes()).collect();
        let noise: Vec<u8> = (0..60_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let (half, rest) = text[..50_000].split_at(20_000);
        let more = |piece| (piece, Until::MoreInput);
        let flush = (&b""[..], Until::Flush);
        for level in 1..=9 {
            for (pieces, gather_max, room_bytes, is_at_once) in [
                (vec![], 10, 1024, true),
                (vec![more(half), more(rest)], 50_000, 65_536, true),
                // Too much data; a flush in the middle, at the start, and at the end.
                (vec![more(half), more(rest)], 49_999, 65_536, false),
                (vec![more(half), flush, more(rest)], 50_000, 65_536, false),
                (vec![flush, more(half)], 50_000, 65_536, false),
                (vec![more(half), flush], 50_000, 65_536, false),
                // The output exceeds the buffer.
                (vec![more(&noise)], 60_000, 1024, false),
                (vec![more(half)], 0, 1024, false),
            ] {
                let whole = pieces.iter().flat_map(|(piece, _)| piece.to_vec()).collect::<Vec<u8>>();
                let (packed, at_once) = compressed(level, gather_max, room_bytes, &pieces);
                assert_eq!(at_once, is_at_once, "level {level}, {gather_max}");
                let mut unpacked = Vec::new();
                std::io::copy(&mut flate2::read::GzDecoder::new(&packed[..]), &mut unpacked).unwrap();
                assert!(unpacked == whole, "level {level}, {gather_max}");
            }
        }
    }

    #[test]
    fn body_too_long_for_one_piece_is_not_gathered() {
        assert_eq!(gather_max(1, Some(125_000), Some(125_000), usize::MAX), 125_000);
        assert_eq!(gather_max(1, Some(125_001), Some(125_001), usize::MAX), 0);
        assert_eq!(gather_max(1, None, None, usize::MAX), GATHERED_MAX_OF_STREAM);
        assert_eq!(gather_max(9, Some(5000), Some(5000), usize::MAX), 0);
        assert_eq!(gather_max(9, None, None, usize::MAX), 4444);
        assert_eq!(gather_max(1, Some(100_000), Some(100_000), 64 * 1024), 0, "gzip_buffers");
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
