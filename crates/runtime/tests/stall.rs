//! Deliberate stalls: each is filed with its cause, and other loops accept the connections that wait for the stalled
//! one.
//!
//! Nothing depends on the speed of the machine: a stall that waits lasts until the watchdog has filed it. One that runs
//! is mostly preempted on a busy machine, so it is short, and made again until one was not.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::io::{PipeReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::*;
use gale_runtime::stall::StallKind;
use gale_runtime::watchdog::{start_watchdog, workers};
use gale_runtime::*;
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::time::{ClockId, clock_gettime};

/// Number of filed stalls of all kinds.
fn filed(remote: &Remote) -> u64 {
    StallKind::ALL.into_iter().map(|kind| remote.turns().filed(kind).count).sum()
}

/// Stalls a loop again and again, until a stall of this kind was filed. `hold_up` gets the number of stalls filed
/// before.
fn stall_until_filed(kind: StallKind, mut hold_up: impl FnMut(Remote, u64)) {
    start_watchdog().unwrap();
    let mut event_loop = event_loop(options());
    let remote = event_loop.remote();
    event_loop.run(async {
        while remote.turns().filed(kind).count == 0 {
            hold_up(remote.clone(), filed(&remote));
            yield_now().await;
        }
    });
    let turns = remote.turns();
    assert!(turns.stalls() >= turns.filed(kind).count);
    assert!(turns.longest() > stall::STALL_THRESHOLD);
    assert!(turns.busy() >= turns.longest());
}

/// Runs `then` on a thread of its own as soon as another stall was filed.
fn after_another(remote: Remote, before: u64, then: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::spawn(move || {
        while filed(&remote) == before {
            thread::yield_now();
        }
        then();
    })
}

#[test]
fn a_loop_that_only_runs_is_computing() {
    let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    stall_until_filed(StallKind::Computing, |_, _| {
        let began = used();
        while used() - began < 2 * stall::STALL_THRESHOLD {}
    });
}

