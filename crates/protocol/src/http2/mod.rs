//! HTTP/2: RFC 9113, with HPACK (RFC 7541), extended CONNECT (RFC 8441) and priorities (RFC 9218).
//!
//! [`Connection`] is the whole state of one connection, for a server or a client. Bytes go in with
//! [`Connection::handle_input`], which returns one event at a time; what must be sent comes out into the caller's
//! buffers. Data are never copied: a piece that came is a range of the input, and of a piece to send only the frame's
//! header is written here.
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
