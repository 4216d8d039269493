//! mp4: a part of an MP4 film between two times, with an index of its own.
//!   mp4;                                   location
//!   mp4_buffer_size SIZE;  mp4_max_buffer_size SIZE;  mp4_start_key_frame on|off;     http, server, location
//!   mp4_limit_rate on|off|FACTOR;  mp4_limit_rate_after TIME;                         http, server, location
//!   ?start=SECONDS[.FRACTION]  ?end=SECONDS[.FRACTION]
//! (<https://nginx.org/en/docs/http/ngx_http_mp4_module.html>)
//!
//! ```text
//!   the file     ftyp  moov (index of all)  mdat ───────────────────────────────────
//!                                                        │     wanted samples      │
//!   the response ftyp  moov (index of these)  mdat ──────┴─── sent from the file ──┘
//! ```
//!
//! A thread of the pool reads the index and makes the new one (`movie.rs`, `track.rs`); the loop only sends. The new
//! index stays in memory until the client has received it; all indexes in memory and in the making together have a
//! bound (`INDEXES`).

#[cfg(test)]
mod film_tests;
pub mod movie;
mod track;

use std::cell::RefCell;
use std::io;
use std::time::Duration;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_base::units;
use gale_config::{Body as Block, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::budget::{Budget, BudgetShare};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, FilePiece};
use gale_http::request::files::open_files::{self, Opened};
use gale_http::request::limit_rate::RateAfter;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_runtime::{Bytes, Device, default_pool};

use super::flv::{path_of_video, with_head};
use super::{static_files, variables};
use movie::{Cut, Problem, Source};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_mp4",
    directives: &[
        Directive {
            name: "mp4",
            contexts: Contexts::LOCATION,
            takes: Takes::Exactly(0),
            body: Block::None,
            default: "",
            about: "Serves MP4 files, or the part given by the request arguments start and end.",
            store: &Custom(|conf: &mut Conf, _, _| {
                conf.is_on = true;
                Ok(())
            }),
        },
        Directive {
            name: "mp4_buffer_size",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "512k",
            about: "Sets the size of the index (moov atom) that is always accepted, whatever mp4_max_buffer_size is.",
            store: &One { parse: values::size, slot: slot!(Conf, buffer_size) },
        },
        Directive {
            name: "mp4_max_buffer_size",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "10m",
            about: "Sets the maximum size of the index (moov atom) of a file.",
            store: &One { parse: values::size, slot: slot!(Conf, max_buffer_size) },
        },
        Directive {
            name: "mp4_start_key_frame",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: Block::None,
            default: "off",
            about: "Enables or disables starting the output with a key frame; an edit list makes players skip the time \
                    before start.",
            store: &One { parse: values::flag, slot: slot!(Conf, start_key_frame) },
        },
        Directive {
            name: "mp4_limit_rate",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "off",
            about: "Limits the rate of response transmission to a multiple of the file's average bitrate; on means \
                    1.1.",
            store: &One { parse: limit_rate, slot: slot!(Conf, limit_rate) },
        },
        Directive {
            name: "mp4_limit_rate_after",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: Block::None,
            default: "60s",
            about: "Sets the initial amount of media, in playback time, after which mp4_limit_rate applies.",
            store: &One { parse: values::time_ms, slot: slot!(Conf, limit_rate_after) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(Phase::Content, &Wait { applies: |conf: &Conf| conf.is_on, first: at_once, then: serve })],
        ..HttpPart::EMPTY
    }],
};

/// Memory of the indexes for all clients together: a few of the longest, or thousands of usual ones.
static INDEXES: Budget = Budget::new(256 << 20);

#[derive(Default)]
struct Conf {
    /// Not inherited: a location's content handler is its own.
    is_on: bool,
    buffer_size: Setting<u64>,
    max_buffer_size: Setting<u64>,
    start_key_frame: Setting<bool>,
    /// In thousandths; 0 for no limit.
    limit_rate: Setting<u64>,
    limit_rate_after: Setting<Duration>,
}

/// Parses `mp4_limit_rate`.
fn limit_rate(statement: &Statement) -> Result<u64, Diagnostic> {
    let word = &statement.args[0];
    match &**word.text {
        b"off" => Ok(0),
        b"on" => Ok(1_100),
        factor => units::parse_fixed_point(factor, 3)
            .ok_or_else(|| Diagnostic::emerg(format!("invalid value \"{}\"", word.text)).at(word.span)),
    }
}

