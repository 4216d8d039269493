//! `health_check …`: asks the servers of a location's group again and again whether they are well.
//!   health_check [interval=TIME] [jitter=TIME] [fails=N] [passes=N] [uri=URI] [match=NAME] [port=N]
//!                [mandatory [persistent]] [keepalive_time=TIME] [type=http];                    location
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_hc_module.html#health_check>)
//!
//! A service of the process asks, with a task for each peer, in the way in which the location asks: its fields, version
//! and timeouts. Checks have connections of their own. What they come to is the engine's to keep and to act on
//! ([`gale_engine::upstream::Check`]); the group needs no `zone` for that.

use std::cell::Cell;
use std::fmt::Display;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Diagnostic, Span, Statement, Word};
use gale_engine::configuration::{Builder, Configuration, ScopeId, ServerId};
use gale_engine::service::{Context, Service, ServiceSpec};
use gale_engine::upstream::{BeforeFirstCheck, Check, CheckId, CheckedPeer, CheckedPeers, HealthChange, Thresholds};
use gale_engine::worker::Worker;
use gale_http::configuration::builder::InHttp;
use gale_http::request::configuration::HttpConfiguration;
use gale_http::request::own::{OwnRequest, OwnRequests};
use gale_http::upstream::client::{ClientConnection, ClientError, ClientRequest, Patience, note_answer};
use gale_protocol::request::Method;
use gale_runtime::{Bytes, Moment, Notify, SocketAddress, TaskId, abort, now, random_u64, sleep, spawn};

use super::matching::{Match, Mismatch, check_status};
use super::target::Pass;
use super::{Conf, head};
use crate::http::upstream_rows;
use crate::shared::limits::invalid_parameter;
use gale_engine::upstream::PassTarget;

/// How long it is between two checks, unless said otherwise.
const INTERVAL_DEFAULT: Duration = Duration::from_secs(5);

/// How often it is looked whether the group has other peers by now.
const LOOK_FOR_PEERS_EVERY: Duration = Duration::from_secs(1);

/// How many peers a check asks at the same time: a large group is not to take all connections of the worker.
const UNDER_WAY_MAX: usize = 128;

/// A check as a location has it.
#[derive(Clone)]
pub(super) struct Draft {
    span: Span,
    server: ServerId,
    scope: ScopeId,
    interval: Duration,
    jitter: Duration,
    thresholds: Thresholds,
    uri: BString,
    matches: Option<Word>,
    port: Option<u16>,
    before: BeforeFirstCheck,
    keepalive_time: Duration,
}

/// `health_check`
pub(super) fn health_check(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if conf.check.is_some() {
        return Err(statement.directive_error("is duplicate"));
    }
    let scope = builder.http_scope();
    let mut draft = Draft {
        span: statement.span,
        server: builder.http_mut().server_of(scope).expect("a location is in a server"),
        scope,
        interval: INTERVAL_DEFAULT,
        jitter: Duration::ZERO,
        thresholds: Thresholds { fails: 1, passes: 1 },
        uri: BString::from("/"),
        matches: None,
        port: None,
        before: BeforeFirstCheck::Healthy,
        keepalive_time: Duration::ZERO,
    };
    let mut persistent = None;
    for word in &statement.args {
        if word.text == "persistent" {
            persistent = Some(word);
        } else {
            draft.take(word)?;
        }
    }
    match (persistent, draft.before) {
        (None, _) => {}
        (Some(_), BeforeFirstCheck::Checking) => draft.before = BeforeFirstCheck::CheckingUnlessKnown,
        (Some(word), _) => {
            let error = Diagnostic::emerg("\"persistent\" requires \"mandatory\" parameter").at(word.span);
            return Err(error);
        }
    }
    conf.check = Some(draft);
    Ok(())
}

