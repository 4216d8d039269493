//! Transport of a connection: a plain socket or TLS over one.
//!
//! A protocol receives and sends through a [`Transport`] and does not distinguish the two, except for cheaper
//! operations ([`Transport::can_sendfile`]) and for information to others ([`Transport::is_encrypted`]).

use std::io;
use std::os::fd::AsFd;
use std::task::{Context, Poll};

use gale_runtime::{Buffer, Output, SocketAddress, Stream, TcpInfo};

use crate::{IdleTls, TlsStream};

/// Transport of a connection.
pub enum Transport {
    /// Unencrypted.
    Plain(Stream),
    /// TLS, or about to begin it.
    Tls(Box<TlsStream>),
}

impl Transport {
    /// The underlying socket.
    pub fn socket(&self) -> &Stream {
        match self {
            Transport::Plain(stream) => stream,
            Transport::Tls(stream) => stream.socket(),
        }
    }

    /// The TLS stream, which may not have begun a handshake.
    pub fn tls(&self) -> Option<&TlsStream> {
        match self {
            Transport::Plain(_) => None,
            Transport::Tls(stream) => Some(stream),
        }
    }

    /// `true` if the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Transport::Tls(stream) if stream.is_tls())
    }

    /// `true` if the kernel can send a file directly ([`Transport::poll_sendfile`]).
    pub fn can_sendfile(&self) -> bool {
        matches!(self, Transport::Plain(_))
    }

    /// See [`Stream::poll_recv`].
    pub fn poll_recv(&self, context: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        match self {
            Transport::Plain(stream) => stream.poll_recv(context, into, max),
            Transport::Tls(stream) => stream.poll_recv(context, into, max),
        }
    }

    /// The socket, if it is unencrypted.
    pub fn plain(&self) -> Option<&Stream> {
        match self {
            Transport::Plain(stream) => Some(stream),
            Transport::Tls(_) => None,
        }
    }

    /// Returns received bytes to the front of the input, for the next user of the connection.
    pub fn put_back(&self, bytes: Buffer) {
        match self {
            Transport::Plain(stream) => stream.put_back(bytes),
            Transport::Tls(stream) => stream.put_back(bytes),
        }
    }

    /// See [`Stream::poll_send`].
    pub fn poll_send(&self, context: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        match self {
            Transport::Plain(stream) => stream.poll_send(context, out),
            Transport::Tls(stream) => stream.poll_send(context, out),
        }
    }

    /// See [`Stream::try_send`].
    pub fn try_send(&self, out: &mut Output, is_last: bool) -> io::Result<usize> {
        match self {
            Transport::Plain(stream) => stream.try_send(out, is_last),
            Transport::Tls(stream) => stream.try_send(out, is_last),
        }
    }

    /// See [`Stream::try_send_copy`].
    pub fn try_send_copy(&self, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        match self {
            Transport::Plain(stream) => stream.try_send_copy(bytes, is_last),
            Transport::Tls(stream) => stream.try_send_copy(bytes, is_last),
        }
    }

    /// See [`Stream::poll_sendfile`]. Requires [`Transport::can_sendfile`].
    pub fn poll_sendfile(
        &self,
        context: &mut Context<'_>,
        file: impl AsFd,
        offset: &mut u64,
        length: usize,
    ) -> Poll<io::Result<usize>> {
        match self {
            Transport::Plain(stream) => stream.poll_sendfile(context, file, offset, length),
            Transport::Tls(_) => Poll::Ready(Err(io::ErrorKind::Unsupported.into())),
        }
    }

    /// Ends sending; see [`Stream::shutdown_write`].
    pub fn shutdown_write(&self) -> io::Result<()> {
        match self {
            Transport::Plain(stream) => stream.shutdown_write(),
            Transport::Tls(stream) => stream.shutdown_write(),
        }
    }

    /// `true` if received data is unread; see [`Stream::has_unread`].
    pub fn has_unread(&self) -> bool {
        match self {
            Transport::Plain(stream) => stream.has_unread(),
            Transport::Tls(stream) => stream.has_unread(),
        }
    }

    /// `true` if nothing has been received; see [`Stream::is_idle`] and [`TlsStream::is_idle`].
    pub fn is_idle(&self) -> bool {
        match self {
            Transport::Plain(stream) => stream.is_idle(),
            Transport::Tls(stream) => stream.is_idle(),
        }
    }

    /// Splits an idle connection into socket and TLS session, for use by another thread. A connection that is not idle
    /// is closed, and the result is `None`.
    pub fn into_idle(self) -> Option<(Stream, Option<IdleTls>)> {
        match self {
            Transport::Plain(stream) => Some((stream, None)),
            Transport::Tls(stream) => {
                let (socket, session) = stream.into_idle()?;
                Some((socket, Some(session)))
            }
        }
    }

    /// Inverse of [`Transport::into_idle`].
    pub fn from_idle(socket: Stream, session: Option<IdleTls>) -> Transport {
        match session {
            None => Transport::Plain(socket),
            Some(session) => Transport::Tls(Box::new(TlsStream::from_idle(socket, session))),
        }
    }

    /// See [`Stream::poll_peer_closed`].
    pub fn poll_peer_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        self.socket().poll_peer_closed(context)
    }

    /// See [`Stream::is_broken`].
    pub fn is_broken(&self) -> bool {
        self.socket().is_broken()
    }

    /// See [`Stream::has_hung_up`]. Concerns the socket, regardless of unread data of the session.
    pub fn has_hung_up(&self) -> bool {
        self.socket().has_hung_up()
    }

    /// See [`Stream::set_nodelay`].
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.socket().set_nodelay(on)
    }

    /// See [`Stream::set_cork`].
    pub fn set_cork(&self, on: bool) -> io::Result<()> {
        self.socket().set_cork(on)
    }

    /// See [`Stream::set_linger_reset`].
    pub fn set_linger_reset(&self) -> io::Result<()> {
        match self {
            Transport::Plain(stream) => stream.set_linger_reset(),
            Transport::Tls(stream) => stream.set_linger_reset(),
        }
    }

    /// See [`Stream::local_address`].
    pub fn local_address(&self) -> io::Result<SocketAddress> {
        self.socket().local_address()
    }

    /// See [`Stream::tcp_info`].
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        self.socket().tcp_info()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_in_the_clear_pays_nothing_for_the_choice() {
        assert_eq!(size_of::<Transport>(), size_of::<Stream>());
    }
}
