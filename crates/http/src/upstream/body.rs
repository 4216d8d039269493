//! The body of a response on its way from a server to the client.
//!
//! What has come is passed on at once. While the client is slow, a buffered body (`proxy_buffering on`) is read ahead,
//! into memory up to `proxy_buffers`; an unbuffered one stays with the server.

use std::collections::VecDeque;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_runtime::{Bytes, Timer};

use crate::request::Request;
use crate::request::body::{BodyError, BodyItem, BodyStream};
use crate::upstream::attempt::{Answering, Passing};
use crate::upstream::receiving::{BodyRead, Malformed};
use crate::upstream::sending::SendError;

/// Most of a body that is received at once, in bytes.
const PIECE_BYTES: usize = 64 * 1024;

/// No body, of a response that would have one of this length: the answer to HEAD.
pub(super) struct NoBody(pub Option<u64>);

impl BodyStream for NoBody {
    fn poll_next(&mut self, _: &Request, _: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        Poll::Ready(None)
    }

    fn is_at_end(&self) -> bool {
        true
    }

    fn length(&self) -> Option<u64> {
        self.0
    }
}

/// See the file's head.
pub(super) struct UpstreamBody {
    /// `None` once the response has ended.
    answering: Option<Answering>,
    /// What has come and the client has not taken.
    ahead: VecDeque<Bytes>,
    ahead_bytes: u64,
    /// How much may be ahead, in bytes.
    ahead_max: u64,
    /// The response broke off: told behind what is ahead.
    broken: Option<BodyError>,
    /// How long all of it is.
    length: Option<u64>,
    silence: Timer,
    silence_max: Duration,
    rate: Option<Rate>,
}

/// `proxy_limit_rate`
struct Rate {
    per_second: u64,
    pause: Timer,
}

impl UpstreamBody {
    /// The rest of a body of which `first` and what `next` says have come.
    pub fn new(
        request: &Request,
        passing: &Passing<'_>,
        answering: Answering,
        length: Option<u64>,
        is_buffered: bool,
        first: Option<Bytes>,
        next: Result<BodyRead, Malformed>,
    ) -> UpstreamBody {
        let settings = passing.settings;
        let silence_max = *settings.read_timeout.get();
        let rate = settings.limit_rate.get().evaluate(request);
        let mut body = UpstreamBody {
            answering: Some(answering),
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            ahead_max: if is_buffered { settings.buffers_bytes() } else { 0 },
            broken: None,
            length,
            silence: Timer::after(silence_max),
            silence_max,
            rate: (rate > 0 && is_buffered).then(|| Rate { per_second: rate, pause: Timer::new() }),
        };
        if let Some(first) = first {
            body.keep(first);
        }
        match next {
            Ok(BodyRead::Piece(piece)) => body.keep(piece),
            Ok(BodyRead::Partial) => {}
            Ok(BodyRead::End) => body.finish(request),
            Err(malformed) => body.break_off(request, malformed),
        }
        body
    }

    fn keep(&mut self, piece: Bytes) {
        self.ahead_bytes += piece.len() as u64;
        self.ahead.push_back(piece);
    }

    fn take(&mut self) -> Option<Bytes> {
        let piece = self.ahead.pop_front()?;
        self.ahead_bytes -= piece.len() as u64;
        Some(piece)
    }

    /// The response has ended.
    fn finish(&mut self, request: &Request) {
        if let Some(mut answering) = self.answering.take() {
            let trailers = answering.take_trailers();
            if request.response.has_trailers {
                for (name, value) in &trailers {
                    request.add_trailer(name, value.to_vec());
                }
            }
            answering.finish(request);
        }
    }

    /// The response cannot be completed.
    fn break_off(&mut self, request: &Request, malformed: Malformed) {
        if let Some(answering) = &mut self.answering {
            answering.tell_messages(request);
        }
        request.log(Level::Error, format_args!("{malformed} while reading upstream"));
        self.fail(BodyError::Short(malformed.0));
    }

