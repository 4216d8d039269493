//! Tries servers until one has answered: the rules of `proxy_next_upstream`.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_next_upstream>)

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::tls::{NamedFailure, TlsClient, TlsFailure};
use gale_engine::transport::Transport;
use gale_engine::upstream::connecting::{self, CONNECTING, ConnectFailure, SHAKING_HANDS, log_timeout, shake_hands};
use gale_engine::upstream::{
    Chosen, ConnectionAge, Knowledge, NoPeer, PeerName, PoolKey, PooledConnection, Retry, Selection, Upstream,
    without_port,
};
use gale_engine::worker::CountedConnection;
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Bytes, Connecting, Moment, Output, SocketAddress, Stream};

use crate::request::phases::{CLIENT_LEFT, Flow, LocalBoxFuture};
use crate::request::request_body::log_error;
use crate::request::slow::{Cause, Wait};
use crate::request::{PassedTo, Request};
use crate::upstream::answering::{Answering, Carrier, Heading};
use crate::upstream::caching::{self, Caching};
use crate::upstream::exclusive::{Connection, Exclusive, may_bind};
use crate::upstream::http2::{self, Destination, Found, Http2Request, Shared};
use crate::upstream::receiving::{Malformed, ResponseReader, UpstreamHead};
use crate::upstream::record::{Attempt, Records};
use crate::upstream::response::{self, HeadRewriter};
use crate::upstream::sending::{BodyFraming, Kept, Pieces, RequestBody, SendError};
use crate::upstream::settings::{RetryOn, UpstreamSettings};

/// A request that is to be passed on, as its module has made it.
pub struct Passing<'p> {
    /// The servers to choose from.
    pub selection: Selection,
    /// The group, if sessions stick to its servers.
    pub upstream: Option<Arc<Upstream<Request>>>,
    /// The protocol as messages show it: `http://`.
    pub scheme: &'static str,
    /// How TLS is spoken to servers, whose names are evaluated for each of them; `None` in the clear.
    pub tls: Option<Box<PassingTls>>,
    /// Writes what a server is asked: `uri`, the head in `wire`, and what else depends on it. Called once before all
    /// servers, or with `request_dynamic` once for each of them.
    pub write: &'p WriteRequest<'p>,
    /// What is asked of the server, for messages.
    pub uri: Bytes,
    /// What goes on the wire before the request's body.
    pub wire: Wire<'p>,
    /// The request's body.
    pub body: RequestBody,
    /// What the location says.
    pub settings: &'p UpstreamSettings,
    /// How long all of it may take at most, whatever the location says: its client waits no longer.
    pub time_max: Option<Duration>,
    /// What becomes of the head's fields that name the server.
    pub rewriter: &'p dyn HeadRewriter,
    /// The protocol that the request asks to change to.
    pub upgrade: Option<Bytes>,
    /// What the cache has to do with it.
    pub caching: Option<Box<Caching>>,
}

/// Writes a request for a server. An error is the status that answers the client.
pub type WriteRequest<'p> = dyn Fn(&mut Request, &mut Passing<'_>) -> Result<(), u16> + 'p;

/// Writes nothing: the head is the same for all servers and was there before them.
pub fn written_before(_: &mut Request, _: &mut Passing<'_>) -> Result<(), u16> {
    Ok(())
}

/// How a request goes to a server, and its response comes back.
pub enum Wire<'p> {
    /// Over a connection that carries nothing else meanwhile.
    Alone(Alone<'p>),
    /// Over a connection that carries others, too: HTTP/2.
    Http2(Http2Request),
}

/// A request that has a connection to itself.
pub struct Alone<'p> {
    /// The request up to its body, as it goes on the wire; empty until it is written.
    pub head: Bytes,
    /// How the body goes on the wire.
    pub framing: &'static dyn BodyFraming,
    /// Makes a reader for a response.
    pub reader: &'p dyn Fn() -> Box<dyn ResponseReader>,
    /// Whether a request may go over a connection that was used before.
    pub reuses_connections: bool,
}

/// How a request is passed on over TLS.
pub struct PassingTls {
    /// What the configuration asks of servers.
    pub client: Arc<TlsClient>,
    /// The server's name: its certificate has to be for it, if certificates are looked at at all.
    pub name: Box<[u8]>,
    /// The names of the certificate that it is shown and of its key, where they depend on the request.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
}

