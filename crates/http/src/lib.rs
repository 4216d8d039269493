//! HTTP above the codecs: the request, its way through the phases, and the
//! response. Nothing in here but `connection` knows how a version is spoken; which
//! one it is, a request says to whom it matters (`Request::version`).
//!
//! ```text
//! configuration  the http block: servers, locations, settings
//! module         what a module is to http: variables, handlers, filters
//! worker         http's part of an event loop
//! connection     the versions of HTTP, each the codec's way to a request and back
//! request        a request, its phases, and what is answered
//! upstream       passing requests on to other servers
//! variables      variables of requests
//! files          open files, and how they are sent
//! ```

pub mod configuration;
pub mod connection;
pub mod files;
pub mod module;
pub mod request;
#[cfg(test)]
#[path = "../../../tests/support/scratch.rs"]
mod scratch;
pub mod upstream;
pub mod variables;
pub mod worker;

/// What the `Server` field says with `server_tokens off`.
pub const SERVER: &[u8] = b"gale";

/// What the `Server` field says with `server_tokens on`.
pub const SERVER_WITH_VERSION: &[u8] = concat!("gale/", env!("CARGO_PKG_VERSION")).as_bytes();

/// The whole field with `server_tokens off`.
pub(crate) const SERVER_LINE: &[u8] = b"Server: gale\r\n";

/// The whole field with `server_tokens on`.
pub(crate) const SERVER_LINE_WITH_VERSION: &[u8] =
    concat!("Server: gale/", env!("CARGO_PKG_VERSION"), "\r\n").as_bytes();
