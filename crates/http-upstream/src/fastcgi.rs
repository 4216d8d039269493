//! Responses in FastCGI, and bodies of requests. (FastCGI 1.0; the codec is [`gale_protocol::fastcgi`])
//!
//! Invariant: data that a server sends besides its response is handed on at once or dropped. A piece of the body that
//! is a small part of the received bytes does not keep the rest of them in memory.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bstr::{BString, ByteSlice};
use gale_base::log_level::Level;
use gale_protocol::fastcgi::{CONTENT_MAX, Event, ResponseDecoder, STDIN_END, stdin_header, trim_message};
use gale_protocol::http1::ResponseHeadParser;
use gale_runtime::{Buffer, Bytes, Output};

use crate::cgi;
use crate::head::HeadReader;
use crate::http1::{closed_early, take_front};
use crate::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};
use crate::sending::BodyFraming;

/// A body in STDIN records. (FastCGI 1.0 §5.3)
pub struct Stdin;

impl BodyFraming for Stdin {
    fn push(&self, mut piece: Bytes, output: &mut Output) -> io::Result<()> {
        while !piece.is_empty() {
            let content = piece.split_to(piece.len().min(CONTENT_MAX));
            output.append(&stdin_header(content.len()))?;
            output.push(content);
        }
        Ok(())
    }

    fn tells_end(&self) -> bool {
        true
    }

    fn end(&self, _: &[(Bytes, Bytes)], output: &mut Output) -> io::Result<()> {
        output.append(&STDIN_END)
    }
}

const EXCESS: &[u8] = b"upstream sent more data than specified in \"Content-Length\" header";

/// Reads one response in FastCGI.
pub struct FastCgiReader {
    decoder: ResponseDecoder,
    parser: HeadReader,
    is_head: bool,
    keeps_connection: bool,
    /// Received bytes that were not decoded yet.
    pending: Bytes,
    /// Number of bytes received with `pending`.
    received: usize,
    /// The received part of a head that is in several pieces.
    head: Vec<u8>,
    /// Received bytes of the body that were not returned yet.
    body: Bytes,
    /// Number of bytes of the announced body that are missing.
    missing: Option<u64>,
    has_ended: bool,
    /// True if more bytes arrived than were announced.
    has_excess: bool,
    messages: VecDeque<Message>,
    catches: Arc<[BString]>,
    /// The end of the last message, to find texts that are divided between two messages.
    message_end: Vec<u8>,
}

impl FastCgiReader {
    /// Creates a reader for the response to a request. `is_head` is true for a HEAD, `head_max` the maximum length of
    /// the head, and `keeps_connection` true if the request asked for that. One of the texts in `catches` in a message
    /// before the response makes it invalid.
    pub fn new(is_head: bool, head_max: usize, keeps_connection: bool, catches: Arc<[BString]>) -> FastCgiReader {
        FastCgiReader {
            decoder: ResponseDecoder::new(),
            parser: HeadReader::new(ResponseHeadParser::cgi(head_max)),
            is_head,
            keeps_connection,
            pending: Bytes::new(),
            received: 0,
            head: Vec::new(),
            body: Bytes::new(),
            missing: None,
            has_ended: false,
            has_excess: false,
            messages: VecDeque::new(),
            catches,
            message_end: Vec::new(),
        }
    }

    /// Takes received bytes; `false` if there is nothing to decode.
    fn refill(&mut self, input: &mut Buffer) -> Result<bool, Malformed> {
        if self.pending.is_empty() {
            let count = input.len();
            self.pending = take_front(input, count)?;
            self.received = count;
        }
        Ok(!self.pending.is_empty())
    }

    /// The next event, with its bytes.
    fn decode(&mut self) -> Result<Option<(Event, Bytes)>, Malformed> {
        let decoded = self.decoder.decode(&self.pending).map_err(|fault| Malformed(fault.to_string()))?;
        let bytes = match &decoded.event {
            Some(Event::Stdout(range) | Event::Stderr(range)) => self.pending.slice(range.clone()),
            _ => Bytes::new(),
        };
        self.pending.advance(decoded.consumed);
        Ok(decoded.event.map(|event| (event, bytes)))
    }

    /// Keeps a message for the log. Returns true if it contains a text of `catches`.
    fn take_stderr(&mut self, piece: &[u8]) -> bool {
        let message = trim_message(piece);
        if !message.is_empty() {
            let text = [b"FastCGI sent in stderr: \"", message, b"\""].concat();
            self.messages.push_back(Message { level: Level::Error, text });
        }
        let Some(longest) = self.catches.iter().map(|text| text.len()).max() else { return false };
        self.message_end.extend_from_slice(piece);
        let is_caught = self.catches.iter().any(|text| !text.is_empty() && self.message_end.contains_str(text));
        let before = self.message_end.len().saturating_sub(longest.saturating_sub(1));
        self.message_end.drain(..before);
        is_caught
    }