impl PassingTls {
    /// For servers that the URL calls `host`, before names are evaluated that the location has.
    ///
    /// # Panics
    /// The scope was not prepared for TLS.
    pub fn new(settings: &UpstreamSettings, host: &[u8]) -> PassingTls {
        let client = settings.tls_client.as_ref().and_then(|client| client.get());
        let client = Arc::clone(client.expect("scopes that may speak TLS were prepared for it"));
        PassingTls { client, name: without_port(host).into(), certificate: None }
    }

    /// Evaluates the names that the location has, for the request and for the server that was chosen.
    pub fn evaluate(&mut self, request: &Request, settings: &UpstreamSettings) {
        if let Some(name) = settings.tls_name.get_opt() {
            self.name = without_port(&name.evaluate(request)).into();
        }
        if let Some((own, key)) = &settings.tls_certificate {
            self.certificate = Some((own.evaluate(request), key.evaluate(request)));
        }
    }

    /// What is asked of this server: with a certificate that depends on the request it is read now.
    pub(super) async fn client(&self) -> Result<Arc<TlsClient>, NamedFailure> {
        match &self.certificate {
            Some((certificate, key)) if self.client.needs_certificate() => {
                self.client.with_certificate(certificate, key).await
            }
            _ => Ok(Arc::clone(&self.client)),
        }
    }
}

/// What is being done, as messages have it.
const SENDING: &str = "sending request to upstream";
pub(super) const READING: &str = "reading response header from upstream";

/// How far a request has come with all servers together: what may be done again depends on it.
#[derive(Default)]
struct Progress {
    /// A byte of it was sent.
    is_sent: bool,
    /// Something of the client's body was taken that nobody has any more.
    has_taken_body: bool,
    /// The number of the connection whose server did not want it, or that had ended.
    avoided: Option<u64>,
    /// How often it was not looked at.
    unprocessed: u32,
    /// The beginning of a client's body, where connections are shared.
    kept: Option<Rc<RefCell<Kept>>>,
}

/// How often a server may have a request sent again that it has not looked at.
const UNPROCESSED_MAX: u32 = 3;

