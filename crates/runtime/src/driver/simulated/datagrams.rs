//! Datagram sockets in a simulated world.

use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use rustix::io::Errno;

use super::Simulated;
use crate::driver::DatagramDriver;
use crate::executor::slots::Key;
use crate::socket::SocketAddress;
use crate::socket::datagram::{DatagramOptions, Received, Room, Transmit};

impl DatagramDriver for Simulated {
    fn open_datagram(&self, options: &DatagramOptions) -> io::Result<Key> {
        Ok(self.world.datagrams.borrow_mut().open(options)?)
    }

    fn adopt_datagram(&self, _socket: OwnedFd, _options: &DatagramOptions) -> io::Result<Key> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn close_datagram(&self, key: Key) {
        let reader = self.world.datagrams.borrow_mut().close(key);
        drop(reader);
    }

    fn poll_recv_datagrams(
        &self,
        key: Key,
        cx: &mut Context<'_>,
        room: Room<'_>,
        received: &mut Vec<Received>,
    ) -> Poll<io::Result<()>> {
        let mut datagrams = self.world.datagrams.borrow_mut();
        let (polled, displaced) = datagrams.poll_recv(&self.world.fate, key, cx, room, received);
        drop(datagrams);
        drop(displaced);
        polled.map_err(io::Error::from)
    }

    fn send_datagrams(&self, key: Key, transmits: &[Transmit<'_>]) -> io::Result<usize> {
        let fate = &self.world.fate;
        let mut datagrams = self.world.datagrams.borrow_mut();
        for (index, transmit) in transmits.iter().enumerate() {
            // The first datagram is lost rather than refused: a sender of single datagrams need not wait for room.
            let is_full = index > 0 && fate.strikes(|faults| faults.short_writes);
            match if is_full { Err(Errno::AGAIN) } else { datagrams.send(fate, key, transmit) } {
                Ok(()) => {}
                Err(errno) if index == 0 => return Err(errno.into()),
                Err(_) => return Ok(index),
            }
        }
        Ok(transmits.len())
    }

    fn poll_send_ready(&self, _key: Key, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.world.fate.strikes(|faults| faults.would_block) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn set_datagram_gro(&self, _key: Key) -> io::Result<()> {
        // Datagrams are never joined in a simulation.
        Ok(())
    }

    fn datagram_address(&self, key: Key) -> io::Result<SocketAddress> {
        Ok(self.world.datagrams.borrow_mut().address(key))
    }
}
