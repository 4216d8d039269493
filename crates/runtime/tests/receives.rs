//! Receives on the ring: multishot receives and their ends, lack of buffers, polls in place of idle receives.

mod common;

const DRIVER: DriverChoice = DriverChoice::IoUring;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// Limit of one multishot receive.
const MULTISHOT_BYTES: usize = 16 * 1024;

fn with_ring(ring: RingOptions) -> LoopOptions {
    LoopOptions { ring, ..simulated_time() }
}

/// A stream that has received data before, and its peer.
async fn kept_alive() -> (Stream, UnixStream) {
    let (near, mut peer) = UnixStream::pair().unwrap();
    let stream = Stream::from_fd(near.into()).unwrap();
    peer.write_all(b"first").unwrap();
    assert_eq!(receive(&stream, 5).await, b"first");
    (stream, peer)
}

/// Arms a receive on the stream and abandons it.
async fn arm(stream: &Stream) {
    let mut input = Buffer::new();
    assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 1000))).await.is_pending());
    turns(2).await;
}

/// Number of receives submitted for a hundred requests of a connection.
async fn receives_per_hundred() -> u64 {
    let (server, client) = tcp_pair().await;
    let answering = async move {
        let (mut input, mut output) = (Buffer::new(), Output::new());
        while server.recv(&mut input, 1000).await.unwrap() > 0 {
            output.push(input.take_lease().unwrap());
            server.send_all(&mut output).await.unwrap();
        }
    };
    spawn(answering);
    let before = ring_counters();
    for _ in 0..100 {
        send(&client, b"question").await;
        // The client's own receives are larger than a buffer of the ring, so they are polls.
        let mut input = Buffer::new();
        while input.len() < 8 {
            assert_ne!(client.recv(&mut input, 10_000).await.unwrap(), 0);
        }
    }
    ring_counters().receives - before.receives
}

#[test]
fn one_receive_serves_all_requests_of_a_connection() {
    if !kernel_has(6, 0) {
        return;
    }
    let receives = event_loop(simulated_time()).run(receives_per_hundred());
    assert!(receives <= 2, "the first, and one for all others: {receives}");
    let single = RingOptions { multishot: false, ..RingOptions::default() };
    let receives = event_loop(with_ring(single)).run(receives_per_hundred());
    assert!(receives >= 99, "one for each: {receives}");
    let polls = RingOptions { buffers: 0, ..RingOptions::default() };
    assert_eq!(event_loop(with_ring(polls)).run(receives_per_hundred()), 0);
}

#[test]
fn a_receive_that_has_got_its_share_is_armed_again() {
    event_loop(simulated_time()).run(async {
        let (server, mut client) = kept_alive().await;
        let before = ring_counters();
        let sent = pattern(1000 * 100);
        let mut received = Vec::new();
        for piece in sent.chunks(100) {
            let mut input = Buffer::new();
            let mut receiving = Box::pin(server.recv(&mut input, 1000));
            let is_there = poll_once(&mut receiving).await.is_ready();
            assert!(!is_there);
            client.write_all(piece).unwrap();
            receiving.await.unwrap();
            received.extend_from_slice(input.readable());
        }
        assert!(received == sent);
        if kernel_has(6, 17) {
            let receives = (ring_counters().receives - before.receives) as usize;
            let shares = sent.len() / MULTISHOT_BYTES;
            assert!((shares..=shares + 2).contains(&receives), "{receives}");
        }
    });
}

#[test]
fn unread_input_is_bounded_and_not_lost() {
    for multishot in [true, false] {
        event_loop(with_ring(RingOptions { multishot, ..RingOptions::default() })).run(async move {
            let (server, client) = unix_pair();
            send(&client, b"first").await;
            receive(&server, 5).await;
            arm(&server).await;
            let sent = Bytes::from(pattern(16 << 20));
            let mut output = Output::new();
            output.push(sent.clone());
            let sending = spawn(async move {
                client.send_all(&mut output).await.unwrap();
            });
            // Virtual time passes only when nothing else can happen.
            sleep(Duration::from_secs(1)).await;
            let bound = if kernel_has(6, 17) { MULTISHOT_BYTES } else { 1 << 20 };
            assert!(leased_bytes() <= bound, "{} bytes wait", leased_bytes());
            let mut received = Vec::new();
            let mut input = Buffer::new();
            // First in small pieces, then in large ones.
            while received.len() < sent.len() {
                let max = if received.len() < 100_000 { 777 } else { 65_536 };
                assert_ne!(server.recv(&mut input, max).await.unwrap(), 0);
                received.extend_from_slice(input.readable());
                input.clear();
            }
            assert!(received == sent);
            abort(sending);
        });
    }
}

