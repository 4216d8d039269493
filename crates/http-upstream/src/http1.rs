//! Responses in HTTP/1, and bodies of requests.

use std::io;

use gale_base::log_level::Level;
use gale_http::request::response::{Field, FieldList, FieldName, FieldText};
use gale_protocol::http1::response::{CHUNK_END, ChunkHeader, LAST_CHUNK, reason};
use gale_protocol::http1::{ChunkedDecoder, ResponseFraming, ResponseHeadParser, ResponseParts};
use gale_protocol::request::Method;
use gale_protocol::response::ResponseField;
use gale_protocol::{Range32, ResponseFault};
use gale_runtime::{Buffer, Bytes, Lease, Output};

use crate::head::HeadReader;
use crate::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};
use crate::sending::BodyFraming;

/// A body in the chunked coding. (RFC 9112 §7.1)
pub struct Chunked;

impl BodyFraming for Chunked {
    fn push(&self, piece: Bytes, output: &mut Output) -> io::Result<()> {
        output.append(ChunkHeader::new(piece.len() as u64).as_bytes())?;
        output.push(piece);
        output.push(Bytes::from_static(CHUNK_END));
        Ok(())
    }

    /// As in nginx, the client's trailers are dropped. Some servers merge them into the head, where they could stand
    /// beside fields that the configuration sets for the client (RFC 9110 §6.5.1).
    fn end(&self, _: &[(Bytes, Bytes)], output: &mut Output) -> io::Result<()> {
        output.push(Bytes::from_static(LAST_CHUNK));
        Ok(())
    }
}

/// Reads one response in HTTP/1.
pub struct Http1Reader {
    head: HeadReader,
    method: Method,
    keeps_alive: bool,
    /// Time for which the server announces to keep the connection.
    idle_seconds: Option<u64>,
    body: ReadingBody,
    trailers: Vec<(Bytes, Bytes)>,
    /// A message for the error log.
    message: Option<Vec<u8>>,
}

enum ReadingBody {
    /// The head has not arrived.
    NotYet,
    Length(u64),
    /// With received bytes that were not decoded yet.
    Chunked(Box<ChunkedDecoder>, Bytes),
    UntilClose,
    Ended,
}

impl Http1Reader {
    /// Creates a reader for the response to a request with this method, whose head has at most `head_max` bytes.
    pub fn new(method: Method, head_max: usize) -> Http1Reader {
        Http1Reader {
            head: HeadReader::new(ResponseHeadParser::new(head_max)),
            method,
            keeps_alive: false,
            idle_seconds: None,
            body: ReadingBody::NotYet,
            trailers: Vec::new(),
            message: None,
        }
    }

    /// Creates the head from its parsed parts.
    fn take_head(&mut self, parts: &ResponseParts, bytes: &Bytes) -> Box<UpstreamHead> {
        let framing = ResponseFraming::decide(self.method, parts);
        self.keeps_alive = parts.keeps_alive(framing);
        self.idle_seconds = parts.keep_alive.timeout_s.map(u64::from);
        self.body = match framing {
            ResponseFraming::None => ReadingBody::Ended,
            ResponseFraming::Length(length) => ReadingBody::Length(length),
            ResponseFraming::Chunked => ReadingBody::Chunked(Box::default(), Bytes::new()),
            ResponseFraming::UntilClose | ResponseFraming::Tunnel => ReadingBody::UntilClose,
        };
        let upgrade = parts.field(ResponseField::Upgrade).map(|field| part(bytes, field.value));
        let has_usual_reason = parts.reason.of(bytes) == reason(parts.status).as_bytes();
        Box::new(UpstreamHead {
            status: parts.status,
            reason: (!has_usual_reason).then(|| part(bytes, parts.reason)),
            fields: fields(parts, bytes),
            length: parts.content_length,
            upgrade,
            may_have_trailers: framing == ResponseFraming::Chunked,
        })
    }
}

/// The fields, except those of the connection.
pub(super) fn fields(parts: &ResponseParts, bytes: &Bytes) -> FieldList {
    let mut fields = FieldList::with_capacity(parts.fields.len());
    for field in parts.fields.iter().filter(|field| !field.is_hop_by_hop) {
        let name = FieldName::part_of(bytes, field.name.as_range(), field.known);
        fields.push(Field { name, value: FieldText::part_of(bytes, field.value.as_range()) });
    }
    fields
}

