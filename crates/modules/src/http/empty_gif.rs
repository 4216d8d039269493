//! empty_gif: a transparent image of one pixel.
//!   empty_gif;          location
//! (<https://nginx.org/en/docs/http/ngx_http_empty_gif_module.html>)

use gale_config::{Body as BlockBody, Contexts, Takes};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_protocol::request::Method;
use gale_runtime::Bytes;

use super::content_switch::ContentSwitch;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_empty_gif",
    directives: &[Directive {
        name: "empty_gif",
        contexts: Contexts::LOCATION,
        takes: Takes::Exactly(0),
        body: BlockBody::None,
        default: "",
        about: "Returns a transparent GIF image of one pixel.",
        store: Conf::TURN_ON,
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[(Phase::Content, &Decide { applies: Conf::is_on, run: |request, _| answer(request) })],
        ..HttpPart::EMPTY
    }],
};

/// Name of the module in the type of its settings.
enum EmptyGif {}

type Conf = ContentSwitch<EmptyGif>;

fn answer(request: &mut Request) -> Flow {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Flow::Respond(405);
    }
    request.response.status = 200;
    request.response.content_type = b"image/gif".as_slice().into();
    request.response.last_modified = Some(MODIFIED);
    Flow::Answer(Body::Bytes(Bytes::from_static(&PICTURE)))
}

/// nginx's modification time of the image: Mon, 28 Sep 1970 06:00:00 GMT.
const MODIFIED: u64 = 23_349_600;

/// GIF89a, section by section (<https://www.w3.org/Graphics/GIF/spec-gif89a.txt>).
const PICTURE: [u8; 43] = [
    b'G',
    b'I',
    b'F',
    b'8',
    b'9',
    b'a', // signature and version
    1,
    0,
    1,
    0, // the screen is 1 by 1
    0b1000_0000,
    1,
    0, // a table of two colours; number 1 is the background
    0,
    0,
    0,
    0xff,
    0xff,
    0xff, // black and white
    0x21,
    0xf9,
    4,
    1,
    0,
    0,
    1,
    0, // graphic control: colour 1 is transparent
    0x2c,
    0,
    0,
    0,
    0,
    1,
    0,
    1,
    0,
    0, // the picture: at 0, 0, 1 by 1
    2,
    2,
    0x4c,
    1,
    0,    // its data, packed by LZW into two bytes
    0x3b, // the end
];
