//! A connection that speaks HTTP/1: reads heads, runs exchanges one after
//! another, writes responses, and decides when to close.
//!
//! An idle connection holds no buffer and no request. The connection's own
//! future is small; a request that has to wait gets one of its own for as long
//! as it lasts, and one that never waits gets none.

mod body;
mod framing;
mod head;
mod persistence;
mod send;
mod tls;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::num::{NonZeroU32, NonZeroU64};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_protocol::http1::{HeadParser, Offence, response};
use gale_protocol::request::{Scheme, Version};
use gale_runtime::{Buffer, Bytes, Moment, SocketAddress, TcpInfo, Timer};

use self::body::RequestBody;
use self::framing::server_line;
use self::head::{Arrival, HeadReading};
use self::persistence::Wish;
use self::send::{After, Conduct, Sender};
use crate::connection::worker::HttpConnections;
use crate::request::Request;
use crate::request::advance;
use crate::request::advance::Step;
use crate::request::body::{BodyError, BodyItem};
use crate::request::configuration::settings::{CoreSettings, LingeringClose};
use crate::request::configuration::{Address, HttpConfiguration};
use crate::request::exchange::{BodyLimits, Exchange, Gone, RequestBodyError, ResponseOptions, Sent};
use crate::request::phases::LocalBoxFuture;
use crate::request::request_body;
use crate::request::respond;
use crate::request::worker::{Configured, HttpWorker};
use gale_base::log_level::Level;
use gale_engine::configuration::ServerId;
use gale_engine::connections::{Connection, ConnectionInfo};
use gale_engine::tls::TlsStream;
use gale_engine::transport::Transport;
use gale_process::ListenAddress;

/// How long the first request of a connection is waited for although the worker is on its way out or needs the room: it
/// may be on its way. (nginx closes such a connection at once to make room.)
const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// How many requests that a client has sent at once are answered before other connections have their turn: as many as a
/// connection has sends in a turn of the runtime, which would otherwise end the turn in the middle of an answer.
const PIPELINED_MAX: u64 = 16;

/// A closing connection is read from in pieces of this size.
const DISCARD_BYTES: usize = 16 * 1024;

/// A connection that speaks HTTP/1.
pub struct Http1 {
    info: ConnectionInfo,
    stream: Transport,
    connections: Rc<HttpConnections>,
    state: RefCell<State>,
    first_configuration: Cell<Option<Rc<Configured>>>,
    /// Since when it waits for a request of which nothing has come; never while it does not.
    idle_since: Cell<Moment>,
    /// How long it may be idle after the last response, in milliseconds, 49 days at most.
    idle_max_ms: Cell<u32>,
    nodelay_is_set: Cell<bool>,
    /// How it began; `None` while nobody knows.
    began: Cell<Option<Beginning>>,
    /// Its number in the worker's list, and one: 0 while it is in none.
    listed: Cell<Option<NonZeroU32>>,
    /// Where the connection belongs in the configuration of that generation; none has the generation 0.
    known_place: Cell<Option<AddressIndex>>,
    known_generation: Cell<u64>,
}

struct State {
    /// The deadline of whatever is read at the moment.
    timer: Timer,
    /// There from a request's first byte to its end, and as long as something has come that was not read.
    transfer: Option<Box<Transfer>>,
}

impl State {
    fn transfer(&mut self) -> &mut Transfer {
        self.transfer.as_mut().expect("an exchange is under way")
    }
}

/// How a connection began, as its address wanted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Beginning {
    /// With a header of the PROXY protocol.
    proxy_protocol: bool,
    /// With a handshake, or instead of it with plain HTTP.
    ssl: bool,
}

/// Both directions of an exchange. An idle connection holds none; the worker keeps some spare ones.
#[derive(Default)]
pub(crate) struct Transfer {
    /// What has come and was not read yet.
    input: Buffer,
    parser: HeadParser,
    head: HeadReading,
    /// The configuration of the exchange.
    generation: Option<NonZeroU64>,
    /// What is wrong with the head that has come.
    offence: Option<Offence>,
    body: RequestBody,
    sender: Sender,
    /// What the client wants of the connection after the exchange.
    wish: Wish,
}