    /// Adds output to the head; returns the head once it is complete.
    fn take_stdout_of_head(&mut self, piece: Bytes) -> Result<Option<Box<UpstreamHead>>, Malformed> {
        let is_first = self.head.is_empty();
        if !is_first {
            self.head.extend_from_slice(&piece);
        }
        let input = if is_first { &piece } else { &self.head[..] };
        match self.parser.read(input) {
            Ok(None) => {
                if is_first {
                    self.head.extend_from_slice(&piece);
                }
                Ok(None)
            }
            Ok(Some((parts, length))) => {
                self.messages.extend(cgi::ignored(&parts, input));
                let mut body = if is_first { piece } else { Bytes::from(std::mem::take(&mut self.head)) };
                let head = cgi::head(&parts, &body.split_to(length))?;
                self.missing = cgi::announced(&parts);
                self.body = body;
                Ok(Some(head))
            }
            Err(fault) => Err(cgi::wrong_head(fault, input)),
        }
    }

    /// The next bytes of the body to return.
    fn next_piece(&mut self) -> Option<Bytes> {
        let mut piece = std::mem::take(&mut self.body);
        if piece.is_empty() || self.is_head {
            return None;
        }
        if let Some(missing) = &mut self.missing {
            let count = usize::try_from(*missing).unwrap_or(usize::MAX);
            if count < piece.len() {
                self.messages.push_back(Message { level: Level::Warn, text: EXCESS.to_vec() });
                piece.truncate(count);
                (self.has_excess, self.has_ended) = (true, true);
            }
            *missing -= piece.len() as u64;
        }
        if piece.len() * 16 < self.received {
            piece = Bytes::copy_from_slice(&piece);
        }
        (!piece.is_empty()).then_some(piece)
    }

    fn lacks_body(&self) -> bool {
        self.missing.is_some_and(|missing| missing > 0) && !self.is_head
    }

    /// Handles the end of the connection.
    fn close(&mut self) -> Result<BodyRead, Malformed> {
        // As in nginx, this may be the end of the response if connections are not kept.
        let may_be_whole = self.decoder.has_stdout_ended() || !self.keeps_connection;
        if self.lacks_body() || !may_be_whole || self.decoder.stdout_remaining() > 0 {
            return Err(closed_early());
        }
        self.has_ended = true;
        Ok(BodyRead::End)
    }
}

impl ResponseReader for FastCgiReader {
    fn read_head(&mut self, input: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        while self.refill(input)? {
            match self.decode()? {
                None => {}
                Some((Event::Stdout(_), piece)) => {
                    if let Some(head) = self.take_stdout_of_head(piece)? {
                        return Ok(HeadRead::Whole(head));
                    }
                }
                Some((Event::Stderr(_), piece)) if self.take_stderr(&piece) => return Err(Malformed::told()),
                Some((Event::Stderr(_), _)) => {}
                Some((Event::StdoutEnd, _)) => {
                    return Err(Malformed("upstream prematurely closed FastCGI stdout".to_owned()));
                }
                Some((Event::EndRequest(_), _)) => {
                    return Err(Malformed("upstream sent unexpected FastCGI record: 3".to_owned()));
                }
            }
        }
        Ok(HeadRead::Partial)
    }

    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed> {
        loop {
            if let Some(piece) = self.next_piece() {
                return Ok(BodyRead::Piece(piece));
            }
            if self.has_ended {
                return Ok(BodyRead::End);
            }
            if !self.refill(input)? {
                return if has_ended { self.close() } else { Ok(BodyRead::Partial) };
            }
            match self.decode()? {
                None => {}
                Some((Event::Stdout(_), piece)) => self.body = piece,
                Some((Event::Stderr(_), piece)) => {
                    self.take_stderr(&piece);
                }
                Some((Event::StdoutEnd, _)) if self.lacks_body() => {
                    return Err(Malformed("upstream prematurely closed FastCGI stdout".to_owned()));
                }
                Some((Event::StdoutEnd, _)) => {}
                Some((Event::EndRequest(_), _)) if self.lacks_body() => {
                    return Err(Malformed("upstream prematurely closed FastCGI request".to_owned()));
                }
                Some((Event::EndRequest(_), _)) => {
                    // Its padding, if that has arrived.
                    self.decode()?;
                    self.has_excess |= !self.pending.is_empty();
                    self.has_ended = true;
                }
            }
        }
    }

