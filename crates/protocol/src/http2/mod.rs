//! HTTP/2: RFC 9113, with HPACK (RFC 7541), extended CONNECT (RFC 8441) and priorities (RFC 9218).
//!
//! [`Connection`] is the complete state of a connection, for server or client. [`Connection::handle_input`] takes bytes
//! and returns one event at a time; output is appended to the caller's buffers. Data are never copied: a received piece
//! is a range of the input, and for a piece to be sent only the frame header is written.
//!
//! ```text
//! input --> FrameReader --> Connection --> Event, Fields (head, trailers)
//!                            |   ^
//!           hpack::Decoder --+   +-- write_response, write_data, write_trailers, reset, release --> out
//! ```

mod connection;
pub mod error;
mod fields;
pub mod frame;
mod growth;
pub mod hpack;
mod limits;
pub mod priority;
mod round_trip;
pub mod scheduler;
pub mod settings;
mod stream;
mod window;
mod write;

pub use connection::{Connection, Event, Handled, Side};
pub use error::{ConnectionFault, ErrorCode, Flood, StreamFault};
pub use fields::{Fields, Refusal};
pub use frame::StreamId;
pub use growth::WindowGrowth;
pub use limits::{FloodLimits, Limits};
pub use priority::Priority;
pub use round_trip::RoundTrip;
pub use scheduler::Scheduler;
pub use settings::PeerSettings;
pub use write::{CannotOpen, FieldsWriter, RequestLine, SendFault, SentData, check_field};
