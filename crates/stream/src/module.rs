//! What a module is to stream: its variables and what it does to sessions; and the order among modules.

use crate::session::Session;
use crate::session::phases::{Content, Handler, Phase};
use gale_engine::module::Module;
use gale_engine::variables::Variable;

/// A module's part in stream.
pub struct StreamPart {
    /// The variables that it defines.
    pub variables: &'static [Variable<Session>],
    /// What it does to a session, by phase. The order among modules stands in [`StreamOrder`], not here.
    pub handlers: &'static [(Phase, &'static dyn Handler)],
    /// How it serves a session, if it does.
    pub content: Option<&'static dyn Content>,
}

impl StreamPart {
    /// A part that does nothing: the base for struct update syntax.
    pub const EMPTY: StreamPart = StreamPart { variables: &[], handlers: &[], content: None };
}

/// The order in which modules act on sessions.
pub struct StreamOrder {
    /// Within each phase, the modules in the order in which they are asked.
    pub phases: &'static [(Phase, &'static [&'static Module])],
    /// The modules that serve sessions; of those that a server has, the first one does.
    pub content: &'static [&'static Module],
}
