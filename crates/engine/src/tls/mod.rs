//! TLS. Nothing outside of this folder knows the library that speaks it (rustls).
//!
//! ```text
//! settings   what `ssl_…` directives say of a server
//! server     a server's certificates, keys and rules, ready for handshakes
//! load       certificates and keys out of PEM
//! suites     OpenSSL's names of cipher suites, groups and versions
//! tickets    sessions that clients come back with
//! verify     certificates of clients
//! stream     a connection: records over a socket
//! certificate  what a certificate says of its owner
//! failure    why a handshake failed, in OpenSSL's words
//! ```

mod certificate;
mod failure;
mod load;
mod server;
pub mod settings;
mod stream;
mod suites;
mod tickets;
mod verify;

pub use certificate::Certificate;
pub use failure::TlsFailure;
pub use server::{TlsLoader, TlsServer};
pub use stream::{TlsDetails, TlsStream};
pub use verify::{Fault, Verdict};
