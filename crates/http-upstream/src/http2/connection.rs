//! The task of a connection to a server: it receives and sends the frames of all streams.
//!
//! Windows are charged when a frame is built, for streams with data ready to send; these streams take turns. The
//! server's windows grow while clients take data as fast as it arrives (`windows.rs`). After a read timeout, a
//! connection must answer a PING before it gets another stream, and is closed otherwise.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_protocol::http1;
use gale_protocol::http2::{
    CannotOpen, Connection as Codec, ConnectionFault, ErrorCode, Event, Fields, FloodLimits, Handled, Limits, Priority,
    RoundTrip, Scheduler, StreamId,
};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes, Moment, Notify, Output, Timer, now};
use gale_tls::Transport;
use gale_upstream::ConnectionAge;
use gale_worker::{CountedConnection, Worker};

use super::connections::{self, Destination};
use super::request::Http2Request;
use super::stream::{Head, Lost, Stream, StreamEnd};
use super::windows::{CONNECTION_WINDOW, STREAM_WINDOW, STREAMS_MAX, Windows};
use crate::http1::fields;
use crate::receiving::UpstreamHead;

/// Number of bytes received at once: a frame with its header, or a record of TLS.
const RECEIVE_BYTES: usize = 17 * 1024;

/// Maximum number of events handled before other tasks have their turn.
const EVENTS_PER_TURN: usize = 256;

/// No further data frames are built while this many bytes wait for the socket.
const BUILT_MAX: usize = 64 * 1024;

/// Once this many bytes wait for a server that reads nothing, nothing more is read from it.
const UNSENT_MAX: usize = 256 * 1024;

/// Data up to this length is copied behind its frame's header.
const COPIED_MAX: usize = 1024;

/// Maximum number of CONTINUATION frames: more than any head is divided into.
const CONTINUATIONS_MAX: u32 = 4096;

/// Maximum number of received heads that were not read; further interim responses are dropped.
const HEADS_MAX: usize = 32;

/// Time for a server to answer a PING after a read timeout.
const PONG_PATIENCE: Duration = Duration::from_secs(10);

/// Interval after which the flood limits are counted anew.
const BUDGET_INTERVAL: Duration = Duration::from_secs(10);

/// All streams have the same priority, since there is no order among requests of different clients.
const PRIORITY: Priority = Priority { urgency: 3, incremental: true };

/// A connection to a server, see the head of the file.
pub(crate) struct Http2Connection {
    /// Number that identifies it among the worker's connections.
    pub number: u64,
    pub(super) destination: Destination,
    worker: Weak<Worker>,
    /// True if the connection stays open while idle, until its owner closes it.
    is_kept: Cell<bool>,
    state: RefCell<State>,
    /// Notified when there may be room for a stream, or never will be: waiting requests check again.
    pub(super) news: Rc<Notify>,
}

struct State {
    codec: Codec,
    /// Streams that have not ended, oldest first.
    streams: VecDeque<Rc<Stream>>,
    /// Streams that may have something to send.
    scheduler: Scheduler,
    /// Streams that wait for a window.
    blocked: Vec<StreamId>,
    /// Windows for data from the server.
    windows: Windows,
    /// The latest frames.
    frames: Vec<u8>,
    /// Earlier frames, with data of bodies.
    output: Output,
    age: ConnectionAge,
    /// True if the server's settings have arrived.
    has_settings: bool,
    /// Maximum number of streams, as far as it is known.
    streams_max: usize,
    /// True if it accepts no more streams, and ends with the last one.
    is_closing: bool,
    /// Time until which a PING must be answered.
    pong_until: Option<Moment>,
    budgets_until: Moment,
    /// True if it has ended.
    is_lost: bool,
    /// True if the last request has ended since the task last ran.
    has_become_idle: bool,
    waker: Option<Waker>,
    is_polled: bool,
    timer: Timer,
}

