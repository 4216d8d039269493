//! The stage `Http1`: reads heads, runs exchanges one after another, writes responses, and decides when to close.
//!
//! An idle connection holds no buffer and no request. The connection's own future is small; a request that has to wait
//! gets a future of its own for as long as it lasts, and one that never waits gets none.

mod body;
mod framing;
mod head;
mod persistence;
mod send;

use std::future::{Future, poll_fn};
use std::num::NonZeroU64;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_protocol::http1::response;
use gale_protocol::request::{Scheme, Version};
use gale_runtime::{Buffer, Bytes, SocketAddress, TcpInfo, Timer};
use gale_tls::TlsStream;
use gale_tls::Transport;

use self::body::RequestBody;
use self::framing::server_line;
use self::head::{Arrival, HeadReading};
use self::persistence::Wish;
use self::send::{After, Conduct, Sender};
use crate::connection::HttpConnection;
use crate::connection::lingering::Lingering;
use crate::connection::worker::HttpConnections;
use crate::request::Request;
use crate::request::advance;
use crate::request::advance::Step;
use crate::request::body::{BodyError, BodyItem};
use crate::request::configuration::settings::{CoreSettings, LingeringClose};
use crate::request::exchange::{
    BodyLimits, Exchange, Gone, Permit, RequestBodyError, ResponseOptions, ResponseWriter, Sent, Transferred,
    log_changed_values,
};
use crate::request::packed::PackedRequest;
use crate::request::phases::LocalBoxFuture;
use crate::request::request_body;
use crate::request::respond::{self, Answered};
use crate::request::slow::ExchangeWaits;
use crate::request::tunnel::{self, Opened};
use crate::request::worker::HttpWorker;

/// Pipelined requests that are answered before other connections have their turn: as many as a connection has sends in
/// a turn of the runtime, which would otherwise end the turn in the middle of an answer.
const PIPELINED_MAX: u64 = 16;

/// See the file's head.
#[derive(Default)]
pub(super) struct State {
    /// Deadline of the current read.
    timer: Timer,
    /// Present from a request's first byte to its end, and as long as received bytes have not been read.
    transfer: Option<Box<Transfer>>,
}

impl State {
    fn transfer(&mut self) -> &mut Transfer {
        self.transfer.as_mut().expect("an exchange is under way")
    }

    /// The state behind the first bytes, which are `input`; `timer` may run already for the first head.
    pub(super) fn begin(timer: Timer, input: Buffer, connections: &HttpConnections) -> State {
        let mut transfer = connections.take_transfer();
        transfer.input = input;
        State { timer, transfer: Some(transfer) }
    }

    /// Returns `true` if received bytes have not been read.
    pub(super) fn has_input(&self) -> bool {
        self.transfer.is_some()
    }

    /// The generation of the configuration of the exchange under way, if any.
    pub(super) fn generation(&self) -> Option<u64> {
        self.transfer.as_ref()?.generation.map(NonZeroU64::get)
    }

    /// The connection ends.
    pub(super) fn end(&mut self, stream: &Transport, connections: &HttpConnections) {
        if let Some(transfer) = &mut self.transfer {
            transfer.end_waiting(&connections.worker);
            // After a panic: the answers before it are good.
            transfer.sender.send_held(stream, false);
        }
    }
}

/// Both directions of an exchange. An idle connection holds none; the worker keeps some spare ones.
#[derive(Default)]
pub(crate) struct Transfer {
    /// Bytes that have come and were not read yet.
    input: Buffer,
    /// Present from the first head on, and not in a tunnel.
    head: Option<Box<HeadReading>>,
    /// The configuration of the exchange.
    generation: Option<NonZeroU64>,
    body: RequestBody,
    sender: Sender,
    /// Wish of the client for the connection after the exchange.
    wish: Wish,
    /// The request, while there is a tunnel, which needs none.
    packed: Option<Box<PackedRequest>>,
}

impl Transfer {
    /// The rest of a head is not waited for any more.
    fn end_waiting(&mut self, worker: &HttpWorker) {
        if let Some(head) = &mut self.head {
            head.end_waiting(&worker.common.counters);
        }
    }
}

/// Fate of the connection after an exchange.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterExchange {
    KeepAlive,
    Close,
    /// Read on for a while, so that the client gets to see the answer.
    Linger(Lingering),
}

