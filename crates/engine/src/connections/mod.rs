//! Client connections of any protocol: accepting them, limiting their number, and closing idle ones.

mod acceptor;
mod arrivals;
mod background;
mod info;
mod passing;
mod reuse;
mod table;

pub use acceptor::{
    Acceptor, DrainingListener, QUEUED_WAIT_MAX, accept_late, accept_options, accept_queued, leave_accept_mutex,
};
pub(crate) use arrivals::serve_arrivals;
pub use background::BackgroundTasks;
pub use info::{ConnectionInfo, address_text};
pub(crate) use passing::set_receivers;
pub use passing::{Carried, pass_connection};
pub use table::{Connection, ConnectionTable};