/// Why a server did not answer. The error log knows.
enum Failure {
    /// Another one may be tried, if the location says so of this; else this is the status. What was being done.
    OfServer(RetryOn, u16, &'static str),
    /// The connection had been used before, and the server closed it while it was idle.
    Stale,
    /// No other server would do better.
    Final(u16),
}

/// Passes a request on and makes the response out of what comes back. The error log knows what went wrong.
pub async fn pass_on(request: &mut Request, passing: &mut Passing<'_>) -> Flow {
    if !*passing.settings.request_dynamic.get()
        && let Err(status) = (passing.write)(request, passing)
    {
        return Flow::Respond(status);
    }
    let records = Records::begin(request);
    let settings_max = Some(*passing.settings.request_timeout.get()).filter(|time_max| !time_max.is_zero());
    let Some(time_max) = settings_max.into_iter().chain(passing.time_max).min() else {
        return try_servers(request, passing, &records).await;
    };
    records.set_deadline(gale_runtime::now() + time_max);
    match gale_runtime::timeout(time_max, Box::pin(try_servers(request, passing, &records))).await {
        Ok(flow) => flow,
        Err(_) => {
            log_timeout(request, "passing the request on");
            records.give_up(504);
            stale_or(request, passing, RetryOn::TIMEOUT, Flow::Respond(504))
        }
    }
}

/// Tries servers until one has answered or no other one may be tried.
async fn try_servers(request: &mut Request, passing: &mut Passing<'_>, records: &Rc<Records>) -> Flow {
    let began = gale_runtime::now();
    let mut tries: u64 = 0;
    let mut progress = Progress::default();
    loop {
        let started = gale_runtime::now();
        let mut queue_time = None;
        let chosen = match first_bound(request, passing, tries).map_or_else(|| passing.selection.next(), Ok) {
            // Only a group with a queue pays for waiting.
            Err(_) if passing.selection.can_wait() => {
                let _wait = Wait::begin(request, Cause::Queue);
                let chosen = Box::pin(passing.selection.wait()).await;
                queue_time = Some(gale_runtime::now().since(started));
                chosen
            }
            chosen => chosen,
        };
        let mut chosen = match chosen {
            Ok(chosen) => chosen,
            Err(none) => {
                let flow = no_server(request, passing, records, none);
                records.last().queue_time = queue_time;
                return stale_or(request, passing, RetryOn::ERROR, flow);
            }
        };
        tries += 1;
        records.add(Arc::clone(chosen.shared_name()), started);
        records.last().queue_time = queue_time;
        if *passing.settings.request_dynamic.get()
            && let Err(status) = (passing.write)(request, passing)
        {
            return end_unwritten(records, &mut chosen, status);
        }
        if let Some(tls) = &mut passing.tls {
            tls.evaluate(request, passing.settings);
        }
        show(request, passing, Arc::clone(chosen.shared_name()));
        let mut may_reuse = match &passing.wire {
            Wire::Alone(wire) => wire.reuses_connections,
            Wire::Http2(_) => true,
        };
        let answer = loop {
            match attempt(request, passing, &chosen, records, may_reuse, &mut progress).await {
                Err(Failure::Stale) => {
                    // Unseen, as if it had begun now.
                    may_reuse = false;
                    records.note(Attempt::begin_anew);
                }
                answer => break answer,
            }
        };
        let mut may_go_on = false;
        let (on, status, action) = match answer {
            Ok((mut answering, head)) => {
                if let Some(time) = records.last().header_time {
                    chosen.header_received(time);
                }
                records.last().status = head.status;
                answering.note_authentication(&head.fields);
                if head.status >= 500 {
                    chosen.note_error();
                }
                let on = RetryOn::of_status(head.status).filter(|_| passing.selection.tries_left() > 0);
                may_go_on = on.is_some_and(|on| passing.take_retry(request, on, &progress, tries, began));
                match on.filter(|_| may_go_on) {
                    None => {
                        if let Some(on) = RetryOn::of_status(head.status)
                            && let Some(flow) = caching::serve_stale(request, passing, on, Some(head.status))
                        {
                            answering.end_replaced(request, &chosen);
                            return flow;
                        }
                        answering.chosen = Some(chosen);
                        return response::begin(request, passing, answering, head);
                    }
                    Some(on) => {
                        answering.end_replaced(request, &chosen);
                        (on, head.status, READING)
                    }
                }
            }
            Err(Failure::OfServer(on, status, action)) => (on, status, action),
            Err(Failure::Final(status)) => {
                chosen.note_served(&records.last().served());
                return Flow::Respond(status);
            }
            Err(Failure::Stale) => unreachable!("it was tried anew"),
        };
        end_attempt(request, records, chosen, on, status, action);
        if passing.selection.tries_left() == 0
            || !may_go_on && !passing.take_retry(request, on, &progress, tries, began)
        {
            return stale_or(request, passing, on, Flow::Respond(status));
        }
    }
}

/// The server that the client's own connection leads to, before any other is tried.
#[inline]
fn first_bound(request: &Request, passing: &mut Passing<'_>, tries: u64) -> Option<Chosen> {
    let pool = passing.selection.connections().filter(|pool| tries == 0 && may_bind(request, pool))?;
    let peer = pool.bound_peer(request.exchange().connection())?;
    passing.selection.first_at(&peer)
}

/// The request cannot be written for this server, which has no part in that.
#[cold]
fn end_unwritten(records: &Records, chosen: &mut Chosen, status: u16) -> Flow {
    records.note(|attempt, now| {
        attempt.status = status;
        attempt.end(now);
    });
    chosen.note_served(&records.last().served());
    Flow::Respond(status)
}

/// The server has failed, or has given an answer in place of which another one is tried.
#[cold]
fn end_attempt(
    request: &Request,
    records: &Records,
    mut chosen: Chosen,
    on: RetryOn,
    status: u16,
    action: &'static str,
) {
    records.note(|attempt, now| {
        attempt.status = status;
        attempt.end(now);
    });
    chosen.note_served(&records.last().served());
    match on {
        // Such an answer says nothing against the server.
        RetryOn::HTTP_403 | RetryOn::HTTP_404 => {}
        RetryOn::DENIED => chosen.abandon(),
        _ if chosen.fail() => {
            request.log(Level::Warn, format_args!("upstream server temporarily disabled while {action}"));
        }
        _ => {}
    }
}

/// Something stale in place of what the request would end with, if the cache has it and the location allows that.
#[cold]
fn stale_or(request: &mut Request, passing: &mut Passing<'_>, on: RetryOn, flow: Flow) -> Flow {
    if let Some(flow) = caching::serve_stale(request, passing, on, None) {
        return flow;
    }
    if let Flow::Respond(status) = flow {
        caching::tell_error(passing, status);
    }
    flow
}

/// All servers of the group are down, or were tried.
#[cold]
fn no_server(request: &mut Request, passing: &Passing<'_>, records: &Records, none: NoPeer) -> Flow {
    let group = PeerName::of_group(passing.selection.group_name());
    records.add(Arc::clone(&group), gale_runtime::now());
    records.note(|attempt, now| {
        attempt.status = 502;
        attempt.end(now);
    });
    show(request, passing, group);
    request.log(Level::Error, format_args!("{none} while connecting to upstream"));
    Flow::Respond(502)
}

impl Passing<'_> {
    /// Takes over what `write` has made for a connection that carries nothing else.
    pub fn set_head(&mut self, head: Bytes) {
        if let Wire::Alone(wire) = &mut self.wire {
            wire.head = head;
        }
    }

