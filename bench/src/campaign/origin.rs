//! origin: the backend, which an experiment makes as bad as it wants. A thread for each connection, a request for
//! each connection.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use super::exchange::field_in;
use crate::thread_pools::data_set::Random;

/// Ends when dropped; connections under way end by themselves.
pub struct Origin {
    pub address: SocketAddr,
    asked: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A request as it came; its body has been read.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub target: String,
    pub head: String,
}

/// Fate of the connection behind an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It ends in the ordinary way.
    Close,
    /// It is reset.
    Reset,
    /// It stays open and silent until the other side closes it.
    Hold,
}

/// Nothing that the servers under test do takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

impl Origin {
    /// Answers each request by this.
    pub fn start(answer: impl Fn(&Request, &mut TcpStream) -> Then + Send + Sync + 'static) -> Result<Origin, String> {
        Origin::start_at("127.0.0.1:0", answer)
    }

    /// The same at an address.
    pub fn start_at(
        address: &str,
        answer: impl Fn(&Request, &mut TcpStream) -> Then + Send + Sync + 'static,
    ) -> Result<Origin, String> {
        let fault = |error: std::io::Error| format!("the backend: {error}");
        let listener = TcpListener::bind(address).map_err(fault)?;
        let address = listener.local_addr().map_err(fault)?;
        let (asked, is_over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, over, answer) = (Arc::clone(&asked), Arc::clone(&is_over), Arc::new(answer));
        let thread = std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (count, answer) = (Arc::clone(&count), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let _ = stream.set_read_timeout(Some(PATIENCE));
                    let _ = stream.set_write_timeout(Some(PATIENCE));
                    if let Some(request) = read_request(&mut stream) {
                        count.fetch_add(1, Ordering::Relaxed);
                        let then = answer(&request, &mut stream);
                        end(stream, then);
                    }
                });
            }
        });
        Ok(Origin { address, asked, is_over, thread: Some(thread) })
    }

    /// One that answers each GET with the content of its target, as long as the target says.
    pub fn plain() -> Result<Origin, String> {
        Origin::start(|request, stream| {
            let _ = stream.write_all(&plain_answer(&request.target));
            Then::Close
        })
    }

    /// Requests so far.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Request {
    pub fn field(&self, name: &str) -> Option<&str> {
        field_in(&self.head, name)
    }
}

/// The whole answer of [`Origin::plain`].
pub fn plain_answer(target: &str) -> Vec<u8> {
    let body = content(target);
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    [head.into_bytes(), body].concat()
}

/// The content of a target: other bytes for each, as many as its second segment says (`/cached/65536/1`).
pub fn content(target: &str) -> Vec<u8> {
    let length = target.split('/').nth(2).and_then(|text| text.parse().ok()).unwrap_or(100);
    let mut hasher = DefaultHasher::new();
    target.hash(&mut hasher);
    let mut bytes = vec![0; length];
    // The generator must not begin with zero.
    Random(hasher.finish() | 1).fill(&mut bytes);
    bytes
}

fn read_request(stream: &mut TcpStream) -> Option<Request> {
    let (mut received, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
    let mut more = |received: &mut Vec<u8>| {
        let length = stream.read(&mut piece).ok()?;
        received.extend_from_slice(&piece[..length]);
        (length > 0).then_some(())
    };
    let end = loop {
        if let Some(end) = received.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        more(&mut received)?;
    };
    let head = String::from_utf8_lossy(&received[..end]).into_owned();
    let mut words = head.split(' ').map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    if field_in(&head, "transfer-encoding").is_some() {
        while !received.ends_with(b"0\r\n\r\n") {
            more(&mut received)?;
        }
    }
    let length = field_in(&head, "content-length").and_then(|value| value.parse::<usize>().ok()).unwrap_or(0);
    while received.len() < end + length {
        more(&mut received)?;
    }
    Some(Request { method, target, head })
}

fn end(mut stream: TcpStream, then: Then) {
    match then {
        Then::Close => {
            // Bytes that are unread when a connection is closed reset it.
            let _ = stream.shutdown(Shutdown::Write);
            drain(&mut stream);
        }
        Then::Reset => {
            let _ = set_socket_linger(&stream, Some(Duration::ZERO));
        }
        Then::Hold => drain(&mut stream),
    }
}

/// Reads until the other side ends it.
fn drain(stream: &mut TcpStream) {
    let mut piece = [0; 4096];
    while matches!(stream.read(&mut piece), Ok(1..)) {}
}

#[cfg(test)]
mod tests {
    use super::super::exchange::{ask, get};
    use super::*;

    #[test]
    fn content_is_of_its_target_alone() {
        assert_eq!(content("/a/1000/1").len(), 1000);
        assert_ne!(content("/a/1000/1"), content("/a/1000/2"));
        let origin = Origin::plain().unwrap();
        let reply = ask(&origin.address.to_string(), &get("/a/70000/1"), PATIENCE).unwrap();
        assert!(reply.is_whole && reply.body == content("/a/70000/1"));
        assert_eq!(origin.asked(), 1);
    }
}
