//! A protocol: what a block such as `http` was built to, and its part of every event loop.
//!
//! The engine listens and accepts; what is said on a connection is the protocol's alone.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use gale_process::{ListenAddress, ListenerHandle, Successor};
use gale_runtime::SocketAddress;

use super::Configuration;
use crate::transport::Transport;
use crate::worker::Worker;

/// A protocol's part of a configuration, complete and immutable.
pub trait Protocol: Any + Send + Sync {
    /// The name of its block. A worker goes on under a later configuration with the protocol of the same name.
    fn name(&self) -> &'static str;

    /// The listening sockets of its addresses; several addresses may have the same.
    fn listeners(&self) -> Vec<ListenerHandle>;

    /// Begins to serve on the calling loop. `configuration` is that of which this is a part.
    fn start(&self, worker: &Rc<Worker>, configuration: &Arc<Configuration>) -> Rc<dyn ProtocolWorker>;
}

impl dyn Protocol {
    /// The protocol as what it is.
    pub fn downcast<P: Protocol>(self: Arc<Self>) -> Option<Arc<P>> {
        let any: Arc<dyn Any + Send + Sync> = self;
        any.downcast().ok()
    }
}

/// Receives datagrams from one socket for a protocol, until it is dropped.
pub trait DatagramReceiver {
    /// What comes from now on begins nothing new; what has begun goes on. Others that hear the same socket may take
    /// over what comes.
    fn stop(&self, others_hear_it: bool);
}

/// A protocol's part of one event loop: its connections.
pub trait ProtocolWorker {
    /// From now on new exchanges use `configuration`, which has the same protocol.
    fn commit(&self, configuration: &Arc<Configuration>);

    /// Serves a connection that was accepted at `address`. `configuration` is that of its first exchange when it is not
    /// the current one.
    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        configuration: Option<&Arc<Configuration>>,
    );

    /// Takes the datagrams that come to `address` by this socket, which other loops may have, too.
    ///
    /// # Errors
    /// The socket cannot be received from; or the protocol has no datagrams.
    fn receive(self: Rc<Self>, socket: OwnedFd, address: &Rc<ListenAddress>) -> io::Result<Rc<dyn DatagramReceiver>> {
        let _ = (socket, address);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Passes idle connections on to `successor`, if there is one and that is possible, closes the others of them, and
    /// the rest when its current exchange is over.
    fn drain(self: Rc<Self>, successor: Option<&Successor>);

    /// Whether it can go on with a connection that another process has served.
    fn resumes(&self) -> bool {
        false
    }

    /// Ready when the last connection has ended, and what is done without one.
    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()>;

    /// Closes the connections whose exchange began with this configuration or an older one; without one, all of them.
    fn expire(&self, configuration: Option<&Configuration>);

    /// How many connections are open.
    fn connection_count(&self) -> usize;
}
