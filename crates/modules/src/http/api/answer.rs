//! Responses of the API: JSON, and errors in nginx's form.

use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::Flow;
use gale_protocol::response::ResponseField;
use serde_json::{Value, json};

/// Documentation of errors.
const HREF: &str = "https://nginx.org/en/docs/http/ngx_http_api_module.html";

/// An error of the API.
#[derive(Debug)]
pub(super) struct Fault {
    status: u16,
    text: String,
    code: String,
}

impl Fault {
    pub fn new(status: u16, text: impl Into<String>, code: impl Into<String>) -> Fault {
        Fault { status, text: text.into(), code: code.into() }
    }

    /// Error: there is nothing at this path.
    pub fn path() -> Fault {
        Fault::new(404, "path not found", "PathNotFound")
    }

    /// Error: the object does not support this method.
    pub fn method() -> Fault {
        Fault::new(405, "method disabled", "MethodDisabled")
    }

    /// Error: the body is invalid.
    pub fn format(text: impl Into<String>) -> Fault {
        Fault::new(400, text, "UpstreamConfFormatError")
    }

    pub fn send(self, request: &mut Request) -> Flow {
        let Fault { status, text, code } = self;
        let mut id = String::with_capacity(32);
        request.id().iter().for_each(|byte| id.push_str(&format!("{byte:02x}")));
        let error = json!({ "status": status, "text": text, "code": code });
        send(request, status, &json!({ "error": error, "request_id": id, "href": HREF }))
    }
}

/// Sends a success without a body.
pub(super) fn send_nothing(request: &mut Request) -> Flow {
    request.response.status = 204;
    Flow::Answer(Body::Empty)
}

pub(super) fn send(request: &mut Request, status: u16, value: &Value) -> Flow {
    send_text(request, status, value.to_string())
}

/// As above, for a value that is serialised already.
pub(super) fn send_text(request: &mut Request, status: u16, text: String) -> Flow {
    let head = &mut request.response;
    head.status = status;
    head.content_type = b"application/json".as_slice().into();
    head.set(ResponseField::CacheControl, b"no-cache");
    Flow::Answer(Body::Bytes(text.into_bytes().into()))
}
