//! Messages of OTLP that the exporter needs, in protocol buffers: opentelemetry-proto 1, `trace.proto`, `common.proto`,
//! `resource.proto` and `trace_service.proto`. Unused fields are left out.
//! <https://github.com/open-telemetry/opentelemetry-proto/tree/main/opentelemetry/proto>

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(super) struct ExportTraceServiceRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

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
    /// Encoded spans (`encoder.rs`): a nested message has the same encoding as bytes.
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
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AnyValue {
    #[prost(oneof = "Value", tags = "1")]
    pub value: Option<Value>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Value {
    #[prost(string, tag = "1")]
    String(String),
}

impl KeyValue {
    /// Creates an attribute with a text.
    pub fn text(key: &str, text: &[u8]) -> KeyValue {
        KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(Value::String(utf8(text))) }) }
    }
}

/// Converts a text to a string in protocol buffers.
pub(super) fn utf8(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_follows_the_definitions_byte_by_byte() {
        let span = b"as it is encoded";
        let resource = Resource { attributes: vec![KeyValue::text("a", b"\xff")] };
        let scope = InstrumentationScope { name: "s".to_owned(), version: String::new() };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans: vec![span.to_vec()] }];
        let request =
            ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { resource: Some(resource), scope_spans }] };
        let length = u8::try_from(span.len()).unwrap();
        let resource = b"\x0a\x0c\x0a\x0a\x0a\x01a\x12\x05\x0a\x03\xef\xbf\xbd";
        let scope = [0x12, length + 7, 0x0a, 3, 0x0a, 1, b's', 0x12, length];
        let expected = [&[0x0a, length + 9 + 14][..], resource, &scope, span].concat();
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
