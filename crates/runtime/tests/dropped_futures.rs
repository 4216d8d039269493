//! Futures of stream operations dropped in every state: before and after the operation was submitted, between its
//! completion and the report of it, in the middle of the data. Afterwards everything is in order, or released.
//!
//! Under AddressSanitizer it also verifies that freed memory is not used (CONTRIBUTING.md has the command).

pub(crate) mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;

/// Turns between the first poll, the peer's action, and the drop: more than any operation takes.
const TURNS_MAX: u32 = 3;

/// Fate of the stream after the future was dropped.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Then {
    GoOn,
    /// Closed this many turns after the drop.
    Close(u32),
    Move,
    /// Closed, and another stream gets its slot at once.
    Replace,
}

const THENS: [Then; 5] = [Then::GoOn, Then::Close(0), Then::Close(2), Then::Move, Then::Replace];

/// Runs every combination, each on a fresh connection of one loop.
fn for_each_state(mut case: impl AsyncFnMut(u32, u32, Then)) {
    event_loop(simulated_time()).run(async {
        for before in 0..=TURNS_MAX {
            for after in 0..=TURNS_MAX {
                for then in THENS {
                    let leased = leased_bytes();
                    case(before, after, then).await;
                    turns(TURNS_MAX).await;
                    assert_eq!(leased_bytes(), leased, "{before} {after} {then:?}: memory was not given back");
                }
            }
        }
    });
}

/// A stream on which a receive has waited, so that io_uring queues its sends, with its peer.
async fn connection() -> (Stream, UnixStream) {
    let (near, mut peer) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(near.as_fd(), 4096).unwrap();
    let stream = Stream::from_fd(near.into()).unwrap();
    for _ in 0..2 {
        let mut input = Buffer::new();
        let mut receiving = Box::pin(stream.recv(&mut input, 100));
        assert!(poll_once(&mut receiving).await.is_pending());
        peer.write_all(b"warm").unwrap();
        assert_eq!(receiving.await.unwrap(), 4);
    }
    peer.set_nonblocking(true).unwrap();
    (stream, peer)
}

/// Everything received until the end of the stream; fails if that does not come.
async fn receive_all(stream: &Stream) -> Vec<u8> {
    let mut input = Buffer::new();
    // Virtual time passes only when nothing else can happen.
    let everything = async { while stream.recv(&mut input, 5000).await.unwrap() > 0 {} };
    timeout(Duration::from_secs(1), everything).await.expect("the stream has no end");
    input.readable().to_vec()
}

