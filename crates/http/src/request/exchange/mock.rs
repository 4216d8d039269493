//! A mock of an exchange, without a connection, and tests of the interface: a response may begin and end before the
//! request has ended, interim responses come first, a task can wait for both directions at once, it learns that a
//! client has left, and a tunnel carries bytes both ways.
//!
//! The mock is stricter than a connection: a test fails if an item is pushed before the last one has been sent, or if
//! calls are out of order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_engine::configuration::{Configuration, EventsSettings};
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::connections::ConnectionInfo;
use gale_log::ErrorLog;
use gale_process::{ListenAddress, ProcessSettings};
use gale_protocol::request::Framing;
use gale_runtime::{Bytes, Moment, SocketAddress};
use gale_worker::Worker;

use super::{BodyLength, BodyLimits, Exchange, Gone, Permit, RequestBodyError, ResponseOptions, ResponseWriter, Sent};
use crate::files::open_files::OpenFileCache;
use crate::request::Request;
use crate::request::body::BodyItem;
use crate::request::configuration::location::Locations;
use crate::request::configuration::settings::{
    Aio, BodyInFile, CoreSettings, HeaderBuffers, KeepaliveTimeout, LingeringClose, Satisfy, ServerTokens, TempPath,
};
use crate::request::configuration::{HttpConfiguration, Scope, ScopeKind, Server};
use crate::request::variables::template::SizeTemplate;
use crate::request::worker::{Configured, HttpWorker};

/// `client_max_body_size` of [`settings`].
pub(crate) const BODY_MAX: u64 = 1 << 20;

/// An event that the client saw.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Interim(u16),
    Start(u16, BodyLength),
    Piece(Bytes),
    End,
    Aborted,
}

/// An exchange whose client is the test.
pub(crate) struct MockExchange {
    connection: ConnectionInfo,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    coming: VecDeque<BodyItem>,
    coming_end: Option<Result<(), RequestBodyError>>,
    received: u64,
    was_asked_for_body: bool,
    events: Vec<Event>,
    is_started: bool,
    is_ended: bool,
    is_tunnel: bool,
    /// An item was pushed that the client has not accepted.
    is_queued: bool,
    is_slow: bool,
    has_left: bool,
    body_waker: Option<Waker>,
    sent_waker: Option<Waker>,
    gone_waker: Option<Waker>,
    asked_waker: Option<Waker>,
}

/// The client's side.
impl MockExchange {
    pub(crate) fn new() -> Rc<MockExchange> {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 8000));
        let listening = Rc::new(ListenAddress::Inet(address));
        let connection = ConnectionInfo::new(1, SocketAddress::Inet(address), listening, Moment::from_nanos(0));
        Rc::new(MockExchange { connection, state: RefCell::default() })
    }

    /// The client sends a piece of the request's body.
    pub(crate) fn sends(&self, bytes: &[u8]) {
        let mut state = self.state.borrow_mut();
        assert!(state.coming_end.is_none());
        state.coming.push_back(BodyItem::Bytes(Bytes::copy_from_slice(bytes)));
        state.body_waker.take().into_iter().for_each(Waker::wake);
    }

    /// The client sends the trailers of the request's body.
    pub(crate) fn sends_trailers(&self, fields: &[(&'static str, &'static str)]) {
        let fields = fields.iter().map(|&(name, value)| (Bytes::from(name), Bytes::from(value))).collect();
        self.state.borrow_mut().coming.push_back(BodyItem::Trailers(fields));
    }

    /// The client ends the request's body.
    pub(crate) fn ends(&self) {
        self.ends_with(Ok(()));
    }

    /// The request's body breaks off.
    pub(crate) fn fails(&self, error: RequestBodyError) {
        self.ends_with(Err(error));
    }

    fn ends_with(&self, end: Result<(), RequestBodyError>) {
        let mut state = self.state.borrow_mut();
        state.coming_end = Some(end);
        state.body_waker.take().into_iter().for_each(Waker::wake);
    }

    /// From now on the client accepts no bytes until [`MockExchange::takes`] is called.
    fn is_slow(&self) {
        self.state.borrow_mut().is_slow = true;
    }

    /// The client accepts all queued bytes.
    fn takes(&self) {
        let mut state = self.state.borrow_mut();
        state.is_queued = false;
        state.sent_waker.take().into_iter().for_each(Waker::wake);
    }

    /// The client closes the connection.
    fn leaves(&self) {
        let mut state = self.state.borrow_mut();
        state.has_left = true;
        let State { body_waker, sent_waker, gone_waker, .. } = &mut *state;
        [body_waker, sent_waker, gone_waker].into_iter().filter_map(Option::take).for_each(Waker::wake);
    }

    /// Returns the events that the client saw since the last call.
    pub(crate) fn saw(&self) -> Vec<Event> {
        std::mem::take(&mut self.state.borrow_mut().events)
    }

    /// Ready when the whole body received so far has been read, and a task waits for more.
    pub(crate) fn asks_for_more(self: &Rc<Self>) -> Pin<Box<dyn Future<Output = ()>>> {
        let exchange = Rc::clone(self);
        Box::pin(poll_fn(move |context| {
            let mut state = exchange.state.borrow_mut();
            if state.coming.is_empty() && state.body_waker.is_some() {
                return Poll::Ready(());
            }
            state.asked_waker = Some(context.waker().clone());
            Poll::Pending
        }))
    }
}

