//! Replies of memcached. (The codec is [`gale_protocol::memcached`])

use gale_base::log_level::Level;
use gale_protocol::http1::Status;
use gale_protocol::memcached::{MemcachedFault, Reply, ReplyParser, ValueDecoder};
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes};

use crate::request::response::{Field, FieldList, FieldName, FieldText};
use crate::upstream::http1::{closed_early, take_front};
use crate::upstream::receiving::{BodyRead, HeadRead, Malformed, Message, ResponseReader, UpstreamHead};

/// Reads one value.
pub struct MemcachedReader {
    /// As it is sent.
    key: Bytes,
    parser: ReplyParser,
    gzip_flag: u64,
    value: ValueDecoder,
    has_ended: bool,
    /// What came is not what had to come: the connection is of no use any more.
    is_lost: bool,
    message: Option<Message>,
}

impl MemcachedReader {
    /// A reader of the value of this key, whose first line has at most so many bytes. A value whose flags have a bit of
    /// `gzip_flag` is compressed.
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
                Ok(HeadRead::Whole(self.head(reply)))
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
            debug_assert_eq!(decoded.consumed, piece.len(), "all of it is the value's");
            return Ok(BodyRead::Piece(piece));
        }
        match self.value.decode(input.readable()) {
            Ok(decoded) => {
                input.consume(decoded.consumed);
                self.has_ended = decoded.finished;
            }
            Err(fault) => {
                // The value is whole all the same.
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
