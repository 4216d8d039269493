//! What all of Gale's modules share: the building of the configuration, listening
//! and accepting, HTTP, and the logs.
//!
//! ```text
//! configuration  text -> settings, scopes, blocks
//! module         what a module is; the modules themselves live in gale-modules
//! protocol       what a block such as `http` is to the engine
//! serve          the program that the processes run
//! worker         what the protocols of one event loop share
//! listen         `listen`: addresses and the options of their sockets
//! connections    accepting, `worker_connections`, idle connections, counters
//! log            error and access logs
//! resolver       names to addresses, while requests run
//! zone           state that all workers share under a name
//! http           request, phases, location, variables, response
//! ```

pub mod configuration;
pub mod connections;
pub mod hostname;
pub mod http;
pub mod listen;
pub mod log;
pub mod module;
pub mod nginx_names;
pub mod notes;
pub mod protocol;
pub mod resolver;
#[cfg(test)]
#[path = "../../../tests/support/scratch.rs"]
mod scratch;
pub mod serve;
pub mod server_address;
pub mod worker;
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
