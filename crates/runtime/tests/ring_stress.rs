//! Hundreds of keep-alive connections on rings that are too small for them, while other threads want the processor: no
//! connection waits for ever. If the serving loop does not sweep idle connections either, only completions make it
//! continue: a lost completion, a receive that is not armed again, or a wake-up without effect shows.
//!
//! Longer runs are optional: `GALE_STRESS_SECONDS=60 cargo test -p gale-runtime --test ring_stress`.

mod common;

const DRIVER: DriverChoice = DriverChoice::IoUring;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use gale_runtime::*;

const CONNECTIONS: u32 = 500;

/// Threads per core that only take processor time.
const NEIGHBOURS: usize = 2;

/// Only a client that was forgotten waits so long for a response.
const DEADLINE: Duration = Duration::from_secs(20);

/// Length of a request. It holds the number of bytes that follow, and the number wanted back.
const REQUEST_BYTES: usize = 8;

/// Serves like HTTP/1: short responses fire-and-forget, the rest with a usual send; sometimes watches for the client's
/// hang-up.
async fn serve(stream: Stream, connections: Rc<Cell<u32>>) {
    let _ = answer_all(&stream).await;
    drop(stream);
    connections.set(connections.get() - 1);
}

async fn answer_all(stream: &Stream) -> std::io::Result<()> {
    let (mut input, mut out) = (Buffer::new(), Output::new());
    let mut number = 0u32;
    loop {
        while input.len() < REQUEST_BYTES {
            if stream.recv(&mut input, 4096).await? == 0 {
                return Ok(());
            }
        }
        let word = |range: std::ops::Range<usize>| u32::from_le_bytes(input.readable()[range].try_into().unwrap());
        let (body, answer) = (word(0..4) as usize, word(4..8) as usize);
        input.consume(REQUEST_BYTES);
        // A body is received in larger pieces than a head.
        let mut rest = body;
        while rest > 0 {
            let there = rest.min(input.len());
            input.consume(there);
            rest -= there;
            if rest > 0 && stream.recv(&mut input, rest.min(16_384)).await? == 0 {
                return Ok(());
            }
        }
        number += 1;
        if number.is_multiple_of(5) {
            // Like a handler that waits, and checks whether the client is still there.
            let mut leaving = Box::pin(stream.peer_closed());
            let _ = poll_once(&mut leaving).await;
            yield_now().await;
        }
        let bytes = vec![b'a'; answer];
        let sent = if answer <= 4096 { stream.try_send_copy(&bytes, false)? } else { 0 };
        if sent < answer {
            out.append(&bytes[sent..]).unwrap();
            stream.send_all(&mut out).await?;
        }
    }
}

