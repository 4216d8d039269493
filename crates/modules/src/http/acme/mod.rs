//! acme: certificates that are obtained from an issuer and renewed automatically (RFC 8555).
//!   acme_issuer NAME { … }                                  http; see `issuer.rs`
//!   acme_certificate ISSUER [NAME …] [key=ALG[:SIZE]];      server
//!   acme_shared_zone zone=NAME:SIZE;                        http; accepted, without effect
//!   $acme_certificate   $acme_certificate_key
//! (<https://nginx.org/en/docs/http/ngx_http_acme_module.html>)
//!
//! ```text
//! issuer     settings of an issuer
//! service    schedule of each issuer
//! order      obtains a certificate
//! challenge  proof that this server controls a name
//! client     requests to issuers
//! jws, messages, url   their parts
//! ```
//!
//! `gale_tls` serves the certificates to clients ([`gale_tls::managed`]) and the responses to challenges
//! ([`gale_tls::challenges`]), which any event loop of any process can give.

mod challenge;
mod client;
#[doc(hidden)]
pub mod fuzzing;
mod issuer;
mod jws;
mod messages;
mod order;
mod service;
mod url;

use std::any::Any;
use std::net::IpAddr;
use std::sync::Arc;

use bstr::ByteSlice;
use gale_base::units;
use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes, Word};
use gale_engine::configuration::{Builder, ServerId};
use gale_engine::module::{ConfType, Directive, Module};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::Variable;
use gale_protocol::request::Method;
use gale_tls::challenges::{self, Found};
use gale_tls::keys::KeyKind;
use gale_tls::managed::{Current, ManagedCertificate, Wanted};

use self::issuer::Issuer;

/// Path of `http-01` responses (RFC 8555, section 8.3).
const WELL_KNOWN: &[u8] = b"/.well-known/acme-challenge/";

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_acme",
    directives: &[
        Directive {
            name: "acme_issuer",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(1),
            body: BlockBody::Block,
            default: "",
            about: "Defines an ACME certificate issuer.",
            store: &Custom(acme_issuer),
        },
        Directive {
            name: "acme_certificate",
            contexts: Contexts::SERVER,
            takes: Takes::AtLeast(1),
            body: BlockBody::None,
            default: "",
            about: "Obtains and renews a certificate from an ACME issuer, for the given names or those of server_name.",
            store: &Custom(acme_certificate),
        },
        Directive {
            name: "acme_shared_zone",
            contexts: Contexts::HTTP,
            takes: Takes::Exactly(1),
            body: BlockBody::None,
            default: "",
            about: "No effect: certificates are kept in the memory of the worker process.",
            store: &Custom(acme_shared_zone),
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        variables: &[
            Variable::named("acme_certificate", |request, _, out| append(request, out, |current| current.chain())),
            Variable::named("acme_certificate_key", |request, _, out| append(request, out, |current| current.key())),
        ],
        handlers: &[(
            Phase::PostRead,
            &Wait {
                applies: |conf: &Conf| !conf.issuers.is_empty(),
                first: answer,
                then: |request, _| answer_later(request),
            },
        )],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    /// All issuers of the http block, the same list in each scope.
    issuers: Vec<Arc<Issuer>>,
    /// Not inherited.
    certificate: Option<Draft>,
    has_zone: bool,
}

/// An `acme_certificate` before the configuration is complete.
struct Draft {
    server: ServerId,
    issuer: Word,
    names: Vec<String>,
    key: KeyKind,
    statement: Statement,
}

fn acme_issuer(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if let Some(first) = conf.issuers.iter().find(|known| known.name.as_bytes() == statement.args[0].text) {
        return Err(statement.directive_error("is duplicate").related("first defined", first.span));
    }
    conf.issuers.push(issuer::issuer_block(builder, statement)?);
    Ok(())
}

fn acme_certificate(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.certificate.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let scope = builder.http_scope();
    let server = builder.http_mut().server_of(scope).expect("inside of a server block");
    let mut draft = Draft {
        server,
        issuer: statement.args[0].clone(),
        names: Vec::new(),
        key: KeyKind::default(),
        statement: statement.clone(),
    };
    for word in &statement.args[1..] {
        if let Some(kind) = word.text.strip_prefix(b"key=") {
            let kind = KeyKind::parse(kind).unwrap_or(Err("invalid \"key\" value"));
            draft.key = kind.map_err(|why| Diagnostic::emerg(format!("{why} in \"{}\"", word.text)).at(word.span))?;
        } else {
            add_names(&mut draft.names, &issuer::text(word)?).map_err(|why| {
                Diagnostic::emerg(format!("invalid server name: {why} in \"{}\"", word.text)).at(word.span)
            })?;
        }
    }
    conf.certificate = Some(draft);
    Ok(())
}

fn acme_shared_zone(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if std::mem::replace(&mut conf.has_zone, true) {
        return Err(statement.directive_error("is duplicate"));
    }
    let word = &statement.args[0];
    let Some(zone) = word.text.strip_prefix(b"zone=") else {
        return Err(statement.error(format!("\"{}\" must have \"zone\" parameter", statement.name.text)));
    };
    match zone.split_once_str(":") {
        Some((name, size)) if !name.is_empty() && units::parse_size(size).is_some_and(|size| size > 0) => {}
        _ => return Err(Diagnostic::emerg(format!("invalid zone \"{}\"", word.text)).at(word.span)),
    }
    crate::shared::ssl::without_effect(builder, statement, "certificates are kept in the memory of the worker process")
}

/// Adds a name of a certificate. As with nginx, `.example.com` stands for `example.com` and `www.example.com`.
fn add_names(names: &mut Vec<String>, text: &str) -> Result<(), &'static str> {
    let mut add = |name: String| {
        if !names.contains(&name) {
            names.push(name);
        }
    };
    if let Ok(address) = text.parse::<IpAddr>() {
        add(address.to_string());
        return Ok(());
    }
    let (is_both, name) = text.strip_prefix('.').map_or((false, text), |name| (true, name));
    let name = name.to_ascii_lowercase();
    let bare = name.strip_prefix("*.").unwrap_or(&name);
    let is_label = |label: &str| {
        let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        !label.is_empty() && label.len() <= 63 && label.bytes().all(is_good)
    };
    if bare.len() > 253 || !bare.split('.').all(is_label) {
        return Err("not a host name");
    }
    if is_both {
        add(format!("www.{name}"));
    }
    add(name);
    Ok(())
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    let conf: &mut Conf = conf.downcast_mut().expect("this module's settings");
    if let Some(parent) = parent.and_then(|parent| parent.downcast_ref::<Conf>()) {
        conf.issuers = parent.issuers.clone();
    }
    let Some(draft) = conf.certificate.take() else { return Ok(()) };
    let Some(issuer) = conf.issuers.iter().find(|issuer| issuer.name.as_bytes() == draft.issuer.text) else {
        return Err(Diagnostic::emerg(format!("issuer \"{}\" is missing", draft.issuer.text)).at(draft.issuer.span));
    };
    let names = names(&draft, issuer, builder)?;
    let directory = issuer.state_path.clone();
    let certificate = ManagedCertificate::of(Wanted { issuer: issuer.name.clone(), names, key: draft.key, directory });
    issuer.add(&certificate);
    builder.http_mut().set_managed_certificate(draft.server, certificate);
    Ok(())
}

