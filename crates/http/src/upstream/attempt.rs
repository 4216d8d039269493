//! Tries servers until one has answered: the rules of `proxy_next_upstream`.
//! (<https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_next_upstream>)

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::tls::{NamedFailure, TlsClient, TlsFailure};
use gale_engine::transport::Transport;
use gale_engine::upstream::connecting::{self, CONNECTING, ConnectFailure, SHAKING_HANDS, log_timeout, shake_hands};
use gale_engine::upstream::{
    Chosen, ConnectionAge, IdleConnection, Knowledge, Learning, NoPeer, PoolKey, Retry, Selection, Timing, Upstream,
};
use gale_engine::worker::CountedConnection;
use gale_protocol::request::{KnownHeader, Method};
use gale_runtime::{Buffer, Bytes, Moment, Output, SocketAddress, Timer};

use crate::request::phases::{CLIENT_LEFT, Flow};
use crate::request::request_body::log_error;
use crate::request::{PassedTo, Request};
use crate::upstream::caching::{self, Caching};
use crate::upstream::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};
use crate::upstream::record::{Attempt, Records};
use crate::upstream::response::{self, HeadRewriter};
use crate::upstream::sending::{BodyFraming, RequestBody, SendError, Sending};
use crate::upstream::settings::{RetryOn, UpstreamSettings};

/// A request that is to be passed on, as its module has made it.
pub struct Passing<'p> {
    /// The servers to choose from.
    pub selection: Selection,
    /// The group, if the configuration has it: for sessions that stick to a server.
    pub upstream: Option<Arc<Upstream<Request>>>,
    /// The protocol as messages show it: `http://`.
    pub scheme: &'static str,
    /// What is asked of servers that are spoken to over TLS; `None` in the clear.
    pub tls: Option<PassingTls>,
    /// What is asked of the server, for messages.
    pub uri: Bytes,
    /// The request up to its body, as it goes on the wire.
    pub head: Bytes,
    /// The request's body.
    pub body: RequestBody,
    /// How the body goes on the wire.
    pub framing: &'static dyn BodyFraming,
    /// Makes a reader for a response.
    pub reader: &'p dyn Fn() -> Box<dyn ResponseReader>,
    /// What the location says.
    pub settings: &'p UpstreamSettings,
    /// What becomes of the head's fields that name the server.
    pub rewriter: &'p dyn HeadRewriter,
    /// The protocol that the request asks to change to.
    pub upgrade: Option<Bytes>,
    /// Whether a request may go over a connection that was used before.
    pub reuses_connections: bool,
    /// What the cache has to do with it.
    pub caching: Option<Box<Caching>>,
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

/// A connection to a server, with what has been received and not read yet.
pub(super) struct Connection {
    pub stream: Transport,
    pub input: Buffer,
    /// The server has ended its direction.
    pub has_ended: bool,
    pub key: PoolKey,
    pub age: ConnectionAge,
    /// It was used before.
    is_reused: bool,
    counted: CountedConnection,
}

/// A request under way to a server, and its response.
pub(super) struct Answering {
    /// `None` once it is idle again.
    connection: Option<Connection>,
    /// The server, once it has answered.
    pub chosen: Option<Chosen>,
    upstream: Option<Arc<Upstream<Request>>>,
    pub sending: Sending,
    pub reader: Box<dyn ResponseReader>,
    pub records: Rc<Records>,
    pub started: Moment,
    /// The connection itself may stand for its client's user (NTLM, Negotiate), so nobody else may use it.
    pub is_authenticated: bool,
}

/// What is being done, as messages have it.
const SENDING: &str = "sending request to upstream";
const READING: &str = "reading response header from upstream";