/// Everything that the peer can read until the end.
async fn read_all(peer: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..10_000 {
        match peer.read_to_end(&mut bytes) {
            Ok(_) => return bytes,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        yield_now().await;
    }
    panic!("no end after {} bytes", bytes.len());
}

/// Reads what one call of the peer returns, if there is data.
fn read_piece(peer: &mut UnixStream, max: usize, read: &mut Vec<u8>) {
    let mut piece = vec![0; max];
    if let Ok(count) = peer.read(&mut piece) {
        read.extend_from_slice(&piece[..count]);
    }
}

/// Sends everything queued, to a peer that keeps reading.
async fn send_to_reader(stream: &Stream, out: &mut Output, peer: &mut UnixStream, read: &mut Vec<u8>) {
    let mut sending = Box::pin(stream.send_all(out));
    while poll_once(&mut sending).await.is_pending() {
        read_piece(peer, 9000, read);
        yield_now().await;
    }
}

/// Checks that a connection that replaced another works like a fresh one.
async fn assert_fresh(stream: Stream, mut peer: UnixStream) {
    peer.write_all(b"mine alone").unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(receive_all(&stream).await, b"mine alone");
    send(&stream, b"answer").await;
    drop(stream);
    assert_eq!(read_all(&mut peer).await, b"answer");
}

fn fresh() -> (Stream, UnixStream) {
    let (near, peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    (Stream::from_fd(near.into()).unwrap(), peer)
}

/// Carries out `then`: returns the stream and its peer if they go on; otherwise checks that the stream has ended.
async fn go_on(stream: Stream, peer: UnixStream, then: Then) -> Option<(Stream, UnixStream)> {
    match then {
        Then::GoOn => return Some((stream, peer)),
        Then::Move => return Some((stream.detach().unwrap().attach(), peer)),
        Then::Close(delay) => {
            turns(delay).await;
            drop(stream);
        }
        Then::Replace => {
            drop(stream);
            let (stream, other) = fresh();
            assert_fresh(stream, other).await;
        }
    }
    assert_ended(peer).await;
    None
}

async fn dropped_receive(max: usize, before: u32, after: u32, then: Then) {
    let (stream, mut peer) = connection().await;
    let mut received = Vec::new();
    {
        let mut input = Buffer::new();
        {
            let mut receiving = Box::pin(stream.recv(&mut input, max));
            assert!(poll_once(&mut receiving).await.is_pending());
            turns(before).await;
            peer.write_all(&pattern(3000)).unwrap();
            turns(after).await;
        }
        assert!(input.is_empty(), "only a poll fills it");
    }
    let Some((stream, mut peer)) = go_on(stream, peer, then).await else { return };
    peer.write_all(&pattern(3000)).unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    received.extend(receive_all(&stream).await);
    assert!(received == [pattern(3000), pattern(3000)].concat(), "{before} {after} {then:?}");
}

/// The peer sees the end of the connection, or a reset where it was closed with data unread.
async fn assert_ended(mut peer: UnixStream) {
    for _ in 0..100 {
        match peer.read(&mut [0; 100]) {
            Ok(0) => return,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            Ok(count) => panic!("{count} bytes that nobody sent"),
        }
        yield_now().await;
    }
    panic!("the connection was not closed");
}

#[test]
fn a_receive_dropped_in_any_state_loses_nothing() {
    for_each_state(async |before, after, then| dropped_receive(100, before, after, then).await);
}

#[test]
fn a_large_receive_dropped_in_any_state_loses_nothing() {
    for_each_state(async |before, after, then| dropped_receive(10_000, before, after, then).await);
}

/// Leases, shared and static bytes: together `length` bytes of the pattern.
fn output(length: usize) -> Output {
    let bytes = pattern(length);
    let mut output = Output::new();
    let (first, rest) = bytes.split_at(length / 3);
    output.push(Lease::copy_of(first).unwrap());
    output.push(Bytes::copy_from_slice(rest));
    output
}

async fn dropped_send(length: usize, before: u32, after: u32, then: Then) {
    let (stream, mut peer) = connection().await;
    let mut out = output(length);
    let mut read = Vec::new();
    {
        let mut sending = Box::pin(stream.send(&mut out));
        let _ = poll_once(&mut sending).await;
        turns(before).await;
        read_piece(&mut peer, 700, &mut read);
        turns(after).await;
    }
    let sent = pattern(length);
    match then {
        Then::GoOn => {
            out.push(b"tail");
            send_to_reader(&stream, &mut out, &mut peer, &mut read).await;
            assert!(out.is_empty());
            drop(stream);
            read.extend(read_all(&mut peer).await);
            assert!(read == [&sent[..], b"tail"].concat(), "{before} {after}: {} of {length}", read.len());
            return;
        }
        // With a send in flight it is refused, and the connection is closed.
        Then::Move => match stream.detach() {
            Ok(detached) => drop(detached.attach()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ResourceBusy),
        },
        Then::Close(delay) => {
            if delay > 0 {
                // The bytes are dropped before the stream.
                drop(std::mem::take(&mut out));
            }
            turns(delay).await;
            drop(stream);
        }
        Then::Replace => {
            drop(stream);
            let (stream, other) = fresh();
            assert_fresh(stream, other).await;
        }
    }
    drop(out);
    // Bytes that reuse the memory must not be sent in its place.
    let next: Vec<u8> = sent.iter().map(|byte| !byte).collect();
    let _next: Vec<(Lease, Vec<u8>)> =
        (0..4).map(|_| (Lease::copy_of(&next[..length / 3]).unwrap(), next[length / 3..].to_vec())).collect();
    read.extend(read_all(&mut peer).await);
    assert!(sent.starts_with(&read), "{before} {after} {then:?}: {} bytes", read.len());
}

#[test]
fn a_send_dropped_in_any_state_keeps_order_and_memory() {
    for_each_state(async |before, after, then| dropped_send(900, before, after, then).await);
}

#[test]
fn a_send_into_a_full_socket_dropped_in_any_state_keeps_order_and_memory() {
    for_each_state(async |before, after, then| dropped_send(30_000, before, after, then).await);
}

#[test]
fn a_large_send_dropped_in_any_state_keeps_order_and_memory() {
    for_each_state(async |before, after, then| dropped_send(300_000, before, after, then).await);
}

/// Sends a short response into a socket with room for all, for some or for none of it, and then carries out `then`. No
/// future is dropped: bytes that count as sent have to arrive without one.
async fn left_answer(room: Room, before: u32, after: u32, then: Then) {
    let (stream, mut peer) = connection().await;
    let mut sent = match room {
        Room::Enough => Vec::new(),
        Room::Some => fill(&stream, 1000),
        Room::None => fill(&stream, 0),
    };
    let answer = pattern(3000);
    for half in answer.chunks(1500) {
        let count = stream.try_send_copy(half, false).unwrap();
        sent.extend_from_slice(&half[..count]);
        if count < half.len() {
            break;
        }
    }
    turns(before).await;
    let mut read = Vec::new();
    read_piece(&mut peer, 700, &mut read);
    turns(after).await;
    match then {
        Then::GoOn => {
            let mut out = Output::new();
            out.push(b"tail");
            sent.extend_from_slice(b"tail");
            send_to_reader(&stream, &mut out, &mut peer, &mut read).await;
            drop(stream);
        }
        // Unsent bytes cannot move with the stream, so the connection is closed then.
        Then::Move => match stream.detach() {
            Ok(detached) => drop(detached.attach()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ResourceBusy);
            }
        },
        Then::Close(delay) => {
            turns(delay).await;
            drop(stream);
        }
        Then::Replace => {
            drop(stream);
            let (stream, other) = fresh();
            assert_fresh(stream, other).await;
        }
    }
    read.extend(read_all(&mut peer).await);
    all_sent().await;
    assert!(read == sent, "{room:?} {before} {after} {then:?}: {} of {} bytes", read.len(), sent.len());
}

#[derive(Clone, Copy, Debug)]
enum Room {
    Enough,
    Some,
    None,
}

/// Writes without the driver until the socket is full, or has about a thousand bytes of room; returns the written
/// bytes.
fn fill(stream: &Stream, room: usize) -> Vec<u8> {
    let mut filled = Vec::new();
    for length in if room == 0 { &[1000, 1][..] } else { &[1000] } {
        while let Ok(written) = rustix::io::write(stream, &vec![7; *length]) {
            filled.extend_from_slice(&vec![7; written]);
            if room > 0 && filled.len() >= 2000 {
                break;
            }
        }
    }
    filled
}

#[test]
fn fire_and_forget_send_arrives_in_any_state_of_its_stream() {
    for room in [Room::Enough, Room::Some, Room::None] {
        for_each_state(async |before, after, then| left_answer(room, before, after, then).await);
    }
}

#[test]
fn a_sendfile_dropped_in_any_state_keeps_its_place() {
    let directory = Directory::new();
    let sent = pattern(100_000);
    let path = directory.file("content", &sent);
    for_each_state(async |before, after, then| {
        let file = files::open(&path, OpenFlags::READ).await.unwrap();
        let (stream, mut peer) = connection().await;
        let mut read = Vec::new();
        let mut offset = 0;
        for _ in 0..2 {
            let mut sending = Box::pin(stream.sendfile(&file, &mut offset, 60_000));
            let _ = poll_once(&mut sending).await;
            turns(before).await;
            read_piece(&mut peer, 3000, &mut read);
            turns(after).await;
        }
        match then {
            Then::Move => drop(stream.detach().unwrap().attach()),
            Then::Replace => {
                drop(stream);
                let (stream, other) = fresh();
                assert_fresh(stream, other).await;
            }
            Then::GoOn | Then::Close(_) => drop(stream),
        }
        read.extend(read_all(&mut peer).await);
        assert!(read == sent[..offset as usize], "{before} {after} {then:?}: {} of {offset}", read.len());
    });
}

#[test]
fn wait_for_the_peer_s_close_is_dropped_in_any_state_without_effect() {
    for_each_state(async |before, after, then| {
        let (stream, mut peer) = connection().await;
        {
            let mut leaving = Box::pin(stream.peer_closed());
            assert!(poll_once(&mut leaving).await.is_pending());
            let mut input = Buffer::new();
            let mut receiving = Box::pin(stream.recv(&mut input, 100));
            assert!(poll_once(&mut receiving).await.is_pending());
            turns(before).await;
            peer.write_all(b"last words").unwrap();
            peer.shutdown(std::net::Shutdown::Write).unwrap();
            turns(after).await;
        }
        let Some((stream, _peer)) = go_on(stream, peer, then).await else { return };
        timeout(Duration::from_secs(1), stream.peer_closed()).await.expect("it has left");
        assert_eq!(receive_all(&stream).await, b"last words");
    });
}

#[test]
fn a_connect_dropped_in_any_state_closes_its_socket() {
    event_loop(simulated_time()).run(async {
        let listener = Listener::bind(&any_port(), 64, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap();
        for turn in 0..=TURNS_MAX {
            let mut connecting = Box::pin(Stream::connect(&address));
            let is_ready = turn > 0 && poll_once(&mut connecting).await.is_ready();
            turns(turn.saturating_sub(1)).await;
            if !is_ready {
                drop(connecting);
            }
            let (stream, _) = listener.accept().await.unwrap();
            assert_eq!(receive_all(&stream).await, b"");
        }
    });
}

#[test]
fn an_accept_dropped_in_any_state_leaves_the_connection_to_the_next() {
    event_loop(simulated_time()).run(async {
        let listener = Listener::bind(&any_port(), 64, AcceptOptions::default()).unwrap();
        let address = listener.local_address().unwrap().inet().unwrap();
        for before in 0..=TURNS_MAX {
            for after in 0..=TURNS_MAX {
                let mut accepting = Box::pin(listener.accept());
                assert!(poll_once(&mut accepting).await.is_pending());
                turns(before).await;
                let client = std::net::TcpStream::connect(address).unwrap();
                turns(after).await;
                drop(accepting);
                let accepted = timeout(Duration::from_secs(1), listener.accept()).await;
                let (_, peer) = accepted.expect("the connection was lost").unwrap();
                assert_eq!(peer.inet(), Some(client.local_addr().unwrap()));
            }
        }
    });
}

#[test]
fn a_close_in_any_state_of_other_operations_is_seen_at_once() {
    event_loop(simulated_time()).run(async {
        for armed in 0..8 {
            for before in 0..=TURNS_MAX {
                let (stream, mut peer) = connection().await;
                let (mut input, mut out) = (Buffer::new(), output(30_000));
                if armed & 1 != 0 {
                    assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 100))).await.is_pending());
                }
                if armed & 2 != 0 {
                    assert!(poll_once(&mut Box::pin(stream.peer_closed())).await.is_pending());
                }
                if armed & 4 != 0 {
                    let _ = poll_once(&mut Box::pin(stream.send_all(&mut out))).await;
                }
                turns(before).await;
                drop(stream);
                // In the turn that closes, the next socket may get the same descriptor.
                let (next, other) = fresh();
                turns(1).await;
                let mut rest = Vec::new();
                peer.read_to_end(&mut rest).expect("all that was sent, and the end");
                assert_fresh(next, other).await;
            }
        }
    });
}

#[test]
fn a_loop_that_ends_in_any_state_of_its_operations_lets_go_of_them() {
    for turn in 0..=TURNS_MAX {
        for is_data_there in [false, true] {
            let leased = leased_bytes();
            let mut peers = event_loop(simulated_time()).run(async move {
                let mut peers = Vec::new();
                for _ in 0..20 {
                    let (stream, mut peer) = connection().await;
                    let stream = std::rc::Rc::new(stream);
                    let (reader, watcher) = (stream.clone(), stream.clone());
                    spawn(async move {
                        let _ = reader.recv(&mut Buffer::new(), 100).await;
                    });
                    spawn(async move { watcher.peer_closed().await });
                    spawn(async move {
                        let mut out = output(20_000);
                        let _ = stream.send_all(&mut out).await;
                        std::future::pending::<()>().await;
                    });
                    if is_data_there {
                        peer.write_all(b"too late").unwrap();
                    }
                    peers.push(peer);
                }
                turns(turn).await;
                peers
            });
            assert_eq!(leased_bytes(), leased);
            for peer in &mut peers {
                // Everything ends at once, with a reset if data was unread.
                match peer.read_to_end(&mut Vec::new()) {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "turn {turn} {is_data_there}"),
                }
            }
        }
    }
}
