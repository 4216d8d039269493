//! FastCGI 1.0 for the web server's side: writes requests and decodes responses.
//!
//! As in nginx a connection carries one request at a time, whose id is always 1. Management records are ignored.
//! Records of another request are refused: no such request was made, so the application is out of step, and its next
//! records may belong to another client. Invariant: the decoder stores at most the header of a record.
//!
//! ```text
//! record   version 1 | type | request id (2) | content length (2) | padding length | reserved | content | padding
//! request  BEGIN_REQUEST, PARAMS ..., PARAMS empty, STDIN ..., STDIN empty
//! response STDOUT and STDERR ..., END_REQUEST
//! ```

use std::fmt;
use std::ops::Range;

use crate::gateway::{ParamsWriter, UnwritableParams};

/// The id of all requests: without multiplexing no other is needed.
const REQUEST_ID: u16 = 1;

/// Maximum content of the records written, in bytes: a multiple of 8 that fits in 16 bits, so that only the last record
/// of a stream needs padding.
pub const CONTENT_MAX: usize = 0xfff8;

const HEADER_LENGTH: usize = 8;

mod record_type {
    pub const BEGIN_REQUEST: u8 = 1;
    pub const ABORT_REQUEST: u8 = 2;
    pub const END_REQUEST: u8 = 3;
    pub const PARAMS: u8 = 4;
    pub const STDIN: u8 = 5;
    pub const STDOUT: u8 = 6;
    pub const STDERR: u8 = 7;
    pub const GET_VALUES_RESULT: u8 = 10;
    pub const UNKNOWN_TYPE: u8 = 11;
}

const fn header(record_type: u8, content_length: usize, padding_length: u8) -> [u8; HEADER_LENGTH] {
    debug_assert!(content_length <= u16::MAX as usize);
    let [id_high, id_low] = REQUEST_ID.to_be_bytes();
    let [length_high, length_low] = (content_length as u16).to_be_bytes();
    [1, record_type, id_high, id_low, length_high, length_low, padding_length, 0]
}

/// Appends the record that begins a request with the role responder. If `keep_connection`, the application keeps the
/// connection open after the response.
pub fn write_begin_request(out: &mut Vec<u8>, keep_connection: bool) {
    const RESPONDER: [u8; 2] = [0, 1];
    out.extend_from_slice(&header(record_type::BEGIN_REQUEST, 8, 0));
    out.extend_from_slice(&RESPONDER);
    out.extend_from_slice(&[u8::from(keep_connection), 0, 0, 0, 0, 0]);
}

/// Appends the record that asks the application to abort the request.
pub fn write_abort_request(out: &mut Vec<u8>) {
    out.extend_from_slice(&header(record_type::ABORT_REQUEST, 0, 0));
}

/// Returns the record header for a piece of the request body of 1 to [`CONTENT_MAX`] bytes. The piece follows without
/// padding, and may be sent from another buffer.
pub fn stdin_header(length: usize) -> [u8; HEADER_LENGTH] {
    debug_assert!((1..=CONTENT_MAX).contains(&length), "an empty piece ends the body");
    header(record_type::STDIN, length, 0)
}

/// The record that ends the request body; required even for a request without body.
pub const STDIN_END: [u8; HEADER_LENGTH] = header(record_type::STDIN, 0, 0);

/// Writes parameters as PARAMS records. A parameter that fits in one record is not split: the stream may be split
/// anywhere (FastCGI 1.0 §3.3), but PHP parses each record separately.
#[derive(Debug)]
pub struct Params<'o> {
    out: &'o mut Vec<u8>,
    /// Position of the header of the current record.
    record: Option<usize>,
}

impl<'o> Params<'o> {
    /// Creates a writer that appends to `out`.
    pub fn new(out: &'o mut Vec<u8>) -> Self {
        Self { out, record: None }
    }

    /// Ends the parameters; without it the request is incomplete.
    pub fn finish(mut self) {
        self.close_record();
        self.out.extend_from_slice(&header(record_type::PARAMS, 0, 0));
    }

