//! Listening sockets: specification, opening, and recognition of open ones.
//!
//! Error texts are nginx's. Nothing is retried here; see `system.rs`.
//! <https://nginx.org/en/docs/http/ngx_http_core_module.html#listen>

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::SocketAddress;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, ipproto};
use serde::{Deserialize, Serialize};

use super::errors::{ErrorLog, errno_text};
use super::text;

/// nginx's default length of the queue of pending connections (NGX_LISTEN_BACKLOG on Linux).
pub const BACKLOG_DEFAULT: i32 = 511;

/// Shared by all that accept from it.
pub type ListenerHandle = Arc<Listener>;

/// Address to listen on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ListenAddress {
    /// IPv4 or IPv6 address and port. Port 0, which nginx's language cannot express, lets the kernel choose.
    Inet(SocketAddr),
    /// Path of a Unix-domain socket.
    Unix(#[serde(with = "text::path")] PathBuf),
}

impl fmt::Display for ListenAddress {
    /// Formats the address as nginx's messages do: `0.0.0.0:80`, `[::]:80`, `unix:/run/gale.sock`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Inet(address) => address.fmt(formatter),
            ListenAddress::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SocketKind {
    /// Connections.
    Stream,
    /// `udp`, `quic`.
    Datagram,
}

/// `so_keepalive=on|off|[idle]:[interval]:[count]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAlive {
    /// SO_KEEPALIVE.
    pub on: bool,
    /// TCP_KEEPIDLE, whole seconds.
    pub idle: Option<Duration>,
    /// TCP_KEEPINTVL, whole seconds.
    pub interval: Option<Duration>,
    /// TCP_KEEPCNT.
    pub count: Option<u32>,
}

/// One `listen` address with its socket options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenSpec {
    /// Address.
    pub address: ListenAddress,
    /// Type of the socket.
    pub kind: SocketKind,
    /// `backlog`, connections.
    pub backlog: i32,
    /// `rcvbuf`, bytes.
    pub receive_buffer: Option<u32>,
    /// `sndbuf`, bytes.
    pub send_buffer: Option<u32>,
    /// `so_keepalive`.
    pub keep_alive: Option<KeepAlive>,
    /// `deferred`: TCP_DEFER_ACCEPT.
    pub deferred: bool,
    /// `ipv6only`; nginx's default is on.
    pub ipv6only: bool,
    /// `reuseport`: this many sockets with SO_REUSEPORT, one per worker; 0 = one ordinary socket.
    pub reuseport: usize,
    /// `fastopen`, pending connections.
    pub fastopen: Option<u32>,
    /// `multipath`: IPPROTO_MPTCP (RFC 8684).
    pub multipath: bool,
}

impl ListenSpec {
    /// Returns a TCP or Unix stream listener with nginx's defaults.
    pub fn new(address: ListenAddress) -> ListenSpec {
        ListenSpec {
            address,
            kind: SocketKind::Stream,
            backlog: BACKLOG_DEFAULT,
            receive_buffer: None,
            send_buffer: None,
            keep_alive: None,
            deferred: false,
            ipv6only: true,
            reuseport: 0,
            fastopen: None,
            multipath: false,
        }
    }

    /// Number of sockets wanted.
    pub fn socket_count(&self) -> usize {
        self.reuseport.max(1)
    }
}

/// The open socket or, with `reuseport`, sockets of one address.
#[derive(Clone, Debug)]
pub struct Listener {
    /// Requested address and options.
    pub spec: ListenSpec,
    /// At least one, except in a test (`-t`), where an address may be in use. There may be more than requested: a
    /// socket of a configured address is never closed, because the kernel would reset the connections in its queue.
    /// Socket `index` belongs to worker `index % workers`.
    pub sockets: Vec<Arc<OwnedFd>>,
    /// Opener of the first socket.
    pub opened_by: OpenedBy,
}

/// Opener of a socket, which is responsible for removing the file of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenedBy {
    /// This master, or its helper.
    Us,
    /// A previous binary; passed in `NGINX=`.
    PreviousBinary,
    /// The service manager, which keeps it open whether we serve or not; passed in `LISTEN_FDS=`.
    ServiceManager,
}

impl Listener {
    /// Returns the address that the socket is bound to; it differs from the requested one if that had port 0.
    ///
    /// # Errors
    /// Errors of `getsockname`.
    pub fn local_address(&self) -> io::Result<ListenAddress> {
        let first = self.sockets.first().ok_or(io::ErrorKind::NotConnected)?;
        bound_address(first.as_fd())
    }
}

/// Failure to open a socket.
#[derive(Debug)]
pub(super) struct OpenError {
    /// EADDRINUSE: worth another try.
    pub in_use: bool,
    /// nginx's text.
    pub message: String,
}

