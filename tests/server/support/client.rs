//! A connection to the server: sends bytes, returns parsed responses.
//!
//! The parser is strict: a malformed response fails the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::DEADLINE;

/// Longest response that a test may read, in bytes: a faulty server must not fill the memory.
const RESPONSE_MAX: usize = 256 << 20;

pub struct Client {
    stream: Stream,
    /// Bytes received and not yet taken.
    buffer: Vec<u8>,
    at_end: bool,
    was_reset: bool,
    /// All bytes received, if the test has asked for a record.
    record: Vec<u8>,
    is_recording: bool,
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    /// A stream above a socket: TLS.
    Above(Box<dyn Bytes>),
}

/// A stream of bytes in both directions.
pub trait Bytes: Read + Write + Send {}

impl<T: Read + Write + Send> Bytes for T {}

/// A response with its complete body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    /// `HTTP/1.1`
    pub version: String,
    pub reason: String,
    /// Header fields in order; names as they were sent.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Trailer fields of a chunked body.
    pub trailers: Vec<(String, String)>,
}

impl Client {
    #[track_caller]
    pub fn unix(path: &Path) -> Client {
        Client::of(UnixStream::connect(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// A client on a connection that is already open.
    #[track_caller]
    pub fn of(stream: UnixStream) -> Client {
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        Client::on(Stream::Unix(stream))
    }

    fn on(stream: Stream) -> Client {
        let (buffer, record) = (Vec::new(), Vec::new());
        Client { stream, buffer, at_end: false, was_reset: false, record, is_recording: false }
    }

    /// A client above a stream that is already open.
    pub fn above(stream: impl Bytes + 'static) -> Client {
        Client::on(Stream::Above(Box::new(stream)))
    }

    #[track_caller]
    pub fn tcp(address: SocketAddr) -> Client {
        Client::of_tcp(TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}")))
    }

    /// A client on a TCP connection that is already open.
    #[track_caller]
    pub fn of_tcp(stream: TcpStream) -> Client {
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        stream.set_nodelay(true).expect("an option");
        Client::on(Stream::Tcp(stream))
    }

    /// A connection whose receive buffer is small, so that the server can only send small pieces.
    #[track_caller]
    pub fn tcp_with_small_buffer(address: SocketAddr) -> Client {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
        let socket =
            socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
        // Set before connecting, because the window is negotiated then. The kernel raises the value to its minimum.
        sockopt::set_socket_recv_buffer_size(&socket, 1).expect("an option");
        connect(&socket, &address).unwrap_or_else(|error| panic!("{address}: {error}"));
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        stream.set_write_timeout(Some(DEADLINE)).expect("an option");
        Client::on(Stream::Tcp(stream))
    }

    /// Sends as many of these bytes as the socket takes without blocking, and returns their number.
    #[track_caller]
    pub fn send_some(&mut self, bytes: &[u8]) -> usize {
        use rustix::net::{SendFlags, send};
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match &self.stream {
            Stream::Tcp(stream) => send(stream, bytes, flags),
            Stream::Unix(stream) => send(stream, bytes, flags),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
        match sent {
            Ok(sent) => sent,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => panic!("sending: {error}"),
        }
    }

    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).expect("sent");
    }

    /// Sends to a server that may have closed the connection already.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.write_all(bytes.as_ref()),
            Stream::Unix(stream) => stream.write_all(bytes.as_ref()),
            Stream::Above(stream) => stream.write_all(bytes.as_ref()).and_then(|()| stream.flush()),
        }
    }

    /// A second handle on the connection, for a thread that sends while this one reads.
    pub fn sender(&self) -> Client {
        let stream = match &self.stream {
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone().expect("a descriptor")),
            Stream::Unix(stream) => Stream::Unix(stream.try_clone().expect("a descriptor")),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
        Client::on(stream)
    }

    /// Shuts down the sending direction.
    pub fn finish_sending(&self) {
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
    }