    /// Appends a parameter that is longer than a record.
    #[cold]
    fn push_cut(&mut self, name: &[u8], value: &[u8]) {
        let mut lengths = Vec::new();
        push_length(&mut lengths, name.len());
        push_length(&mut lengths, value.len());
        for bytes in [&lengths, name, value] {
            self.append(bytes);
        }
    }

    /// Appends bytes, in as many records as necessary.
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.begin_record();
            let (now, later) = bytes.split_at(bytes.len().min(self.room()));
            self.out.extend_from_slice(now);
            bytes = later;
            if self.room() == 0 {
                self.close_record();
            }
        }
    }

    fn begin_record(&mut self) {
        if self.record.is_none() {
            self.record = Some(self.out.len());
            self.out.extend_from_slice(&[0; HEADER_LENGTH]);
        }
    }

    /// Number of bytes that still fit in the current record.
    fn room(&self) -> usize {
        CONTENT_MAX - self.record.map_or(0, |start| self.out.len() - start - HEADER_LENGTH)
    }

    fn close_record(&mut self) {
        let Some(start) = self.record.take() else {
            return;
        };
        let length = self.out.len() - start - HEADER_LENGTH;
        let padding = length.wrapping_neg() % 8;
        let header = header(record_type::PARAMS, length, padding as u8);
        self.out[start..start + HEADER_LENGTH].copy_from_slice(&header);
        self.out.extend_from_slice(&[0; 8][..padding]);
    }
}

impl ParamsWriter for Params<'_> {
    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), UnwritableParams> {
        let lengths = length_bytes(name.len())? + length_bytes(value.len())?;
        let bytes = lengths.saturating_add(name.len()).saturating_add(value.len());
        if bytes > self.room() {
            self.close_record();
        }
        if bytes > CONTENT_MAX {
            self.push_cut(name, value);
            return Ok(());
        }
        self.begin_record();
        self.out.reserve(bytes);
        push_length(self.out, name.len());
        push_length(self.out, value.len());
        self.out.extend_from_slice(name);
        self.out.extend_from_slice(value);
        Ok(())
    }
}

/// Size of an encoded length: one byte up to 127, otherwise four bytes with the highest bit set.
fn length_bytes(length: usize) -> Result<usize, UnwritableParams> {
    match length {
        0..=0x7f => Ok(1),
        0x80..=0x7fff_ffff => Ok(4),
        _ => Err(UnwritableParams::TooBig { length }),
    }
}

fn push_length(out: &mut Vec<u8>, length: usize) {
    match length {
        0..=0x7f => out.push(length as u8),
        _ => out.extend_from_slice(&(length as u32 | 0x8000_0000).to_be_bytes()),
    }
}

/// An event in a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A piece of the response: a range of the input, never empty.
    Stdout(Range<usize>),
    /// The response is complete; further messages for the log may follow.
    StdoutEnd,
    /// A piece of a message for the log: a range of the input, never empty. See [`trim_message`].
    Stderr(Range<usize>),
    /// The request has ended.
    EndRequest(EndRequest),
}

/// Content of END_REQUEST.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndRequest {
    /// Exit status of the application.
    pub app_status: u32,
    /// Protocol status.
    pub protocol_status: ProtocolStatus,
}

/// Protocol status of a request: FastCGI 1.0 §5.5.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProtocolStatus {
    /// The request was completed.
    RequestComplete,
    /// The application accepts only one request per connection.
    CannotMultiplex,
    /// The application is overloaded.
    Overloaded,
    /// The application does not support the role responder.
    UnknownRole,
    /// An undefined number.
    Other(u8),
}

impl ProtocolStatus {
    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::RequestComplete,
            1 => Self::CannotMultiplex,
            2 => Self::Overloaded,
            3 => Self::UnknownRole,
            number => Self::Other(number),
        }
    }
}

