//! One stream of a connection: a request with its response, as everything above the codec sees it.
//!
//! It queues what is to be sent and keeps what has come; frames are built by the connection (`writing.rs`). Borrows go
//! in one order: the state of the connection, then that of a stream.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_engine::connections::ConnectionInfo;
use gale_protocol::http1::response::wire_status;
use gale_protocol::http2::{ErrorCode, Refusal, StreamId};
use gale_protocol::request::Scheme;
use gale_runtime::{Buffer, Bytes, Moment, SocketAddress, TaskId, TcpInfo};
use gale_tls::TlsStream;
use smallvec::SmallVec;

use super::body::{Piece, RequestBody};
use super::flow_control::ReceiveWindow;
use super::head::{write_fields, write_head};
use super::writing::BUILT_MAX;
use super::{Http2, State};
use crate::connection::output::COPIED_MAX;
use crate::connection::output::body_queue::BodyQueue;
use crate::request::Request;
use crate::request::body::{BodyError, BodyItem};
use crate::request::exchange::{
    BodyLength, BodyLimits, Exchange, Gone, LOW_WATER_BYTES, Permit, RequestBodyError, ResponseOptions, ResponseWriter,
    Sent, Transferred, log_changed_values,
};
use crate::request::server_field::server_field;
use crate::request::slow::ExchangeWaits;

/// See the file's head.
pub(super) struct Stream {
    pub connection: Rc<Http2>,
    pub id: StreamId,
    /// The generation of the configuration of its request.
    pub generation: u64,
    /// Reason for which its request is refused, if it is.
    refusal: Option<Refusal>,
    state: RefCell<StreamState>,
}

#[derive(Default)]
struct StreamState {
    body: RequestBody,
    /// Our window, which bounds the part of the body that has not been read.
    window: ReceiveWindow,
    response: Response,
    gone: Option<Gone>,
    /// Tasks that are woken by any change.
    wakers: SmallVec<[Waker; 1]>,
    /// The request, if it was answered without waiting and the answer has not left.
    request: Option<Box<Request>>,
    /// The task of the request, if it has to wait.
    task: Option<TaskId>,
}

/// State of a response.
#[derive(Default)]
pub(super) struct Response {
    pub queue: BodyQueue,
    pub trailers: Vec<(Bytes, Bytes)>,
    /// Its bytes are those of a tunnel.
    pub is_tunnel: bool,
    /// The head was written.
    pub is_started: bool,
    /// It had line ends in values, which became spaces.
    has_changed_values: bool,
    /// Nothing more will be pushed.
    pub is_ended: bool,
    /// The last frame was built.
    pub is_done: bool,
    /// It is with the scheduler, or blocked, or waits for a disk.
    pub is_listed: bool,
    /// Time since which a closed window has kept it from sending.
    pub blocked_since: Option<Moment>,
    pub send_timeout: Duration,
    /// The most that a frame holds.
    pub chunk_max: usize,
    pub sent: Sent,
    /// Reason for which it could not be completed.
    pub failure: Option<BodyError>,
    length: Left,
}

/// Part of the body that has not been pushed.
#[derive(Default)]
enum Left {
    /// There is no body, whatever is pushed.
    #[default]
    NoBody,
    Length(u64),
    Unknown,
}

impl Stream {
    pub fn new(
        connection: Rc<Http2>,
        id: StreamId,
        generation: u64,
        refusal: Option<Refusal>,
        body: RequestBody,
    ) -> Rc<Stream> {
        let state = RefCell::new(StreamState { body, ..StreamState::default() });
        Rc::new(Stream { connection, id, generation, refusal, state })
    }

    /// Reason for which the stream has to be reset once its request was answered.
    pub fn malformed(&self) -> Option<Refusal> {
        self.refusal.filter(|refusal| matches!(refusal, Refusal::Malformed(_)))
    }

    /// Calls `act` with the response's state.
    pub fn with_response<T>(&self, act: impl FnOnce(&mut Response) -> T) -> T {
        act(&mut self.state.borrow_mut().response)
    }

    pub fn gone(&self) -> Option<Gone> {
        self.state.borrow().gone
    }

    /// Returns `true` if nothing will be sent any more.
    pub fn is_over(&self) -> bool {
        let state = self.state.borrow();
        state.response.is_done || state.gone.is_some()
    }

    /// A frame was built: wakes tasks that wait to push more, or for the end.
    pub fn note_built(&self) {
        let mut state = self.state.borrow_mut();
        if state.response.is_done || state.response.queue.length() <= LOW_WATER_BYTES {
            state.wake();
        }
    }

    /// Returns `true` if the rest of its request's body is still to come.
    pub fn awaits_body(&self) -> bool {
        let state = self.state.borrow();
        state.gone.is_none() && !state.body.is_complete()
    }

