//! Floor of a proxy that connects to its backend for each request, as is common with FastCGI and uwsgi.
//!
//! For each request of a client it connects, sends a constant request, receives once, closes, and sends a constant
//! answer. The backend must answer in one piece, and the client must send one request at a time (wrk does).

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use io_uring::types::Fd;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send, socket_with,
};

use super::readiness::{Watched, accept_one, number, put};
use super::ring::descriptors_max;
use super::{Answer, Mode, listen};
use crate::ring::{Kind, Ring};

const PIECE_BYTES: usize = 4096;

/// `floor-reconnecting PORT epoll|io_uring BODY_BYTES SOCKET REQUEST_FILE`: serves until it is killed.
pub fn main(args: &[String]) -> Result<(), String> {
    let usage = || "usage: gale-bench floor-reconnecting PORT epoll|io_uring BODY_BYTES SOCKET REQUEST_FILE".to_owned();
    let [port, driver, body_bytes, path, file] = args else {
        return Err(usage());
    };
    let (port, body_bytes) = (port.parse().map_err(|_| usage())?, body_bytes.parse().map_err(|_| usage())?);
    let request = fs::read(file).map_err(|error| format!("{file}: {error}"))?;
    let answer = Answer::new(Mode::KeepAlive, body_bytes, false).map_err(|error| format!("floor: {error}"))?;
    let served = listen(port, false).and_then(|listener| match driver.as_str() {
        "epoll" => with_epoll(&listener, Path::new(path), &request, &answer.bytes),
        "io_uring" => with_ring(&listener, Path::new(path), request.leak(), answer.bytes.leak()),
        _ => Err(io::Error::other(usage())),
    });
    served.map_err(|error| format!("floor: {error}"))
}

enum Side {
    Client,
    /// Backend, for the client with this descriptor.
    Server(usize),
}

fn with_epoll(listener: &TcpListener, path: &Path, request: &[u8], answer: &[u8]) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let address = SocketAddrUnix::new(path)?;
    let (watched, listener_number, mut events) = Watched::new(listener)?;
    let mut connections: Vec<Option<(OwnedFd, Side)>> = Vec::new();
    let mut piece = [0; PIECE_BYTES];
    loop {
        watched.wait(&mut events)?;
        for descriptor in events.drain(..).map(number) {
            if descriptor == listener_number {
                if let Some(client) = accept_one(listener)? {
                    watch(&watched, client, Side::Client, &mut connections)?;
                }
                continue;
            }
            let Some((connection, side)) = connections.get(descriptor).and_then(Option::as_ref) else { continue };
            match (recv(connection, &mut piece, RecvFlags::empty()), side) {
                (Err(Errno::AGAIN | Errno::INTR), _) => {}
                (Ok((1.., _)), Side::Client) => {
                    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                    let server = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
                    connect(&server, &address)?;
                    send(&server, request, SendFlags::NOSIGNAL)?;
                    watch(&watched, server, Side::Server(descriptor), &mut connections)?;
                }
                (Ok((1.., _)), &Side::Server(client)) => {
                    if let Some((client, _)) = &connections[client] {
                        // If the client has left, an event of its own reports that.
                        let _ = send(client, answer, SendFlags::NOSIGNAL);
                    }
                    connections[descriptor] = None;
                }
                _ => connections[descriptor] = None,
            }
        }
    }
}

fn watch(
    watched: &Watched,
    connection: OwnedFd,
    side: Side,
    connections: &mut Vec<Option<(OwnedFd, Side)>>,
) -> io::Result<()> {
    watched.add_connection(&connection)?;
    put(connections, connection.as_raw_fd() as usize, (connection, side));
    Ok(())
}

/// The connection to the backend is a chain of operations on a direct descriptor.
fn with_ring(listener: &TcpListener, path: &Path, request: &'static [u8], answer: &'static [u8]) -> io::Result<()> {
    let address: &'static libc::sockaddr_un = Box::leak(Box::new(kernel_address(path)?));
    // Clients use the first half of the table, backends the second.
    let clients_max = descriptors_max() / 2;
    let mut ring = Ring::new(2 * clients_max)?;
    ring.accept_into_first(clients_max)?;
    let listener = Fd(listener.as_raw_fd());
    let mut completions = Vec::new();
    ring.accept_all(listener)?;
    loop {
        ring.wait(&mut completions)?;
        for completion in completions.drain(..) {
            let number = completion.connection;
            match completion.kind {
                Kind::Accept => {
                    if !completion.goes_on {
                        ring.accept_all(listener)?;
                    }
                    if let Ok(client) = u32::try_from(completion.result) {
                        ring.receive_all(client)?;
                    }
                }
                Kind::Receive if completion.result > 0 && number < clients_max => {
                    if !completion.goes_on {
                        ring.receive_all(number)?;
                    }
                    ring.exchange_once(clients_max + number, address, request)?;
                }
                Kind::Receive if completion.result > 0 => ring.send(number - clients_max, answer)?,
                // A client has left or a backend has failed: closes the client's connection.
                Kind::Receive => ring.close(number % clients_max)?,
                _ => {}
            }
        }
    }
}

fn kernel_address(path: &Path) -> io::Result<libc::sockaddr_un> {
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as libc::sa_family_t, sun_path: [0; 108] };
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok(address)
}
