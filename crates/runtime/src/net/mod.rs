//! Sockets as tasks see them: streams, listeners and datagrams, all over the loop's driver.

mod accept_mutex;
mod address;
pub(crate) mod connect;
pub(crate) mod datagram;
mod idle_streams;
mod listener;
pub(crate) mod options;
pub(crate) mod splice;
mod stream;

pub use accept_mutex::AcceptMutex;
pub use address::SocketAddress;
pub use connect::{ConnectError, ConnectOptions, ConnectStep};
pub use datagram::{BATCH_MAX, Datagram, DatagramOptions, Ecn, ReceiveBatch, Received, Transmit};
pub use idle_streams::{IdleOptions, IdleStreams};
pub use listener::{AcceptOptions, Listener, MULTI_ACCEPT_BATCH, look_for_connections};
pub use options::TcpInfo;
pub use splice::Splice;
pub use stream::{Detached, Stream};

pub(crate) use listener::own_address;