    /// Returns `true` if no unread bytes of its request's body are here.
    pub fn body_is_empty(&self) -> bool {
        self.state.borrow().body.is_empty()
    }

    pub fn put_body(&self, piece: Buffer) {
        self.state.borrow_mut().body.put(piece);
    }

    pub fn append_body(&self, piece: &[u8]) -> std::io::Result<()> {
        self.state.borrow_mut().body.append(piece)
    }

    pub fn put_trailers(&self, trailers: Vec<(Bytes, Bytes)>) {
        self.state.borrow_mut().body.put_trailers(trailers);
    }

    pub fn note_body_came(&self, is_complete: bool) {
        let mut state = self.state.borrow_mut();
        state.body.note_came(is_complete);
        state.wake();
    }

    /// The worker's memory is exhausted.
    pub fn fail_body(&self) {
        let mut state = self.state.borrow_mut();
        state.body.fail(RequestBodyError::NoMemory);
        state.wake();
    }

    /// Keeps a request that was answered, until the answer has left.
    pub fn keep(&self, request: Box<Request>) {
        self.state.borrow_mut().request = Some(request);
    }

    /// The request that was kept.
    pub fn take_kept(&self) -> Option<Box<Request>> {
        self.state.borrow_mut().request.take()
    }

    pub fn set_task(&self, task: TaskId) {
        self.state.borrow_mut().task = Some(task);
    }

    /// The task of the request, which is no longer known here.
    pub fn take_task(&self) -> Option<TaskId> {
        self.state.borrow_mut().task.take()
    }

    /// Notes that the client can get nothing any more.
    pub fn lose(self: &Rc<Self>, gone: Gone) {
        self.give_up(&mut self.connection.state.borrow_mut(), gone);
    }

    /// As [`Stream::lose`].
    pub fn give_up(self: &Rc<Self>, connection: &mut State, gone: Gone) {
        let mut state = self.state.borrow_mut();
        if state.gone.is_some() || state.response.is_done {
            return;
        }
        state.gone = Some(gone);
        state.response.queue.clear();
        state.body.lose();
        state.wake();
        if state.request.is_some() {
            connection.finished.push(Rc::clone(self));
            connection.wake();
        }
    }

    /// Gives the stream up because of us: the client is told.
    fn reset(&self, gone: Gone, code: ErrorCode) {
        let connection = &mut *self.connection.state.borrow_mut();
        let mut state = self.state.borrow_mut();
        if state.gone.is_some() || state.response.is_done {
            return;
        }
        connection.codec.reset(self.id, code);
        connection.wake();
        state.gone = Some(gone);
        state.response.queue.clear();
        state.wake();
    }

    /// Writes the head.
    fn write_head(
        &self,
        connection: &mut State,
        state: &mut StreamState,
        request: &Request,
        options: &ResponseOptions,
        server: &[u8],
    ) {
        let response = &mut state.response;
        response.is_started = true;
        response.send_timeout = options.send_timeout;
        connection.send_timeout = options.send_timeout;
        response.chunk_max = request.scope().http2_chunk_size;
        response.length = match options.length {
            BodyLength::NoBody => Left::NoBody,
            BodyLength::Known(length) => Left::Length(length),
            BodyLength::UntilEnd => Left::Unknown,
        };
        if let Some(files) = &options.files {
            response.queue.set_files(files);
        }
        if state.gone.is_some() {
            return;
        }
        let end_stream = matches!(response.length, Left::NoBody) && self.malformed().is_none();
        let State { codec, frames, .. } = connection;
        codec.poll_control(frames);
        let before = frames.len();
        let connections = &self.connection.client().connections;
        let status = match wire_status(request.response.status) {
            101 => 200,
            status => status,
        };
        let written = codec.write_response(self.id, status, end_stream, frames, |fields| {
            response.has_changed_values = write_head(&request.response, server, connections, fields);
        });
        if written.is_err() {
            state.gone = Some(Gone::ByPeer);
            return;
        }
        let head_bytes = (frames.len() - before) as u64;
        response.sent.add_head(head_bytes);
        response.is_done = end_stream;
        connection.wake();
    }

