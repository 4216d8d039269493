//! Batches of datagrams on a kernel socket: recvmmsg(2) and sendmmsg(2) with their control messages, and the socket
//! options for them.

use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};

use crate::socket::SocketAddress;
use crate::socket::datagram::{BATCH_MAX, DatagramOptions, Ecn, Received, Room, Transmit};
use crate::socket::options;

/// Aligned room for the control messages of one datagram. The largest are an address (40 bytes), two numbers and a
/// length (24 each).
type Control = [MaybeUninit<u64>; 16];
const CONTROL_BYTES: usize = size_of::<Control>();

/// Datagrams, or bytes, that count as one operation of their connection in a turn.
const DATAGRAMS_PER_OPERATION: usize = 8;
const BYTES_PER_OPERATION: usize = 64 * 1024;

pub(super) fn open(options: &DatagramOptions) -> io::Result<OwnedFd> {
    let to_kernel = |address: &Option<SocketAddress>| address.as_ref().map(SocketAddress::to_kernel).transpose();
    let (local, peer) = (to_kernel(&options.local)?, to_kernel(&options.peer)?);
    let family = peer.as_ref().or(local.as_ref()).ok_or(io::ErrorKind::InvalidInput)?.address_family();
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::DGRAM, flags, None)?;
    if options.reuse_port {
        sockopt::set_socket_reuseport(&socket, true)?;
    }
    set_options(socket.as_fd(), family, options)?;
    if let Some(local) = local {
        net::bind(&socket, &local)?;
    }
    if let Some(peer) = peer {
        net::connect(&socket, &peer)?;
    }
    Ok(socket)
}

/// Sets these options on a socket that is bound already.
pub(super) fn adopt(socket: OwnedFd, options: &DatagramOptions) -> io::Result<OwnedFd> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    set_options(socket.as_fd(), net::getsockname(&socket)?.address_family(), options)?;
    Ok(socket)
}

fn set_options(socket: BorrowedFd<'_>, family: AddressFamily, options: &DatagramOptions) -> io::Result<()> {
    if let Some(bytes) = options.receive_buffer {
        sockopt::set_socket_recv_buffer_size(socket, bytes)?;
    }
    if let Some(bytes) = options.send_buffer {
        sockopt::set_socket_send_buffer_size(socket, bytes)?;
    }
    let is_inet = family == AddressFamily::INET || family == AddressFamily::INET6;
    if options.transparent && is_inet {
        options::set_transparent(socket, family == AddressFamily::INET6)?;
    }
    let set =
        |is_wanted: bool, level, option| if is_wanted { options::set_int(socket, level, option, 1) } else { Ok(()) };
    let (is_ipv4, is_ipv6) = (family == AddressFamily::INET, family == AddressFamily::INET6);
    set(options.local_address && is_ipv4, libc::IPPROTO_IP, libc::IP_PKTINFO)?;
    set(options.local_address && is_ipv6, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)?;
    // An IPv6 socket may receive IPv4 datagrams too.
    set(options.ecn && (is_ipv4 || is_ipv6), libc::IPPROTO_IP, libc::IP_RECVTOS)?;
    set(options.ecn && is_ipv6, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS)?;
    if options.gro && is_inet { set_gro(socket) } else { Ok(()) }
}

