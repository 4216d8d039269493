//! Connecting: from the options of a socket to a stream.

use std::future::{Future, poll_fn};
use std::io;

use super::Stream;
use crate::environment::Environment;
use crate::socket::{ConnectError, ConnectOptions, ConnectStep, SocketAddress};
use crate::time::timeout;

impl ConnectOptions {
    /// Connects to an Internet or Unix address. Dropping the future closes the socket. Panics outside of a loop.
    ///
    /// Errors: what failed, and the kernel's reason; EAGAIN for a Unix socket whose queue is full.
    pub fn connect(&self, address: &SocketAddress) -> impl Future<Output = Result<Stream, ConnectError>> + use<> {
        let environment = Environment::current();
        let begun = environment.driver.connect(address, self);
        let limit = self.timeout;
        async move {
            let (socket, fresh) = begun?;
            let stream = Stream::attach(environment, socket, fresh);
            let connected = poll_fn(|cx| stream.poll_connected(cx));
            let connected = match limit {
                Some(limit) => timeout(limit, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())),
                None => connected.await,
            };
            connected.map_err(ConnectStep::Connect.failed())?;
            Ok(stream)
        }
    }
}