impl Draft {
    fn take(&mut self, word: &Word) -> Result<(), Diagnostic> {
        let invalid = || invalid_parameter(word);
        let count = |text| units::parse_number(text).and_then(|count| u32::try_from(count).ok());
        let name_end = word.text.iter().position(|&byte| byte == b'=').unwrap_or(word.text.len());
        let (name, value) = word.text.split_at(name_end);
        match (name, value.strip_prefix(b"=")) {
            (b"interval", Some(time)) => {
                self.interval = units::parse_time(time).filter(|time| !time.is_zero()).ok_or_else(invalid)?;
            }
            (b"jitter", Some(time)) => self.jitter = units::parse_time(time).ok_or_else(invalid)?,
            (b"fails", Some(text)) => {
                self.thresholds.fails = count(text).filter(|&count| count > 0).ok_or_else(invalid)?;
            }
            (b"passes", Some(text)) => {
                self.thresholds.passes = count(text).filter(|&count| count > 0).ok_or_else(invalid)?;
            }
            (b"uri", Some(uri)) if uri.starts_with(b"/") => self.uri = uri.into(),
            (b"match", Some(name)) => self.matches = Some(Word { text: name.into(), ..word.clone() }),
            (b"port", Some(text)) => {
                let port = count(text).and_then(|port| u16::try_from(port).ok()).filter(|&port| port > 0);
                self.port = Some(port.ok_or_else(invalid)?);
            }
            (b"mandatory", None) => self.before = BeforeFirstCheck::Checking,
            (b"keepalive_time", Some(time)) => self.keepalive_time = units::parse_time(time).ok_or_else(invalid)?,
            (b"type", Some(b"http")) => {}
            (b"type", Some(_)) => return Err(invalid().hint("checks speak http only")),
            _ => return Err(invalid()),
        }
        Ok(())
    }
}

/// Has the check of a location done, when its settings are complete.
pub(super) fn complete(conf: &Conf, builder: &mut Builder) -> Result<(), Diagnostic> {
    let Some(draft) = &conf.check else { return Ok(()) };
    let wrong = |message: &str| Err(Diagnostic::emerg(message).at(draft.span));
    let group = match &conf.pass {
        Some(Pass::Fixed { target, .. }) => match target.found {
            PassTarget::Referred(upstream) => upstream,
            _ => unreachable!("a URL without variables refers to its servers"),
        },
        Some(_) => return wrong("\"health_check\" cannot be used with variables in \"proxy_pass\""),
        None => return wrong("\"health_check\" requires \"proxy_pass\" in the same location"),
    };
    let matches = draft.matches.as_ref().map(|name| Match::find(&conf.matches, name)).transpose()?;
    let id = builder.http_mut().upstreams.add_check(group, draft.before, draft.span);
    let name = format!("health check {} of http upstreams", id.0 + 1);
    let service = HealthCheck { id, draft: draft.clone(), matches };
    builder.add_service(ServiceSpec::per_process(name, service), draft.span)
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
        let checker = Rc::new(Checker {
            check: http.upstreams.check(settings.id).clone(),
            requests: OwnRequests::new(context.worker(), configuration, settings.draft.server, settings.draft.scope),
            worker: Rc::clone(context.worker()),
            under_way: Cell::new(0),
            has_ended: Notify::new(),
            settings,
        });
        drop(http);
        let mut tasks = Tasks::default();
        while !context.is_stopping() {
            tasks.settle(&checker);
            context.unless_stopping(sleep(LOOK_FOR_PEERS_EVERY)).await;
        }
    }
}

/// The tasks of a service, which end with it.
#[derive(Default)]
struct Tasks {
    peers: Option<CheckedPeers>,
    tasks: Vec<Task>,
}

struct Task {
    peer: CheckedPeer,
    id: TaskId,
    /// As long as it runs.
    is_running: Weak<()>,
}

impl Tasks {
    /// Has the peers checked that are there now, and no others. A task that has panicked is started again.
    fn settle(&mut self, checker: &Rc<Checker>) {
        let has_run_dry = self.tasks.iter().any(|task| task.is_running.strong_count() == 0);
        if !has_run_dry && self.peers.as_ref().is_some_and(|peers| peers.is_current(&checker.check)) {
            return;
        }
        let peers = checker.check.peers();
        let mut known: std::collections::HashMap<usize, Task> =
            self.tasks.drain(..).map(|task| (task.peer.key(), task)).collect();
        for peer in peers.iter() {
            let task = known.remove(&peer.key()).filter(|task| task.is_running.strong_count() > 0);
            self.tasks.push(task.unwrap_or_else(|| start(checker, peer)));
        }
        known.into_values().for_each(|task| abort(task.id));
        self.peers = Some(peers);
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.tasks.drain(..).for_each(|task| abort(task.id));
    }
}

