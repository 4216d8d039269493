//! Input from a client: bytes become events, which are handled one by one.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::http2::{ConnectionFault, Event, Handled, StreamId};
use gale_runtime::{Buffer, Bytes, Effort, charge_begun, poll_begin};

use super::Http2;
use crate::request::exchange::Gone;

/// Requests that are begun before other connections have their turn.
const REQUESTS_PER_TURN: usize = 64;

/// Estimated work of a request that is not answered at once. Most are passed on, and connecting to a server takes 46 µs
/// of the loop and of the kernel.
const WAITING_REQUEST: Effort = Effort { usual_nanos: 30_000, worst_nanos: 100_000 };

/// Nothing more is read of a client while more bytes than this wait for it: heads and answers to control frames, since
/// bodies are bounded by less.
const UNSENT_MAX: usize = 256 * 1024;

/// Interval after which the budgets of nuisances are full again.
const BUDGET_INTERVAL: Duration = Duration::from_secs(10);

/// Least size of data that are moved, not copied.
const MOVED_MIN: usize = 2048;

/// Result of receiving.
pub(super) enum Received {
    /// Nothing more has come.
    Pending,
    /// More may be there, and is looked at in the next turn.
    Yielded,
    /// The input is not handled before some output has left.
    Paused,
    /// The client has ended the connection, or it is broken.
    Ended,
    /// The client broke a rule, and is told.
    Faulty(ConnectionFault),
}

/// Result of a look at the input.
enum Next {
    /// An event was dealt with; it may have begun a request.
    Handled(Option<Progress>),
    NeedMore,
    Faulty(ConnectionFault),
    /// The client has gone, and nothing that it sent is waited for.
    Gone,
}

/// State of one turn of the connection.
#[derive(Default)]
struct Turn {
    /// Requests begun.
    requests: usize,
    /// The socket has nothing more.
    is_drained: bool,
    /// `Some(true)` if the client has gone; `None` before the first look.
    has_gone: Option<bool>,
}

/// Progress of a request that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It has its answer, or was refused.
    Answered,
    /// A task of its own goes on with it.
    Waits,
}

impl Http2 {
    /// Receives input and handles it. All input is received first, as far as the buffer allows: no request of a client
    /// that has gone is begun.
    pub(super) fn receive(self: &Rc<Self>, input: &mut Buffer, context: &mut Context<'_>) -> Received {
        let mut turn = Turn::default();
        let mut needs_more = false;
        loop {
            let mut is_drained = false;
            while !is_drained && (needs_more || input.len() < self.receive_max) {
                if self.has_much_unsent() {
                    return Received::Paused;
                }
                match self.client().stream.poll_recv(context, input, self.receive_max) {
                    Poll::Pending => is_drained = true,
                    Poll::Ready(Ok(0)) => {
                        self.handle_last_input(input);
                        return Received::Ended;
                    }
                    Poll::Ready(Ok(_)) => {
                        needs_more = false;
                        self.refill_budgets();
                    }
                    Poll::Ready(Err(error)) => {
                        self.log_lost(&error);
                        return Received::Ended;
                    }
                }
            }
            turn.is_drained = is_drained;
            match self.handle_input(input, &mut turn, context) {
                None if is_drained => return Received::Pending,
                None => needs_more = true,
                Some(received) => return received,
            }
        }
    }

    /// Handles the input; `None` when more is needed.
    fn handle_input(
        self: &Rc<Self>,
        input: &mut Buffer,
        turn: &mut Turn,
        context: &mut Context<'_>,
    ) -> Option<Received> {
        while !input.is_empty() {
            if self.has_much_unsent() {
                return Some(Received::Paused);
            }
            // One waiting request of a connection is begun at once, more of them wait in line with other connections.
            if poll_begin(context).is_pending() {
                return Some(Received::Yielded);
            }
            match self.handle_next(input, turn) {
                Next::Handled(None) => {}
                Next::Handled(Some(progress)) => {
                    turn.requests += 1;
                    if progress == Progress::Waits {
                        charge_begun(WAITING_REQUEST, 1);
                    }
                }
                Next::NeedMore => return None,
                Next::Faulty(fault) => return Some(Received::Faulty(fault)),
                Next::Gone => return Some(Received::Ended),
            }
            if turn.requests >= REQUESTS_PER_TURN {
                context.waker().wake_by_ref();
                return Some(Received::Yielded);
            }
        }
        None
    }

    /// Handles the input before the client ended its direction. It completes the bodies of requests that have begun,
    /// and begins none.
    fn handle_last_input(self: &Rc<Self>, input: &mut Buffer) {
        let mut turn = Turn { has_gone: Some(true), ..Turn::default() };
        while !input.is_empty() && self.awaits_bodies() {
            if !matches!(self.handle_next(input, &mut turn), Next::Handled(_)) {
                return;
            }
        }
    }

    /// Returns `true` if the rest of a request's body is still to come.
    fn awaits_bodies(&self) -> bool {
        self.state.borrow().streams.iter().any(|stream| stream.awaits_body())
    }

