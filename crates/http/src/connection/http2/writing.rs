//! Output: frames of the streams that can send, in the order of their priorities, and the socket.
//!
//! Heads and frames of control are written where they come up. Frames of bodies are built here, and only when there is
//! room: so a stream that becomes urgent waits for [`BUILT_MAX`] bytes at most. All that was built in a turn leaves in
//! one call, and in as few records as possible.

use std::rc::Rc;
use std::task::{Context, Poll};

use gale_protocol::http2::{SendFault, StreamId};
use gale_runtime::{Moment, poll_copy};

use super::head::write_fields;
use super::stream::{Response, Stream};
use super::{Http2, State};
use crate::connection::output::COPIED_MAX;
use crate::request::body::BodyError;

/// Frames of bodies are built until so many bytes wait for the socket.
pub(super) const BUILT_MAX: usize = 64 * 1024;

/// Streams of a connection of whose files a piece is read at once: each holds one, of 64 KiB and, for a client that has
/// to wait time after time, of 256 KiB.
pub(super) const READS_MAX: usize = 16;

/// Result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// All that there was, as far as windows and disks allow.
    All,
    /// The socket takes no more at the moment.
    Blocked,
    /// The connection is broken.
    Lost,
}

/// Result of building a frame.
enum Built {
    /// There may be another one.
    More,
    /// There is nothing more at the moment, or ever.
    Nothing,
    /// A window is closed.
    Blocked,
    /// A file is being read, or waits for its turn to be.
    Reads,
    /// The last one was built.
    Done,
    Failed(BodyError),
}

impl Http2 {
    /// Builds frames and sends them, until there are none, or the socket takes no more.
    pub(super) fn write(&self, context: &mut Context<'_>) -> Written {
        let state = &mut *self.state.borrow_mut();
        loop {
            if poll_copy(context, if state.scheduler.is_empty() { 0 } else { BUILT_MAX }).is_pending() {
                return Written::Blocked;
            }
            state.build_frames();
            if state.is_broken {
                return Written::Lost;
            }
            match self.send(state, context) {
                Written::All if !state.scheduler.is_empty() => {}
                written => return written,
            }
        }
    }

    /// Sends the frames that were built.
    fn send(&self, state: &mut State, context: &mut Context<'_>) -> Written {
        state.codec.poll_control(&mut state.frames);
        if state.output.is_empty() && !state.frames.is_empty() {
            let Ok(sent) = self.client().stream.try_send_copy(&state.frames, false) else { return Written::Lost };
            if sent > 0 {
                state.unsent_since = Moment::NEVER;
            }
            if state.output.append(&state.frames[sent..]).is_err() {
                return Written::Lost;
            }
            state.frames.clear();
        } else if state.flush_frames().is_err() {
            return Written::Lost;
        }
        while !state.output.is_empty() {
            match self.client().stream.poll_send(context, &mut state.output) {
                Poll::Ready(Ok(_)) => state.unsent_since = Moment::NEVER,
                Poll::Ready(Err(_)) => return Written::Lost,
                Poll::Pending => {
                    if state.unsent_since == Moment::NEVER {
                        state.unsent_since = gale_runtime::now();
                    }
                    return Written::Blocked;
                }
            }
        }
        Written::All
    }

    /// Ready when the socket has taken what was built, or takes nothing any more. Nothing more is built.
    pub(super) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<()> {
        match self.send(&mut self.state.borrow_mut(), context) {
            Written::Blocked => Poll::Pending,
            Written::All | Written::Lost => Poll::Ready(()),
        }
    }

    /// Takes the pieces of files that were read.
    pub(super) fn take_what_was_read(&self, context: &mut Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        state.has_begun_to_read = false;
        let mut place = 0;
        while let Some(&id) = state.reading.get(place) {
            let polled = state.find(id).cloned().map(|stream| {
                let is_reading = |response: &mut Response| response.queue.is_reading();
                match stream.with_response(is_reading) {
                    true => stream.with_response(|response| response.queue.poll_reading(context)),
                    // It was given up.
                    false => Poll::Ready(Ok(())),
                }
            });
            if let Some(Poll::Pending) = polled {
                place += 1;
                continue;
            }
            state.reading.swap_remove(place);
            match polled {
                Some(Poll::Ready(Err(error))) => {
                    if let Some(stream) = state.find(id).cloned() {
                        stream.fail_with(state, error);
                    }
                }
                Some(_) => state.scheduler.push(id, state.codec.priority(id)),
                None => {}
            }
        }
    }

    /// Tells the client that the connection ends, as far as that needs no waiting.
    pub(super) fn say_goodbye(&self) {
        let state = &mut *self.state.borrow_mut();
        if !state.shutdown.is_final() {
            state.codec.shutdown();
        }
        state.codec.poll_control(&mut state.frames);
        if state.output.is_empty() && !state.frames.is_empty() {
            // A client that does not take it learns it from the end of the connection.
            let _ = self.client().stream.try_send_copy(&state.frames, false);
        }
        state.frames.clear();
    }
}