    /// Whether the next server is tried, after so many tries that began then. If so, it counts in the group's budget.
    #[cold]
    fn take_retry(&self, request: &Request, on: RetryOn, progress: &Progress, tries: u64, began: Moment) -> bool {
        if !self.may_retry(request, on, progress, tries, began) {
            return false;
        }
        match self.selection.take_retry() {
            Retry::Granted => true,
            Retry::Refused { is_news } => {
                if is_news {
                    let group = self.selection.group_name();
                    let message =
                        format_args!("retry budget of upstream \"{group}\" is used up, no other server is tried");
                    request.log(Level::Warn, message);
                }
                false
            }
        }
    }

    /// Whether the location says that the next server is tried, after so many tries that began then.
    fn may_retry(&self, request: &Request, on: RetryOn, progress: &Progress, tries: u64, began: Moment) -> bool {
        let settings = self.settings;
        let tries_max = *settings.next_upstream_tries.get();
        let time_max = *settings.next_upstream_timeout.get();
        let on = if progress.is_sent && !is_idempotent(request) { on.or(RetryOn::NON_IDEMPOTENT) } else { on };
        settings.next_upstream.get().has(on)
            && (tries_max == 0 || tries < tries_max)
            && !progress.has_taken_body
            && (time_max.is_zero() || gale_runtime::now().since(began) < time_max)
    }
}

/// Whether credentials, or a challenge, are of a kind that authenticates the connection and not the request. (RFC 4559
/// §6, and Microsoft's NTLM over HTTP)
pub(super) fn authenticates_connection(value: &[u8]) -> bool {
    let scheme = value.split(|byte| *byte == b' ' || *byte == b',').next().unwrap_or_default();
    [&b"NTLM"[..], b"Negotiate"].iter().any(|name| scheme.eq_ignore_ascii_case(name))
}

/// Whether a request may be sent twice. (RFC 9110 §9.2.2; nginx's list)
fn is_idempotent(request: &Request) -> bool {
    !matches!(request.method(), Method::Post | Method::Lock | Method::Patch)
}

/// From now on messages say where the request is passed to.
fn show(request: &mut Request, passing: &Passing<'_>, peer: Arc<PeerName>) {
    request.passed_to = Some(PassedTo { scheme: passing.scheme, peer, uri: passing.uri.clone() });
}

/// Sends the request to one server and reads the response's head.
async fn attempt(
    request: &Request,
    passing: &Passing<'_>,
    chosen: &Chosen,
    records: &Rc<Records>,
    may_reuse: bool,
    progress: &mut Progress,
) -> Result<(Box<Answering>, Box<UpstreamHead>), Failure> {
    // Also where a connection is there already: it may be somebody else's.
    if !passing.settings.allows_server(request) {
        return Err(denied(request));
    }
    let mut answering = match begin(request, passing, chosen, records, may_reuse, progress)? {
        Begun::Now(answering) => answering,
        Begun::Later(answering) => answering.await?,
    };
    let mut heading = Heading::default();
    let found = poll_fn(|context| answering.poll_head(request, passing.settings, &mut heading, context)).await;
    progress.is_sent |= answering.sent() > 0 && !matches!(found, Err(End::Unprocessed));
    progress.has_taken_body |= answering.has_taken_body();
    match found {
        Ok(head) => {
            records.note(|attempt, now| attempt.header_time = Some(now.since(attempt.started)));
            Ok((answering, head))
        }
        Err(end) => Err(failure_of(request, passing, &answering, records, progress, end)),
    }
}