    /// Returns `true` if the client has gone or ended its direction, as far as that is known in this turn.
    fn has_gone(&self, turn: &mut Turn) -> bool {
        // The end may stand behind bytes that the input has no room for.
        let may_be_hidden = !turn.is_drained || self.client().info.requests.get() == 0;
        *turn.has_gone.get_or_insert_with(|| may_be_hidden && self.client().stream.has_hung_up())
    }

    fn has_much_unsent(&self) -> bool {
        self.state.borrow().unsent_bytes() > UNSENT_MAX
    }

    #[cold]
    fn log_lost(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::OutOfMemory {
            let message = "the worker's memory for buffers is exhausted, a connection is closed";
            let configuration = self.client().worker().configuration();
            configuration.error_log().write(Level::Alert, Some(self.client().info.number), &message);
        }
    }

    fn refill_budgets(&self) {
        let state = &mut *self.state.borrow_mut();
        let now = gale_runtime::now();
        if now >= state.budgets_until {
            state.budgets_until = now + BUDGET_INTERVAL;
            state.codec.handle_interval();
        }
    }

    /// Handles the first event of the input.
    fn handle_next(self: &Rc<Self>, input: &mut Buffer, turn: &mut Turn) -> Next {
        let handled = {
            let fields = &mut *self.client().connections.fields.borrow_mut();
            self.state.borrow_mut().codec.handle_input(input.readable(), fields)
        };
        let (consumed, event) = match handled {
            Ok(Handled { consumed, event: Some(event) }) => (consumed, event),
            Ok(Handled { consumed, event: None }) => {
                input.consume(consumed);
                return Next::NeedMore;
            }
            Err(fault) => return Next::Faulty(fault),
        };
        if let Event::Data { stream, piece, end_stream } = event {
            input.consume(piece.start);
            let rest = consumed - piece.end;
            self.handle_data(stream, input, piece.len(), end_stream);
            input.consume(rest);
            return Next::Handled(None);
        }
        input.consume(consumed);
        if matches!(event, Event::Request { .. }) && self.has_gone(turn) {
            return if self.awaits_bodies() { Next::Handled(None) } else { Next::Gone };
        }
        Next::Handled(self.handle_event(event))
    }

    /// Returns the progress of a request that was begun by it.
    fn handle_event(self: &Rc<Self>, event: Event) -> Option<Progress> {
        match event {
            Event::Request { stream, end_stream } => return Some(self.begin_request(stream, end_stream, None)),
            Event::BadRequest { stream, end_stream, refusal } => {
                return Some(self.begin_request(stream, end_stream, Some(refusal)));
            }
            Event::Trailers { stream } => self.handle_trailers(stream),
            Event::Reset { stream, .. } => self.lose_stream(stream),
            Event::Fault { stream, fault } => {
                self.client()
                    .log_connection(Level::Info, format_args!("client sent {fault} in HTTP/2 stream {stream}"));
                self.lose_stream(stream);
            }
            Event::WindowOpened { stream: Some(stream) } => self.state.borrow_mut().unblock(stream),
            Event::WindowOpened { stream: None } | Event::SettingsReceived => self.state.borrow_mut().unblock_all(),
            Event::PriorityChanged { stream, priority } => {
                let state = &mut *self.state.borrow_mut();
                state.scheduler.reprioritize(stream, priority);
            }
            Event::Pong { payload } => self.note_answer_to_ping(payload),
            // The windows are as small as we have said, also of streams that were begun before.
            Event::SettingsAcknowledged => {
                let state = &mut *self.state.borrow_mut();
                for stream in state.streams.iter().cloned().collect::<Vec<_>>() {
                    stream.open_window_again(state);
                }
            }
            Event::GoAway { .. } => {}
            Event::Data { .. } | Event::Response { .. } => unreachable!("data are dealt with apart, we answer"),
        }
        None
    }

    /// A piece of a body, which is at the beginning of `input` and is taken from there.
    fn handle_data(&self, id: StreamId, input: &mut Buffer, length: usize, end_stream: bool) {
        let found = self.state.borrow().find(id).cloned();
        let Some(stream) = found else {
            // The request is over.
            input.consume(length);
            self.state.borrow_mut().codec.release(id, length);
            return;
        };
        let taken = match stream.body_is_empty() && length >= MOVED_MIN {
            true => input.split_to(length).map(|lease| stream.put_body(Buffer::from(lease))),
            false => {
                let appended = stream.append_body(&input.readable()[..length]);
                input.consume(length);
                appended
            }
        };
        match taken {
            Ok(()) => stream.note_body_came(end_stream),
            Err(_) => stream.fail_body(),
        }
    }

    fn handle_trailers(&self, id: StreamId) {
        let Some(stream) = self.state.borrow().find(id).cloned() else { return };
        let fields = self.client().connections.fields.borrow();
        let text = Bytes::copy_from_slice(&fields.text);
        let part = |range: gale_protocol::Range32| text.slice(range.as_range());
        let trailers = fields.trailers.iter().map(|field| (part(field.name), part(field.value))).collect();
        stream.put_trailers(trailers);
        stream.note_body_came(true);
    }

    /// The client has given a stream up, or has caused its reset.
    fn lose_stream(&self, id: StreamId) {
        let Some(stream) = self.state.borrow().find(id).cloned() else { return };
        stream.lose(Gone::ByPeer);
    }
}
