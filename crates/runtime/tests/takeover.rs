//! Streams that move between loops while data, the end, or a reset is on its way.

pub(crate) mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// A reproducible choice: a failing seed is printed and can be repeated alone.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The other end: blocking, like a remote client.
trait Peer: Read + Write {
    fn end(&self);
}

impl Peer for TcpStream {
    fn end(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

impl Peer for UnixStream {
    fn end(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

fn tcp() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_nodelay(true).unwrap();
    (listener.accept().unwrap().0.into(), client)
}

fn unix() -> (OwnedFd, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    (near.into(), far)
}

#[test]
fn nothing_is_lost_wherever_data_and_the_end_meet_a_move() {
    for seed in 0..300 {
        match seed % 2 {
            0 => move_about(seed, tcp()),
            _ => move_about(seed, unix()),
        }
    }
}

/// Moves a stream between loops of both drivers while its peer sends, and compares the received bytes.
fn move_about(seed: u64, (socket, mut peer): (OwnedFd, impl Peer)) {
    let mut random = Random(seed);
    let sent = pattern(2000 + random.below(60_000) as usize);
    let (mut written, mut ended) = (0, false);
    // Sends a piece, or the end behind the last one.
    let mut go_on = |random: &mut Random| {
        let size = match random.below(4) {
            0 => 0,
            1 => 1 + random.below(10) as usize,
            2 => 1 + random.below(5000) as usize,
            _ => 1 + random.below(20_000) as usize,
        };
        let piece = &sent[written..sent.len().min(written + size)];
        peer.write_all(piece).unwrap();
        written += piece.len();
        if written == sent.len() && !ended {
            peer.end();
            ended = true;
        }
        ended
    };
    let mut received = Vec::new();
    let mut held = Some(Err(socket));
    let mut has_ended = false;
    while !has_ended {
        let driver = if random.below(3) == 0 { DriverChoice::Epoll } else { crate::DRIVER };
        let mut event_loop = event_loop(LoopOptions { driver, ..simulated_time() });
        let from = held.take().unwrap();
        let moved = event_loop.run(async {
            let stream = match from {
                Ok(detached) => Detached::attach(detached),
                Err(socket) => Stream::from_fd(socket).unwrap(),
            };
            for _ in 0..random.below(6) {
                go_on(&mut random);
                turns(random.below(3) as u32).await;
                let max = if random.below(3) == 0 { 20_000 } else { 1 + random.below(2000) as usize };
                let mut input = Buffer::new();
                let result = {
                    let mut receiving = Box::pin(stream.recv(&mut input, max));
                    let mut result = poll_once(&mut receiving).await;
                    for _ in 0..random.below(4) {
                        if result.is_ready() {
                            break;
                        }
                        go_on(&mut random);
                        turns(random.below(3) as u32).await;
                        result = poll_once(&mut receiving).await;
                    }
                    // Dropped here, ready or not.
                    result
                };
                received.extend_from_slice(input.readable());
                if matches!(result.map(Result::unwrap), std::task::Poll::Ready(0)) {
                    has_ended = true;
                    break;
                }
            }
            stream.detach().unwrap()
        });
        go_on(&mut random);
        held = Some(Ok(moved));
        assert!(received.len() <= sent.len(), "seed {seed}: {} of {} bytes", received.len(), sent.len());
        assert!(received == sent[..received.len()], "seed {seed}: not the same bytes");
    }
    assert!(received == sent, "seed {seed}: {} of {} bytes before the end", received.len(), sent.len());
}

#[test]
fn a_stream_goes_back_and_forth_between_running_loops() {
    let (socket, mut peer) = tcp();
    let (remotes_sender, remotes) = mpsc::channel();
    let loops: Vec<_> = (0..2)
        .map(|_| {
            let remotes = remotes_sender.clone();
            let (stop, stopped) = mpsc::channel::<()>();
            let thread = std::thread::spawn(move || {
                let mut event_loop = event_loop(options());
                remotes.send(event_loop.remote()).unwrap();
                let pool = ThreadPool::new("stop", 1, 1);
                event_loop.run(async move {
                    let _ = pool.run(move || stopped.recv().is_ok()).await;
                });
            });
            (thread, stop)
        })
        .collect();
    let remotes: [Remote; 2] = [remotes.recv().unwrap(), remotes.recv().unwrap()];
    let sent = pattern(3 << 20);
    let expected = sent.clone();
    let writer = std::thread::spawn(move || {
        for piece in sent.chunks(4001) {
            peer.write_all(piece).unwrap();
        }
        peer.end();
        let mut answer = Vec::new();
        peer.read_to_end(&mut answer).unwrap();
        answer
    });
    let (done, is_done) = mpsc::channel();
    let first = remotes.clone();
    let begin = move || {
        let stream = Stream::from_fd(socket).unwrap();
        spawn(read_and_pass_on(stream, Vec::new(), first, 0, done));
    };
    remotes[0].run(Box::new(begin)).unwrap();
    let (received, moves) = is_done.recv().unwrap();
    assert!(moves > 20, "it moved {moves} times");
    assert!(received == expected);
    assert_eq!(writer.join().unwrap(), b"thank you");
    for (thread, stop) in loops {
        drop(stop);
        thread.join().unwrap();
    }
}

type Done = mpsc::Sender<(Vec<u8>, usize)>;

/// Receives some pieces, then passes the stream to the next loop in the middle of a receive.
async fn read_and_pass_on(stream: Stream, mut received: Vec<u8>, remotes: [Remote; 2], moves: usize, done: Done) {
    for _ in 0..1 + moves % 3 {
        let mut input = Buffer::new();
        let count = stream.recv(&mut input, if moves.is_multiple_of(4) { 60_000 } else { 3000 }).await.unwrap();
        received.extend_from_slice(input.readable());
        if count == 0 {
            send(&stream, b"thank you").await;
            done.send((received, moves)).unwrap();
            return;
        }
    }
    {
        let mut input = Buffer::new();
        let mut receiving = Box::pin(stream.recv(&mut input, 1000));
        if poll_once(&mut receiving).await.is_pending() {
            turns((moves % 3) as u32).await;
        }
        drop(receiving);
        received.extend_from_slice(input.readable());
    }
    let detached = stream.detach().unwrap();
    let next = remotes[(moves + 1) % 2].clone();
    let go_on = move || {
        spawn(read_and_pass_on(detached.attach(), received, remotes, moves + 1, done));
    };
    next.run(Box::new(go_on)).unwrap();
}

#[test]
fn a_reset_on_the_way_is_an_error_and_not_an_end() {
    for waits in 0..4 {
        let (socket, peer) = tcp();
        let detached = event_loop(simulated_time()).run(async {
            let stream = Stream::from_fd(socket).unwrap();
            let mut input = Buffer::new();
            assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 1000))).await.is_pending());
            turns(waits).await;
            rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            drop(peer);
            turns(waits).await;
            stream.detach().unwrap()
        });
        event_loop(simulated_time()).run(async {
            let (stream, mut input) = (detached.attach(), Buffer::new());
            let received = timeout(Duration::from_secs(1), stream.recv(&mut input, 1000)).await;
            let error = received.expect("the reset was lost").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        });
    }
}