#[test]
fn a_body_is_received_into_its_destination_after_the_multishot_receive_has_ended() {
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        let server = Rc::new(server);
        send(&client, b"first").await;
        assert_eq!(receive(&server, 5).await, b"first");
        for round in 0..20 {
            // A head on the ring, then a body larger than its buffers, then a head again.
            arm(&server).await;
            send(&client, b"head").await;
            assert_eq!(receive(&server, 4).await, b"head");
            let body = pattern(300_000 + round);
            let before = ring_counters();
            let receiver = Rc::clone(&server);
            let expected = body.clone();
            let (done, is_done) = (Rc::new(std::cell::Cell::new(false)), Rc::new(std::cell::Cell::new(false)));
            let told = Rc::clone(&is_done);
            spawn(async move {
                let mut input = Buffer::new();
                while input.len() < expected.len() {
                    let max = (expected.len() - input.len()).min(16 * 1024);
                    assert_ne!(receiver.recv(&mut input, max).await.unwrap(), 0);
                }
                assert!(input.readable() == expected);
                told.set(true);
            });
            drop(done);
            if round % 2 == 0 {
                turns(3).await;
            }
            let mut output = Output::new();
            output.push(Bytes::from(body));
            client.send_all(&mut output).await.unwrap();
            while !is_done.get() {
                yield_now().await;
            }
            let receives = ring_counters().receives - before.receives;
            assert!(receives <= 2, "at most the last piece fits a buffer: {receives}");
        }
    });
}

#[test]
fn buffers_that_run_out_lose_nothing() {
    let ring = RingOptions { buffers: 2, ..RingOptions::default() };
    event_loop(with_ring(ring)).run(async {
        let mut pairs = Vec::new();
        for _ in 0..200 {
            let (server, client) = kept_alive().await;
            arm(&server).await;
            pairs.push((server, client));
        }
        for round in 0..5u8 {
            for (number, (_, client)) in pairs.iter_mut().enumerate() {
                client.write_all(&[round, number as u8]).unwrap();
            }
            for (number, (server, _)) in pairs.iter().enumerate() {
                assert_eq!(receive(server, 2).await, [round, number as u8]);
                arm(server).await;
            }
        }
        if kernel_has(5, 19) {
            assert!(ring_counters().buffers_missed > 0, "there were enough");
        }
    });
}

#[test]
fn idle_connections_wait_by_a_poll_and_come_back() {
    if !kernel_has(5, 19) {
        return;
    }
    event_loop(simulated_time()).run(async {
        let mut pairs = Vec::new();
        for _ in 0..3000 {
            pairs.push(kept_alive().await);
        }
        for (server, _) in &pairs {
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(server.recv(&mut input, 1000))).await.is_pending());
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(ring_counters().idle, 0);
        let before = ring_counters();
        // A period of two seconds, and a few turns, as each visits a limited number of slots.
        sleep(Duration::from_secs(4)).await;
        turns(10).await;
        assert_eq!(ring_counters().idle, 3000);
        assert_eq!(ring_counters().operations - before.operations, 2 * 3000, "a cancellation and a poll each");
        sleep(Duration::from_secs(60)).await;
        assert_eq!(ring_counters().idle, 3000, "once is enough");
        for (server, client) in &mut pairs {
            client.write_all(b"again").unwrap();
            assert_eq!(receive(server, 5).await, b"again");
        }
        let before = ring_counters();
        let (server, client) = &mut pairs[0];
        for _ in 0..10 {
            arm(server).await;
            client.write_all(b"more").unwrap();
            assert_eq!(receive(server, 4).await, b"more");
        }
        let receives = ring_counters().receives - before.receives;
        assert!(receives >= 1 && (receives == 1 || !kernel_has(6, 0)), "{receives}");
    });
}

#[test]
fn data_that_arrives_while_an_idle_connection_changes_over_is_not_lost() {
    for turn in 0..6 {
        for wait in [true, false] {
            event_loop(simulated_time()).run(async move {
                let (server, mut client) = kept_alive().await;
                let mut input = Buffer::new();
                let mut receiving = Box::pin(server.recv(&mut input, 1000));
                assert!(poll_once(&mut receiving).await.is_pending());
                turns(2).await;
                if !wait {
                    drop(receiving);
                    receiving = Box::pin(server.recv(&mut input, 1000));
                }
                sleep(Duration::from_secs(5)).await;
                turns(turn).await;
                client.write_all(b"just").unwrap();
                turns(turn % 3).await;
                client.write_all(b" now").unwrap();
                receiving.await.unwrap();
                while input.len() < 8 {
                    assert_ne!(server.recv(&mut input, 1000).await.unwrap(), 0);
                }
                assert_eq!(input.readable(), b"just now");
                drop(client);
                input.clear();
                assert_eq!(server.recv(&mut input, 1000).await.unwrap(), 0);
            });
        }
    }
}

