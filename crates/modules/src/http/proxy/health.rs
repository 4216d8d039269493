//! `health_check …`: periodic health checks of the servers of a location's group.
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [uri=URI] [match=NAME] [port=N]
//!                [mandatory [persistent]] [keepalive_time=TIME] [type=http];                    location
//!   health_check … type=grpc [grpc_service=NAME] [grpc_status=CODE];                   location with grpc_pass
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html#health_check>)
//!
//! A check uses the header fields, the HTTP version and the timeouts of the location, over connections of its own.
//! Checks of `type=grpc` are in the grpc module ([`grpc`](crate::http::grpc)). [`checking`] is the common part of both,
//! and [`shared::health_check`](crate::shared::health_check) that of http and stream.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString};
use gale_base::units;
use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::{Builder, ScopeId, ServerId};
use gale_http::configuration::builder::InHttp;
use gale_http::request::own::OwnRequest;
use gale_http_upstream::client::{ClientRequest, note_answer, note_server};
use gale_protocol::http1::request_writer::Unwritable;
use gale_protocol::request::{Method, Version};
use gale_runtime::Bytes;
use gale_upstream::CheckedPeer;
use gale_upstream::PassTarget;
use gale_worker::Worker;

use super::matching::{Match, check_status};
use super::target::Pass;
use super::{Conf, head};
use crate::http::checking::{self, Asking, Failure, Kept, Question, Way};
use crate::http::grpc;
use crate::shared::health_check::{Failed, Rules, parameter};
use crate::shared::limits::invalid_parameter;

/// The check of a location, before its settings are complete.
#[derive(Clone)]
pub(super) struct Draft {
    rules: Rules,
    server: ServerId,
    scope: ScopeId,
    uri: BString,
    keepalive_time: Duration,
}