/// A request that is on its way to a server.
enum Begun<'a> {
    Now(Box<Answering>),
    /// A connection to it has to be waited for.
    Later(LocalBoxFuture<'a, Result<Box<Answering>, Failure>>),
}

/// Begins to send the request to one server. A function of its own, so that the future of a request has no room for
/// what is only passed through.
fn begin<'a>(
    request: &'a Request,
    passing: &'a Passing<'_>,
    chosen: &'a Chosen,
    records: &'a Rc<Records>,
    may_reuse: bool,
    progress: &'a mut Progress,
) -> Result<Begun<'a>, Failure> {
    let wire = match &passing.wire {
        Wire::Alone(wire) => wire,
        Wire::Http2(head) => {
            return Ok(Begun::Later(Box::pin(async move {
                let shared = share(request, passing, head, chosen, records, progress).await?;
                Ok(Answering::begin(request, passing, records, || Carrier::Shared(Box::new(shared))))
            })));
        }
    };
    if may_reuse && let Some(connection) = take_idle(request, passing, chosen) {
        return begin_alone(request, passing, wire, records, connection).map(Begun::Now);
    }
    match begin_to_connect(request, passing, wire, chosen, records)? {
        Connected::Made(connection) => begin_alone(request, passing, wire, records, connection).map(Begun::Now),
        Connected::Opening(key, opening) => Ok(Begun::Later(Box::pin(async move {
            let connection = finish_connecting(request, passing, chosen, key, opening).await?;
            begin_alone(request, passing, wire, records, connection)
        }))),
    }
}

/// Begins to send the request over a connection that it has to itself.
#[inline]
fn begin_alone(
    request: &Request,
    passing: &Passing<'_>,
    wire: &Alone<'_>,
    records: &Rc<Records>,
    connection: Connection,
) -> Result<Box<Answering>, Failure> {
    let carrier = || Carrier::Exclusive(Exclusive::begin(passing, wire, connection));
    let mut answering = Answering::begin(request, passing, records, carrier);
    answering.frame_end(&passing.body).map_err(|_| failed_for_memory(request))?;
    Ok(answering)
}

/// What it means that there is no head.
#[cold]
fn failure_of(
    request: &Request,
    passing: &Passing<'_>,
    answering: &Answering,
    records: &Records,
    progress: &mut Progress,
    end: End,
) -> Failure {
    let received = match answering.shared() {
        Some(shared) => shared.has_received(),
        None => records.last().bytes_received > 0,
    };
    let is_unprocessed = matches!(end, End::Unprocessed);
    let repeats_anything = passing.settings.next_upstream.get().has(RetryOn::NON_IDEMPOTENT);
    let may_be_sent_again =
        !progress.has_taken_body && (is_idempotent(request) || answering.sent() == 0 || repeats_anything);
    let is_stale = answering.is_reused() && !received && may_be_sent_again && end.is_of_connection();
    let is_refused = is_unprocessed && !progress.has_taken_body && progress.unprocessed < UNPROCESSED_MAX;
    if is_stale || is_refused {
        progress.avoided = answering.shared().map(Shared::connection_number);
        progress.unprocessed += u32::from(is_refused);
        return Failure::Stale;
    }
    end.tell(request)
}

/// How connections to this server are told apart from others.
fn pool_key(request: &Request, passing: &Passing<'_>, chosen: &Chosen) -> PoolKey {
    let user = passing.settings.id;
    let local = passing.settings.local_address(request);
    let mut made_with = local.map_or(Vec::new(), |local| local.to_string().into_bytes());
    // A connection that was made for one client carries requests of no other.
    let header = passing.settings.proxy_header(request);
    if !header.is_empty() {
        made_with.push(0);
        made_with.extend(u32::try_from(header.len()).unwrap_or(u32::MAX).to_be_bytes());
        made_with.extend(header);
    }
    if let Some(tls) = &passing.tls {
        made_with.push(0);
        made_with.extend_from_slice(tls.client.identity());
        made_with.extend_from_slice(&tls.name);
        if let Some((certificate, key)) = &tls.certificate {
            made_with.extend([&[0], certificate.as_slice(), &[0], key.as_slice()].concat());
        }
    }
    let made_with = (!made_with.is_empty()).then(|| made_with.into());
    PoolKey { made_with, ..PoolKey::new(chosen.address(), user) }
}

