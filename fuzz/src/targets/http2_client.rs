//! Client side of an HTTP/2 connection: a server's bytes lead to the same events however they are cut. Requests are
//! sent, read and cancelled within the windows, and each stream ends once.

use std::collections::BTreeMap;
use std::sync::Arc;

use gale_protocol::http2::frame::{FrameReader, frame_type};
use gale_protocol::http2::hpack::Indexing;
use gale_protocol::http2::{Connection, ConnectionFault, ErrorCode, Event, Fields, Limits, RequestLine, StreamId};

/// Maximum number of open streams.
const STREAMS_MAX: usize = 8;

/// Length of request bodies, and of the pieces in which they are sent.
const BODY_BYTES: usize = 3000;
const PIECE_BYTES: usize = 700;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first two bytes select the limits and the behaviour of the client. The server's SETTINGS frame is added.
    let Some((&[choice, habits], frames)) = data.split_first_chunk() else { return };
    let mut input = vec![0, 0, 0, frame_type::SETTINGS, 0, 0, 0, 0, 0];
    input.extend_from_slice(frames);
    let whole = play(choice, habits, &mut std::iter::once(&input[..]));
    assert_eq!(whole, play(choice, habits, &mut input.chunks(1)));
    assert_eq!(whole, play(choice, habits, &mut input.chunks(2 + usize::from(choice))));
}

#[derive(PartialEq, Debug, Default)]
struct Seen {
    events: Vec<String>,
    fault: Option<ConnectionFault>,
}

#[derive(Default)]
struct Asked {
    /// Bytes of the body still to be sent; `None` if there are none.
    left: Option<usize>,
    has_head: bool,
    /// The response has ended, or the request was cancelled.
    is_over: bool,
    body: Vec<u8>,
}

struct Client {
    connection: Connection,
    habits: u8,
    asked: BTreeMap<StreamId, Asked>,
    out: Vec<u8>,
    seen: Seen,
}

fn limits(choice: u8) -> Arc<Limits> {
    let mut limits = Limits { block_max: 2000, continuations_max: 3, ..Limits::default() };
    limits.head.head_max = 1000;
    limits.stream_window = 100 + u32::from(choice) * 64;
    limits.connection_window = limits.stream_window * STREAMS_MAX as u32;
    limits.decoder_table_size = u32::from(choice) * 32;
    Arc::new(limits)
}

fn play(choice: u8, habits: u8, pieces: &mut dyn Iterator<Item = &[u8]>) -> Seen {
    let connection = Connection::client(limits(choice));
    let mut client = Client { connection, habits, asked: BTreeMap::new(), out: Vec::new(), seen: Seen::default() };
    client.begin(3);
    let (mut buffer, mut fields) = (Vec::new(), Fields::new());
    'input: for piece in pieces {
        buffer.extend_from_slice(piece);
        let mut at = 0;
        loop {
            let handled = match client.connection.handle_input(&buffer[at..], &mut fields) {
                Ok(handled) => handled,
                Err(fault) => {
                    client.seen.fault = Some(fault);
                    break 'input;
                }
            };
            let input = &buffer[at..];
            at += handled.consumed;
            let Some(event) = handled.event else { break };
            client.take(event, input, &fields);
        }
        buffer.drain(..at);
        assert!(buffer.len() < client.connection.input_max());
    }
    assert!(client.connection.open_streams() <= STREAMS_MAX);
    client.connection.poll_control(&mut client.out);
    check_output(&client.out);
    client.seen
}