    fn is_whole(&self) -> bool {
        self.decoder.has_stdout_ended() || self.decoder.is_finished() || self.missing == Some(0)
    }

    fn keeps_alive(&self) -> bool {
        self.keeps_connection && self.decoder.is_finished() && !self.has_excess
    }

    fn take_message(&mut self) -> Option<Message> {
        self.messages.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgi::tests::{Read, assert_pieces_do_not_matter, read};

    const END: &[u8] = b"\0\0\0\0\0\0\0\0";

    fn record(kind: u8, content: &[u8], padding: u8) -> Vec<u8> {
        let [high, low] = (content.len() as u16).to_be_bytes();
        let mut record = vec![1, kind, 0, 1, high, low, padding, 0];
        record.extend_from_slice(content);
        record.resize(record.len() + usize::from(padding), b'p');
        record
    }

    fn stdout(text: &str) -> Vec<u8> {
        record(6, text.as_bytes(), 0)
    }

    fn stderr(text: &str) -> Vec<u8> {
        record(7, text.as_bytes(), 3)
    }

    fn make(is_head: bool, keeps: bool, catches: &[&str]) -> impl Fn() -> Box<dyn ResponseReader> {
        let catches: Arc<[BString]> = catches.iter().map(|&text| BString::from(text)).collect();
        move || Box::new(FastCgiReader::new(is_head, 4096, keeps, Arc::clone(&catches)))
    }

    fn outcome(keeps: bool, records: &[Vec<u8>], closes: bool) -> Result<Read, String> {
        assert_pieces_do_not_matter(&make(false, keeps, &[]), &records.concat(), closes)
    }

    fn told(keeps: bool, records: &[Vec<u8>], closes: bool) -> String {
        outcome(keeps, records, closes).unwrap_err()
    }

    const EARLY: &str = "upstream prematurely closed connection";

    #[test]
    fn a_response_is_put_together_from_its_records() {
        let records = [
            stderr("PHP Warning: one\n"),
            record(6, b"Status: 404 Not Fo", 255),
            record(10, b"ignored", 1)
                .into_iter()
                .enumerate()
                .map(|(at, byte)| if at == 3 { 0 } else { byte })
                .collect(),
            stdout("und\r\nX: y\r\n\r\nbo"),
            stderr("two."),
            record(6, b"dy", 7),
            stdout(""),
            record(3, END, 0),
        ];
        for keeps in [false, true] {
            let read = outcome(keeps, &records, false).unwrap();
            assert_eq!((read.status, &read.body[..], read.keeps_alive), (404, &b"body"[..], keeps));
            assert_eq!(read.fields[1], ("X".to_owned(), "y".to_owned()));
            let messages = ["FastCGI sent in stderr: \"PHP Warning: one\"", "FastCGI sent in stderr: \"two\""];
            assert_eq!(read.messages, messages);
        }
    }

    #[test]
    fn end_of_a_response_is_recognised() {
        let head = || stdout("X: y\r\n\r\nbody");
        let end = || record(3, END, 0);
        // The end of the request is enough, without the end of the output too.
        assert!(outcome(true, &[head(), end()], false).unwrap().keeps_alive);
        assert!(!outcome(false, &[head(), end()], false).unwrap().keeps_alive);
        // The end of the output is not enough while the connection is open.
        assert!(told(true, &[head(), stdout("")], false).starts_with("no end"));
        // The end of the connection ends a response only between two records.
        assert_eq!(outcome(false, &[head()], true).unwrap().body, b"body");
        assert_eq!(told(true, &[head()], true), EARLY);
        assert_eq!(outcome(true, &[head(), stdout("")], true).unwrap().body, b"body");
        let cut = head();
        assert_eq!(told(false, &[cut[..cut.len() - 1].to_vec()], true), EARLY);
        // Padding that has arrived is skipped.
        let padded = read(&mut *make(false, true, &[])(), &[&[head(), record(3, END, 8)].concat()], false);
        assert!(padded.unwrap().keeps_alive);
        // Unrequested data follows the end.
        let read = read(&mut *make(false, true, &[])(), &[&[head(), end(), stdout("x")].concat()], false).unwrap();
        assert_eq!((&read.body[..], read.keeps_alive), (&b"body"[..], false));
    }

    #[test]
    fn a_length_that_is_not_kept_to() {
        let with = |length: u32, body: &str| stdout(&format!("Content-Length: {length}\r\n\r\n{body}"));
        let end = || record(3, END, 0);
        let read = outcome(true, &[with(4, "body"), stdout(""), end()], false).unwrap();
        assert!(read.keeps_alive && read.messages.is_empty());
        let read = outcome(true, &[with(4, "bodymore"), end()], false).unwrap();
        assert_eq!((&read.body[..], read.keeps_alive), (&b"body"[..], false));
        assert_eq!(told(true, &[with(5, "body"), stdout("")], false), "upstream prematurely closed FastCGI stdout");
        assert_eq!(told(true, &[with(5, "body"), end()], false), "upstream prematurely closed FastCGI request");
        assert_eq!(told(false, &[with(5, "body")], true), EARLY);
    }

    #[test]
    fn the_answer_to_head_has_no_body() {
        let response = [stdout("Content-Length: 9\r\n\r\nbody"), stdout("more"), record(3, END, 0)].concat();
        let read = assert_pieces_do_not_matter(&make(true, true, &[]), &response, false).unwrap();
        assert!(read.body.is_empty() && read.keeps_alive);
    }

    #[test]
    fn wrong_records_are_told_in_nginx_s_words() {
        let with = |at: usize, byte: u8| {
            let mut record = stdout("X: y\r\n\r\n");
            record[at] = byte;
            told(false, &[record], true)
        };
        assert_eq!(with(0, 2), "upstream sent unsupported FastCGI protocol version: 2");
        assert_eq!(with(1, 9), "upstream sent invalid FastCGI record type: 9");
        assert_eq!(with(2, 1), "upstream sent unexpected FastCGI request id high byte: 1");
        assert_eq!(with(3, 7), "upstream sent unexpected FastCGI request id low byte: 7");
        assert_eq!(told(false, &[record(3, END, 0)], true), "upstream sent unexpected FastCGI record: 3");
        assert_eq!(told(false, &[stdout("")], true), "upstream prematurely closed FastCGI stdout");
        assert_eq!(told(false, &[stdout("X: y")], true), "no head");
        assert_eq!(told(false, &[stdout(&"x".repeat(5000))], true), "upstream sent too big header");
    }

    #[test]
    fn output_behind_an_empty_record_belongs_to_the_response() {
        let records = [stdout("X: y\r\n\r\none "), stdout(""), stdout("two"), stdout(""), record(3, END, 0)];
        assert_eq!(outcome(true, &records, false).unwrap().body, b"one two");
    }

    #[test]
    fn a_text_in_a_message_makes_the_response_invalid() {
        let make = make(false, false, &["Fatal", "never"]);
        let response = [stderr("PHP Fatal error"), stdout("X: y\r\n\r\n"), record(3, END, 0)].concat();
        // The message needs no addition.
        assert_eq!(assert_pieces_do_not_matter(&make, &response, false), Err(String::new()));
        let response = [stdout("X: y\r\n\r\n"), stderr("PHP Fatal error"), record(3, END, 0)].concat();
        assert_eq!(assert_pieces_do_not_matter(&make, &response, false).unwrap().status, 200);
    }

    #[test]
    fn a_small_piece_keeps_no_large_block() {
        let mut reader = FastCgiReader::new(false, 4096, false, Arc::default());
        let mut input = Buffer::new();
        input.append(&stdout("X: y\r\n\r\n")).unwrap();
        assert!(matches!(reader.read_head(&mut input, false), Ok(HeadRead::Whole(_))));
        input.append(&[stdout("x"), record(7, &[b'e'; 60_000], 0)].concat()).unwrap();
        let before = gale_runtime::leased_bytes();
        let Ok(BodyRead::Piece(piece)) = reader.read_body(&mut input, false) else { panic!("a piece") };
        assert!(matches!(reader.read_body(&mut input, false), Ok(BodyRead::Partial)));
        assert_eq!(&piece[..], b"x");
        assert!(gale_runtime::leased_bytes() + 60_000 <= before);
    }

    #[test]
    fn a_body_is_framed_in_records() {
        let mut output = Output::new();
        let body = vec![b'x'; CONTENT_MAX + 10];
        Stdin.push(Bytes::from(body), &mut output).unwrap();
        Stdin.end(&[], &mut output).unwrap();
        let sent: Vec<u8> = output.chunks().flatten().copied().collect();
        assert_eq!(sent.len(), CONTENT_MAX + 10 + 3 * 8);
        assert_eq!(&sent[..8], [1, 5, 0, 1, 0xff, 0xf8, 0, 0]);
        assert_eq!(&sent[8 + CONTENT_MAX..16 + CONTENT_MAX], [1, 5, 0, 1, 0, 10, 0, 0]);
        assert_eq!(&sent[sent.len() - 8..], [1, 5, 0, 1, 0, 0, 0, 0]);
    }
}
