//! HTTP/1.x messages: request heads, body framing, the chunked coding and the lines of a response.
//!
//! Strict about everything that decides where a message ends (RFC 9112 §6 and §11.2), as lenient as
//! nginx elsewhere.

mod chunked;
mod connection;
mod framing;
mod head;
mod header;
mod method;
pub mod response;
mod scan;

pub use crate::offence::{Description, Offence};
pub use chunked::{ChunkLimits, ChunkedDecoder, Decoded};
pub use connection::{ConnectionOptions, names_option};
pub use framing::Framing;
pub use head::{HeadParser, HeaderField, Limits, RequestHead, Status, Version};
pub use header::{KnownHeader, KnownHeaders};
pub use method::Method;
