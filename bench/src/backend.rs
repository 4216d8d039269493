//! backend: backends for the measured proxies. Most cases use a floor on the client's core that answers every request
//! with the same bytes; large bodies use one that sends and receives them.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::client::load;
use crate::process;
use crate::servers::{POLL_INTERVAL, free_port};

const START_TIME_LIMIT: Duration = Duration::from_secs(10);

/// A running backend. It is stopped on drop.
#[derive(Debug)]
pub struct Backend {
    pub port: u16,
    pub body_bytes: usize,
    child: Child,
}

impl Backend {
    /// Starts the backend and waits until it answers.
    pub fn start(core: usize, body_bytes: usize) -> Result<Rc<Backend>, String> {
        let port = free_port()?;
        let own = std::env::current_exe().map_err(|error| format!("backend: {error}"))?;
        let mut command = Command::new(own);
        command.args(["floor", &port.to_string(), "epoll", "keep-alive", &body_bytes.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let backend = Backend { port, body_bytes, child: process::spawn_pinned(&mut command, &[core])? };
        let (address, deadline) = (format!("127.0.0.1:{port}"), Instant::now() + START_TIME_LIMIT);
        loop {
            match load::request_once(&address, "/", START_TIME_LIMIT) {
                Ok(body) if body.len() == body_bytes => return Ok(Rc::new(backend)),
                answer if Instant::now() >= deadline => {
                    return Err(format!("the backend does not answer: {:?}", answer.map(|body| body.len())));
                }
                _ => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A backend for large bodies. A request with a body is read and answered with two bytes; a request without one is
/// answered with a large body.
#[derive(Clone, Copy, Debug)]
pub struct Bulk {
    /// Length of the body that it sends.
    pub sends: u64,
    /// Limit for receiving, in bytes per second.
    pub taken_per_second: Option<u64>,
}

impl Bulk {
    const PIECE_BYTES: usize = 256 * 1024;

    /// Starts the backend, which runs until the program ends. It has a thread for each connection and serves one
    /// request on each.
    pub fn start(self) -> std::io::Result<SocketAddr> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || self.serve(stream));
            }
        });
        Ok(address)
    }

    fn serve(self, mut stream: TcpStream) -> std::io::Result<()> {
        let (mut head, mut piece) = (Vec::new(), vec![0; Bulk::PIECE_BYTES]);
        let end = loop {
            let count = stream.read(&mut piece)?;
            head.extend_from_slice(&piece[..count]);
            if let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<u64>().ok());
        let announce = |bytes: u64| format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n");
        let Some(length) = length else {
            stream.write_all(announce(self.sends).as_bytes())?;
            for _ in 0..self.sends / piece.len() as u64 {
                stream.write_all(&piece)?;
            }
            return stream.write_all(&piece[..(self.sends % piece.len() as u64) as usize]);
        };
        let mut pace = self.taken_per_second.map(Pace::new);
        let mut left = length.saturating_sub((head.len() - end) as u64);
        while left > 0 {
            match stream.read(&mut piece)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => {
                    left = left.saturating_sub(count as u64);
                    if let Some(pace) = &mut pace {
                        pace.keep(count);
                    }
                }
            }
        }
        stream.write_all(announce(2).as_bytes())?;
        stream.write_all(b"ok")
    }
}

/// Limits the rate at which bytes are received.
#[derive(Debug)]
pub struct Pace {
    begun: Instant,
    bytes_per_second: u64,
    taken: u64,
}

impl Pace {
    pub fn new(bytes_per_second: u64) -> Pace {
        Pace { begun: Instant::now(), bytes_per_second, taken: 0 }
    }

    /// Counts bytes and sleeps until they are due.
    pub fn keep(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        let due = Duration::from_secs_f64(self.taken as f64 / self.bytes_per_second as f64);
        std::thread::sleep(due.saturating_sub(self.begun.elapsed()));
    }
}
