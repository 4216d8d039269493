//! The floor with epoll: edge-triggered, one `recv` and one `send` per request.
//!
//! Short connections are tried at once after accepting, and registered only where the request is not there yet.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};

use super::{Answer, Mode};

pub fn serve(listener: &TcpListener, mode: Mode, answer: &Answer) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let listener_key = listener.as_raw_fd();
    epoll::add(&epoll, listener, key(listener_key), epoll::EventFlags::IN)?;
    // By descriptor number, which the kernel keeps as small as it can.
    let mut connections: Vec<Option<OwnedFd>> = Vec::new();
    let mut events = Vec::with_capacity(512);
    loop {
        match epoll::wait(&epoll, spare_capacity(&mut events), None) {
            // Not only for signals: a tracer that attaches interrupts the wait too.
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events.drain(..) {
            let descriptor = event.data.u64() as usize;
            if descriptor == listener_key as usize {
                accept_one(listener, &epoll, mode, answer, &mut connections)?;
            } else if let Some(connection) = connections.get(descriptor).and_then(Option::as_ref)
                && exchange(connection, mode, answer) == Next::Close
            {
                connections[descriptor] = None;
            }
        }
    }
}

/// One connection per readiness, as asking again only to be told that there is none costs more than it saves.
fn accept_one(
    listener: &TcpListener,
    epoll: &OwnedFd,
    mode: Mode,
    answer: &Answer,
    connections: &mut Vec<Option<OwnedFd>>,
) -> io::Result<()> {
    let connection = match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(connection) => connection,
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if mode == Mode::Close && exchange(&connection, mode, answer) == Next::Close {
        return Ok(());
    }
    let descriptor = connection.as_raw_fd();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(epoll, &connection, key(descriptor), flags)?;
    if connections.len() <= descriptor as usize {
        connections.resize_with(descriptor as usize + 1, || None);
    }
    connections[descriptor as usize] = Some(connection);
    Ok(())
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

/// An answer of some kilobytes fits into an empty socket buffer. Of a larger one the rest is waited for on the spot: no
/// server spends less on that, and other connections lose nothing, since the client is as busy with this one.
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

pub(super) fn key(descriptor: i32) -> epoll::EventData {
    epoll::EventData::new_u64(descriptor as u64)
}