impl HttpConnection {
    /// The next request whose head is whole; `None` when there is none to come.
    pub(super) fn next_request(self: &Rc<Self>) -> impl Future<Output = Option<Box<Request>>> {
        let mut pending = None;
        poll_fn(move |context| {
            let arrival = ready!(self.poll_head(context, &mut pending));
            Poll::Ready(self.admit(arrival))
        })
    }

    fn admit(&self, arrival: Arrival) -> Option<Box<Request>> {
        match arrival {
            Arrival::Request(request) => return Some(request),
            Arrival::Left(request) => self.give_up(request, "client prematurely closed connection", 400),
            Arrival::TimedOut(Some(request)) => {
                if *request.scope().core.reset_timedout_connection.get() {
                    self.client.reset();
                }
                self.give_up(request, "client timed out (110: Connection timed out)", 408);
            }
            Arrival::TimedOut(None) | Arrival::Closed => {}
        }
        None
    }

    /// Returns `true` if other connections have their turn before the next request, which is there already.
    pub(super) fn must_yield(&self) -> bool {
        self.is_last_of_turn() && self.http1().transfer.is_some()
    }

    fn is_last_of_turn(&self) -> bool {
        self.client.info.requests.get().is_multiple_of(PIPELINED_MAX)
    }

    /// One request and its response. A block, because the future of an `async fn` would hold its arguments twice.
    pub(super) fn exchange(self: &Rc<Self>, request: Box<Request>) -> impl Future<Output = AfterExchange> {
        self.client.worker().common.counters.begin_request();
        let mut in_flight = InFlight { connection: self, request: Some(request) };
        async move {
            {
                let carrying = match in_flight.connection.answer(in_flight.request()).await {
                    Answered::Not => return AfterExchange::Close,
                    Answered::Wholly => None,
                    Answered::Tunnel(opened) => Some(in_flight.carry(opened)),
                };
                if let Some(carrying) = carrying {
                    let end = carrying.await;
                    in_flight.unpack();
                    end.tell(in_flight.request());
                }
            }
            let sent = poll_fn(|context| in_flight.connection.poll_sent(context)).await;
            match in_flight.connection.afterwards(in_flight.request(), sent) {
                // An unread body is read first, or there has to be another answer.
                None => Box::pin(in_flight.connection.conclude(in_flight.request(), sent)).await,
                Some(afterwards) => in_flight.connection.settle(in_flight.request(), afterwards),
            }
        }
    }

    /// Answers 503 if a thread pool has no room to read a file and nothing of the response has left. (nginx closes the
    /// connection.)
    fn refuse(&self, request: &mut Request) -> Option<Step> {
        let error = self.http1().transfer().sender.take_refused()?;
        request.log(Level::Error, format_args!("{error}"));
        request.response.clear();
        Some(advance::fail(request, 503))
    }

    /// Finishes an exchange whose end is not decided yet. Answers anew if nothing of the response has left, as often as
    /// `error_page` names files that cannot be read either (its redirects are bounded), and reads the rest of the
    /// request's body.
    async fn conclude(&self, request: &mut Request, mut sent: Result<(), Gone>) -> AfterExchange {
        while let Some(step) = self.refuse(request) {
            match respond::finish_and_send(request, step).await {
                Answered::Not => return AfterExchange::Close,
                Answered::Wholly => {}
                Answered::Tunnel(opened) => Box::pin(tunnel::carry(opened)).await.tell(request),
            }
            sent = poll_fn(|context| self.poll_sent(context)).await;
        }
        let afterwards = match self.afterwards(request, sent) {
            None => self.drain_body(request).await,
            Some(afterwards) => afterwards,
        };
        self.settle(request, afterwards)
    }

    fn settle(&self, request: &Request, afterwards: AfterExchange) -> AfterExchange {
        if afterwards == AfterExchange::KeepAlive {
            self.client.set_nodelay(&request.scope().core);
        }
        afterwards
    }

