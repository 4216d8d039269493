//! dashboard: a page with the server's live figures.
//!   dashboard [write=on|off];          location
//! (Gale's own; docs/dashboard.md)
//!
//! ```text
//!   LOCATION            the page; its files are beside it
//!   LOCATIONfigures     all figures, as one JSON object by the API's paths
//!   LOCATIONapi/        the API, as with `api`; write=on allows the changes of the page's buttons
//! ```
//!
//! The page consists of the files of `page/`, which are compiled into the program. It loads nothing from other hosts,
//! and its Content-Security-Policy forbids that. The location's access rules control access.

use std::any::Any;

use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_protocol::request::Method;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use super::api;
use crate::shared::limits::invalid_parameter;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_dashboard",
    directives: &[Directive {
        name: "dashboard",
        contexts: Contexts::LOCATION,
        takes: Takes::Between(0, 1),
        body: BlockBody::None,
        default: "",
        about: "Enables the live dashboard in the surrounding location; write=on allows changes to upstream servers.",
        store: &Custom(dashboard),
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { handlers: &[(Phase::Content, &Dashboard)], ..HttpPart::EMPTY }],
};

/// Not inherited, as for all content handlers.
#[derive(Default)]
struct Conf {
    is_on: bool,
    is_writable: bool,
}

fn dashboard(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if std::mem::replace(&mut conf.is_on, true) {
        return Err(statement.directive_error("is duplicate"));
    }
    let scope = builder.http_scope();
    // The page refers to its files by paths that begin with the location's name.
    let prefix = builder.http_mut().location_prefix(scope);
    if !prefix.is_some_and(|prefix| prefix.ends_with(b"/")) {
        let error = "needs a prefix location whose name ends with a slash";
        let hint = "for example: location /dashboard/ { dashboard; }, without \"=\" and without a regular expression";
        return Err(statement.directive_error(error).hint(hint));
    }
    conf.is_writable = match statement.args.first() {
        None => false,
        Some(word) => match &**word.text {
            b"write=on" => true,
            b"write=off" => false,
            _ => return Err(invalid_parameter(word).hint("the only parameters are \"write=on\" and \"write=off\"")),
        },
    };
    Ok(())
}

/// A file of the page.
struct File {
    /// Path behind the location's name.
    name: &'static str,
    content_type: &'static str,
    contents: &'static [u8],
    /// Entity tag, which depends on the contents.
    etag: [u8; 18],
}

impl File {
    const fn new(name: &'static str, content_type: &'static str, contents: &'static [u8]) -> File {
        File { name, content_type, contents, etag: etag(contents) }
    }
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Files of the page.
static FILES: [File; 8] = [
    File::new("", HTML, include_bytes!("page/index.html")),
    File::new("main.js", SCRIPT, include_bytes!("page/main.js")),
    File::new("sections.js", SCRIPT, include_bytes!("page/sections.js")),
    File::new("figures.js", SCRIPT, include_bytes!("page/figures.js")),
    File::new("table.js", SCRIPT, include_bytes!("page/table.js")),
    File::new("chart.js", SCRIPT, include_bytes!("page/chart.js")),
    File::new("style.css", "text/css; charset=utf-8", include_bytes!("page/style.css")),
    File::new("icon.svg", "image/svg+xml", include_bytes!("page/icon.svg")),
];

/// Returns a checksum of the contents (FNV-1a, 64 bits) in quotes. Collisions are no risk: only a build of the program
/// can change the contents.
const fn etag(contents: &[u8]) -> [u8; 18] {
    let mut sum: u64 = 0xcbf2_9ce4_8422_2325;
    let mut at = 0;
    while at < contents.len() {
        sum = (sum ^ contents[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    let mut tag = [b'"'; 18];
    let mut digit = 0;
    while digit < 16 {
        tag[1 + digit] = b"0123456789abcdef"[(sum >> (60 - 4 * digit)) as usize & 15];
        digit += 1;
    }
    tag
}

/// The page may load its own files and fetch figures, and do nothing else: no other hosts, no inline scripts or styles,
/// no framing.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Resource of the dashboard that a request asks for, by the part of its path after the location's name.
enum Target<'p> {
    File(&'static File),
    Figures,
    /// The API, with the rest of the path.
    Api(&'p [u8]),
}

impl Target<'_> {
    fn of(behind: &[u8]) -> Option<Target<'_>> {
        if behind == b"figures" {
            return Some(Target::Figures);
        }
        if let Some(rest) = behind.strip_prefix(b"api/") {
            return Some(Target::Api(rest));
        }
        FILES.iter().find(|file| file.name.as_bytes() == behind).map(Target::File)
    }
}

struct Dashboard;

fn conf_of(conf: &dyn Any) -> &Conf {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl Handler for Dashboard {
    fn applies(&self, conf: &dyn Any) -> bool {
        conf_of(conf).is_on
    }

    fn decide(&self, request: &mut Request, _: &dyn Any) -> Decision {
        match Target::of(api::behind_location(request)) {
            None => Decision::Flow(Flow::Respond(404)),
            Some(Target::File(file)) => Decision::Flow(send(request, file)),
            Some(Target::Figures | Target::Api(_)) => Decision::MustWait,
        }
    }

    fn outlives_client(&self, request: &Request, _: &dyn Any) -> bool {
        // A change that was started must be completed.
        !matches!(request.method(), Method::Get | Method::Head)
    }

    fn redirects_to_slash(&self) -> bool {
        true
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        let is_writable = conf_of(conf).is_writable;
        Box::pin(async move {
            let behind = api::behind_location(request).to_vec();
            let flow = match Target::of(&behind) {
                Some(Target::Api(rest)) => api::answer(request, rest, is_writable).await,
                _ => api::answer_all(request, is_writable).await,
            };
            request.response.add(b"X-Content-Type-Options", b"nosniff");
            flow
        })
    }
}

fn send(request: &mut Request, file: &'static File) -> Flow {
    if !matches!(request.method(), Method::Get | Method::Head) {
        return Flow::Respond(405);
    }
    let head = &mut request.response;
    head.status = 200;
    head.content_type = file.content_type.as_bytes().into();
    head.etag = file.etag.as_slice().into();
    // Revalidated at each use, and mostly answered by 304, so that all files of a page are of one version of the
    // program.
    head.set(ResponseField::CacheControl, b"no-cache");
    head.add(b"Content-Security-Policy", POLICY.as_bytes());
    head.add(b"X-Content-Type-Options", b"nosniff");
    head.add(b"Referrer-Policy", b"no-referrer");
    Flow::Answer(Body::Bytes(Bytes::from_static(file.contents)))
}
