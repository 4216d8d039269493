//! application: a backend that does what a floor cannot: answers with a delay, or switches to a tunnel. One thread
//! serves all connections with level-triggered epoll.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

/// Interval for checking whether to stop.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok";
const SWITCH: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Treatment of a request, which arrives in one piece.
#[derive(Clone, Copy, Debug)]
pub enum Job {
    /// Answer after this time.
    Answer(Duration),
    /// Answer with a 101, then echo everything received.
    Echo,
}

/// A running application. It is stopped on drop.
#[derive(Debug)]
pub struct Application {
    pub address: SocketAddr,
    accepted: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Connection {
    stream: TcpStream,
    is_tunnel: bool,
}

/// State of the thread.
struct Server {
    job: Job,
    listener: TcpListener,
    epoll: OwnedFd,
    /// Indexed by descriptor.
    connections: Vec<Option<Connection>>,
    /// Connections whose requests are unanswered, in the order in which their answers are due.
    waiting: VecDeque<(Instant, usize)>,
}

impl Application {
    pub fn start(job: Job) -> io::Result<Application> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        watch(&epoll, &listener)?;
        let mut server = Server { job, listener, epoll, connections: Vec::new(), waiting: VecDeque::new() };
        let (accepted, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, end) = (Arc::clone(&accepted), Arc::clone(&is_over));
        let thread = std::thread::spawn(move || {
            if let Err(error) = server.run(&count, &end) {
                eprintln!("application: {error}");
            }
        });
        Ok(Application { address, accepted, is_over, thread: Some(thread) })
    }

    /// Number of connections accepted.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(epoll: &OwnedFd, socket: impl AsFd) -> io::Result<()> {
    let descriptor = socket.as_fd();
    let key = epoll::EventData::new_u64(descriptor.as_raw_fd() as u64);
    Ok(epoll::add(epoll, descriptor, key, epoll::EventFlags::IN)?)
}

impl Server {
    fn run(&mut self, accepted: &AtomicU64, is_over: &AtomicBool) -> io::Result<()> {
        let mut events = Vec::with_capacity(512);
        while !is_over.load(Ordering::Acquire) {
            let next = self.waiting.front().map(|(time, _)| time.saturating_duration_since(Instant::now()));
            let time_max = next.map_or(LOOK_INTERVAL, |next| next.min(LOOK_INTERVAL));
            let time_max = Timespec { tv_sec: 0, tv_nsec: time_max.subsec_nanos().into() };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&time_max)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let now = Instant::now();
            while let Some((time, place)) = self.waiting.front().copied()
                && time <= now
            {
                self.waiting.pop_front();
                self.send(place, ANSWER);
            }
            for event in events.drain(..) {
                let place = event.data.u64() as usize;
                if place != self.listener.as_raw_fd() as usize {
                    self.serve(place, now);
                } else if self.accept()? {
                    accepted.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Returns false if the client has gone.
    fn accept(&mut self) -> io::Result<bool> {
        let Ok((stream, _)) = self.listener.accept() else { return Ok(false) };
        stream.set_nodelay(true)?;
        watch(&self.epoll, &stream)?;
        let place = stream.as_raw_fd() as usize;
        if self.connections.len() <= place {
            self.connections.resize_with(place + 1, || None);
        }
        self.connections[place] = Some(Connection { stream, is_tunnel: false });
        Ok(true)
    }

    fn serve(&mut self, place: usize, now: Instant) {
        let Some(connection) = self.connections.get_mut(place).and_then(Option::as_mut) else { return };
        let mut piece = [0; 4096];
        let count = connection.stream.read(&mut piece).unwrap_or(0);
        if count == 0 {
            self.connections[place] = None;
            return;
        }
        match self.job {
            Job::Answer(Duration::ZERO) => self.send(place, ANSWER),
            Job::Answer(delay) => self.waiting.push_back((now + delay, place)),
            Job::Echo if std::mem::replace(&mut connection.is_tunnel, true) => self.send(place, &piece[..count]),
            Job::Echo => self.send(place, SWITCH),
        }
    }

    fn send(&mut self, place: usize, bytes: &[u8]) {
        if let Some(connection) = &mut self.connections[place]
            && connection.stream.write_all(bytes).is_err()
        {
            self.connections[place] = None;
        }
    }
}
