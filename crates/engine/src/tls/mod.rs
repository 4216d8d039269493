//! TLS. Nothing outside of this folder knows the library that speaks it (rustls).
//!
//! ```text
//! settings   what `ssl_…` directives say of a server
//! server     a server's certificates, keys and rules, ready for handshakes
//! load       certificates and keys out of PEM
//! suites     OpenSSL's names of cipher suites, groups and versions
//! tickets    sessions that clients come back with
//! verify     certificates of clients
//! verify_server  certificates of servers
//! client     what is asked of servers, and how
//! library    the library's connection, of either side
//! stream     a connection: records over a socket
//! certificate  what a certificate says of its owner
//! failure    why a handshake failed, in OpenSSL's words
//! ```

mod certificate;
mod client;
mod failure;
mod library;
mod load;
mod server;
pub mod settings;
mod stream;
mod suites;
mod tickets;
mod verify;
mod verify_server;

pub use certificate::Certificate;
pub use client::{TlsClient, TlsClientLoader};
pub use failure::TlsFailure;
pub use server::{TlsLoader, TlsServer};
pub use stream::{IdleTls, TlsDetails, TlsStream};
pub use verify::{Fault, Verdict};