fn count_connection(request: &Request) -> Result<CountedConnection, Failure> {
    let worker = &request.worker().common;
    CountedConnection::open(worker).ok_or_else(|| {
        worker.complain_of_connections();
        Failure::Final(503)
    })
}

/// An idle connection to the server, if there is one.
fn take_idle(request: &Request, passing: &Passing<'_>, chosen: &Chosen) -> Option<Connection> {
    let pool = chosen.connections()?;
    let key = pool_key(request, passing, chosen);
    // What cannot be sent twice does not meet a connection whose end is on its way to the driver.
    let knowledge = if is_idempotent(request) { Knowledge::Driver } else { Knowledge::Kernel };
    let bound = match may_bind(request, pool) {
        true => pool.take_bound(request.exchange().connection(), &key, knowledge),
        false => None,
    };
    let is_bound = bound.is_some();
    let own = bound.or_else(|| pool.take(&request.worker().common, &key, knowledge))?;
    Some(Connection { own, input: Buffer::new(), has_ended: false, key: Some(key), is_reused: true, is_bound })
}

/// A connection to the server, as far as it comes without waiting.
enum Connected {
    Made(Connection),
    /// The rest has to be waited for.
    Opening(Option<PoolKey>, Opening),
}

/// A connection that is being made.
struct Opening {
    connecting: Connecting,
    counted: CountedConnection,
    recording: Recording,
}

impl Opening {
    /// Begins to connect to the server.
    fn begin(
        request: &Request,
        settings: &UpstreamSettings,
        chosen: &Chosen,
        records: &Rc<Records>,
    ) -> Result<Opening, Failure> {
        let recording = Recording(Rc::clone(records));
        let options = settings.connect_options(request);
        let counted = count_connection(request)?;
        let connecting = connecting::begin(request, &options, chosen.address(), chosen.name());
        Ok(Opening { connecting: connecting.map_err(of_connecting)?, counted, recording })
    }
}

fn new_connection(transport: Transport, counted: CountedConnection, key: Option<PoolKey>) -> Connection {
    let own = PooledConnection::new(transport, ConnectionAge::new(), counted);
    Connection { own, input: Buffer::new(), has_ended: false, key, is_reused: false, is_bound: false }
}

/// A new connection to the server, which may be there at once: over a Unix socket in the clear.
fn begin_to_connect(
    request: &Request,
    passing: &Passing<'_>,
    wire: &Alone<'_>,
    chosen: &Chosen,
    records: &Rc<Records>,
) -> Result<Connected, Failure> {
    let is_pooled = wire.reuses_connections && chosen.connections().is_some();
    let key = is_pooled.then(|| pool_key(request, passing, chosen));
    let opening = Opening::begin(request, passing.settings, chosen, records)?;
    if passing.tls.is_some() || passing.settings.sends_proxy_header() {
        return Ok(Connected::Opening(key, opening));
    }
    let Opening { connecting, counted, recording } = opening;
    Ok(match connecting.made() {
        Ok(stream) => {
            recording.note_connected();
            set_nodelay(&stream, chosen.address());
            Connected::Made(new_connection(Transport::Plain(stream), counted, key))
        }
        Err(connecting) => Connected::Opening(key, Opening { connecting, counted, recording }),
    })
}

async fn finish_connecting(
    request: &Request,
    passing: &Passing<'_>,
    chosen: &Chosen,
    key: Option<PoolKey>,
    opening: Opening,
) -> Result<Connection, Failure> {
    let (stream, counted) = finish_opening(request, passing, chosen, opening).await?;
    Ok(new_connection(stream, counted, key))
}

fn set_nodelay(stream: &Stream, address: &SocketAddress) {
    if address.inet().is_some() {
        // Whether the kernel waits for more is a matter of speed alone.
        let _ = stream.set_nodelay(true);
    }
}

