//! Socket addresses: Internet or Unix.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix};

/// The address of a socket or of its peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SocketAddress {
    /// IPv4 or IPv6 with a port.
    Inet(SocketAddr),
    /// A path; `None` for an unnamed socket, as clients are. An abstract name begins with a NUL byte.
    Unix(Option<Box<Path>>),
}

impl SocketAddress {
    /// The Unix address with this path.
    pub fn unix(path: impl AsRef<Path>) -> Self {
        SocketAddress::Unix(Some(path.as_ref().into()))
    }

    /// The Internet address, if it is one.
    pub fn inet(&self) -> Option<SocketAddr> {
        match self {
            SocketAddress::Inet(address) => Some(*address),
            SocketAddress::Unix(_) => None,
        }
    }

    /// The address that a socket is bound to. Errors: those of getsockname(2); `Unsupported` when it is of another family.
    pub fn bound_to(socket: impl AsFd) -> io::Result<Self> {
        SocketAddress::from_kernel(Some(rustix::net::getsockname(socket)?))
    }

    pub(crate) fn from_kernel(address: Option<SocketAddrAny>) -> io::Result<Self> {
        // The kernel gives no address for an unnamed peer.
        let Some(address) = address else {
            return Ok(SocketAddress::Unix(None));
        };
        if let Ok(inet) = SocketAddr::try_from(address.clone()) {
            return Ok(SocketAddress::Inet(inet));
        }
        if address.address_family() != AddressFamily::UNIX {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(SocketAddress::Unix(unix_name(&address).map(|name| Path::new(OsStr::from_bytes(name)).into())))
    }

    /// Errors: the path is too long for a socket or there is none.
    pub(crate) fn to_kernel(&self) -> io::Result<SocketAddrAny> {
        match self {
            SocketAddress::Inet(address) => Ok((*address).into()),
            SocketAddress::Unix(None) => Err(io::ErrorKind::InvalidInput.into()),
            SocketAddress::Unix(Some(path)) => match path.as_os_str().as_bytes() {
                [0, name @ ..] => Ok(SocketAddrUnix::new_abstract_name(name)?.into()),
                _ => Ok(SocketAddrUnix::new(&**path)?.into()),
            },
        }
    }
}

/// The path, or the abstract name with its NUL byte; `None` if there is none. (Not by rustix, whose conversion panics when a path
/// fills the address to its last byte, which bind(2) allows anybody: unix(7), BUGS.)
fn unix_name(address: &SocketAddrAny) -> Option<&[u8]> {
    // SAFETY: these are the bytes that the kernel has written, or whoever made the address.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize) };
    match bytes.get(offset_of!(libc::sockaddr_un, sun_path)..)? {
        [] | [0] => None,
        name @ [0, ..] => Some(name),
        path => path.split(|&byte| byte == 0).next(),
    }
}

impl From<SocketAddr> for SocketAddress {
    fn from(address: SocketAddr) -> Self {
        SocketAddress::Inet(address)
    }
}

/// As nginx writes addresses: `127.0.0.1:80`, `[::1]:80`, `unix:/path`, `unix:` when unnamed.
impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Inet(address) => address.fmt(f),
            SocketAddress::Unix(None) => f.write_str("unix:"),
            SocketAddress::Unix(Some(path)) => write!(f, "unix:{}", path.display()),
        }
    }
}