/// Turns on generic receive offload of an IP socket.
pub(super) fn set_gro(socket: BorrowedFd<'_>) -> io::Result<()> {
    options::set_int(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Number of operations that these datagrams count as.
pub(super) fn operations(received: &[Received]) -> u16 {
    let bytes: usize = received.iter().map(|one| one.length).sum();
    let operations = (received.len() / DATAGRAMS_PER_OPERATION).max(bytes / BYTES_PER_OPERATION);
    u16::try_from(operations).unwrap_or(u16::MAX).max(1)
}

/// Receives the datagrams that have arrived, at least one. Returns true if the socket is drained: the kernel looks for
/// one more unless all buffers are used.
pub(super) fn receive(socket: BorrowedFd<'_>, room: Room<'_>, received: &mut Vec<Received>) -> Result<bool, Errno> {
    if room.is_bare {
        return receive_bare(socket, room, received).map(|()| false);
    }
    let count = room.count.min(BATCH_MAX);
    let Room { memory, bytes_each, .. } = room;
    assert!(memory.len() >= count * bytes_each);
    let mut names = [const { MaybeUninit::<libc::sockaddr_storage>::uninit() }; BATCH_MAX];
    let mut controls = [const { [const { MaybeUninit::uninit() }; _] }; BATCH_MAX] as [Control; BATCH_MAX];
    let mut slices = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH_MAX];
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH_MAX];
    let memory = memory.as_mut_ptr();
    for index in 0..count {
        // SAFETY: the buffer lies within the memory, as was asserted above.
        let buffer = unsafe { memory.add(index * bytes_each) };
        slices[index] = libc::iovec { iov_base: buffer.cast(), iov_len: bytes_each };
        let mut header = empty_header();
        header.msg_name = names[index].as_mut_ptr().cast();
        header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        header.msg_iov = &raw mut slices[index];
        header.msg_iovlen = 1;
        header.msg_control = controls[index].as_mut_ptr().cast();
        header.msg_controllen = CONTROL_BYTES as _;
        headers[index].write(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
    }
    let (flags, no_timeout) = (libc::MSG_DONTWAIT, ptr::null_mut());
    // SAFETY: `count` headers are initialized; the names, memory and controls that they point to live during the call
    // and have the given lengths.
    let arrived = unsafe {
        libc::recvmmsg(socket.as_raw_fd(), headers.as_mut_ptr().cast(), count as u32, flags as _, no_timeout)
    };
    let Ok(arrived) = usize::try_from(arrived) else { return Err(last_error()) };
    for header in &headers[..arrived] {
        // SAFETY: the kernel has filled the first `arrived` headers, which were initialized before.
        received.push(unsafe { told_of(header.assume_init_ref()) });
    }
    Ok(arrived < count)
}

/// Receives one datagram without address or control messages: the cheapest call.
fn receive_bare(socket: BorrowedFd<'_>, room: Room<'_>, received: &mut Vec<Received>) -> Result<(), Errno> {
    let buffer = &mut room.memory[..room.bytes_each];
    let (length, length_sent) = net::recv(socket, buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC)?;
    let mut one = Received::new(SocketAddress::Unix(None), length);
    one.stride = length.max(1);
    one.is_truncated = length_sent > length;
    received.push(one);
    Ok(())
}

/// Metadata of a received datagram.
///
/// # Safety
///
/// The header was filled by recvmmsg(2), and the memory that it points to lives.
unsafe fn told_of(message: &libc::mmsghdr) -> Received {
    let header = &message.msg_hdr;
    // SAFETY: the kernel has written an address of this length there.
    let name = unsafe { std::slice::from_raw_parts(header.msg_name.cast::<u8>(), header.msg_namelen as usize) };
    let mut received = Received::new(SocketAddress::from_bytes(name), message.msg_len as usize);
    received.is_truncated = header.msg_flags & libc::MSG_TRUNC != 0;
    // SAFETY: the kernel has written control messages of this length, which these functions walk through.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: a control message begins here, and its data is at least as long as its kind demands; the reads need
        // no alignment.
        unsafe {
            let data = libc::CMSG_DATA(next);
            match ((*next).cmsg_level, (*next).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    received.local = Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr))));
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    received.local = Some(IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr)));
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => received.ecn = Ecn::of_class(data.read()),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    received.ecn = Ecn::of_class(data.cast::<i32>().read_unaligned() as u8);
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    received.stride = usize::try_from(data.cast::<i32>().read_unaligned()).unwrap_or(0);
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(header, next);
        }
    }
    // The stride of an empty datagram must be a valid divisor too.
    received.stride = received.stride.max(1);
    received
}