    /// Gives the head and the whole body.
    fn respond_with(&self, request: &Request, options: &ResponseOptions, body: Bytes, server: &[u8]) {
        let connection = &mut *self.connection.state.borrow_mut();
        let state = &mut *self.state.borrow_mut();
        // An empty body ends with the head, as in nginx: what gRPC calls trailers alone has to look like this.
        let is_empty = body.is_empty() && !matches!(options.length, BodyLength::Known(1..));
        let length = if is_empty { BodyLength::NoBody } else { options.length };
        let options = ResponseOptions { length, files: options.files.clone(), ..*options };
        self.write_head(connection, state, request, &options, server);
        let response = &mut state.response;
        let is_short = matches!(response.length, Left::Length(length) if length == body.len() as u64)
            && body.len() <= COPIED_MAX.min(response.chunk_max)
            && self.malformed().is_none();
        let is_next = connection.scheduler.is_empty() && connection.unsent_bytes() < BUILT_MAX;
        if is_short && is_next && state.gone.is_none() && connection.codec.send_window(self.id) >= body.len() {
            let State { codec, frames, .. } = connection;
            codec.poll_control(frames);
            let before = frames.len();
            if codec.write_data(self.id, body.len(), true, frames).is_ok_and(|sent| sent.end_stream) {
                response.sent.add_head((frames.len() - before) as u64);
                response.sent.bytes += body.len() as u64;
                frames.extend_from_slice(&body);
                response.is_ended = true;
                response.is_done = true;
                state.wake();
                return;
            }
        }
        if !body.is_empty() {
            self.push_item(connection, state, BodyItem::Bytes(body));
        }
        self.end_response(connection, state);
    }

    /// Logs changes of the head's values.
    fn log_changes(&self, request: &Request) {
        if self.with_response(|response| std::mem::take(&mut response.has_changed_values)) {
            log_changed_values(request);
        }
    }

    /// Lists the stream with the scheduler, which builds frames of its queue.
    fn list(&self, connection: &mut State, response: &mut Response) {
        if !std::mem::replace(&mut response.is_listed, true) {
            connection.scheduler.push(self.id, connection.codec.priority(self.id));
            connection.wake();
        }
    }

    fn push_item(&self, connection: &mut State, state: &mut StreamState, item: BodyItem) {
        let StreamState { response, gone, .. } = state;
        if gone.is_some() {
            return;
        }
        let length = item.length();
        let is_too_long = match &mut response.length {
            Left::NoBody => return,
            Left::Length(left) => match left.checked_sub(length) {
                Some(rest) => {
                    *left = rest;
                    false
                }
                None => true,
            },
            Left::Unknown => false,
        };
        if let BodyItem::Trailers(fields) = item {
            response.trailers = fields;
            return;
        }
        let pushed = if is_too_long { Err(None) } else { response.queue.push(item).map_err(Some) };
        match pushed {
            Ok(()) if length > 0 => self.list(connection, response),
            Ok(()) => {}
            Err(failure) => {
                response.failure = failure;
                self.fail(connection, state);
            }
        }
    }

    fn end_response(&self, connection: &mut State, state: &mut StreamState) {
        if state.gone.is_some() || std::mem::replace(&mut state.response.is_ended, true) || state.response.is_done {
            return;
        }
        match state.response.length {
            // The client must see that some are missing.
            Left::Length(1..) => self.fail(connection, state),
            _ => self.list(connection, &mut state.response),
        }
    }

    /// The response cannot be completed, and the client has to see that.
    fn fail(&self, connection: &mut State, state: &mut StreamState) {
        connection.codec.reset(self.id, ErrorCode::INTERNAL_ERROR);
        connection.wake();
        state.gone = Some(Gone::Aborted);
        state.response.queue.clear();
        state.wake();
    }

    /// A file could not be read to its end.
    pub fn fail_with(self: &Rc<Self>, connection: &mut State, failure: BodyError) {
        let mut state = self.state.borrow_mut();
        if state.gone.is_some() {
            return;
        }
        state.response.failure = Some(failure);
        self.fail(connection, &mut state);
        if state.request.is_some() {
            connection.finished.push(Rc::clone(self));
        }
    }

    /// The client has taken nothing for too long.
    pub fn time_out(self: &Rc<Self>, connection: &mut State) {
        connection.codec.reset(self.id, ErrorCode::CANCEL);
        self.give_up(connection, Gone::SendTimedOut);
    }

    /// Opens the window of the body again after the client has made it as small as our settings say.
    pub fn open_window_again(&self, connection: &mut State) {
        self.state.borrow().window.open_again(self.id, connection);
    }

    /// Ready when no more than `low_water` bytes are queued, or all is over. While the client's window is closed, one
    /// item is enough: it makes the stream time out.
    fn poll_below(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let queued_max = if self.window_is_closed() { 0 } else { low_water };
        let mut state = self.state.borrow_mut();
        if let Some(gone) = state.gone {
            return Poll::Ready(Err(gone));
        }
        let is_below = match low_water {
            0 if state.response.is_ended => state.response.is_done,
            _ => state.response.queue.length() <= queued_max,
        };
        if is_below {
            return Poll::Ready(Ok(()));
        }
        state.wait(context);
        Poll::Pending
    }
}

impl StreamState {
    fn wait(&mut self, context: &mut Context<'_>) {
        if !self.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.wakers.push(context.waker().clone());
        }
    }

    fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

