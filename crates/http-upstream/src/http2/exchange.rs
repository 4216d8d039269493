//! One request on a shared connection, and its response, as a carrier of `answering`.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_http::request::Request;
use gale_http::request::exchange::LOW_WATER_BYTES;
use gale_protocol::http2::CannotOpen;
use gale_runtime::{Bytes, Timer};

use super::connection::Http2Connection;
use super::request::Http2Request;
use super::stream::{Head, Lost, Stream, StreamEnd};
use crate::failure::End;
use crate::heading::Heading;
use crate::receiving::{BodyRead, Malformed, UpstreamHead};
use crate::record::Records;
use crate::sending::{Piece, Pieces, SendError};
use crate::settings::UpstreamSettings;

/// Maximum number of bytes taken at once from a body that arrived with the head.
const FIRST_BYTES: usize = 64 * 1024;

/// A request on a shared connection. Dropping it resets the stream.
pub(crate) struct Shared {
    connection: Rc<Http2Connection>,
    stream: Rc<Stream>,
    /// The rest of the request's body.
    pieces: Pieces,
    passes_trailers: bool,
    /// Bytes taken from the response's body.
    taken: Option<Bytes>,
    /// True once the caller asks for the body with a limit.
    is_asked_for: bool,
    timer: Timer,
    send_max: Duration,
    is_waiting: bool,
    /// Number of bytes sent when the wait began.
    sent_before: u64,
    /// True if the connection carried other requests before.
    pub is_reused: bool,
}

impl Shared {
    /// Begins a request on a connection.
    ///
    /// # Errors
    /// There is no room.
    pub fn begin(
        connection: &Rc<Http2Connection>,
        request: &Http2Request,
        pieces: Pieces,
        settings: &UpstreamSettings,
        is_reused: bool,
    ) -> Result<Shared, CannotOpen> {
        let stream = connection.begin_request(request, pieces.has_ended())?;
        Ok(Shared {
            connection: Rc::clone(connection),
            stream,
            pieces,
            passes_trailers: request.passes_trailers,
            taken: None,
            is_asked_for: false,
            timer: Timer::new(),
            send_max: *settings.exchange.send_timeout.get(),
            is_waiting: false,
            sent_before: 0,
            is_reused,
        })
    }

    /// The connection's number.
    pub fn connection_number(&self) -> u64 {
        self.connection.number
    }

    /// Number of bytes sent.
    pub fn sent(&self) -> u64 {
        self.stream.sent()
    }

    /// True if a part of the client's body was consumed and is not kept, so that it cannot be sent again.
    pub fn has_taken_body(&self) -> bool {
        self.pieces.has_taken_body()
    }

    /// True if anything was received.
    pub fn has_received(&self) -> bool {
        self.stream.has_received()
    }

