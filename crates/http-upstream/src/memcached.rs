//! Replies of memcached. (The codec is [`gale_protocol::memcached`])

use gale_base::log_level::Level;
use gale_http::request::response::{Field, FieldList, FieldName, FieldText};
use gale_protocol::http1::Status;
use gale_protocol::memcached::{MemcachedFault, Reply, ReplyParser, ValueDecoder};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes};

use crate::http1::{closed_early, take_front};
use crate::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};

/// Reads one value.
pub struct MemcachedReader {
    /// The key as it is sent.
    key: Bytes,
    parser: ReplyParser,
    gzip_flag: u64,
    value: ValueDecoder,
    has_ended: bool,
    /// True if an unexpected reply has made the connection useless.
    is_lost: bool,
    message: Option<Message>,
}

impl MemcachedReader {
    /// Creates a reader for the value of this key, whose first line has at most `line_max` bytes. A value whose flags
    /// have a bit of `gzip_flag` is compressed.
    pub fn new(key: Bytes, line_max: usize, gzip_flag: u64) -> MemcachedReader {
        let parser = ReplyParser::new(line_max);
        MemcachedReader {
            key,
            parser: if gzip_flag == 0 { parser } else { parser.checking_flags() },
            gzip_flag,
            value: ValueDecoder::new(0),
            has_ended: false,
            is_lost: false,
            message: None,
        }
    }

    fn wrong(&self, fault: MemcachedFault, input: &[u8]) -> Malformed {
        let mut text = Vec::new();
        fault.write_to(input, &self.key, &mut text);
        Malformed(String::from_utf8_lossy(&text).into_owned())
    }

    fn head(&mut self, reply: Reply) -> UpstreamHead {
        let Reply::Found { flags, length } = reply else {
            let text = [b"key: \"", &self.key[..], b"\" was not found by memcached"].concat();
            self.message = Some(Message { level: Level::Info, text });
            self.has_ended = true;
            return UpstreamHead { status: 404, length: Some(0), ..UpstreamHead::default() };
        };
        let mut fields = FieldList::default();
        if flags.unwrap_or(0) & self.gzip_flag != 0 {
            let name = FieldName::from(ResponseField::ContentEncoding);
            fields.push(Field { name, value: FieldText::from(b"gzip".to_vec()) });
        }
        self.value = ValueDecoder::new(length);
        UpstreamHead { status: 200, length: Some(length), fields, ..UpstreamHead::default() }
    }
}

impl ResponseReader for MemcachedReader {
    fn read_head(&mut self, input: &mut Buffer, _: bool) -> Result<HeadRead, Malformed> {
        let mut reply = Reply::default();
        match self.parser.parse(input.readable(), &self.key, &mut reply) {
            Ok(Status::NeedMore) => Ok(HeadRead::Partial),
            Ok(Status::Complete { consumed }) => {
                input.consume(consumed);
                Ok(HeadRead::Whole(Box::new(self.head(reply))))
            }
            Err(fault) => Err(self.wrong(fault, input.readable())),
        }
    }

    fn read_body(&mut self, input: &mut Buffer, has_ended: bool) -> Result<BodyRead, Malformed> {
        if self.has_ended {
            return Ok(BodyRead::End);
        }
        let remaining = usize::try_from(self.value.remaining()).unwrap_or(usize::MAX);
        if remaining > 0 && !input.is_empty() {
            let piece = take_front(input, remaining.min(input.len()))?;
            let decoded = self.value.decode(&piece).map_err(|fault| self.wrong(fault, &piece))?;
            debug_assert_eq!(decoded.consumed, piece.len(), "the decoder consumes the whole piece");
            return Ok(BodyRead::Piece(piece));
        }
        match self.value.decode(input.readable()) {
            Ok(decoded) => {
                input.consume(decoded.consumed);
                self.has_ended = decoded.finished;
            }
            Err(fault) => {
                // The value is complete nevertheless.
                let text = fault.kind.to_string().into_bytes();
                self.message = Some(Message { level: Level::Error, text });
                (self.has_ended, self.is_lost) = (true, true);
            }
        }
        match (self.has_ended, has_ended) {
            (true, _) => Ok(BodyRead::End),
            (false, true) => Err(closed_early()),
            (false, false) => Ok(BodyRead::Partial),
        }
    }

