//! A module's part in stream, and the order among modules.

use crate::session::Session;
use crate::session::phases::{Content, Handler, Phase};
use gale_engine::module::Module;
use gale_engine::variables::Variable;

/// Variables and handlers that a module adds to stream.
pub struct StreamPart {
    /// Variables that it defines.
    pub variables: &'static [Variable<Session>],
    /// Handlers by phase. Their order among modules is in [`StreamOrder`].
    pub handlers: &'static [(Phase, &'static dyn Handler)],
    /// Content handler, if it has one.
    pub content: Option<&'static dyn Content>,
}

impl StreamPart {
    /// A part without effect, as the base for struct update syntax.
    pub const EMPTY: StreamPart = StreamPart { variables: &[], handlers: &[], content: None };
}

/// Order in which modules handle sessions.
pub struct StreamOrder {
    /// Modules of each phase, in order.
    pub phases: &'static [(Phase, &'static [&'static Module])],
    /// Modules with a content handler. The first that applies to a server serves its sessions.
    pub content: &'static [&'static Module],
}
