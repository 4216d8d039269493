//! Stream: sessions over TCP and UDP, whatever is spoken in them. Nothing in here looks at what passes, except at a
//! client's first message of TLS if it is asked to.
//!
//! ```text
//! configuration  from the text of the stream block to what sessions use
//! connection     the sessions of an event loop: accepting them, their way through the phases
//! datagrams      sessions over UDP: whose datagram it is, and which loop's
//! upstream       passing sessions on to servers: choosing one, connecting, carrying bytes both ways
//! module         what a module is to stream: variables, handlers
//! session        a session, its phases, and the configuration as it sees it
//! ```
//!
//! A folder uses only those below it in this list; `connection` and `configuration` use nothing of each other.

pub mod configuration;
pub mod connection;
pub mod module;
pub mod session;
pub mod upstream;