/// Result of receiving.
enum Received {
    /// No more data has arrived, or the rest is handled in the next turn.
    Pending,
    /// Received data is not handled before other data was sent.
    Paused,
    Lost(Lost),
}

/// Result of sending.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// All frames that the windows allow were sent.
    All,
    /// The socket is full.
    Blocked,
    /// The connection is broken.
    Lost,
}

impl Http2Connection {
    /// Creates a connection on a transport, with heads of at most `head_max` bytes from its server, and starts its
    /// task.
    pub(super) fn begin(
        worker: &Rc<Worker>,
        number: u64,
        destination: Destination,
        transport: Transport,
        counted: CountedConnection,
        head_max: usize,
    ) -> Rc<Http2Connection> {
        // By the measure of RFC 9113 §10.5.1 a head is larger than in HTTP/1.
        let list_max = head_max.saturating_mul(4);
        let limits = Limits {
            head: http1::Limits { head_max: list_max, ..http1::Limits::default() },
            // Servers may divide a head as they like.
            continuations_max: CONTINUATIONS_MAX,
            block_max: list_max.max(Limits::default().block_max),
            stream_window: STREAM_WINDOW,
            connection_window: CONNECTION_WINDOW,
            floods: floods(),
            ..Limits::default()
        };
        let state = State {
            codec: Codec::client(Arc::new(limits)),
            streams: VecDeque::new(),
            scheduler: Scheduler::new(),
            blocked: Vec::new(),
            windows: Windows::default(),
            frames: Vec::new(),
            output: Output::new(),
            age: ConnectionAge::new(),
            has_settings: false,
            streams_max: STREAMS_MAX,
            is_closing: false,
            pong_until: None,
            budgets_until: Moment::from_nanos(0),
            is_lost: false,
            has_become_idle: false,
            waker: None,
            is_polled: false,
            timer: Timer::new(),
        };
        let connection = Rc::new(Http2Connection {
            number,
            destination,
            worker: Rc::downgrade(worker),
            is_kept: Cell::new(false),
            state: RefCell::new(state),
            news: Rc::new(Notify::new()),
        });
        gale_runtime::spawn(drive(Rc::clone(&connection), transport, counted));
        connection
    }

    /// True if a request may begin now. Before the server's settings have arrived, only one may.
    pub(super) fn has_room(&self) -> bool {
        let state = &*self.state.borrow();
        let streams_max = if state.has_settings { state.streams_max } else { 1 };
        self.is_usable(state) && state.streams.len() < streams_max && state.codec.check_can_open().is_ok()
    }

    /// True if the server's settings, and with them the number of requests, are still to arrive.
    pub(super) fn is_beginning(&self) -> bool {
        let state = &*self.state.borrow();
        !state.has_settings && self.is_usable(state)
    }

    /// Time since which the connection has been idle, if it is and may be reused.
    pub(super) fn idle_since(&self) -> Option<Moment> {
        let state = &*self.state.borrow();
        (state.streams.is_empty() && !state.is_lost && !state.is_closing).then_some(state.age.idle_since)
    }

    fn is_usable(&self, state: &State) -> bool {
        let is_spent = self.destination.pool.as_ref().is_some_and(|pool| {
            let settings = pool.settings();
            state.age.requests >= settings.requests_max || now().since(state.age.opened) > settings.time_max
        });
        !state.is_lost && !state.is_closing && !is_spent && state.pong_until.is_none()
    }

    /// Keeps the connection open while it is idle, until it is closed.
    pub(super) fn keep(&self) {
        self.is_kept.set(true);
    }

    /// Closes the connection once its last request has ended.
    pub(super) fn close(&self) {
        let state = &mut *self.state.borrow_mut();
        state.is_closing = true;
        state.wake();
    }

