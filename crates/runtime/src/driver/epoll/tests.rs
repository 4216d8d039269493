//! The driver alone, without a loop.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::task::{Context, Poll, Waker};

use super::*;
use crate::driver::{DatagramDriver, Fresh, StreamDriver};
use crate::memory::buffer::Buffer;
use crate::memory::output::Output;
use crate::socket::datagram::Room;

fn driver() -> Epoll {
    let inbox = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    // Nothing writes to it, so it need not outlive this function.
    Epoll::new(8, inbox.as_fd()).unwrap()
}

fn events(epoll: &Epoll) -> usize {
    epoll.wait(Some(Duration::ZERO)).unwrap()
}

#[test]
fn room_to_send_is_no_event_for_a_reader() {
    let (epoll, mut context) = (driver(), Context::from_waker(Waker::noop()));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let key = epoll.attach(ours.into(), Fresh::Accepted);
    let mut input = Buffer::new();
    assert!(epoll.poll_recv(key, &mut context, &mut input, 100).is_pending());
    assert_eq!(events(&epoll), 0);
    theirs.write_all(b"x").unwrap();
    assert_eq!(events(&epoll), 1);
    assert!(matches!(epoll.poll_recv(key, &mut context, &mut input, 100), Poll::Ready(Ok(1))));
    // A writer that finds the socket full is woken when there is room.
    let mut output = Output::new();
    output.push(vec![0; 1 << 22]);
    while epoll.poll_send(key, &mut context, &mut output).is_ready() {
        assert!(!output.is_empty(), "no socket takes all of it");
        epoll.turn.set(epoll.turn.get() + 1);
    }
    while events(&epoll) > 0 {}
    theirs.set_nonblocking(true).unwrap();
    while matches!(theirs.read(&mut [0; 1 << 16]), Ok(1..)) {}
    assert_eq!(events(&epoll), 1);
    assert!(epoll.poll_send(key, &mut context, &mut output).is_ready());
}

#[test]
fn a_batch_of_datagrams_with_places_left_is_the_last_until_the_next_event() {
    let (epoll, mut context) = (driver(), Context::from_waker(Waker::noop()));
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let key = epoll.attach(ours.into(), Fresh::Datagram);
    let mut memory = [0; 40];
    let mut receive = |context: &mut Context<'_>| {
        let (room, mut received) = (Room { memory: &mut memory, bytes_each: 10, count: 4, is_bare: false }, Vec::new());
        epoll.poll_recv_datagrams(key, context, room, &mut received).map_ok(|()| received.len())
    };
    assert!(receive(&mut context).is_pending());
    for (sent, batches) in [(3, [3, 0]), (4, [4, 0]), (5, [4, 1])] {
        (0..sent).for_each(|_| _ = theirs.send(b"datagram").unwrap());
        assert!(events(&epoll) > 0);
        for expected in batches {
            match receive(&mut context) {
                Poll::Ready(count) => assert_eq!(count.unwrap(), expected),
                Poll::Pending => assert_eq!(expected, 0),
            }
        }
        assert_eq!(events(&epoll), 0);
    }
}
