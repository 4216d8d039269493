//! floor: the minimal server: one receive and one send per request, a constant answer, no HTTP.
//!
//! It is the baseline: any cost above it is the server's own work. There is a variant for each driver and for
//! keep-alive and short connections. It ignores the received bytes, so the client must send each request in one piece
//! and wait for the answer (wrk does). `relay` is the floor of a proxy, `reconnecting` that of a proxy that connects
//! for each request.

mod datagrams;
mod epoll;
mod readiness;
pub mod reconnecting;
pub mod relay;
mod ring;

use std::io::{self, Write as _};
use std::net::TcpListener;
use std::os::fd::AsRawFd;

/// Treatment of a connection after its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    KeepAlive,
    Close,
}

/// `floor PORT epoll|io_uring keep-alive|close|close-deferred BODY_BYTES`: serves until it is killed. With
/// `close-deferred` a connection is accepted only when its request has arrived (TCP_DEFER_ACCEPT).
pub fn main(args: &[String]) -> Result<(), String> {
    let usage = || "usage: gale-bench floor PORT epoll|io_uring keep-alive|close|close-deferred BODY_BYTES".to_owned();
    let [port, driver, mode, body_bytes] = args else {
        return Err(usage());
    };
    let port: u16 = port.parse().map_err(|_| usage())?;
    let body_bytes: usize = body_bytes.parse().map_err(|_| usage())?;
    let (mode, is_deferred) = match mode.as_str() {
        "keep-alive" => (Mode::KeepAlive, false),
        "close" => (Mode::Close, false),
        "close-deferred" => (Mode::Close, true),
        _ => return Err(usage()),
    };
    let answer = Answer::new(mode, body_bytes, driver == "epoll").map_err(|error| format!("floor: {error}"))?;
    let served = listen(port, is_deferred).and_then(|listener| match driver.as_str() {
        "epoll" => epoll::serve(&listener, mode, &answer),
        "io_uring" => ring::serve(&listener, mode, answer.bytes.leak()),
        _ => Err(io::Error::other(usage())),
    });
    served.map_err(|error| format!("floor: {error}"))
}

fn listen(port: u16, is_deferred: bool) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    if is_deferred {
        set_deferred(&listener)?;
    }
    rustix::net::listen(&listener, 511)?; // nginx's backlog in place of std's
    Ok(listener)
}

fn set_deferred(listener: &TcpListener) -> io::Result<()> {
    let seconds: libc::c_int = 1; // nginx's value
    // SAFETY: the descriptor is open, and the pointer is to an int of the given length.
    let result = unsafe {
        let (value, length) = ((&raw const seconds).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        libc::setsockopt(listener.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, value, length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Size from which the body is a file sent by `sendfile`, because copying costs more.
const SENDFILE_MIN: usize = 64 * 1024;

struct Answer {
    /// The head, and the body unless it is in the file.
    bytes: Vec<u8>,
    /// A file in memory (memfd) and its length.
    file: Option<(std::fs::File, u64)>,
}

impl Answer {
    /// Makes an answer as long as that of a real server: the header has the size of nginx's.
    fn new(mode: Mode, body_bytes: usize, may_send_files: bool) -> io::Result<Answer> {
        let connection = match mode {
            Mode::KeepAlive => "keep-alive",
            Mode::Close => "close",
        };
        let mut bytes = Vec::new();
        let _ = write!(
            bytes,
            "HTTP/1.1 200 OK\r\nServer: floor\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\
             Content-Type: application/octet-stream\r\nContent-Length: {body_bytes}\r\nConnection: {connection}\r\n\r\n"
        );
        if body_bytes < SENDFILE_MIN || !may_send_files {
            bytes.extend(std::iter::repeat_n(b'x', body_bytes));
            return Ok(Answer { bytes, file: None });
        }
        let memory = rustix::fs::memfd_create("floor", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = std::fs::File::from(memory);
        file.write_all(&vec![b'x'; body_bytes])?;
        Ok(Answer { bytes, file: Some((file, body_bytes as u64)) })
    }
}