/// Connects to the server, and shakes hands with it.
async fn finish_opening(
    request: &Request,
    passing: &Passing<'_>,
    chosen: &Chosen,
    opening: Opening,
) -> Result<(Transport, CountedConnection), Failure> {
    let Opening { connecting, counted, recording } = opening;
    let address: &SocketAddress = chosen.address();
    let stream = connecting::finish(request, connecting, address, chosen.name()).await.map_err(of_connecting)?;
    set_nodelay(&stream, address);
    let header = passing.settings.proxy_header(request);
    if !header.is_empty() {
        Box::pin(introduce(request, passing.settings, &stream, header)).await?;
    }
    let stream = match &passing.tls {
        None => Transport::Plain(stream),
        Some(tls) => {
            // As in nginx this may take as long again as connecting.
            let timeout = *passing.settings.connect_timeout.get();
            let client = tls.client().await.map_err(|failure| {
                request.log(Level::Error, format_args!("{failure} while {SHAKING_HANDS}"));
                Failure::Final(500)
            })?;
            let shaken = shake_hands(request, &client, &tls.name, stream, timeout, chosen.handshakes()).await;
            Transport::Tls(Box::new(shaken.map_err(of_handshake)?))
        }
    };
    recording.note_connected();
    Ok((stream, counted))
}

async fn open(
    request: &Request,
    passing: &Passing<'_>,
    chosen: &Chosen,
    records: &Rc<Records>,
) -> Result<(Transport, CountedConnection), Failure> {
    let opening = Opening::begin(request, passing.settings, chosen, records)?;
    finish_opening(request, passing, chosen, opening).await
}

/// Tells the server who the client is, in the clear, before anything else.
async fn introduce(
    request: &Request,
    settings: &UpstreamSettings,
    stream: &Stream,
    header: Vec<u8>,
) -> Result<(), Failure> {
    let mut output = Output::new();
    output.push(header);
    match gale_runtime::timeout(*settings.send_timeout.get(), stream.send_all(&mut output)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            let error = OsErrorText(&error);
            request.log(Level::Error, format_args!("send() failed {error} while {CONNECTING}"));
            Err(Failure::OfServer(RetryOn::ERROR, 502, CONNECTING))
        }
        Err(_) => Err(timed_out_connecting(request)),
    }
}

/// A stream of a connection to the server: of one that there is, or of a new one. Not of the one
/// that is avoided.
async fn share(
    request: &Request,
    passing: &Passing<'_>,
    head: &Http2Request,
    chosen: &Chosen,
    records: &Rc<Records>,
    progress: &mut Progress,
) -> Result<Shared, Failure> {
    let settings = passing.settings;
    let key = pool_key(request, passing, chosen);
    let destination = Destination::new(key, chosen.connections());
    let until = gale_runtime::now() + *settings.connect_timeout.get();
    loop {
        let left = until.since(gale_runtime::now());
        let (connection, is_reused) = match http2::find(&request.worker().common, &destination, progress.avoided) {
            Found::Room(connection) => (connection, true),
            Found::None(opening) => match open(request, passing, chosen, records).await {
                Ok((transport, counted)) => (opening.begin(transport, counted, settings.head_max()), false),
                Err(failure) => {
                    // What is wrong with this request is not wrong with others.
                    if let Failure::OfServer(..) = failure {
                        opening.fail();
                    }
                    return Err(failure);
                }
            },
            Found::Beginning(news) => match gale_runtime::timeout(left, news.notified()).await {
                Ok(()) => continue,
                Err(_) => return Err(timed_out_connecting(request)),
            },
            Found::Opening(outcome) => match gale_runtime::timeout(left, outcome.known()).await {
                Ok(false) => continue,
                Ok(true) => {
                    request.log(Level::Error, format_args!("no shared connection is available while {CONNECTING}"));
                    return Err(Failure::OfServer(RetryOn::ERROR, 502, CONNECTING));
                }
                Err(_) => return Err(timed_out_connecting(request)),
            },
        };
        let pieces = Pieces::keeping(&passing.body, &mut progress.kept);
        return Shared::begin(&connection, head, pieces, settings, is_reused).map_err(|_| {
            request.log(
                Level::Alert,
                format_args!("no stream is available on a connection with free capacity while {CONNECTING}"),
            );
            Failure::Final(500)
        });
    }
}

#[cold]
fn denied(request: &Request) -> Failure {
    request.log(Level::Error, format_args!("access to upstream server is denied while {CONNECTING}"));
    Failure::OfServer(RetryOn::DENIED, 403, CONNECTING)
}

fn timed_out_connecting(request: &Request) -> Failure {
    log_timeout(request, CONNECTING);
    Failure::OfServer(RetryOn::TIMEOUT, 504, CONNECTING)
}

fn of_connecting(failure: ConnectFailure) -> Failure {
    match failure {
        ConnectFailure::TimedOut => Failure::OfServer(RetryOn::TIMEOUT, 504, CONNECTING),
        ConnectFailure::Refused => Failure::OfServer(RetryOn::ERROR, 502, CONNECTING),
        ConnectFailure::Local => Failure::Final(500),
    }
}

