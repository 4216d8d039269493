//! Responses of CGI, as FastCGI, SCGI and uwsgi carry them (RFC 3875 §6): a head of fields, optionally behind a status
//! line, and a body that ends at its length or with the connection.

use gale_base::log_level::Level;
use gale_protocol::ResponseFault;
use gale_protocol::http1::{ResponseHeadParser, ResponseParts};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes};

use crate::head::HeadReader;
use crate::http1::{closed_early, fields, take_front};
use crate::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};

/// Creates the head from its parsed parts.
pub(super) fn head(parts: &ResponseParts, bytes: &Bytes) -> Result<Box<UpstreamHead>, Malformed> {
    if parts.status < 200 && parts.status != 101 {
        // A CGI program has no interim responses.
        return Err(Malformed(format!("upstream sent invalid status \"{}\"", parts.status)));
    }
    let upgrade = parts.field(ResponseField::Upgrade).map(|field| bytes.slice(field.value.as_range()));
    Ok(Box::new(UpstreamHead {
        status: parts.status,
        reason: Some(bytes.slice(parts.reason.as_range())).filter(|reason| !reason.is_empty()),
        fields: fields(parts, bytes),
        length: parts.content_length,
        upgrade: upgrade.filter(|_| parts.status == 101),
        may_have_trailers: false,
    }))
}

/// The error for an invalid head, in nginx's words.
pub(super) fn wrong_head(fault: ResponseFault, input: &[u8]) -> Malformed {
    let mut text = Vec::new();
    fault.write_to(input, &mut text);
    Malformed(String::from_utf8_lossy(&text).into_owned())
}

/// The message about a field line that was skipped.
pub(super) fn ignored(parts: &ResponseParts, input: &[u8]) -> Option<Message> {
    let mut text = Vec::new();
    parts.ignored_first?.write_to(input, &mut text);
    Some(Message { level: Level::Warn, text })
}

/// Length of the body; `None` if it ends with the connection or record.
pub(super) fn announced(parts: &ResponseParts) -> Option<u64> {
    if matches!(parts.status, 204 | 304) { Some(0) } else { parts.content_length }
}

/// Reads the response of a SCGI or uwsgi application, which closes the connection behind it.
pub struct CgiReader {
    head: HeadReader,
    missing: Option<u64>,
    message: Option<Message>,
}

impl CgiReader {
    /// Creates a reader for a response whose head has at most `head_max` bytes.
    pub fn new(head_max: usize) -> CgiReader {
        CgiReader { head: HeadReader::new(ResponseHeadParser::cgi_or_http(head_max)), missing: None, message: None }
    }
}