    /// Sends `GET path`; the connection stays open.
    #[track_caller]
    pub fn get(&mut self, path: &str) -> Response {
        self.ask(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    }

    /// Sends a request and reads its response.
    #[track_caller]
    pub fn ask(&mut self, request: impl AsRef<[u8]>) -> Response {
        let request = request.as_ref();
        self.send(request);
        if request.starts_with(b"HEAD ") { self.response_to_head() } else { self.response() }
    }

    /// Reads the next response; one with status 1xx counts as a response of its own.
    #[track_caller]
    pub fn response(&mut self) -> Response {
        self.read_response(false)
    }

    /// Reads the next response to a HEAD request, which has no body.
    #[track_caller]
    pub fn response_to_head(&mut self) -> Response {
        self.read_response(true)
    }

    #[track_caller]
    fn read_response(&mut self, is_head: bool) -> Response {
        let mut response = self.head();
        if is_head || response.status < 200 || matches!(response.status, 204 | 304) {
            return response;
        }
        let is_chunked = response.header("Transfer-Encoding").is_some_and(|coding| coding == "chunked");
        let length = response.header("Content-Length").map(|text| text.parse().expect("a length"));
        match (is_chunked, length) {
            (true, None) => self.read_chunks(&mut response),
            (false, Some(length)) => response.body = self.take(length),
            (false, None) => response.body = self.read_to_end(),
            (true, Some(_)) => panic!("both Transfer-Encoding and Content-Length: {response:?}"),
        }
        response
    }

    /// Reads the head of the next response and leaves the body to the caller.
    #[track_caller]
    pub fn head(&mut self) -> Response {
        let line = self.take_line();
        let mut words = line.splitn(3, ' ');
        let version = words.next().unwrap_or_default().to_owned();
        assert!(version.starts_with("HTTP/1."), "no status line: {line:?}");
        let status = words.next().unwrap_or_default();
        assert!(status.len() == 3, "no status in {line:?}");
        let status = status.parse().unwrap_or_else(|_| panic!("no status in {line:?}"));
        let reason = words.next().unwrap_or_default().to_owned();
        let headers = self.take_fields();
        Response { status, version, reason, headers, body: Vec::new(), trailers: Vec::new() }
    }

    /// Reads header fields up to and including the empty line.
    #[track_caller]
    pub fn take_fields(&mut self) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        loop {
            let line = self.take_line();
            if line.is_empty() {
                return fields;
            }
            let (name, value) = line.split_once(": ").unwrap_or_else(|| panic!("no header field: {line:?}"));
            fields.push((name.to_owned(), value.to_owned()));
        }
    }

    #[track_caller]
    fn read_chunks(&mut self, response: &mut Response) {
        while let Some(data) = self.chunk() {
            response.body.extend(data);
        }
        response.trailers = self.take_fields();
    }