fn of_handshake(failure: ConnectFailure) -> Failure {
    match failure {
        ConnectFailure::TimedOut => Failure::OfServer(RetryOn::TIMEOUT, 504, SHAKING_HANDS),
        _ => Failure::OfServer(RetryOn::ERROR, 502, SHAKING_HANDS),
    }
}

/// Why nothing more can be received, in nginx's words.
pub(super) fn receive_failure(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsFailure>()) {
        Some(TlsFailure::CutShort) => "upstream prematurely closed connection without close_notify".to_owned(),
        Some(failure) => failure.to_string().replacen("SSL_do_handshake()", "SSL_read()", 1),
        None => format!("recv() failed {}", OsErrorText(error)),
    }
}

/// An attempt that is given up while it connects has ended then.
struct Recording(Rc<Records>);

impl Recording {
    fn note_connected(&self) {
        self.0.note(|attempt, now| attempt.connect_time = Some(now.since(attempt.started)));
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.0.note(|attempt, now| attempt.connecting_ended(now));
    }
}

#[cold]
fn failed_for_memory(request: &Request) -> Failure {
    request.log(Level::Alert, format_args!("the worker's memory for buffers is exhausted"));
    Failure::Final(503)
}

/// Why there is no head.
pub(super) enum End {
    /// The connection ended before it.
    Closed,
    /// The connection takes nothing more.
    Sending(io::Error),
    /// The connection failed.
    Receiving(io::Error),
    /// The server has said nothing for too long.
    Silent,
    /// What came is no head.
    Malformed(Malformed),
    /// The request could not be sent.
    Send(SendError),
    /// The server has not looked at the request.
    Unprocessed,
}

impl End {
    /// Whether a connection that was idle for too long looks like this.
    fn is_of_connection(&self) -> bool {
        match self {
            End::Closed | End::Sending(_) => true,
            End::Receiving(error) => error.kind() != io::ErrorKind::OutOfMemory,
            End::Silent | End::Malformed(_) | End::Send(_) | End::Unprocessed => false,
        }
    }

    /// Says so in the error log, in nginx's words.
    #[cold]
    fn tell(self, request: &Request) -> Failure {
        match self {
            End::Closed => {
                request.log(Level::Error, format_args!("upstream prematurely closed connection while {READING}"));
                Failure::OfServer(RetryOn::ERROR, 502, READING)
            }
            End::Sending(error) | End::Send(SendError::Server(error)) => {
                let error = OsErrorText(&error);
                request.log(Level::Error, format_args!("send() failed {error} while {SENDING}"));
                Failure::OfServer(RetryOn::ERROR, 502, SENDING)
            }
            End::Receiving(error) if error.kind() == io::ErrorKind::OutOfMemory && error.raw_os_error().is_none() => {
                failed_for_memory(request)
            }
            End::Receiving(error) => {
                request.log(Level::Error, format_args!("{} while {READING}", receive_failure(&error)));
                Failure::OfServer(RetryOn::ERROR, 502, READING)
            }
            End::Unprocessed => {
                request.log(Level::Error, format_args!("upstream refused the request while {READING}"));
                Failure::OfServer(RetryOn::ERROR, 502, READING)
            }
            End::Silent => {
                log_timeout(request, READING);
                Failure::OfServer(RetryOn::TIMEOUT, 504, READING)
            }
            End::Send(SendError::TimedOut) => {
                log_timeout(request, SENDING);
                Failure::OfServer(RetryOn::TIMEOUT, 504, SENDING)
            }
            End::Malformed(malformed) => {
                if !malformed.is_told() {
                    request.log(Level::Error, format_args!("{malformed} while {READING}"));
                }
                Failure::OfServer(RetryOn::INVALID_HEADER, 502, READING)
            }
            End::Send(SendError::Client(error)) => {
                log_error(request, error);
                let has_left = error == crate::request::exchange::RequestBodyError::PeerGone;
                Failure::Final(if has_left { CLIENT_LEFT } else { error.status() })
            }
            End::Send(SendError::Stored(error)) => {
                request.log(Level::Crit, format_args!("{error} while {SENDING}"));
                Failure::Final(500)
            }
            End::Send(SendError::NoMemory) => failed_for_memory(request),
        }
    }
}
