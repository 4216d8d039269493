//! Tries servers until one answers, by the rules of `proxy_next_upstream`.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_next_upstream>)

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_http::request::phases::{CLIENT_LEFT, Flow, LocalBoxFuture};
use gale_http::request::request_body::log_error;
use gale_http::request::slow::{Cause, Wait};
use gale_http::request::{PassedTo, Request};
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Connecting, Moment, Output, SocketAddress, Stream};
use gale_tls::Transport;
use gale_upstream::connecting::{self, CONNECTING, ConnectFailure, SHAKING_HANDS, log_timeout, shake_hands};
use gale_upstream::{Chosen, ConnectionAge, Knowledge, NoPeer, PeerName, PoolKey, PooledConnection, Retry};
use gale_worker::CountedConnection;

use crate::answering::{Answering, Carrier};
use crate::caching;
use crate::exclusive::{Connection, Exclusive, may_bind};
use crate::failure::{End, READING, receive_failure};
use crate::heading::Heading;
use crate::http2::{self, Destination, Found, Http2Request, Shared};
use crate::passing::{Alone, Passing, Wire};
use crate::receiving::UpstreamHead;
use crate::record::{Attempt, Records};
use crate::response;
use crate::sending::{Kept, Pieces, SendError};
use crate::settings::{RetryOn, UpstreamSettings};

/// Current action, for messages.
const SENDING: &str = "sending request to upstream";

/// Progress of a request over all servers, which decides about retries.
#[derive(Default)]
struct Progress {
    /// True if a byte of the request was sent.
    is_sent: bool,
    /// True if a part of the client's body was consumed and is not kept.
    has_taken_body: bool,
    /// Number of the shared connection to avoid, because its server refused the request or it has ended.
    avoided: Option<u64>,
    /// Number of times that a server has not processed the request.
    unprocessed: u32,
    /// The beginning of the client's body, for shared connections.
    kept: Option<Rc<RefCell<Kept>>>,
}

/// Maximum number of repetitions of a request that a server has not processed.
const UNPROCESSED_MAX: u32 = 3;

/// Reason for which a server did not answer; already in the error log.
enum Failure {
    /// Another server may be tried if the location allows it for this condition; otherwise the status is answered. With
    /// the action for messages.
    OfServer(RetryOn, u16, &'static str),
    /// A reused connection, which the server closed while it was idle.
    Stale,
    /// Another server would fail too.
    Final(u16),
}

/// Passes a request on and creates the response. Failures are logged.
pub async fn pass_on(request: &mut Request, passing: &mut Passing<'_>) -> Flow {
    if !*passing.settings.head.request_dynamic.get()
        && let Err(status) = (passing.write)(request, passing)
    {
        return Flow::Respond(status);
    }
    let records = Records::begin(request);
    let settings_max = Some(*passing.settings.deadline.request_timeout.get()).filter(|time_max| !time_max.is_zero());
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

/// Tries servers until one answers or no other one may be tried.
async fn try_servers(request: &mut Request, passing: &mut Passing<'_>, records: &Rc<Records>) -> Flow {
    let began = gale_runtime::now();
    let mut tries: u64 = 0;
    let mut progress = Progress::default();
    loop {
        let started = gale_runtime::now();
        let mut queue_time = None;
        let chosen = match first_bound(request, passing, tries).map_or_else(|| passing.selection.next(), Ok) {
            // Boxed, so that only groups with a queue have the future of the wait.
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
        if *passing.settings.head.request_dynamic.get()
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
                    // The attempt is recorded as if it began now.
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
            Err(Failure::Stale) => unreachable!("a stale connection was replaced"),
        };
        end_attempt(request, records, chosen, on, status, action);
        if passing.selection.tries_left() == 0
            || !may_go_on && !passing.take_retry(request, on, &progress, tries, began)
        {
            return stale_or(request, passing, on, Flow::Respond(status));
        }
    }
}

/// The server of the client's own connection, which is tried before any other.
#[inline]
fn first_bound(request: &Request, passing: &mut Passing<'_>, tries: u64) -> Option<Chosen> {
    let pool = passing.selection.connections().filter(|pool| tries == 0 && may_bind(request, pool))?;
    let peer = pool.bound_peer(request.exchange().connection())?;
    passing.selection.first_at(&peer)
}

/// Ends an attempt because the request cannot be written; the server is not at fault.
#[cold]
fn end_unwritten(records: &Records, chosen: &mut Chosen, status: u16) -> Flow {
    records.note(|attempt, now| {
        attempt.status = status;
        attempt.end(now);
    });
    chosen.note_served(&records.last().served());
    Flow::Respond(status)
}

/// Ends an attempt that has failed, or whose answer is replaced by that of another server.
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
        // This answer is no failure of the server.
        RetryOn::HTTP_403 | RetryOn::HTTP_404 => {}
        RetryOn::DENIED => chosen.abandon(),
        _ if chosen.fail() => {
            request.log(Level::Warn, format_args!("upstream server temporarily disabled while {action}"));
        }
        _ => {}
    }
}