/// Answers without waiting: passes on requests of other handlers, and opens a whole film that the kernel has in its
/// cache.
fn at_once(request: &mut Request, conf: &Conf) -> Option<Flow> {
    let path = match path_of_video(request) {
        Ok(path) => path,
        Err(flow) => return Some(flow),
    };
    if cut(request, conf).is_some() || *conf.limit_rate.get() > 0 {
        return None;
    }
    let opened = open_files::try_open(request, &path)?;
    Some(opened_or_not(request, &path, opened).unwrap_or_else(|film| static_files::send(request, film, &path)))
}

fn serve<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        let path = match path_of_video(request) {
            Ok(path) => path,
            Err(flow) => return flow,
        };
        let opened = open_files::open(request, &path).await;
        let film = match opened_or_not(request, &path, opened) {
            Ok(flow) => return flow,
            Err(film) => film,
        };
        let device = Device::number(film.metadata.device);
        let body = match static_files::send(request, film, &path) {
            Flow::Answer(body) => body,
            flow => return flow,
        };
        let limit = match *conf.limit_rate.get() {
            0 => None,
            _ => Limit::find(request, conf, &body, device).await,
        };
        let body = match cut(request, conf) {
            None => body,
            Some(cut) => match send_part(request, &path, cut, body, device).await {
                Ok(body) => body,
                Err(status) => {
                    request.response.clear_entity();
                    return Flow::Respond(status);
                }
            },
        };
        if let Some(limit) = limit {
            request.set_limit_rate(limit.per_second);
            request.notes.put(RateAfter(limit.after));
        }
        Flow::Answer(body)
    })
}

/// Rate limit of a film.
#[derive(Debug, PartialEq, Eq)]
struct Limit {
    per_second: u64,
    /// Number of bytes before the limit starts.
    after: u64,
}

impl Limit {
    /// Returns the limit for a film, or `None` if its duration is unknown or the pool is full.
    async fn find(request: &Request, conf: &Conf, body: &Body, device: Device) -> Option<Limit> {
        let film = Film::of(body);
        let size = request.response.content_length.unwrap_or(0);
        let duration_ms = default_pool().run_for(device, move || movie::duration_ms(&film, size)).await;
        let duration_ms = duration_ms.unwrap_or_else(|refused| {
            request.log(Level::Error, format_args!("{refused}"));
            None
        })?;
        Some(Limit::new(size, duration_ms, *conf.limit_rate.get(), *conf.limit_rate_after.get()))
    }

    /// Returns the limit for a film of this size and duration.
    fn new(size: u64, duration_ms: u64, factor_thousandths: u64, after: Duration) -> Limit {
        let part = |of_size: u128| u64::try_from(u128::from(size) * of_size / u128::from(duration_ms));
        Limit {
            // The rate is at least one byte a second.
            per_second: part(factor_thousandths.into()).unwrap_or(u64::MAX).max(1),
            after: part(after.as_millis().min(u64::MAX.into())).unwrap_or(u64::MAX),
        }
    }
}

/// Returns the opened film, or the flow of another response.
fn opened_or_not(request: &mut Request, path: &[u8], opened: io::Result<Opened>) -> Result<Flow, Opened> {
    match opened {
        Ok(file) if file.metadata.is_regular() => Err(file),
        Ok(_) => Ok(Flow::Next),
        Err(error) => Ok(Flow::Respond(static_files::refusal(request, path, &error))),
    }
}

/// Returns the wanted part of the film, or `None` for all of it.
fn cut(request: &Request, conf: &Conf) -> Option<Cut> {
    let time = |name| variables::argument(&request.args, name).and_then(parse_time_ms);
    let end_ms = time(b"end").filter(|&end| end > 0);
    let start_ms = time(b"start").or(end_ms.map(|_| 0))?;
    Some(Cut {
        start_ms,
        length_ms: end_ms.and_then(|end| end.checked_sub(start_ms)).filter(|&length| length > 0),
        begins_with_key_frame: *conf.start_key_frame.get(),
        index_bytes_max: (*conf.buffer_size.get()).max(*conf.max_buffer_size.get()),
    })
}

/// Parses seconds with a fraction into milliseconds; further digits, which players send, are ignored.
fn parse_time_ms(text: &[u8]) -> Option<u64> {
    const PLACES: usize = 3;
    let dot = text.iter().position(|&byte| byte == b'.').unwrap_or(text.len());
    let (whole, fraction) = (&text[..dot], text.get(dot + 1..).unwrap_or_default());
    if text.is_empty() || !whole.iter().chain(fraction).all(u8::is_ascii_digit) {
        return None;
    }
    let digits = whole.iter().chain(fraction.iter().chain([b'0'; PLACES].iter()).take(PLACES));
    digits.map(|digit| u64::from(digit - b'0')).try_fold(0_u64, |value, digit| {
        // As in nginx, a time is a signed number.
        value.checked_mul(10)?.checked_add(digit).filter(|&value| value <= i64::MAX as u64)
    })
}

