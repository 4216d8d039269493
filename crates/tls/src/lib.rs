//! TLS over the sockets of an event loop, for servers and clients: certificates, keys, tickets, verification, OCSP.
//!
//! Only this crate uses the TLS library (rustls); the rest of the program does not know it.
//!
//! ```text
//!   settings       `ssl_…` directives of a server
//!   server         certificates, keys and rules of a server, ready for handshakes
//!   load           certificates and keys from PEM
//!   encrypted_key  keys with a password
//!   named          certificates whose file names have variables
//!   managed        certificates that a service obtains and renews
//!   accepting      server side of a handshake, shared by all protocols
//!   challenges     answers to the challenges of certificate issuers
//!   keys           generated keys, CSRs and certificates
//!   compression    compressed certificates
//!   commands       OpenSSL commands (`ssl_conf_command`)
//!   suites         OpenSSL's names of cipher suites, groups and versions
//!   syslog_tls     syslog over TLS
//!   staple         certificates with stapled OCSP responses
//!   tickets        session resumption
//!   verify         verification of client certificates
//!   verify_server  verification of server certificates
//!   client         client side: settings for handshakes with servers
//!   blocking       the same for threads that may block
//!   library        the library's connection, of either side
//!   stream         a connection: records over a socket
//!   transport      a connection's socket, or TLS over one
//!   ocsp           OCSP: certificate status
//!   offered        the client's offer, as text
//!   random         random numbers, prefetched
//!   certificate    fields of a certificate
//!   failure        handshake failures, in OpenSSL's words
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
pub mod random;
mod server;
pub mod settings;
pub mod staple;
mod stream;
mod suites;
pub mod syslog_tls;
mod tickets;
mod transport;
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
pub use transport::Transport;
pub use verify::{Fault, Verdict};
