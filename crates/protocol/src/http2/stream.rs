//! The streams of a connection: RFC 9113 §5.1.
//!
//! Only streams that are open in at least one direction are kept, sorted by id; of those that were reset, the last ones
//! are remembered by id, since frames for them may still be under way. Invariant: a stream in the table may still send
//! or receive.

use std::collections::VecDeque;

use super::frame::StreamId;
use super::priority::Priority;
use super::window::{ReceiveWindow, SendWindow};

/// In which directions a stream is open.
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

    /// We end our side; `None` if that closes the stream.
    fn end_local(self) -> Option<Self> {
        (self != Self::HalfClosedRemote).then_some(Self::HalfClosedLocal)
    }

    /// The peer ends its side; `None` if that closes the stream.
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
    /// Bytes that were handed out and are not released yet.
    pub(super) unreleased: u32,
    /// How many bytes of content Content-Length still announces.
    pub(super) length_left: Option<u64>,
    pub(super) priority: Priority,
    /// The final head of the peer's message has come.
    pub(super) has_head: bool,
    /// Our final head went out.
    pub(super) has_sent_head: bool,
    /// What it still sends interests nobody.
    pub(super) is_discarded: bool,
    /// Content-Length says nothing about the content: the answer to HEAD.
    pub(super) ignores_length: bool,
}

impl Stream {
    /// It was answered, and what it still sends is thrown away.
    pub(super) fn is_answered(&self) -> bool {
        self.is_discarded && !self.state.may_send()
    }

    /// It was refused, and is still to be answered: how the rest of it looks does not matter.
    pub(super) fn is_refused(&self) -> bool {
        self.is_discarded && self.state.may_send()
    }

    /// Nothing more may come than what is thrown away, and nothing more will be allowed.
    pub(super) fn is_used_up(&self) -> bool {
        self.is_answered() && self.receive.is_closed()
    }
}

/// How a stream that is not in the table got to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Past {
    /// We have reset it: what comes is ignored for a while.
    ResetByUs,
    /// The peer has reset it.
    ResetByPeer,
    /// Both sides have ended it, or it was skipped.
    Ended,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Streams {
    /// Sorted by id.
    open: VecDeque<Stream>,
    /// The streams that were reset last, and whether by us.
    reset: VecDeque<(StreamId, bool)>,
    /// Up to that id resets may be forgotten.
    forgotten: StreamId,
}

/// How many reset streams are remembered: as many as a client may usually have open, twice.
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

    /// Adds a stream, whose id is larger than all before.
    pub(super) fn push(&mut self, stream: Stream) {
        debug_assert!(self.open.back().is_none_or(|last| last.id < stream.id));
        self.open.push_back(stream);
    }

    /// We end our side. Returns the stream if it is closed now.
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

    /// The peer ends its side. Returns the stream if it is closed now.
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

    /// The stream was reset.
    pub(super) fn remove_reset(&mut self, id: StreamId, by_us: bool) -> Option<Stream> {
        self.remember_reset(id, by_us);
        self.place(id).and_then(|place| self.open.remove(place))
    }

    /// A stream that never was in the table was reset.
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

    /// What became of a stream that is not in the table any more.
    pub(super) fn past(&self, id: StreamId) -> Past {
        match self.reset.iter().rev().find(|known| known.0 == id) {
            Some((_, false)) => Past::ResetByPeer,
            Some((_, true)) => Past::ResetByUs,
            None if id <= self.forgotten => Past::ResetByUs,
            None => Past::Ended,
        }
    }
}