/// Permissions of a Unix socket's file: everyone may connect, as in nginx.
const UNIX_SOCKET_MODE: u32 = 0o666;

/// Opens one socket for `spec`: bound, listening, with the options that must be set before. With `test`, as for `-t`, a
/// Unix socket's file is removed again.
pub(super) fn open_socket(spec: &ListenSpec, share_port: bool, test: bool) -> Result<OwnedFd, OpenError> {
    let failed = |call: String| {
        move |error: io::Error| OpenError {
            in_use: error.raw_os_error() == Some(libc::EADDRINUSE),
            message: format!("{call} failed{}", errno_text(&error)),
        }
    };
    let address = &spec.address;
    let (family, kind) = (family(address), socket_type(spec.kind));
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = spec.multipath.then_some(ipproto::MPTCP);
    let socket = rustix::net::socket_with(family, kind, flags, protocol)
        .map_err(|error| failed(format!("socket() {address}"))(error.into()))?;

    if spec.kind == SocketKind::Stream || !test {
        set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)
            .map_err(failed(format!("setsockopt(SO_REUSEADDR) {address}")))?;
    }
    if share_port && !test {
        set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
            .map_err(failed(format!("setsockopt(SO_REUSEPORT) {address}")))?;
    }
    if family == AddressFamily::INET6 {
        set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, spec.ipv6only.into())
            .map_err(failed(format!("setsockopt(IPV6_V6ONLY) {address}")))?;
    }

    let mode = rustix::fs::Mode::from_raw_mode(UNIX_SOCKET_MODE);
    if family == AddressFamily::UNIX {
        // bind(2) creates the file with the socket's own permissions, less the umask. On a system that refuses to
        // change those, chmod(2) below still sets the file's permissions.
        let _ = rustix::fs::fchmod(&socket, mode);
    }
    bind(&socket, address).map_err(failed(format!("bind() to {address}")))?;
    let finish = || {
        if let ListenAddress::Unix(path) = address {
            // The umask may have removed some permissions.
            rustix::fs::chmod(path, mode)
                .map_err(|error| failed(format!("chmod() \"{}\"", path.display()))(error.into()))?;
            if test {
                std::fs::remove_file(path).map_err(failed(format!("unlink() {}", path.display())))?;
            }
        }
        if spec.kind == SocketKind::Stream {
            rustix::net::listen(&socket, spec.backlog)
                .map_err(|error| failed(format!("listen() to {address}, backlog {}", spec.backlog))(error.into()))?;
        }
        Ok(())
    };
    let finished = finish();
    if let (Err(_), ListenAddress::Unix(path)) = (&finished, address) {
        // The error that led here is more relevant than one of this call.
        let _ = std::fs::remove_file(path);
    }
    finished.map(|()| socket)
}

/// True if `path` is the file of a stream socket that no process listens on any more.
pub(super) fn refuses_connections(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (Ok(probe), Ok(address), Ok(metadata)) = (probe, SocketAddrUnix::new(path), std::fs::symlink_metadata(path))
    else {
        return false;
    };
    metadata.file_type().is_socket() && rustix::net::connect(&probe, &address) == Err(rustix::io::Errno::CONNREFUSED)
}

/// Sets the options that may change while the socket is open; failures are logged and ignored, as in nginx. `previous`
/// is its former configuration, `None` for a new socket.
pub(super) fn configure(listener: &Listener, previous: Option<&ListenSpec>, log: &dyn ErrorLog) {
    let spec = &listener.spec;
    if previous == Some(spec) {
        return;
    }
    for socket in &listener.sockets {
        for (name, level, option, value) in options(spec) {
            if let Err(error) = set_option(socket, level, option, value) {
                log.write(
                    Level::Alert,
                    &format!("setsockopt({name}, {value}) {} failed{}, ignored", spec.address, errno_text(&error)),
                );
            }
        }
        let relisten = spec.kind == SocketKind::Stream && previous.is_some_and(|old| old.backlog != spec.backlog);
        if relisten && let Err(error) = rustix::net::listen(socket, spec.backlog) {
            let why = errno_text(&error.into());
            log.write(
                Level::Alert,
                &format!("listen() to {}, backlog {} failed{why}, ignored", spec.address, spec.backlog),
            );
        }
        // Last, as in nginx. One second, because the time that a connection has already waited is unknown.
        let is_inet = matches!(spec.address, ListenAddress::Inet(_));
        if is_inet && spec.deferred != previous.is_some_and(|old| old.deferred) {
            let seconds = spec.deferred.into();
            if let Err(error) = set_option(socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, seconds) {
                let why = errno_text(&error);
                let text = format!("setsockopt(TCP_DEFER_ACCEPT, {seconds}) for {} failed{why}, ignored", spec.address);
                log.write(Level::Alert, &text);
            }
        }
    }
}

