//! The body of an HTTP/1 request: counted, chunked, or a tunnel. `Expect: 100-continue` is recognised here and in
//! `http2/body.rs`.

use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_protocol::Range32;
use gale_protocol::http1::{ChunkedDecoder, Trailers};
use gale_protocol::request::{Framing, KnownHeader, RequestHead, Version};
use gale_runtime::{Buffer, Bytes, Timer};
use gale_tls::Transport;

use crate::connection::body_wait::BodyWait;
use crate::request::body::BodyItem;
use crate::request::exchange::{BodyLimits, RequestBodyError};

/// Largest piece that is read at once: a slow consumer holds no more.
const PIECE_MAX: usize = 16 * 1024;

/// State of the body of the current request.
#[derive(Debug, Default)]
pub(super) struct RequestBody {
    framing: Coding,
    received: u64,
    /// The client waits for `100 Continue` before it sends.
    wants_continue: bool,
    wait: BodyWait,
}

#[derive(Debug, Default)]
enum Coding {
    /// Nothing is left to read.
    #[default]
    Read,
    Length(u64),
    Chunked(Box<ChunkedDecoder>),
    Tunnel,
    /// The head was broken: the bytes behind it cannot be understood, and count as no body.
    Unknown,
    /// The body was broken, or did not come: nothing behind it can be understood.
    Broken(RequestBodyError),
}

impl RequestBody {
    /// The body that a head announces.
    pub(super) fn begin(&mut self, head: &RequestHead, input: &[u8]) {
        let framing = match head.framing {
            Framing::None | Framing::Length(0) => Coding::Read,
            Framing::Length(length) => Coding::Length(length),
            Framing::Chunked => Coding::Chunked(Box::new(ChunkedDecoder::of_request())),
        };
        let expects =
            || head.value(input, KnownHeader::Expect).is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue"));
        let wants_continue = !matches!(framing, Coding::Read) && head.version == Version::Http11 && expects();
        *self = RequestBody { framing, received: 0, wants_continue, wait: BodyWait::default() };
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(self.framing, Coding::Read)
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Total time that the client has been waited for.
    pub(super) fn waited(&self) -> Duration {
        self.wait.waited()
    }

    pub(super) fn wants_continue(&self) -> bool {
        self.wants_continue
    }

    pub(super) fn continue_was_sent(&mut self) {
        self.wants_continue = false;
    }

    pub(super) fn become_tunnel(&mut self) {
        self.framing = Coding::Tunnel;
    }

    /// The head was broken; no body is looked for.
    pub(super) fn never_mind(&mut self) {
        self.framing = Coding::Unknown;
    }

    /// Returns `true` if the next request can be found behind the body. It cannot while the client waits for
    /// `100 Continue`: the client may send the body or leave it out.
    pub(super) fn may_be_followed(&self) -> bool {
        match self.framing {
            Coding::Read => true,
            Coding::Length(_) | Coding::Chunked(_) => !self.wants_continue,
            Coding::Tunnel | Coding::Unknown | Coding::Broken(_) => false,
        }
    }

    /// The next piece; `None` at the end. After an error there is nothing but that error.
    pub(super) fn poll_next(
        &mut self,
        stream: &Transport,
        input: &mut Buffer,
        timer: &mut Timer,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        let piece = ready!(self.poll_piece(stream, input, timer, context, limits));
        if let Err(error) = piece {
            timer.clear();
            self.framing = Coding::Broken(error);
        }
        Poll::Ready(piece)
    }

    fn poll_piece(
        &mut self,
        stream: &Transport,
        input: &mut Buffer,
        timer: &mut Timer,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        loop {
            match self.framing {
                Coding::Read | Coding::Unknown => {
                    timer.clear();
                    return Poll::Ready(Ok(None));
                }
                Coding::Broken(error) => return Poll::Ready(Err(error)),
                Coding::Length(_) | Coding::Chunked(_) | Coding::Tunnel => {}
            }
            if !input.is_empty()
                && let Some(piece) = self.take_piece(input, limits)?
            {
                return Poll::Ready(Ok(Some(piece)));
            }
            if self.is_read() {
                continue;
            }
            let read_max = match self.framing {
                Coding::Length(left) => usize::try_from(left).map_or(PIECE_MAX, |left| left.min(PIECE_MAX)),
                _ => PIECE_MAX,
            };
            match stream.poll_recv(context, input, read_max) {
                Poll::Ready(Ok(0)) if matches!(self.framing, Coding::Tunnel) => {
                    self.framing = Coding::Read;
                    return Poll::Ready(Ok(None));
                }
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::OutOfMemory => {
                    return Poll::Ready(Err(RequestBodyError::NoMemory));
                }
                Poll::Ready(Ok(0)) | Poll::Ready(Err(_)) => return Poll::Ready(Err(RequestBodyError::PeerGone)),
                Poll::Ready(Ok(_)) => self.wait.stop(),
                Poll::Pending => {
                    if matches!(self.framing, Coding::Tunnel) {
                        return Poll::Pending;
                    }
                    let received = self.received;
                    return self.wait.poll_ended(timer, received, limits, context).map(Err);
                }
            }
        }
    }

    /// The piece of the body in `input`; `None` when that was framing alone.
    fn take_piece(&mut self, input: &mut Buffer, limits: &BodyLimits) -> Result<Option<BodyItem>, RequestBodyError> {
        let lease = match &mut self.framing {
            Coding::Read | Coding::Unknown | Coding::Broken(_) => return Ok(None),
            Coding::Tunnel => input.take_lease(),
            Coding::Length(left) => {
                let piece = usize::try_from(*left).map_or(input.len(), |left| left.min(input.len()));
                *left -= piece as u64;
                if *left == 0 {
                    self.framing = Coding::Read;
                }
                Some(input.split_to(piece).map_err(no_memory)?)
            }
            Coding::Chunked(decoder) => {
                let decoded = decoder.decode(input.readable()).map_err(|_| RequestBodyError::Malformed)?;
                // The announced size of a chunk counts at once: its bytes may be long in coming.
                let piece = decoded.data.as_ref().map_or(0, ExactSizeIterator::len) as u64;
                let announced = self.received.saturating_add(piece).saturating_add(decoder.chunk_remaining());
                if limits.length_max > 0 && announced > limits.length_max {
                    return Err(RequestBodyError::TooLarge);
                }
                match decoded.data {
                    Some(range) => Some(input.split_to(decoded.consumed).map_err(no_memory)?.slice(range)),
                    None => {
                        input.consume(decoded.consumed);
                        if !decoded.finished {
                            return Ok(None);
                        }
                        let trailers = decoder.take_trailers();
                        self.framing = Coding::Read;
                        return Ok((!trailers.fields.is_empty()).then(|| trailers_item(trailers)));
                    }
                }
            }
        };
        let Some(lease) = lease else { return Ok(None) };
        self.received += lease.len() as u64;
        if limits.length_max > 0 && self.received > limits.length_max && !matches!(self.framing, Coding::Tunnel) {
            return Err(RequestBodyError::TooLarge);
        }
        Ok(Some(BodyItem::Bytes(lease.freeze())))
    }
}

/// Parts of one text: nothing is copied for each field.
fn trailers_item(Trailers { text, fields }: Trailers) -> BodyItem {
    let text = Bytes::from(text);
    let part = |range: Range32| text.slice(range.as_range());
    BodyItem::Trailers(fields.into_iter().map(|(name, value)| (part(name), part(value))).collect())
}

/// Only a lease that was refused says this.
fn no_memory(_: io::Error) -> RequestBodyError {
    RequestBodyError::NoMemory
}