    /// Begins a request. `is_whole` is true if it has no body.
    ///
    /// # Errors
    /// There is no room.
    pub(super) fn begin_request(&self, request: &Http2Request, is_whole: bool) -> Result<Rc<Stream>, CannotOpen> {
        let state = &mut *self.state.borrow_mut();
        let State { codec, frames, .. } = state;
        codec.poll_control(frames);
        let before = frames.len();
        let id = codec.write_request(request.line(), is_whole, frames, |fields| request.write(fields))?;
        let stream = Rc::new(Stream::new(id, (frames.len() - before) as u64, is_whole));
        state.streams.push_back(Rc::clone(&stream));
        state.age.requests += 1;
        state.wake();
        Ok(stream)
    }

    /// Queues a piece of a request's body, which is sent when the windows allow.
    pub(super) fn queue(&self, stream: &Rc<Stream>, piece: Bytes) {
        stream.with(|own| own.outgoing.push(piece));
        self.state.borrow_mut().resume(stream);
    }

    /// Ends a request's body, with these trailers.
    pub(super) fn end_request(&self, stream: &Rc<Stream>, trailers: Vec<(Bytes, Bytes)>) {
        stream.with(|own| own.ending = Some(trailers));
        self.state.borrow_mut().resume(stream);
    }

    /// Takes at most `max` bytes of a response's body, and opens the server's window by as many.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn take(&self, stream: &Stream, max: usize) -> io::Result<Option<Bytes>> {
        let piece = stream.with(|own| own.take(max))?;
        if let Some(piece) = &piece {
            let state = &mut *self.state.borrow_mut();
            state.codec.release(stream.id, piece.len());
            state.grow_window(stream, piece.len());
            if state.codec.has_control() {
                state.wake();
            }
        }
        Ok(piece)
    }

    /// Ends the request on this side: further frames of the server for it are ignored.
    pub(super) fn leave(&self, stream: &Rc<Stream>) {
        let is_over = stream.with(|own| {
            let is_over = own.is_over();
            own.is_given_up = true;
            own.outgoing.clear();
            own.end.get_or_insert(StreamEnd::Complete);
            is_over
        });
        let state = &mut *self.state.borrow_mut();
        if !is_over {
            state.codec.reset(stream.id, ErrorCode::CANCEL);
        }
        state.settle(stream, &self.news);
        state.wake();
    }

    /// Sends a PING after a read timeout, or when windows have stayed closed: the server may be gone.
    pub(super) fn suspect(&self) {
        let state = &mut *self.state.borrow_mut();
        if state.pong_until.is_none() && !state.is_lost {
            state.pong_until = Some(now() + PONG_PATIENCE);
            state.codec.ping(*b"galeping");
            state.wake();
        }
    }

    fn poll(&self, transport: &Transport, input: &mut Buffer, context: &mut Context<'_>) -> Poll<Lost> {
        {
            let state = &mut *self.state.borrow_mut();
            state.enter(context);
        }
        let polled = self.poll_all(transport, input, context);
        let has_become_idle = {
            let state = &mut *self.state.borrow_mut();
            state.is_polled = false;
            std::mem::take(&mut state.has_become_idle)
        };
        if has_become_idle && polled.is_pending() {
            connections::note_idle(&self.worker, &self.destination);
        }
        polled
    }

    fn poll_all(&self, transport: &Transport, input: &mut Buffer, context: &mut Context<'_>) -> Poll<Lost> {
        loop {
            let received = self.receive(transport, input, context);
            let written = self.state.borrow_mut().write(transport, context);
            match (received, written) {
                (Received::Lost(lost), _) => return Poll::Ready(lost),
                (Received::Paused, Written::All) => continue,
                (_, Written::Lost) => {
                    // The server may have sent its reason before it closed the connection.
                    return match self.receive(transport, input, context) {
                        Received::Lost(lost) => Poll::Ready(lost),
                        _ => Poll::Ready(Lost::Failed(io::ErrorKind::BrokenPipe, None)),
                    };
                }
                _ => {}
            }
            let due = {
                let state = &*self.state.borrow();
                self.due_at(state)
            };
            if due <= now() {
                return Poll::Ready(Lost::Closed);
            }
            let timer = &mut self.state.borrow_mut().timer;
            if due == Moment::NEVER {
                timer.clear();
                return Poll::Pending;
            }
            timer.set(due);
            if timer.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
        }
    }

    /// Time at which the connection ends unless something happens.
    fn due_at(&self, state: &State) -> Moment {
        let pong_until = state.pong_until.unwrap_or(Moment::NEVER);
        if !state.streams.is_empty() || state.age.requests == 0 {
            return pong_until;
        }
        let idle_until = match &self.destination.pool {
            Some(pool) if self.is_usable(state) && state.codec.check_can_open() != Err(CannotOpen::IdsUsedUp) => {
                state.age.idle_since + pool.settings().timeout
            }
            None if self.is_kept.get() && self.is_usable(state) => Moment::NEVER,
            _ => Moment::from_nanos(0),
        };
        // A suspected connection may recover.
        if state.pong_until.is_some() && !state.is_closing { pong_until } else { pong_until.min(idle_until) }
    }

    /// Receives and handles data.
    fn receive(&self, transport: &Transport, input: &mut Buffer, context: &mut Context<'_>) -> Received {
        let mut events = 0;
        loop {
            while !input.is_empty() {
                if self.state.borrow().unsent_bytes() > UNSENT_MAX {
                    return Received::Paused;
                }
                match self.handle_next(input) {
                    Ok(true) => events += 1,
                    Ok(false) => break,
                    Err(lost) => return Received::Lost(lost),
                }
                if events >= EVENTS_PER_TURN {
                    context.waker().wake_by_ref();
                    return Received::Pending;
                }
            }
            match transport.poll_recv(context, input, RECEIVE_BYTES) {
                Poll::Pending => return Received::Pending,
                Poll::Ready(Ok(0)) => return Received::Lost(Lost::Closed),
                Poll::Ready(Ok(_)) => self.state.borrow_mut().refill_budgets(),
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::OutOfMemory => {
                    return Received::Lost(Lost::NoMemory);
                }
                Poll::Ready(Err(error)) => return Received::Lost(Lost::Failed(error.kind(), error.raw_os_error())),
            }
        }
    }

    /// Handles the first event of the input; false if more bytes are needed for one.
    fn handle_next(&self, input: &mut Buffer) -> Result<bool, Lost> {
        FIELDS.with_borrow_mut(|fields| {
            let handled = self.state.borrow_mut().codec.handle_input(input.readable(), fields);
            let Handled { consumed, event } = handled.map_err(Lost::Fault)?;
            let Some(event) = event else {
                input.consume(consumed);
                return Ok(false);
            };
            if let Event::Data { stream, piece, end_stream } = event {
                input.consume(piece.start);
                let rest = consumed - piece.end;
                self.handle_data(stream, input, piece.len(), end_stream).map_err(|_| Lost::NoMemory)?;
                input.consume(rest);
                return Ok(true);
            }
            input.consume(consumed);
            self.handle_event(event, fields);
            Ok(true)
        })
    }

    fn handle_data(&self, id: StreamId, input: &mut Buffer, length: usize, is_last: bool) -> io::Result<()> {
        let Some(stream) = self.find(id) else {
            input.consume(length);
            self.state.borrow_mut().codec.release(id, length);
            return Ok(());
        };
        if length > 0 {
            stream.with(|own| own.receive(input, length))?;
        }
        if is_last {
            self.end(&stream, StreamEnd::Complete);
        } else {
            stream.wake();
        }
        Ok(())
    }

    fn handle_event(&self, event: Event, fields: &mut Fields) {
        match event {
            Event::Response { stream, end_stream } => self.handle_head(stream, end_stream, fields),
            Event::Trailers { stream } => {
                if let Some(stream) = self.find(stream) {
                    let text = Bytes::copy_from_slice(&fields.text);
                    let part = |range: gale_protocol::Range32| text.slice(range.as_range());
                    let trailers = fields.trailers.iter().map(|field| (part(field.name), part(field.value))).collect();
                    stream.with(|own| {
                        own.received += text.len() as u64;
                        own.trailers = trailers;
                    });
                    self.end(&stream, StreamEnd::Complete);
                }
            }
            Event::Reset { stream, code } => {
                if let Some(stream) = self.find(stream) {
                    self.handle_reset(&stream, code);
                }
            }
            Event::Fault { stream, fault } => {
                if let Some(stream) = self.find(stream) {
                    self.end(&stream, StreamEnd::Fault(fault));
                }
            }
            Event::WindowOpened { stream: Some(stream) } => self.state.borrow_mut().unblock(stream),
            Event::WindowOpened { stream: None } => self.state.borrow_mut().unblock_all(),
            Event::SettingsReceived => {
                let state = &mut *self.state.borrow_mut();
                state.has_settings = true;
                state.unblock_all();
                self.news.notify_all();
            }
            Event::GoAway { last_stream, .. } => self.handle_goaway(last_stream),
            Event::Pong { payload } => {
                let state = &mut *self.state.borrow_mut();
                if payload == RoundTrip::PAYLOAD {
                    return state.windows.note_answer_to_ping(payload, now().as_nanos());
                }
                state.pong_until = None;
                self.news.notify_all();
            }
            Event::SettingsAcknowledged | Event::PriorityChanged { .. } => {}
            Event::Data { .. } | Event::Request { .. } | Event::BadRequest { .. } => {
                unreachable!("DATA is handled above, and only a server gets requests")
            }
        }
    }

    fn handle_head(&self, id: StreamId, is_last: bool, fields: &mut Fields) {
        let Some(stream) = self.find(id) else { return };
        let parts = &fields.response;
        let text = Bytes::copy_from_slice(&fields.text);
        let list = self::fields(parts, &text);
        let is_interim = parts.is_interim();
        stream.with(|own| {
            own.received += text.len() as u64;
            if is_interim {
                if own.heads.len() < HEADS_MAX {
                    own.heads.push_back(Head::Interim(parts.status, list));
                }
                return;
            }
            own.heads.push_back(Head::Final(UpstreamHead {
                status: parts.status,
                reason: None,
                length: parts.content_length,
                upgrade: parts.field(ResponseField::Upgrade).map(|field| text.slice(field.value.as_range())),
                fields: list,
                may_have_trailers: !is_last,
            }));
        });
        if is_last {
            self.end(&stream, StreamEnd::Complete);
        } else {
            stream.wake();
        }
    }

    fn handle_reset(&self, stream: &Rc<Stream>, code: ErrorCode) {
        let is_refused = code == ErrorCode::REFUSED_STREAM && !stream.has_received();
        if is_refused {
            // The server has more streams than it wants, regardless of its settings.
            let state = &mut *self.state.borrow_mut();
            state.streams_max = state.streams_max.min(state.streams.len().saturating_sub(1)).max(1);
        }
        let has_ended = stream.ended().is_some();
        if has_ended {
            // The response is complete, and the server does not want the rest of the request.
            stream.with(|own| {
                own.is_given_up = true;
                own.outgoing.clear();
            });
            stream.wake();
            self.state.borrow_mut().settle(stream, &self.news);
        } else {
            self.end(stream, if is_refused { StreamEnd::Unprocessed } else { StreamEnd::Reset(code) });
        }
    }

    fn handle_goaway(&self, last_stream: StreamId) {
        let unprocessed: Vec<Rc<Stream>> = {
            let state = &mut *self.state.borrow_mut();
            state.is_closing = true;
            let unprocessed: Vec<Rc<Stream>> =
                state.streams.iter().filter(|stream| stream.id > last_stream).cloned().collect();
            unprocessed.iter().for_each(|stream| state.codec.reset(stream.id, ErrorCode::CANCEL));
            unprocessed
        };
        unprocessed.iter().for_each(|stream| self.end(stream, StreamEnd::Unprocessed));
        self.news.notify_all();
    }

    fn find(&self, id: StreamId) -> Option<Rc<Stream>> {
        self.state.borrow().find(id).cloned()
    }

    /// Handles the end of a stream's server side.
    fn end(&self, stream: &Rc<Stream>, end: StreamEnd) {
        stream.end(end);
        self.state.borrow_mut().settle(stream, &self.news);
    }

    /// Handles the end of the connection.
    fn lose(&self, lost: &Lost) {
        let streams = {
            let state = &mut *self.state.borrow_mut();
            state.is_lost = true;
            state.frames = Vec::new();
            state.output.clear();
            std::mem::take(&mut state.streams)
        };
        streams.iter().for_each(|stream| stream.end(StreamEnd::Lost(lost.clone())));
        self.news.notify_all();
    }

    /// Sends GOAWAY, as far as that is possible without waiting.
    fn say_goodbye(&self, transport: &Transport) {
        let state = &mut *self.state.borrow_mut();
        state.codec.shutdown();
        state.codec.poll_control(&mut state.frames);
        if state.output.is_empty() && !state.frames.is_empty() {
            // Otherwise the server sees the end of the connection.
            let _ = transport.try_send_copy(&state.frames, true);
        }
    }
}