/// How far a request has come with all servers together: what may be done again depends on it.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// A byte of it was sent.
    is_sent: bool,
    /// Something of the client's body was taken that nobody has any more.
    has_taken_body: bool,
}

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
    let records = Records::begin(request);
    let time_max = *passing.settings.request_timeout.get();
    if time_max.is_zero() {
        return try_servers(request, passing, &records).await;
    }
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
        let chosen = match passing.selection.next() {
            // Only a group with a queue pays for waiting.
            Err(_) if passing.selection.can_wait() => Box::pin(passing.selection.wait()).await,
            chosen => chosen,
        };
        let mut chosen = match chosen {
            Ok(chosen) => chosen,
            Err(none) => {
                let flow = no_server(request, passing, records, none);
                return stale_or(request, passing, RetryOn::ERROR, flow);
            }
        };
        tries += 1;
        records.add(Arc::clone(chosen.shared_name()), started);
        show(request, passing, Arc::clone(chosen.shared_name()));
        let mut may_reuse = passing.reuses_connections;
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
                if head.status >= 500 {
                    chosen.note_error();
                }
                let on = RetryOn::of_status(head.status).filter(|_| passing.selection.tries_left() > 0);
                may_go_on = on.is_some_and(|on| passing.take_retry(request, on, progress, tries, began));
                match on.filter(|_| may_go_on) {
                    None => {
                        if let Some(on) = RetryOn::of_status(head.status)
                            && let Some(flow) = caching::serve_stale(request, passing, on, Some(head.status))
                        {
                            return flow;
                        }
                        answering.chosen = Some(chosen);
                        return response::begin(request, passing, answering, head);
                    }
                    Some(on) => (on, head.status, READING),
                }
            }
            Err(Failure::OfServer(on, status, action)) => (on, status, action),
            Err(Failure::Final(status)) => return Flow::Respond(status),
            Err(Failure::Stale) => unreachable!("it was tried anew"),
        };
        records.note(|attempt, now| {
            attempt.status = status;
            attempt.end(now);
        });
        if !matches!(on, RetryOn::HTTP_403 | RetryOn::HTTP_404) {
            tell_of_failure(request, &mut chosen, action);
        }
        drop(chosen);
        if passing.selection.tries_left() == 0 || !may_go_on && !passing.take_retry(request, on, progress, tries, began)
        {
            return stale_or(request, passing, on, Flow::Respond(status));
        }
    }
}

/// Something stale in place of what the request would end with, if the cache has it and the location allows that.
fn stale_or(request: &mut Request, passing: &mut Passing<'_>, on: RetryOn, flow: Flow) -> Flow {
    if let Some(flow) = caching::serve_stale(request, passing, on, None) {
        return flow;
    }
    if let Flow::Respond(status) = flow {
        caching::tell_error(passing, status);
    }
    flow
}

/// The server has failed in a way that counts.
fn tell_of_failure(request: &Request, chosen: &mut Chosen, action: &'static str) {
    if chosen.fail() {
        request.log(Level::Warn, format_args!("upstream server temporarily disabled while {action}"));
    }
}