/// Configures sockets opened by another binary, whose options are unknown.
pub(super) fn configure_inherited(listener: &Listener, log: &dyn ErrorLog) {
    // Differs in every option that is only set on a change.
    let unknown = ListenSpec { backlog: -1, deferred: !listener.spec.deferred, ..listener.spec.clone() };
    configure(listener, Some(&unknown), log);
}

/// Allows further sockets on the address of an existing one that was opened without `reuseport`.
pub(super) fn share_port(socket: &OwnedFd) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
}

/// Makes the kernel report every connection from now on, even before data has arrived: for a socket that will be
/// closed. Earlier connections are reported after a second, when the kernel has retransmitted.
pub fn stop_deferring(socket: &OwnedFd) {
    // If this fails, clients that send nothing in time are reset, as by nginx.
    let _ = set_option(socket, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0);
}

/// Closes the socket in this process for all holders of the handle: its descriptor refers to /dev/null from now on. A
/// single download may hold an old configuration for hours; its sockets must not stay in the kernel's table without
/// being accepted from. `null` is that file, opened while there was a free descriptor.
///
/// # Errors
/// The first error; all sockets are tried.
pub(super) fn detach(null: &OwnedFd, sockets: impl IntoIterator<Item = Arc<OwnedFd>>) -> io::Result<()> {
    let mut result = Ok(());
    for socket in sockets {
        // SAFETY: both descriptors are open, held by the references; dup3 touches no memory. The number stays owned by
        // the `OwnedFd`; only the file that it refers to changes, which is the purpose.
        let code = unsafe { libc::dup3(null.as_raw_fd(), socket.as_raw_fd(), libc::O_CLOEXEC) };
        if code < 0 && result.is_ok() {
            result = Err(io::Error::last_os_error());
        }
    }
    result
}

/// Stops listening on the sockets in all processes that have them. A thread stuck in the kernel keeps them open:
/// clients that connect would wait forever, and no other process could listen on the address. Sockets of the service
/// manager are excluded, because it would lose its own sockets.
pub(super) fn shut_down(listener: &Listener) {
    if listener.opened_by == OpenedBy::ServiceManager {
        return;
    }
    for socket in &listener.sockets {
        // Has no effect on a socket that does not listen. A datagram socket keeps its port even so: the kernel returns
        // ENOTCONN, and frees the port of a socket that was bound to it only when its last descriptor is closed.
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
    }
}

/// True if a socket at `[::]` accepts IPv4 although `spec` does not, or the other way round: this option can only be
/// set when a socket is opened.
pub(super) fn differs_in_families(spec: &ListenSpec, socket: &OwnedFd) -> bool {
    matches!(spec.address, ListenAddress::Inet(SocketAddr::V6(address)) if address.ip().is_unspecified())
        && rustix::net::sockopt::ipv6_v6only(socket).is_ok_and(|is_only| is_only != spec.ipv6only)
}

/// True if a socket accepts multipath TCP although `spec` does not, or the other way round: the protocol can only be
/// chosen when a socket is opened.
pub(super) fn differs_in_paths(spec: &ListenSpec, socket: &OwnedFd) -> bool {
    let protocol = rustix::net::sockopt::socket_protocol(socket);
    protocol.is_ok_and(|protocol| (protocol == Some(ipproto::MPTCP)) != spec.multipath)
}

/// Opens the file that `detach` puts in the place of a socket.
pub(super) fn open_null() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Returns the kernel's identifier of a socket, the same for every descriptor that refers to it.
pub(super) fn socket_identity(socket: &OwnedFd) -> io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

/// Returns the specification of a socket that was passed in `NGINX=` or `LISTEN_FDS=`.
///
/// # Errors
/// The descriptor is no socket or has an unsupported family. The text is nginx's.
pub(super) fn inherited_spec(socket: &OwnedFd) -> Result<ListenSpec, String> {
    let number = socket.as_raw_fd();
    let address = bound_address(socket.as_fd()).map_err(|error| match error.kind() {
        io::ErrorKind::Unsupported => {
            format!("the inherited socket #{number} has an unsupported protocol family")
        }
        _ => format!("getsockname() of the inherited socket #{number} failed{}", errno_text(&error)),
    })?;
    let kind = rustix::net::sockopt::socket_type(socket)
        .map_err(|error| format!("getsockopt(SO_TYPE) {address} failed{}", errno_text(&error.into())))?;
    let kind = if kind == SocketType::DGRAM { SocketKind::Datagram } else { SocketKind::Stream };
    Ok(ListenSpec { kind, ..ListenSpec::new(address) })
}

