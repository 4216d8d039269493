//! Connections of clients, whatever they speak: how they are accepted, how many there may be, which idle ones end
//! first.

mod acceptor;
mod counters;
mod info;
mod limit;
mod reuse;
mod table;

pub use acceptor::{
    Acceptor, DrainingListener, QUEUED_WAIT_MAX, accept_late, accept_options, accept_queued, leave_accept_mutex,
};
pub use counters::{OwnCounters, Totals, totals};
pub use info::{ConnectionInfo, address_text};
pub use limit::{CountedConnection, IdleConnections, WorkerConnections};
pub use reuse::Search;
pub use table::{Connection, ConnectionTable};