#[test]
fn the_leaving_of_a_peer_is_noticed_however_its_connection_waits() {
    event_loop(simulated_time()).run(async {
        for idle_seconds in [0, 1, 3, 10] {
            for unread in [0, 100, 100_000] {
                let (server, client) = UnixStream::pair().unwrap();
                let server = Stream::from_fd(server.into()).unwrap();
                arm(&server).await;
                let mut left = Box::pin(server.peer_closed());
                assert!(poll_once(&mut left).await.is_pending());
                sleep(Duration::from_secs(idle_seconds)).await;
                turns(3).await;
                assert!(poll_once(&mut left).await.is_pending(), "nobody has left");
                client.set_nonblocking(true).unwrap();
                let written = (&client).write(&vec![7; unread]).unwrap();
                turns(3).await;
                assert!(poll_once(&mut left).await.is_pending(), "data is not an end");
                drop(client);
                left.await;
                let mut input = Buffer::new();
                while server.recv(&mut input, 1 << 20).await.unwrap() > 0 {}
                assert_eq!(input.len(), written);
            }
        }
    });
}

#[test]
fn closing_an_idle_connection_ends_it() {
    event_loop(simulated_time()).run(async {
        for seconds in [0, 5, 10] {
            let (server, mut client) = kept_alive().await;
            arm(&server).await;
            sleep(Duration::from_secs(seconds)).await;
            drop(server);
            turns(2).await;
            client.set_nonblocking(true).unwrap();
            assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
        }
    });
}

#[test]
fn error_comes_after_the_bytes_received_before() {
    event_loop(simulated_time()).run(async {
        let (server, client) = tcp_pair().await;
        send(&client, b"first").await;
        assert_eq!(receive(&server, 5).await, b"first");
        arm(&server).await;
        send(&client, b"last words").await;
        turns(3).await;
        client.set_linger_reset().unwrap();
        drop(client);
        turns(3).await;
        assert_eq!(receive(&server, 10).await, b"last words");
        let error = server.recv(&mut Buffer::new(), 10).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn slots_and_descriptors_are_used_again_while_old_receives_still_tell() {
    // Completions taken one by one are the stalest.
    for (multishot, events_max) in [(true, 1), (true, 2), (true, 3), (true, 512), (false, 1), (false, 512)] {
        let ring = RingOptions { buffers: 4, multishot, ..RingOptions::default() };
        event_loop(LoopOptions { events_max, ..with_ring(ring) }).run(async {
            for round in 0..400 {
                let (old, mut old_peer) = kept_alive().await;
                let mut input = Buffer::new();
                assert!(poll_once(&mut Box::pin(old.recv(&mut input, 1000))).await.is_pending());
                turns(round as u32 % 3).await;
                // Several full buffers.
                old_peer.write_all(&[9; 10_000][..2_500 * (round % 5)]).unwrap();
                turns(round as u32 % 2).await;
                // The slot and the number of the descriptor are the next to be reused.
                drop(old);
                let (new, mut new_peer) = kept_alive().await;
                let mut receiving = Box::pin(new.recv(&mut input, 1000));
                assert!(poll_once(&mut receiving).await.is_pending());
                turns(round as u32 % 4).await;
                new_peer.write_all(b"mine").unwrap();
                receiving.await.unwrap();
                assert_eq!(input.readable(), b"mine", "round {round}");
                input.clear();
                drop(new_peer);
                assert_eq!(new.recv(&mut input, 1000).await.unwrap(), 0);
            }
            // All buffers were returned.
            let mut pairs = Vec::new();
            for _ in 0..4 {
                pairs.push(kept_alive().await);
            }
            let before = ring_counters();
            for (server, _) in &pairs {
                arm(server).await;
            }
            turns(20).await;
            for (_, client) in &mut pairs {
                client.write_all(b"more").unwrap();
            }
            turns(20).await;
            for (server, _) in &pairs {
                assert_eq!(receive(server, 4).await, b"more");
            }
            assert_eq!(ring_counters().buffers_missed, before.buffers_missed);
        });
    }
}
