//! Listening sockets that were open when the process started and are known only by number: those of a previous binary
//! (`upgrade.rs`) and those of the service manager (`activation.rs`).

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::FdFlags;
use rustix::net::SocketType;

use super::errors::errno_text;
use super::listen::{self, ListenSpec, Listener, ListenerHandle, OpenedBy};

/// Maximum number of sockets; further ones are ignored.
pub(super) const CLAIMED_MAX: usize = 65536;

/// The sockets taken over so far.
#[derive(Default)]
pub(super) struct Claimed {
    listeners: Vec<Listener>,
}

impl Claimed {
    /// Takes over a descriptor. A number must be passed only once, and before this process opens a socket.
    ///
    /// # Errors
    /// The descriptor is no socket or cannot listen; it is closed. The text is nginx's.
    pub fn add(&mut self, number: RawFd, opened_by: OpenedBy) -> Result<&ListenSpec, String> {
        let (spec, socket) = claim(number)?;
        let is_same = |known: &Listener| (&known.spec.address, known.spec.kind) == (&spec.address, spec.kind);
        let index = self.listeners.iter().position(is_same).unwrap_or(self.listeners.len());
        if index == self.listeners.len() {
            self.listeners.push(Listener { spec, sockets: Vec::new(), opened_by });
        }
        let listener = &mut self.listeners[index];
        listener.sockets.push(socket);
        // Several sockets with the same address: they were opened with `reuseport`.
        if listener.sockets.len() > 1 {
            listener.spec.reuseport = listener.sockets.len();
        }
        Ok(&listener.spec)
    }

    /// Returns all sockets, grouped by address.
    pub fn into_listeners(self) -> Vec<ListenerHandle> {
        self.listeners.into_iter().map(Arc::new).collect()
    }
}

fn claim(number: RawFd) -> Result<(ListenSpec, Arc<OwnedFd>), String> {
    // SAFETY: only borrowed for a call that fails with EBADF if it is not open.
    let probe = unsafe { BorrowedFd::borrow_raw(number) };
    let kind = rustix::net::sockopt::socket_type(probe).map_err(|error| {
        format!("getsockname() of the inherited socket #{number} failed{}", errno_text(&error.into()))
    })?;
    // SAFETY: it is an open socket that existed when the process started. This process has opened no socket yet, so
    // nothing in it owns the number.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&socket, FdFlags::CLOEXEC)
        .and_then(|()| rustix::io::ioctl_fionbio(&socket, true))
        .map_err(|error| format!("fcntl() of the inherited socket #{number} failed{}", errno_text(&error.into())))?;
    match kind {
        SocketType::DGRAM => {}
        // A connected socket, as passed to a service with `Accept=yes`, cannot accept.
        SocketType::STREAM if rustix::net::sockopt::socket_acceptconn(&socket).unwrap_or(true) => {}
        SocketType::STREAM => return Err(format!("the inherited socket #{number} does not listen")),
        _ => return Err(format!("the inherited socket #{number} has an unsupported type")),
    }
    let spec = listen::inherited_spec(&socket)?;
    Ok((spec, Arc::new(socket)))
}