#[test]
fn bytes_received_ahead_come_first_in_pieces_as_wanted() {
    let (socket, mut peer) = unix();
    let detached = event_loop(simulated_time()).run(async {
        let stream = Stream::from_fd(socket).unwrap();
        let mut input = Buffer::new();
        assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 1000))).await.is_pending());
        turns(2).await;
        peer.write_all(b"ahead ").unwrap();
        turns(2).await;
        peer.write_all(b"behind").unwrap();
        stream.detach().unwrap()
    });
    // Twice, without reading in between.
    let detached = event_loop(simulated_time()).run(async { detached.attach().detach().unwrap() });
    event_loop(simulated_time()).run(async {
        let stream = detached.attach();
        let mut input = Buffer::new();
        while input.len() < 12 {
            // Virtual time passes only when no more data comes.
            let received = timeout(Duration::from_secs(1), stream.recv(&mut input, 4)).await;
            assert!((1..=4).contains(&received.expect("bytes were lost").unwrap()));
        }
        assert_eq!(input.readable(), b"ahead behind");
        send(&stream, b"moved").await;
    });
    let mut answer = [0; 5];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"moved");
}

#[test]
fn detached_stream_is_closed_when_dropped() {
    let (socket, mut peer) = unix();
    let detached = event_loop(simulated_time()).run(async { Stream::from_fd(socket).unwrap().detach().unwrap() });
    drop(detached);
    assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_finished_send_does_not_keep_a_stream_from_moving() {
    let (socket, mut peer) = unix();
    let detached = event_loop(simulated_time()).run(async {
        let stream = Stream::from_fd(socket).unwrap();
        let mut input = Buffer::new();
        // Afterwards io_uring queues sends.
        assert!(poll_once(&mut Box::pin(stream.recv(&mut input, 10))).await.is_pending());
        peer.write_all(b"question").unwrap();
        assert_eq!(receive(&stream, 8).await, b"question");
        send(&stream, b"answer, ").await;
        let mut output = Output::new();
        output.push(b"and more");
        // It is abandoned, and its bytes may not have left the queue.
        let _ = poll_once(&mut Box::pin(stream.send(&mut output))).await;
        stream.detach().unwrap()
    });
    let mut answer = [0; 16];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"answer, and more");
    drop(detached);
}

#[test]
fn everything_about_a_move_may_cross_threads() {
    fn is_send<T: Send>() {}
    is_send::<Detached>();
}