/// Parses `health_check`.
pub(super) fn health_check(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.check.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let scope = builder.http_scope();
    let server = builder.http_mut().server_of(scope).expect("a location is in a server");
    let (mut uri, mut keepalive_time) = (BString::from("/"), Duration::ZERO);
    let mut is_grpc = false;
    let (mut of_http, mut of_grpc) = (None, None);
    let (mut service, mut status) = (BString::default(), 0);
    let rules = Rules::parse(statement, |word| {
        match parameter(word) {
            (b"uri", Some(text)) if text.starts_with(b"/") => {
                uri = text.into();
                of_http = Some(word.clone());
            }
            (b"keepalive_time", Some(time)) => {
                keepalive_time = units::parse_time(time).ok_or_else(|| invalid_parameter(word))?;
            }
            (b"type", Some(b"http")) => is_grpc = false,
            (b"type", Some(b"grpc")) => is_grpc = true,
            (b"type", Some(_)) => return Err(invalid_parameter(word).hint("it must be \"http\" or \"grpc\"")),
            (b"grpc_service", Some(name)) => {
                service = name.into();
                of_grpc = Some(word.clone());
            }
            (b"grpc_status", Some(text)) => {
                status = grpc::parse_status(text).ok_or_else(|| invalid_parameter(word))?;
                of_grpc = Some(word.clone());
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    rules.port.into_iter().for_each(|port| builder.reach.connects(port));
    if let Some(word) = of_grpc.filter(|_| !is_grpc) {
        return Err(invalid_parameter(&word).hint("it needs \"type=grpc\""));
    }
    if !is_grpc {
        conf.check = Some(Draft { rules, server, scope, uri, keepalive_time });
        return Ok(());
    }
    for (name, word) in [("uri", &of_http), ("match", &rules.matches)] {
        if let Some(word) = word {
            let message = format!("\"{name}\" cannot be used with \"type=grpc\"");
            return Err(Diagnostic::emerg(message).at(word.span));
        }
    }
    let draft = grpc::Draft { rules, server, scope, keepalive_time, service, status };
    if grpc::keep(builder, draft) { Ok(()) } else { Err(statement.directive_error("is duplicate")) }
}

/// Registers the check of a location when the location's settings are complete.
pub(super) fn complete(conf: &Conf, builder: &mut Builder) -> Result<(), Diagnostic> {
    let Some(draft) = &conf.check else { return Ok(()) };
    let wrong = |message: &str| Err(Diagnostic::emerg(message).at(draft.rules.span));
    let group = match &conf.pass {
        Some(Pass::Fixed { target, .. }) => match target.found {
            PassTarget::Referred(upstream) => upstream,
            _ => unreachable!("a URL without variables refers to its servers"),
        },
        Some(_) => return wrong("\"health_check\" cannot be used with variables in \"proxy_pass\""),
        None => return wrong("\"health_check\" requires \"proxy_pass\" in the same location"),
    };
    let matches = draft.rules.matches.as_ref().map(|name| Match::find(&conf.matches, name)).transpose()?;
    checking::add(builder, group, HealthCheck { draft: draft.clone(), matches })
}

/// The request of a check, and the required response.
struct HealthCheck {
    draft: Draft,
    matches: Option<Arc<Match>>,
}

impl Question for HealthCheck {
    fn rules(&self) -> &Rules {
        &self.draft.rules
    }

    fn location(&self) -> (ServerId, ScopeId) {
        (self.draft.server, self.draft.scope)
    }

    fn matches(&self) -> &BStr {
        self.matches.as_ref().map_or(BStr::new(""), |matches| matches.name())
    }

    async fn ask(
        &self,
        worker: &Rc<Worker>,
        peer: &CheckedPeer,
        request: &mut OwnRequest,
        kept: &mut Option<Kept>,
    ) -> Result<(), Failure> {
        let configuration = Rc::clone(request.configuration());
        let conf: &Conf = configuration.http().scope(self.draft.scope).conf_of().expect("its proxy settings");
        let upstream = &conf.upstream;
        note_server(request, Arc::clone(&peer.name));
        let asking = self.asking(request, conf)?;
        let target = conf.pass.as_ref().and_then(Pass::known).expect("a group that is known");
        let way = Way {
            worker,
            address: self.draft.rules.address(peer),
            options: upstream.connect_options(request),
            header: upstream.proxy_header(request),
            tls: target.is_tls.then(|| checking::tls(request, upstream, &target.host)),
            patience: checking::patience(upstream),
            keepalive_time: self.draft.keepalive_time,
        };
        let answer = way.ask(&asking, kept).await.map_err(Failure::Client)?;
        note_answer(request, &answer);
        let result = match &self.matches {
            None => check_status(&answer),
            Some(matches) => matches.check(&answer, request),
        };
        result.map_err(|mismatch| Failure::Answer(Failed { text: mismatch.to_string(), action: mismatch.action() }))
    }
}

impl HealthCheck {
    /// Returns the request, in the location's version of HTTP.
    fn asking(&self, request: &mut OwnRequest, conf: &Conf) -> Result<Asking, Failure> {
        let target = conf.pass.as_ref().and_then(Pass::known).expect("a group that is known");
        // Variables may use the target.
        request.notes.put(Arc::clone(target));
        let uri = &self.draft.uri;
        let line = head::Line { method: b"GET", uri, host: &target.host, version: *conf.version.get() };
        let head_max = conf.upstream.head_max();
        let body_max = self.matches.as_ref().map_or(0, |matches| matches.body_max());
        let unwritable = |error: Unwritable| Failure::Request(error.to_string());
        if line.version == Version::Http2 {
            let scheme = if target.is_tls { "https" } else { "http" };
            let head = head::http2_check(request, conf, &line, scheme).map_err(unwritable)?;
            return Ok(Asking::Http2 { head, body: None, head_max, body_max });
        }
        let mut text = Vec::with_capacity(256);
        let keeps_alive = !self.draft.keepalive_time.is_zero();
        head::write_check(request, conf, &line, keeps_alive, &mut text).map_err(unwritable)?;
        Ok(Asking::Http1(ClientRequest { method: Method::Get, bytes: Bytes::from(text), head_max, body_max }))
    }
}
