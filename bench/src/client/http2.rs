//! http2: HTTP/2 frames of a client (RFC 9113, section 4.1), and concurrent downloads in the streams of one connection.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 0x1;
pub const END_HEADERS: u8 = 0x4;
/// Flag of SETTINGS.
pub const ACK: u8 = 0x1;

/// Identifier in SETTINGS.
const INITIAL_WINDOW_SIZE: u16 = 4;
const WINDOW_MAX: u32 = (1 << 31) - 1;
/// Initial window of a connection. (RFC 9113, section 6.9.2)
const WINDOW_FIRST: u32 = 65_535;

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns SETTINGS with this initial stream window.
pub fn window_setting(bytes: u32) -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &bytes.to_be_bytes()].concat())
}

/// Returns a header block: GET of a path of less than 127 bytes, in fields that are not added to the dynamic table.
/// (RFC 7541, section 6.2.2)
pub fn block(scheme: Scheme, path: &str) -> Vec<u8> {
    let name = |index: u8, value: &str| [&[index, value.len() as u8], value.as_bytes()].concat();
    [vec![0x82, scheme as u8], name(4, path), name(1, "localhost")].concat()
}

/// Index in the static table. (RFC 7541, appendix A)
#[derive(Clone, Copy)]
pub enum Scheme {
    Http = 0x86,
    Https = 0x87,
}

/// Encodes a field with a literal name, in the form used by `block`.
fn field(name: &str, value: &str) -> Vec<u8> {
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub length: usize,
}

pub fn read_frame(connection: &mut impl Read, payload: &mut Vec<u8>) -> std::io::Result<Frame> {
    let mut head = [0; 9];
    connection.read_exact(&mut head)?;
    let [a, b, c, kind, flags, stream @ ..] = head;
    let length = u32::from_be_bytes([0, a, b, c]) as usize;
    payload.resize(length, 0);
    connection.read_exact(payload)?;
    Ok(Frame { kind, flags, stream: u32::from_be_bytes(stream), length })
}

/// Requests a file in one stream for each priority (RFC 9218), all on one connection, with windows that are never
/// exhausted. Returns the time from the requests to the end of each stream.
pub fn together(address: &str, path: &str, priorities: &[&str], bytes: u64) -> std::io::Result<Vec<Duration>> {
    let mut connection = TcpStream::connect(address)?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(super::load::ANSWER_TIME_LIMIT))?;
    let mut asked = [PREFACE, &window_setting(WINDOW_MAX)].concat();
    asked.extend(frame(WINDOW_UPDATE, 0, 0, &(WINDOW_MAX - WINDOW_FIRST).to_be_bytes()));
    for (number, priority) in (0..).zip(priorities) {
        let fields = [block(Scheme::Http, path), field("priority", priority)].concat();
        asked.extend(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &fields));
    }
    let begun = Instant::now();
    connection.write_all(&asked)?;
    let (mut times, mut received) = (vec![None; priorities.len()], vec![0; priorities.len()]);
    let mut payload = Vec::new();
    while times.contains(&None) {
        let frame = read_frame(&mut connection, &mut payload)?;
        match (frame.kind, frame.flags, frame.stream) {
            (SETTINGS, 0, _) => connection.write_all(&self::frame(SETTINGS, ACK, 0, &[]))?,
            (RST_STREAM | GOAWAY, ..) => return Err(ErrorKind::ConnectionReset.into()),
            (HEADERS | DATA, flags, stream) => {
                let number = (stream / 2) as usize;
                let whole = received.get_mut(number).ok_or(ErrorKind::InvalidData)?;
                if frame.kind == DATA {
                    *whole += frame.length as u64;
                }
                if flags & END_STREAM != 0 {
                    if *whole != bytes {
                        return Err(Error::other(format!("{whole} bytes instead of {bytes}")));
                    }
                    times[number] = Some(begun.elapsed());
                }
            }
            _ => {}
        }
    }
    Ok(times.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_rfc_9113_has_them() {
        assert_eq!(frame(RST_STREAM, 0, 5, &8u32.to_be_bytes()), [0, 0, 4, 3, 0, 0, 0, 0, 5, 0, 0, 0, 8]);
        let asked = frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(Scheme::Http, "/return"));
        assert_eq!(asked[..13], [0, 0, 22, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 4, 7]);
        let (mut text, mut payload) = (&asked[..], Vec::new());
        let read = read_frame(&mut text, &mut payload).expect("a whole frame");
        assert_eq!((read.kind, read.flags, read.stream, read.length), (HEADERS, 5, 1, 22));
        assert_eq!((payload.len(), text.len()), (22, 0));
    }
}
