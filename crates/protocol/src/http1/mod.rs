//! HTTP/1.x messages, parsing and writing: heads of requests and responses, body framing, the chunked coding.
//!
//! Strict in everything that determines the end of a message (RFC 9112 §6 and §11.2), otherwise as lenient as nginx.

mod block;
mod chunked;
mod connection;
mod field_line;
mod framing;
mod head;
pub mod request_writer;
pub mod response;
mod response_head;
mod scan;

pub use crate::offence::{Description, Offence};
pub use chunked::{ChunkLimits, ChunkedDecoder, Decoded, Trailers};
pub use connection::{ConnectionOptions, connection_options, lists_token, wants_keep_alive};
pub use field_line::is_token_byte;
pub(crate) use field_line::pretends_framing;
pub(crate) use framing::parse_length;
pub(crate) use head::{HEADERS_MAX, note_known};
pub use head::{HeadParser, Limits, Status};
pub(crate) use response_head::add_received;
pub use response_head::{IgnoredLine, KeepAlive, ReceivedField, ResponseFraming, ResponseHeadParser, ResponseParts};
pub(crate) use scan::skip_text;
