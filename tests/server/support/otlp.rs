//! A collector's side of OTLP: parses messages by the field numbers of the published definitions
//! (<https://github.com/open-telemetry/opentelemetry-proto>). A malformed message fails the test.
//!
//! Shares no code with the server's encoder.

use std::collections::BTreeMap;

/// A field of a message: its number and its value.
enum Value<'m> {
    Number(u64),
    Fixed(u64),
    Bytes(&'m [u8]),
}

/// The contents of one export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    pub resource: BTreeMap<String, String>,
    pub scope_name: String,
    pub spans: Vec<Span>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Hexadecimal, as the next two fields.
    pub trace_id: String,
    pub span_id: String,
    pub parent_id: String,
    pub trace_state: String,
    pub name: String,
    pub kind: u64,
    pub start: u64,
    pub end: u64,
    pub attributes: BTreeMap<String, String>,
    pub status: u64,
}

impl Span {
    #[track_caller]
    pub fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).unwrap_or_else(|| panic!("no {name}: {self:?}"))
    }
}

/// Parses an `ExportTraceServiceRequest` with one resource and one scope.
#[track_caller]
pub fn export(message: &[u8]) -> Export {
    let mut export = Export::default();
    let [(1, Value::Bytes(resource_spans))] = &fields(message)[..] else { panic!("not one resource: {message:?}") };
    for (number, value) in fields(resource_spans) {
        match (number, value) {
            (1, Value::Bytes(resource)) => {
                for (number, value) in fields(resource) {
                    let (1, Value::Bytes(pair)) = (number, value) else { panic!("a resource with a field {number}") };
                    add_attribute(pair, &mut export.resource);
                }
            }
            (2, Value::Bytes(scope_spans)) => {
                assert!(export.spans.is_empty(), "two scopes");
                for (number, value) in fields(scope_spans) {
                    match (number, value) {
                        (1, Value::Bytes(scope)) => match &fields(scope)[0] {
                            (1, Value::Bytes(name)) => export.scope_name = text(name),
                            _ => panic!("a scope without a name"),
                        },
                        (2, Value::Bytes(own)) => export.spans.push(span(own)),
                        _ => panic!("scope_spans with a field {number}"),
                    }
                }
            }
            _ => panic!("resource_spans with a field {number}"),
        }
    }
    export
}

/// Parses an export in a gRPC frame.
#[track_caller]
pub fn grpc_export(body: &[u8]) -> Export {
    let (&[compressed, length @ ..], message) = body.split_first_chunk::<5>().expect("a frame of gRPC");
    assert_eq!((compressed, u32::from_be_bytes(length) as usize), (0, message.len()));
    export(message)
}

#[track_caller]
fn span(message: &[u8]) -> Span {
    let mut span = Span::default();
    for (number, value) in fields(message) {
        match (number, value) {
            (1, Value::Bytes(id)) => span.trace_id = hex(id, 16),
            (2, Value::Bytes(id)) => span.span_id = hex(id, 8),
            (3, Value::Bytes(state)) => span.trace_state = text(state),
            (4, Value::Bytes(id)) => span.parent_id = hex(id, 8),
            (5, Value::Bytes(name)) => span.name = text(name),
            (6, Value::Number(kind)) => span.kind = kind,
            (7, Value::Fixed(time)) => span.start = time,
            (8, Value::Fixed(time)) => span.end = time,
            (9, Value::Bytes(pair)) => add_attribute(pair, &mut span.attributes),
            (15, Value::Bytes(status)) => match &fields(status)[..] {
                [(3, Value::Number(code))] => span.status = *code,
                _ => panic!("a status without a code"),
            },
            _ => panic!("a span with a field {number}"),
        }
    }
    span
}

/// Adds a `KeyValue`; a list is shown in brackets.
#[track_caller]
fn add_attribute(pair: &[u8], attributes: &mut BTreeMap<String, String>) {
    let [(1, Value::Bytes(key)), (2, Value::Bytes(value))] = fields(pair)[..] else { panic!("no pair: {pair:?}") };
    assert_eq!(attributes.insert(text(key), any_value(value)), None, "twice");
}

#[track_caller]
fn any_value(message: &[u8]) -> String {
    match fields(message)[..] {
        [(1, Value::Bytes(own))] => text(own),
        [(3, Value::Number(number))] => number.to_string(),
        [(5, Value::Bytes(list))] => {
            let values = fields(list).into_iter().map(|(number, value)| match (number, value) {
                (1, Value::Bytes(own)) => any_value(own),
                _ => panic!("a list with a field {number}"),
            });
            format!("[{}]", values.collect::<Vec<_>>().join(", "))
        }
        _ => panic!("no value: {message:?}"),
    }
}

/// Fields of a message in order.
#[track_caller]
fn fields(mut message: &[u8]) -> Vec<(u64, Value<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = number(&mut message);
        let value = match key & 7 {
            0 => Value::Number(number(&mut message)),
            1 => Value::Fixed(u64::from_le_bytes(take(&mut message, 8).try_into().expect("eight bytes"))),
            2 => {
                let length = number(&mut message) as usize;
                Value::Bytes(take(&mut message, length))
            }
            kind => panic!("a field of kind {kind}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

#[track_caller]
fn number(message: &mut &[u8]) -> u64 {
    let mut number = 0;
    for place in 0..10 {
        let byte = take(message, 1)[0];
        number |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return number;
        }
    }
    panic!("a number without an end");
}

#[track_caller]
fn take<'m>(message: &mut &'m [u8], length: usize) -> &'m [u8] {
    let (taken, rest) = message.split_at_checked(length).expect("a field that is whole");
    *message = rest;
    taken
}

/// Decodes a string, which is UTF-8 in protocol buffers.
#[track_caller]
fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[track_caller]
fn hex(bytes: &[u8], length: usize) -> String {
    assert_eq!(bytes.len(), length, "an id of another length");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
