//! A module's part in http: variables, request handlers and response filters; and the order of modules.

use std::any::Any;

use crate::request::configuration::Scope;
use crate::request::filters::Filter;
use crate::request::phases::{Handler, Phase};
use crate::variables::Variable;
use gale_engine::configuration::Reach;
use gale_engine::module::Module;

/// A module's part in http.
pub struct HttpPart {
    /// Variables that the module defines.
    pub variables: &'static [Variable],
    /// Request handlers, by phase. [`HttpOrder`] defines the order of modules.
    pub handlers: &'static [(Phase, &'static dyn Handler)],
    /// Response filters. [`HttpOrder`] defines the order of modules.
    pub filters: &'static [&'static dyn Filter],
    /// Notes the parts of the machine that requests in a scope reach with these settings of the module.
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
    /// Within each phase, the modules in the order in which they run.
    pub phases: &'static [(Phase, &'static [&'static Module])],
    /// The modules with response filters, in the order in which the filters run.
    pub filters: &'static [&'static Module],
}
