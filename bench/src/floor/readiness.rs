//! Common parts of the floors with epoll: waiting, accepting, and connections indexed by descriptor.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

/// Maximum number of events in a wait.
const EVENTS_MAX: usize = 512;

pub(super) struct Watched {
    epoll: OwnedFd,
}

pub(super) type Events = Vec<epoll::Event>;

impl Watched {
    /// Registers the listening socket. Returns the set, the socket's number, and memory for events.
    pub fn new(listener: &(impl AsFd + AsRawFd)) -> io::Result<(Watched, usize, Events)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watched = Watched { epoll };
        watched.add(listener, epoll::EventFlags::IN)?;
        Ok((watched, listener.as_raw_fd() as usize, Vec::with_capacity(EVENTS_MAX)))
    }

    /// Registers a socket. Its events carry the descriptor's number.
    pub fn add(&self, socket: &(impl AsFd + AsRawFd), flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(socket.as_raw_fd() as u64), flags)?)
    }

    /// Registers a connection with edge-triggered events.
    pub fn add_connection(&self, connection: &OwnedFd) -> io::Result<()> {
        self.add(connection, epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    pub fn wait(&self, events: &mut Events) -> io::Result<()> {
        match epoll::wait(&self.epoll, spare_capacity(events), None) {
            // The wait is interrupted by signals, and also when a tracer attaches.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns the descriptor's number in an event.
pub(super) fn number(event: epoll::Event) -> usize {
    event.data.u64() as usize
}

/// Accepts one connection. A second try, only to learn that there is none, costs more than it saves.
pub(super) fn accept_one(listener: &TcpListener) -> io::Result<Option<OwnedFd>> {
    match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(connection) => Ok(Some(connection)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Stores a value for a descriptor. The kernel assigns the lowest free numbers, so the table stays small.
pub(super) fn put<T>(table: &mut Vec<Option<T>>, number: usize, known: T) {
    if table.len() <= number {
        table.resize_with(number + 1, || None);
    }
    table[number] = Some(known);
}