fn part(bytes: &Bytes, range: Range32) -> Bytes {
    bytes.slice(range.as_range())
}

/// Takes the first received bytes, as shared memory.
pub(super) fn take_front(input: &mut Buffer, count: usize) -> Result<Bytes, Malformed> {
    let lease = if count == input.len() { Ok(input.take_lease()) } else { input.split_to(count).map(Some) };
    let lease = lease.map_err(|_| Malformed("the worker's memory for buffers is exhausted".to_owned()))?;
    Ok(lease.map(Lease::freeze).unwrap_or_default())
}

pub(super) fn closed_early() -> Malformed {
    Malformed("upstream prematurely closed connection".to_owned())
}

impl ResponseReader for Http1Reader {
    fn read_head(&mut self, input: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        match self.head.read(input.readable()) {
            Ok(None) => Ok(HeadRead::Partial),
            Ok(Some((parts, length))) => {
                if let Some(ignored) = parts.ignored_first {
                    let mut text = Vec::new();
                    ignored.write_to(input.readable(), &mut text);
                    self.message = Some(text);
                }
                let bytes = take_front(input, length)?;
                if parts.is_interim() {
                    return Ok(HeadRead::Interim(parts.status, fields(&parts, &bytes)));
                }
                Ok(HeadRead::Whole(self.take_head(&parts, &bytes)))
            }
            Err(fault) => {
                let mut text = Vec::new();
                fault.write_to(input.readable(), &mut text);
                Err(Malformed(bstr::BString::from(text).to_string()))
            }
        }
    }

    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed> {
        let is_over = has_ended && input.is_empty() && !self.has_pending();
        match &mut self.body {
            ReadingBody::NotYet => Ok(BodyRead::Partial),
            ReadingBody::Ended | ReadingBody::Length(0) => Ok(BodyRead::End),
            ReadingBody::Length(_) | ReadingBody::Chunked(..) if is_over => Err(closed_early()),
            ReadingBody::Length(remaining) => {
                if input.is_empty() {
                    return Ok(BodyRead::Partial);
                }
                let count = usize::try_from(*remaining).unwrap_or(usize::MAX).min(input.len());
                *remaining -= count as u64;
                take_front(input, count).map(BodyRead::Piece)
            }
            ReadingBody::Chunked(decoder, pending) => loop {
                if pending.is_empty() {
                    if input.is_empty() {
                        return Ok(BodyRead::Partial);
                    }
                    let count = input.len();
                    *pending = take_front(input, count)?;
                }
                let decoded =
                    decoder.decode(pending).map_err(|offence| Malformed(ResponseFault::from(offence).to_string()))?;
                let piece = decoded.data.map(|range| pending.slice(range));
                pending.advance(decoded.consumed);
                if let Some(piece) = piece {
                    return Ok(BodyRead::Piece(piece));
                }
                if decoded.finished {
                    let trailers = decoder.take_trailers();
                    let text = Bytes::from(trailers.text);
                    let fields = trailers.fields.iter();
                    let fields = fields.map(|&(name, value)| (part(&text, name), part(&text, value)));
                    self.trailers = fields.collect();
                    // Bytes behind the end belong to no response.
                    self.keeps_alive &= pending.is_empty();
                    self.body = ReadingBody::Ended;
                    return Ok(BodyRead::End);
                }
            },
            ReadingBody::UntilClose if !input.is_empty() => {
                let count = input.len();
                take_front(input, count).map(BodyRead::Piece)
            }
            ReadingBody::UntilClose if has_ended => {
                self.body = ReadingBody::Ended;
                Ok(BodyRead::End)
            }
            ReadingBody::UntilClose => Ok(BodyRead::Partial),
        }
    }

    fn wants(&self) -> Option<u64> {
        match self.body {
            ReadingBody::Length(remaining) => Some(remaining),
            _ => None,
        }
    }

    fn keeps_alive(&self) -> bool {
        self.keeps_alive
    }

    fn idle_seconds(&self) -> Option<u64> {
        self.idle_seconds
    }

    fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        std::mem::take(&mut self.trailers)
    }

    fn take_message(&mut self) -> Option<Message> {
        self.message.take().map(|text| Message { level: Level::Warn, text })
    }
}

impl Http1Reader {
    fn has_pending(&self) -> bool {
        matches!(&self.body, ReadingBody::Chunked(_, pending) if !pending.is_empty())
    }
}
