//! Floor of a proxy: bytes from one side are sent to the other. Each client has its own connection to the backend, so
//! only the number of bytes matters.
//!
//! With epoll the received bytes are relayed. With io_uring all received bytes overwrite the same memory, and the relay
//! sends the bytes of an exchange recorded at the start; this requires that all exchanges are equal and that each side
//! sends in one piece.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::types::Fd;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::pipe::{SpliceFlags, fcntl_setpipe_size, pipe, splice};

use super::readiness::{Watched, accept_one, number, put};
use super::{datagrams, listen};
use crate::ring::{Kind, Ring};

const PIECE_BYTES: usize = 64 * 1024;
/// Bytes of a splice: the maximum size of a pipe without privileges.
const PIPE_BYTES: usize = 1 << 20;
/// Maximum number of clients with io_uring.
const CLIENTS_MAX: u32 = 4096;

/// `relay PORT WAY PORT_BACKEND [BYTES]`: relays until it is killed. With io_uring a client's message is an HTTP
/// request, or has `BYTES` bytes; for a flow that is the length of its datagrams.
pub fn main(args: &[String]) -> Result<(), String> {
    let usage = || "usage: gale-bench relay PORT epoll|io_uring|splice|questions|flow PORT_BACKEND [BYTES]".to_owned();
    let [port, driver, backend, more @ ..] = args else {
        return Err(usage());
    };
    let (port, backend) = (port.parse().map_err(|_| usage())?, backend.parse().map_err(|_| usage())?);
    let message = match more {
        [] => REQUEST.to_vec(),
        [bytes] => vec![7; bytes.parse().map_err(|_| usage())?],
        _ => return Err(usage()),
    };
    let served = match driver.as_str() {
        "questions" => datagrams::questions(port, backend),
        "flow" => datagrams::flow(port, backend, message.len()),
        "epoll" => listen(port, false).and_then(|listener| with_epoll(&listener, backend)),
        "io_uring" => listen(port, false).and_then(|listener| with_ring(&listener, backend, message)),
        "splice" => listen(port, false).and_then(|listener| with_splice(&listener, backend)),
        _ => Err(io::Error::other(usage())),
    };
    served.map_err(|error| format!("relay: {error}"))
}

/// As long as wrk's requests.
const REQUEST: &[u8] = b"GET /proxied HTTP/1.1\r\nHost: 127.0.0.1:00000\r\n\r\n";

fn connect(backend: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", backend))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn with_epoll(listener: &TcpListener, backend: u16) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (watched, listener_number, mut events) = Watched::new(listener)?;
    // A connection, and the number of the connection to relay to.
    let mut connections: Vec<Option<(OwnedFd, usize)>> = Vec::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        watched.wait(&mut events)?;
        for descriptor in events.drain(..).map(number) {
            if descriptor == listener_number {
                accept_pair(listener, backend, &watched, &mut connections)?;
            } else if let Some((from, to)) = connections.get(descriptor).and_then(Option::as_ref) {
                let (to, other) = (*to, connections[*to].as_ref());
                if !other.is_some_and(|(other, _)| pass(from, other, &mut piece)) {
                    connections[descriptor] = None;
                    connections[to] = None;
                }
            }
        }
    }
}

fn accept_pair(
    listener: &TcpListener,
    backend: u16,
    watched: &Watched,
    connections: &mut Vec<Option<(OwnedFd, usize)>>,
) -> io::Result<()> {
    let Some(client) = accept_one(listener)? else { return Ok(()) };
    let server = connect(backend)?;
    server.set_nonblocking(true)?;
    let server = OwnedFd::from(server);
    let numbers = [client.as_raw_fd(), server.as_raw_fd()].map(|number| number as usize);
    for (own, other, connection) in [(numbers[0], numbers[1], client), (numbers[1], numbers[0], server)] {
        watched.add_connection(&connection)?;
        put(connections, own, (connection, other));
    }
    Ok(())
}

/// Relays available bytes. Returns true if the connection stays open. A short read means that the socket is empty.
fn pass(from: &OwnedFd, to: &OwnedFd, piece: &mut [u8]) -> bool {
    loop {
        let received = match recv(from, &mut *piece, RecvFlags::empty()) {
            Ok((0, _)) => return false,
            Ok((received, _)) => received,
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) => return false,
        };
        let mut rest = &piece[..received];
        while !rest.is_empty() {
            match send(to, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                // No server needs less CPU time for a full socket, and there are no other clients to serve meanwhile.
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(to, PollFlags::OUT)], None);
                }
                Err(_) => return false,
            }
        }
        if received < piece.len() {
            return true;
        }
    }
}

/// Serves one client at a time and relays its bytes: the least work of the kernel for a GiB in one direction.
fn with_splice(listener: &TcpListener, backend: u16) -> io::Result<()> {
    loop {
        let (client, server) = (listener.accept()?.0, connect(backend)?);
        // A failure ends only this connection.
        let _ = splice_all(&client, &server);
    }
}

fn splice_all(from: &TcpStream, to: &TcpStream) -> io::Result<()> {
    let (read, write) = pipe()?;
    fcntl_setpipe_size(&write, PIPE_BYTES)?;
    loop {
        let mut left = splice(from, None, &write, None, PIPE_BYTES, SpliceFlags::MOVE)?;
        if left == 0 {
            return Ok(());
        }
        while left > 0 {
            left -= splice(&read, None, to, None, left, SpliceFlags::MOVE)?;
        }
    }
}

fn with_ring(listener: &TcpListener, backend: u16, request: Vec<u8>) -> io::Result<()> {
    let answer = exchange_once(backend, &request)?;
    let (request, answer): (&'static [u8], &'static [u8]) = (request.leak(), answer.leak());
    // Clients use the first half of the table, backends the second.
    let mut ring = Ring::new(2 * CLIENTS_MAX)?;
    ring.accept_into_first(CLIENTS_MAX)?;
    let listener = Fd(listener.as_raw_fd());
    let mut answered = vec![0; CLIENTS_MAX as usize];
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
                    let Ok(client) = u32::try_from(completion.result) else {
                        continue;
                    };
                    let server = connect(backend)?;
                    ring.use_descriptor(CLIENTS_MAX + client, server.as_raw_fd())?; // the table keeps it open
                    answered[client as usize] = 0;
                    ring.receive_all(client)?;
                    ring.receive_all(CLIENTS_MAX + client)?;
                }
                Kind::Receive if completion.result > 0 => {
                    if !completion.goes_on {
                        ring.receive_all(number)?;
                    }
                    if number < CLIENTS_MAX {
                        ring.send(CLIENTS_MAX + number, request)?;
                        continue;
                    }
                    let client = number - CLIENTS_MAX;
                    let got = &mut answered[client as usize];
                    *got += completion.result as usize;
                    if *got >= answer.len() {
                        *got = 0;
                        ring.send(client, answer)?;
                    }
                }
                Kind::Receive if number < CLIENTS_MAX => {
                    ring.close(CLIENTS_MAX + number)?;
                    ring.close(number)?;
                }
                // The backend's connection, a failed send, or a close. The client's receive handles these.
                _ => {}
            }
        }
    }
}

/// Returns the backend's answer to a request.
fn exchange_once(backend: u16, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = connect(backend)?;
    stream.write_all(request)?;
    let mut answer = vec![0; PIECE_BYTES];
    // The backend sends a small answer in one piece.
    let received = stream.read(&mut answer)?;
    answer.truncate(received);
    Ok(answer)
}