#[test]
fn a_loop_that_waits_for_a_pipe_is_blocked() {
    stall_until_filed(StallKind::Blocked, |remote, before| {
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let other = after_another(remote, before, move || writer.write_all(b"x").unwrap());
        reader.read_exact(&mut [0]).unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_loop_that_waits_for_a_mutex_waits_for_a_lock() {
    stall_until_filed(StallKind::Lock, |remote, before| {
        let mutex = Arc::new(Mutex::new(()));
        let held = Arc::clone(&mutex);
        let (locked, is_locked) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let holder = thread::spawn(move || {
            let _guard = held.lock().unwrap();
            locked.send(()).unwrap();
            let _ = released.recv();
        });
        is_locked.recv().unwrap();
        let other = after_another(remote, before, move || drop(release));
        drop(mutex.lock().unwrap());
        other.join().unwrap();
        holder.join().unwrap();
    });
}

#[test]
fn the_time_of_a_stall_is_known_when_it_is_over() {
    async fn read_at_once(mut reader: PipeReader, done: mpsc::Sender<()>) {
        reader.read_exact(&mut [0]).unwrap();
        done.send(()).unwrap();
    }
    start_watchdog().unwrap();
    let mut event_loop = event_loop(options());
    let remote = event_loop.remote();
    event_loop.run(async {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (done, is_done) = mpsc::channel();
        let other = after_another(remote.clone(), 0, move || writer.write_all(b"x").unwrap());
        spawn(read_at_once(reader, done));
        yield_now().await;
        is_done.recv().unwrap();
        other.join().unwrap();
        // The time is added when the watchdog sees the end.
        let times = || StallKind::ALL.into_iter().map(|kind| remote.turns().filed(kind).time).sum::<Duration>();
        while times() == Duration::ZERO {
            yield_now().await;
        }
        assert!(times() > stall::STALL_THRESHOLD);
    });
}

#[test]
fn figures_name_every_loop_and_its_stalls() {
    // A number that no other test's loop has.
    const WORKER: usize = 77;
    start_watchdog().unwrap();
    let figures = || workers().into_iter().find(|(worker, _)| *worker == WORKER).map(|(_, remote)| remote);
    assert!(figures().is_none());
    let mut event_loop = event_loop(LoopOptions { worker: WORKER, ..options() });
    let remote = event_loop.remote();
    // Asked from another thread while the loop is stalled.
    let told = thread::spawn(move || {
        loop {
            let found = figures().expect("the loop is there");
            let counts = StallKind::ALL.map(|kind| found.turns().filed(kind).count);
            if counts.iter().sum::<u64>() > 0 {
                return counts;
            }
            thread::yield_now();
        }
    });
    event_loop.run(async { while !told.is_finished() {} });
    let now = StallKind::ALL.map(|kind| remote.turns().filed(kind).count);
    let told = told.join().unwrap();
    assert!(now.iter().zip(&told).all(|(now, told)| now >= told), "{now:?} {told:?}");
    assert!(remote.turns().stalls() > 0 && remote.turns().longest() > stall::STALL_THRESHOLD);
    drop(event_loop);
    assert!(figures().is_none());
}

/// A loop that answers every connection to `socket` with its number.
struct Answering {
    remote: Remote,
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Answering {
    fn start(number: u8, socket: Arc<OwnedFd>, options: AcceptOptions) -> Answering {
        let (sender, receiver) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut event_loop = event_loop(common::options());
            let remote = event_loop.remote();
            event_loop.run(async move {
                let listener = Listener::from_fd(socket, options).unwrap();
                let accepting = async move {
                    loop {
                        let (stream, _) = listener.accept().await.unwrap();
                        let mut output = Output::new();
                        output.push(vec![number]);
                        stream.send_all(&mut output).await.unwrap();
                    }
                };
                let mut accepting = Box::pin(accepting);
                // Waits for connections before it reports that it is ready.
                assert!(poll_once(&mut accepting).await.is_pending());
                spawn(accepting);
                let (stop, stopped): (Sender<()>, Receiver<()>) = mpsc::channel();
                let pool = ThreadPool::new("stop", 1, 1);
                let stopped = pool.run(move || stopped.recv().is_ok());
                sender.send((remote, stop)).unwrap();
                let _ = stopped.await;
            });
        });
        let (remote, stop) = receiver.recv().unwrap();
        Answering { remote, stop, thread }
    }

    /// Stalls the loop until the returned sender is dropped.
    fn hold_up(&self) -> Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let (held, is_held) = mpsc::channel();
        self.remote
            .run(Box::new(move || {
                held.send(()).unwrap();
                let _ = released.recv();
            }))
            .unwrap();
        is_held.recv().unwrap();
        release
    }

    fn end(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

fn sockets_of_one_address() -> ([Arc<OwnedFd>; 2], SocketAddr) {
    let open = |address: SocketAddr| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        sockopt::set_socket_reuseport(&socket, true).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 128).unwrap();
        socket
    };
    let first = open("127.0.0.1:0".parse().unwrap());
    let address = SocketAddr::try_from(rustix::net::getsockname(first.as_fd()).unwrap()).unwrap();
    let second = open(address);
    ([Arc::new(first), Arc::new(second)], address)
}

/// Connects and returns the number of the loop that answered.
fn ask(address: SocketAddr) -> u8 {
    let mut answer = [0];
    TcpStream::connect(address).unwrap().read_exact(&mut answer).unwrap();
    answer[0]
}

#[test]
fn connections_of_a_stalled_loop_are_accepted_by_another() {
    start_watchdog().unwrap();
    let ([first, second], address) = sockets_of_one_address();
    let first = Answering::start(1, first, AcceptOptions::default());
    let second = Answering::start(2, second, AcceptOptions::default());
    // The kernel distributes connections by a hash of their addresses: each loop gets some of a few dozen.
    let answers: Vec<u8> = (0..64).map(|_| ask(address)).collect();
    assert!(answers.contains(&1) && answers.contains(&2), "{answers:?}");
    for (held, other) in [(&first, 2), (&second, 1)] {
        let release = held.hold_up();
        assert!((0..64).all(|_| ask(address) == other));
        drop(release);
    }
    // Afterwards each accepts its own connections again, since no loop is stalled.
    while ask(address) != 1 {}
    while ask(address) != 2 {}
    first.end();
    second.end();
}

#[test]
fn a_connection_of_a_shared_socket_is_accepted_while_the_loop_that_was_told_is_held_up() {
    start_watchdog().unwrap();
    let ([socket, other], address) = sockets_of_one_address();
    // The kernel must not give it any connections.
    drop(other);
    let shared = AcceptOptions { exclusive: true, batch: 1 };
    let first = Answering::start(1, Arc::clone(&socket), shared);
    let second = Answering::start(2, socket, shared);
    for (held, other) in [(&first, 2), (&second, 1), (&first, 2)] {
        let release = held.hold_up();
        assert!((0..8).all(|_| ask(address) == other));
        drop(release);
    }
    first.end();
    second.end();
}
