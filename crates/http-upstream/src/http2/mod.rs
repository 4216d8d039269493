//! Connections to servers over HTTP/2 (RFC 9113): concurrent requests share a connection.
//!
//! ```text
//!   attempt ─► connections   those of this worker: room for a stream, a connection being opened, a new one
//!                 │
//!   exchange ─► connection   its task: the socket, the codec, frames of all streams
//!      │          │
//!      └─► stream ┘          state shared by a request and the task: received data, and data to send
//! ```
//!
//! A connection belongs to one loop, and only its task uses the socket. Invariants: a request's body is taken from its
//! client only while little of it waits for the server's windows; a server may send on as a response's client takes
//! data; data that one stream holds never prevents another from receiving, since the connection's window has room for
//! all of them.

mod client;
mod connection;
mod connections;
mod exchange;
mod request;
mod stream;
mod windows;

pub use client::Http2Client;
pub(super) use connections::{Destination, Found, find};
pub(super) use exchange::Shared;
pub use request::Http2Request;
