//! State of one event loop that all protocols share: limit on connections, counters, resolvers, services, and notes.
//!
//! ```text
//! state     a worker: all that belongs to one event loop
//! limit     `worker_connections`; connections that count for it, idle ones that can be closed
//! counters  accepted and handled connections, requests
//! traffic   counters of a place with metrics
//! service   background tasks, such as periodic ones
//! notes     modules' own state, by type
//! ```

mod counters;
mod limit;
pub mod notes;
pub mod service;
mod state;
pub mod traffic;

pub use counters::{
    OwnCounters, Totals, reset_connections, reset_requests, totals, totals_by_worker, totals_since_reset,
};
pub use limit::{CountedConnection, IdleConnections, ParkedConnection, Search, WorkerConnections};
pub use state::Worker;