thread_local! {
    /// Buffer in which heads and trailers are decoded, one after the other.
    static FIELDS: RefCell<Fields> = RefCell::new(Fields::new());
}

/// The server only answers our requests, so it may often do things that in a client would be an attack.
fn floods() -> FloodLimits {
    FloodLimits {
        resets: 100_000,
        pings: 100_000,
        settings: 1000,
        empty_frames: 10_000,
        window_updates: 1_000_000,
        priorities: 1000,
        unknown_frames: 10_000,
        refused_streams: 1000,
    }
}

/// Runs the task of a connection.
async fn drive(connection: Rc<Http2Connection>, transport: Transport, counted: CountedConnection) {
    let ended = Ended(Rc::clone(&connection));
    let mut input = Buffer::new();
    let lost = std::future::poll_fn(|context| connection.poll(&transport, &mut input, context)).await;
    connection.say_goodbye(&transport);
    connection.lose(&lost);
    drop((transport, counted, ended));
}

/// Guard that tells the requests of the end of the task.
struct Ended(Rc<Http2Connection>);

impl Drop for Ended {
    fn drop(&mut self) {
        // After a panic the state may stay borrowed.
        if self.0.state.try_borrow_mut().is_ok_and(|state| !state.is_lost) {
            self.0.lose(&Lost::Closed);
        }
    }
}

