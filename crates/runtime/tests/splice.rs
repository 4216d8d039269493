//! A tunnel moves every byte once and in order, whichever way each piece takes.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;

use common::*;
use gale_runtime::*;
use rustix::net::sockopt;

/// Moves everything from one stream to another and closes that; returns the number of bytes.
async fn tunnel(mut splice: Splice, from: Stream, to: Stream) -> usize {
    let mut moved = 0;
    loop {
        match poll_fn(|cx| splice.poll_transfer(cx, &from, &to)).await.unwrap() {
            0 => break,
            count => moved += count,
        }
    }
    to.shutdown_write().unwrap();
    moved
}

/// Sends the bytes through a tunnel in pieces of this length and compares the output.
async fn carry(splice: Splice, bytes: Vec<u8>, piece: usize, is_slow: bool) {
    let (entry, sender) = tcp_pair().await;
    let (receiver, exit) = if is_slow { tcp_pair().await } else { unix_pair() };
    let moved = Rc::new(Cell::new(0));
    let count = Rc::clone(&moved);
    spawn(async move { count.set(tunnel(splice, entry, exit).await) });
    let sent = bytes.clone();
    spawn(async move {
        for piece in sent.chunks(piece) {
            let mut output = Output::new();
            output.push(piece.to_vec());
            sender.send_all(&mut output).await.unwrap();
            yield_now().await;
        }
        sender.shutdown_write().unwrap();
    });
    let mut received = Vec::new();
    let mut input = Buffer::new();
    while receiver.recv(&mut input, 10_000).await.unwrap() > 0 {
        received.extend_from_slice(input.readable());
        input.clear();
        if is_slow {
            yield_now().await;
        }
    }
    turns(2).await;
    assert!(received == bytes, "{} of {} bytes", received.len(), bytes.len());
    assert_eq!(moved.get(), bytes.len());
}

#[test]
fn everything_arrives_in_pieces_of_all_sizes() {
    run(async {
        for piece in [100, 5_000, 70_000, 2_000_000] {
            let bytes = pattern((100 * piece).min(3_000_000));
            for is_slow in [false, true] {
                carry(Splice::new(), bytes.clone(), piece, is_slow).await;
                carry(Splice::eager(), bytes.clone(), piece, is_slow).await;
            }
        }
        assert_eq!(leased_bytes(), 0);
    });
}

#[test]
fn bytes_received_ahead_come_first() {
    run(async {
        let (entry, sender) = tcp_pair().await;
        let (receiver, exit) = tcp_pair().await;
        send(&sender, b"head").await;
        assert_eq!(receive(&entry, 4).await, b"head");
        // With the ring, a receive is in flight that gets the next data.
        let mut input = Buffer::new();
        assert!(poll_once(&mut Box::pin(entry.recv(&mut input, 100))).await.is_pending());
        turns(2).await;
        send(&sender, b"body, ").await;
        turns(2).await;
        spawn(async move {
            tunnel(Splice::eager(), entry, exit).await;
        });
        turns(2).await;
        send(&sender, b"and more").await;
        drop(sender);
        assert_eq!(receive(&receiver, 14).await, b"body, and more");
        assert_eq!(receiver.recv(&mut Buffer::new(), 10).await.unwrap(), 0);
    });
}

#[test]
fn delays_are_turned_off_behind_the_first_piece() {
    run(async {
        for (splice, nodelay) in [(Splice::new(), true), (Splice::eager(), true), (Splice::new(), false)] {
            let mut splice = splice;
            if nodelay {
                splice.set_nodelay();
            }
            let (entry, sender) = tcp_pair().await;
            let (receiver, exit) = tcp_pair().await;
            for (piece, is_set) in [(b"one", false), (b"two", nodelay), (b"all", nodelay)] {
                send(&sender, piece).await;
                assert_eq!(poll_fn(|cx| splice.poll_transfer(cx, &entry, &exit)).await.unwrap(), 3);
                assert_eq!(receive(&receiver, 3).await, piece);
                assert_eq!(sockopt::tcp_nodelay(&exit).unwrap(), is_set, "{piece:?}");
            }
        }
    });
}

#[test]
fn an_idle_tunnel_has_no_memory_and_a_broken_one_is_an_error() {
    run(async {
        let (entry, sender) = tcp_pair().await;
        let (receiver, exit) = tcp_pair().await;
        let mut splice = Splice::eager();
        send(&sender, b"one").await;
        assert_eq!(poll_fn(|cx| splice.poll_transfer(cx, &entry, &exit)).await.unwrap(), 3);
        assert_eq!(receive(&receiver, 3).await, b"one");
        let mut moving = Box::pin(poll_fn(|cx| splice.poll_transfer(cx, &entry, &exit)));
        assert!(poll_once(&mut moving).await.is_pending());
        assert_eq!(leased_bytes(), 0);
        drop(moving);
        receiver.set_linger_reset().unwrap();
        drop(receiver);
        turns(2).await;
        send(&sender, b"two").await;
        let moved = poll_fn(|cx| splice.poll_transfer(cx, &entry, &exit)).await;
        assert!(moved.is_err(), "{moved:?}");
    });
}
