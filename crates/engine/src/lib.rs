//! Base of all modules and protocols: building the configuration, listening and accepting, zones, name resolution, and
//! logs.
//!
//! ```text
//! serve           the program that the processes run
//! virtual_servers servers of a block: addresses and names
//! server_name     host names with wildcards
//! upstream        groups of servers: balancing, idle connections
//! variables       variables, texts with variables, regular expressions
//! connections     accepting, the connections of a protocol, idle ones
//! listen          `listen`: addresses and socket options
//! configuration   text -> settings, scopes, blocks; interfaces of modules and protocols
//! service         background tasks, such as periodic ones
//! worker          state of one event loop; `worker_connections`, counters
//! resolver        name resolution at run time
//! log             error and access logs
//! tls             TLS over a socket, and its settings
//! transport       a connection's socket, or TLS over one
//! spool           bodies written and read at once, in memory and in a file
//! zone            named state shared by all workers
//! ```
//!
//! A folder only uses those below it in this list.

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