    /// Answers: at once as far as that needs no waiting, the rest when it is awaited.
    fn answer<'r>(self: &Rc<Self>, request: &'r mut Request) -> impl Future<Output = Answered> + use<'r> {
        let mut rest = self.answer_at_once(request);
        poll_fn(move |context| match &mut rest {
            Some(rest) => rest.as_mut().poll(context),
            None => Poll::Ready(Answered::Wholly),
        })
    }

    /// Answers as far as that needs no waiting; the rest, if any, says what has become of it. A function of its own, so
    /// that the connection's future has no room for values that only pass through.
    fn answer_at_once<'r>(self: &Rc<Self>, request: &'r mut Request) -> Option<LocalBoxFuture<'r, Answered>> {
        let rest: LocalBoxFuture<'r, Answered> = match self.begin(request) {
            Step::Close => Box::pin(std::future::ready(Answered::Not)),
            Step::Answer(body) => {
                let rest = respond::start_response(request, body)?;
                Box::pin(rest.send(request))
            }
            step => Box::pin(respond::finish_and_send(request, step)),
        };
        Some(self.after_held(rest))
    }

    /// Begins `rest`, which may take its time or close the connection, when the answers before it have left.
    fn after_held<'r>(self: &Rc<Self>, rest: LocalBoxFuture<'r, Answered>) -> LocalBoxFuture<'r, Answered> {
        let has_held = {
            let mut state = self.http1();
            let sender = &mut state.transfer().sender;
            sender.send_held(&self.client.stream, false);
            sender.has_held()
        };
        if !has_held {
            return rest;
        }
        let connection = Rc::clone(self);
        Box::pin(async move {
            let poll_held = |context: &mut Context<'_>| {
                connection.http1().transfer().sender.poll_held(&connection.client.stream, context)
            };
            match poll_fn(poll_held).await {
                Ok(()) => rest.await,
                Err(_) => Answered::Not,
            }
        })
    }

    /// The end of an exchange: it is logged, and its memory goes back.
    fn end(&self, mut request: Box<Request>) {
        self.client.forget_kept_configuration();
        advance::log(&mut request);
        self.client.worker().give_back(request);
        let state = &mut *self.http1();
        let Some(mut transfer) = state.transfer.take() else { return };
        transfer.end_waiting(self.client.worker());
        if !transfer.sender.is_at_rest() {
            return;
        }
        transfer.sender.rest();
        transfer.generation = None;
        if transfer.input.is_empty() {
            debug_assert!(!transfer.sender.has_held(), "only what is followed is held");
            self.client.connections.give_transfer_back(transfer);
        } else {
            state.transfer = Some(transfer);
        }
    }

    /// Decides the fate of the connection after the response; `None` when that depends on the rest of the request's
    /// body.
    fn afterwards(&self, request: &Request, sent: Result<(), Gone>) -> Option<AfterExchange> {
        if sent == Err(Gone::Aborted) {
            if self.http1().transfer().sender.is_refused() {
                return None;
            }
            self.log_failure(request);
        }
        let core = &request.scope().core;
        let mut state = self.http1();
        let Transfer { input, body, sender, wish, .. } = state.transfer();
        let resets = match sent {
            Ok(()) if !sender.is_aborted() => None,
            Err(Gone::SendTimedOut) => Some(*core.reset_timedout_connection.get()),
            _ => Some(sender.is_cut_short()),
        };
        if let Some(resets) = resets {
            if resets {
                self.client.reset();
            }
            return Some(AfterExchange::Close);
        }
        if sender.keeps_alive() && body.may_be_followed() && !self.client.must_close() {
            return body.is_read().then_some(AfterExchange::KeepAlive);
        }
        let setting = wish.lingering_close(request, core);
        let lingers = lingers(setting, body, input) || setting == LingeringClose::On && self.has_more(request);
        Some(if lingers { AfterExchange::Linger(Lingering::of(core)) } else { AfterExchange::Close })
    }

    /// Returns `true` if the response took its time and unread bytes have come meanwhile.
    fn has_more(&self, request: &Request) -> bool {
        gale_runtime::now() != request.arrival.started && self.client.stream.has_unread()
    }

    /// Tells why a file could not be sent to its end, if that is what happened.
    fn log_failure(&self, request: &Request) {
        let failure = self.http1().transfer().sender.take_failure();
        if let Some(error) = failure {
            request.log(error.level(), format_args!("{error}"));
        }
    }

    /// Reads the rest of a body that the answer did not need, so that the next request can be found behind it.
    async fn drain_body(&self, request: &Request) -> AfterExchange {
        let core = &request.scope().core;
        let limits = BodyLimits { length_max: 0, silence_max: *core.lingering_timeout.get(), min_rate: None };
        let everything = async {
            loop {
                match poll_fn(|context| self.poll_body(context, &limits)).await {
                    Ok(Some(_)) => {}
                    // It may have become the last one meanwhile.
                    Ok(None) if self.client.must_close() => {
                        let lingers = *core.lingering_close.get() != LingeringClose::Off;
                        return if lingers { AfterExchange::Linger(Lingering::of(core)) } else { AfterExchange::Close };
                    }
                    Ok(None) => return AfterExchange::KeepAlive,
                    // The answer is on its way and the client still sending.
                    Err(RequestBodyError::Malformed) => return AfterExchange::Linger(Lingering::of(core)),
                    Err(error) => {
                        if error == RequestBodyError::NoMemory {
                            request_body::log_error(request, error);
                        }
                        return AfterExchange::Close;
                    }
                }
            }
        };
        gale_runtime::timeout(*core.lingering_time.get(), everything).await.unwrap_or(AfterExchange::Close)
    }

    /// Decides what may follow the response, as far as it is known before, and sets the idle time after it.
    fn after_response(&self, request: &Request, core: &CoreSettings, transfer: &Transfer) -> After {
        let Transfer { wish, body, input, .. } = transfer;
        let idle_max = core.keepalive_timeout.get().idle;
        self.client.idle_max_ms.set(u32::try_from(idle_max.as_millis()).unwrap_or(u32::MAX));
        if wish.may_be_kept(request, core) && body.may_be_followed() && !self.client.must_close() {
            After::MayKeep
        } else if lingers(wish.lingering_close(request, core), body, input) {
            After::Lingers
        } else {
            After::Closes
        }
    }

    /// How the connection sends the request's response.
    #[inline]
    fn conduct<'l>(
        &self,
        request: &Request,
        core: &CoreSettings,
        transfer: &Transfer,
        server_line: &'l [u8],
    ) -> Conduct<'l> {
        Conduct {
            after: self.after_response(request, core, transfer),
            may_be_chunked: may_be_chunked(request, core),
            keep_alive_advertised: core.keepalive_timeout.get().told(),
            server_line,
        }
    }
}

