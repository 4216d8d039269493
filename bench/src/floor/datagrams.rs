//! The floor of a proxy for datagrams: what comes in a batch leaves in a batch, with as few calls as there are.
//!
//! A flow is passed on over one socket, whole segments as they come (GRO) and go (GSO). A question is what a session
//! is: a socket of its own to the server behind, until its answer is there.

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use rustix::event::epoll;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with};

use super::readiness::{Watched, number, put};

/// Datagrams, or joined ones, in one call.
const BATCH: usize = 32;
/// As much as the kernel joins.
const PIECE_BYTES: usize = 64 * 1024;

/// `flow` passes on datagrams of so many bytes, the last of a burst perhaps shorter.
pub fn flow(port: u16, behind: u16, datagram_bytes: usize) -> io::Result<()> {
    let (client, _listener) = listen(port)?;
    let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    server.connect((Ipv4Addr::LOCALHOST, behind))?;
    set_option(&client, libc::UDP_GRO, 1)?;
    set_option(&server, libc::UDP_SEGMENT, datagram_bytes as libc::c_int)?;
    let mut batch = Batch::new();
    loop {
        batch.receive(&client, libc::MSG_WAITFORONE)?;
        batch.headers.iter_mut().for_each(|header| header.msg_hdr.msg_name = ptr::null_mut());
        batch.send(&server);
    }
}

/// `questions` gives each question to the server behind over a socket of its own.
pub fn questions(port: u16, behind: u16) -> io::Result<()> {
    let (client, _listener) = listen(port)?;
    let behind = SocketAddrV4::new(Ipv4Addr::LOCALHOST, behind);
    let (watched, client_number, mut events) = Watched::new(&client)?;
    // The socket to the server, and who has asked.
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
                connect(&server, &behind)?;
                send(&server, questions.datagram(number), SendFlags::empty())?;
                watched.add(&server, epoll::EventFlags::IN)?;
                put(&mut sessions, server.as_raw_fd() as usize, (server, questions.addresses[number]));
            }
        }
        answers.send(&client);
    }
}

/// A socket for datagrams; and one that connections may be made to, which says that it is there.
fn listen(port: u16) -> io::Result<(UdpSocket, TcpListener)> {
    Ok((UdpSocket::bind((Ipv4Addr::LOCALHOST, port))?, TcpListener::bind((Ipv4Addr::LOCALHOST, port))?))
}

fn set_option(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel reads an integer that is there.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, option, (&raw const value).cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Datagrams with their addresses. The headers point into the other vectors, whose elements stay where they are.
struct Batch {
    pieces: Vec<u8>,
    addresses: Vec<libc::sockaddr_in>,
    vectors: Vec<libc::iovec>,
    /// Of the datagrams that there are.
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    fn new() -> Batch {
        // SAFETY: all zeros are an address, and a vector without memory.
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

    /// Has a header for one more datagram, of so many bytes.
    fn add(&mut self, bytes: usize) {
        let number = self.headers.len();
        let base = self.pieces[number * PIECE_BYTES..].as_mut_ptr();
        self.vectors[number] = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        // SAFETY: all zeros are a header without anything.
        let mut header: libc::mmsghdr = unsafe { mem::zeroed() };
        header.msg_hdr.msg_name = (&raw mut self.addresses[number]).cast();
        header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
        header.msg_hdr.msg_iov = &raw mut self.vectors[number];
        header.msg_hdr.msg_iovlen = 1;
        self.headers.push(header);
    }

    /// One more datagram for this address, which `fill` writes.
    fn push(&mut self, address: libc::sockaddr_in, fill: impl FnOnce(&mut [u8]) -> usize) {
        let number = self.headers.len();
        let bytes = fill(&mut self.pieces[number * PIECE_BYTES..][..PIECE_BYTES]);
        self.addresses[number] = address;
        self.add(bytes);
    }

    /// Takes what has come, in place of what there was.
    fn receive(&mut self, socket: &UdpSocket, flags: libc::c_int) -> io::Result<()> {
        self.headers.clear();
        (0..BATCH).for_each(|_| self.add(PIECE_BYTES));
        // SAFETY: the headers point to memory that is there, and that nobody else uses.
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
            // The socket tells of a refusal by the server behind as an error of its own.
            return if is_empty || error.kind() == io::ErrorKind::ConnectionRefused { Ok(()) } else { Err(error) };
        }
        self.headers.truncate(count as usize);
        for (header, vector) in self.headers.iter().zip(&mut self.vectors) {
            vector.iov_len = header.msg_len as usize;
        }
        Ok(())
    }

    /// Sends all of them. What finds no room is lost, as it is in every network.
    fn send(&mut self, socket: &UdpSocket) {
        let mut rest = &mut self.headers[..];
        while !rest.is_empty() {
            // SAFETY: as above; the kernel only reads the memory.
            let sent = unsafe { libc::sendmmsg(socket.as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, 0) };
            // One that is refused is left out.
            rest = &mut rest[sent.max(1) as usize..];
        }
        self.headers.clear();
    }
}