    fn keeps_alive(&self) -> bool {
        self.has_ended && !self.is_lost
    }

    fn take_message(&mut self) -> Option<Message> {
        self.message.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgi::tests::{Read, assert_pieces_do_not_matter, read};

    fn outcome(gzip_flag: u64, reply: &str, closes: bool) -> Result<Read, String> {
        let make = || -> Box<dyn ResponseReader> {
            Box::new(MemcachedReader::new(Bytes::from_static(b"key"), 300, gzip_flag))
        };
        assert_pieces_do_not_matter(&make, reply.as_bytes(), closes)
    }

    #[test]
    fn a_value_is_the_body_and_its_end_belongs_to_it() {
        let found = outcome(0, "VALUE key 5 6\r\nva\r\nue\r\nEND\r\n", false).unwrap();
        assert_eq!((found.status, &found.body[..], found.keeps_alive), (200, &b"va\r\nue"[..], true));
        let empty = outcome(0, "VALUE key 0 0\r\n\r\nEND\r\n", false).unwrap();
        assert!(empty.body.is_empty() && empty.keeps_alive);
        let mut reader = MemcachedReader::new(Bytes::from_static(b"key"), 300, 0);
        let more = read(&mut reader, &[b"VALUE key 0 1\r\nv\r\nEND\r\nmore"], false).unwrap();
        assert_eq!((&more.body[..], more.keeps_alive), (&b"v"[..], false));
        let short = outcome(0, "VALUE key 0 5\r\nvalu", true);
        assert_eq!(short.unwrap_err(), "upstream prematurely closed connection");
        let cut = outcome(0, "VALUE key 0 5\r\nvalue\r\nEN", true);
        assert_eq!(cut.unwrap_err(), "upstream prematurely closed connection");
    }

    #[test]
    fn missing_key_is_404() {
        let missing = outcome(0, "END\r\n", false).unwrap();
        assert_eq!((missing.status, missing.keeps_alive), (404, true));
        assert_eq!(missing.messages, ["key: \"key\" was not found by memcached"]);
    }

    #[test]
    fn a_flag_tells_that_a_value_is_compressed() {
        let coding = |flags: &str| {
            let reply = format!("VALUE key {flags} 1\r\nv\r\nEND\r\n");
            outcome(2, &reply, false).map(|found| !found.fields.is_empty())
        };
        assert_eq!((coding("3"), coding("1")), (Ok(true), Ok(false)));
        let message = "memcached sent invalid flags in response \"VALUE key x 1\" for key \"key\"";
        assert_eq!(coding("x"), Err(message.to_owned()));
        assert!(outcome(0, "VALUE key x 1\r\nv\r\nEND\r\n", false).is_ok());
    }

    #[test]
    fn a_wrong_end_leaves_the_value_whole() {
        let make = || MemcachedReader::new(Bytes::from_static(b"key"), 300, 0);
        let read = read(&mut make(), &[b"VALUE key 0 1\r\nv\r\nend\r\n"], false).unwrap();
        assert_eq!((&read.body[..], read.keeps_alive), (&b"v"[..], false));
        assert_eq!(read.messages, ["memcached sent invalid trailer"]);
    }

    #[test]
    fn nonsense_is_told_in_nginx_s_words() {
        let error = |reply: &str| outcome(0, reply, true).unwrap_err();
        assert_eq!(error("SERVER_ERROR\r\n"), "memcached sent invalid response: \"SERVER_ERROR\"");
        let message = "memcached sent invalid key in response \"VALUE other 0 1\" for key \"key\"";
        assert_eq!(error("VALUE other 0 1\r\nv\r\nEND\r\n"), message);
        assert_eq!(error(&"x".repeat(400)), "upstream sent too big header");
    }
}
