//! `health_check …`: asks the servers of a location's group again and again whether they are well.
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [uri=URI] [match=NAME] [port=N]
//!                [mandatory [persistent]] [keepalive_time=TIME] [type=http];                    location
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html#health_check>)
//!
//! A peer is asked in the way in which the location asks: its fields, version and timeouts. Checks have connections of
//! their own. What stream has of it, too, is in [`shared::health_check`](crate::shared::health_check).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Diagnostic, Statement};
use gale_engine::configuration::{Builder, Configuration, ScopeId, ServerId};
use gale_engine::service::{Context, Service, ServiceSpec};
use gale_engine::upstream::{Check, CheckId, CheckedPeer};
use gale_engine::worker::Worker;
use gale_http::configuration::builder::InHttp;
use gale_http::request::configuration::HttpConfiguration;
use gale_http::request::own::{OwnRequest, OwnRequests};
use gale_http::upstream::client::{ClientConnection, ClientError, ClientRequest, Patience, note_answer};
use gale_protocol::request::{Method, Version};
use gale_runtime::{Bytes, Moment, now};

use super::matching::{Match, Mismatch, check_status};
use super::target::Pass;
use super::{Conf, head};
use crate::http::upstream_rows;
use crate::shared::health_check::{Asks, CheckLog, Failed, Rules, parameter, run};
use crate::shared::limits::invalid_parameter;
use gale_engine::upstream::PassTarget;

/// A check as a location has it.
#[derive(Clone)]
pub(super) struct Draft {
    rules: Rules,
    server: ServerId,
    scope: ScopeId,
    uri: BString,
    keepalive_time: Duration,
}

