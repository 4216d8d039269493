//! A stream: the state shared by a request and the task of its connection.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::task::{Context, Waker};

use gale_http::request::response::FieldList;
use gale_protocol::http2::{ConnectionFault, ErrorCode, StreamFault, StreamId, WindowGrowth};
use gale_runtime::{Buffer, Bytes, Lease, Output};

use super::windows::Windows;
use crate::receiving::UpstreamHead;

/// A stream, see the head of the file.
pub(crate) struct Stream {
    pub id: StreamId,
    state: RefCell<State>,
}

/// State of a stream.
#[derive(Default)]
pub(super) struct State {
    /// Waker of the request's task.
    waker: Option<Waker>,
    /// Received heads that were not read.
    pub heads: VecDeque<Head>,
    incoming: Incoming,
    pub trailers: Vec<(Bytes, Bytes)>,
    /// The end of the server's side.
    pub end: Option<StreamEnd>,
    /// Data of the request's body to send.
    pub outgoing: Output,
    /// Set at the end of the request's body, with its trailers.
    pub ending: Option<Vec<(Bytes, Bytes)>>,
    /// True if the last frame was built.
    pub has_sent_all: bool,
    /// True if nothing more is sent.
    pub is_given_up: bool,
    /// True if it is scheduled, or waits for a window.
    pub is_listed: bool,
    /// Number of bytes in frames that were built.
    pub sent: u64,
    /// Number of bytes received.
    pub received: u64,
    /// The server's window.
    pub window: Option<WindowGrowth>,
}

/// A received head.
pub(super) enum Head {
    Interim(u16, FieldList),
    Final(UpstreamHead),
}

/// Reason for which the server's side of a stream has ended.
#[derive(Clone, Debug)]
pub(crate) enum StreamEnd {
    /// The response is complete.
    Complete,
    /// The server has not processed the request, so it may be sent again, whatever its method. (RFC 9113 §8.7)
    Unprocessed,
    /// The server has reset the stream.
    Reset(ErrorCode),
    /// A protocol error of the server.
    Fault(StreamFault),
    /// The connection has ended.
    Lost(Lost),
}

/// Reason for which a connection has ended.
#[derive(Clone, Debug)]
pub(crate) enum Lost {
    /// Closed by the server.
    Closed,
    /// Failed.
    Failed(io::ErrorKind, Option<i32>),
    /// A protocol error of the server.
    Fault(ConnectionFault),
    /// No memory for received data.
    NoMemory,
}

/// Received data of a response's body that was not taken.
#[derive(Default)]
struct Incoming {
    pieces: VecDeque<Bytes>,
    /// Small pieces behind the others, joined.
    tail: Buffer,
}

/// Minimum length of data that is moved and not copied.
pub(super) const MOVED_MIN: usize = 2048;

impl Incoming {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.tail.is_empty()
    }

    fn push(&mut self, lease: Lease) {
        if let Some(tail) = self.tail.take_lease() {
            self.pieces.push_back(tail.freeze());
        }
        self.pieces.push_back(lease.freeze());
    }

    fn take(&mut self, max: usize) -> io::Result<Option<Bytes>> {
        if let Some(first) = self.pieces.front_mut() {
            if first.len() > max {
                return Ok(Some(first.split_to(max)));
            }
            return Ok(self.pieces.pop_front());
        }
        if self.tail.len() > max {
            return self.tail.split_to(max).map(|lease| Some(lease.freeze()));
        }
        Ok(self.tail.take_lease().map(Lease::freeze))
    }
}

impl Stream {
    /// Creates a stream whose request has begun with a head of `head_bytes`. `is_whole` is true if it has no body.
    pub fn new(id: StreamId, head_bytes: u64, is_whole: bool) -> Stream {
        let window = Some(Windows::begin(gale_runtime::now().as_nanos()));
        let state = State { sent: head_bytes, has_sent_all: is_whole, window, ..State::default() };
        Stream { id, state: RefCell::new(state) }
    }

    /// Accesses the state.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.borrow_mut())
    }

    /// Registers the request's task to be woken at changes.
    pub(super) fn register(&self, context: &Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        if state.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
    }

    /// Wakes the request's task.
    pub(super) fn wake(&self) {
        let waker = self.state.borrow_mut().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the server's side, unless it has ended before.
    pub(super) fn end(&self, end: StreamEnd) {
        self.with(|state| {
            if !matches!(end, StreamEnd::Complete) {
                state.is_given_up = true;
                state.outgoing.clear();
            }
            state.end.get_or_insert(end);
        });
        self.wake();
    }

    /// Number of bytes sent.
    pub fn sent(&self) -> u64 {
        self.state.borrow().sent
    }

    /// True if anything was received.
    pub fn has_received(&self) -> bool {
        self.state.borrow().received > 0
    }

    /// The end of the server's side, if it has ended.
    pub fn ended(&self) -> Option<StreamEnd> {
        self.state.borrow().end.clone()
    }
}

impl State {
    /// Takes received data of the body from the beginning of `input`.
    pub fn receive(&mut self, input: &mut Buffer, length: usize) -> io::Result<()> {
        self.received += length as u64;
        if length >= MOVED_MIN {
            let lease = input.split_to(length)?;
            self.incoming.push(lease);
            return Ok(());
        }
        self.incoming.tail.append(&input.readable()[..length])?;
        input.consume(length);
        Ok(())
    }

    /// Takes at most `max` bytes of the response's body.
    pub fn take(&mut self, max: usize) -> io::Result<Option<Bytes>> {
        self.incoming.take(max)
    }

    /// True if no data of the body waits to be taken.
    pub fn is_read(&self) -> bool {
        self.incoming.is_empty()
    }

    /// True if both sides have ended.
    pub fn is_over(&self) -> bool {
        self.end.is_some() && (self.has_sent_all || self.is_given_up)
    }
}
