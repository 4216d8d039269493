//! A stream: what a request and the task of its connection have in common.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::task::{Context, Waker};

use gale_protocol::http2::{ConnectionFault, ErrorCode, StreamFault, StreamId, WindowGrowth};
use gale_runtime::{Buffer, Bytes, Lease, Output};

use super::windows::Windows;
use crate::request::response::FieldList;
use crate::upstream::receiving::UpstreamHead;

/// See the file's head.
pub(in crate::upstream) struct Stream {
    pub id: StreamId,
    state: RefCell<State>,
}

/// What is known of a stream.
#[derive(Default)]
pub(super) struct State {
    /// The request's task.
    waker: Option<Waker>,
    /// Heads that came and were not read.
    pub heads: VecDeque<Head>,
    incoming: Incoming,
    pub trailers: Vec<(Bytes, Bytes)>,
    /// How the server's side has ended.
    pub end: Option<StreamEnd>,
    /// What is to be sent of the request's body.
    pub outgoing: Output,
    /// That is the rest of it, with these fields behind it.
    pub ending: Option<Vec<(Bytes, Bytes)>>,
    /// The last frame was built.
    pub has_sent_all: bool,
    /// Nothing more is sent.
    pub is_given_up: bool,
    /// It could send, or waits for a window.
    pub is_listed: bool,
    /// What was built of it, in bytes.
    pub sent: u64,
    /// What came, in bytes.
    pub received: u64,
    /// How much more the server may send.
    pub window: Option<WindowGrowth>,
}

/// A head that came.
pub(super) enum Head {
    Interim(u16, FieldList),
    Final(UpstreamHead),
}

/// How a server's side of a stream has ended.
#[derive(Clone, Debug)]
pub(in crate::upstream) enum StreamEnd {
    /// The response is complete.
    Complete,
    /// The server has not looked at the request: it may be sent again, whatever it asks for. (RFC 9113 §8.7)
    Unprocessed,
    /// The server has given it up.
    Reset(ErrorCode),
    /// The server broke a rule.
    Fault(StreamFault),
    /// The connection has ended.
    Lost(Lost),
}

/// How a connection has ended.
#[derive(Clone, Debug)]
pub(in crate::upstream) enum Lost {
    /// By the server's hand.
    Closed,
    /// It has failed.
    Failed(io::ErrorKind, Option<i32>),
    /// The server broke a rule.
    Fault(ConnectionFault),
    /// No memory for what comes.
    NoMemory,
}

/// What came of a response's body and was not taken.
#[derive(Default)]
struct Incoming {
    pieces: VecDeque<Bytes>,
    /// Small ones behind those, together.
    tail: Buffer,
}

/// Data are moved instead of copied if there are so many.
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
    /// A stream whose request has begun with a head of so many bytes, which is all of it or not.
    pub fn new(id: StreamId, head_bytes: u64, is_whole: bool) -> Stream {
        let window = Some(Windows::begin(gale_runtime::now().as_nanos()));
        let state = State { sent: head_bytes, has_sent_all: is_whole, window, ..State::default() };
        Stream { id, state: RefCell::new(state) }
    }

    /// Looks at what is known, or changes it.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.borrow_mut())
    }

    /// The request's task runs when something changes.
    pub(super) fn register(&self, context: &Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        if state.waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
    }

    /// Has the request's task run.
    pub(super) fn wake(&self) {
        let waker = self.state.borrow_mut().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The server's side has ended, unless it had before.
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

    /// What was sent, in bytes.
    pub fn sent(&self) -> u64 {
        self.state.borrow().sent
    }

    /// Whether anything has come.
    pub fn has_received(&self) -> bool {
        self.state.borrow().received > 0
    }

    /// How the server's side has ended, if it has.
    pub fn ended(&self) -> Option<StreamEnd> {
        self.state.borrow().end.clone()
    }
}

impl State {
    /// Takes what came of the body, at the beginning of `input`.
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

    /// The next of the response's body, at most so many bytes.
    pub fn take(&mut self, max: usize) -> io::Result<Option<Bytes>> {
        self.incoming.take(max)
    }

    /// Whether nothing of the body waits to be taken.
    pub fn is_read(&self) -> bool {
        self.incoming.is_empty()
    }

    /// Whether neither side has anything more to say.
    pub fn is_over(&self) -> bool {
        self.end.is_some() && (self.has_sent_all || self.is_given_up)
    }
}
