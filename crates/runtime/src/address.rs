//! Socket addresses: Internet or Unix.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::net::{SocketAddrAny, SocketAddrUnix};

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

    pub(crate) fn from_kernel(address: Option<SocketAddrAny>) -> io::Result<Self> {
        // The kernel gives no address for an unnamed peer.
        let Some(address) = address else {
            return Ok(SocketAddress::Unix(None));
        };
        if let Ok(inet) = SocketAddr::try_from(address.clone()) {
            return Ok(SocketAddress::Inet(inet));
        }
        let unix = SocketAddrUnix::try_from(address)?;
        let name = match (unix.path_bytes(), unix.abstract_name()) {
            (Some(path), _) => Some(path.to_vec()),
            (None, Some(name)) if !name.is_empty() => Some([&[0], name].concat()),
            _ => None,
        };
        Ok(SocketAddress::Unix(name.map(|name| Path::new(std::ffi::OsStr::from_bytes(&name)).into())))
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
