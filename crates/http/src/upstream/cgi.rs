//! Responses of CGI, as FastCGI, SCGI and uwsgi carry them (RFC 3875 §6): a head of fields, perhaps behind a status
//! line, and a body until its length or the connection ends.

use gale_protocol::ResponseFault;
use gale_protocol::http1::{ResponseHeadParser, ResponseParts, Status};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes};

use crate::upstream::http1::{closed_early, fields, take_front};
use crate::upstream::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};

/// The head that `parts` describe in `bytes`.
pub(super) fn head(parts: &ResponseParts, bytes: &Bytes) -> Result<UpstreamHead, Malformed> {
    if parts.status < 200 && parts.status != 101 {
        // There is nothing interim about the answer of a program.
        return Err(Malformed(format!("upstream sent invalid status \"{}\"", parts.status)));
    }
    let upgrade = parts.field(ResponseField::Upgrade).map(|field| bytes.slice(field.value.as_range()));
    Ok(UpstreamHead {
        status: parts.status,
        reason: Some(bytes.slice(parts.reason.as_range())).filter(|reason| !reason.is_empty()),
        fields: fields(parts, bytes),
        length: parts.content_length,
        upgrade: upgrade.filter(|_| parts.status == 101),
        may_have_trailers: false,
    })
}

/// What is wrong with a head, in nginx's words.
pub(super) fn wrong_head(fault: ResponseFault, input: &[u8]) -> Malformed {
    let mut text = Vec::new();
    fault.write_to(input, &mut text);
    Malformed(String::from_utf8_lossy(&text).into_owned())
}

/// How much of the body is missing: `None` if only its end can tell.
pub(super) fn announced(parts: &ResponseParts) -> Option<u64> {
    if matches!(parts.status, 204 | 304) { Some(0) } else { parts.content_length }
}

/// Reads one response of a SCGI or uwsgi application: these close the connection behind it.
pub struct CgiReader {
    parser: ResponseHeadParser,
    parts: ResponseParts,
    missing: Option<u64>,
}

impl CgiReader {
    /// A reader of a response whose head has at most so many bytes.
    pub fn new(head_max: usize) -> CgiReader {
        CgiReader { parser: ResponseHeadParser::cgi_or_http(head_max), parts: ResponseParts::default(), missing: None }
    }
}

impl ResponseReader for CgiReader {
    fn read_head(&mut self, input: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        match self.parser.parse(input.readable(), &mut self.parts) {
            Ok(Status::NeedMore) => Ok(HeadRead::Partial),
            Ok(Status::Complete { consumed }) => {
                let bytes = take_front(input, consumed)?;
                self.missing = announced(&self.parts);
                Ok(HeadRead::Whole(head(&self.parts, &bytes)?))
            }
            Err(fault) => Err(wrong_head(fault, input.readable())),
        }
    }

    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed> {
        match &mut self.missing {
            Some(0) => Ok(BodyRead::End),
            None if input.is_empty() && has_ended => Ok(BodyRead::End),
            Some(_) if input.is_empty() && has_ended => Err(closed_early()),
            _ if input.is_empty() => Ok(BodyRead::Partial),
            Some(missing) => {
                let count = usize::try_from(*missing).unwrap_or(usize::MAX).min(input.len());
                *missing -= count as u64;
                take_front(input, count).map(BodyRead::Piece)
            }
            None => {
                let count = input.len();
                take_front(input, count).map(BodyRead::Piece)
            }
        }
    }

    fn wants(&self) -> Option<u64> {
        self.missing
    }

    fn keeps_alive(&self) -> bool {
        false
    }
}