impl State {
    fn enter(&mut self, context: &Context<'_>) {
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            self.waker = Some(context.waker().clone());
        }
        self.is_polled = true;
    }

    /// Wakes the task of the connection, unless it is running.
    fn wake(&mut self) {
        if !self.is_polled
            && let Some(waker) = &self.waker
        {
            waker.wake_by_ref();
        }
    }

    fn find(&self, id: StreamId) -> Option<&Rc<Stream>> {
        let place = self.streams.binary_search_by_key(&id, |stream| stream.id).ok()?;
        Some(&self.streams[place])
    }

    fn unsent_bytes(&self) -> usize {
        self.output.len_bytes() + self.frames.len()
    }

    fn refill_budgets(&mut self) {
        let now = now();
        if now >= self.budgets_until {
            self.budgets_until = now + BUDGET_INTERVAL;
            self.codec.handle_interval();
        }
    }

    /// Enlarges a stream's window if it delays the server.
    fn grow_window(&mut self, stream: &Stream, taken: usize) {
        let windows = &mut self.windows;
        let grown = stream.with(|own| match &mut own.window {
            Some(window) if own.end.is_none() => windows.note_read(window, taken, now().as_nanos()),
            _ => None,
        });
        if self.windows.take_ping() {
            self.codec.ping(RoundTrip::PAYLOAD);
        }
        if let Some((window, of_connection)) = grown {
            self.codec.grow_connection_window(of_connection);
            self.codec.grow_stream_window(stream.id, window);
        }
    }

    /// Removes the stream at this index.
    fn forget(&mut self, place: usize) {
        if let Some(stream) = self.streams.remove(place)
            && let Some(window) = stream.with(|own| own.window.take())
        {
            self.windows.forget(window);
        }
    }

    /// Schedules a stream that may have something to send.
    fn resume(&mut self, stream: &Rc<Stream>) {
        let was_listed = stream.with(|own| std::mem::replace(&mut own.is_listed, true));
        if !was_listed {
            self.scheduler.push(stream.id, PRIORITY);
        }
        self.wake();
    }

    /// Removes a stream once both sides have ended.
    fn settle(&mut self, stream: &Rc<Stream>, news: &Notify) {
        if !stream.with(|own| own.is_over()) {
            return;
        }
        let Ok(place) = self.streams.binary_search_by_key(&stream.id, |stream| stream.id) else { return };
        self.forget(place);
        self.scheduler.remove(stream.id);
        self.blocked.retain(|&id| id != stream.id);
        if self.streams.is_empty() {
            self.age.idle_since = now();
            self.has_become_idle = true;
            if self.frames.is_empty() {
                self.frames = Vec::new();
            }
        }
        news.notify_all();
    }

    /// Schedules a stream whose window was opened.
    fn unblock(&mut self, id: StreamId) {
        if let Some(place) = self.blocked.iter().position(|&blocked| blocked == id) {
            self.blocked.swap_remove(place);
            self.scheduler.push(id, PRIORITY);
        }
    }

    /// Schedules all streams after the connection's window, or all windows, may have been opened.
    fn unblock_all(&mut self) {
        for id in std::mem::take(&mut self.blocked) {
            self.scheduler.push(id, PRIORITY);
        }
    }

    /// Builds and sends frames, until there are none or the socket is full.
    fn write(&mut self, transport: &Transport, context: &mut Context<'_>) -> Written {
        loop {
            if self.build_frames().is_err() {
                return Written::Lost;
            }
            match self.send(transport, context) {
                Written::All if !self.scheduler.is_empty() => {}
                written => return written,
            }
        }
    }

    /// Sends the frames that were built.
    fn send(&mut self, transport: &Transport, context: &mut Context<'_>) -> Written {
        self.codec.poll_control(&mut self.frames);
        if self.output.is_empty() && !self.frames.is_empty() {
            let Ok(sent) = transport.try_send_copy(&self.frames, false) else { return Written::Lost };
            if self.output.append(&self.frames[sent..]).is_err() {
                return Written::Lost;
            }
            self.frames.clear();
        } else if self.flush_frames().is_err() {
            return Written::Lost;
        }
        while !self.output.is_empty() {
            match transport.poll_send(context, &mut self.output) {
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(_)) => return Written::Lost,
                Poll::Pending => return Written::Blocked,
            }
        }
        Written::All
    }

    fn build_frames(&mut self) -> io::Result<()> {
        while self.unsent_bytes() < BUILT_MAX {
            let Some(id) = self.scheduler.pop() else { return Ok(()) };
            let Some(stream) = self.find(id).cloned() else { continue };
            self.build_frame(&stream)?;
        }
        Ok(())
    }

    /// Builds a frame of a stream, and schedules it again if it may have more.
    fn build_frame(&mut self, stream: &Rc<Stream>) -> io::Result<()> {
        let id = stream.id;
        let has_more = stream.with(|own| -> io::Result<bool> {
            own.is_listed = false;
            let in_hand = own.outgoing.len_bytes();
            let ends_with_data = own.ending.as_ref().is_some_and(Vec::is_empty);
            if own.is_given_up || own.has_sent_all {
                return Ok(false);
            }
            self.codec.poll_control(&mut self.frames);
            let before = self.frames.len();
            if in_hand > 0 || ends_with_data {
                let Ok(sent) = self.codec.write_data(id, in_hand, ends_with_data, &mut self.frames) else {
                    return Ok(false);
                };
                if sent.is_blocked() {
                    own.is_listed = true;
                    self.blocked.push(id);
                    return Ok(false);
                }
                own.sent += (self.frames.len() - before + sent.length) as u64;
                own.has_sent_all = sent.end_stream;
                if sent.length <= COPIED_MAX {
                    copy_to(&mut own.outgoing, sent.length, &mut self.frames);
                } else {
                    self.output.append(&self.frames)?;
                    self.frames.clear();
                    own.outgoing.move_to(sent.length, &mut self.output);
                }
                return Ok(!own.has_sent_all && (!own.outgoing.is_empty() || own.ending.is_some()));
            }
            let Some(trailers) = own.ending.take() else { return Ok(false) };
            let written = self.codec.write_trailers(id, &mut self.frames, |fields| {
                for (name, value) in &trailers {
                    // A field that cannot be encoded is left out.
                    let _ = fields.field(name, value, gale_protocol::http2::hpack::Indexing::IfRepeated);
                }
            });
            own.has_sent_all = written.is_ok();
            own.sent += (self.frames.len() - before) as u64;
            Ok(false)
        })?;
        if has_more {
            stream.with(|own| own.is_listed = true);
            self.scheduler.push(id, PRIORITY);
        }
        // The request may have more to send, or has ended.
        stream.wake();
        if stream.with(|own| own.is_over())
            && let Ok(place) = self.streams.binary_search_by_key(&id, |stream| stream.id)
        {
            self.forget(place);
            self.age.idle_since = now();
            self.has_become_idle = self.streams.is_empty();
        }
        Ok(())
    }

    /// Moves the built frames behind the queued output.
    fn flush_frames(&mut self) -> io::Result<()> {
        self.output.append(&self.frames)?;
        self.frames.clear();
        Ok(())
    }
}