impl State {
    fn build_frames(&mut self) {
        while self.unsent_bytes() < BUILT_MAX {
            let next = self.scheduler.pop().or_else(|| self.next_to_read());
            let Some(id) = next.filter(|_| !self.is_broken) else { return };
            let Some(stream) = self.find(id).cloned() else { continue };
            if stream.gone().is_some() {
                continue;
            }
            let built = self.build_frame(&stream);
            self.go_on_after(&stream, built);
        }
    }

    /// The next stream that waits for a read, if it may be begun.
    fn next_to_read(&mut self) -> Option<StreamId> {
        if self.reading.len() < READS_MAX { self.waiting_to_read.pop_front() } else { None }
    }

    /// Decides the fate of a stream after its turn.
    fn go_on_after(&mut self, stream: &Rc<Stream>, built: Built) {
        let id = stream.id;
        match built {
            Built::More => self.scheduler.push(id, self.codec.priority(id)),
            Built::Nothing => stream.with_response(|response| response.is_listed = false),
            Built::Blocked => stream.with_response(|response| self.block(id, response)),
            Built::Reads if self.reading.len() < READS_MAX => {
                self.reading.push(id);
                self.has_begun_to_read = true;
            }
            Built::Reads => self.waiting_to_read.push_back(id),
            Built::Done => self.finished.push(Rc::clone(stream)),
            Built::Failed(error) => stream.fail_with(self, error),
        }
        stream.note_built();
    }

    /// Builds a frame of a stream.
    fn build_frame(&mut self, stream: &Stream) -> Built {
        let is_malformed = stream.malformed().is_some();
        stream.with_response(|response| {
            // Nothing is read for a client that takes nothing.
            if response.queue.bytes_in_hand() == 0
                && response.queue.length() > 0
                && self.codec.send_window(stream.id) == 0
            {
                return Built::Blocked;
            }
            let may_read = self.reading.len() < READS_MAX || response.queue.is_reading();
            if !response.queue.is_in_hand()
                && may_read
                && let Err(error) = response.queue.fill()
            {
                return Built::Failed(error);
            }
            let in_hand = response.queue.bytes_in_hand();
            if in_hand == 0 && !response.queue.is_in_hand() {
                return Built::Reads;
            }
            let is_last = response.is_ended && response.queue.is_in_hand();
            let ends_with_data = is_last && response.trailers.is_empty() && !is_malformed;
            let available = in_hand.min(response.chunk_max);
            if in_hand > 0 || ends_with_data {
                match self.build_data(stream.id, response, available, ends_with_data && available == in_hand) {
                    Ok(None) => return Built::Blocked,
                    Ok(Some(true)) => {
                        response.is_done = true;
                        return Built::Done;
                    }
                    Ok(Some(false)) => {}
                    Err(_) => return Built::Nothing,
                }
            }
            if response.queue.length() > 0 || response.is_ended && !is_last {
                return Built::More;
            }
            match is_last {
                true if ends_with_data => Built::More,
                true => self.build_end(stream, response),
                false => Built::Nothing,
            }
        })
    }

    /// Builds a frame of data; `None` if a window is closed, else whether it was the last one.
    fn build_data(
        &mut self,
        id: StreamId,
        response: &mut Response,
        available: usize,
        is_rest: bool,
    ) -> Result<Option<bool>, SendFault> {
        // Control frames do not count as the response's bytes.
        self.codec.poll_control(&mut self.frames);
        let before = self.frames.len();
        let sent = self.codec.write_data(id, available, is_rest, &mut self.frames)?;
        if sent.is_blocked() {
            return Ok(None);
        }
        response.sent.add_head((self.frames.len() - before) as u64);
        response.sent.bytes += sent.length as u64;
        response.blocked_since = None;
        if sent.length <= COPIED_MAX {
            response.queue.copy_to(sent.length, &mut self.frames);
        } else {
            // Without memory for its header the frame breaks off, and with it the connection.
            if self.flush_frames().is_err() {
                self.is_broken = true;
                return Err(SendFault::Gone);
            }
            response.queue.move_to(sent.length, &mut self.output);
        }
        Ok(Some(sent.end_stream))
    }

    /// Builds the end behind the data if it is more than a flag: trailers, or the reset of a malformed request.
    fn build_end(&mut self, stream: &Stream, response: &mut Response) -> Built {
        if stream.malformed().is_none() {
            let trailers = std::mem::take(&mut response.trailers);
            self.codec.poll_control(&mut self.frames);
            let before = self.frames.len();
            let written =
                self.codec.write_trailers(stream.id, &mut self.frames, |fields| write_fields(&trailers, fields));
            if written.is_err() {
                return Built::Nothing;
            }
            response.sent.add_head((self.frames.len() - before) as u64);
        }
        response.is_done = true;
        Built::Done
    }

    /// Moves the frames that were built behind the bytes that wait for the socket.
    fn flush_frames(&mut self) -> std::io::Result<()> {
        self.output.append(&self.frames)?;
        self.frames.clear();
        Ok(())
    }
}
