//! Passing sessions on to servers.
//!
//! ```text
//!  settings    what a server block says
//!  pass        a server of the group, a connection; or the next server
//!     │
//!     ▼
//!  relay       bytes both ways, each direction on its own, with its rate
//!  datagrams   or datagrams both ways
//!
//!  health      a question to a server, for active health checks
//! ```
//!
//! Groups of servers and the choice among them are the engine's (`gale_engine::upstream`).

mod datagrams;
pub mod health;
mod pass;
mod rate;
mod relay;
pub mod settings;

pub use pass::pass_on;
