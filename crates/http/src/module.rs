//! What a module is to http: its variables, what it does to requests and to responses; and the order among modules.

use std::any::Any;

use crate::request::configuration::Scope;
use crate::request::filters::Filter;
use crate::request::phases::{Handler, Phase};
use crate::variables::Variable;
use gale_engine::configuration::Reach;
use gale_engine::module::Module;

/// A module's part in http.
pub struct HttpPart {
    /// The variables that it defines.
    pub variables: &'static [Variable],
    /// What it does to a request, by phase. The order among modules stands in [`HttpOrder`], not here.
    pub handlers: &'static [(Phase, &'static dyn Handler)],
    /// What it does to a response. Same remark.
    pub filters: &'static [&'static dyn Filter],
    /// Notes what requests in a scope reach of the machine, with these settings of the module.
    pub reach: Option<NoteReach>,
}

/// See [`HttpPart::reach`].
pub type NoteReach = fn(&dyn Any, &Scope, &mut Reach);

impl HttpPart {
    /// A part that does nothing: the base for struct update syntax.
    pub const EMPTY: HttpPart = HttpPart { variables: &[], handlers: &[], filters: &[], reach: None };
}

/// The order in which modules act on requests and responses.
pub struct HttpOrder {
    /// Within each phase, the modules in the order in which they are asked.
    pub phases: &'static [(Phase, &'static [&'static Module])],
    /// The response filters, the first to act first.
    pub filters: &'static [&'static Module],
}
