//! Floor with epoll: edge-triggered, one `recv` and one `send` per request.
//!
//! Short connections are read immediately after accepting, and registered only if the request has not arrived yet.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::readiness::{Watched, accept_one, number, put};
use super::{Answer, Mode};

pub fn serve(listener: &TcpListener, mode: Mode, answer: &Answer) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (watched, listener_number, mut events) = Watched::new(listener)?;
    let mut connections: Vec<Option<OwnedFd>> = Vec::new();
    loop {
        watched.wait(&mut events)?;
        for descriptor in events.drain(..).map(number) {
            if descriptor == listener_number {
                let Some(connection) = accept_one(listener)? else { continue };
                if mode == Mode::Close && exchange(&connection, mode, answer) == Next::Close {
                    continue;
                }
                watched.add_connection(&connection)?;
                put(&mut connections, connection.as_raw_fd() as usize, connection);
            } else if let Some(connection) = connections.get(descriptor).and_then(Option::as_ref)
                && exchange(connection, mode, answer) == Next::Close
            {
                connections[descriptor] = None;
            }
        }
    }
}

#[derive(PartialEq, Eq)]
enum Next {
    Wait,
    Close,
}

fn exchange(connection: &OwnedFd, mode: Mode, answer: &Answer) -> Next {
    let mut buffer = [0u8; 1024];
    match recv(connection, &mut buffer, RecvFlags::empty()) {
        Ok((received, _)) if received > 0 => {}
        Err(Errno::AGAIN | Errno::INTR) => return Next::Wait,
        Ok(_) | Err(_) => return Next::Close,
    }
    let sent = send_all(connection, answer);
    if sent.is_ok() && mode == Mode::KeepAlive { Next::Wait } else { Next::Close }
}

/// Sends an answer. A few kilobytes fit into an empty socket buffer. With a larger answer, this blocks until the rest
/// is sent: no server needs less CPU time for that, and other connections lose nothing, since the client is busy with
/// this one.
fn send_all(connection: &OwnedFd, answer: &Answer) -> rustix::io::Result<()> {
    let flags = if answer.file.is_some() { SendFlags::NOSIGNAL | SendFlags::MORE } else { SendFlags::NOSIGNAL };
    let mut rest = &answer.bytes[..];
    while !rest.is_empty() {
        let sent = patiently(connection, || send(connection, rest, flags))?;
        rest = &rest[sent..];
    }
    let Some((file, length)) = &answer.file else { return Ok(()) };
    let mut offset = 0;
    while offset < *length {
        let left = usize::try_from(*length - offset).unwrap_or(usize::MAX);
        patiently(connection, || rustix::fs::sendfile(connection, file, Some(&mut offset), left))?;
    }
    Ok(())
}

fn patiently<T>(connection: &OwnedFd, mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::AGAIN) => {
                rustix::event::poll(&mut [PollFd::new(connection, PollFlags::OUT)], None)?;
            }
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