    fn fail(&mut self, error: BodyError) {
        if let Some(answering) = self.answering.take() {
            answering.give_up();
        }
        self.broken = Some(error);
    }

    /// Receives the next piece. `None` when the response has ended, in whatever way.
    fn poll_receive(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            let Some(answering) = &mut self.answering else { return Poll::Ready(None) };
            match answering.read_body() {
                Ok(BodyRead::Piece(piece)) => return Poll::Ready(Some(piece)),
                Ok(BodyRead::Partial) => {}
                Ok(BodyRead::End) => {
                    self.finish(request);
                    return Poll::Ready(None);
                }
                Err(malformed) => {
                    self.break_off(request, malformed);
                    return Poll::Ready(None);
                }
            }
            answering.tell_messages(request);
            if let Poll::Ready(Err(error)) = answering.poll_send(request, context) {
                // A server that has begun to answer need not read on.
                if let SendError::Client(error) = error {
                    self.fail(BodyError::Request(error));
                    return Poll::Ready(None);
                }
            }
            let mut max = PIECE_BYTES;
            if let Some(rate) = &mut self.rate {
                match rate.poll_allows(answering, context) {
                    Poll::Ready(allowed) => max = max.min(allowed),
                    Poll::Pending => return Poll::Pending,
                }
            }
            match answering.poll_receive(max, context) {
                Poll::Ready(Ok(_)) => self.silence.set_after(self.silence_max),
                Poll::Ready(Err(error)) => {
                    let text = OsErrorText(&error);
                    request.log(Level::Error, format_args!("recv() failed {text} while reading upstream"));
                    self.fail(match error.kind() {
                        std::io::ErrorKind::OutOfMemory => BodyError::NoMemory,
                        _ => BodyError::Reset,
                    });
                    return Poll::Ready(None);
                }
                Poll::Pending if self.silence.poll_expired(context).is_ready() => {
                    let message = "upstream timed out (110: Connection timed out) while reading upstream";
                    request.log(Level::Error, format_args!("{message}"));
                    self.fail(BodyError::TimedOut);
                    return Poll::Ready(None);
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl BodyStream for UpstreamBody {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let Some(piece) = self.take() {
            return Poll::Ready(Some(Ok(BodyItem::Bytes(piece))));
        }
        match self.poll_receive(request, context) {
            Poll::Ready(Some(piece)) => Poll::Ready(Some(Ok(BodyItem::Bytes(piece)))),
            Poll::Ready(None) => Poll::Ready(self.broken.take().map(Err)),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        while self.ahead_bytes < self.ahead_max {
            match self.poll_receive(request, context) {
                Poll::Ready(Some(piece)) => self.keep(piece),
                Poll::Ready(None) | Poll::Pending => return,
            }
        }
        // While the client is waited for, a server that waits, too, is not silent.
        self.silence.set_after(self.silence_max);
    }

    fn is_at_end(&self) -> bool {
        self.answering.is_none() && self.ahead.is_empty() && self.broken.is_none()
    }

    fn length(&self) -> Option<u64> {
        self.length
    }
}

impl Rate {
    /// How many bytes may be received now, when some may.
    fn poll_allows(&mut self, answering: &Answering, context: &mut Context<'_>) -> Poll<usize> {
        loop {
            let now = gale_runtime::now();
            let elapsed = now.since(answering.started);
            let allowed = u128::from(self.per_second) * (elapsed.as_millis() + 1000) / 1000;
            let received = u128::from(answering.records.last().bytes_received);
            if allowed > received {
                return Poll::Ready(usize::try_from(allowed - received).unwrap_or(usize::MAX));
            }
            let excess_ms = (received - allowed) * 1000 / u128::from(self.per_second) + 1;
            let pause = Duration::from_millis(u64::try_from(excess_ms).unwrap_or(u64::MAX));
            self.pause.set(now + pause);
            if self.pause.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}