/// All servers of the group are down, or were tried.
fn no_server(request: &mut Request, passing: &Passing<'_>, records: &Records, none: NoPeer) -> Flow {
    let group: Arc<str> = passing.selection.group_name().into();
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
    /// Whether the next server is tried, after so many tries that began then. If so, it counts in the group's budget.
    fn take_retry(&self, request: &Request, on: RetryOn, progress: Progress, tries: u64, began: Moment) -> bool {
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
    fn may_retry(&self, request: &Request, on: RetryOn, progress: Progress, tries: u64, began: Moment) -> bool {
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
fn show(request: &mut Request, passing: &Passing<'_>, peer: Arc<str>) {
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
) -> Result<(Box<Answering>, UpstreamHead), Failure> {
    let idle = may_reuse.then(|| take_idle(request, passing, chosen)).flatten();
    let connection = match idle {
        Some(connection) => connection,
        None => Box::pin(connect(request, passing, chosen, records)).await?,
    };
    let is_reused = connection.is_reused;
    let mut answering = Answering::begin(request, passing, records, connection)?;
    let mut head = Heading { silence: Timer::new(), broken: None };
    let found = poll_fn(|context| answering.poll_head(request, passing, &mut head, context)).await;
    progress.is_sent |= answering.sending.sent > 0;
    progress.has_taken_body |= answering.sending.has_taken_body;
    match found {
        Ok(head) => {
            records.note(|attempt, now| attempt.header_time = Some(now.since(attempt.started)));
            Ok((answering, head))
        }
        Err(end) => {
            let received = records.last().bytes_received > 0;
            let repeats_anything = passing.settings.next_upstream.get().has(RetryOn::NON_IDEMPOTENT);
            let may_be_sent_again =
                !progress.has_taken_body && (is_idempotent(request) || answering.sending.sent == 0 || repeats_anything);
            if is_reused && !received && may_be_sent_again && end.is_of_connection() {
                return Err(Failure::Stale);
            }
            Err(end.tell(request))
        }
    }
}

/// What is known while the head of a response is waited for.
struct Heading {
    silence: Timer,
    /// Sending has failed.
    broken: Option<io::Error>,
}

/// How connections to this server are told apart from others.
fn pool_key(passing: &Passing<'_>, chosen: &Chosen, local: Option<&SocketAddress>) -> PoolKey {
    let user = passing.settings.id;
    let mut made_with = local.map_or(Vec::new(), |local| local.to_string().into_bytes());
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
    let local = passing.settings.local_address(request);
    let key = pool_key(passing, chosen, local.as_ref());
    // What cannot be sent twice does not meet a connection whose end is on its way to the driver.
    let knowledge = if is_idempotent(request) { Knowledge::Driver } else { Knowledge::Kernel };
    let IdleConnection { transport, age, counted } = pool.take(&request.worker().common, &key, knowledge)?;
    Some(Connection { stream: transport, input: Buffer::new(), has_ended: false, key, age, is_reused: true, counted })
}

/// A new connection to the server.
async fn connect(
    request: &Request,
    passing: &Passing<'_>,
    chosen: &Chosen,
    records: &Rc<Records>,
) -> Result<Connection, Failure> {
    let _recording = Recording(Rc::clone(records));
    let options = passing.settings.connect_options(request);
    let key = pool_key(passing, chosen, options.local.as_ref());
    let counted = count_connection(request)?;
    let address: &SocketAddress = chosen.address();
    let stream = connecting::connect(request, &options, address, chosen.name()).await.map_err(of_connecting)?;
    if address.inet().is_some() {
        // Whether the kernel waits for more is a matter of speed alone.
        let _ = stream.set_nodelay(true);
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
            let shaken = shake_hands(request, &client, &tls.name, stream, timeout).await;
            Transport::Tls(Box::new(shaken.map_err(of_handshake)?))
        }
    };
    records.note(|attempt, now| attempt.connect_time = Some(now.since(attempt.started)));
    let age = ConnectionAge::new();
    Ok(Connection { stream, input: Buffer::new(), has_ended: false, key, age, is_reused: false, counted })
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

impl Drop for Recording {
    fn drop(&mut self) {
        self.0.note(|attempt, now| attempt.connecting_ended(now));
    }
}

fn failed_for_memory(request: &Request) -> Failure {
    request.log(Level::Alert, format_args!("the worker's memory for buffers is exhausted"));
    Failure::Final(503)
}

/// Why there is no head.
enum End {
    /// The connection ended before it.
    Closed,
    Sending(io::Error),
    Receiving(io::Error),
    Silent,
    Malformed(Malformed),
    Send(SendError),
}

impl End {
    /// Whether a connection that was idle for too long looks like this.
    fn is_of_connection(&self) -> bool {
        match self {
            End::Closed | End::Sending(_) => true,
            End::Receiving(error) => error.kind() != io::ErrorKind::OutOfMemory,
            End::Silent | End::Malformed(_) | End::Send(_) => false,
        }
    }

    /// Says so in the error log, in nginx's words.
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

impl Answering {
    /// Begins to send a request.
    fn begin(
        request: &Request,
        passing: &Passing<'_>,
        records: &Rc<Records>,
        connection: Connection,
    ) -> Result<Box<Answering>, Failure> {
        let send_timeout = *passing.settings.send_timeout.get();
        let sending = Sending::new(passing.head.clone(), &passing.body, passing.framing, send_timeout)
            .with_end(&passing.body)
            .map_err(|_| failed_for_memory(request))?;
        // Nothing is connected where a connection is used again.
        records.note(|attempt, now| {
            attempt.connect_time.get_or_insert(now.since(attempt.started));
        });
        let started = records.last().started;
        Ok(Box::new(Answering {
            connection: Some(connection),
            chosen: None,
            upstream: passing.upstream.clone(),
            sending,
            reader: (passing.reader)(),
            records: Rc::clone(records),
            started,
            is_authenticated: request.header(KnownHeader::Authorization).is_some_and(authenticates_connection),
        }))
    }

    /// Sends on, and reads until the head is there.
    fn poll_head(
        &mut self,
        request: &Request,
        passing: &Passing<'_>,
        heading: &mut Heading,
        context: &mut Context<'_>,
    ) -> Poll<Result<UpstreamHead, End>> {
        let settings = passing.settings;
        let head_max = settings.head_max();
        let read_timeout = *settings.read_timeout.get();
        let Answering { connection, sending, reader, records, .. } = self;
        let connection = connection.as_mut().expect("the response has not ended");
        if reader.is_tunnel()
            && let Ok(HeadRead::Whole(head)) = reader.read_head(&mut connection.input, false)
        {
            return Poll::Ready(Ok(head));
        }
        loop {
            if heading.broken.is_none() && !sending.is_done() {
                match sending.poll(request, &connection.stream, context) {
                    Poll::Pending => {}
                    Poll::Ready(Ok(())) => heading.silence.set_after(read_timeout),
                    // The server may have said why before it closed the connection.
                    Poll::Ready(Err(SendError::Server(error))) => {
                        heading.broken = Some(error);
                        heading.silence.set_after(read_timeout);
                        sending.give_up();
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(End::Send(error))),
                }
            }
            let room = head_max.saturating_sub(connection.input.len());
            if room == 0 {
                return Poll::Ready(Err(End::Malformed(Malformed("upstream sent too big header".to_owned()))));
            }
            match connection.stream.poll_recv(context, &mut connection.input, room) {
                Poll::Ready(Ok(0)) => {
                    connection.has_ended = true;
                    if connection.input.is_empty() {
                        return Poll::Ready(Err(heading.broken.take().map_or(End::Closed, End::Sending)));
                    }
                }
                Poll::Ready(Ok(count)) => {
                    records.last().bytes_received += count as u64;
                    heading.silence.set_after(read_timeout);
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::Receiving(error))),
                Poll::Pending => {
                    let waits = sending.is_done() || heading.broken.is_some();
                    if waits && heading.silence.poll_expired(context).is_ready() {
                        return Poll::Ready(Err(heading.broken.take().map_or(End::Silent, End::Sending)));
                    }
                    return Poll::Pending;
                }
            }
            loop {
                let read = reader.read_head(&mut connection.input, connection.has_ended);
                tell_messages(&mut **reader, request, READING);
                match read {
                    Err(malformed) => return Poll::Ready(Err(End::Malformed(malformed))),
                    Ok(HeadRead::Partial) if connection.has_ended => return Poll::Ready(Err(End::Closed)),
                    Ok(HeadRead::Partial) => break,
                    Ok(HeadRead::Interim(status, fields)) => response::pass_interim(request, status, &fields),
                    Ok(HeadRead::Whole(head)) => return Poll::Ready(Ok(head)),
                }
            }
        }
    }

    /// The response has ended as it should: the connection may be used again.
    pub fn finish(mut self: Box<Self>, request: &Request) {
        self.tell_messages(request);
        let Some(mut chosen) = self.chosen.take() else { return };
        if let Some(upstream) = &self.upstream {
            upstream.learn_session(request, &chosen, Learning::Finished);
        }
        let now = gale_runtime::now();
        let header_time = {
            let mut record = self.records.last();
            record.end(now);
            record.header_time
        };
        chosen.succeed(Timing { header: header_time, response: now.since(self.started) });
        let Some(mut connection) = self.connection.take() else { return };
        let is_idle = self.sending.is_done() && connection.input.is_empty() && !connection.has_ended;
        if self.reader.keeps_alive() && is_idle && !self.is_authenticated {
            connection.age.note_request(self.reader.idle_seconds());
            if let Some(pool) = chosen.connections() {
                let Connection { stream: transport, key, age, counted, .. } = connection;
                pool.park(&request.worker().common, key, IdleConnection { transport, age, counted });
            }
        }
    }

    /// The head has come: who has a session there, now or from now on, is known. Returns the cookie that says so.
    pub fn learn_session(&self, request: &Request) -> Option<Vec<u8>> {
        let (upstream, chosen) = (self.upstream.as_ref()?, self.chosen.as_ref()?);
        upstream.learn_session(request, chosen, Learning::HeaderReceived);
        upstream.session_cookie(request, chosen)
    }

    /// The rest of the response is not wanted: unless that is there already, the connection is closed.
    pub fn end_early(mut self: Box<Self>, request: &Request) {
        loop {
            match self.read_body() {
                Ok(BodyRead::Piece(_)) => {}
                Ok(BodyRead::End) => return self.finish(request),
                Ok(BodyRead::Partial) | Err(_) => return self.give_up(),
            }
        }
    }

    /// The rest of the response is not wanted: the connection is closed.
    pub fn give_up(self: Box<Self>) {
        drop(self);
    }

    /// The next part of the body out of what has been received.
    pub fn read_body(&mut self) -> Result<BodyRead, Malformed> {
        let connection = self.connection.as_mut().expect("the response has not ended");
        let read = self.reader.read_body(&mut connection.input, connection.has_ended);
        if let Ok(BodyRead::Piece(piece)) = &read {
            self.records.last().response_length += piece.len() as u64;
        }
        read
    }

    /// Receives at most `max` bytes; 0 is the end of the connection.
    pub fn poll_receive(&mut self, max: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let wanted = self.reader.wants().map_or(max, |wanted| usize::try_from(wanted).unwrap_or(max).clamp(1, max));
        let connection = self.connection.as_mut().expect("the response has not ended");
        let received = ready!(connection.stream.poll_recv(context, &mut connection.input, wanted))?;
        if received == 0 {
            connection.has_ended = true;
        }
        self.records.last().bytes_received += received as u64;
        Poll::Ready(Ok(received))
    }

    /// Sends what is left of the request.
    pub fn poll_send(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        if self.sending.is_done() {
            return Poll::Ready(Ok(()));
        }
        let stream = &self.connection.as_ref().expect("the response has not ended").stream;
        let polled = self.sending.poll(request, stream, context);
        if matches!(polled, Poll::Ready(Err(_))) {
            self.sending.give_up();
        }
        polled
    }

    /// What has come behind the head, for a tunnel.
    pub fn take_input(&mut self) -> Buffer {
        std::mem::take(&mut self.open().input)
    }

    /// Receives for a tunnel.
    pub fn poll_receive_into(
        &mut self,
        input: &mut Buffer,
        max: usize,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let received = ready!(self.open().stream.poll_recv(context, input, max))?;
        let mut record = self.records.last();
        record.bytes_received += received as u64;
        record.response_length += received as u64;
        Poll::Ready(Ok(received))
    }

    /// Sends for a tunnel.
    pub fn poll_send_from(&mut self, output: &mut Output, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let sent = ready!(self.open().stream.poll_send(context, output))?;
        self.sending.sent += sent as u64;
        Poll::Ready(Ok(sent))
    }

    /// Ends a tunnel's direction to the server.
    pub fn shutdown_write(&mut self) -> io::Result<()> {
        self.open().stream.shutdown_write()
    }

    fn open(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the response has not ended")
    }

    /// The fields behind the body.
    pub fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        let trailers = self.reader.take_trailers();
        self.records.set_trailers(trailers.clone());
        trailers
    }

    /// Logs what the server has to say besides its response.
    pub fn tell_messages(&mut self, request: &Request) {
        tell_messages(&mut *self.reader, request, "reading upstream");
    }
}

/// A response that is dropped before its end has ended, too.
impl Drop for Answering {
    fn drop(&mut self) {
        let mut record = self.records.last();
        record.bytes_sent = self.sending.sent;
        record.end(gale_runtime::now());
    }
}

fn tell_messages(reader: &mut dyn ResponseReader, request: &Request, action: &str) {
    while let Some(Message { level, text }) = reader.take_message() {
        request.log(level, format_args!("{} while {action}", bstr::BStr::new(&text)));
    }
}
