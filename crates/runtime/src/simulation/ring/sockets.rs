//! The direct calls of the ring's driver on sockets of a simulated world: each is tried, and may return a spurious
//! EAGAIN.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::SimulatedRing;
use crate::driver::direct::SEND_MAX;
use crate::driver::io_uring::sockets::Sockets;
use crate::driver::listening::Accepted;
use crate::driver::simulated::Simulated;
use crate::driver::{DatagramDriver, End, Fresh, ListenerDriver, StreamDriver};
use crate::executor::slots::Key;
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::simulation::network::{Named, Network};
use crate::socket::SocketAddress;
use crate::socket::{ConnectError, ConnectOptions};

pub(crate) struct SimulatedSockets {
    ring: Rc<SimulatedRing>,
    /// The other driver of this world, which creates sockets and owns datagram sockets.
    other: Simulated,
}

impl SimulatedSockets {
    pub fn new(ring: Rc<SimulatedRing>) -> Self {
        let other = Simulated::new(Rc::clone(&ring.world));
        SimulatedSockets { ring, other }
    }

    fn end(&self, socket: BorrowedFd<'_>) -> Key {
        match self.ring.world.named(socket) {
            Named::End(end) => end,
            Named::Listener(_) => panic!("a listening socket is no stream"),
        }
    }

    fn with_end<T>(&self, socket: BorrowedFd<'_>, look: impl FnOnce(&mut Network, Key) -> T) -> T {
        let end = self.end(socket);
        look(&mut self.ring.world.network.borrow_mut(), end)
    }

    /// True if a call returns a spurious EAGAIN.
    fn hesitates(&self) -> bool {
        self.ring.world.fate.strikes(|faults| faults.would_block)
    }

    /// Sends bytes from the front and returns their number.
    fn send_bytes<'b>(&self, socket: BorrowedFd<'_>, chunks: impl Iterator<Item = &'b [u8]>) -> Result<usize, Errno> {
        if self.hesitates() {
            return Err(Errno::AGAIN);
        }
        let fate = &self.ring.world.fate;
        if fate.strikes(|faults| faults.ring_direct_sends) {
            self.ring.count(|faults| &mut faults.sends_refused);
            return Err(*fate.random.pick(&[Errno::NOBUFS, Errno::NOMEM]));
        }
        self.ring.send(self.end(socket), chunks, SEND_MAX)
    }
}

impl Sockets for SimulatedSockets {
    fn connect(&self, address: &SocketAddress, options: &ConnectOptions) -> Result<(OwnedFd, Fresh), ConnectError> {
        StreamDriver::connect(&self.other, address, options)
    }

    fn listen(&self, address: &SocketAddress, backlog: i32) -> io::Result<OwnedFd> {
        self.other.listen(address, backlog)
    }

    fn listener_address(&self, socket: &OwnedFd) -> io::Result<SocketAddress> {
        self.other.listener_address(socket)
    }

    fn accept(&self, socket: &OwnedFd) -> io::Result<Option<Accepted>> {
        let Named::Listener(listener) = self.ring.world.named(socket) else { panic!("this socket does not listen") };
        if self.hesitates() { Ok(None) } else { self.other.accept(listener) }
    }

    fn address(&self, socket: BorrowedFd<'_>, end: End) -> io::Result<SocketAddress> {
        let (local, remote) = self.with_end(socket, |network, end| network.addresses(end));
        Ok(match end {
            End::Local => local,
            End::Peer => remote,
        })
    }

    fn kernel_socket(&self, _socket: RawFd) -> Option<RawFd> {
        None
    }

    fn receive(&self, socket: BorrowedFd<'_>, into: &mut Buffer, max: usize) -> Result<usize, Errno> {
        if self.hesitates() {
            return Err(Errno::AGAIN);
        }
        let spare = into.spare(max).map_err(|_| Errno::NOMEM)?;
        let received = self.with_end(socket, |network, end| network.receive(&self.ring.world.fate, end, spare));
        into.commit(received.unwrap_or(0));
        received
    }

    fn send(&self, socket: BorrowedFd<'_>, out: &Output) -> Result<(usize, usize), Errno> {
        Ok((self.send_bytes(socket, out.chunks())?, out.len_bytes().min(SEND_MAX)))
    }

    fn send_chunks_now(&self, socket: BorrowedFd<'_>, out: &Output, _is_last: bool) -> io::Result<(usize, usize)> {
        match self.send_bytes(socket, out.chunks()) {
            Err(Errno::AGAIN) => Ok((0, out.len_bytes())),
            sent => Ok((sent?, out.len_bytes())),
        }
    }

    fn send_now(&self, socket: BorrowedFd<'_>, bytes: &[u8], _is_last: bool) -> io::Result<usize> {
        match self.send_bytes(socket, std::iter::once(bytes)) {
            Err(Errno::AGAIN) => Ok(0),
            sent => Ok(sent?),
        }
    }

    fn sendfile(
        &self,
        socket: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        offset: &mut u64,
        length: usize,
    ) -> Result<usize, Errno> {
        if self.hesitates() {
            return Err(Errno::AGAIN);
        }
        let end = self.end(socket);
        let world = &self.ring.world;
        let room = world.network.borrow_mut().room(end)?;
        let bytes = world.read_to_send(file, *offset, length.min(room))?;
        let sent = if bytes.is_empty() { 0 } else { self.ring.send(end, std::iter::once(&bytes[..]), bytes.len())? };
        *offset += sent as u64;
        Ok(sent)
    }

    fn look_for(&self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), Errno> {
        let is_there = !self.hesitates() && self.ring.events(self.end(socket), mask_of(events)) != 0;
        if is_there { Ok(()) } else { Err(Errno::AGAIN) }
    }

    fn has_input(&self, socket: BorrowedFd<'_>) -> bool {
        self.with_end(socket, |network, end| network.is_readable(end))
    }

    fn has_hung_up(&self, socket: BorrowedFd<'_>) -> bool {
        self.with_end(socket, |network, end| network.is_hung_up(end))
    }

    fn is_broken(&self, socket: BorrowedFd<'_>) -> bool {
        self.with_end(socket, |network, end| network.is_broken(end))
    }

    fn connect_result(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        // Like the kernel: no error while it connects.
        self.with_end(socket, |network, end| network.poll_connected(end)).unwrap_or(Ok(()))
    }

    fn shutdown_write(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        self.with_end(socket, |network, end| network.shut_down(&self.ring.world.fate, end))
    }

    fn shutdown(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        // After the driver has given up nothing is read, so shutting down the write side is enough.
        self.shutdown_write(socket)
    }

    fn set_linger_reset(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.with_end(socket, |network, end| network.set_resets_on_close(end));
        Ok(())
    }

    fn set_user_timeout(&self, _socket: BorrowedFd<'_>, _milliseconds: u32) -> Result<(), Errno> {
        Ok(())
    }

    fn close(&self, socket: OwnedFd) {
        self.ring.close(socket);
    }

    fn datagrams(&self) -> Option<&dyn DatagramDriver> {
        Some(&self.other)
    }
}

/// The event mask of a ring's poll. (rustix stores it in a type that depends on its backend.)
fn mask_of(events: PollFlags) -> u32 {
    (i32::from(events.bits()) & 0xffff) as u32
}