/// Result of one decoding step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decoded {
    /// Number of input bytes processed, including those of the event.
    pub consumed: usize,
    /// The event, if any.
    pub event: Option<Event>,
}

/// A protocol violation by an application. `Display` gives nginx's message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FastCgiFault {
    /// A version other than 1.
    UnsupportedVersion(u8),
    /// A record type not allowed in a response.
    InvalidRecordType(u8),
    /// A record of another request.
    UnexpectedRequestId(u16),
}

impl fmt::Display for FastCgiFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::UnsupportedVersion(version) => {
                write!(f, "upstream sent unsupported FastCGI protocol version: {version}")
            }
            Self::InvalidRecordType(number) => write!(f, "upstream sent invalid FastCGI record type: {number}"),
            Self::UnexpectedRequestId(id) => match id.to_be_bytes() {
                [0, low] => write!(f, "upstream sent unexpected FastCGI request id low byte: {low}"),
                [high, _] => write!(f, "upstream sent unexpected FastCGI request id high byte: {high}"),
            },
        }
    }
}

impl std::error::Error for FastCgiFault {}

/// Incremental decoder for the records of one response.
#[derive(Clone, Debug, Default)]
pub struct ResponseDecoder {
    state: State,
    /// First `filled` bytes of the current record's header, later of its END_REQUEST body.
    gathered: [u8; HEADER_LENGTH],
    filled: u8,
    content_left: u16,
    padding_left: u8,
    stdout_ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Header,
    Content(Kind),
    Padding {
        is_last: bool,
    },
    Finished,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Stdout,
    Stderr,
    EndRequest,
    /// A management record.
    Management,
}

impl ResponseDecoder {
    /// Creates a decoder at the beginning of a response.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` after END_REQUEST and its padding. A connection that is kept open can then be reused, and further
    /// bytes would be unsolicited.
    pub fn is_finished(&self) -> bool {
        self.state == State::Finished
    }

    /// Returns `true` if the application has ended its response.
    pub fn has_stdout_ended(&self) -> bool {
        self.stdout_ended
    }

    /// Number of bytes of the response in the current record that have not been returned yet.
    pub fn stdout_remaining(&self) -> usize {
        if self.state == State::Content(Kind::Stdout) { usize::from(self.content_left) } else { 0 }
    }

    /// Decodes up to the next event or the end of the input, whichever comes first.
    ///
    /// Call again with the input after `consumed` until none is left or [`ResponseDecoder::is_finished`]. After a fault
    /// the decoder must not be used any more.
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, FastCgiFault> {
        let mut at = 0;
        while at < input.len() && self.state != State::Finished {
            let rest = &input[at..];
            let (taken, event) = match self.state {
                State::Header => self.take_header(rest)?,
                State::Content(kind) => self.take_content(kind, rest),
                State::Padding { .. } | State::Finished => (self.take_padding(rest), None),
            };
            let start = at;
            at += taken;
            if let Some(event) = event {
                let event = match event {
                    Event::Stdout(range) => Event::Stdout(start + range.start..start + range.end),
                    Event::Stderr(range) => Event::Stderr(start + range.start..start + range.end),
                    event => event,
                };
                return Ok(Decoded { consumed: at, event: Some(event) });
            }
        }
        Ok(Decoded { consumed: at, event: None })
    }

    /// Copies input to the eight gathered bytes; returns the number of bytes copied.
    fn gather(&mut self, rest: &[u8]) -> usize {
        let filled = usize::from(self.filled);
        let taken = rest.len().min(HEADER_LENGTH - filled);
        self.gathered[filled..filled + taken].copy_from_slice(&rest[..taken]);
        self.filled += taken as u8;
        taken
    }

