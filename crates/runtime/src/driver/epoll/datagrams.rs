//! Datagram sockets, registered like connections. Sending and receiving are common to all drivers
//! (`driver/datagrams.rs`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};

use super::Epoll;
use crate::driver::direct::Direction;
use crate::driver::{DatagramDriver, End, Fresh, StreamDriver, datagrams};
use crate::executor::slots::Key;
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};

impl DatagramDriver for Epoll {
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key> {
        Ok(self.attach(datagrams::open(options)?, Fresh::Datagram))
    }

    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key> {
        Ok(self.attach(datagrams::adopt(socket, options)?, Fresh::Datagram))
    }

    fn close_datagram(&self, key: Key) {
        self.close(key);
    }

    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>> {
        let Room { memory, bytes_each, count, is_bare } = room;
        self.attempt(key, cx, Direction::Read, |connection| {
            let room = Room { memory: &mut *memory, bytes_each, count, is_bare };
            let has_all = datagrams::receive(connection.socket.as_fd(), room, received)?;
            connection.readiness.note_batch(has_all);
            connection.reads.count_as(datagrams::operations(received));
            Ok(())
        })
    }

    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        self.with_socket(key, |socket| datagrams::send(socket.as_fd(), transmits))
    }

    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_writable(key, cx)
    }

    fn set_datagram_gro(&self, key: Key) -> io::Result<()> {
        self.with_socket(key, |socket| datagrams::set_gro(socket.as_fd()))
    }

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress> {
        self.address(key, End::Local)
    }
}