/// Copies the first bytes of the queued output.
fn copy_to(from: &mut Output, count: usize, frames: &mut Vec<u8>) {
    let mut left = count;
    for chunk in from.chunks() {
        let length = left.min(chunk.len());
        frames.extend_from_slice(&chunk[..length]);
        left -= length;
        if left == 0 {
            break;
        }
    }
    from.consume(count);
}

impl Lost {
    /// The reason, in nginx's words.
    pub fn text(&self) -> String {
        match self {
            Lost::Closed => "upstream prematurely closed connection".to_owned(),
            Lost::Fault(fault) => fault_text(*fault),
            Lost::NoMemory => "the worker's memory for buffers is exhausted".to_owned(),
            Lost::Failed(..) => {
                let error = self.error();
                crate::failure::receive_failure(&error)
            }
        }
    }

    /// The reason, as an error of the socket.
    pub fn error(&self) -> io::Error {
        match self {
            Lost::Failed(_, Some(code)) => io::Error::from_raw_os_error(*code),
            Lost::Failed(kind, None) => (*kind).into(),
            Lost::NoMemory => io::ErrorKind::OutOfMemory.into(),
            Lost::Closed | Lost::Fault(_) => io::ErrorKind::ConnectionReset.into(),
        }
    }
}

fn fault_text(fault: ConnectionFault) -> String {
    format!("upstream sent {fault}")
}

impl StreamEnd {
    /// The reason, in nginx's words; empty for a complete response.
    pub fn text(&self) -> String {
        match self {
            StreamEnd::Complete => String::new(),
            StreamEnd::Unprocessed => "upstream refused the request".to_owned(),
            StreamEnd::Reset(code) => format!("upstream rejected request with error {}", code.0),
            StreamEnd::Fault(fault) => format!("upstream sent {fault}"),
            StreamEnd::Lost(lost) => lost.text(),
        }
    }
}
