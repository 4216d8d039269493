//! Syslog over a connection: TCP (RFC 6587, octet counting) or TLS (RFC 5425).
//!
//! ```text
//!   append ──► queue ──► thread of this server ──► connection
//!                          │    ▲
//!                          └────┘ the server is gone or hangs: growing pauses, then a new connection
//! ```
//!
//! Each server has its own thread, so one that hangs delays no other; the thread ends when nothing was logged for a
//! while. At most the queue and one batch wait for an unavailable server; further lines are lost, counted and reported.
//! A line that the kernel accepted for a connection that then breaks may be lost or sent twice, because these protocols
//! have no acknowledgements.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::syslog::records;

/// Timeout for connecting with the handshake, and for a server that accepts no data.
const PATIENCE: Duration = Duration::from_secs(5);

/// First pause after a failure. Each following one is twice as long, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);

/// Longest pause, after which a server that is back is found.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Time after which an idle thread ends.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Bytes given to the connection at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Secures a connection.
pub trait Secure: Send + Sync {
    /// Performs the handshake over a connection whose calls return in bounded time.
    ///
    /// # Errors
    /// Errors of the connection, or the reason why the server is not trusted.
    fn shake_hands(&self, stream: TcpStream, deadline: Instant) -> io::Result<Box<dyn Channel>>;

    /// Identifies the trusted authorities.
    fn identity(&self) -> u64;
}

/// A connection to a server.
pub trait Channel: Send {
    /// Sends all bytes.
    ///
    /// # Errors
    /// Errors of the connection.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// `true` unless the server is known to have closed the connection; does not block. Received data is ignored.
    fn is_open(&mut self) -> bool;
}

/// A server with its thread.
pub(super) struct StreamPeer {
    address: SocketAddr,
    secure: Option<Arc<dyn Secure>>,
    channel: Mutex<Option<Box<dyn Channel>>>,
    thread: Mutex<Thread>,
    changed: Condvar,
}

#[derive(Default)]
struct Thread {
    is_there: bool,
    /// `true` if lines wait.
    is_due: bool,
}

/// Result of sending a batch.
pub(super) enum Outcome {
    Sent,
    /// Bytes sent, and the error; the rest may be sent later.
    Failed(usize, io::Error),
}

impl StreamPeer {
    pub(super) fn new(address: SocketAddr, secure: Option<Arc<dyn Secure>>) -> StreamPeer {
        let (channel, thread, changed) = (Mutex::default(), Mutex::default(), Condvar::new());
        StreamPeer { address, secure, channel, thread, changed }
    }

    pub(super) fn name(&self) -> String {
        let scheme = if self.secure.is_some() { "tls" } else { "tcp" };
        format!("syslog:server={scheme}://{}", self.address)
    }

    /// Wakes the thread, or starts it with `start`. `false` if it cannot be started.
    pub(super) fn schedule(&self, start: impl FnOnce() -> io::Result<()>) -> bool {
        let mut thread = self.thread.lock();
        thread.is_due = true;
        if thread.is_there {
            self.changed.notify_all();
            return true;
        }
        thread.is_there = start().is_ok();
        thread.is_there
    }

    /// Waits for lines; `false` if the thread should end.
    pub(super) fn wait_due(&self) -> bool {
        let until = Instant::now() + IDLE_TIME;
        let mut thread = self.thread.lock();
        while !thread.is_due {
            if self.changed.wait_until(&mut thread, until).timed_out() && !thread.is_due {
                thread.is_there = false;
                return false;
            }
        }
        thread.is_due = false;
        true
    }

    /// Sends the messages of a batch, over a new connection if there is none.
    pub(super) fn send(&self, batch: &[u8]) -> Outcome {
        let mut sent = 0;
        let mut channel = self.channel.lock();
        let mut frames = Vec::new();
        while sent < batch.len() {
            frames.clear();
            let mut end = sent;
            for record in records(&batch[sent..]) {
                if !frames.is_empty() && frames.len() + record.len() > PIECE_BYTES {
                    break;
                }
                append_frame(record, &mut frames);
                end += record.len() + super::syslog::LENGTH_BYTES;
            }
            if let Err(error) = self.send_piece(&mut channel, &frames) {
                *channel = None;
                return Outcome::Failed(sent, error);
            }
            sent = end;
        }
        Outcome::Sent
    }

    fn send_piece(&self, channel: &mut Option<Box<dyn Channel>>, frames: &[u8]) -> io::Result<()> {
        if channel.as_mut().is_some_and(|channel| !channel.is_open()) {
            *channel = None;
        }
        let channel = match channel {
            Some(channel) => channel,
            None => channel.insert(self.connect()?),
        };
        channel.send(frames)
    }

    fn connect(&self) -> io::Result<Box<dyn Channel>> {
        let deadline = Instant::now() + PATIENCE;
        let stream = TcpStream::connect_timeout(&self.address, PATIENCE)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        match &self.secure {
            None => Ok(Box::new(stream)),
            Some(secure) => secure.shake_hands(stream, deadline),
        }
    }
}

impl std::fmt::Debug for StreamPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// Pause after this many consecutive failures.
pub(super) fn pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

/// `LENGTH MESSAGE` (RFC 6587 §3.4.1, RFC 5425 §4.3)
fn append_frame(record: &[u8], frames: &mut Vec<u8>) {
    // Writing to memory cannot fail.
    let _ = write!(frames, "{} ", record.len());
    frames.extend_from_slice(record);
}

impl Channel for TcpStream {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn is_open(&mut self) -> bool {
        drain(self, &mut [0; 512])
    }
}

/// Discards received data without blocking; `false` at the end of the connection.
fn drain(stream: &mut TcpStream, scratch: &mut [u8]) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return false;
    }
    // Bounded; the next call reads the rest.
    let is_open = (0..16).try_for_each(|_| match stream.read(scratch) {
        Ok(0) => Err(false),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(true),
        Err(_) => Err(false),
    });
    let is_blocking = stream.set_nonblocking(false).is_ok();
    is_open.err().unwrap_or(true) && is_blocking
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_bound() {
        let pauses: Vec<_> = (1..9).map(|failures| pause(failures).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(pause(u32::MAX), PAUSE_MAX);
    }

    #[test]
    fn a_frame_counts_the_bytes_of_its_message() {
        let mut frames = Vec::new();
        append_frame("<14>ä\n".as_bytes(), &mut frames);
        append_frame(b"", &mut frames);
        assert_eq!(frames, "7 <14>ä\n0 ".as_bytes());
    }
}