fn bound_address(socket: BorrowedFd<'_>) -> io::Result<ListenAddress> {
    match SocketAddress::bound_to(socket)? {
        SocketAddress::Inet(address) => Ok(ListenAddress::Inet(address)),
        SocketAddress::Unix(Some(path)) if !path.as_os_str().as_bytes().starts_with(&[0]) => {
            Ok(ListenAddress::Unix(path.into_path_buf()))
        }
        SocketAddress::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

fn bind(socket: &OwnedFd, address: &ListenAddress) -> io::Result<()> {
    match address {
        ListenAddress::Inet(address) => rustix::net::bind(socket, address)?,
        ListenAddress::Unix(path) => rustix::net::bind(socket, &SocketAddrUnix::new(path)?)?,
    }
    Ok(())
}

fn family(address: &ListenAddress) -> AddressFamily {
    match address {
        ListenAddress::Inet(SocketAddr::V4(_)) => AddressFamily::INET,
        ListenAddress::Inet(SocketAddr::V6(_)) => AddressFamily::INET6,
        ListenAddress::Unix(_) => AddressFamily::UNIX,
    }
}

fn socket_type(kind: SocketKind) -> SocketType {
    match kind {
        SocketKind::Stream => SocketType::STREAM,
        SocketKind::Datagram => SocketType::DGRAM,
    }
}

/// Changeable options set in `spec`: name in messages, level, option, value.
fn options(spec: &ListenSpec) -> Vec<(&'static str, i32, i32, i32)> {
    let integer = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
    let seconds = |time: Duration| i32::try_from(time.as_secs()).unwrap_or(i32::MAX);
    let keep_alive = spec.keep_alive.as_ref();
    [
        ("SO_RCVBUF", libc::SOL_SOCKET, libc::SO_RCVBUF, spec.receive_buffer.map(integer)),
        ("SO_SNDBUF", libc::SOL_SOCKET, libc::SO_SNDBUF, spec.send_buffer.map(integer)),
        ("SO_KEEPALIVE", libc::SOL_SOCKET, libc::SO_KEEPALIVE, keep_alive.map(|keep| keep.on.into())),
        ("TCP_KEEPIDLE", libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, keep_alive.and_then(|keep| keep.idle).map(seconds)),
        (
            "TCP_KEEPINTVL",
            libc::IPPROTO_TCP,
            libc::TCP_KEEPINTVL,
            keep_alive.and_then(|keep| keep.interval).map(seconds),
        ),
        ("TCP_KEEPCNT", libc::IPPROTO_TCP, libc::TCP_KEEPCNT, keep_alive.and_then(|keep| keep.count).map(integer)),
        ("TCP_FASTOPEN", libc::IPPROTO_TCP, libc::TCP_FASTOPEN, spec.fastopen.map(integer)),
    ]
    .into_iter()
    .filter_map(|(name, level, option, value)| Some((name, level, option, value?)))
    .collect()
}

fn set_option(socket: &impl AsFd, level: i32, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open for the call, and the value's address and size are those of a live `i32`.
    let code = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any_port() -> ListenSpec {
        ListenSpec::new(ListenAddress::Inet("127.0.0.1:0".parse().expect("an address")))
    }

    #[test]
    fn an_address_in_use_is_reported_in_nginx_words() {
        let first = open_socket(&any_port(), false, false).expect("any port is free");
        let address = bound_address(first.as_fd()).expect("it is bound");
        let error = open_socket(&ListenSpec::new(address.clone()), false, false).expect_err("it is taken");
        assert!(error.in_use);
        assert_eq!(error.message, format!("bind() to {address} failed (98: Address already in use)"));
    }

    #[test]
    fn a_bound_socket_describes_itself() {
        let socket = open_socket(&any_port(), false, false).expect("any port is free");
        let spec = inherited_spec(&socket).expect("it is a TCP socket");
        assert_eq!(spec.kind, SocketKind::Stream);
        assert_ne!(spec.address, any_port().address);
    }

    #[test]
    fn a_socket_that_takes_other_families_is_recognised() {
        let spec = ListenSpec::new(ListenAddress::Inet("[::]:0".parse().expect("an address")));
        let both = ListenSpec { ipv6only: false, ..spec.clone() };
        let Ok(socket) = open_socket(&both, false, false) else { return }; // no IPv6 here
        assert!(differs_in_families(&spec, &socket));
        assert!(!differs_in_families(&both, &socket));
    }

    #[test]
    fn duplicates_of_a_socket_have_one_identity() {
        let socket = open_socket(&any_port(), false, false).expect("any port is free");
        let other = open_socket(&any_port(), false, false).expect("any port is free");
        let copy = socket.try_clone().expect("descriptors are left");
        assert_eq!(socket_identity(&socket).expect("a cookie"), socket_identity(&copy).expect("a cookie"));
        assert_ne!(socket_identity(&socket).expect("a cookie"), socket_identity(&other).expect("a cookie"));
    }
}