/// What becomes of the connection after an exchange.
#[derive(Debug, PartialEq, Eq)]
enum AfterExchange {
    KeepAlive,
    Close,
    /// Read on for a while, so that the client gets to see the answer.
    Linger(Lingering),
}

/// How long a closing connection is read from: as the location says that answered.
#[derive(Debug, PartialEq, Eq)]
struct Lingering {
    time_max: Duration,
    silence_max: Duration,
}

impl Lingering {
    fn of(core: &CoreSettings) -> Lingering {
        Lingering { time_max: *core.lingering_time.get(), silence_max: *core.lingering_timeout.get() }
    }
}

impl Connection for Http1 {
    /// When an idle connection may be closed to make room or to let the worker end:
    /// when `keepalive_min_timeout` has passed, or the grace for a first request. `None` while it is busy.
    fn may_close_at(&self) -> Option<Moment> {
        if !self.is_idle() {
            return None;
        }
        let idle_since = self.idle_since.get();
        if self.info.requests.get() == 0 {
            return Some(idle_since + FIRST_REQUEST_GRACE);
        }
        let configuration = self.worker().configuration();
        let http = configuration.http();
        let min = self.place(http).map_or(Duration::ZERO, |place| *place.core(http).keepalive_min_timeout.get());
        Some(idle_since + min)
    }
}

impl Http1 {
    /// A connection that was just accepted.
    ///
    /// `first` is the configuration for the first exchange when that is not the
    /// worker's current one.
    pub fn new(
        info: ConnectionInfo,
        stream: Transport,
        connections: Rc<HttpConnections>,
        first: Option<Rc<Configured>>,
    ) -> Http1 {
        Http1 {
            info,
            stream,
            connections,
            state: RefCell::new(State { timer: Timer::new(), transfer: None }),
            first_configuration: Cell::new(first),
            idle_since: Cell::new(Moment::NEVER),
            idle_max_ms: Cell::new(0),
            nodelay_is_set: Cell::new(false),
            began: Cell::new(None),
            listed: Cell::new(None),
            known_place: Cell::new(None),
            known_generation: Cell::new(0),
        }
    }

    /// What the requests of this loop share.
    fn worker(&self) -> &Rc<HttpWorker> {
        &self.connections.worker
    }

    /// Says which number the connection has in its worker's list, from which it is taken when it ends, however it ends.
    pub(crate) fn set_listed(&self, number: usize) {
        self.listed.set(u32::try_from(number + 1).ok().and_then(NonZeroU32::new));
    }

    /// The configuration for the next exchange.
    fn next_configuration(&self) -> Rc<Configured> {
        let first = self.first_configuration.take();
        self.first_configuration.set(first.clone());
        first.unwrap_or_else(|| self.worker().configuration())
    }

    /// Its next exchange will use `configuration`, if it begins by what has come already or comes first of all.
    pub fn begin_with(&self, configuration: &Rc<Configured>) {
        let next = self.first_configuration.take();
        self.first_configuration.set(next.or_else(|| Some(Rc::clone(configuration))));
    }

    /// Whether a request may have begun: it is the first one and nobody knows, or something has come.
    pub fn may_have_begun(&self) -> bool {
        self.info.requests.get() == 0 || !self.is_idle()
    }

    /// Whether the configuration still has the address that the connection came by.
    pub fn has_place(&self, configuration: &Configured) -> bool {
        self.place(configuration.http()).is_some()
    }

    /// Whether it waits for a request of which nothing has come.
    pub fn is_idle(&self) -> bool {
        self.idle_since.get() != Moment::NEVER
    }

    /// It waits for a request from now on: it may make room for another connection.
    fn note_idle(&self) {
        self.idle_since.set(gale_runtime::now());
        self.note_still_idle();
    }

