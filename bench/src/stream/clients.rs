//! The client of each job, on its own core.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gale_base::histogram::FineHistogram;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::backend::Backend;
use super::{DATAGRAM_BYTES, MESSAGE_BYTES};

/// Number of connections with exchanges.
const CONNECTIONS: usize = 16;
const BULK_BYTES: usize = 1 << 30;
const BURST: usize = 32;
const TIME_LIMIT: Duration = Duration::from_secs(10);

pub struct Tls(Arc<ClientConfig>);

impl Tls {
    /// Returns a configuration that trusts only this certificate.
    pub fn trusting(certificate: &Path) -> Result<Tls, String> {
        let mut roots = RootCertStore::empty();
        let der = CertificateDer::from_pem_file(certificate).map_err(|error| format!("certificate: {error}"))?;
        roots.add(der).map_err(|error| format!("certificate: {error}"))?;
        Ok(Tls(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())))
    }

    fn connect(&self, address: SocketAddr) -> io::Result<StreamOwned<ClientConnection, TcpStream>> {
        let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
        let session = ClientConnection::new(Arc::clone(&self.0), name).map_err(io::Error::other)?;
        Ok(StreamOwned::new(session, connect(address)?))
    }
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    Ok(stream)
}

/// Sends messages and receives their echoes, over several connections in turn.
pub fn exchanges(address: SocketAddr, end: Instant) -> io::Result<u64> {
    exchange_over(&mut (0..CONNECTIONS).map(|_| connect(address)).collect::<io::Result<Vec<_>>>()?, end)
}

/// The same over TLS.
pub fn tls_exchanges(address: SocketAddr, end: Instant, tls: &Tls) -> io::Result<u64> {
    exchange_over(&mut (0..CONNECTIONS).map(|_| tls.connect(address)).collect::<io::Result<Vec<_>>>()?, end)
}

fn exchange_over(streams: &mut [impl Read + Write], end: Instant) -> io::Result<u64> {
    let (message, mut answer, mut count) = ([7; MESSAGE_BYTES], [0; MESSAGE_BYTES], 0);
    while Instant::now() < end {
        for stream in &mut *streams {
            stream.write_all(&message)?;
        }
        for stream in &mut *streams {
            stream.read_exact(&mut answer)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Opens a connection for each message and records the time of each in `times`.
pub fn short_connections(address: SocketAddr, end: Instant, times: &FineHistogram) -> io::Result<u64> {
    let mut count = 0;
    while Instant::now() < end {
        let begun = Instant::now();
        tunnel(address)?;
        times.record_ns(begun.elapsed().as_nanos() as u64);
        count += 1;
    }
    Ok(count)
}

/// Opens a connection and exchanges one message.
pub fn tunnel(address: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = connect(address)?;
    let mut answer = [0; MESSAGE_BYTES];
    stream.write_all(&[7; MESSAGE_BYTES])?;
    stream.read_exact(&mut answer)?;
    Ok(stream)
}

/// Sends a GiB and waits until all of it has arrived.
pub fn bulk(address: SocketAddr, backend: &Backend) -> io::Result<u64> {
    let before = backend.bytes.load(Ordering::SeqCst);
    let mut stream = connect(address)?;
    write_bulk(&mut stream)?;
    stream.shutdown(Shutdown::Write)?;
    wait_for_bulk(before, backend)
}

/// The same over TLS.
pub fn tls_bulk(address: SocketAddr, backend: &Backend, tls: &Tls) -> io::Result<u64> {
    let before = backend.bytes.load(Ordering::SeqCst);
    let mut stream = tls.connect(address)?;
    write_bulk(&mut stream)?;
    stream.conn.send_close_notify();
    stream.flush()?;
    wait_for_bulk(before, backend)
}

fn write_bulk(stream: &mut impl Write) -> io::Result<()> {
    let piece = vec![7; 1 << 20];
    (0..BULK_BYTES / piece.len()).try_for_each(|_| stream.write_all(&piece))
}

fn wait_for_bulk(before: u64, backend: &Backend) -> io::Result<u64> {
    let end = Instant::now() + TIME_LIMIT;
    while backend.bytes.load(Ordering::SeqCst) - before < BULK_BYTES as u64 {
        if Instant::now() >= end {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(1)
}

/// Sends questions and receives the answers, each in a new session.
pub fn questions(address: SocketAddr, end: Instant) -> io::Result<u64> {
    let (message, mut answer, mut count) = ([7; 64], [0; 2048], 0);
    while Instant::now() < end {
        let mut sockets = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.set_read_timeout(Some(Duration::from_secs(1)))?;
            socket.connect(address)?;
            socket.send(&message)?;
            sockets.push(socket);
        }
        count += sockets.iter().filter(|socket| socket.recv(&mut answer).is_ok()).count() as u64;
    }
    Ok(count)
}

/// Sends a flow of datagrams as fast as the sink receives them.
pub fn flow_of(address: SocketAddr, end: Instant, in_segments: bool, backend: &Backend) -> io::Result<u64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(address)?;
    let bytes = vec![7; DATAGRAM_BYTES * BURST];
    if in_segments {
        let segment = DATAGRAM_BYTES as libc::c_int;
        // SAFETY: the kernel reads an integer that is live.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                (&raw const segment).cast(),
                size_of_val(&segment) as libc::socklen_t,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    let before = backend.datagrams.load(Ordering::SeqCst);
    let arrived = || backend.datagrams.load(Ordering::SeqCst) - before;
    let mut sent = 0u64;
    while Instant::now() < end {
        if in_segments {
            socket.send(&bytes)?;
        } else {
            for piece in bytes.chunks(DATAGRAM_BYTES) {
                socket.send(piece)?;
            }
        }
        sent += BURST as u64;
        // At most four bursts are in flight, so that hardly any datagrams are lost.
        let window = Instant::now() + Duration::from_millis(20);
        while sent.saturating_sub(arrived()) > 4 * BURST as u64 && Instant::now() < window {
            std::thread::yield_now();
        }
        if Instant::now() >= window {
            // Lost datagrams never arrive; late ones count on top of those sent from now on.
            sent = arrived();
        }
    }
    Ok(arrived())
}
