//! Idle streams that any loop may take: without the help of the loop that parked them, each once, and none that has
//! ended.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use gale_runtime::*;

const LIMITS: IdleOptions = IdleOptions { loops: 2, per_loop_max: 8, timeout: Duration::from_secs(3600) };

/// A stream of the running loop, and its peer.
fn pair() -> (Stream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (Stream::from_fd(stream.into()).unwrap(), peer)
}

/// Sends a question, lets the peer answer, and receives the answer.
async fn ask(stream: &Stream, peer: &mut TcpStream) {
    send(stream, b"question").await;
    let mut question = [0; 8];
    peer.read_exact(&mut question).unwrap();
    assert_eq!(&question, b"question");
    peer.write_all(b"answer").unwrap();
    assert_eq!(receive(stream, 6).await, b"answer");
}

fn is_closed(peer: &mut TcpStream) -> bool {
    match peer.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        thread::yield_now();
    }
}

#[test]
fn a_stream_is_taken_while_the_loop_that_parked_it_is_stuck_and_after_its_end() {
    let streams = IdleStreams::<u32>::new(LIMITS);
    let (sender, receiver) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let owners = streams.clone();
    let owner = thread::spawn(move || {
        let options = LoopOptions { worker: 1, ..options() };
        event_loop(options).run(async move {
            let mut peers = Vec::new();
            for _ in 0..2 {
                let (stream, mut peer) = pair();
                ask(&stream, &mut peer).await;
                // With the ring, an abandoned receive is in flight.
                let mut input = Buffer::new();
                assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 100))).await.is_pending());
                turns(2).await;
                assert!(owners.park(7, stream, ()));
                peers.push(peer);
            }
            sender.send(peers).unwrap();
            // A turn that does not end.
            released.recv().unwrap();
        });
    });
    let mut peers = receiver.recv().unwrap();
    let take_one = |peer: &mut TcpStream| {
        run_real(async {
            assert!(streams.take(&8).is_none(), "another key");
            let (stream, ()) = streams.take(&7).unwrap();
            ask(&stream, peer).await;
        });
    };
    // The stream that was parked last is taken first.
    take_one(&mut peers[1]);
    release.send(()).unwrap();
    owner.join().unwrap();
    take_one(&mut peers[0]);
    assert!(streams.is_empty());
}

#[test]
fn idle_stream_is_closed_when_its_peer_closes() {
    run_real(async {
        let streams = IdleStreams::<u32>::new(LIMITS);
        let (stream, peer) = pair();
        assert!(streams.park(1, stream, ()));
        assert_eq!(streams.len(), 1);
        drop(peer);
        wait_until("the stream is still parked", || streams.is_empty());
        assert!(streams.take(&1).is_none());
    });
}

#[test]
fn a_stream_on_which_something_arrives_is_not_idle_and_is_closed() {
    run_real(async {
        let streams = IdleStreams::<u32>::new(LIMITS);
        let (stream, mut peer) = pair();
        assert!(streams.park(1, stream, ()));
        peer.write_all(b"unasked").unwrap();
        wait_until("the stream is still parked", || streams.is_empty());
        assert!(is_closed(&mut peer));

        let (stream, mut peer) = pair();
        peer.write_all(b"unasked").unwrap();
        std::future::poll_fn(|cx| stream.poll_readable(cx)).await.unwrap();
        assert!(!streams.park(1, stream, ()));
        turns(2).await;
        assert!(is_closed(&mut peer));
    });
}

#[test]
fn the_oldest_is_closed_when_there_are_too_many() {
    run_real(async {
        let streams = IdleStreams::new(IdleOptions { per_loop_max: 2, ..LIMITS });
        let mut peers = Vec::new();
        for number in 0..3 {
            let (stream, peer) = pair();
            assert!(streams.park("key", stream, number));
            peers.push(peer);
        }
        assert_eq!(streams.len(), 2);
        assert!(is_closed(&mut peers[0]));
        for number in [2, 1] {
            let (stream, found) = streams.take("key").unwrap();
            assert_eq!(found, number);
            ask(&stream, &mut peers[number]).await;
        }
        assert!(streams.take("key").is_none());
    });
}

#[test]
fn idle_stream_is_closed_at_the_timeout() {
    run_real(async {
        let streams = IdleStreams::<u32>::new(IdleOptions { timeout: Duration::from_millis(1), ..LIMITS });
        let (stream, mut peer) = pair();
        assert!(streams.park(1, stream, ()));
        assert!(is_closed(&mut peer), "nobody asks, and the thread closes it");
        assert!(streams.is_empty());
        let (stream, _peer) = pair();
        streams.park(1, stream, ());
        let begin = Instant::now();
        wait_until("time stands still", || begin.elapsed() > Duration::from_millis(2));
        assert!(streams.take(&1).is_none());
    });
}

#[test]
fn streams_are_closed_with_their_last_handle() {
    run_real(async {
        let streams = IdleStreams::<u32>::new(LIMITS);
        let (stream, mut peer) = pair();
        assert!(streams.park(1, stream, ()));
        let other = streams.clone();
        drop(streams);
        assert_eq!(other.len(), 1);
        drop(other);
        assert!(is_closed(&mut peer));
    });
}

#[test]
fn loops_that_park_and_take_at_once_never_share_a_stream() {
    const LOOPS: usize = 3;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = SocketAddress::Inet(listener.local_addr().unwrap());
    // Echoes what it receives, and closes some idle connections.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut bytes = [0; 8];
                for _ in 0..40 {
                    if stream.read_exact(&mut bytes).is_err() || stream.write_all(&bytes).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let streams = IdleStreams::<u32>::new(IdleOptions { loops: LOOPS, ..LIMITS });
    let loops: Vec<_> = (0..LOOPS)
        .map(|worker| {
            let (streams, address) = (streams.clone(), address.clone());
            thread::spawn(move || {
                event_loop(LoopOptions { worker, ..options() }).run(async move {
                    let mut taken = 0;
                    for number in 0..300u32 {
                        let (stream, is_fresh) = match streams.take(&1) {
                            Some((stream, ())) => (stream, false),
                            None => (Stream::connect(&address).await.unwrap(), true),
                        };
                        taken += u32::from(!is_fresh);
                        let question = [worker as u32, number].map(u32::to_be_bytes).concat();
                        let mut output = Output::new();
                        output.push(question.clone());
                        let mut input = Buffer::new();
                        let mut asked = stream.send_all(&mut output).await;
                        while asked.is_ok() && input.len() < question.len() {
                            asked = match stream.recv(&mut input, 100).await {
                                Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                                received => received.map(drop),
                            };
                        }
                        match asked {
                            Ok(()) => assert_eq!(input.readable(), question, "an answer to somebody else"),
                            // The server has closed the connection at the moment when it was taken.
                            Err(error) => assert!(!is_fresh, "{error}"),
                        }
                        // The other loops take it, or this one does.
                        for _ in 0..worker {
                            yield_now().await;
                        }
                        if asked_well(&input, &question) {
                            streams.park(1, stream, ());
                        }
                    }
                    taken
                })
            })
        })
        .collect();
    let taken: u32 = loops.into_iter().map(|running| running.join().unwrap()).sum();
    assert!(taken > 100, "{taken} were taken");
}

fn asked_well(input: &Buffer, question: &[u8]) -> bool {
    input.readable() == question
}
