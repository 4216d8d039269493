//! A protocol: the result of a block such as `http`, and its part of each event loop.
//!
//! The engine listens and accepts; only the protocol knows what connections carry.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_process::{ListenAddress, ListenerHandle, Successor};
use gale_runtime::SocketAddress;
use gale_tls::Transport;
use gale_worker::Worker;

use super::Configuration;

/// A protocol's part of a configuration, complete and immutable.
pub trait Protocol: Any + Send + Sync {
    /// Name of its block. After a reload, a worker continues with the protocol of the same name.
    fn name(&self) -> &'static str;

    /// Listening sockets of its addresses; several addresses may share one.
    fn listeners(&self) -> Vec<ListenerHandle>;

    /// Starts serving on the calling loop. `configuration` contains this protocol.
    fn start(&self, worker: &Rc<Worker>, configuration: &Arc<Configuration>) -> Rc<dyn ProtocolWorker>;
}

impl dyn Protocol {
    /// Casts to the concrete type.
    pub fn downcast<P: Protocol>(self: Arc<Self>) -> Option<Arc<P>> {
        let any: Arc<dyn Any + Send + Sync> = self;
        any.downcast().ok()
    }
}

/// Receives datagrams from one socket for a protocol, until it is dropped.
pub trait DatagramReceiver {
    /// Stops starting sessions for new datagrams; existing sessions continue. With `others_hear_it`, other receivers of
    /// the same socket can take over new datagrams.
    fn stop(&self, others_hear_it: bool);
}

/// A protocol's connections on one event loop.
pub trait ProtocolWorker {
    /// Uses `configuration`, which has the same protocol, for new exchanges.
    fn commit(&self, configuration: &Arc<Configuration>);

    /// Serves a connection that was accepted at `address`. `configuration` is that of its first exchange if it is not
    /// the current one.
    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        configuration: Option<&Arc<Configuration>>,
    );

    /// Receives datagrams for `address` from this socket, which other loops may use as well.
    ///
    /// # Errors
    /// The socket cannot be used; or the protocol has no datagrams.
    fn receive(self: Rc<Self>, socket: OwnedFd, address: &Rc<ListenAddress>) -> io::Result<Rc<dyn DatagramReceiver>> {
        let _ = (socket, address);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Passes idle connections to `successor` if possible, closes other idle ones, and closes the rest after their
    /// current exchange.
    fn drain(self: Rc<Self>, successor: Option<&Successor>);

    /// `true` if it can resume a connection that another process has served.
    fn resumes(&self) -> bool {
        false
    }

    /// Ready when the last connection and all background tasks have ended.
    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()>;

    /// Closes the connections whose exchange began with this configuration or an older one; with `None`, all of them.
    fn expire(&self, configuration: Option<&Configuration>);

    /// Number of open connections.
    fn connection_count(&self) -> usize;
}