/// Sends the first of these, at most [`BATCH_MAX`], and returns how many.
pub(super) fn send(socket: BorrowedFd<'_>, transmits: &[Transmit<'_>]) -> io::Result<usize> {
    if let [transmit] = transmits
        && transmit.is_bare()
    {
        return send_bare(socket, transmit).map(|()| 1);
    }
    let transmits = &transmits[..transmits.len().min(BATCH_MAX)];
    let mut names = [const { MaybeUninit::<libc::sockaddr_storage>::uninit() }; BATCH_MAX];
    let mut controls = [const { [const { MaybeUninit::uninit() }; _] }; BATCH_MAX] as [Control; BATCH_MAX];
    let mut slices = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; BATCH_MAX];
    let mut headers = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; BATCH_MAX];
    // For each header the number of transmits up to and including it.
    let mut ends = [0; BATCH_MAX];
    let (mut count, mut end) = (0, 0);
    while end < transmits.len() {
        let (joined, segment_bytes) = Transmit::join(&transmits[end..]);
        let transmit = Transmit { segment_bytes, ..transmits[end] };
        let slices = &mut slices[end..end + joined];
        for (slice, Transmit { contents, .. }) in slices.iter_mut().zip(&transmits[end..]) {
            *slice = libc::iovec { iov_base: contents.as_ptr().cast_mut().cast(), iov_len: contents.len() };
        }
        let mut header = empty_header();
        if let Some(destination) = transmit.destination {
            header.msg_namelen = destination.write_to(&mut names[count])?;
            header.msg_name = names[count].as_mut_ptr().cast();
        }
        header.msg_iov = slices.as_mut_ptr();
        header.msg_iovlen = joined as _;
        let bytes = slices.iter().map(|slice| slice.iov_len).sum();
        let used = write_control(&mut controls[count], &transmit, bytes);
        if used > 0 {
            header.msg_control = controls[count].as_mut_ptr().cast();
            header.msg_controllen = used as _;
        }
        headers[count].write(libc::mmsghdr { msg_hdr: header, msg_len: 0 });
        end += joined;
        ends[count] = end;
        count += 1;
    }
    if count == 0 {
        return Ok(0);
    }
    loop {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `count` headers are initialized; the names, contents and controls that they point to live during the
        // call and have the given lengths.
        let sent = unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr().cast(), count as u32, flags as _) };
        match usize::try_from(sent).map_err(|_| last_error()) {
            Ok(sent) => return Ok(sent.checked_sub(1).map_or(0, |last| ends[last])),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Sends one datagram without control messages: the cheapest call.
fn send_bare(socket: BorrowedFd<'_>, transmit: &Transmit<'_>) -> io::Result<()> {
    let mut name = MaybeUninit::uninit();
    let (name, length) = match transmit.destination {
        Some(destination) => {
            let length = destination.write_to(&mut name)?;
            (name.as_ptr().cast(), length)
        }
        None => (ptr::null(), 0),
    };
    let (contents, flags) = (transmit.contents, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    loop {
        // SAFETY: contents and name (null for none) live during the call and have the given lengths.
        let sent =
            unsafe { libc::sendto(socket.as_raw_fd(), contents.as_ptr().cast(), contents.len(), flags, name, length) };
        if sent >= 0 {
            return Ok(());
        }
        match last_error() {
            Errno::INTR => {}
            errno => return Err(errno.into()),
        }
    }
}

/// Writes the control messages for a transmit of `bytes` bytes; returns their length.
fn write_control(control: &mut Control, transmit: &Transmit<'_>, bytes: usize) -> usize {
    let mut writer = ControlWriter { control, used: 0 };
    if let Some(ecn) = transmit.ecn {
        // The destination decides which of the two applies; the kernel ignores the other.
        writer.push(libc::IPPROTO_IP, libc::IP_TOS, ecn as i32);
        writer.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ecn as i32);
    }
    match transmit.source {
        Some(IpAddr::V4(ip)) => {
            let address = libc::in_addr { s_addr: u32::from(ip).to_be() };
            let info =
                libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: libc::in_addr { s_addr: 0 } };
            writer.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
        }
        Some(IpAddr::V6(ip)) => {
            let info = libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 };
            writer.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        None => {}
    }
    if let Some(segment_bytes) = transmit.segment_bytes.filter(|&segment_bytes| usize::from(segment_bytes) < bytes) {
        writer.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment_bytes);
    }
    writer.used
}

struct ControlWriter<'a> {
    control: &'a mut Control,
    used: usize,
}

impl ControlWriter<'_> {
    fn push<T: Copy>(&mut self, level: i32, kind: i32, value: T) {
        // SAFETY: these compute lengths only.
        let (space, length) =
            unsafe { (libc::CMSG_SPACE(size_of::<T>() as u32), libc::CMSG_LEN(size_of::<T>() as u32)) };
        assert!(self.used + space as usize <= CONTROL_BYTES, "there is room for every kind once");
        // SAFETY: there is room for `space` bytes behind the used ones. Both lengths are multiples of 8, so the header
        // is aligned; the padding behind the data stays unwritten and is never read.
        unsafe {
            let header = self.control.as_mut_ptr().cast::<u8>().add(self.used).cast::<libc::cmsghdr>();
            let mut empty: libc::cmsghdr = mem::zeroed();
            empty.cmsg_len = length as _;
            empty.cmsg_level = level;
            empty.cmsg_type = kind;
            header.write(empty);
            libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        }
        self.used += space as usize;
    }
}

fn empty_header() -> libc::msghdr {
    // SAFETY: an all-zero `msghdr` is valid and empty: pointers and lengths are null.
    unsafe { mem::zeroed() }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
