//! What all of Gale's modules share: the building of the configuration, listening
//! and accepting, zones, name resolution, and the logs.
//!
//! ```text
//! serve          the program that the processes run
//! virtual_servers the servers of a block, where they listen, which names they have
//! server_name    names of hosts with wildcards
//! upstream       groups of servers, which of them a request goes to, idle connections
//! variables      variables, texts that have some, regular expressions
//! connections    accepting, the connections of a protocol, idle ones
//! listen         `listen`: addresses and the options of their sockets
//! configuration  text -> settings, scopes, blocks; what a module and a protocol are
//! service        what runs beside requests: something every ten seconds
//! worker         what the protocols of one event loop share; `worker_connections`, counters
//! resolver       names to addresses, while requests run
//! log            error and access logs
//! tls            TLS above a socket, and what servers need for it
//! transport      what carries a connection: a socket, or TLS above one
//! spool          bytes that are written and read at once, in memory and in a file
//! zone           state that all workers share under a name
//! ```
//!
//! A folder uses only those below it in this list.

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
#[path = "../../../tests/shared/scratch.rs"]
mod scratch;
pub mod serve;
pub mod server_address;
pub mod server_name;
pub mod service;
pub mod spool;
pub mod tls;
pub mod traffic;
pub mod transport;
pub mod upstream;
pub mod variables;
pub mod virtual_servers;
pub mod worker;
pub mod zone;

pub use configuration::{module, protocol};
