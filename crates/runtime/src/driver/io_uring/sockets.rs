//! Socket calls that the driver makes directly, without the ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{self, sockopt};

use crate::driver::listening::{self, Accepted};
use crate::driver::{DatagramDriver, End, Fresh, direct, listen};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::SocketAddress;
use crate::socket::connect::{ConnectError, ConnectOptions, begin_connect};
use crate::socket::options;

/// The kernel's calls, as in [`direct`], or those of a simulated world, which replaces all of them.
pub(crate) trait Sockets {
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        begin_connect(address, options)
    }

    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        listen(address, backlog)
    }

    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        End::Local.address_of(socket.as_fd())
    }

    fn accept(&self, socket: &OwnedFd) -> io::Result<Option<Accepted>> {
        listening::accept(socket)
    }

    fn address(&self, socket: BorrowedFd<'_>, end: End) -> io::Result<SocketAddress> {
        end.address_of(socket)
    }

    /// As [`crate::driver::StreamDriver::kernel_socket`].
    fn kernel_socket(&self, socket: RawFd) -> Option<RawFd> {
        Some(socket)
    }

    fn receive(&self, socket: BorrowedFd<'_>, into: &mut Buffer, max: usize) -> Result<usize, Errno> {
        direct::receive(socket, into, max)
    }

    fn send(&self, socket: BorrowedFd<'_>, out: &Output) -> Result<(usize, usize), Errno> {
        direct::send(socket, out)
    }

    fn send_chunks_now(&self, socket: BorrowedFd<'_>, out: &Output, is_last: bool) -> io::Result<(usize, usize)> {
        direct::send_chunks_now(socket, out, is_last)
    }

    fn send_now(&self, socket: BorrowedFd<'_>, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        direct::send_now(socket, bytes, is_last)
    }

    fn sendfile(
        &self,
        socket: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Result<usize, Errno> {
        rustix::fs::sendfile(socket, file, Some(offset), length)
    }

    fn look_for(&self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), Errno> {
        direct::look_for(socket, events)
    }

    fn has_input(&self, socket: BorrowedFd<'_>) -> bool {
        direct::has_input(socket)
    }

    fn has_hung_up(&self, socket: BorrowedFd<'_>) -> bool {
        direct::has_hung_up(socket)
    }

    fn is_broken(&self, socket: BorrowedFd<'_>) -> bool {
        direct::is_broken(socket)
    }

    fn connect_result(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        sockopt::socket_error(socket)?
    }

    fn shutdown_write(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        net::shutdown(socket, net::Shutdown::Write)
    }

    /// Shuts down both directions.
    fn shutdown(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        net::shutdown(socket, net::Shutdown::Both)
    }

    fn set_linger_reset(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        options::set_linger_reset(socket)
    }

    fn set_user_timeout(&self, socket: BorrowedFd<'_>, milliseconds: u32) -> Result<(), Errno> {
        sockopt::set_tcp_user_timeout(socket, milliseconds)
    }

    fn close(&self, socket: OwnedFd) {
        drop(socket);
    }

    /// The owner of datagram sockets, if it is not the driver.
    fn datagrams(&self) -> Option<&dyn DatagramDriver> {
        None
    }
}

/// The kernel's sockets.
pub(crate) struct LinuxSockets;

impl Sockets for LinuxSockets {}