impl ResponseReader for CgiReader {
    fn read_head(&mut self, input: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        match self.head.read(input.readable()) {
            Ok(None) => Ok(HeadRead::Partial),
            Ok(Some((parts, length))) => {
                self.message = ignored(&parts, input.readable());
                let bytes = take_front(input, length)?;
                self.missing = announced(&parts);
                Ok(HeadRead::Whole(head(&parts, &bytes)?))
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

    fn take_message(&mut self) -> Option<Message> {
        self.message.take()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The parsed response, and whether the connection can be kept.
    #[derive(Debug, PartialEq)]
    pub struct Read {
        pub status: u16,
        pub fields: Vec<(String, String)>,
        pub body: Vec<u8>,
        pub messages: Vec<String>,
        pub keeps_alive: bool,
    }

    /// Reads a response in these pieces. The error is that of the reader, or that the response has not ended.
    pub fn read(reader: &mut dyn ResponseReader, pieces: &[&[u8]], closes: bool) -> Result<Read, String> {
        let mut input = Buffer::new();
        let mut pieces = pieces.iter();
        let mut has_ended = false;
        let mut messages = Vec::new();
        let mut receive = |input: &mut Buffer, has_ended: &mut bool| match pieces.next() {
            Some(piece) => {
                input.append(piece).unwrap();
                true
            }
            None if closes && !*has_ended => {
                *has_ended = true;
                true
            }
            None => false,
        };
        let note = |reader: &mut dyn ResponseReader, messages: &mut Vec<String>| {
            while let Some(message) = reader.take_message() {
                messages.push(String::from_utf8_lossy(&message.text).into_owned());
            }
        };
        let head = loop {
            let read = reader.read_head(&mut input, has_ended);
            note(reader, &mut messages);
            match read.map_err(|malformed| malformed.to_string())? {
                HeadRead::Whole(head) => break head,
                HeadRead::Interim(..) => unreachable!("these protocols have no interim responses"),
                HeadRead::Partial if receive(&mut input, &mut has_ended) => {}
                HeadRead::Partial => return Err("no head".to_owned()),
            }
        };
        let mut body = Vec::new();
        loop {
            let read = reader.read_body(&mut input, has_ended);
            note(reader, &mut messages);
            match read.map_err(|malformed| malformed.to_string())? {
                BodyRead::Piece(piece) => {
                    assert!(!piece.is_empty(), "a piece has something in it");
                    body.extend_from_slice(&piece);
                }
                BodyRead::End => break,
                BodyRead::Partial if receive(&mut input, &mut has_ended) => {}
                BodyRead::Partial => return Err(format!("no end behind {body:?}")),
            }
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let fields = head.fields.iter().map(|field| (text(&field.name), text(&field.value))).collect();
        let keeps_alive = reader.keeps_alive() && input.is_empty();
        Ok(Read { status: head.status, fields, body, messages, keeps_alive })
    }

    /// Checks that the result is the same for each division in two pieces, and byte by byte.
    pub fn assert_pieces_do_not_matter(
        make: &dyn Fn() -> Box<dyn ResponseReader>,
        response: &[u8],
        closes: bool,
    ) -> Result<Read, String> {
        let whole = read(&mut *make(), &[response], closes);
        for at in 0..=response.len() {
            let (one, other) = response.split_at(at);
            let cut = read(&mut *make(), &[one, other], closes);
            let told = |read: &Result<Read, String>| match read {
                Ok(read) => Ok((read.status, read.fields.clone(), read.body.clone(), read.keeps_alive)),
                Err(error) => Err(error.clone()),
            };
            assert_eq!(told(&cut), told(&whole), "cut at {at}");
        }
        let bytes: Vec<&[u8]> = response.chunks(1).collect();
        let slow = read(&mut *make(), &bytes, closes);
        assert_eq!(
            slow.map(|read| (read.status, read.body)),
            whole.as_ref().map(|read| (read.status, read.body.clone())).map_err(Clone::clone)
        );
        whole
    }

    fn make() -> Box<dyn ResponseReader> {
        Box::new(CgiReader::new(4096))
    }

    fn outcome(response: &str, closes: bool) -> Result<(u16, String), String> {
        let read = assert_pieces_do_not_matter(&make, response.as_bytes(), closes)?;
        assert!(!read.keeps_alive, "the application closes the connection");
        Ok((read.status, String::from_utf8(read.body).unwrap()))
    }

    fn is(status: u16, body: &str) -> Result<(u16, String), String> {
        Ok((status, body.to_owned()))
    }

    #[test]
    fn a_response_begins_with_a_status_line_or_with_its_fields() {
        assert_eq!(outcome("HTTP/1.1 201 Made\r\nX: y\r\n\r\nbody", true), is(201, "body"));
        assert_eq!(outcome("Status: 404 Not Found\nX: y\n\nbody", true), is(404, "body"));
        assert_eq!(outcome("Location: http://a/\r\n\r\n", true), is(302, ""));
        assert_eq!(outcome("X: y\r\n\r\nbody", true), is(200, "body"));
    }

    #[test]
    fn a_length_ends_the_body_and_less_is_told() {
        assert_eq!(outcome("Content-Length: 4\r\n\r\nbodymore", false), is(200, "body"));
        assert_eq!(outcome("Content-Length: 0\r\n\r\n", false), is(200, ""));
        assert_eq!(outcome("Status: 204\r\n\r\n", false), is(204, ""));
        let short = outcome("Content-Length: 5\r\n\r\nbody", true);
        assert_eq!(short, Err("upstream prematurely closed connection".to_owned()));
    }

    #[test]
    fn nonsense_is_told_in_nginx_s_words() {
        let error = |response: &str| outcome(response, true).unwrap_err();
        assert_eq!(error("Status: abc\r\n\r\n"), "upstream sent invalid status \"abc\"");
        assert_eq!(error("HTTP/1.1 103 Early Hints\r\n\r\n"), "upstream sent invalid status \"103\"");
        assert_eq!(error("Status: 100\r\n\r\n"), "upstream sent invalid status \"100\"");
        assert_eq!(error("a\0b"), "upstream sent invalid header: \"a\\x00...\"");
        assert_eq!(error(&"x".repeat(5000)), "upstream sent too big header");
    }
}
