//! What all floors with epoll do: wait, accept, and find a connection by its descriptor's number.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

/// Reported by one wait at most.
const EVENTS_MAX: usize = 512;

/// The sockets that are watched.
pub(super) struct Watched {
    epoll: OwnedFd,
}

/// What is ready.
pub(super) type Events = Vec<epoll::Event>;

impl Watched {
    /// Only the socket that clients come to, whose number this is; and room for what is ready.
    pub fn new(listener: &(impl AsFd + AsRawFd)) -> io::Result<(Watched, usize, Events)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watched = Watched { epoll };
        watched.add(listener, epoll::EventFlags::IN)?;
        Ok((watched, listener.as_raw_fd() as usize, Vec::with_capacity(EVENTS_MAX)))
    }

    /// One more: its event says the descriptor's number.
    pub fn add(&self, socket: &(impl AsFd + AsRawFd), flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(socket.as_raw_fd() as u64), flags)?)
    }

    /// One more connection, which is ready once for all that has come (edge-triggered).
    pub fn add_connection(&self, connection: &OwnedFd) -> io::Result<()> {
        self.add(connection, epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    /// Waits until something is ready.
    pub fn wait(&self, events: &mut Events) -> io::Result<()> {
        match epoll::wait(&self.epoll, spare_capacity(events), None) {
            // Not only for signals: a tracer that attaches interrupts the wait too.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// The number of the descriptor that is ready.
pub(super) fn number(event: epoll::Event) -> usize {
    event.data.u64() as usize
}

/// One connection per readiness, as asking again only to be told that there is none costs more than it saves.
pub(super) fn accept_one(listener: &TcpListener) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(connection) => Ok(Some(connection)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Puts what is known of a descriptor into its place. The kernel keeps the numbers as small as it can.
pub(super) fn put<T>(table: &mut Vec<Option<T>>, number: usize, known: T) {
    if table.len() <= number {
        table.resize_with(number + 1, || None);
    }
    table[number] = Some(known);
}
