//! The streams of a connection: RFC 9113 §5.1.
//!
//! Contains only streams that are open in at least one direction, sorted by id. The ids of the most recently reset
//! streams are remembered, since frames for them may still be in flight. Invariant: a stream in the table can still
//! send or receive.

use std::collections::VecDeque;

use super::frame::StreamId;
use super::priority::Priority;
use super::window::{ReceiveWindow, SendWindow};

/// Directions in which a stream is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Open,
    /// We have ended our side.
    HalfClosedLocal,
    /// The peer has ended its side.
    HalfClosedRemote,
}

impl State {
    pub(super) fn may_send(self) -> bool {
        self != Self::HalfClosedLocal
    }

    pub(super) fn may_receive(self) -> bool {
        self != Self::HalfClosedRemote
    }

    /// Ends our side; `None` if that closes the stream.
    fn end_local(self) -> Option<Self> {
        (self != Self::HalfClosedRemote).then_some(Self::HalfClosedLocal)
    }

    /// Ends the peer's side; `None` if that closes the stream.
    fn end_remote(self) -> Option<Self> {
        (self != Self::HalfClosedLocal).then_some(Self::HalfClosedRemote)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) id: StreamId,
    pub(super) state: State,
    pub(super) send: SendWindow,
    pub(super) receive: ReceiveWindow,
    /// Bytes passed to the caller and not released yet.
    pub(super) unreleased: u32,
    /// Bytes of content that must still arrive according to Content-Length.
    pub(super) length_left: Option<u64>,
    pub(super) priority: Priority,
    /// The peer's final head has arrived.
    pub(super) has_head: bool,
    /// We have sent our final head.
    pub(super) has_sent_head: bool,
    /// Further data from the peer are discarded.
    pub(super) is_discarded: bool,
    /// Content-Length does not describe the content: a response to HEAD or CONNECT.
    pub(super) ignores_length: bool,
}

impl Stream {
    /// Returns `true` if the stream was answered and its remaining input is discarded.
    pub(super) fn is_answered(&self) -> bool {
        self.is_discarded && !self.state.may_send()
    }

    /// Returns `true` if the request was refused and not answered yet. The rest of its input is not checked.
    pub(super) fn is_refused(&self) -> bool {
        self.is_discarded && self.state.may_send()
    }

    /// Returns `true` if the stream was answered and its receive window is used up; it will not be reopened.
    pub(super) fn is_used_up(&self) -> bool {
        self.is_answered() && self.receive.is_closed()
    }
}

/// The end of a stream that is no longer in the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Past {
    /// Reset by us: its frames are ignored for a while.
    ResetByUs,
    /// Reset by the peer.
    ResetByPeer,
    /// Ended by both sides, or skipped.
    Ended,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    /// Sorted by id.
    open: VecDeque<Stream>,
    /// The most recently reset streams, `true` if reset by us.
    reset: VecDeque<(StreamId, bool)>,
    /// Resets of streams up to this id may have been forgotten.
    forgotten: StreamId,
}

/// Number of reset streams remembered: twice the default number of concurrent streams.
const RESET_MAX: usize = 256;

impl Streams {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    #[inline]
    fn place(&self, id: StreamId) -> Option<usize> {
        self.open.binary_search_by_key(&id, |stream| stream.id).ok()
    }

    #[inline]
    pub(super) fn get(&self, id: StreamId) -> Option<&Stream> {
        self.place(id).map(|place| &self.open[place])
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        self.place(id).map(|place| &mut self.open[place])
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.open.iter_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Stream> {
        self.open.iter()
    }

    /// Adds a stream, whose id must be larger than all previous ones.
    pub(super) fn push(&mut self, stream: Stream) {
        debug_assert!(self.open.back().is_none_or(|last| last.id < stream.id));
        self.open.push_back(stream);
    }

    /// Ends our side. Returns the stream if it is closed now.
    pub(super) fn end_local(&mut self, id: StreamId) -> Option<Stream> {
        let place = self.place(id)?;
        match self.open[place].state.end_local() {
            Some(state) => {
                self.open[place].state = state;
                None
            }
            None => self.open.remove(place),
        }
    }

    /// Ends the peer's side. Returns the stream if it is closed now.
    pub(super) fn end_remote(&mut self, id: StreamId) -> Option<Stream> {
        let place = self.place(id)?;
        match self.open[place].state.end_remote() {
            Some(state) => {
                self.open[place].state = state;
                None
            }
            None => self.open.remove(place),
        }
    }

    /// Removes and returns a stream that was reset.
    pub(super) fn remove_reset(&mut self, id: StreamId, by_us: bool) -> Option<Stream> {
        self.remember_reset(id, by_us);
        self.place(id).and_then(|place| self.open.remove(place))
    }

    /// Remembers the reset of a stream that never was in the table.
    pub(super) fn remember_reset(&mut self, id: StreamId, by_us: bool) {
        if let Some(known) = self.reset.iter_mut().rev().find(|known| known.0 == id) {
            known.1 |= by_us;
            return;
        }
        if self.reset.len() == RESET_MAX
            && let Some((oldest, _)) = self.reset.pop_front()
        {
            self.forgotten = self.forgotten.max(oldest);
        }
        self.reset.push_back((id, by_us));
    }

    /// Returns how a stream that is no longer in the table ended.
    pub(super) fn past(&self, id: StreamId) -> Past {
        match self.reset.iter().rev().find(|known| known.0 == id) {
            Some((_, false)) => Past::ResetByPeer,
            Some((_, true)) => Past::ResetByUs,
            None if id <= self.forgotten => Past::ResetByUs,
            None => Past::Ended,
        }
    }
}