impl Exchange for Stream {
    fn connection(&self) -> &ConnectionInfo {
        &self.connection.client().info
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        self.connection.client().local_address()
    }

    fn scheme(&self) -> Scheme {
        self.connection.client().scheme()
    }

    fn tls(&self) -> Option<&TlsStream> {
        self.connection.client().tls()
    }

    fn tcp_info(&self) -> Option<TcpInfo> {
        self.connection.client().tcp_info()
    }

    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]) {
        let connection = &mut *self.connection.state.borrow_mut();
        let mut state = self.state.borrow_mut();
        if state.gone.is_some() || state.response.is_started || status == 101 {
            return;
        }
        let State { codec, frames, .. } = connection;
        codec.poll_control(frames);
        let before = frames.len();
        // A stream that is gone gets nothing.
        let _ = codec.write_response(self.id, status, false, frames, |writer| write_fields(fields, writer));
        state.response.sent.add_head((frames.len() - before) as u64);
        connection.wake();
    }

    fn carries_trailers(&self, _request: &Request) -> bool {
        true
    }

    fn keeps_connection(&self, _request: &Request) -> bool {
        false
    }

    fn window_is_closed(&self) -> bool {
        self.connection.state.borrow().codec.send_window(self.id) == 0
    }

    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        let wants_continue = {
            let mut state = self.state.borrow_mut();
            !state.response.is_started && state.body.take_wants_continue()
        };
        if wants_continue {
            self.interim(100, &[]);
        }
        let connection = &mut *self.connection.state.borrow_mut();
        let mut state = self.state.borrow_mut();
        state.window.open(self.id, connection, self.connection.stream_window);
        let Poll::Ready(piece) = state.body.poll_next(context, limits) else {
            state.wait(context);
            if connection.codec.has_control() {
                connection.wake();
            }
            return Poll::Pending;
        };
        Poll::Ready(piece.map(|piece| match piece {
            Piece::Bytes(bytes) => {
                state.window.release(self.id, connection, bytes.len());
                if connection.codec.has_control() {
                    connection.wake();
                }
                Some(BodyItem::Bytes(bytes))
            }
            Piece::Trailers(trailers) => Some(BodyItem::Trailers(trailers)),
            Piece::End => None,
        }))
    }

    fn body_is_read(&self) -> bool {
        self.state.borrow().body.is_read()
    }

    fn received(&self) -> u64 {
        self.state.borrow().body.received()
    }

    fn head_bytes(&self) -> Option<u64> {
        Some(self.state.borrow().body.head_bytes() as u64)
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        if state.gone.is_some() {
            return Poll::Ready(());
        }
        state.wait(context);
        Poll::Pending
    }

    fn is_broken(&self) -> bool {
        self.state.borrow().gone.is_some()
    }

    fn is_complete(&self) -> bool {
        let state = self.state.borrow();
        state.response.is_done && state.gone.is_none()
    }

    fn sent(&self) -> Sent {
        self.state.borrow().response.sent
    }

    fn transferred(&self, _: u64) -> Transferred {
        let state = self.state.borrow();
        Transferred { received: state.body.head_bytes() as u64 + state.body.received(), sent: state.response.sent }
    }

    fn waits(&self) -> ExchangeWaits {
        let state = self.state.borrow();
        ExchangeWaits { body: state.body.waited(), disk: state.response.queue.disk_waited() }
    }

    fn writer(self: Rc<Self>, _permit: Permit) -> Rc<dyn ResponseWriter> {
        self
    }
}

impl ResponseWriter for Stream {
    fn start(&self, request: &Request, options: &ResponseOptions) {
        // It may ask variables, and these the exchange.
        let server = server_field(request, &request.scope().core);
        self.write_head(
            &mut self.connection.state.borrow_mut(),
            &mut self.state.borrow_mut(),
            request,
            options,
            &server,
        );
        self.log_changes(request);
    }

    fn respond(&self, request: &Request, options: &ResponseOptions, body: Bytes) {
        let server = server_field(request, &request.scope().core);
        self.respond_with(request, options, body, &server);
        self.log_changes(request);
    }

    fn push(&self, item: BodyItem) {
        let connection = &mut *self.connection.state.borrow_mut();
        self.push_item(connection, &mut self.state.borrow_mut(), item);
    }

    fn end(&self) {
        let connection = &mut *self.connection.state.borrow_mut();
        self.end_response(connection, &mut self.state.borrow_mut());
    }

    fn abort(&self) {
        self.reset(Gone::Aborted, ErrorCode::INTERNAL_ERROR);
    }

    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.poll_below(0, context)
    }

    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.poll_below(low_water.max(1), context)
    }

    fn become_tunnel(&self) {
        let mut state = self.state.borrow_mut();
        state.body.become_tunnel();
        state.response.is_tunnel = true;
    }
}