impl Exchange for MockExchange {
    fn connection(&self) -> &ConnectionInfo {
        &self.connection
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        None
    }

    fn interim(&self, status: u16, _fields: &[(Bytes, Bytes)]) {
        let mut state = self.state.borrow_mut();
        assert!(!state.is_started, "an interim response comes before the final one");
        state.events.push(Event::Interim(status));
    }

    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        let mut state = self.state.borrow_mut();
        state.was_asked_for_body = true;
        if state.has_left {
            return Poll::Ready(Err(RequestBodyError::PeerGone));
        }
        if let Some(item) = state.coming.pop_front() {
            state.received += item.length();
            let is_too_large = !state.is_tunnel && state.received > limits.length_max;
            let result = if is_too_large { Err(RequestBodyError::TooLarge) } else { Ok(Some(item)) };
            return Poll::Ready(result);
        }
        if let Some(end) = state.coming_end {
            return Poll::Ready(end.map(|()| None));
        }
        state.body_waker = Some(context.waker().clone());
        state.asked_waker.take().into_iter().for_each(Waker::wake);
        Poll::Pending
    }

    fn body_is_read(&self) -> bool {
        let state = self.state.borrow();
        state.coming.is_empty() && state.coming_end == Some(Ok(()))
    }

    fn received(&self) -> u64 {
        self.state.borrow().received
    }

    fn is_complete(&self) -> bool {
        let state = self.state.borrow();
        state.is_ended && !state.is_queued
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.has_left {
            return Poll::Ready(());
        }
        state.gone_waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn is_broken(&self) -> bool {
        self.state.borrow().has_left
    }

    fn sent(&self) -> Sent {
        Sent::default()
    }

    fn writer(self: Rc<Self>, _permit: Permit) -> Rc<dyn ResponseWriter> {
        self
    }
}

impl ResponseWriter for MockExchange {
    fn start(&self, request: &Request, options: &ResponseOptions) {
        let mut state = self.state.borrow_mut();
        assert!(!state.is_started, "there is one response");
        state.is_started = true;
        state.events.push(Event::Start(request.response.status, options.length));
    }

    fn push(&self, item: BodyItem) {
        let mut state = self.state.borrow_mut();
        assert!(state.is_started && !state.is_ended, "a body lies between start and end");
        assert!(!state.is_queued, "what was pushed has to be waited for");
        state.is_queued = state.is_slow;
        match item {
            BodyItem::Bytes(bytes) => state.events.push(Event::Piece(bytes)),
            other => panic!("the tests push bytes, not {other:?}"),
        }
    }