/// `health_check`
pub(super) fn health_check(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.check.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let scope = builder.http_scope();
    let server = builder.http_mut().server_of(scope).expect("a location is in a server");
    let (mut uri, mut keepalive_time) = (BString::from("/"), Duration::ZERO);
    let rules = Rules::parse(statement, |word| {
        match parameter(word) {
            (b"uri", Some(text)) if text.starts_with(b"/") => uri = text.into(),
            (b"keepalive_time", Some(time)) => {
                keepalive_time = units::parse_time(time).ok_or_else(|| invalid_parameter(word))?;
            }
            (b"type", Some(b"http")) => {}
            (b"type", Some(_)) => return Err(invalid_parameter(word).hint("checks speak http only")),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    conf.check = Some(Draft { rules, server, scope, uri, keepalive_time });
    Ok(())
}

/// Has the check of a location done, when its settings are complete.
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
    if *conf.version.get() == Version::Http2 {
        let message = "\"health_check\" cannot be used with \"proxy_http_version 2\"";
        let hint = "checks speak HTTP/1; give the location of the check its own proxy_http_version";
        return Err(Diagnostic::emerg(message).at(draft.rules.span).hint(hint));
    }
    let matches = draft.rules.matches.as_ref().map(|name| Match::find(&conf.matches, name)).transpose()?;
    let id = builder.http_mut().upstreams.add_check(group, draft.rules.before, draft.rules.span);
    let name = format!("health check {} of http upstreams", id.0 + 1);
    let service = HealthCheck { id, draft: draft.clone(), matches };
    builder.add_service(ServiceSpec::per_process(name, service), draft.rules.span)
}

/// The service.
struct HealthCheck {
    id: CheckId,
    draft: Draft,
    matches: Option<Arc<Match>>,
}

impl Service for HealthCheck {
    async fn run(context: Context<HealthCheck>) {
        let Some(configuration) = context.configuration::<Configuration>() else { return };
        let settings = context.settings();
        let http: Arc<HttpConfiguration> = configuration.protocol().expect("a part of an http block");
        let asks = Checks {
            check: http.upstreams.check(settings.id).clone(),
            requests: OwnRequests::new(context.worker(), configuration, settings.draft.server, settings.draft.scope),
            worker: Rc::clone(context.worker()),
            settings,
        };
        drop(http);
        run(&context, asks).await;
    }
}

/// What the checks of a service have in common.
struct Checks {
    settings: Arc<HealthCheck>,
    check: Check,
    requests: OwnRequests,
    worker: Rc<Worker>,
}

/// A connection that is kept from check to check, and when it was made.
struct Kept {
    connection: ClientConnection,
    since: Moment,
}

/// Why a check was not passed.
enum Failure {
    /// There is no answer.
    Client(ClientError),
    /// The answer is not what it should be.
    Mismatch(Mismatch),
    /// The request cannot be made.
    Request(String),
}

impl Asks for Checks {
    type Kept = Option<Kept>;

    fn check(&self) -> &Check {
        &self.check
    }

    fn rules(&self) -> &Rules {
        &self.settings.draft.rules
    }

    async fn ask(&self, peer: &CheckedPeer, kept: &mut Option<Kept>) {
        let mut request = self.requests.begin();
        let result = self.check_once(peer, &mut request, kept).await;
        self.take(peer, &request, result);
    }
}

impl Checks {
    async fn check_once(
        &self,
        peer: &CheckedPeer,
        request: &mut OwnRequest,
        kept: &mut Option<Kept>,
    ) -> Result<(), Failure> {
        let configuration = Rc::clone(request.configuration());
        let conf: &Conf = configuration.http().scope(self.settings.draft.scope).conf_of().expect("its proxy settings");
        let upstream = &conf.upstream;
        let options = upstream.connect_options(request);
        let (send, read) = (*upstream.send_timeout.get(), *upstream.read_timeout.get());
        let patience = Patience { send, read, whole: send.saturating_add(read) };
        let client_request = ClientRequest {
            method: Method::Get,
            bytes: self.head(request, conf)?,
            head_max: upstream.head_max(),
            body_max: self.settings.matches.as_ref().map_or(0, |matches| matches.body_max()),
        };
        let target = conf.pass.as_ref().and_then(Pass::known).expect("a group that is known");
        let tls = target.is_tls.then(|| upstream_rows::tls(request, upstream, &target.host));
        let keepalive_time = self.settings.draft.keepalive_time;
        let is_fresh = |kept: &Kept| now().since(kept.since) < keepalive_time && kept.connection.is_idle();
        let mut used = kept.take().filter(is_fresh);
        let (answer, connection, since) = loop {
            let is_reused = used.is_some();
            let Kept { connection, since } = match used.take() {
                Some(kept) => kept,
                None => {
                    let address = self.settings.draft.rules.address(peer);
                    let header = upstream.proxy_header(request);
                    let opened = ClientConnection::open(&self.worker, &address, &options, header, tls.as_ref());
                    Kept { connection: opened.await.map_err(Failure::Client)?, since: now() }
                }
            };
            match connection.ask(&client_request, patience).await {
                Ok((answer, connection)) => break (answer, connection, since),
                // The server may have closed it a moment ago.
                Err(ClientError::Closed(_) | ClientError::Failed(..)) if is_reused => {}
                Err(error) => return Err(Failure::Client(error)),
            }
        };
        *kept = connection.filter(|_| !keepalive_time.is_zero()).map(|connection| Kept { connection, since });
        note_answer(request, Arc::clone(&peer.name), &answer);
        let result = match &self.settings.matches {
            None => check_status(&answer),
            Some(matches) => matches.check(&answer, request),
        };
        result.map_err(Failure::Mismatch)
    }

    fn head(&self, request: &mut OwnRequest, conf: &Conf) -> Result<Bytes, Failure> {
        let target = conf.pass.as_ref().and_then(Pass::known).expect("a group that is known");
        // Variables may ask for it.
        request.notes.put(Arc::clone(target));
        let uri = &self.settings.draft.uri;
        let line = head::Line { method: b"GET", uri, host: &target.host, version: *conf.version.get() };
        let mut text = Vec::with_capacity(256);
        let keeps_alive = !self.settings.draft.keepalive_time.is_zero();
        let written = head::write_check(request, conf, &line, keeps_alive, &mut text);
        written.map_err(|error| Failure::Request(error.to_string()))?;
        Ok(Bytes::from(text))
    }

    /// Takes down what a check has come to.
    fn take(&self, peer: &CheckedPeer, request: &OwnRequest, result: Result<(), Failure>) {
        let matches = self.settings.matches.as_ref().map_or(BStr::new(""), |matches| matches.name());
        let log = CheckLog { log: &request.scope().error_log, check: &self.check, peer, matches };
        let result = match result {
            Ok(()) => Ok(()),
            // It says nothing about the peer.
            Err(Failure::Client(ClientError::NoConnections)) => return self.worker.complain_of_connections(),
            Err(Failure::Request(error)) => {
                return log.write(Level::Error, &format_args!("{error} while preparing a request to an upstream"));
            }
            Err(Failure::Client(error)) => Err(Failed { text: error.to_string(), action: error.step().text() }),
            Err(Failure::Mismatch(mismatch)) => Err(Failed { text: mismatch.to_string(), action: mismatch.action() }),
        };
        log.note(result, self.settings.draft.rules.thresholds);
    }
}
