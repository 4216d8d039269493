//! Sockets for tasks: streams, listeners and datagrams, all over the loop's driver.

mod accept_mutex;
mod connect;
mod datagram;
mod idle_streams;
mod listener;
mod splice;
mod stream;

pub use accept_mutex::AcceptMutex;
pub use connect::Connecting;
pub use datagram::Datagram;
pub use idle_streams::{IdleOptions, IdleStreams, WeakIdleStreams};
pub use listener::Listener;
pub use splice::Splice;
pub use stream::{Detached, Stream};
