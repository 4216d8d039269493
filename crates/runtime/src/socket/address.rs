//! Socket addresses: Internet or Unix.

use std::ffi::OsStr;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix};

/// The address of a socket or of its peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SocketAddress {
    /// IPv4 or IPv6 with a port.
    Inet(SocketAddr),
    /// A path; `None` for an unnamed socket, as clients are. An abstract name begins with a NUL byte.
    Unix(Option<Box<Path>>),
}

/// Hashes to one or two words, because datagrams are looked up by address several times each. Flow and scope of IPv6
/// are left out: hardly any addresses differ only in those.
impl Hash for SocketAddress {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        match self {
            SocketAddress::Inet(SocketAddr::V4(address)) => {
                hasher.write_u64(u64::from(address.ip().to_bits()) << 16 | u64::from(address.port()));
            }
            SocketAddress::Inet(SocketAddr::V6(address)) => {
                hasher.write_u128(address.ip().to_bits());
                hasher.write_u16(address.port());
            }
            SocketAddress::Unix(path) => path.hash(hasher),
        }
    }
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

    /// The address that a socket is bound to. Errors: those of getsockname(2); `Unsupported` for another family.
    pub fn bound_to(socket: impl AsFd) -> io::Result<Self> {
        SocketAddress::from_kernel(Some(rustix::net::getsockname(socket)?))
    }

    pub(crate) fn from_kernel(address: Option<SocketAddrAny>) -> io::Result<Self> {
        // The kernel returns no address for an unnamed peer.
        let Some(address) = address else {
            return Ok(SocketAddress::Unix(None));
        };
        if let Ok(inet) = SocketAddr::try_from(address.clone()) {
            return Ok(SocketAddress::Inet(inet));
        }
        if address.address_family() != AddressFamily::UNIX {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: these bytes were initialized by the kernel, or by the code that made the address.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize) };
        Ok(SocketAddress::Unix(unix_name(bytes).map(|name| Path::new(OsStr::from_bytes(name)).into())))
    }

    /// The address that the kernel has written for the sender of a datagram; unnamed if there is none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let port = || u16::from_be_bytes([bytes[2], bytes[3]]);
        let family = bytes.first_chunk().map_or(libc::AF_UNSPEC, |family| u16::from_ne_bytes(*family).into());
        match family {
            libc::AF_INET if bytes.len() >= size_of::<libc::sockaddr_in>() => {
                let ip: [u8; 4] = bytes[4..8].try_into().expect("four bytes");
                SocketAddress::Inet(SocketAddrV4::new(ip.into(), port()).into())
            }
            libc::AF_INET6 if bytes.len() >= size_of::<libc::sockaddr_in6>() => {
                let word = |at: usize| bytes[at..at + 4].try_into().expect("four bytes");
                let ip: [u8; 16] = bytes[8..24].try_into().expect("sixteen bytes");
                // The flow has network byte order; the scope is a number in host byte order.
                let (flow, scope) = (u32::from_be_bytes(word(4)), u32::from_ne_bytes(word(24)));
                SocketAddress::Inet(SocketAddrV6::new(ip.into(), port(), flow, scope).into())
            }
            libc::AF_UNIX => {
                SocketAddress::Unix(unix_name(bytes).map(|name| Path::new(OsStr::from_bytes(name)).into()))
            }
            _ => SocketAddress::Unix(None),
        }
    }

    /// Writes the address for the kernel and returns its length. Errors: as [`SocketAddress::to_kernel`].
    pub(crate) fn write_to(&self, storage: &mut MaybeUninit<libc::sockaddr_storage>) -> io::Result<libc::socklen_t> {
        let address = self.to_kernel()?;
        // SAFETY: the source is `addr_len` bytes long, which is at most the size of the destination.
        unsafe {
            let (from, to) = (address.as_ptr().cast::<u8>(), storage.as_mut_ptr().cast::<u8>());
            std::ptr::copy_nonoverlapping(from, to, address.addr_len() as usize);
        }
        Ok(address.addr_len())
    }

    /// The address for the kernel. Errors: the path is too long for a socket, or there is none.
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

/// The path, or the abstract name with its NUL byte; `None` if there is none. (rustix's conversion panics if a path
/// fills the address to its last byte, which bind(2) allows: unix(7), BUGS.)
fn unix_name(address: &[u8]) -> Option<&[u8]> {
    match address.get(offset_of!(libc::sockaddr_un, sun_path)..)? {
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

/// In nginx's format: `127.0.0.1:80`, `[::1]:80`, `unix:/path`, `unix:` when unnamed.
impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Inet(address) => address.fmt(f),
            SocketAddress::Unix(None) => f.write_str("unix:"),
            SocketAddress::Unix(Some(path)) => write!(f, "unix:{}", path.display()),
        }
    }
}