    /// It was awake, and nothing had come.
    fn note_still_idle(&self) {
        if let Some(number) = self.number_in_list() {
            self.connections.table.note_idle(number);
        }
    }

    /// Its place among the connections of its worker, once it has one.
    fn number_in_list(&self) -> Option<usize> {
        self.listed.get().map(|number| number.get() as usize - 1)
    }

    /// The generation of the configuration of the exchange under way, if any.
    pub fn exchange_generation(&self) -> Option<u64> {
        self.state.borrow().transfer.as_ref()?.generation.map(NonZeroU64::get)
    }

    /// The generation of the configuration that it holds for its next exchange, if it holds one.
    pub fn next_generation(&self) -> Option<u64> {
        let next = self.first_configuration.take();
        let generation = next.as_ref().map(|next| next.http().generation);
        self.first_configuration.set(next);
        generation
    }

    /// Serves the connection to its end. (A block, because the future of an `async fn` holds its arguments and what
    /// they have become.)
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` would be larger")]
    pub fn serve(self: Rc<Self>) -> impl Future<Output = ()> {
        async move {
            if self.stream.tls().is_some() && !Box::pin(self.begin_tls()).await {
                return;
            }
            while let Some(request) = self.next_request().await {
                match self.exchange(request).await {
                    AfterExchange::KeepAlive if self.must_yield() => gale_runtime::yield_now().await,
                    AfterExchange::KeepAlive => {}
                    AfterExchange::Close => return,
                    AfterExchange::Linger(lingering) => return Box::pin(self.linger(lingering)).await,
                }
            }
        }
    }

    /// The next request whose head is whole; `None` when there is none to come.
    fn next_request(self: &Rc<Self>) -> impl Future<Output = Option<Box<Request>>> {
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
                    self.reset();
                }
                self.give_up(request, "client timed out (110: Connection timed out)", 408);
            }
            Arrival::TimedOut(None) | Arrival::Closed => {}
        }
        None
    }

    /// Whether other connections have their turn before the next request, which is there already.
    fn must_yield(&self) -> bool {
        self.is_last_of_turn() && self.state.borrow().transfer.is_some()
    }

    fn is_last_of_turn(&self) -> bool {
        self.info.requests.get().is_multiple_of(PIPELINED_MAX)
    }

    /// One request and its response. A block, because the future of an `async fn` holds its arguments and what they
    /// have become.
    fn exchange(self: &Rc<Self>, request: Box<Request>) -> impl Future<Output = AfterExchange> {
        self.worker().common.counters.begin_request();
        let mut in_flight = InFlight { connection: self, request: Some(request) };
        async move {
            if !in_flight.connection.answer(in_flight.request()).await {
                return AfterExchange::Close;
            }
            let sent = poll_fn(|context| in_flight.connection.poll_sent(context)).await;
            match in_flight.connection.afterwards(in_flight.request(), sent) {
                // The body that nobody wanted is read first, or there has to be another answer.
                None => Box::pin(in_flight.connection.conclude(in_flight.request(), sent)).await,
                Some(afterwards) => in_flight.connection.settle(in_flight.request(), afterwards),
            }
        }
    }

    /// A pool has no room to read a file, and nothing of the response has left: then that is the answer. (nginx closes
    /// the connection.)
    fn refuse(&self, request: &mut Request) -> Option<Step> {
        let error = self.state.borrow_mut().transfer().sender.take_refused()?;
        request.log(Level::Error, format_args!("{error}"));
        request.response.clear();
        Some(advance::fail(request, 503))
    }

    /// Does what has to be done before it can be decided what comes after the response: answers anew if nothing of it
    /// has left, as often as `error_page` names files that cannot be read either (its redirects are bounded); reads
    /// what is left of the request's body.
    async fn conclude(&self, request: &mut Request, mut sent: Result<(), Gone>) -> AfterExchange {
        while let Some(step) = self.refuse(request) {
            if !respond::finish_and_send(request, step).await {
                return AfterExchange::Close;
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
            self.set_nodelay(&request.scope().core);
        }
        afterwards
    }

    /// Whether this response is the last one here, whatever the client wants: the worker ends, or the address is gone.
    fn must_close(&self) -> bool {
        self.worker().is_draining() || self.worker().with_configuration(|configuration| !self.has_place(configuration))
    }

    /// Answers: at once as far as that needs no waiting, the rest when it is awaited. Says whether there was an answer.
    fn answer<'r>(self: &Rc<Self>, request: &'r mut Request) -> impl Future<Output = bool> + use<'r> {
        let mut rest = self.answer_at_once(request);
        poll_fn(move |context| match &mut rest {
            Some(rest) => rest.as_mut().poll(context),
            None => Poll::Ready(true),
        })
    }

    /// Answers as far as that needs no waiting; the rest, if any, says whether there was an answer. A function of its
    /// own, so that the connection's future has no room for what is only passed through.
    fn answer_at_once<'r>(self: &Rc<Self>, request: &'r mut Request) -> Option<LocalBoxFuture<'r, bool>> {
        let rest: LocalBoxFuture<'r, bool> = match self.begin(request) {
            Step::Close => Box::pin(std::future::ready(false)),
            Step::Answer(body) => {
                let rest = respond::start_response(request, body)?;
                Box::pin(async move {
                    rest.send(request).await;
                    true
                })
            }
            step => Box::pin(respond::finish_and_send(request, step)),
        };
        Some(self.after_held(rest))
    }

    /// What may take its time, or closes the connection, begins when the answers before have left.
    fn after_held<'r>(self: &Rc<Self>, rest: LocalBoxFuture<'r, bool>) -> LocalBoxFuture<'r, bool> {
        let has_held = {
            let mut state = self.state.borrow_mut();
            let sender = &mut state.transfer().sender;
            sender.send_held(&self.stream, false);
            sender.has_held()
        };
        if !has_held {
            return rest;
        }
        let connection = Rc::clone(self);
        Box::pin(async move {
            let poll_held = |context: &mut Context<'_>| {
                connection.state.borrow_mut().transfer().sender.poll_held(&connection.stream, context)
            };
            poll_fn(poll_held).await.is_ok() && rest.await
        })
    }

    /// The end of an exchange: it is logged, and its memory goes back.
    fn end(&self, mut request: Box<Request>) {
        self.first_configuration.take();
        advance::log(&mut request);
        self.worker().give_back(request);
        let state = &mut *self.state.borrow_mut();
        let Some(mut transfer) = state.transfer.take() else { return };
        transfer.head.end_waiting(&self.worker().common.counters);
        if !transfer.sender.is_at_rest() {
            return;
        }
        transfer.sender.rest();
        transfer.generation = None;
        if transfer.input.is_empty() {
            debug_assert!(!transfer.sender.has_held(), "only what is followed is held");
            self.connections.give_transfer_back(transfer);
        } else {
            state.transfer = Some(transfer);
        }
    }

    /// Decides what comes after the response; `None` when that shows in what is left of the request's body.
    fn afterwards(&self, request: &Request, sent: Result<(), Gone>) -> Option<AfterExchange> {
        if sent == Err(Gone::Aborted) {
            if self.state.borrow_mut().transfer().sender.is_refused() {
                return None;
            }
            self.log_failure(request);
        }
        let core = &request.scope().core;
        let mut state = self.state.borrow_mut();
        let Transfer { input, body, sender, wish, .. } = state.transfer();
        let resets = match sent {
            Ok(()) if !sender.is_aborted() => None,
            Err(Gone::SendTimedOut) => Some(*core.reset_timedout_connection.get()),
            _ => Some(sender.is_cut_short()),
        };
        if let Some(resets) = resets {
            if resets {
                self.reset();
            }
            return Some(AfterExchange::Close);
        }
        if sender.keeps_alive() && body.may_be_followed() && !self.must_close() {
            return body.is_read().then_some(AfterExchange::KeepAlive);
        }
        let setting = wish.lingering_close(request, core);
        let lingers = lingers(setting, body, input) || setting == LingeringClose::On && self.has_more(request);
        Some(if lingers { AfterExchange::Linger(Lingering::of(core)) } else { AfterExchange::Close })
    }

    /// Whether something has come meanwhile that nobody has read, if the response took its time.
    fn has_more(&self, request: &Request) -> bool {
        gale_runtime::now() != request.started && self.stream.has_unread()
    }

    /// Tells why a file could not be sent to its end, if that is what happened.
    fn log_failure(&self, request: &Request) {
        let failure = self.state.borrow_mut().transfer().sender.take_failure();
        if let Some(error) = failure {
            request.log(error.level(), format_args!("{error}"));
        }
    }

    /// Reads what is left of a body that nobody wanted, so that the next request can
    /// be found behind it.
    async fn drain_body(&self, request: &Request) -> AfterExchange {
        let core = &request.scope().core;
        let limits = BodyLimits { length_max: 0, silence_max: *core.lingering_timeout.get(), min_rate: None };
        let everything = async {
            loop {
                match poll_fn(|context| self.poll_body(context, &limits)).await {
                    Ok(Some(_)) => {}
                    // It may have become the last one meanwhile.
                    Ok(None) if self.must_close() => {
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

    /// Lingering close: says that nothing more will come, and reads on for a while;
    /// closing at once would make the kernel take back what the client has not
    /// read yet. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#lingering_close>)
    async fn linger(&self, lingering: Lingering) {
        if self.stream.shutdown_write().is_err() {
            return;
        }
        self.state.borrow_mut().transfer = None;
        let mut discarded = Buffer::new();
        let everything = async {
            loop {
                let received = gale_runtime::timeout(
                    lingering.silence_max,
                    poll_fn(|context| self.stream.poll_recv(context, &mut discarded, DISCARD_BYTES)),
                )
                .await;
                match received {
                    Ok(Ok(1..)) => discarded.clear(),
                    _ => return,
                }
            }
        };
        let _ = gale_runtime::timeout(lingering.time_max, everything).await;
    }

    /// `tcp_nodelay`: once, when the connection turns out to be kept.
    fn set_nodelay(&self, core: &CoreSettings) {
        let is_inet = matches!(self.info.remote, SocketAddress::Inet(_));
        if is_inet && *core.tcp_nodelay.get() && !self.nodelay_is_set.replace(true) {
            // A failure costs latency, nothing else.
            let _ = self.stream.set_nodelay(true);
        }
    }

    /// What can come after the response, as far as it is known before; and how long the connection may be idle then.
    fn after_response(&self, request: &Request, core: &CoreSettings, transfer: &Transfer) -> After {
        let Transfer { wish, body, input, .. } = transfer;
        let idle_max = core.keepalive_timeout.get().idle;
        self.idle_max_ms.set(u32::try_from(idle_max.as_millis()).unwrap_or(u32::MAX));
        if wish.may_be_kept(request, core) && body.may_be_followed() && !self.must_close() {
            After::MayKeep
        } else if lingers(wish.lingering_close(request, core), body, input) {
            After::Lingers
        } else {
            After::Closes
        }
    }

    /// What the connection makes of the request's response.
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

    fn reset(&self) {
        // If it fails, the connection is closed in the usual way.
        let _ = self.stream.set_linger_reset();
    }

    /// The servers behind the connection's address, as the configuration now has it;
    /// `None` when it is not there any more.
    fn place(&self, http: &HttpConfiguration) -> Option<AddressIndex> {
        if self.known_generation.get() == http.generation {
            return self.known_place.get();
        }
        // A connection that began otherwise than the address now wants it has no place there any more.
        let is_as_wanted = |place: &AddressIndex| {
            let Address { listening, .. } = &http.addresses[place.index()];
            let wanted = Beginning { proxy_protocol: listening.proxy_protocol, ssl: listening.ssl };
            self.began.get().is_none_or(|began| began == wanted)
        };
        let place = self.find_place(http).filter(is_as_wanted);
        self.known_generation.set(http.generation);
        self.known_place.set(place);
        place
    }

    fn find_place(&self, http: &HttpConfiguration) -> Option<AddressIndex> {
        let listening = http.addresses.iter().position(|address| address.listening.address == *self.info.listening);
        let shares_socket = listening.is_none_or(|index| http.addresses[index].listening.shares_socket);
        if !shares_socket {
            return listening.map(AddressIndex::new);
        }
        let local = match self.local_address()? {
            SocketAddress::Inet(address) => ListenAddress::Inet(*address),
            SocketAddress::Unix(_) => return listening.map(AddressIndex::new),
        };
        http.addresses
            .iter()
            .position(|address| address.listening.address == local)
            .or(listening)
            .map(AddressIndex::new)
    }
}

impl Drop for Http1 {
    fn drop(&mut self) {
        if let Some(transfer) = &mut self.state.get_mut().transfer {
            transfer.head.end_waiting(&self.connections.worker.common.counters);
            // After a panic: the answers before it are good.
            transfer.sender.send_held(&self.stream, false);
        }
        if let Some(number) = self.number_in_list() {
            self.connections.table.remove(number);
        }
    }
}

/// A request on its way. It is logged when it ends, however it ends: also when the
/// connection is closed under it.
struct InFlight<'c> {
    connection: &'c Rc<Http1>,
    request: Option<Box<Request>>,
}

impl InFlight<'_> {
    fn request(&mut self) -> &mut Request {
        self.request.as_mut().expect("there until it ends")
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let Some(mut request) = self.request.take() else { return };
        self.connection.worker().common.counters.end_request();
        // After a panic nothing in the request is relied on; the panic itself is logged.
        if std::thread::panicking() {
            return;
        }
        if request.response.status == 0 && !self.connection.state.borrow_mut().transfer().sender.is_started() {
            request.response.status = CLOSED_UNDER_REQUEST;
        }
        self.connection.end(request);
    }
}

/// nginx's own status, for the log: the connection ended before there was an answer.
const CLOSED_UNDER_REQUEST: u16 = 499;

/// Whether a body of unknown length may go in chunks: HTTP/1.1 has them, and `chunked_transfer_encoding` allows them.
fn may_be_chunked(request: &Request, core: &CoreSettings) -> bool {
    request.version() == Version::Http11 && *core.chunked_transfer_encoding.get()
}

/// Whether a closing connection is read from for a while: the client may still be sending.
fn lingers(lingering_close: LingeringClose, body: &RequestBody, input: &Buffer) -> bool {
    match lingering_close {
        LingeringClose::Off => false,
        LingeringClose::Always => true,
        LingeringClose::On => !body.is_read() || !input.is_empty(),
    }
}

/// An address of the configuration: its index and one, so that none takes no room.
#[derive(Clone, Copy)]
struct AddressIndex(NonZeroU32);

impl AddressIndex {
    fn new(index: usize) -> AddressIndex {
        let number = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        AddressIndex(number.expect("fewer addresses than 2^32"))
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }

    fn default_server(self, http: &HttpConfiguration) -> ServerId {
        http.addresses[self.index()].servers.default
    }

    /// The settings before a server has been chosen: those of the default server.
    fn core(self, http: &HttpConfiguration) -> &CoreSettings {
        &http.scope(http.server(self.default_server(http)).scope).core
    }
}

impl Exchange for Http1 {
    fn connection(&self) -> &ConnectionInfo {
        &self.info
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        self.info.local(|| self.stream.local_address().ok())
    }

    fn scheme(&self) -> Scheme {
        if self.stream.is_encrypted() { Scheme::Https } else { Scheme::Http }
    }

    fn tls(&self) -> Option<&TlsStream> {
        self.stream.tls().filter(|stream| stream.is_tls())
    }

    fn tcp_info(&self) -> Option<TcpInfo> {
        self.stream.tcp_info().ok()
    }

    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]) {
        let mut text = Vec::with_capacity(64);
        response::write_status_line(&mut text, status);
        for (name, value) in fields {
            response::write_header(&mut text, name, value);
        }
        text.extend_from_slice(b"\r\n");
        let mut state = self.state.borrow_mut();
        let transfer = state.transfer();
        if status == 100 {
            transfer.body.continue_was_sent();
        }
        transfer.sender.interim(&text);
    }

    fn start(&self, request: &Request, options: &ResponseOptions) {
        let core = &request.scope().core;
        // It may ask variables, and these the exchange.
        let server_line = server_line(request, core);
        let mut state = self.state.borrow_mut();
        let transfer = state.transfer();
        let conduct = self.conduct(request, core, transfer, &server_line);
        transfer.sender.start(&request.response, options, &conduct, &self.connections, &self.stream);
    }

    fn respond(&self, request: &Request, options: &ResponseOptions, body: Bytes) {
        let core = &request.scope().core;
        let server_line = server_line(request, core);
        let mut state = self.state.borrow_mut();
        let transfer = state.transfer();
        let conduct = self.conduct(request, core, transfer, &server_line);
        let Transfer { input, body: request_body, sender, .. } = transfer;
        let is_followed = request_body.is_read() && !input.is_empty() && !self.is_last_of_turn();
        sender.respond(&request.response, options, &conduct, is_followed, &self.connections, &self.stream, body);
    }

    fn carries_trailers(&self, request: &Request) -> bool {
        may_be_chunked(request, &request.scope().core)
    }

    fn keeps_connection(&self, request: &Request) -> bool {
        self.state.borrow_mut().transfer().wish.may_be_kept(request, &request.scope().core)
    }

    fn push(&self, item: BodyItem) {
        self.state.borrow_mut().transfer().sender.push(item);
    }

    fn end(&self) {
        self.state.borrow_mut().transfer().sender.end();
    }

    fn abort(&self) {
        self.state.borrow_mut().transfer().sender.abort();
    }

    fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        self.state.borrow_mut().transfer().sender.refuse(error)
    }

    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.state.borrow_mut().transfer().sender.poll_sent(&self.stream, context)
    }

    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.state.borrow_mut().transfer().sender.poll_ready(low_water, &self.stream, context)
    }

    fn queued_bytes(&self) -> u64 {
        self.state.borrow_mut().transfer().sender.queued_bytes()
    }

    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        let State { timer, transfer } = &mut *self.state.borrow_mut();
        let Transfer { input, body, sender, .. } = &mut **transfer.as_mut().expect("an exchange is under way");
        if body.wants_continue() && !sender.is_started() {
            body.continue_was_sent();
            sender.interim(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        if sender.has_interim() {
            // Whether the client got it shows in what it sends.
            let _ = sender.poll_sent(&self.stream, context);
        }
        body.poll_next(&self.stream, input, timer, context, limits)
    }

    fn body_is_read(&self) -> bool {
        self.state.borrow_mut().transfer().body.is_read()
    }

    fn is_complete(&self) -> bool {
        self.state.borrow_mut().transfer().sender.is_complete()
    }

    fn received(&self) -> u64 {
        self.state.borrow_mut().transfer().body.received()
    }

    fn become_tunnel(&self) {
        let mut state = self.state.borrow_mut();
        let transfer = state.transfer();
        transfer.body.become_tunnel();
        transfer.sender.become_tunnel();
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        ready!(self.stream.poll_peer_closed(context));
        Poll::Ready(())
    }

    fn is_broken(&self) -> bool {
        self.stream.is_broken()
    }

    fn sent(&self) -> Sent {
        self.state.borrow_mut().transfer().sender.sent()
    }
}