    fn end(&self) {
        let mut state = self.state.borrow_mut();
        assert!(state.is_started && !state.is_ended, "there is one end");
        state.is_ended = true;
        state.events.push(Event::End);
    }

    fn abort(&self) {
        let mut state = self.state.borrow_mut();
        state.is_ended = true;
        state.events.push(Event::Aborted);
    }

    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let mut state = self.state.borrow_mut();
        if state.has_left {
            return Poll::Ready(Err(Gone::ByPeer));
        }
        if !state.is_queued {
            return Poll::Ready(Ok(()));
        }
        state.sent_waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn poll_ready(&self, _low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.poll_sent(context)
    }

    fn become_tunnel(&self) {
        let mut state = self.state.borrow_mut();
        assert!(!state.is_started, "a tunnel begins with the response");
        state.is_tunnel = true;
    }
}

/// Settings with which a request can be read and answered.
pub(crate) fn settings() -> CoreSettings {
    let mut core = CoreSettings::default();
    let second = Duration::from_secs(1);
    core.client_max_body_size.set(BODY_MAX, None);
    core.client_body_buffer_size.set(16 * 1024, None);
    core.client_body_timeout.set(second, None);
    let nowhere = std::path::Path::new("/nowhere").into();
    core.client_body_temp_path.set(TempPath { path: nowhere, levels: Default::default() }, None);
    core.client_body_in_file_only.set(BodyInFile::Off, None);
    core.client_body_in_single_buffer.set(false, None);
    core.keepalive_timeout.set(KeepaliveTimeout { idle: second, advertised: None }, None);
    core.send_timeout.set(second, None);
    core.lingering_close.set(LingeringClose::On, None);
    core.limit_rate.set(SizeTemplate::Constant(0), None);
    core.limit_rate_after.set(SizeTemplate::Constant(0), None);
    core.reset_timedout_connection.set(false, None);
    core.tcp_nopush.set(false, None);
    core.sendfile.set(false, None);
    core.sendfile_max_chunk.set(0, None);
    core.open_file_cache.set(OpenFileCache::Off, None);
    core.aio.set(Aio::Auto, None);
    core.directio.set(u64::MAX, None);
    core.directio_alignment.set(512, None);
    core.output_buffers.set(HeaderBuffers { count: 2, size: 32 * 1024 }, None);
    core.postpone_output.set(1460, None);
    core.read_ahead.set(0, None);
    core.chunked_transfer_encoding.set(true, None);
    core.msie_padding.set(false, None);
    core.msie_refresh.set(false, None);
    core.server_tokens.set(ServerTokens::On, None);
    core.internal.set(false, None);
    core.recursive_error_pages.set(false, None);
    core.error_page.set(Vec::new(), None);
    core.client_body_min_rate.set(None, None);
    core.satisfy.set(Satisfy::All, None);
    core.auth_delay.set(Duration::ZERO, None);
    core
}

/// Returns a request with a chunked body on this exchange, in a server with these settings.
pub(crate) fn request(exchange: &Rc<MockExchange>, core: CoreSettings) -> Request {
    request_in(exchange, scope(core))
}

/// Returns a scope with these settings in which no module has anything to do.
pub(crate) fn scope(core: CoreSettings) -> Scope {
    Scope {
        http2_chunk_size: 8192,
        kind: ScopeKind::Server,
        name: Box::default(),
        core: Arc::new(core),
        limit_except: None,
        error_log: ErrorLog::new(Vec::new()),
        confs: Box::default(),
        conf_indexes: Arc::default(),
        redirects_to_slash: false,
        handlers: Default::default(),
        filters: Vec::new(),
    }
}

/// Returns a request like that of [`request`], on any exchange.
pub(crate) fn request_on(exchange: Rc<dyn Exchange>, core: CoreSettings) -> Request {
    request_between(exchange, scope(core))
}