/// A request on its way. It is logged when it ends, however it ends: also when the
/// connection is closed under it.
struct InFlight<'c> {
    connection: &'c Rc<HttpConnection>,
    /// `None` while it is packed.
    request: Option<Box<Request>>,
}

impl<'c> InFlight<'c> {
    fn request(&mut self) -> &mut Request {
        self.request.as_mut().expect("there until it ends, but for a tunnel")
    }

    /// Carries a tunnel, during which the request is packed.
    fn carry(&mut self, opened: Opened) -> Pin<Box<impl Future<Output = tunnel::End> + use<'c>>> {
        match self.request.take().map(Request::pack) {
            Some(Ok(packed)) => self.connection.http1().transfer().packed = Some(packed),
            kept => self.request = kept.and_then(Result::err),
        }
        Box::pin(tunnel::carry(opened))
    }

    /// The tunnel is over.
    fn unpack(&mut self) {
        let connection = self.connection;
        let packed = connection.http1().transfer.as_mut().and_then(|transfer| transfer.packed.take());
        if let Some(packed) = packed {
            self.request = Some(packed.unpack(connection.client.worker(), Rc::clone(connection) as Rc<dyn Exchange>));
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.connection.client.worker().common.counters.end_request();
        // After a panic nothing in the request is relied on; the panic itself is logged.
        if std::thread::panicking() {
            return;
        }
        self.unpack();
        let Some(mut request) = self.request.take() else { return };
        if request.response.status == 0 && !self.connection.http1().transfer().sender.is_started() {
            request.response.status = CLOSED_UNDER_REQUEST;
        }
        self.connection.end(request);
    }
}

/// nginx's own status, for the log: the connection ended before there was an answer.
const CLOSED_UNDER_REQUEST: u16 = 499;

/// Returns `true` if a body of unknown length may go in chunks: HTTP/1.1 has them, and `chunked_transfer_encoding`
/// allows them.
fn may_be_chunked(request: &Request, core: &CoreSettings) -> bool {
    request.version() == Version::Http11 && *core.chunked_transfer_encoding.get()
}

/// Returns `true` if a closing connection is read from for a while: the client may still be sending.
fn lingers(lingering_close: LingeringClose, body: &RequestBody, input: &Buffer) -> bool {
    match lingering_close {
        LingeringClose::Off => false,
        LingeringClose::Always => true,
        LingeringClose::On => !body.is_read() || !input.is_empty(),
    }
}

impl Exchange for HttpConnection {
    fn connection(&self) -> &ConnectionInfo {
        &self.client.info
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        self.client.local_address()
    }

    fn scheme(&self) -> Scheme {
        self.client.scheme()
    }

    fn tls(&self) -> Option<&TlsStream> {
        self.client.tls()
    }

