//! HTTP/2 connection: decoding at once and byte by byte give the same events, windows are respected, and responses can
//! always be written.

use std::sync::Arc;

use gale_protocol::http2::frame::{FrameReader, PREFACE, frame_type};
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{
    Connection, ConnectionFault, ErrorCode, Event, Fields, Limits, Refusal, RequestLine, Scheduler,
};
use gale_protocol::request::KnownHeader;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte selects the side and the responses. The beginning of the connection is added.
    let Some((&choice, frames)) = data.split_first() else { return };
    let mut input = if choice & 1 == 0 { PREFACE.to_vec() } else { Vec::new() };
    input.extend_from_slice(&[0, 0, 0, frame_type::SETTINGS, 0, 0, 0, 0, 0]);
    input.extend_from_slice(frames);
    let whole = play(choice, &mut std::iter::once(&input[..]));
    assert_eq!(whole, play(choice, &mut input.chunks(1)));
    assert_eq!(whole, play(choice, &mut input.chunks(2 + usize::from(choice))));
}

#[derive(PartialEq, Debug, Default)]
struct Seen {
    events: Vec<String>,
    fault: Option<ConnectionFault>,
}

fn limits(choice: u8) -> Arc<Limits> {
    let mut limits = Limits { concurrent_streams_max: 8, block_max: 2000, continuations_max: 3, ..Limits::default() };
    limits.head.head_max = 1000;
    limits.head.line_max = 300;
    limits.head.ignore_invalid_headers = choice & 2 == 0;
    limits.extended_connect = choice & 4 == 0;
    limits.stream_window = u32::from(choice) * 16;
    limits.decoder_table_size = u32::from(choice) * 32;
    Arc::new(limits)
}

fn play(choice: u8, pieces: &mut dyn Iterator<Item = &[u8]>) -> Seen {
    let limits = limits(choice);
    let (mut out, mut seen, mut fields) = (Vec::new(), Seen::default(), Fields::new());
    let mut connection = if choice & 1 == 0 {
        Connection::server(Arc::clone(&limits))
    } else {
        let mut connection = Connection::client(Arc::clone(&limits));
        for method in [&b"GET"[..], b"HEAD", b"POST"] {
            let line = RequestLine { method, scheme: b"http", authority: b"a", path: b"/", protocol: None };
            let stream = connection.write_request(line, method != b"POST", &mut out, |_| {}).unwrap();
            if method == b"POST" {
                connection.write_data(stream, 0, true, &mut out).unwrap();
            }
        }
        connection
    };
    let mut scheduler = Scheduler::new();
    let (mut buffer, mut pending) = (Vec::new(), Vec::new());
    'input: for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut at = 0;
        loop {
            let handled = match connection.handle_input(&buffer[at..], &mut fields) {
                Ok(handled) => handled,
                Err(fault) => {
                    seen.fault = Some(fault);
                    break 'input;
                }
            };
            let input = &buffer[at..];
            at += handled.consumed;
            let Some(event) = handled.event else { break };
            if let Event::Data { stream, piece, end_stream } = event {
                pending.extend_from_slice(&input[piece.clone()]);
                connection.release(stream, piece.len());
                if end_stream {
                    seen.events.push(format!("end {stream} {:?}", std::mem::take(&mut pending)));
                }
                continue;
            }
            seen.events.push(describe(&event, &fields));
            answer(&mut connection, &event, choice, &mut scheduler, &mut out);
        }
        buffer.drain(..at);
        assert!(buffer.len() < connection.input_max());
    }
    assert!(connection.open_streams() <= limits.concurrent_streams_max as usize);
    connection.poll_control(&mut out);
    check_output(choice, &out);
    seen
}

/// Returns the parts of an event that do not depend on its position in the input.
fn describe(event: &Event, fields: &Fields) -> String {
    let text = &fields.text;
    match event {
        Event::Request { .. } => {
            let head = &fields.request;
            for field in &head.headers {
                assert!(!field.value.of(text).iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
                assert!(head.value_by_name(text, field.name.of(text)).is_some());
            }
            for &header in KnownHeader::ALL {
                assert_eq!(head.values(text, header).next(), head.value(text, header));
            }
            assert!(!head.line.of(text).iter().any(|&byte| byte < b' ') && head.authority.is_some());
            let _ = head.target.normalized_path(text, true, &mut Vec::new());
            format!("{event:?} {:?} {head:?}", String::from_utf8_lossy(text))
        }
        Event::BadRequest { refusal, .. } => {
            if let Refusal::Offence(offence) = refusal {
                let _ = offence.describe(text).to_string();
            }
            format!("{event:?} {}", refusal.status())
        }
        Event::Response { .. } => format!("{event:?} {:?} {:?}", String::from_utf8_lossy(text), fields.response),
        Event::Trailers { .. } => format!("{event:?} {:?} {:?}", String::from_utf8_lossy(text), fields.trailers),
        Event::GoAway { last_stream, code, debug } => format!("{last_stream} {code} {}", debug.len()),
        event => format!("{event:?}"),
    }
}

fn answer(connection: &mut Connection, event: &Event, choice: u8, scheduler: &mut Scheduler, out: &mut Vec<u8>) {
    match *event {
        Event::Request { stream, .. } => {
            connection
                .write_response(stream, 200, choice & 8 == 0, out, |fields| {
                    fields.field(b"X", b"y", Indexing::Always).unwrap();
                })
                .unwrap();
            if choice & 8 != 0 {
                scheduler.push(stream, connection.priority(stream));
            }
        }
        Event::BadRequest { stream, refusal, .. } => {
            connection.write_response(stream, refusal.status(), false, out, |_| {}).unwrap();
            connection.reset_refused(stream, refusal);
        }
        Event::Reset { stream, .. } | Event::Fault { stream, .. } => scheduler.remove(stream),
        Event::PriorityChanged { stream, priority } => scheduler.reprioritize(stream, priority),
        _ => {}
    }
    // Sends one piece for the next stream in turn.
    if let Some(stream) = scheduler.pop() {
        let window = connection.send_window(stream);
        match connection.write_data(stream, 700, choice & 16 == 0, out) {
            Ok(sent) => {
                assert!(sent.length <= window && sent.length <= 700);
                out.resize(out.len() + sent.length, 0);
                if sent.end_stream {
                    return;
                }
                if choice & 32 == 0 || out.len() < 1 << 20 {
                    scheduler.push(stream, connection.priority(stream));
                } else {
                    connection.reset(stream, ErrorCode::CANCEL);
                }
            }
            Err(fault) => panic!("{fault}"),
        }
    }
}

/// Checks that the output consists of frames that the other side can read.
fn check_output(choice: u8, out: &[u8]) {
    let mut reader =
        if choice & 1 == 0 { FrameReader::of_server(0xff_ffff) } else { FrameReader::of_client(0xff_ffff) };
    let mut at = 0;
    loop {
        let step = reader.read(&out[at..]).unwrap();
        if step.consumed == 0 && step.frame.is_none() {
            break;
        }
        at += step.consumed;
    }
    assert!(at == out.len() && reader.is_between_frames());
}