fn start(checker: &Rc<Checker>, peer: CheckedPeer) -> Task {
    let running = Rc::new(());
    let is_running = Rc::downgrade(&running);
    let (checker, own) = (Rc::clone(checker), peer.clone());
    let id = spawn(async move {
        let _running = running;
        checker.check_peer(&own).await;
    });
    Task { peer, id, is_running }
}

/// What the tasks of a service have in common.
struct Checker {
    settings: Arc<HealthCheck>,
    check: Check,
    requests: OwnRequests,
    worker: Rc<Worker>,
    /// How many peers are being asked.
    under_way: Cell<usize>,
    /// One of them is done.
    has_ended: Notify,
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

impl Checker {
    /// Checks one peer for as long as the task runs.
    async fn check_peer(&self, peer: &CheckedPeer) {
        let draft = &self.settings.draft;
        let mut kept = None;
        loop {
            if !draft.jitter.is_zero() {
                let most = u64::try_from(draft.jitter.as_millis()).unwrap_or(u64::MAX).max(1);
                sleep(Duration::from_millis(random_u64() % most)).await;
            }
            let permit = self.permit().await;
            let mut request = self.requests.begin();
            let result = self.check_once(peer, &mut request, &mut kept).await;
            drop(permit);
            self.take(peer, &request, result);
            drop(request);
            sleep(draft.interval).await;
        }
    }

    /// Waits until one more peer may be asked.
    async fn permit(&self) -> Permit<'_> {
        while self.under_way.get() >= UNDER_WAY_MAX {
            self.has_ended.notified().await;
        }
        self.under_way.set(self.under_way.get() + 1);
        Permit(self)
    }

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
                    let address = self.address(peer);
                    let connection = ClientConnection::open(&self.worker, &address, &options, tls.as_ref()).await;
                    Kept { connection: connection.map_err(Failure::Client)?, since: now() }
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

    fn address(&self, peer: &CheckedPeer) -> SocketAddress {
        match (peer.address.inet(), self.settings.draft.port) {
            (Some(mut address), Some(port)) => {
                address.set_port(port);
                SocketAddress::Inet(address)
            }
            _ => peer.address.clone(),
        }
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
        let log = |level: Level, message: &dyn Display| {
            let name = self.settings.matches.as_ref().map_or(BStr::new(""), |matches| matches.name());
            let (peer, group) = (&peer.name, self.check.group().name());
            let message = format_args!("{message}, health check \"{name}\" of peer {peer} in upstream \"{group}\"");
            request.scope().error_log.write(level, None, &message);
        };
        let (text, action) = match &result {
            Ok(()) => (None, ""),
            // It says nothing about the peer.
            Err(Failure::Client(ClientError::NoConnections)) => return self.worker.complain_of_connections(),
            Err(Failure::Request(error)) => {
                return log(Level::Error, &format_args!("{error} while preparing a request to an upstream"));
            }
            Err(Failure::Client(error)) => (Some(error.to_string()), error.step().text()),
            Err(Failure::Mismatch(mismatch)) => (Some(mismatch.to_string()), mismatch.action()),
        };
        // A peer that stays ill is told of once.
        let is_known = self.check.finds_ill(peer);
        if let Some(text) = text {
            log(if is_known { Level::Info } else { Level::Error }, &text);
        }
        match self.check.note(peer, result.is_ok(), self.settings.draft.thresholds) {
            HealthChange::None => {}
            HealthChange::Ill => log(Level::Warn, &format_args!("peer is unhealthy while {action}")),
            HealthChange::Well => log(Level::Notice, &"peer is healthy"),
        }
    }
}

/// Lets another peer be asked when it is dropped.
struct Permit<'c>(&'c Checker);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
        self.0.has_ended.notify_one();
    }
}
