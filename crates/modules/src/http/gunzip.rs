//! gunzip: decompression of gzip responses for clients that do not accept gzip.
//!   gunzip on|off;  gunzip_buffers NUMBER SIZE;              http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_gunzip_module.html>)
//!
//! A few bytes may become gigabytes: the output buffer is bounded and sent before more is inflated, and the work counts
//! against the turn's budget. Only `Content-Encoding: gzip` alone is supported.

use flate2::{Decompress, FlushDecompress, Status};
use gale_config::{Body as BlockBody, Contexts, Diagnostic, One, Setting, Statement, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError};
use gale_http::request::filters::Change;
use gale_http::request::transform::{Step, Transform, Transformed, Until};
use gale_protocol::response::ResponseField;
use gale_runtime::Effort;

use super::gzip;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_gunzip_filter",
    directives: &[
        Directive {
            name: "gunzip",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables decompression of gzipped responses for clients that do not support gzip.",
            store: &One { parse: values::flag, slot: slot!(Conf, gunzip) },
        },
        Directive {
            name: "gunzip_buffers",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(2),
            body: BlockBody::None,
            default: "32 4k",
            about: "Sets the number and size of the buffers used to decompress a response; at most 64k in total is \
                    used.",
            store: &One { parse: buffers, slot: slot!(Conf, buffer_bytes) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        filters: &[&Change { applies: |conf: &Conf| *conf.gunzip.get(), run: inflate }],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    gunzip: Setting<bool>,
    buffer_bytes: Setting<usize>,
}

fn buffers(statement: &Statement) -> Result<usize, Diagnostic> {
    let (count, size) = values::buffers(statement)?;
    Ok(usize::try_from(count.saturating_mul(size)).unwrap_or(usize::MAX))
}

fn inflate(request: &mut Request, conf: &Conf, body: &mut Body) {
    let is_gzip = |value: &[u8]| value.eq_ignore_ascii_case(b"gzip");
    if !request.response.field(ResponseField::ContentEncoding).is_some_and(is_gzip) {
        return;
    }
    gzip::note_vary(request);
    if gzip::is_accepted(request) {
        return;
    }
    request.response.remove(ResponseField::ContentEncoding);
    request.response.will_change();
    let inflate = Inflate::default();
    *body = Body::Stream(Box::new(Transformed::new(std::mem::take(body), inflate, *conf.buffer_bytes.get())));
}

/// zlib's largest window.
const WINDOW_BITS: u8 = 15;

/// zlib's inflate, over consecutive gzip members.
#[derive(Default)]
struct Inflate {
    /// Present from the first byte of a member to the last one.
    inflater: Option<Decompress>,
    /// `true` after the end of a member, where the response may end.
    may_end: bool,
}

impl Transform for Inflate {
    fn effort(&self) -> Effort {
        Effort { usual_nanos: 3, worst_nanos: 30 }
    }

    /// Counts the output, since one byte of input may become thousands.
    fn units(&self, _: &[u8], _: Until, room_bytes: usize) -> usize {
        room_bytes
    }

    fn step(&mut self, input: &[u8], until: Until, room: &mut [u8]) -> Result<Step, BodyError> {
        if self.inflater.is_none() && self.may_end && input.is_empty() {
            return Ok(Step { consumed: 0, produced: 0, units: 0, is_done: true });
        }
        let inflater = self.inflater.get_or_insert_with(|| Decompress::new_gzip(WINDOW_BITS));
        let (taken, made) = (inflater.total_in(), inflater.total_out());
        let status = inflater.decompress(input, room, FlushDecompress::None);
        let status = status.map_err(|error| BodyError::Other(format!("inflate() failed: {error}")))?;
        let taken = (inflater.total_in() - taken) as usize;
        let made = (inflater.total_out() - made) as usize;
        if status == Status::StreamEnd {
            self.inflater = None;
            self.may_end = true;
        }
        // Unused room means that the input so far yields no more output.
        let is_dry = made < room.len();
        if is_dry && until == Until::End && self.inflater.is_some() {
            return Err(BodyError::Other("inflate() has no end on response end".to_owned()));
        }
        Ok(Step { consumed: taken, produced: made, units: made, is_done: is_dry })
    }
}
