//! Encoder of spans in protocol buffers, written directly as bytes: building a structure with a string for each
//! attribute costs four times as many instructions. (`Span` of opentelemetry-proto 1, `trace.proto`;
//! <https://protobuf.dev/programming-guides/encoding/>)
//!
//! ```text
//!   tag and form │ length │ bytes        a text, or a message within this one
//!   tag and form │ number                in pieces of seven bits, the lowest first
//! ```
//!
//! Fields are written in the order of their tags. An empty or zero value is left out if the definition makes that
//! equivalent.

use std::borrow::Cow;

/// Wire types.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;

// Tags of `Span`.
const TRACE_ID: u8 = 1;
const SPAN_ID: u8 = 2;
const TRACE_STATE: u8 = 3;
const PARENT_SPAN_ID: u8 = 4;
const NAME: u8 = 5;
const KIND: u8 = 6;
const START_TIME: u8 = 7;
const END_TIME: u8 = 8;
const ATTRIBUTES: u8 = 9;
const STATUS: u8 = 15;

// Tags of `KeyValue`, `AnyValue`, `ArrayValue` and `Status`.
const KEY: u8 = 1;
const VALUE: u8 = 2;
const STRING: u8 = 1;
const INT: u8 = 3;
const ARRAY: u8 = 5;
const VALUES: u8 = 1;
const CODE: u8 = 3;

/// `Span.SPAN_KIND_SERVER`.
const KIND_SERVER: u64 = 2;
/// `Status.STATUS_CODE_ERROR`.
const CODE_ERROR: u64 = 2;

/// Initial capacity, enough for most spans.
const SPAN_BYTES_USUAL: usize = 512;

/// A span that is being encoded.
pub(super) struct SpanEncoder(Vec<u8>);

/// Fields before the attributes.
pub(super) struct Begin<'s> {
    pub trace_id: &'s [u8],
    pub span_id: &'s [u8],
    pub trace_state: &'s [u8],
    /// Empty for none.
    pub parent_span_id: &'s [u8],
    pub name: &'s [u8],
    pub start_nanos: u64,
    pub end_nanos: u64,
}

impl SpanEncoder {
    pub fn begin(begin: &Begin<'_>) -> SpanEncoder {
        let mut encoder = SpanEncoder(Vec::with_capacity(SPAN_BYTES_USUAL));
        encoder.bytes_unless_empty(TRACE_ID, begin.trace_id);
        encoder.bytes_unless_empty(SPAN_ID, begin.span_id);
        encoder.bytes_unless_empty(TRACE_STATE, utf8(begin.trace_state).as_bytes());
        encoder.bytes_unless_empty(PARENT_SPAN_ID, begin.parent_span_id);
        encoder.bytes_unless_empty(NAME, utf8(begin.name).as_bytes());
        encoder.number(KIND, KIND_SERVER);
        encoder.fixed(START_TIME, begin.start_nanos);
        encoder.fixed(END_TIME, begin.end_nanos);
        encoder
    }

    /// Adds an attribute with a text. Strings in protocol buffers are UTF-8, and a collector may refuse a whole message
    /// for an invalid one, so invalid bytes of a client become U+FFFD.
    pub fn text(&mut self, key: &str, text: &[u8]) {
        let text = utf8(text);
        self.attribute(key, field_length(text.len()));
        self.bytes(STRING, text.as_bytes());
    }

    /// Adds an attribute with a number.
    pub fn number_attribute(&mut self, key: &str, number: u64) {
        // The number is signed in `AnyValue`.
        let number = number.min(i64::MAX as u64);
        self.attribute(key, 1 + varint_length(number));
        self.number(INT, number);
    }

    /// Adds an attribute with a list of one text.
    pub fn list(&mut self, key: &str, text: &[u8]) {
        let text = utf8(text);
        let value = field_length(text.len());
        let array = field_length(value);
        self.attribute(key, field_length(array));
        self.length(ARRAY, array);
        self.length(VALUES, value);
        self.bytes(STRING, text.as_bytes());
    }

    /// Returns the complete span. `is_error`: the server is at fault.
    pub fn end(mut self, is_error: bool) -> Vec<u8> {
        if is_error {
            self.length(STATUS, 1 + varint_length(CODE_ERROR));
            self.number(CODE, CODE_ERROR);
        }
        self.0
    }

