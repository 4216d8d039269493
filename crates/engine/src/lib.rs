//! What all of Gale's modules share: the processes, the building of the
//! configuration, HTTP, and the logs.
//!
//! ```text
//! configuration  text -> settings, scopes, addresses
//! process        master, worker process, bundle, reload
//! http           request, phases, location, variables, response
//! log            error and access logs
//! resolver       names to addresses, while requests run
//! spool          bytes that are written and read at once, in memory and in a file
//! zone           state that all workers share under a name
//! module         what a module is; the modules themselves live in gale-modules
//! ```

pub mod configuration;
pub mod http;
pub mod log;
pub mod module;
pub mod nginx_names;
pub mod process;
pub mod resolver;
#[cfg(test)]
#[path = "../../../tests/support/scratch.rs"]
mod scratch;
pub mod serve;
pub mod server_address;
pub mod spool;
pub mod zone;

/// What the `Server` field says with `server_tokens off`.
pub const SERVER: &[u8] = b"gale";

/// What the `Server` field says with `server_tokens on`.
pub const SERVER_WITH_VERSION: &[u8] = concat!("gale/", env!("CARGO_PKG_VERSION")).as_bytes();

/// The whole field with `server_tokens off`.
pub(crate) const SERVER_LINE: &[u8] = b"Server: gale\r\n";

/// The whole field with `server_tokens on`.
pub(crate) const SERVER_LINE_WITH_VERSION: &[u8] =
    concat!("Server: gale/", env!("CARGO_PKG_VERSION"), "\r\n").as_bytes();