    fn take_header(&mut self, rest: &[u8]) -> Result<(usize, Option<Event>), FastCgiFault> {
        let taken = self.gather(rest);
        let kind = check_header(&self.gathered[..usize::from(self.filled)])?;
        let (true, Some(kind)) = (usize::from(self.filled) == HEADER_LENGTH, kind) else {
            return Ok((taken, None));
        };
        let [_, _, _, _, length_high, length_low, padding, _] = self.gathered;
        self.content_left = u16::from_be_bytes([length_high, length_low]);
        self.padding_left = padding;
        self.gathered = [0; HEADER_LENGTH];
        self.filled = 0;
        self.state = State::Content(kind);
        if self.content_left > 0 {
            return Ok((taken, None));
        }
        let event = self.end_content(kind);
        let is_end = kind == Kind::Stdout && !std::mem::replace(&mut self.stdout_ended, true);
        Ok((taken, if is_end { Some(Event::StdoutEnd) } else { event }))
    }

    fn take_content(&mut self, kind: Kind, rest: &[u8]) -> (usize, Option<Event>) {
        let length = rest.len().min(usize::from(self.content_left));
        self.content_left -= length as u16;
        if kind == Kind::EndRequest {
            self.gather(&rest[..length]); // bytes after the first eight are ignored
        }
        let end = if self.content_left == 0 { self.end_content(kind) } else { None };
        let event = match kind {
            Kind::Stdout => {
                // An empty record ends the stream (FastCGI 1.0 §3.3), but php-fpm may send more after one (PHP bug
                // 72185). As in nginx it is accepted, and only END_REQUEST ends the request.
                self.stdout_ended = false;
                Some(Event::Stdout(0..length))
            }
            Kind::Stderr => Some(Event::Stderr(0..length)),
            Kind::EndRequest | Kind::Management => end,
        };
        (length, event)
    }

    /// Handles the end of a record's content; returns the event for END_REQUEST.
    fn end_content(&mut self, kind: Kind) -> Option<Event> {
        let is_last = kind == Kind::EndRequest;
        self.state = State::Padding { is_last };
        self.end_padding();
        let [a, b, c, d, status, ..] = self.gathered;
        is_last.then(|| {
            Event::EndRequest(EndRequest {
                app_status: u32::from_be_bytes([a, b, c, d]),
                protocol_status: ProtocolStatus::from_number(status),
            })
        })
    }

    fn take_padding(&mut self, rest: &[u8]) -> usize {
        let length = rest.len().min(usize::from(self.padding_left));
        self.padding_left -= length as u8;
        self.end_padding();
        length
    }

    fn end_padding(&mut self) {
        if let State::Padding { is_last } = self.state
            && self.padding_left == 0
        {
            self.state = if is_last { State::Finished } else { State::Header };
        }
    }
}

/// Checks the available part of a header, byte by byte. Returns the kind once type and id have arrived.
fn check_header(header: &[u8]) -> Result<Option<Kind>, FastCgiFault> {
    if let Some(&version) = header.first()
        && version != 1
    {
        return Err(FastCgiFault::UnsupportedVersion(version));
    }
    let Some(&number) = header.get(1) else {
        return Ok(None);
    };
    let (kind, id) = match number {
        record_type::STDOUT => (Kind::Stdout, REQUEST_ID),
        record_type::STDERR => (Kind::Stderr, REQUEST_ID),
        record_type::END_REQUEST => (Kind::EndRequest, REQUEST_ID),
        record_type::GET_VALUES_RESULT | record_type::UNKNOWN_TYPE => (Kind::Management, 0),
        number => return Err(FastCgiFault::InvalidRecordType(number)),
    };
    let Some(&[high, low]) = header.get(2..4) else {
        return Ok(None);
    };
    let received = u16::from_be_bytes([high, low]);
    if received == id { Ok(Some(kind)) } else { Err(FastCgiFault::UnexpectedRequestId(received)) }
}

/// Returns a message without trailing line ends, dots and spaces, as nginx logs it.
pub fn trim_message(text: &[u8]) -> &[u8] {
    let end = text.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n' | b'.' | b' ')).map_or(0, |last| last + 1);
    &text[..end]
}
