//! Sockets as tasks see them: streams, listeners and datagrams, all over the loop's driver.

mod accept_mutex;
mod address;
mod datagram;
mod listener;
pub(crate) mod options;
mod stream;

pub use accept_mutex::AcceptMutex;
pub use address::SocketAddress;
pub use datagram::Datagram;
pub use listener::{AcceptOptions, Listener, MULTI_ACCEPT_BATCH, look_for_connections};
pub use options::TcpInfo;
pub use stream::{Detached, Stream};

pub(crate) use listener::own_address;
