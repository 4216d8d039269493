//! ssi: server-side includes: commands in documents that include others, show variables, or leave parts out.
//!   ssi on|off;                             http, server, location, if in location
//!   ssi_last_modified on|off;               http, server, location
//!   ssi_min_file_chunk SIZE;                http, server, location
//!   ssi_silent_errors on|off;               http, server, location
//!   ssi_types TYPE ...;                     http, server, location
//!   ssi_value_length LENGTH;                http, server, location
//!   $date_local, $date_gmt                  the time in the format of `config timefmt`
//! (<https://nginx.org/en/docs/http/ngx_http_ssi_module.html>)
//!
//! `gale_protocol::ssi` parses commands, `document.rs` executes them, and `page.rs` has the state that the documents of
//! a request share. `ssi_min_file_chunk` is accepted without effect: a text that was read for parsing is sent from
//! memory.

mod document;
mod page;

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;

use gale_config::{Body as BlockBody, Contexts, Diagnostic, ManyWith, One, Setting, Statement, Takes, slot, values};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::media_types::MediaTypes;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::filters::Change;
use gale_http::variables::Variable;
use gale_log::{Zone, format_time};

use self::document::Document;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_ssi_filter",
    directives: &[
        Directive {
            name: "ssi",
            contexts: Contexts::ANYWHERE.or(Contexts::IF_IN_LOCATION),
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables processing of SSI commands in responses.",
            store: &One { parse: values::flag, slot: slot!(Conf, ssi) },
        },
        Directive {
            name: "ssi_last_modified",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables preserving Last-Modified of the original response.",
            store: &One { parse: values::flag, slot: slot!(Conf, ssi_last_modified) },
        },
        Directive {
            name: "ssi_min_file_chunk",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "1k",
            about: "No effect: parts of a document are sent from memory.",
            store: &One { parse: values::size, slot: slot!(Conf, ssi_min_file_chunk) },
        },
        Directive {
            name: "ssi_silent_errors",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables suppressing the error message of a failed SSI command.",
            store: &One { parse: values::flag, slot: slot!(Conf, ssi_silent_errors) },
        },
        Directive {
            name: "ssi_types",
            contexts: Contexts::ANYWHERE,
            takes: Takes::AtLeast(1),
            body: BlockBody::None,
            default: "text/html",
            about: "Sets the MIME types of responses with SSI commands, in addition to text/html.",
            store: &ManyWith { parse: MediaTypes::parse, slot: slot!(Conf, ssi_types) },
        },
        Directive {
            name: "ssi_value_length",
            contexts: Contexts::ANYWHERE,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "256",
            about: "Sets the maximum length of parameter values in SSI commands.",
            store: &One { parse: value_length, slot: slot!(Conf, ssi_value_length) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("date_local", |request, _, out| append_date(request, Zone::Local, out)),
            Variable::named("date_gmt", |request, _, out| append_date(request, Zone::Gmt, out)),
        ],
        filters: &[&Change { applies: |conf: &Conf| *conf.ssi.get(), run: include }],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    ssi: Setting<bool>,
    ssi_last_modified: Setting<bool>,
    ssi_min_file_chunk: Setting<u64>,
    ssi_silent_errors: Setting<bool>,
    ssi_types: Setting<Vec<MediaTypes>>,
    ssi_value_length: Setting<usize>,
}

/// Upper bound of `ssi_value_length`: values are kept in memory, [`gale_protocol::ssi::PARAMETERS_MAX`] of them at a
/// time.
const VALUE_LENGTH_MAX: u64 = 64 * 1024;

fn value_length(statement: &Statement) -> Result<usize, Diagnostic> {
    let length = values::size(statement)?;
    let fitting = usize::try_from(length).ok().filter(|_| length <= VALUE_LENGTH_MAX);
    fitting.ok_or_else(|| {
        let hint = "the maximum is 64k";
        statement.directive_error("invalid value").at(statement.args[0].span).hint(hint)
    })
}

/// Time format of this request's document: `config timefmt`.
#[derive(Clone)]
struct TimeFormat(Rc<RefCell<Vec<u8>>>);

impl Default for TimeFormat {
    fn default() -> TimeFormat {
        TimeFormat(Rc::new(RefCell::new(TIME_FORMAT.into())))
    }
}

const TIME_FORMAT: &[u8] = b"%A, %d-%b-%Y %H:%M:%S %Z";

fn append_date(request: &Request, zone: Zone, out: &mut Vec<u8>) -> bool {
    let now = gale_runtime::wall_seconds();
    let append = |format: &[u8], out: &mut Vec<u8>| match format {
        b"%s" => write!(out, "{now}").is_ok(),
        format => format_time(format, now, zone).map(|text| out.extend_from_slice(&text)).is_some(),
    };
    match request.notes.get::<TimeFormat>() {
        Some(format) => append(&format.0.borrow(), out),
        None => append(TIME_FORMAT, out),
    }
}

fn include(request: &mut Request, conf: &Conf, body: &mut Body) {
    let length = request.response.content_length.or_else(|| body.length());
    if length == Some(0) || !MediaTypes::contain(conf.ssi_types.get(), &request.response.content_type) {
        return;
    }
    if request.is_main() {
        request.response.will_change();
        if !*conf.ssi_last_modified.get() {
            request.response.clear_last_modified();
            request.response.etag.clear();
        }
    }
    request.outcome.makes_subrequests = true;
    let time_format = TimeFormat::default();
    request.notes.put(time_format.clone());
    let document = Document::new(std::mem::take(body), request.shared_note(), conf, time_format);
    *body = Body::Stream(Box::new(document));
}
