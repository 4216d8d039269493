//! State that a slot keeps after its connection was closed, and for how long: invisible from outside the driver.
//!
//! The generation keeps completions from the next owner of a slot. The slot stays for the memory that the kernel reads,
//! for cancellations that have to be repeated, and so that the end of a loop can wait for it.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::connection::InFlight;
use super::ending::CLOSE_PAUSE;
use super::*;

/// `IORING_CQE_F_MORE`.
const MORE: u32 = 2;

/// Waits of `CLOSE_PAUSE`, one completion each: only a failing test needs so many.
const WAITS_MAX: u32 = 1000;

/// A driver that takes completions one by one; `None` without io_uring.
fn driver(options: &RingOptions) -> Option<IoUring> {
    let inbox = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let driver = IoUring::new(options, false, 1, inbox.as_fd());
    driver.inspect_err(|_| crate::skips::skip("no io_uring here")).ok()
}

/// A connection on the ring, and its peer.
fn attach(driver: &IoUring) -> (Key, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    let key = driver.attach(near.into(), Fresh::Connected);
    with(driver, key, |connection| connection.mode = Mode::Ring(Expects::Messages));
    (key, far)
}

fn with<T>(driver: &IoUring, key: Key, look: impl FnOnce(&mut Connection) -> T) -> T {
    look(driver.connections.borrow_mut().get_mut(key).expect("the slot is there"))
}

fn wait_until_free(driver: &IoUring, key: Key) {
    for _ in 0..WAITS_MAX {
        if driver.connections.borrow_mut().get_mut(key).is_none() {
            return;
        }
        driver.wait(Some(CLOSE_PAUSE)).unwrap();
    }
    panic!("the slot is not free");
}

/// Makes a send wait for room in the socket: a queued one, or the rest of a fire-and-forget one.
fn send_into_full_socket(driver: &IoUring, key: Key, is_fire_and_forget: bool) {
    with(driver, key, |connection| while rustix::io::write(connection.socket(), &[7; 1000]).is_ok() {});
    with(driver, key, |connection| while rustix::io::write(connection.socket(), &[7]).is_ok() {});
    if !is_fire_and_forget || driver.try_send_copy(key, &[1; 900], false).unwrap() == 0 {
        let mut out = Output::new();
        out.push(vec![1; 900]);
        assert!(driver.poll_send(key, &mut Context::from_waker(Waker::noop()), &mut out).is_pending());
    }
    // A fire-and-forget send fails first.
    for _ in 0..2 {
        driver.wait(Some(Duration::ZERO)).unwrap();
    }
    assert!(with(driver, key, |connection| connection.in_flight.has(Op::Send)), "the kernel waits for room");
}

#[test]
fn memory_of_a_send_stays_until_its_own_completion() {
    let Some(driver) = driver(&RingOptions::default()) else { return };
    for is_fire_and_forget in [false, true] {
        let (key, peer) = attach(&driver);
        assert!(driver.poll_peer_closed(key, &mut Context::from_waker(Waker::noop())).is_pending());
        send_into_full_socket(&driver, key, is_fire_and_forget);
        // Otherwise its rest would keep the connection.
        driver.set_linger_reset(key).unwrap();
        driver.close(key);
        // Until the kernel gets the cancellations, only the poll for the hang-up can complete.
        let cancellations = std::mem::take(&mut *driver.requests.borrow_mut());
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        while with(&driver, key, |connection| connection.in_flight.has(Op::HungUp)) {
            assert!(with(&driver, key, |connection| connection.sending().is_some()), "it is in flight");
            driver.wait(None).unwrap();
        }
        assert!(with(&driver, key, |connection| connection.sending().is_some()), "it is still in flight");
        driver.requests.borrow_mut().extend(cancellations);
        wait_until_free(&driver, key);
    }
}

#[test]
fn a_cancellation_that_found_nothing_is_made_again_although_the_connection_is_closed() {
    let Some(driver) = driver(&RingOptions::default()) else { return };
    let (key, mut peer) = attach(&driver);
    assert!(driver.poll_peer_closed(key, &mut Context::from_waker(Waker::noop())).is_pending());
    driver.wait(Some(Duration::ZERO)).unwrap();
    driver.close(key);
    // As if the kernel had just been between two attempts.
    driver.requests.borrow_mut().clear();
    let operation = user_data(KIND_CANCEL_OP, key);
    driver.handle_completion(&Completion { user_data: operation, result: -libc::ENOENT, flags: 0 });
    wait_until_free(&driver, key);
    assert_eq!(peer.read(&mut [0]).expect("nothing holds the connection any more"), 0);
}

#[test]
fn loop_that_ends_waits_for_operations_of_closed_connections() {
    let Some(driver) = driver(&RingOptions::default()) else { return };
    let (key, mut peer) = attach(&driver);
    send_into_full_socket(&driver, key, false);
    driver.close(key);
    // As on kernels that cannot cancel everything at once.
    assert!(driver.finish_closed());
    peer.read_to_end(&mut Vec::new()).expect("what had been sent, and the end");
}

#[test]
fn no_completion_reaches_the_next_owner_of_a_slot() {
    let Some(driver) = driver(&RingOptions::default()) else { return };
    let (old, _old_peer) = attach(&driver);
    driver.close(old);
    let (new, _new_peer) = attach(&driver);
    assert_eq!(old.index, new.index);
    with(&driver, new, |connection| {
        connection.in_flight.arm(Receive::Single, 0);
        Op::ALL.into_iter().filter(|op| *op != Op::Recv).for_each(|op| connection.in_flight.add(op));
    });
    let state = || {
        let requests = driver.requests.borrow().len();
        with(&driver, new, |connection| {
            let Connection { readiness, mode, .. } = *connection;
            let receive_error = connection.busy.as_ref().and_then(|busy| busy.receive_error);
            let in_flight = Op::ALL.map(|op| connection.in_flight.has(op));
            (readiness, mode, receive_error, in_flight, requests)
        })
    };
    let before = state();
    for op in Op::ALL {
        // The driver counts receives that have ended.
        let flags = if op == Op::Recv { MORE } else { 0 };
        for result in [-libc::ECANCELED, -libc::ECONNRESET, 0, libc::EPOLLRDHUP, i32::from(libc::POLLHUP)] {
            driver.handle_completion(&Completion { user_data: user_data(op as u64, old), result, flags });
        }
    }
    let cancelled = user_data(KIND_CANCEL_OP, old);
    driver.handle_completion(&Completion { user_data: cancelled, result: -libc::ENOENT, flags: 0 });
    assert_eq!(state(), before);
    with(&driver, new, |connection| connection.in_flight = InFlight::default());
    driver.close(new);
}
