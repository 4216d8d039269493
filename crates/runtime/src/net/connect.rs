//! Opening connections: from connect options to a stream.

use std::future::{Future, poll_fn};
use std::io;
use std::time::Duration;

use super::Stream;
use crate::environment::Environment;
use crate::socket::{ConnectError, ConnectOptions, ConnectStep, Fresh, SocketAddress};
use crate::time::timeout;

/// A connection attempt. Dropping it closes the socket.
pub struct Connecting {
    stream: Stream,
    is_made: bool,
    /// Time limit of the rest.
    limit: Option<Duration>,
}

impl ConnectOptions {
    /// Begins to connect to an Internet or Unix address. Panics outside of a loop.
    ///
    /// Errors: the step that failed, with the kernel's error; EAGAIN for a Unix socket whose queue is full.
    pub fn begin(&self, address: &SocketAddress) -> Result<Connecting, ConnectError> {
        let environment = Environment::current();
        let (socket, fresh) = environment.driver.connect(address, self)?;
        let stream = Stream::attach(environment, socket, fresh);
        Ok(Connecting { stream, is_made: fresh == Fresh::Connected, limit: self.timeout })
    }

    /// Connects to an Internet or Unix address: [`ConnectOptions::begin`], which happens at once, and then
    /// [`Connecting::finish`]. Dropping the future closes the socket.
    ///
    /// Errors: those of both.
    pub fn connect(&self, address: &SocketAddress) -> impl Future<Output = Result<Stream, ConnectError>> + use<> {
        let begun = self.begin(address);
        async move { begun?.finish().await }
    }
}

impl Connecting {
    /// The stream, if the connection was established at once, as to a Unix socket: then there is nothing to wait for,
    /// and no system call is needed.
    pub fn made(self) -> Result<Stream, Connecting> {
        if self.is_made { Ok(self.stream) } else { Err(self) }
    }

    /// Waits until the connection is established.
    ///
    /// Errors: the step that failed, with the kernel's error.
    pub async fn finish(self) -> Result<Stream, ConnectError> {
        let Connecting { stream, is_made, limit } = self;
        if is_made {
            return Ok(stream);
        }
        let connected = poll_fn(|cx| stream.poll_connected(cx));
        let connected = match limit {
            Some(limit) => timeout(limit, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
            None => connected.await,
        };
        connected.map_err(ConnectStep::Connect.failed())?;
        Ok(stream)
    }
}
