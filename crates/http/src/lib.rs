//! HTTP above the codecs: configuration, connections, requests on their way through the phases, responses, files.
//!
//! Only `connection` knows the versions of HTTP; elsewhere `Request::version` names the version of a request.
//!
//! ```text
//! configuration  reads the http block into the form that requests use
//! connection     the versions of HTTP, each the codec's way to a request and back; http's part of an event loop
//! module         a module's part in http: variables, handlers, filters
//! request        a request, its phases, the response, and the configuration, variables and files as it sees them
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

/// Value of the `Server` field with `server_tokens off`.
pub const SERVER: &[u8] = b"gale";

/// Value of the `Server` field with `server_tokens on`.
pub const SERVER_WITH_VERSION: &[u8] = concat!("gale/", env!("CARGO_PKG_VERSION")).as_bytes();