    /// Writes everything before an attribute's value, which has this length.
    fn attribute(&mut self, key: &str, value: usize) {
        self.length(ATTRIBUTES, field_length(key.len()) + field_length(value));
        self.bytes(KEY, key.as_bytes());
        self.length(VALUE, value);
    }

    fn bytes_unless_empty(&mut self, tag: u8, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes(tag, bytes);
        }
    }

    fn bytes(&mut self, tag: u8, bytes: &[u8]) {
        self.length(tag, bytes.len());
        self.0.extend_from_slice(bytes);
    }

    fn length(&mut self, tag: u8, length: usize) {
        self.0.push(tag << 3 | BYTES);
        self.varint(length as u64);
    }

    fn number(&mut self, tag: u8, number: u64) {
        self.0.push(tag << 3 | VARINT);
        self.varint(number);
    }

    fn fixed(&mut self, tag: u8, number: u64) {
        if number > 0 {
            self.0.push(tag << 3 | FIXED64);
            self.0.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}

/// Converts a text to a string in protocol buffers.
fn utf8(text: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(text)
}

/// Returns the length of a field with this many bytes, including its tag and length.
fn field_length(bytes: usize) -> usize {
    1 + varint_length(bytes as u64) + bytes
}

fn varint_length(number: u64) -> usize {
    ((u64::BITS - (number | 1).leading_zeros()).div_ceil(7)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a field with this tag: a message, or a text.
    fn field(tag: u8, bytes: &[u8]) -> Vec<u8> {
        let length = u8::try_from(bytes.len()).expect("short");
        assert!(length < 0x80);
        [&[tag << 3 | BYTES, length], bytes].concat()
    }

    #[test]
    fn span_follows_the_definitions_byte_by_byte() {
        let begin = Begin {
            trace_id: &[1, 2],
            span_id: &[3],
            trace_state: b"",
            parent_span_id: b"",
            name: b"/",
            start_nanos: 1,
            end_nanos: 0,
        };
        let mut encoder = SpanEncoder::begin(&begin);
        encoder.text("a", b"\xff");
        encoder.number_attribute("b", 300);
        encoder.list("c", b"x");
        let expected = b"\x0a\x02\x01\x02\x12\x01\x03\x2a\x01/\x30\x02\x39\x01\0\0\0\0\0\0\0\
            \x4a\x0a\x0a\x01a\x12\x05\x0a\x03\xef\xbf\xbd\x4a\x08\x0a\x01b\x12\x03\x18\xac\x02\
            \x4a\x0c\x0a\x01c\x12\x07\x2a\x05\x0a\x03\x0a\x01x\x7a\x02\x18\x02";
        assert_eq!(encoder.end(true), expected);
        let begin = Begin { trace_state: b"s", parent_span_id: &[4], name: b"", start_nanos: 0, end_nanos: 2, ..begin };
        let expected = [&field(1, &[1, 2])[..], &field(2, &[3]), &field(3, b"s"), &field(4, &[4]), b"\x30\x02\x41\x02"];
        assert_eq!(SpanEncoder::begin(&begin).end(false), [&expected.concat()[..], &[0; 7]].concat());
    }

    #[test]
    fn lengths_match_the_written_bytes() {
        let of = |number: u64| {
            let mut encoder = SpanEncoder(Vec::new());
            encoder.varint(number);
            encoder.0.len()
        };
        for bits in 0..64 {
            for number in [(1_u64 << bits) - 1, 1 << bits, u64::MAX >> (63 - bits)] {
                assert_eq!(of(number), varint_length(number), "{number}");
            }
        }
        // Lengths around which the enclosing lengths need another byte, one after the other.
        for length in (100..140).chain(16_300..16_400) {
            let mut encoder = SpanEncoder(Vec::new());
            encoder.list("k", &vec![b'x'; length]);
            let mut rest = &encoder.0[..];
            for tag in [ATTRIBUTES, VALUE, ARRAY, VALUES, STRING] {
                if tag == VALUE {
                    rest = rest.strip_prefix(&field(KEY, b"k")[..]).expect("the key");
                }
                assert_eq!(rest[0], tag << 3 | BYTES);
                let digits = rest[1..].iter().take_while(|&&byte| byte >= 0x80).count() + 1;
                let told = rest[1..=digits].iter().rev().fold(0, |told, &byte| told << 7 | usize::from(byte & 0x7f));
                rest = &rest[1 + digits..];
                assert_eq!(told, rest.len(), "{length}, {tag}");
            }
            assert_eq!(rest.len(), length);
        }
    }
}
