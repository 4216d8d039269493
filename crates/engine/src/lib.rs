//! What all of Gale's modules share: the building of the configuration, listening
//! and accepting, zones, name resolution, and the logs.
//!
//! ```text
//! configuration  text -> settings, scopes, blocks
//! module         what a module is; the modules themselves live in gale-modules
//! protocol       what a block such as `http` is to the engine
//! serve          the program that the processes run
//! worker         what the protocols of one event loop share
//! listen         `listen`: addresses and the options of their sockets
//! transport      what carries a connection: a socket, or TLS above one
//! connections    accepting, `worker_connections`, idle connections, counters
//! log            error and access logs
//! variables      variables, texts that have some, regular expressions
//! server_name    names of hosts with wildcards
//! resolver       names to addresses, while requests run
//! spool          bytes that are written and read at once, in memory and in a file
//! service        what runs beside requests: something every ten seconds
//! zone           state that all workers share under a name
//! ```

pub mod budget;
pub mod configuration;
pub mod connections;
pub mod hostname;
pub mod listen;
pub mod log;
pub mod nginx_names;
pub mod notes;
pub mod resolver;
#[cfg(test)]
#[path = "../../../tests/support/scratch.rs"]
mod scratch;
pub mod serve;
pub mod server_address;
pub mod server_name;
pub mod service;
pub mod spool;
pub mod transport;
pub mod variables;
pub mod worker;
pub mod zone;

pub use configuration::{module, protocol};