    fn tcp_info(&self) -> Option<TcpInfo> {
        self.client.tcp_info()
    }

    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]) {
        let mut text = Vec::with_capacity(64);
        response::write_status_line(&mut text, status);
        for (name, value) in fields {
            response::write_header(&mut text, name, value);
        }
        text.extend_from_slice(b"\r\n");
        let mut state = self.http1();
        let transfer = state.transfer();
        if status == 100 {
            transfer.body.continue_was_sent();
        }
        transfer.sender.interim(&text);
    }

    fn carries_trailers(&self, request: &Request) -> bool {
        may_be_chunked(request, &request.scope().core)
    }

    fn keeps_connection(&self, request: &Request) -> bool {
        self.http1().transfer().wish.may_be_kept(request, &request.scope().core)
    }

    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        let State { timer, transfer } = &mut *self.http1();
        let Transfer { input, body, sender, .. } = &mut **transfer.as_mut().expect("an exchange is under way");
        if body.wants_continue() && !sender.is_started() {
            body.continue_was_sent();
            sender.interim(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        if sender.has_interim() {
            // Whether the client got it shows in what it sends.
            let _ = sender.poll_sent(&self.client.stream, context);
        }
        body.poll_next(&self.client.stream, input, timer, context, limits)
    }

    fn body_is_read(&self) -> bool {
        self.http1().transfer().body.is_read()
    }

    fn is_complete(&self) -> bool {
        self.http1().transfer().sender.is_complete()
    }

    fn received(&self) -> u64 {
        self.http1().transfer().body.received()
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        ready!(self.client.stream.poll_peer_closed(context));
        Poll::Ready(())
    }

    fn is_broken(&self) -> bool {
        self.client.stream.is_broken()
    }

    fn has_left(&self) -> bool {
        self.client.stream.has_hung_up()
    }

    fn sent(&self) -> Sent {
        self.http1().transfer().sender.sent()
    }

    fn transferred(&self, head_text_bytes: u64) -> Transferred {
        let mut http1 = self.http1();
        let transfer = http1.transfer();
        Transferred { received: head_text_bytes + transfer.body.received(), sent: transfer.sender.sent() }
    }

    fn waits(&self) -> ExchangeWaits {
        let mut state = self.http1();
        let transfer = state.transfer();
        ExchangeWaits { body: transfer.body.waited(), disk: transfer.sender.disk_waited() }
    }

    fn writer(self: Rc<Self>, _permit: Permit) -> Rc<dyn ResponseWriter> {
        self
    }
}

impl ResponseWriter for HttpConnection {
    fn start(&self, request: &Request, options: &ResponseOptions) {
        let core = &request.scope().core;
        // It may ask variables, and these the exchange.
        let server_line = server_line(request, core);
        let mut state = self.http1();
        let transfer = state.transfer();
        let conduct = self.conduct(request, core, transfer, &server_line);
        transfer.sender.start(&request.response, options, &conduct, &self.client.connections, &self.client.stream);
        if transfer.sender.take_has_changed_values() {
            drop(state);
            log_changed_values(request);
        }
    }

    fn respond(&self, request: &Request, options: &ResponseOptions, body: Bytes) {
        let core = &request.scope().core;
        let server_line = server_line(request, core);
        let mut state = self.http1();
        let transfer = state.transfer();
        let conduct = self.conduct(request, core, transfer, &server_line);
        let Transfer { input, body: request_body, sender, .. } = transfer;
        let is_followed = request_body.is_read() && !input.is_empty() && !self.is_last_of_turn();
        sender.respond(
            &request.response,
            options,
            &conduct,
            is_followed,
            &self.client.connections,
            &self.client.stream,
            body,
        );
        if sender.take_has_changed_values() {
            drop(state);
            log_changed_values(request);
        }
    }

    fn push(&self, item: BodyItem) {
        self.http1().transfer().sender.push(item);
    }

    fn end(&self) {
        self.http1().transfer().sender.end();
    }

    fn abort(&self) {
        self.http1().transfer().sender.abort();
    }

    fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        self.http1().transfer().sender.refuse(error)
    }

    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.http1().transfer().sender.poll_sent(&self.client.stream, context)
    }

    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.http1().transfer().sender.poll_ready(low_water, &self.client.stream, context)
    }

    fn become_tunnel(&self) {
        let mut state = self.http1();
        let transfer = state.transfer();
        transfer.head = None;
        transfer.body.become_tunnel();
        transfer.sender.become_tunnel();
    }
}
