//! Stream: sessions over TCP and UDP, for any protocol. Nothing here reads the bytes that pass, except for a client's
//! first TLS message if a directive asks for it.
//!
//! ```text
//! configuration  builds the stream block
//! connection     sessions of an event loop: accepting them, running their phases
//! upstream       passing sessions to servers: selecting one, connecting, copying bytes both ways
//! module         a module's part in stream: variables, handlers
//! session        a session, its phases, and the configuration that it uses
//! ```
//!
//! A folder uses only those below it in this list; `connection` and `configuration` use nothing of each other.

pub mod configuration;
pub mod connection;
pub mod module;
pub mod session;
pub mod upstream;
