//! Servers that speak HTTP/2 (RFC 9113): many requests at once on a connection that they share.
//!
//! ```text
//!   attempt ─► connections   those of this worker: room for a stream, a connection that is being opened, a new one
//!                 │
//!   exchange ─► connection   its task: the socket, the codec, frames of all streams
//!      │          │
//!      └─► stream ┘          what one request and the task have in common: what came, and what waits to be sent
//! ```
//!
//! A connection belongs to one loop, and only its task touches the socket. Invariants: a request's body is taken from
//! its client only while little of it waits for the server's windows; a server may send on as a response's client
//! takes it; what one stream holds never keeps another one from receiving, since the connection's window has room for
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