/// Serves until it is stopped and every connection has ended.
fn serve_all(ring: RingOptions, address: mpsc::Sender<(SocketAddress, Remote)>, is_over: Arc<AtomicBool>) {
    let mut event_loop = event_loop(LoopOptions { ring, ..options() });
    event_loop.run(async {
        let listener = Listener::bind(&any_port(), 4096, AcceptOptions::default()).unwrap();
        address.send((listener.local_address().unwrap(), remote())).unwrap();
        let connections = Rc::new(Cell::new(0));
        let mut accepted = Box::pin(listener.accept());
        while !is_over.load(Ordering::SeqCst) {
            let (stream, _) = accepted.await.unwrap();
            connections.set(connections.get() + 1);
            spawn(serve(stream, Rc::clone(&connections)));
            accepted = Box::pin(listener.accept());
        }
        while connections.get() > 1 {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

/// One client: some requests of every kind on each connection, one connection after another.
async fn ask(number: u32, address: SocketAddress, until: Instant) -> u32 {
    let mut answers = 0;
    let mut random = number.wrapping_mul(2_654_435_761) | 1;
    let mut next = move |bound: u32| {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        random % bound
    };
    while Instant::now() < until {
        let stream = Stream::connect(&address).await.unwrap();
        for _ in 0..next(200) + 1 {
            let kind = next(100);
            let (body, answer, pipelined) = match kind {
                0 => (100_000, 10, 1),
                1 => (10, 100_000, 1),
                2 => (0, 4000, 16),
                3..10 => (3000, 3000, 2),
                10..20 => (0, 2, 20),
                _ => (0, 2, 1),
            };
            let mut out = Output::new();
            for _ in 0..pipelined {
                out.append(&u32::to_le_bytes(body)).unwrap();
                out.append(&u32::to_le_bytes(answer)).unwrap();
                out.append(&vec![b'q'; body as usize]).unwrap();
            }
            stream.send_all(&mut out).await.unwrap();
            let mut wanted = (answer * pipelined) as usize;
            let mut input = Buffer::new();
            while wanted > 0 {
                let got = timeout(DEADLINE, stream.recv(&mut input, wanted)).await;
                let got =
                    got.unwrap_or_else(|_| panic!("client {number} was forgotten, kind {kind}, {wanted} to come"));
                let got = got.expect("the connection is good");
                assert_ne!(got, 0, "the connection was closed");
                wanted -= got;
                input.clear();
            }
            answers += pipelined;
            if Instant::now() >= until {
                break;
            }
        }
        // Half of them leave in the middle of a request.
        if next(2) == 0 {
            let mut out = Output::new();
            out.append(&[0, 0, 0, 0, 2]).unwrap();
            let _ = stream.send_all(&mut out).await;
        }
    }
    answers
}

/// Calls the loop from another thread and waits for the answer, again and again.
fn spawn_caller(remote: Remote, is_over: &Arc<AtomicBool>) -> thread::JoinHandle<()> {
    let is_over = Arc::clone(is_over);
    thread::spawn(move || {
        while !is_over.load(Ordering::Relaxed) {
            let (called, heard) = mpsc::channel();
            remote.run(Box::new(move || called.send(()).unwrap())).unwrap();
            heard.recv_timeout(DEADLINE).expect("a call was forgotten");
        }
    })
}

/// Returns the number of responses. `is_called` = another thread wakes the loop all the time.
fn stress(ring: RingOptions, is_called: bool, duration: Duration) -> u32 {
    let is_over = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let server = thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || serve_all(ring, sender, is_over)
    });
    let (address, remote) = receiver.recv().unwrap();
    let cores = thread::available_parallelism().map_or(2, usize::from).min(4);
    let mut others: Vec<thread::JoinHandle<()>> = Vec::new();
    for _ in 0..NEIGHBOURS * cores {
        let is_over = Arc::clone(&is_over);
        others.push(thread::spawn(move || while !is_over.load(Ordering::Relaxed) {}));
    }
    if is_called {
        others.push(spawn_caller(remote, &is_over));
    }
    let until = Instant::now() + duration;
    let clients = EventLoop::new(LoopOptions { driver: DriverChoice::Epoll, ..LoopOptions::default() });
    let answers = clients.unwrap().run({
        let address = address.clone();
        async move {
            let answers = Rc::new(Cell::new(0));
            let left = Rc::new(Cell::new(CONNECTIONS));
            for number in 0..CONNECTIONS {
                let (answers, left, address) = (Rc::clone(&answers), Rc::clone(&left), address.clone());
                spawn(async move {
                    let heard = ask(number, address, until).await;
                    answers.set(answers.get() + heard);
                    left.set(left.get() - 1);
                });
            }
            let panics = panic_count();
            while left.get() > 0 {
                assert_eq!(panic_count(), panics, "a client was forgotten");
                sleep(Duration::from_millis(10)).await;
            }
            answers.get()
        }
    });
    is_over.store(true, Ordering::SeqCst);
    // One more connection, which lets the loop's accept return.
    drop(std::net::TcpStream::connect(address.inet().unwrap()).unwrap());
    others.into_iter().for_each(|thread| thread.join().unwrap());
    server.join().unwrap();
    answers
}

fn stress_each(rings: impl IntoIterator<Item = RingOptions>, is_called: bool) {
    let seconds = std::env::var("GALE_STRESS_SECONDS").map_or(0.2, |text| text.parse().unwrap());
    for ring in rings {
        let answers = stress(ring, is_called, Duration::from_secs_f64(seconds));
        println!("{answers} answers with {ring:?}");
        assert!(answers > 0);
    }
}

const SIZES: [(u32, u32, u16); 5] = [(512, 4096, 128), (1, 2, 1), (4, 8, 4), (8, 16, 0), (32, 64, 16)];
const KERNELS: [Option<(u16, u16)>; 4] = [None, Some((6, 15)), Some((6, 0)), Some((5, 18))];

#[test]
fn small_ring_serves_every_connection_beside_busy_neighbours() {
    let rings = SIZES.into_iter().flat_map(|sizes| KERNELS.map(|kernel_max| (sizes, kernel_max)));
    let rings = rings.map(|((submissions, completions, buffers), kernel_max)| {
        let idle_after = None;
        RingOptions { submissions, completions, buffers, kernel_max, idle_after, ..RingOptions::default() }
    });
    stress_each(rings, false);
}

#[test]
fn no_connection_is_lost_between_a_receive_and_the_poll_that_replaces_it() {
    let sizes = [SIZES[0], SIZES[2]];
    let rings = sizes.map(|(submissions, completions, buffers)| {
        let idle_after = Some(Duration::from_millis(2));
        RingOptions { submissions, completions, buffers, idle_after, ..RingOptions::default() }
    });
    stress_each(rings, true);
}
