//! Floor of a proxy for datagrams: batches are received and sent with as few system calls as possible.
//!
//! A flow uses one socket, with datagrams joined by the kernel (GRO) and split by it (GSO). A question is treated like
//! a session: it has its own socket to the backend until the answer arrives.

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use rustix::event::epoll;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with};

use super::readiness::{Watched, number, put};

/// Datagrams, or joined datagrams, in one call.
const BATCH: usize = 32;
/// Maximum size of joined datagrams.
const PIECE_BYTES: usize = 64 * 1024;

/// Relays a flow of datagrams of `datagram_bytes` each; the last of a burst may be shorter.
pub fn flow(port: u16, backend: u16, datagram_bytes: usize) -> io::Result<()> {
    let (client, _listener) = listen(port)?;
    let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    server.connect((Ipv4Addr::LOCALHOST, backend))?;
    set_option(&client, libc::UDP_GRO, 1)?;
    set_option(&server, libc::UDP_SEGMENT, datagram_bytes as libc::c_int)?;
    let mut batch = Batch::new();
    loop {
        batch.receive(&client, libc::MSG_WAITFORONE)?;
        batch.headers.iter_mut().for_each(|header| header.msg_hdr.msg_name = ptr::null_mut());
        batch.send(&server);
    }
}

/// Relays each question to the backend over its own socket.
pub fn questions(port: u16, backend: u16) -> io::Result<()> {
    let (client, _listener) = listen(port)?;
    let backend = SocketAddrV4::new(Ipv4Addr::LOCALHOST, backend);
    let (watched, client_number, mut events) = Watched::new(&client)?;
    // Socket to the backend, and address of the client, by descriptor.
    let mut sessions: Vec<Option<(OwnedFd, libc::sockaddr_in)>> = Vec::new();
    let (mut questions, mut answers) = (Batch::new(), Batch::new());
    loop {
        watched.wait(&mut events)?;
        for descriptor in events.drain(..).map(number) {
            if descriptor != client_number {
                let Some((server, asker)) = sessions.get_mut(descriptor).and_then(Option::take) else { continue };
                if answers.count() == BATCH {
                    answers.send(&client);
                }
                answers.push(asker, |piece| recv(&server, piece, RecvFlags::DONTWAIT).map_or(0, |(count, _)| count));
                continue;
            }
            questions.receive(&client, libc::MSG_DONTWAIT)?;
            for number in 0..questions.count() {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let server = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
                connect(&server, &backend)?;
                send(&server, questions.datagram(number), SendFlags::empty())?;
                watched.add(&server, epoll::EventFlags::IN)?;
                put(&mut sessions, server.as_raw_fd() as usize, (server, questions.addresses[number]));
            }
        }
        answers.send(&client);
    }
}

/// Opens a socket for datagrams, and a listening TCP socket, which shows that the floor is ready.
fn listen(port: u16) -> io::Result<(UdpSocket, TcpListener)> {
    Ok((UdpSocket::bind((Ipv4Addr::LOCALHOST, port))?, TcpListener::bind((Ipv4Addr::LOCALHOST, port))?))
}

fn set_option(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads an integer that is live.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, option, (&raw const value).cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Datagrams with their addresses. The headers point into the other vectors, whose elements never move.
struct Batch {
    pieces: Vec<u8>,
    addresses: Vec<libc::sockaddr_in>,
    vectors: Vec<libc::iovec>,
    /// Headers of the datagrams in use.
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    fn new() -> Batch {
        // SAFETY: all zeros are a valid address, and a vector without memory.
        let (address, vector) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Batch {
            pieces: vec![0; BATCH * PIECE_BYTES],
            addresses: vec![address; BATCH],
            vectors: vec![vector; BATCH],
            headers: Vec::with_capacity(BATCH),
        }
    }

    fn count(&self) -> usize {
        self.headers.len()
    }

    fn datagram(&self, number: usize) -> &[u8] {
        &self.pieces[number * PIECE_BYTES..][..self.vectors[number].iov_len]
    }

    /// Adds a header for a datagram of `bytes` bytes.
    fn add(&mut self, bytes: usize) {
        let number = self.headers.len();
        let base = self.pieces[number * PIECE_BYTES..].as_mut_ptr();
        self.vectors[number] = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        // SAFETY: all zeros are a valid, empty header.
        let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
        header.msg_hdr.msg_name = (&raw mut self.addresses[number]).cast();
        header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        header.msg_hdr.msg_iov = &raw mut self.vectors[number];
        header.msg_hdr.msg_iovlen = 1;
        self.headers.push(header);
    }

    /// Adds a datagram for this address. `fill` writes its contents.
    fn push(&mut self, address: libc::sockaddr_in, fill: impl FnOnce(&mut [u8]) -> usize) {
        let number = self.headers.len();
        let bytes = fill(&mut self.pieces[number * PIECE_BYTES..][..PIECE_BYTES]);
        self.addresses[number] = address;
        self.add(bytes);
    }

    /// Receives datagrams, which replace the previous ones.
    fn receive(&mut self, socket: &UdpSocket, flags: libc::c_int) -> io::Result<()> {
        self.headers.clear();
        (0..BATCH).for_each(|_| self.add(PIECE_BYTES));
        // SAFETY: the headers point to live memory that is not used elsewhere.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                BATCH as libc::c_uint,
                flags as _,
                ptr::null_mut(),
            )
        };
        if count < 0 {
            self.headers.clear();
            let error = io::Error::last_os_error();
            let is_empty = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            // The socket reports a refusal by the backend as its own error.
            return if is_empty || error.kind() == io::ErrorKind::ConnectionRefused { Ok(()) } else { Err(error) };
        }
        self.headers.truncate(count as usize);
        for (header, vector) in self.headers.iter().zip(&mut self.vectors) {
            vector.iov_len = header.msg_len as usize;
        }
        Ok(())
    }

    /// Sends all datagrams. Those without room are lost, as in a network.
    fn send(&mut self, socket: &UdpSocket) {
        let mut rest = &mut self.headers[..];
        while !rest.is_empty() {
            // SAFETY: as above; the kernel only reads the memory.
            let sent = unsafe { libc::sendmmsg(socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, 0) };
            // A datagram that is refused is skipped.
            rest = &mut rest[sent.max(1) as usize..];
        }
        self.headers.clear();
    }
}