impl Client {
    /// Sends up to `count` requests, as far as streams are available.
    fn begin(&mut self, count: usize) {
        for number in 0..count {
            if self.connection.open_streams() >= STREAMS_MAX || self.connection.check_can_open().is_err() {
                return;
            }
            let method = [&b"GET"[..], b"POST", b"HEAD"][number % 3];
            let has_body = method == b"POST";
            let line = RequestLine { method, scheme: b"https", authority: b"a", path: b"/", protocol: None };
            let write = |fields: &mut gale_protocol::http2::FieldsWriter<'_>| {
                fields.field(b"x", b"y", Indexing::IfRepeated).expect("a good field");
            };
            let Ok(stream) = self.connection.write_request(line, !has_body, &mut self.out, write) else { return };
            let left = has_body.then_some(BODY_BYTES);
            let before = self.asked.insert(stream, Asked { left, ..Asked::default() });
            assert!(before.is_none() && stream % 2 == 1);
        }
    }

    fn take(&mut self, event: Event, input: &[u8], fields: &Fields) {
        let text = &fields.text;
        // The number of pieces of a body depends on how the input is cut, so a piece must not trigger a new request.
        let is_piece = matches!(event, Event::Data { end_stream: false, .. });
        match event {
            Event::Data { stream, piece, end_stream } => {
                let asked = self.asked.get_mut(&stream).expect("it was asked for");
                assert!(asked.has_head && !asked.is_over, "data only behind a head, and before the end");
                asked.body.extend_from_slice(&input[piece.clone()]);
                asked.is_over = end_stream;
                if end_stream {
                    self.seen.events.push(format!("end {stream} {:?}", std::mem::take(&mut asked.body)));
                }
                // A slow reader releases bytes later. The time must not depend on how the input is cut.
                if self.habits & 1 == 0 {
                    self.connection.release(stream, piece.len());
                }
                if self.habits & 2 != 0 {
                    self.connection.grow_stream_window(stream, 1 << 20);
                    self.connection.grow_connection_window(1 << 23);
                }
            }
            Event::Response { stream, end_stream } => {
                let asked = self.asked.get_mut(&stream).expect("it was asked for");
                assert!(!asked.is_over);
                // Another head follows an interim one.
                asked.has_head |= fields.response.status >= 200;
                asked.is_over = end_stream;
                assert!((100..1000).contains(&fields.response.status));
                assert!(!end_stream || asked.has_head);
                self.seen.events.push(format!("{stream} {end_stream} {:?} {:?}", text, fields.response));
                self.send(stream);
            }
            Event::Trailers { stream } => {
                let asked = self.asked.get_mut(&stream).expect("it was asked for");
                assert!(asked.has_head && !std::mem::replace(&mut asked.is_over, true));
                self.seen.events.push(format!("trailers {stream} {:?} {:?}", text, fields.trailers));
            }
            Event::Reset { stream, .. } | Event::Fault { stream, .. } => {
                let asked = self.asked.get_mut(&stream).expect("it was asked for");
                asked.is_over = true;
                asked.left = None;
                self.seen.events.push(format!("{event:?}"));
            }
            Event::GoAway { last_stream, code, debug } => {
                self.seen.events.push(format!("goaway {last_stream} {code} {}", debug.len()));
            }
            Event::Request { .. } | Event::BadRequest { .. } => panic!("nobody asks a client"),
            event => {
                self.seen.events.push(format!("{event:?}"));
                let open: Vec<StreamId> = self.asked.keys().copied().collect();
                open.into_iter().for_each(|stream| self.send(stream));
            }
        }
        if self.habits & 4 != 0 && !is_piece {
            self.begin(1);
        }
        if self.habits & 8 != 0 && !is_piece && self.seen.events.len() % 5 == 4 {
            self.give_up_oldest();
        }
    }

    /// Sends a piece of a request's body, as far as the windows allow.
    fn send(&mut self, stream: StreamId) {
        let Some(asked) = self.asked.get_mut(&stream) else { return };
        let Some(left) = asked.left else { return };
        let window = self.connection.send_window(stream);
        let length = left.min(PIECE_BYTES);
        let Ok(sent) = self.connection.write_data(stream, length, length == left, &mut self.out) else {
            asked.left = None;
            return;
        };
        assert!(sent.length <= window && sent.length <= length);
        self.out.resize(self.out.len() + sent.length, 0);
        asked.left = (!sent.end_stream).then_some(left - sent.length);
    }

    /// Cancels the oldest request, as if its client had left.
    fn give_up_oldest(&mut self) {
        let oldest = self.asked.iter_mut().find(|(_, asked)| !asked.is_over);
        if let Some((&stream, asked)) = oldest {
            (asked.is_over, asked.left) = (true, None);
            self.connection.reset(stream, ErrorCode::CANCEL);
        }
    }
}

/// Checks that the output consists of frames that a server can read.
fn check_output(out: &[u8]) {
    let mut reader = FrameReader::of_client(0xff_ffff);
    let mut at = 0;
    loop {
        let step = reader.read(&out[at..]).expect("good frames");
        if step.consumed == 0 && step.frame.is_none() {
            break;
        }
        at += step.consumed;
    }
    assert!(at == out.len() && reader.is_between_frames());
}