/// Returns a request like that of [`request`], in a server that consists of this scope.
pub(crate) fn request_in(exchange: &Rc<MockExchange>, scope: Scope) -> Request {
    request_between(Rc::<MockExchange>::clone(exchange), scope)
}

fn request_between(exchange: Rc<dyn Exchange>, scope: Scope) -> Request {
    let server = Server {
        zone: None,
        scope: ScopeId(0),
        name: Box::default(),
        locations: Locations::default(),
        named: Default::default(),
        tls: None,
        certificate_names: Default::default(),
        verify_client: Default::default(),
        allows_connect: false,
        http2: false,
    };
    let http = HttpConfiguration {
        scopes: vec![scope],
        redirects_to_slash: false,
        servers: vec![server],
        addresses: Vec::new(),
        variables: Default::default(),
        upstreams: Default::default(),
        speaks_tls: false,
        keeps_client_hello: false,
        generation: 1,
    };
    let configuration = Configured::new(Arc::new(Configuration {
        built: std::time::SystemTime::UNIX_EPOCH,
        process: ProcessSettings::default(),
        events: EventsSettings::default(),
        cpu_affinity: None,
        thread_pools: Default::default(),
        error_log: Arc::new(ErrorLog::new(Vec::new())),
        zones: Default::default(),
        services: Vec::new(),
        protocols: vec![Arc::new(http)],
    }));
    let mut request = Request::default();
    let common = Worker::new(1, Arc::clone(configuration.error_log()));
    request.worker = Some(HttpWorker::new(common, Rc::clone(&configuration)));
    request.parsed_mut().framing = Framing::Chunked;
    request.begin(configuration, exchange, ServerId(0));
    request
}

mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, ready};

    use gale_runtime::{EventLoop, LoopOptions};

    use super::Event::*;
    use super::*;
    use crate::request::body::{Body, BodyError, BodyStream};
    use crate::request::respond::{self, Rest};
    use crate::request::tunnel::{Opened, Tunnel, carry};

    fn bytes(text: &'static str) -> Event {
        Piece(text.into())
    }

    /// A future that is polled only after its waker was called, so that a test fails if an exchange forgets a waker.
    struct Driven<F: Future> {
        future: Pin<Box<F>>,
        flag: Arc<Flag>,
    }

    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl<F: Future> Driven<F> {
        fn new(future: F) -> Driven<F> {
            Driven { future: Box::pin(future), flag: Arc::new(Flag(AtomicBool::new(true))) }
        }

        /// Polls the future until it is ready or its waker has not been called.
        fn run(&mut self) -> Poll<F::Output> {
            let waker = Waker::from(Arc::clone(&self.flag));
            while self.flag.0.swap(false, Ordering::Relaxed) {
                if let Poll::Ready(output) = self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    return Poll::Ready(output);
                }
            }
            Poll::Pending
        }
    }

    /// A response body that echoes the request's body as it arrives.
    struct Echo(Rc<MockExchange>, BodyLimits);

    impl BodyStream for Echo {
        fn poll_next(
            &mut self,
            _request: &Request,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<BodyItem, BodyError>>> {
            let piece = ready!(self.0.poll_body(context, &self.1));
            Poll::Ready(piece.map_err(BodyError::Request).transpose())
        }
    }

    /// Runs a test with a request, on an event loop, which a request needs when it ends.
    fn with_request(test: impl FnOnce(&Rc<MockExchange>, &mut Request)) {
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let exchange = MockExchange::new();
            let mut request = request(&exchange, settings());
            request.response.status = 200;
            test(&exchange, &mut request);
        });
    }

    fn start_echo(exchange: &Rc<MockExchange>, request: &mut Request) -> Rest {
        let echo = Echo(Rc::clone(exchange), request.body_limits());
        respond::start_response(request, Body::Stream(Box::new(echo))).expect("a stream is sent item by item")
    }

    #[test]
    fn an_answer_begins_before_the_request_has_ended_and_follows_it() {
        with_request(|client, request| {
            let body = start_echo(client, request);
            assert_eq!(client.saw(), [Start(200, BodyLength::UntilEnd)]);
            let mut sending = Driven::new(body.send(request));
            assert!(sending.run().is_pending());
            client.sends(b"one");
            assert!(sending.run().is_pending());
            assert_eq!(client.saw(), [bytes("one")]);
            client.sends(b"two");
            client.sends(b"three");
            client.ends();
            assert!(sending.run().is_ready());
            assert_eq!(client.saw(), [bytes("two"), bytes("three"), End]);
        });
    }

    #[test]
    fn a_client_that_takes_nothing_stops_the_reading() {
        with_request(|client, request| {
            client.is_slow();
            let body = start_echo(client, request);
            let mut sending = Driven::new(body.send(request));
            client.sends(b"one");
            client.sends(b"two");
            assert!(sending.run().is_pending());
            assert_eq!(client.saw(), [Start(200, BodyLength::UntilEnd), bytes("one")]);
            client.takes();
            assert!(sending.run().is_pending());
            assert_eq!(client.saw(), [bytes("two")]);
        });
    }

    #[test]
    fn an_answer_that_cannot_be_completed_is_broken_off() {
        with_request(|client, request| {
            let body = start_echo(client, request);
            let mut sending = Driven::new(body.send(request));
            client.sends(b"one");
            client.fails(RequestBodyError::Malformed);
            assert!(sending.run().is_ready());
            assert_eq!(client.saw(), [Start(200, BodyLength::UntilEnd), bytes("one"), Aborted]);
        });
    }

    #[test]
    fn an_answer_may_end_before_the_request_and_the_body_be_read_afterwards() {
        with_request(|client, request| {
            assert!(respond::start_response(request, Body::Bytes("done".into())).is_none());
            assert_eq!(client.saw(), [Start(200, BodyLength::Known(4)), bytes("done"), End]);
            assert!(!client.body_is_read());
            let (exchange, limits) = (request.exchange_handle(), request.body_limits());
            let mut reading = Driven::new(poll_fn(|context| exchange.poll_body(context, &limits)));
            assert!(reading.run().is_pending());
            client.sends(b"late");
            assert!(matches!(reading.run(), Poll::Ready(Ok(Some(BodyItem::Bytes(late)))) if late == "late"));
            client.ends();
            assert!(exchange.body_is_read());
        });
    }

    #[test]
    fn interim_responses_come_before_the_final_one() {
        with_request(|client, request| {
            request.exchange().interim(103, &[("Link".into(), "</style.css>".into())]);
            request.exchange().interim(103, &[]);
            respond::start_response(request, Body::Empty);
            assert_eq!(client.saw(), [Interim(103), Interim(103), Start(200, BodyLength::Known(0)), End]);
        });
    }

    #[test]
    fn a_handler_that_waits_for_something_else_notices_that_the_client_left() {
        with_request(|client, request| {
            let exchange = request.exchange_handle();
            let something_else = std::future::pending::<()>();
            let mut waiting = Driven::new(async {
                let mut something_else = std::pin::pin!(something_else);
                poll_fn(|context| match something_else.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(Ok(())),
                    Poll::Pending => exchange.poll_gone(context).map(|()| Err(Gone::ByPeer)),
                })
                .await
            });
            client.sends(b"not looked at");
            assert!(waiting.run().is_pending());
            client.leaves();
            assert_eq!(waiting.run(), Poll::Ready(Err(Gone::ByPeer)));
            assert!(!client.state.borrow().was_asked_for_body);
        });
    }

    #[test]
    fn a_client_that_leaves_ends_the_sending() {
        with_request(|client, request| {
            client.is_slow();
            let body = start_echo(client, request);
            let mut sending = Driven::new(body.send(request));
            client.sends(b"one");
            assert!(sending.run().is_pending());
            client.leaves();
            assert!(sending.run().is_ready());
            assert_eq!(client.saw(), [Start(200, BodyLength::UntilEnd), bytes("one")]);
        });
    }

    /// A body that is always pending, and counts the calls that ask it to read ahead.
    struct Hanging(Rc<Cell<usize>>);

    impl BodyStream for Hanging {
        fn poll_next(&mut self, _: &Request, _: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
            Poll::Pending
        }

        fn poll_ahead(&mut self, _: &Request, _: &mut Context<'_>) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn a_client_that_leaves_ends_a_body_that_waits_for_something_else() {
        with_request(|client, request| {
            let body = Rc::new(Cell::new(0));
            let stream = Body::Stream(Box::new(Hanging(Rc::clone(&body))));
            let rest = respond::start_response(request, stream).expect("a stream is sent item by item");
            let mut sending = Driven::new(rest.send(request));
            assert!(sending.run().is_pending());
            client.leaves();
            assert!(sending.run().is_ready());
            drop(sending);
            assert_eq!((Rc::strong_count(&body), body.get()), (1, 0), "what waited has ended");
        });
    }

    #[test]
    fn while_the_client_is_slow_a_body_reads_ahead() {
        with_request(|client, request| {
            client.is_slow();
            let ahead = Rc::new(Cell::new(0));
            let stream = Body::Stream(Box::new(Hanging(Rc::clone(&ahead))));
            let rest = respond::start_response(request, stream).expect("a stream is sent item by item");
            client.push(BodyItem::Bytes("one".into()));
            let mut sending = Driven::new(rest.send(request));
            assert!(sending.run().is_pending());
            assert_eq!(ahead.get(), 1);
        });
    }

    #[test]
    fn both_directions_are_waited_for_at_once() {
        with_request(|client, request| {
            client.is_slow();
            let (exchange, limits) = (request.exchange_handle(), request.body_limits());
            let _rest = start_echo(client, request);
            client.push(BodyItem::Bytes("answer".into()));
            let either = |context: &mut Context<'_>| match client.poll_sent(context) {
                Poll::Ready(sent) => Poll::Ready(sent.map(|()| "sent").unwrap_or("gone")),
                Poll::Pending => exchange.poll_body(context, &limits).map(|_| "read"),
            };
            let mut waiting = Driven::new(poll_fn(either));
            assert!(waiting.run().is_pending());
            client.sends(b"more");
            assert_eq!(waiting.run(), Poll::Ready("read"));
            let mut waiting = Driven::new(poll_fn(either));
            assert!(waiting.run().is_pending());
            client.takes();
            assert_eq!(waiting.run(), Poll::Ready("sent"));
        });
    }

    /// State of a tunnel's other end, whose part the test plays.
    #[derive(Default)]
    struct OtherEnd {
        sends: VecDeque<Bytes>,
        has_ended: bool,
        got: Vec<Bytes>,
        was_told_of_end: bool,
        takes_nothing: bool,
        /// The end of the client's direction stays queued until this is reset.
        ends_slowly: bool,
        waker: Option<Waker>,
    }

    struct Played(Rc<RefCell<OtherEnd>>);

    impl Tunnel for Played {
        fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BodyError>> {
            let mut end = self.0.borrow_mut();
            match end.sends.pop_front() {
                Some(bytes) => Poll::Ready(Ok(Some(bytes))),
                None if end.has_ended => Poll::Ready(Ok(None)),
                None => {
                    end.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }

        fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
            let mut end = self.0.borrow_mut();
            if end.takes_nothing || end.ends_slowly && end.was_told_of_end {
                end.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(Ok(()))
        }

        fn write(&mut self, bytes: Bytes) {
            self.0.borrow_mut().got.push(bytes);
        }

        fn end(&mut self) {
            self.0.borrow_mut().was_told_of_end = true;
        }

        fn idle_max(&self) -> Duration {
            Duration::from_secs(60)
        }
    }

    fn change(end: &RefCell<OtherEnd>, change: impl FnOnce(&mut OtherEnd)) {
        change(&mut end.borrow_mut());
        end.borrow_mut().waker.take().into_iter().for_each(Waker::wake);
    }

    fn start_tunnel(client: &Rc<MockExchange>, request: &mut Request) -> (Opened, Rc<RefCell<OtherEnd>>) {
        let end = Rc::new(RefCell::new(OtherEnd::default()));
        request.response.status = 101;
        request.outcome.tunnel = Some(Box::new(Played(Rc::clone(&end))));
        let Some(Rest::Tunnel(tunnel)) = respond::start_response(request, Body::Empty) else {
            unreachable!("a tunnel follows")
        };
        assert_eq!(client.saw(), [Start(101, BodyLength::UntilEnd)]);
        (tunnel, end)
    }

    #[test]
    fn a_tunnel_carries_bytes_both_ways_past_every_limit() {
        with_request(|client, request| {
            let (tunnel, end) = start_tunnel(client, request);
            let mut carrying = Driven::new(carry(tunnel));
            client.state.borrow_mut().received = BODY_MAX;
            client.sends(b"ping");
            assert!(carrying.run().is_pending());
            assert_eq!(end.borrow().got, ["ping"]);
            change(&end, |end| end.sends.push_back("pong".into()));
            assert!(carrying.run().is_pending());
            assert_eq!(client.saw(), [bytes("pong")]);
        });
    }

    #[test]
    fn one_direction_of_a_tunnel_may_end_before_the_other() {
        with_request(|client, request| {
            let (tunnel, end) = start_tunnel(client, request);
            let mut carrying = Driven::new(carry(tunnel));
            client.sends(b"all");
            client.ends();
            assert!(carrying.run().is_pending());
            assert!(end.borrow().was_told_of_end);
            change(&end, |end| end.sends.push_back("late".into()));
            assert!(carrying.run().is_pending());
            change(&end, |end| end.has_ended = true);
            assert!(carrying.run().is_ready());
            assert_eq!(client.saw(), [bytes("late"), End]);
        });
    }

    #[test]
    fn a_tunnel_ends_when_the_other_end_has_all() {
        with_request(|client, request| {
            let (tunnel, end) = start_tunnel(client, request);
            change(&end, |end| (end.has_ended, end.ends_slowly) = (true, true));
            let mut carrying = Driven::new(carry(tunnel));
            client.sends(b"last");
            client.ends();
            assert!(carrying.run().is_pending(), "what it was given last is still on its way");
            change(&end, |end| end.ends_slowly = false);
            assert!(carrying.run().is_ready());
        });
    }

    #[test]
    fn both_ends_of_a_tunnel_may_write_before_either_reads() {
        with_request(|client, request| {
            client.is_slow();
            let (tunnel, end) = start_tunnel(client, request);
            end.borrow_mut().takes_nothing = true;
            let mut carrying = Driven::new(carry(tunnel));
            for _ in 0..3 {
                client.sends(b"to the other end");
                change(&end, |end| end.sends.push_back("to the client".into()));
            }
            assert!(carrying.run().is_pending());
            assert_eq!(client.saw(), [bytes("to the client")], "one piece waits for the client");
            // One direction moves although the other is still blocked.
            change(&end, |end| end.takes_nothing = false);
            assert!(carrying.run().is_pending());
            assert_eq!((end.borrow().got.len(), client.saw()), (3, vec![]));
            client.takes();
            assert!(carrying.run().is_pending());
            assert_eq!(client.saw(), [bytes("to the client")]);
        });
    }

    #[test]
    fn a_tunnel_through_which_nothing_passes_ends() {
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let client = MockExchange::new();
            let mut request = request(&client, settings());
            let (tunnel, end) = start_tunnel(&client, &mut request);
            carry(tunnel).await.tell(&request);
            drop(request);
            assert_eq!((client.saw(), Rc::strong_count(&end)), (vec![Aborted], 1));
        });
    }
}