/// The film's bytes, read by blocking calls, and the memory reserved for cutting its index.
struct Film {
    contents: Contents,
    work: RefCell<Option<BudgetShare>>,
}

enum Contents {
    Bytes(Bytes),
    File(FilePiece),
}

impl Film {
    fn of(body: &Body) -> Film {
        let contents = match body {
            Body::Bytes(bytes) => Contents::Bytes(bytes.clone()),
            Body::File(piece) => Contents::File(piece.clone()),
            _ => Contents::Bytes(Bytes::default()),
        };
        Film { contents, work: RefCell::default() }
    }
}

impl Source for Film {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        match &self.contents {
            Contents::Bytes(bytes) => {
                let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
                let count = rest.len().min(into.len());
                into[..count].copy_from_slice(&rest[..count]);
                Ok(count)
            }
            Contents::File(FilePiece { file, offset: begin, .. }) => file.read_blocking(begin + offset, into),
        }
    }

    fn reserve(&self, bytes: usize) -> bool {
        let share = INDEXES.take(bytes);
        let is_there = share.is_some();
        self.work.replace(share);
        is_there
    }
}

/// Returns the part of the film as a body, and sets the response's length. The error is a status.
async fn send_part(request: &mut Request, path: &[u8], cut: Cut, body: Body, device: Device) -> Result<Body, u16> {
    let film = Film::of(&body);
    let size = request.response.content_length.unwrap_or(0);
    let name = String::from_utf8_lossy(path).into_owned();
    if INDEXES.is_full() {
        return Err(no_room(request));
    }
    let made = default_pool().run_for(device, move || {
        let part = movie::cut(&film, size, &cut, &name)?;
        // Releases the memory reserved for cutting.
        drop(film);
        Ok(part.map(|part| (in_room(part.head), part.data)))
    });
    let made = made.await.map_err(|refused| {
        request.log(Level::Error, format_args!("{refused}"));
        503_u16
    })?;
    match made {
        Ok(None) => Ok(body),
        Ok(Some((Some(head), data))) => {
            request.response.content_length = Some(head.len() as u64 + data.end - data.start);
            Ok(with_head(head, body, data.start, data.end))
        }
        Ok(Some((None, _))) | Err(Problem::NoMemory) => Err(no_room(request)),
        Err(Problem::Wrong(text)) => {
            request.log(Level::Error, format_args!("{text}"));
            Err(500)
        }
        Err(Problem::NotRead(error)) => {
            let error = OsErrorText(&error);
            request.log(Level::Crit, format_args!("pread() \"{}\" failed {error}", BStr::new(path)));
            Err(500)
        }
    }
}

fn in_room(head: Vec<u8>) -> Option<Bytes> {
    Some(INDEXES.take(head.len())?.hold(head))
}

fn no_room(request: &Request) -> u16 {
    request.log(Level::Error, format_args!("indexes of MP4 files that are being sent take too much memory"));
    503
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_a_multiple_of_the_bytes_of_a_second() {
        let seconds = Duration::from_secs;
        assert_eq!(Limit::new(1_000_000, 100_000, 1_100, seconds(60)), Limit { per_second: 11_000, after: 600_000 });
        assert_eq!(Limit::new(10, 1_000_000, 1_000, seconds(0)), Limit { per_second: 1, after: 0 });
        let large = Limit::new(u64::MAX, 1, u64::MAX, Duration::MAX);
        assert_eq!(large, Limit { per_second: u64::MAX, after: u64::MAX });
    }

    #[test]
    fn times_are_seconds_with_thousandths() {
        for (text, time) in [
            ("0", Some(0)),
            ("12", Some(12_000)),
            ("1.5", Some(1_500)),
            (".25", Some(250)),
            ("3.", Some(3_000)),
            ("1.99999999999999999999999", Some(1_999)),
            ("9223372036854775.807", Some(i64::MAX as u64)),
            ("9223372036854775.808", None),
            ("99999999999999999999", None),
            ("", None),
            ("-1", None),
            ("1,5", None),
            ("1.2.3", None),
            ("1e3", None),
        ] {
            assert_eq!(parse_time_ms(text.as_bytes()), time, "{text}");
        }
    }
}
