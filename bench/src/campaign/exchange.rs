//! exchange: one request over a connection of its own, and its answer, also if it is cut.
//!
//! Unlike `client::load` it keeps what a broken answer holds, since the bytes of that must be right, too.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// An answer as far as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub status: u16,
    /// Status line and fields.
    pub head: String,
    /// Without the framing of chunks.
    pub body: Vec<u8>,
    /// The framing says that nothing is missing.
    pub is_whole: bool,
}

/// GET of a path, on a connection that ends with it.
pub fn get(path: &str) -> Vec<u8> {
    get_with(path, "")
}

/// The same with more fields, each with its line end.
pub fn get_with(path: &str, fields: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: campaign\r\nConnection: close\r\n{fields}\r\n").into_bytes()
}

/// PUT of a body, on a connection that ends with it.
pub fn put(path: &str, body: &[u8]) -> Vec<u8> {
    let head =
        format!("PUT {path} HTTP/1.1\r\nHost: campaign\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// Sends a request and reads until its answer is whole or the connection has ended. The error says that there was no
/// answer at all.
pub fn ask(address: &str, request: &[u8], limit: Duration) -> Result<Reply, String> {
    let mut stream = connect(address, limit)?;
    // A server may answer and close before it has read all.
    let _ = stream.write_all(request);
    read_reply(&mut stream, limit)
}

pub fn connect(address: &str, limit: Duration) -> Result<TcpStream, String> {
    let address: SocketAddr = address.parse().map_err(|_| format!("no address: {address}"))?;
    let stream = TcpStream::connect_timeout(&address, limit).map_err(|error| format!("connect: {error}"))?;
    let set = stream.set_nodelay(true).and_then(|()| stream.set_write_timeout(Some(limit)));
    set.map_err(|error| format!("connect: {error}"))?;
    Ok(stream)
}

/// Reads one answer; a HEAD would wait for a body that never comes.
pub fn read_reply(stream: &mut impl TimedRead, limit: Duration) -> Result<Reply, String> {
    let deadline = Instant::now() + limit;
    let (mut received, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
    // A long body is not parsed anew for each of its pieces.
    let mut parsed_at = 0;
    let ended = loop {
        if received.len() >= parsed_at {
            let reply = parse(&received);
            if reply.as_ref().is_some_and(|reply| reply.is_whole) {
                break "whole".to_owned();
            }
            let missing = reply.as_ref().map_or(0, Reply::missing);
            parsed_at = received.len() + missing;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break "timed out".to_owned();
        }
        match stream.read_for(&mut piece, left) {
            Ok(0) => break "closed".to_owned(),
            Ok(length) => received.extend_from_slice(&piece[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => break error.to_string(),
        }
    };
    match parse(&received) {
        Some(reply) if ended == "closed" || reply.is_whole => Ok(reply.ended_by_close(ended == "closed")),
        Some(reply) => Ok(reply),
        None => Err(format!("no answer ({ended}, {} bytes)", received.len())),
    }
}

/// A connection whose reads end in time.
pub trait TimedRead {
    fn read_for(&mut self, piece: &mut [u8], time: Duration) -> std::io::Result<usize>;
}

impl TimedRead for TcpStream {
    fn read_for(&mut self, piece: &mut [u8], time: Duration) -> std::io::Result<usize> {
        self.set_read_timeout(Some(time))?;
        self.read(piece)
    }
}

impl Reply {
    /// The value of a field, by its name in any case.
    pub fn field(&self, name: &str) -> Option<&str> {
        field_in(&self.head, name)
    }

    /// Bytes of the body that are certain to come before it is whole.
    fn missing(&self) -> usize {
        let length = self.field("content-length").and_then(|value| value.parse::<usize>().ok());
        length.map_or(0, |length| length.saturating_sub(self.body.len()))
    }

    /// An answer without a length ends with its connection.
    fn ended_by_close(self, is_closed: bool) -> Reply {
        let is_unframed = self.field("content-length").is_none() && self.field("transfer-encoding").is_none();
        Reply { is_whole: self.is_whole || (is_closed && is_unframed), ..self }
    }
}

/// The value of a field in a head.
pub fn field_in<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.split("\r\n").skip(1).filter_map(|line| line.split_once(':'));
    fields.find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

/// The last answer of these bytes, behind interim ones; `None` while its head is not there.
pub fn parse(received: &[u8]) -> Option<Reply> {
    let end = received.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&received[..end]).into_owned();
    let status = head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok()).unwrap_or(0);
    let rest = &received[end..];
    if (100..200).contains(&status) {
        return parse(rest);
    }
    let length: Option<usize> = field_in(&head, "content-length").and_then(|value| value.parse().ok());
    let is_chunked = field_in(&head, "transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
    let (body, is_whole) = match (is_chunked, length) {
        (true, _) => unchunk(rest),
        (false, Some(length)) => (rest.to_vec(), rest.len() >= length),
        (false, None) => (rest.to_vec(), status == 204 || status == 304),
    };
    Some(Reply { status, head, body, is_whole })
}

/// Content of the chunks that are there, and true if the last one is.
fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(line) = rest.windows(2).position(|two| two == b"\r\n") else { return (body, false) };
        let size = std::str::from_utf8(&rest[..line]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let Some(size) = size else { return (body, false) };
        rest = &rest[line + 2..];
        if size == 0 {
            return (body, rest.starts_with(b"\r\n"));
        }
        body.extend_from_slice(&rest[..size.min(rest.len())]);
        if rest.len() < size + 2 {
            return (body, false);
        }
        rest = &rest[size + 2..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing_says_whether_an_answer_is_whole() {
        let whole = |text: &[u8]| parse(text).map(|reply| (reply.is_whole, reply.body));
        assert_eq!(whole(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), Some((true, b"abc".to_vec())));
        assert_eq!(whole(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab"), Some((false, b"ab".to_vec())));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n";
        assert_eq!(whole(chunked), Some((true, b"ab".to_vec())));
        for length in 50..chunked.len() {
            let (is_whole, body) = whole(&chunked[..length]).unwrap_or_default();
            assert!(!is_whole && b"ab".starts_with(&body[..]), "{length}");
        }
        assert_eq!(whole(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 204 None\r\n\r\n"), Some((true, Vec::new())));
        assert_eq!(whole(b"HTTP/1.1 200 OK\r\n"), None);
    }
}
