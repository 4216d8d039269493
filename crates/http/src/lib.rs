//! HTTP above the codecs: configuration, connections, requests on their way through the phases, responses, files.
//!
//! Nothing in here but `connection` knows how a version is spoken; which one it is, a request says to whom it matters
//! (`Request::version`).
//!
//! ```text
//! configuration  from the text of the http block to what requests use
//! connection     the versions of HTTP, each the codec's way to a request and back; http's part of an event loop
//! module         what a module is to http: variables, handlers, filters
//! request        a request, its phases, what is answered, and the configuration, variables and files as it sees them
//! files          open files, and how they are sent
//! ```
//!
//! A folder uses only those below it in this list; `connection` and `configuration` use nothing of each other. Crates
//! above this one cache responses (`http-cache`) and pass requests on to other servers (`http-upstream`).

pub mod configuration;
pub mod connection;
pub mod files;
pub mod module;
pub mod request;
#[cfg(test)]
#[path = "../../../tests/shared/scratch.rs"]
mod scratch;
#[cfg(test)]
#[path = "../../../tests/shared/skips.rs"]
mod skips;

pub use request::variables;

/// What the `Server` field says with `server_tokens off`.
pub const SERVER: &[u8] = b"gale";

/// What the `Server` field says with `server_tokens on`.
pub const SERVER_WITH_VERSION: &[u8] = concat!("gale/", env!("CARGO_PKG_VERSION")).as_bytes();
