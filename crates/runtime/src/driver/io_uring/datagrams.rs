//! Datagram sockets on the ring: batches are received and sent directly, and polls wait for events.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll};

use super::operation::Op;
use super::sockets::Sockets;
use super::{IoUring, Kernel};
use crate::driver::{DatagramDriver, End, Fresh, StreamDriver, datagrams};
use crate::executor::slots::Key;
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};

impl<K: Kernel> DatagramDriver for IoUring<K> {
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.open_datagram(options);
        }
        Ok(self.attach(datagrams::open(options)?, Fresh::Datagram))
    }

    fn adopt_datagram(&self, socket: OwnedFd, options: &DatagramOptions) -> io::Result<Key> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.adopt_datagram(socket, options);
        }
        Ok(self.attach(datagrams::adopt(socket, options)?, Fresh::Datagram))
    }

    fn close_datagram(&self, key: Key) {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.close_datagram(key);
        }
        self.close(key);
    }

    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.poll_recv_datagrams(key, cx, room, received);
        }
        let Room { memory, bytes_each, count, is_bare } = room;
        self.attempt(key, cx, Op::Readable, |connection| {
            let room = Room { memory: &mut *memory, bytes_each, count, is_bare };
            let has_all = datagrams::receive(connection.socket().as_fd(), room, received)?;
            connection.readiness.note_batch(has_all);
            connection.reads.count_as(datagrams::operations(received));
            Ok(())
        })
    }

    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.send_datagrams(key, transmits);
        }
        self.with_socket(key, |socket| datagrams::send(socket.as_fd(), transmits))
    }

    fn poll_send_ready(&self, key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.poll_send_ready(key, cx);
        }
        self.poll_writable(key, cx)
    }

    fn set_datagram_gro(&self, key: Key) -> io::Result<()> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.set_datagram_gro(key);
        }
        self.with_socket(key, |socket| datagrams::set_gro(socket.as_fd()))
    }

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress> {
        if let Some(datagrams) = self.sockets.datagrams() {
            return datagrams.datagram_address(key);
        }
        self.address(key, End::Local)
    }
}