    /// Reads the next chunk of a body; `None` is the last chunk, which the trailers follow.
    #[track_caller]
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.take_line();
        let size = usize::from_str_radix(&line, 16).unwrap_or_else(|_| panic!("no chunk size: {line:?}"));
        if size == 0 {
            return None;
        }
        let data = self.take(size);
        let end = self.take_line();
        assert!(end.is_empty(), "after a chunk: {end:?}");
        Some(data)
    }

    /// Reads the head of the next response and the first chunk of its body.
    #[track_caller]
    pub fn chunk_after_head(&mut self) -> Option<Vec<u8>> {
        self.head();
        self.chunk()
    }

    /// Reads the next line, without its CR LF.
    #[track_caller]
    pub fn take_line(&mut self) -> String {
        let mut searched = 0;
        loop {
            if let Some(at) = self.buffer[searched..].windows(2).position(|pair| pair == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..searched + at + 2).collect();
                return String::from_utf8_lossy(&line[..line.len() - 2]).into_owned();
            }
            searched = self.buffer.len().saturating_sub(1);
            let missing = || String::from_utf8_lossy(&self.buffer).into_owned();
            assert!(!self.at_end, "closed in the middle of a line: {:?}", missing());
            self.fill();
        }
    }

    /// Reads the next `length` bytes.
    #[track_caller]
    pub fn take(&mut self, length: usize) -> Vec<u8> {
        while self.buffer.len() < length {
            assert!(!self.at_end, "closed after {} of {length} bytes", self.buffer.len());
            self.fill();
        }
        self.buffer.drain(..length).collect()
    }

    /// Waits until bytes can be read, and reads none.
    #[track_caller]
    pub fn wait_readable(&self) {
        let mut byte = [0];
        let peeked = match &self.stream {
            Stream::Tcp(stream) => rustix::net::recv(stream, &mut byte, rustix::net::RecvFlags::PEEK),
            Stream::Unix(stream) => rustix::net::recv(stream, &mut byte, rustix::net::RecvFlags::PEEK),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
        peeked.expect("something in time");
    }

    /// Keeps all bytes received from now on for [`Client::record`].
    pub fn keep_record(&mut self) {
        self.is_recording = true;
    }

    /// All bytes received since [`Client::keep_record`].
    pub fn record(&self) -> &[u8] {
        &self.record
    }

    /// Waits for more bytes; `true` if the server closes the connection instead.
    #[track_caller]
    pub fn is_at_end(&mut self) -> bool {
        while self.buffer.is_empty() && !self.at_end {
            self.fill();
        }
        self.buffer.is_empty()
    }

    /// Reads the next bytes; empty when the server closes the connection instead.
    #[track_caller]
    pub fn read_some_or_end(&mut self) -> Vec<u8> {
        if self.buffer.is_empty() && !self.at_end {
            self.fill();
        }
        std::mem::take(&mut self.buffer)
    }

    /// Reads until the server closes the connection.
    #[track_caller]
    pub fn read_to_end(&mut self) -> Vec<u8> {
        while !self.at_end {
            self.fill();
        }
        std::mem::take(&mut self.buffer)
    }

    /// Asserts that the server closes the connection without sending anything more.
    #[track_caller]
    pub fn assert_closed(&mut self) {
        let rest = self.read_to_end();
        assert!(rest.is_empty(), "more than expected: {:?}", String::from_utf8_lossy(&rest));
    }

    /// Reads and discards the next bytes; `false` when the connection has ended.
    pub fn take_some(&mut self) -> bool {
        self.fill();
        self.buffer.clear();
        !self.at_end
    }

    /// `true` if the server has closed the connection; does not wait.
    pub fn is_closed(&self) -> bool {
        let mut byte = [0];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = match &self.stream {
            Stream::Tcp(stream) => rustix::net::recv(stream, &mut byte, flags),
            Stream::Unix(stream) => rustix::net::recv(stream, &mut byte, flags),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
        matches!(peeked, Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET))
    }

    /// Waits until the server has closed the connection in both directions.
    #[track_caller]
    pub fn wait_hung_up(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let polled = match &self.stream {
            Stream::Tcp(_) => panic!("one end of TCP does not tell what the other one reads"),
            Stream::Unix(stream) => PollFd::new(stream, PollFlags::empty()),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
        let timeout = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
        let polled = rustix::io::retry_on_intr(|| poll(&mut [polled.clone()], Some(&timeout)));
        assert_eq!(polled, Ok(1), "still there");
    }

    /// Shuts down both directions, also for other handles on the connection.
    pub fn close_both(&self) {
        let _ = match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
            Stream::Above(_) => unreachable!("a socket is asked"),
        };
    }

    /// `true` if the connection was reset and not closed.
    pub fn was_reset(&self) -> bool {
        self.was_reset
    }

    /// The client's TCP address.
    #[track_caller]
    pub fn local_address(&self) -> SocketAddr {
        let Stream::Tcp(stream) = &self.stream else { panic!("not over TCP") };
        stream.local_addr().expect("an address")
    }

    /// The peer's TCP address.
    #[track_caller]
    pub fn remote_address(&self) -> SocketAddr {
        let Stream::Tcp(stream) = &self.stream else { panic!("not over TCP") };
        stream.peer_addr().expect("an address")
    }

    /// Number of TCP segments with data received.
    #[track_caller]
    pub fn packets_received(&self) -> u32 {
        /// Index of `tcpi_data_segs_in` in `struct tcp_info` (linux/tcp.h), of which the C library only knows the
        /// beginning.
        const DATA_SEGS_IN: usize = 152 / size_of::<u32>();
        let Stream::Tcp(stream) = &self.stream else { panic!("not over TCP") };
        let mut info = [0u32; DATA_SEGS_IN + 1];
        let mut length = size_of_val(&info) as libc::socklen_t;
        let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
        // SAFETY: the kernel writes at most `length` bytes, which the buffer has, and any bytes are valid integers.
        let result =
            unsafe { libc::getsockopt(stream.as_raw_fd(), level, name, info.as_mut_ptr().cast(), &raw mut length) };
        assert_eq!((result, length as usize), (0, size_of_val(&info)), "the kernel tells");
        info[DATA_SEGS_IN]
    }

    /// Receives one more byte and leaves the rest in the kernel.
    #[track_caller]
    pub fn receive_byte(&mut self) {
        self.fill_with(&mut [0]);
    }

    #[track_caller]
    fn fill(&mut self) {
        self.fill_with(&mut [0; 65536]);
    }

    #[track_caller]
    fn fill_with(&mut self, bytes: &mut [u8]) {
        let read = loop {
            let read = match &mut self.stream {
                Stream::Tcp(stream) => stream.read(bytes),
                Stream::Unix(stream) => stream.read(bytes),
                Stream::Above(stream) => stream.read(bytes),
            };
            // A signal to the test program does not concern the server.
            if !read.as_ref().is_err_and(|error| error.kind() == ErrorKind::Interrupted) {
                break read;
            }
        };
        match read {
            Ok(0) => self.at_end = true,
            Ok(length) => {
                self.buffer.extend_from_slice(&bytes[..length]);
                if self.is_recording {
                    self.record.extend_from_slice(&bytes[..length]);
                }
            }
            // The bytes that arrived before the reset have been read.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => (self.at_end, self.was_reset) = (true, true),
            Err(error) => panic!("nothing in time ({error}) after {:?}", String::from_utf8_lossy(&self.buffer)),
        }
        assert!(self.buffer.len() <= RESPONSE_MAX, "a response without end");
    }
}

impl Response {
    /// Value of the header field with this name, which may occur at most once.
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value);
        let first = values.next();
        assert!(values.next().is_none(), "{name} twice: {self:?}");
        first.map(String::as_str)
    }

    /// The body as text.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body of text")
    }
}
