//! idle_tls: connections over TLS that have each had one answer, or whose answers stand still, and are then only held.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::load::ANSWER_TIME_LIMIT;
use super::tls;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// END_STREAM and END_HEADERS.
const WHOLE: u8 = 0x5;
const END_HEADERS: u8 = 0x4;
const END_STREAM: u8 = 0x1;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// `/return`, over HTTP/1.
    Http1,
    /// `/return`, over HTTP/2.
    Http2,
    /// So many files of 64 KiB over HTTP/2, of which nobody may send a byte.
    Stalled(u32),
}

/// The connections. They are ended by a reset, as those in the clear.
pub struct IdleTls {
    connections: Vec<StreamOwned<ClientConnection, TcpStream>>,
}

impl IdleTls {
    /// Opens that many, one after the other.
    pub fn open(address: SocketAddr, certificate: &Path, count: usize, asked: Asked) -> Result<IdleTls, String> {
        let protocol = if asked == Asked::Http1 { "http/1.1" } else { "h2" };
        let config = tls::configuration(default_provider(), certificate, Some(protocol))?;
        let mut idle = IdleTls { connections: Vec::new() };
        for number in 0..count {
            let fault = |error: std::io::Error| format!("connection {number}: {error}");
            let stream = TcpStream::connect(address).map_err(fault)?;
            stream.set_read_timeout(Some(ANSWER_TIME_LIMIT)).map_err(fault)?;
            let name = ServerName::try_from("localhost").map_err(|error| format!("name: {error}"))?;
            let session = ClientConnection::new(Arc::clone(&config), name);
            let session = session.map_err(|error| format!("connection {number}: {error}"))?;
            let mut connection = StreamOwned::new(session, stream);
            match asked {
                Asked::Http1 => ask_http1(&mut connection),
                Asked::Http2 => ask_http2(&mut connection, "/return", 1, None),
                Asked::Stalled(streams) => ask_http2(&mut connection, "/file-64k", streams, Some(0)),
            }
            .map_err(fault)?;
            idle.connections.push(connection);
        }
        Ok(idle)
    }
}

impl Drop for IdleTls {
    fn drop(&mut self) {
        for connection in &self.connections {
            let _ = set_socket_linger(&connection.sock, Some(Duration::ZERO));
        }
    }
}

fn ask_http1(connection: &mut (impl Read + Write)) -> std::io::Result<()> {
    connection.write_all(b"GET /return HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut piece = [0; 1024];
    while !answer.ends_with(b"\r\n\r\nok") {
        match connection.read(&mut piece)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => answer.extend_from_slice(&piece[..count]),
        }
    }
    Ok(())
}

/// Asks in so many streams, and waits for all their answers: the whole of them, or their heads where the window holds
/// nothing.
fn ask_http2(
    connection: &mut (impl Read + Write),
    path: &str,
    streams: u32,
    window: Option<u32>,
) -> std::io::Result<()> {
    let mut text = PREFACE.to_vec();
    let setting = window.map(|bytes| [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &bytes.to_be_bytes()].concat());
    frame(&mut text, SETTINGS, 0, 0, &setting.unwrap_or_default());
    // GET and https by their numbers, the path and the authority in letters. (RFC 7541, appendix A, section 6.2.2)
    let mut fields = vec![0x82, 0x87];
    for (index, value) in [(0x04, path), (0x01, "localhost")] {
        fields.extend([index, value.len() as u8]);
        fields.extend(value.as_bytes());
    }
    for number in 0..streams {
        frame(&mut text, HEADERS, WHOLE, 2 * number + 1, &fields);
    }
    connection.write_all(&text)?;
    let last = if window == Some(0) { END_HEADERS } else { END_STREAM };
    let mut left = streams;
    while left > 0 {
        let mut head = [0; 9];
        connection.read_exact(&mut head)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        connection.read_exact(&mut payload)?;
        let (kind, flags, stream) = (head[3], head[4], &head[5..]);
        if kind == SETTINGS && flags == 0 {
            let mut acknowledged = Vec::new();
            frame(&mut acknowledged, SETTINGS, 1, 0, &[]);
            connection.write_all(&acknowledged)?;
        }
        if stream != [0; 4] && flags & last != 0 && kind <= HEADERS {
            left -= 1;
        }
        // RST_STREAM and GOAWAY are no answers.
        if kind == 3 || kind == 7 {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
    }
    Ok(())
}

fn frame(text: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    text.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
    text.extend([kind, flags]);
    text.extend(stream.to_be_bytes());
    text.extend_from_slice(payload);
}
