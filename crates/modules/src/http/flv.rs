//! flv: a Flash video from an offset on, with a new file header.
//!   flv;                         location
//!   ?start=BYTES                 offset of the first byte; 0 or an invalid offset mean the whole file
//! (<https://nginx.org/en/docs/http/ngx_http_flv_module.html>)

use std::collections::VecDeque;
use std::io;

use gale_base::units;
use gale_config::{Body as Block, Contexts, Takes};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyItem, FilePiece};
use gale_http::request::files::find_path;
use gale_http::request::files::open_files::{self, Opened};
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_protocol::request::Method;
use gale_runtime::Bytes;

use super::content_switch::ContentSwitch;
use super::{static_files, variables};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_flv",
    directives: &[Directive {
        name: "flv",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(0),
        body: Block::None,
        default: "",
        about: "Serves FLV files, from the offset in the request argument start.",
        store: Conf::TURN_ON,
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(
            Phase::Content,
            &Wait { applies: Conf::is_on, first: at_once, then: |request, _| serve(request) },
        )],
        ..HttpPart::EMPTY
    }],
};

/// Name of the module in the type of its settings.
enum Flv {}

type Conf = ContentSwitch<Flv>;

/// Version 1 with audio and video; the header's length, and the length of the tag before the first one.
const HEAD: &[u8; 13] = b"FLV\x01\x05\0\0\0\x09\0\0\0\0";

/// Answers without waiting: passes on requests of other handlers, and opens a file that the kernel has in its cache.
fn at_once(request: &mut Request, _: &Conf) -> Option<Flow> {
    let path = match path_of_video(request) {
        Ok(path) => path,
        Err(flow) => return Some(flow),
    };
    let opened = open_files::try_open(request, &path)?;
    Some(opened_or_not(request, &path, opened))
}

fn serve(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        match path_of_video(request) {
            Ok(path) => {
                let opened = open_files::open(request, &path).await;
                opened_or_not(request, &path, opened)
            }
            Err(flow) => flow,
        }
    })
}

/// Returns the path of the requested file, or the flow to another handler.
pub(super) fn path_of_video(request: &Request) -> Result<Vec<u8>, Flow> {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Err(Flow::Respond(405));
    }
    if request.uri.ends_with(b"/") {
        return Err(Flow::Next);
    }
    let mut path = Vec::with_capacity(128);
    find_path(request, &mut path).map_err(Flow::Respond)?;
    Ok(path)
}

fn opened_or_not(request: &mut Request, path: &[u8], opened: io::Result<Opened>) -> Flow {
    let file = match opened {
        Ok(file) if file.metadata.is_regular() => file,
        Ok(_) => return Flow::Next,
        Err(error) => return Flow::Respond(static_files::refusal(request, path, &error)),
    };
    let size = file.metadata.size;
    let start = variables::argument(&request.args, b"start").and_then(units::parse_number);
    let start = start.filter(|&start| start > 0 && start < size);
    match (static_files::send(request, file, path), start) {
        (Flow::Answer(body), Some(start)) => {
            request.response.content_length = Some(HEAD.len() as u64 + size - start);
            Flow::Answer(with_head(Bytes::from_static(HEAD), body, start, size))
        }
        (flow, _) => flow,
    }
}

/// Returns a body of these bytes of a file, with a head before them.
pub(super) fn with_head(head: Bytes, body: Body, start: u64, end: u64) -> Body {
    let part = match body {
        // Bytes in memory can be counted with a usize.
        Body::Bytes(bytes) => BodyItem::Bytes(bytes.slice(start as usize..end as usize)),
        Body::File(FilePiece { file, offset, .. }) => {
            BodyItem::File(FilePiece { file, offset: offset + start, length: end - start })
        }
        body => return body,
    };
    Body::Items(VecDeque::from([BodyItem::Bytes(head), part]))
}
