//! Sans-I/O codecs: bytes in, events and bytes out.
//!
//! No sockets, no clocks, no configuration. All results are offsets into the caller's buffer, so nothing is copied and
//! a buffer may move between two calls. Invariant: no input causes a panic, and every loop and list is bounded by the
//! caller's limits.

pub mod byte_ranges;
pub mod client_hello;
pub mod fastcgi;
pub mod gateway;
pub mod host;
pub mod http1;
pub mod http2;
mod known_field;
pub mod memcached;
mod offence;
pub mod proxy_protocol;
mod range;
pub mod request;
pub mod response;
pub mod scgi;
pub mod ssi;
mod upstream_fault;
pub mod uri;
pub mod uwsgi;

pub use offence::Offence;
pub use range::Range32;
pub use upstream_fault::{ReceivedLine, ResponseFault};