    /// Continues sending, and waits for the head.
    pub fn poll_head(
        &mut self,
        request: &Request,
        settings: &UpstreamSettings,
        records: &Records,
        heading: &mut Heading,
        context: &mut Context<'_>,
    ) -> Poll<Result<Box<UpstreamHead>, End>> {
        let read_timeout = *settings.exchange.read_timeout.get();
        self.stream.register(context);
        let mut is_done = self.is_sent();
        if !is_done {
            match self.poll_send(request, context) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => {
                    heading.silence.set_after(read_timeout);
                    is_done = true;
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::Send(error))),
            }
        } else if heading.silence.deadline().is_none() {
            heading.silence.set_after(read_timeout);
        }
        while let Some(head) = self.stream.with(|own| own.heads.pop_front()) {
            records.last().bytes_received = self.stream.with(|own| own.received);
            match head {
                Head::Final(head) => {
                    self.pieces.keep_nothing();
                    return Poll::Ready(Ok(Box::new(head)));
                }
                Head::Interim(status, fields) => {
                    heading.silence.set_after(read_timeout);
                    heading.interim.pass(request, settings, status, &fields);
                }
            }
        }
        if let Some(end) = self.stream.ended() {
            return Poll::Ready(Err(match end {
                StreamEnd::Unprocessed => End::Unprocessed,
                StreamEnd::Lost(Lost::Closed) => End::Closed,
                StreamEnd::Lost(lost @ (Lost::Failed(..) | Lost::NoMemory)) => End::Receiving(lost.error()),
                end => End::Malformed(Malformed(end.text())),
            }));
        }
        // While the client is still sending, the read timeout does not run.
        if is_done && heading.silence.poll_expired(context).is_ready() {
            self.connection.suspect();
            return Poll::Ready(Err(End::Silent));
        }
        Poll::Pending
    }

    /// True if everything was sent.
    fn is_sent(&self) -> bool {
        self.pieces.is_over() && self.stream.with(|own| own.has_sent_all || own.is_given_up)
    }

    /// Continues sending: takes as much of the request's body as the server's windows allow, and a little more.
    pub fn poll_send(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        loop {
            if self.stream.with(|own| own.is_given_up) {
                // The response is complete, or its end gives the reason.
                self.pieces.give_up();
            }
            if self.is_sent() {
                return Poll::Ready(Ok(()));
            }
            self.stream.register(context);
            let unsent = self.stream.with(|own| own.outgoing.len_bytes());
            if unsent as u64 > LOW_WATER_BYTES || self.pieces.is_over() {
                return self.poll_progress(context);
            }
            match self.pieces.poll_next(request, context)? {
                Poll::Ready(Piece::Bytes(piece)) => self.connection.queue(&self.stream, piece),
                Poll::Ready(Piece::End(trailers)) => {
                    let trailers = if self.passes_trailers { trailers } else { Vec::new() };
                    self.connection.end_request(&self.stream, trailers);
                }
                Poll::Pending if unsent > 0 => return self.poll_progress(context),
                Poll::Pending => {
                    // A wait for the client is none for the server.
                    self.is_waiting = false;
                    return Poll::Pending;
                }
            }
        }
    }

    /// Waits for the server's windows or the socket.
    fn poll_progress(&mut self, context: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let sent = self.stream.sent();
        if !std::mem::replace(&mut self.is_waiting, true) || sent != self.sent_before {
            self.sent_before = sent;
            self.timer.set_after(self.send_max);
        }
        ready!(self.timer.poll_expired(context));
        self.pieces.give_up();
        self.connection.suspect();
        Poll::Ready(Err(SendError::TimedOut))
    }

    /// Returns the next part of the body, from the bytes taken.
    pub fn read_body(&mut self) -> Result<BodyRead, Malformed> {
        if !self.is_asked_for && self.taken.is_none() {
            self.take(FIRST_BYTES).map_err(|error| Malformed(error.to_string()))?;
        }
        if let Some(piece) = self.taken.take() {
            return Ok(BodyRead::Piece(piece));
        }
        match self.stream.ended().filter(|_| self.stream.with(|own| own.is_read())) {
            None => Ok(BodyRead::Partial),
            Some(StreamEnd::Complete) => Ok(BodyRead::End),
            Some(end) => Err(Malformed(end.text())),
        }
    }

    /// Takes at most `max` bytes of the body; 0 means its end.
    pub fn poll_receive(&mut self, max: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.is_asked_for = true;
        self.take(max)?;
        match &self.taken {
            Some(piece) => Poll::Ready(Ok(piece.len())),
            None if self.stream.ended().is_some() => Poll::Ready(Ok(0)),
            None => {
                self.stream.register(context);
                Poll::Pending
            }
        }
    }

    fn take(&mut self, max: usize) -> io::Result<()> {
        if self.taken.is_none() {
            self.taken = self.connection.take(&self.stream, max.max(1))?;
        }
        Ok(())
    }

    /// Takes the trailers.
    pub fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        self.stream.with(|own| std::mem::take(&mut own.trailers))
    }

    /// Notes a read timeout.
    pub fn note_silence(&self) {
        self.connection.suspect();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.connection.leave(&self.stream);
    }
}
