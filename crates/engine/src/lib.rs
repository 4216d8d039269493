//! Blocks and listeners: a configuration as objects, what it listens on, and the program that serves its protocols.
//!
//! ```text
//! serve           the program that the processes run
//! virtual_servers servers of a block: addresses and names
//! server_name     host names with wildcards
//! variables       variables, texts with variables, regular expressions
//! connections     accepting, the connections of a protocol
//! listen          `listen`: addresses and socket options
//! configuration   text -> settings, scopes, blocks; interfaces of modules and protocols
//! zone            named state shared by all workers
//! ```
//!
//! A folder only uses those below it in this list.

pub mod budget;
pub mod configuration;
pub mod connections;
pub mod listen;
pub mod nginx_names;
pub mod serve;
pub mod server_name;
pub mod variables;
pub mod virtual_servers;
pub mod zone;

pub use configuration::{module, protocol};
