//! Flow control (RFC 9113, section 5.2): the client's windows, which bound the bodies that we send, and our windows,
//! which bound the bodies that clients send.
//!
//! ```text
//!   a client's window is closed ─► stream in `Blocked` ─► WINDOW_UPDATE, SETTINGS ─► scheduler
//!                                                      └► none within `send_timeout` ─► the stream is reset
//!   a body is read ─► `ReceiveWindow` opens ─► read bytes are released ─► WINDOW_UPDATE
//! ```
//!
//! The codec counts the windows: those of the client are charged when a frame is built, and ours when data come. It
//! also sends the WINDOW_UPDATE frames. Our windows open again when bytes are read, not when they come, so a client
//! sends no more than a handler takes.
//!
//! The sizes of windows are in `request/configuration/http2.rs`, their growth is in `gale_protocol::http2::growth`.

use gale_protocol::http2::{RoundTrip, StreamId, WindowGrowth};
use gale_runtime::Moment;

use super::State;
use super::stream::Response;

/// Least window of a body that is being read, in bytes.
const READ_WINDOW: u32 = 64 * 1024;

/// Streams that a closed window of the client keeps from sending.
#[derive(Default)]
pub(super) struct Blocked(Vec<StreamId>);

impl State {
    /// A window is closed: the stream waits until the client opens it.
    pub(super) fn block(&mut self, id: StreamId, response: &mut Response) {
        response.blocked_since.get_or_insert_with(gale_runtime::now);
        self.blocked.0.push(id);
    }

    /// The client has opened the window of a stream.
    pub(super) fn unblock(&mut self, id: StreamId) {
        let Blocked(blocked) = &mut self.blocked;
        if let Some(place) = blocked.iter().position(|&blocked| blocked == id) {
            blocked.swap_remove(place);
            self.resume(id);
        }
    }

    /// The client has opened the window of the connection, or may have opened those of all streams.
    pub(super) fn unblock_all(&mut self) {
        let Blocked(blocked) = std::mem::take(&mut self.blocked);
        for id in blocked {
            self.resume(id);
        }
    }

    fn resume(&mut self, id: StreamId) {
        // `blocked_since` stays until a frame has been built: the window may be closed again by then.
        if self.find(id).is_some() {
            self.scheduler.push(id, self.codec.priority(id));
        }
    }

    /// Ends the streams whose windows have been closed for `send_timeout`.
    pub(super) fn time_out_blocked(&mut self, now: Moment) {
        let is_due = |state: &State, id: &StreamId| {
            state.find(*id).is_some_and(|stream| stream.with_response(|response| response.due_at() <= now))
        };
        let due: Vec<StreamId> = self.blocked.0.iter().copied().filter(|id| is_due(self, id)).collect();
        for id in due {
            self.blocked.0.retain(|&blocked| blocked != id);
            if let Some(stream) = self.find(id).cloned() {
                stream.time_out(self);
            }
        }
    }

    /// Time of the next call of [`State::time_out_blocked`] that ends a stream.
    pub(super) fn next_blocked_due(&mut self) -> Moment {
        // Streams that have ended are forgotten.
        let Blocked(mut blocked) = std::mem::take(&mut self.blocked);
        blocked.retain(|&id| self.find(id).is_some_and(|stream| stream.gone().is_none()));
        let due = blocked.iter().filter_map(|&id| Some(self.find(id)?.with_response(|response| response.due_at())));
        let next = due.min().unwrap_or(Moment::NEVER);
        self.blocked = Blocked(blocked);
        next
    }
}

impl Response {
    /// Time at which `send_timeout` of a client that opens no window has passed.
    fn due_at(&self) -> Moment {
        self.blocked_since.map_or(Moment::NEVER, |since| since + self.send_timeout)
    }
}

/// Our window of one stream: as the settings say until its body is read, from then on large enough for a reader.
#[derive(Default)]
pub(super) struct ReceiveWindow {
    /// Growth of the window; `None` until the body is read.
    growth: Option<WindowGrowth>,
}

impl ReceiveWindow {
    /// Opens the window of a body that is being read for the first time. `stream_window` is the size that all streams
    /// of the connection begin with.
    pub fn open(&mut self, id: StreamId, connection: &mut State, stream_window: u32) {
        if self.growth.is_some() {
            return;
        }
        let window = stream_window.max(READ_WINDOW);
        self.growth = Some(WindowGrowth::new(window, gale_runtime::now().as_nanos()));
        connection.codec.grow_stream_window(id, window);
    }

    /// Opens the window again after the client has made it as small as our settings say.
    pub fn open_again(&self, id: StreamId, connection: &mut State) {
        if let Some(growth) = self.growth {
            connection.codec.grow_stream_window(id, growth.window());
        }
    }

    /// Gives the client back `count` bytes that were read, and opens the window further where it kept the client
    /// waiting.
    pub fn release(&mut self, id: StreamId, connection: &mut State, count: usize) {
        self.grow(id, connection, count);
        connection.codec.release(id, count);
    }

    fn grow(&mut self, id: StreamId, connection: &mut State, count: usize) {
        let now = gale_runtime::now().as_nanos();
        let State { codec, round_trip, .. } = connection;
        let round_trip = || {
            if round_trip.begin(now) {
                codec.ping(RoundTrip::PAYLOAD);
            }
            round_trip.time()
        };
        if let Some(growth) = &mut self.growth
            && let Some(window) = growth.note_read(count, now, round_trip)
        {
            connection.codec.grow_stream_window(id, window);
            connection.codec.grow_connection_window(window.saturating_mul(2));
        }
    }
}
