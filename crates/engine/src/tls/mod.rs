//! TLS. Nothing outside of this folder knows the library that speaks it (rustls).
//!
//! ```text
//! settings   what `ssl_…` directives say of a server
//! server     a server's certificates, keys and rules, ready for handshakes
//! load       certificates and keys out of PEM
//! encrypted_key  keys with a password
//! named      certificates whose names have variables
//! managed    certificates that a service obtains and renews
//! accepting  a client's handshake, as every protocol has it
//! challenges  what issuers of certificates are told when they ask who is there
//! keys       keys that Gale makes, and what is written with them
//! compression  compressed certificates
//! commands   what commands for OpenSSL mean here
//! suites     OpenSSL's names of cipher suites, groups and versions
//! syslog_tls  logs that go to a syslog server over TLS
//! staple     certificates with what responders say of them
//! tickets    sessions that clients come back with
//! verify     certificates of clients
//! verify_server  certificates of servers
//! client     what is asked of servers, and how
//! blocking   the same for threads that may wait
//! library    the library's connection, of either side
//! stream     a connection: records over a socket
//! ocsp       what responders say of certificates
//! offered    what clients offer, as text
//! random     random numbers, ready in time
//! certificate  what a certificate says of its owner
//! failure    why a handshake failed, in OpenSSL's words
//! ```

pub mod accepting;
pub mod blocking;
mod certificate;
pub mod challenges;
mod client;
pub mod commands;
mod compression;
mod encrypted_key;
mod failure;
pub mod keys;
mod library;
mod load;
pub mod managed;
mod named;
pub mod ocsp;
pub mod offered;
pub(crate) mod random;
mod server;
pub mod settings;
pub mod staple;
mod stream;
mod suites;
pub mod syslog_tls;
mod tickets;
mod verify;
mod verify_server;

pub use certificate::{Certificate, base64, base64_url, from_base64_url};
pub use client::{TlsClient, TlsClientLoader};
pub use failure::TlsFailure;
pub use named::{CertificateCache, NamedFailure};
pub use server::{TlsLoader, TlsServer};
pub use staple::responder_of;
pub use stream::{IdleTls, TlsDetails, TlsStream};
pub use tickets::use_ticket_keys;
pub use verify::{Fault, Verdict};