/// Returns the names of a certificate: those of the directive, or else of the server.
fn names(draft: &Draft, issuer: &Issuer, builder: &mut Builder) -> Result<Vec<String>, Diagnostic> {
    let covers = |name: &str| issuer.challenge.covers_wildcards() || !name.starts_with('*');
    if let Some(wildcard) = draft.names.iter().find(|name| !covers(name)) {
        let message = format!(
            "a certificate for \"{wildcard}\" cannot be obtained with the challenge \"{}\"",
            issuer.challenge.kind()
        );
        return Err(draft.statement.error(message).hint("issuers validate wildcards only by a DNS record"));
    }
    if !draft.names.is_empty() {
        return Ok(draft.names.clone());
    }
    let (mut names, mut left_out) = (Vec::new(), Vec::new());
    for (word, _) in builder.http_mut().names_of(draft.server) {
        let is_name = |text: &str| !text.is_empty() && !text.starts_with('~') && covers(text);
        match word.text.to_str().ok().filter(|text| is_name(text)) {
            Some(text) if add_names(&mut names, text).is_ok() => {}
            _ if word.text.is_empty() => {}
            _ => left_out.push(word.clone()),
        }
    }
    builder.note(left_out.into_iter().map(|word| {
        let message = format!("\"acme_certificate\": \"{}\" in server_name cannot be used in a certificate", word.text);
        Diagnostic::warn(message).at(word.span)
    }));
    match names.is_empty() {
        true => Err(draft.statement.error("\"acme_certificate\": no identifiers found in \"server_name\"")),
        false => Ok(names),
    }
}

/// Appends the certificate of the request's server, in the form that `ssl_certificate` takes.
fn append(request: &Request, out: &mut Vec<u8>, part: fn(&Current) -> &str) -> bool {
    let managed = request.server().tls.as_ref().and_then(|tls| tls.managed());
    let Some(current) = managed.and_then(|managed| managed.current()) else { return false };
    out.extend_from_slice(b"data:");
    out.extend_from_slice(part(&current).as_bytes());
    true
}

/// Answers an issuer's `http-01` request, before any other rule of the server applies.
fn answer(request: &mut Request, _: &Conf) -> Option<Flow> {
    let Some(token) = request.uri.strip_prefix(WELL_KNOWN) else { return Some(Flow::Next) };
    if !matches!(request.parsed.method, Method::Get | Method::Head) {
        return Some(Flow::Next);
    }
    match challenges::text(token) {
        Found::Known(text) => Some(respond(request, &text)),
        Found::Nothing => Some(Flow::Next),
        Found::Ask => None,
    }
}

/// As [`answer`], for a response that may be known to another process.
fn answer_later(request: &mut Request) -> LocalBoxFuture<'_, Flow> {
    Box::pin(async move {
        let token = request.uri.strip_prefix(WELL_KNOWN).unwrap_or_default().to_vec();
        match challenges::text_elsewhere(&token).await {
            Some(text) => respond(request, &text),
            None => Flow::Next,
        }
    })
}

fn respond(request: &mut Request, text: &str) -> Flow {
    request.response.status = 200;
    request.response.content_type = b"application/octet-stream".as_slice().into();
    Flow::Answer(Body::Bytes(text.as_bytes().to_vec().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_certificates() {
        let mut names = Vec::new();
        for text in ["Example.COM", ".example.org", "192.0.2.1", "2001:DB8:0::1", "example.com", "*.example.net"] {
            add_names(&mut names, text).unwrap();
        }
        let expected = ["example.com", "www.example.org", "example.org", "192.0.2.1", "2001:db8::1", "*.example.net"];
        assert_eq!(names, expected);
        for wrong in ["", "a..b", "a.", "a b", "*", "a.*", "*a.b", "\u{e4}.de", "a/b", &"a".repeat(64)] {
            assert!(add_names(&mut names, wrong).is_err(), "{wrong}");
        }
    }
}
