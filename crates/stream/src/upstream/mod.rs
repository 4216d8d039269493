//! Passing sessions to servers.
//!
//! ```text
//!  settings    settings of a server block
//!  pass        selects a server of the group and connects, or tries the next one
//!     │
//!     ▼
//!  relay       copies bytes both ways, each direction with its own rate
//!  datagrams   copies datagrams both ways
//!
//!  health      active health checks
//! ```
//!
//! Groups of servers and the selection among them are in `gale_upstream`.

mod datagrams;
pub mod health;
mod pass;
mod rate;
mod relay;
pub mod settings;

pub use pass::pass_on;
