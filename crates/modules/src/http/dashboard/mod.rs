//! dashboard: a page that shows live what the server does.
//!   dashboard [write=on|off];          location
//! (Gale's own; docs/dashboard.md)
//!
//! ```text
//!   LOCATION            the page; what it consists of beside it
//!   LOCATIONfigures     all that it shows, as one JSON object by the paths of the API
//!   LOCATIONapi/        the API, as `api` answers it: with write=on it takes what the page's buttons change
//! ```
//!
//! The page consists of the files of `page/`, which are parts of the program: it loads nothing from anywhere else, and
//! its Content-Security-Policy forbids it to. Who may see it is for the access rules of the location to say.

use std::any::Any;
use std::hash::{DefaultHasher, Hasher};
use std::sync::LazyLock;

use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_http::request::response::ShortText;
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
        about: "Answers with a page that shows live what the server does; with write=on servers of groups can be \
                changed on it.",
        store: &Custom(dashboard),
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { handlers: &[(Phase::Content, &Dashboard)], ..HttpPart::EMPTY }],
};

/// Not inherited, as with all that answers a location.
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
    // The page finds its parts by paths that begin with the location's name.
    let name = builder.http_mut().replaceable_part(scope);
    if !name.is_some_and(|name| name.ends_with(b"/")) {
        let error = statement.directive_error("needs a location whose name is a path that ends with a slash");
        return Err(error.hint("for example: location /dashboard/ { dashboard; }"));
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

/// A part of the page.
struct File {
    /// Behind the location's name.
    name: &'static str,
    content_type: &'static str,
    contents: &'static [u8],
}

const fn html(name: &'static str, contents: &'static [u8]) -> File {
    File { name, content_type: "text/html; charset=utf-8", contents }
}

const fn script(name: &'static str, contents: &'static [u8]) -> File {
    File { name, content_type: "text/javascript; charset=utf-8", contents }
}

/// What the page consists of.
const FILES: &[File] = &[
    html("", include_bytes!("page/index.html")),
    script("main.js", include_bytes!("page/main.js")),
    script("sections.js", include_bytes!("page/sections.js")),
    script("figures.js", include_bytes!("page/figures.js")),
    script("table.js", include_bytes!("page/table.js")),
    script("chart.js", include_bytes!("page/chart.js")),
    File { name: "style.css", content_type: "text/css; charset=utf-8", contents: include_bytes!("page/style.css") },
    File { name: "icon.svg", content_type: "image/svg+xml", contents: include_bytes!("page/icon.svg") },
];

/// The page may load its own parts and ask for figures, and do nothing else: no other hosts, no inline scripts or
/// styles, no frames around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What a path behind the location's name leads to.
enum Target<'p> {
    File(&'static File),
    Figures,
    /// With the rest of the path.
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
        // A change that has begun is done to its end.
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
    head.etag = etag(file);
    // Asked for again each time, and mostly answered by 304: a page and its parts are of one version of the program.
    head.set(ResponseField::CacheControl, b"no-cache");
    head.add(b"Content-Security-Policy", POLICY.as_bytes());
    head.add(b"X-Content-Type-Options", b"nosniff");
    head.add(b"Referrer-Policy", b"no-referrer");
    Flow::Answer(Body::Bytes(Bytes::from_static(file.contents)))
}

/// Other contents have another one. What it is made with may change with the compiler, which costs a download.
fn etag(file: &File) -> ShortText {
    static OF_FILES: LazyLock<Vec<String>> = LazyLock::new(|| {
        let of = |file: &File| {
            let mut hasher = DefaultHasher::new();
            hasher.write(file.contents);
            format!("\"{:016x}\"", hasher.finish())
        };
        FILES.iter().map(of).collect()
    });
    let index = FILES.iter().position(|other| other.name == file.name).expect("one of them");
    OF_FILES[index].as_bytes().into()
}
