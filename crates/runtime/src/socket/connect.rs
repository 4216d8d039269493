//! Opening connections: options of the socket, applied in the order that the kernel needs, and the step that failed.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, SocketFlags, SocketType, sockopt};

use super::{Fresh, SocketAddress, options};

/// Options for connecting a stream. Everything is off by default, and the kernel decides.
///
/// ```no_run
/// # use gale_runtime::{ConnectOptions, SocketAddress, Stream};
/// # async fn connect(upstream: &SocketAddress) -> Result<Stream, gale_runtime::ConnectError> {
/// let options = ConnectOptions { keepalive: true, ..ConnectOptions::default() };
/// let stream = options.connect(upstream).await?;
/// # Ok(stream)
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConnectOptions {
    /// The address to connect from (`proxy_bind`). Without a port the kernel chooses one when it connects, so that
    /// connections to different peers share ports (`IP_BIND_ADDRESS_NO_PORT`).
    pub local: Option<SocketAddress>,
    /// `local` may be an address that this machine does not have (`proxy_bind ... transparent`): `IP_TRANSPARENT`,
    /// which needs CAP_NET_ADMIN.
    pub transparent: bool,
    /// `SO_KEEPALIVE` (`proxy_socket_keepalive`).
    pub keepalive: bool,
    /// `SO_RCVBUF`, in bytes.
    pub receive_buffer: Option<usize>,
    /// `SO_SNDBUF`, in bytes.
    pub send_buffer: Option<usize>,
    /// Sends the first data with the SYN if the peer is known to accept it (`TCP_FASTOPEN_CONNECT`): then connecting
    /// succeeds at once, and the first send or receive reports a failure.
    pub fast_open: bool,
    /// Time limit for connecting; without it, the kernel's.
    pub timeout: Option<Duration>,
}

/// A failed connection attempt.
#[derive(Debug)]
pub struct ConnectError {
    /// The step that failed.
    pub step: ConnectStep,
    /// The reason: `TimedOut` for the timeout, else the kernel's error.
    pub error: io::Error,
}

/// A step of connecting. Options that are not set are skipped, and so are those that a Unix socket does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectStep {
    /// Opening the socket.
    Socket,
    /// [`ConnectOptions::keepalive`].
    Keepalive,
    /// [`ConnectOptions::receive_buffer`].
    ReceiveBuffer,
    /// [`ConnectOptions::send_buffer`].
    SendBuffer,
    /// [`ConnectOptions::transparent`].
    Transparent,
    /// Leaving the port of [`ConnectOptions::local`] to the kernel.
    BindAddressNoPort,
    /// [`ConnectOptions::fast_open`].
    FastOpen,
    /// [`ConnectOptions::local`].
    Bind,
    /// Connecting, in [`ConnectOptions::timeout`].
    Connect,
}

/// Opens a kernel socket with these options, and connects it or begins to.
pub(crate) fn begin_connect(
    address: &SocketAddress,
    options: &ConnectOptions,
) -> Result<(OwnedFd, Fresh), ConnectError> {
    use ConnectStep::*;
    let kernel_address = address.to_kernel().map_err(Connect.failed())?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket =
        net::socket_with(kernel_address.address_family(), SocketType::STREAM, flags, None).map_err(Socket.failed())?;
    let inet = address.inet();
    if options.keepalive && inet.is_some() {
        options::set_keepalive(socket.as_fd(), true).map_err(Keepalive.failed())?;
    }
    if let Some(bytes) = options.receive_buffer {
        sockopt::set_socket_recv_buffer_size(&socket, bytes).map_err(ReceiveBuffer.failed())?;
    }
    if let Some(bytes) = options.send_buffer {
        sockopt::set_socket_send_buffer_size(&socket, bytes).map_err(SendBuffer.failed())?;
    }
    if let Some(inet) = inet {
        if options.transparent {
            options::set_transparent(socket.as_fd(), inet.is_ipv6()).map_err(Transparent.failed())?;
        }
        if options.local.as_ref().and_then(SocketAddress::inet).is_some_and(|local| local.port() == 0) {
            options::set_bind_address_no_port(socket.as_fd()).map_err(BindAddressNoPort.failed())?;
        }
        if options.fast_open {
            options::set_fast_open_connect(socket.as_fd()).map_err(FastOpen.failed())?;
        }
    }
    if let Some(local) = &options.local {
        let local = local.to_kernel().map_err(Bind.failed())?;
        net::bind(&socket, &local).map_err(Bind.failed())?;
    }
    let mut connected = net::connect(&socket, &kernel_address);
    if connected == Err(Errno::INPROGRESS) && inet.is_some_and(|inet| inet.ip().to_canonical().is_loopback()) {
        // Within a machine the handshake is over when the call returns, but the call has not noticed. A second call
        // costs a tenth of a turn of the loop.
        connected = net::connect(&socket, &kernel_address);
    }
    let fresh = match connected {
        Ok(()) => Fresh::Connected,
        Err(Errno::INPROGRESS | Errno::ALREADY | Errno::INTR) => Fresh::Connecting,
        Err(errno) => return Err(Connect.failed()(errno)),
    };
    Ok((socket, fresh))
}

impl ConnectStep {
    pub(crate) fn failed<E: Into<io::Error>>(self) -> impl FnOnce(E) -> ConnectError {
        move |error| ConnectError { step: self, error: error.into() }
    }
}

/// The failed call, as nginx names it.
impl fmt::Display for ConnectStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ConnectStep::Socket => "socket()",
            ConnectStep::Keepalive => "setsockopt(SO_KEEPALIVE)",
            ConnectStep::ReceiveBuffer => "setsockopt(SO_RCVBUF)",
            ConnectStep::SendBuffer => "setsockopt(SO_SNDBUF)",
            ConnectStep::Transparent => "setsockopt(IP_TRANSPARENT)",
            ConnectStep::BindAddressNoPort => "setsockopt(IP_BIND_ADDRESS_NO_PORT)",
            ConnectStep::FastOpen => "setsockopt(TCP_FASTOPEN_CONNECT)",
            ConnectStep::Bind => "bind()",
            ConnectStep::Connect => "connect()",
        })
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.step, self.error)
    }
}

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Keeps only the error, without the step.
impl From<ConnectError> for io::Error {
    fn from(failed: ConnectError) -> io::Error {
        failed.error
    }
}
