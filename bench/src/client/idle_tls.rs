//! idle_tls: a client that holds TLS connections, after one answer on each or with stalled answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};

use super::http2::{self, ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, Scheme};
use super::load::ANSWER_TIME_LIMIT;
use super::tls;

/// Requests of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// `/return`, over HTTP/1.
    Http1,
    /// `/return`, over HTTP/2.
    Http2,
    /// This many files of 64 KiB over HTTP/2, with a window that allows no data.
    Stalled(u32),
}

/// Idle TLS connections. They are closed with a reset, like those without TLS.
pub struct IdleTls {
    connections: Vec<StreamOwned<ClientConnection, TcpStream>>,
}

impl IdleTls {
    /// Opens this many connections one by one.
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

/// Sends requests in this many streams and waits for the answers: whole ones, or only the heads if the window is zero.
fn ask_http2(
    connection: &mut (impl Read + Write),
    path: &str,
    streams: u32,
    window: Option<u32>,
) -> std::io::Result<()> {
    let settings = window.map_or_else(|| http2::frame(SETTINGS, 0, 0, &[]), http2::window_setting);
    let mut text = [PREFACE, &settings].concat();
    let fields = http2::block(Scheme::Https, path);
    for number in 0..streams {
        text.extend(http2::frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &fields));
    }
    connection.write_all(&text)?;
    let last = if window == Some(0) { END_HEADERS } else { END_STREAM };
    let (mut left, mut payload) = (streams, Vec::new());
    while left > 0 {
        let frame = http2::read_frame(connection, &mut payload)?;
        match frame.kind {
            SETTINGS if frame.flags == 0 => connection.write_all(&http2::frame(SETTINGS, ACK, 0, &[]))?,
            RST_STREAM | GOAWAY => return Err(std::io::ErrorKind::ConnectionReset.into()),
            DATA | HEADERS if frame.flags & last != 0 => left -= 1,
            _ => {}
        }
    }
    Ok(())
}
