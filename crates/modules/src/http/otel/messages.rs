//! The messages of OTLP that a server needs, in the form of protocol buffers: opentelemetry-proto 1, `trace.proto`,
//! `common.proto`, `resource.proto` and `trace_service.proto`. Fields that are never sent are not there.
//! <https://github.com/open-telemetry/opentelemetry-proto/tree/main/opentelemetry/proto>

use prost::{Message, Oneof};

/// What a collector is asked to take.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

/// What it says of that.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ExportTraceServiceResponse {
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<ExportTracePartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ExportTracePartialSuccess {
    #[prost(int64, tag = "1")]
    pub rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// Each is an encoded [`Span`]: a message within a message has the form of bytes.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub spans: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InstrumentationScope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Span {
    #[prost(bytes = "vec", tag = "1")]
    pub trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub span_id: Vec<u8>,
    #[prost(string, tag = "3")]
    pub trace_state: String,
    #[prost(bytes = "vec", tag = "4")]
    pub parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub name: String,
    #[prost(int32, tag = "6")]
    pub kind: i32,
    #[prost(fixed64, tag = "7")]
    pub start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub attributes: Vec<KeyValue>,
    #[prost(message, optional, tag = "15")]
    pub status: Option<Status>,
}

/// `Span.SPAN_KIND_SERVER`
pub(super) const SPAN_KIND_SERVER: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {
    #[prost(int32, tag = "3")]
    pub code: i32,
}

/// `Status.STATUS_CODE_ERROR`
pub(super) const STATUS_CODE_ERROR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AnyValue {
    #[prost(oneof = "Value", tags = "1, 3, 5")]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Value {
    #[prost(string, tag = "1")]
    String(String),
    #[prost(int64, tag = "3")]
    Int(i64),
    #[prost(message, tag = "5")]
    Array(ArrayValue),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ArrayValue {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<AnyValue>,
}

impl KeyValue {
    /// An attribute with a text. Strings of protocol buffers are UTF-8, and a collector may refuse all that comes with
    /// one that is not: what a client has sent otherwise becomes U+FFFD.
    pub fn text(key: &str, text: &[u8]) -> KeyValue {
        KeyValue::of(key, Value::String(utf8(text)))
    }

    /// An attribute with a number.
    pub fn number(key: &str, number: u64) -> KeyValue {
        KeyValue::of(key, Value::Int(i64::try_from(number).unwrap_or(i64::MAX)))
    }

    /// An attribute with a list of one text.
    pub fn list(key: &str, text: &[u8]) -> KeyValue {
        let value = AnyValue { value: Some(Value::String(utf8(text))) };
        KeyValue::of(key, Value::Array(ArrayValue { values: vec![value] }))
    }

    fn of(key: &str, value: Value) -> KeyValue {
        KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }) }
    }
}

/// A text as strings of protocol buffers have it.
pub(super) fn utf8(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_what_the_definitions_say_byte_by_byte() {
        let span = Span {
            trace_id: vec![1, 2],
            span_id: vec![3],
            name: "/".to_owned(),
            kind: SPAN_KIND_SERVER,
            start_time_unix_nano: 1,
            attributes: vec![KeyValue::text("a", b"\xff"), KeyValue::number("b", 300), KeyValue::list("c", b"x")],
            status: Some(Status { code: STATUS_CODE_ERROR }),
            ..Span::default()
        };
        let scope = InstrumentationScope { name: "s".to_owned(), version: String::new() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans: vec![span.encode_to_vec()] }];
        let request = ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { resource: None, scope_spans }] };
        let span = b"\x0a\x02\x01\x02\x12\x01\x03\x2a\x01/\x30\x02\x39\x01\0\0\0\0\0\0\0\
            \x4a\x0a\x0a\x01a\x12\x05\x0a\x03\xef\xbf\xbd\x4a\x08\x0a\x01b\x12\x03\x18\xac\x02\
            \x4a\x0c\x0a\x01c\x12\x07\x2a\x05\x0a\x03\x0a\x01x\x7a\x02\x18\x02";
        let length = u8::try_from(span.len()).unwrap();
        let expected = [&[0x0a, length + 9, 0x12, length + 7, 0x0a, 3, 0x0a, 1, b's', 0x12, length][..], span].concat();
        assert_eq!(request.encode_to_vec(), expected);
    }

    #[test]
    fn an_answer_tells_how_much_was_refused() {
        let response = ExportTraceServiceResponse::decode(&b"\x0a\x06\x08\x03\x12\x02no"[..]).unwrap();
        let told = response.partial_success.unwrap();
        assert_eq!((told.rejected_spans, &*told.error_message), (3, "no"));
        assert_eq!(ExportTraceServiceResponse::decode(&b""[..]).unwrap().partial_success, None);
        assert!(ExportTraceServiceResponse::decode(&b"\x0a\xff"[..]).is_err());
    }
}
