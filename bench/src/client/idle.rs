//! idle: a client that holds connections, after one answer on each.
//!
//! Connections are closed with a reset. In TIME_WAIT their memory would count in the next reading.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};

use super::load::{ANSWER_TIME_LIMIT, Connection};

/// The default number of ephemeral ports is 28,000 per source address.
const CONNECTIONS_PER_SOURCE: usize = 10_000;

#[derive(Debug, Default)]
pub struct Idle {
    connections: Vec<Connection>,
}

impl Idle {
    /// Opens connections one by one and requests `path` on each. Without a path nothing is sent, for addresses that
    /// never answer.
    pub fn open(addresses: &[SocketAddr], count: usize, path: Option<&str>) -> Result<Idle, String> {
        let mut idle = Idle::default();
        for number in 0..count {
            let stream = open_from(source(number), addresses[number % addresses.len()])?;
            let mut connection =
                Connection::over(stream, ANSWER_TIME_LIMIT).map_err(|failure| format!("connection: {failure:?}"))?;
            if let Some(path) = path {
                ask(&mut connection, path).map_err(|error| format!("connection {number}: {error}"))?;
            }
            idle.connections.push(connection);
        }
        Ok(idle)
    }

    /// Sends another request on every `stride`th connection. All of these must still be open.
    pub fn ask_some(&mut self, stride: usize, path: &str) -> Result<(), String> {
        let mut some = self.connections.iter_mut().step_by(stride.max(1));
        some.try_for_each(|connection| ask(connection, path).map_err(|error| format!("after a while: {error}")))
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        for connection in self.connections.drain(..) {
            let (stream, _) = connection.into_stream();
            let _ = set_socket_linger(&stream, Some(Duration::ZERO));
        }
    }
}

fn ask(connection: &mut Connection, path: &str) -> Result<(), String> {
    match connection.request(path, false) {
        Ok(answer) if answer.status == 200 && !answer.closes => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// Returns 127.0.1.1 and the addresses that follow; all of 127.0.0.0/8 is local.
pub fn source(number: usize) -> SocketAddr {
    let host = Ipv4Addr::from(0x7f00_0101 + (number / CONNECTIONS_PER_SOURCE) as u32);
    SocketAddr::from((host, 0))
}

/// A connection from an address of this machine.
pub fn open_from(source: SocketAddr, address: SocketAddr) -> Result<TcpStream, String> {
    let open = || {
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &source)?;
        connect(&socket, &address)?;
        Ok::<_, rustix::io::Errno>(socket)
    };
    open().map(TcpStream::from).map_err(|error| format!("connecting from {source} to {address}: {error}"))
}