/// A stale response in place of the error, if the cache has one and the location allows it.
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
    /// True if the next server is tried after `tries` tries since `began`. If so, the group's retry budget is charged.
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

    /// True if the location allows to try the next server after `tries` tries since `began`.
    fn may_retry(&self, request: &Request, on: RetryOn, progress: &Progress, tries: u64, began: Moment) -> bool {
        let settings = self.settings;
        let tries_max = *settings.retry.next_upstream_tries.get();
        let time_max = *settings.retry.next_upstream_timeout.get();
        let on = if progress.is_sent && !is_idempotent(request) { on.or(RetryOn::NON_IDEMPOTENT) } else { on };
        settings.retry.next_upstream.get().has(on)
            && (tries_max == 0 || tries < tries_max)
            && !progress.has_taken_body
            && (time_max.is_zero() || gale_runtime::now().since(began) < time_max)
    }
}

/// True if a request may be sent twice. (RFC 9110 §9.2.2; nginx's list)
fn is_idempotent(request: &Request) -> bool {
    !matches!(request.method(), Method::Post | Method::Lock | Method::Patch)
}

/// Sets the server that messages show.
fn show(request: &mut Request, passing: &Passing<'_>, peer: Arc<PeerName>) {
    request.show_passed_to(PassedTo { scheme: passing.scheme, peer, uri: passing.uri.clone() });
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
    // Checked even if a connection exists: it may have been opened for another request.
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

/// A request being sent to a server.
enum Begun<'a> {
    Now(Box<Answering>),
    /// The connection has to be awaited.
    Later(LocalBoxFuture<'a, Result<Box<Answering>, Failure>>),
}

/// Begins to send the request to one server. A separate function, so that its values do not enlarge the future of the
/// request.
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

/// Begins to send the request over a connection of its own.
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

/// The failure for a response without a head.
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
    let repeats_anything = passing.settings.retry.next_upstream.get().has(RetryOn::NON_IDEMPOTENT);
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

/// The key under which connections to this server are kept.
fn pool_key(request: &Request, passing: &Passing<'_>, chosen: &Chosen) -> PoolKey {
    let user = passing.settings.id;
    let local = passing.settings.local_address(request);
    let mut made_with = local.map_or(Vec::new(), |local| local.to_string().into_bytes());
    // A connection with a header for one client carries requests of no other.
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

/// Takes an idle connection to the server, if there is one.
fn take_idle(request: &Request, passing: &Passing<'_>, chosen: &Chosen) -> Option<Connection> {
    let pool = chosen.connections()?;
    let key = pool_key(request, passing, chosen);
    // A request that cannot be sent twice does not use a connection whose end the kernel knows but the driver has not
    // reported yet.
    let knowledge = if is_idempotent(request) { Knowledge::Driver } else { Knowledge::Kernel };
    let bound = match may_bind(request, pool) {
        true => pool.take_bound(request.exchange().connection(), &key, knowledge),
        false => None,
    };
    let is_bound = bound.is_some();
    let own = bound.or_else(|| pool.take(&request.worker().common, &key, knowledge))?;
    Some(Connection { own, input: Buffer::new(), has_ended: false, key: Some(key), is_reused: true, is_bound })
}

/// A connection to the server, as far as it could be made without waiting.
enum Connected {
    Made(Connection),
    /// The rest has to be awaited.
    Opening(Option<PoolKey>, Opening),
}

/// A connection being opened.
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

/// Begins a new connection to the server. It is ready at once for a Unix socket without TLS.
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
        // An error is ignored: the option only affects latency.
        let _ = stream.set_nodelay(true);
    }
}

/// Waits for the connection and performs the TLS handshake.
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
            // As in nginx the handshake has the connect timeout again.
            let timeout = *passing.settings.connect.connect_timeout.get();
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

/// Sends the PROXY protocol header, before TLS.
async fn introduce(
    request: &Request,
    settings: &UpstreamSettings,
    stream: &Stream,
    header: Vec<u8>,
) -> Result<(), Failure> {
    let mut output = Output::new();
    output.push(header);
    match gale_runtime::timeout(*settings.exchange.send_timeout.get(), stream.send_all(&mut output)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            let error = OsErrorText(&error);
            request.log(Level::Error, format_args!("send() failed {error} while {CONNECTING}"));
            Err(Failure::OfServer(RetryOn::ERROR, 502, CONNECTING))
        }
        Err(_) => Err(timed_out_connecting(request)),
    }
}

/// Opens a stream on an existing or a new connection to the server, other than the avoided one.
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
    let until = gale_runtime::now() + *settings.connect.connect_timeout.get();
    loop {
        let left = until.since(gale_runtime::now());
        let (connection, is_reused) = match http2::find(&request.worker().common, &destination, progress.avoided) {
            Found::Room(connection) => (connection, true),
            Found::None(opening) => match open(request, passing, chosen, records).await {
                Ok((transport, counted)) => (opening.begin(transport, counted, settings.head_max()), false),
                Err(failure) => {
                    // Only a failure of the server concerns the other requests that wait for this connection.
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

/// Guard that ends an attempt when connecting is abandoned.
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

impl End {
    /// Logs the error in nginx's words.
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
                let has_left = error == gale_http::request::exchange::RequestBodyError::PeerGone;
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
