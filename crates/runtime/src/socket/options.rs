//! Socket options and status, each a system call on the descriptor.
//!
//! Errors are setsockopt(2)'s and getsockopt(2)'s. Operations that a driver has to know about (shutdown, reset) are the
//! driver's.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;

pub(crate) fn set_nodelay(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    Ok(sockopt::set_tcp_nodelay(socket, on)?)
}

pub(crate) fn set_cork(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    Ok(sockopt::set_tcp_cork(socket, on)?)
}

pub(crate) fn set_keepalive(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    Ok(sockopt::set_socket_keepalive(socket, on)?)
}

/// `SO_LINGER` with no time: close sends a reset and drops queued data.
pub(crate) fn set_linger_reset(socket: BorrowedFd<'_>) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(socket, Some(Duration::ZERO))?)
}

/// `IP_TRANSPARENT`, or `IPV6_TRANSPARENT`: permits foreign local addresses. Needs CAP_NET_ADMIN.
pub(crate) fn set_transparent(socket: BorrowedFd<'_>, is_ipv6: bool) -> io::Result<()> {
    let (level, option) =
        if is_ipv6 { (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT) } else { (libc::IPPROTO_IP, libc::IP_TRANSPARENT) };
    set_int(socket, level, option, 1)
}

/// `IP_BIND_ADDRESS_NO_PORT`: a bind without a port leaves its choice to connect. A kernel without this option chooses
/// it in bind.
pub(crate) fn set_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    match set_int(socket, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP)) => Ok(()),
        result => result,
    }
}

/// `TCP_FASTOPEN_CONNECT`: the first data leaves with the SYN.
pub(crate) fn set_fast_open_connect(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_int(socket, libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1)
}

/// Sets an option whose value is an `int`.
pub(crate) fn set_int(socket: BorrowedFd<'_>, level: i32, option: i32, value: i32) -> io::Result<()> {
    let length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the call; the pointer is to a live value of the given length.
    let code = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), length) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Number of unread bytes (`FIONREAD`).
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::io::ioctl_fionread(socket)?)
}

/// The kernel's information about a TCP connection (tcp(7), `TCP_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// The smoothed round trip time, in microseconds.
    pub rtt: u32,
    /// Variation of the round trip time, in microseconds.
    pub rtt_variance: u32,
    /// The congestion window, in segments.
    pub congestion_window: u32,
    /// Receive buffer space, in bytes.
    pub receive_space: u32,
}

/// The queue of a listening TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AcceptQueue {
    pub waiting: u32,
    pub waiting_max: u32,
}

impl AcceptQueue {
    /// A system call. Errors: getsockopt(2)'s; `InvalidInput` if the socket does not listen.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> io::Result<AcceptQueue> {
        let info = tcp_info(socket)?;
        // include/net/tcp_states.h; for a listening socket these two fields are its queue (net/ipv4/tcp.c).
        const TCP_LISTEN: u8 = 10;
        if info.tcpi_state != TCP_LISTEN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(AcceptQueue { waiting: info.tcpi_unacked, waiting_max: info.tcpi_sacked })
    }
}

impl TcpInfo {
    /// A system call. Errors: getsockopt(2)'s; the socket may be no TCP socket.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> io::Result<TcpInfo> {
        let info = tcp_info(socket)?;
        Ok(TcpInfo {
            rtt: info.tcpi_rtt,
            rtt_variance: info.tcpi_rttvar,
            congestion_window: info.tcpi_snd_cwnd,
            receive_space: info.tcpi_rcv_space,
        })
    }
}

fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<libc::tcp_info> {
    // SAFETY: all bytes zero is a valid `tcp_info`, which is integers only.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the call; the pointers are to live values, and `length` is the size of
    // `info`.
    let code = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut length)
    };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(info) }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_listening_socket_tells_how_many_connections_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 5).unwrap();
        let queue = |waiting| AcceptQueue { waiting, waiting_max: 5 };
        assert_eq!(AcceptQueue::of(listener.as_fd()).unwrap(), queue(0));
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(AcceptQueue::of(listener.as_fd()).unwrap(), queue(1));
        let accepted = listener.accept().unwrap();
        assert_eq!(AcceptQueue::of(listener.as_fd()).unwrap(), queue(0));
        assert_eq!(AcceptQueue::of(client.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        drop(accepted);
        let (unix, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(AcceptQueue::of(unix.as_fd()).is_err());
    }
}
