//! What a module is to the engine: tables of directives, variables, phase
//! handlers and filters, with the type of its settings.
//!
//! The engine knows no module by name. A module keeps its state for one request
//! in the request's notes, never in the request itself, and its settings in a
//! type of its own of which every scope (http, server, location) has one value.

use std::any::Any;
use std::sync::Arc;

use gale_config::Diagnostic;

use crate::configuration::Builder;
use crate::http::filters::Filter;
use crate::http::phases::{Handler, Phase};
use crate::http::variables::Variable;

/// A row of a directive table, as the engine's builder understands it.
pub type Directive = gale_config::Directive<Builder>;

/// The settings of one module in one scope, behind a type that the engine does
/// not know.
pub type Conf = Box<dyn Any + Send + Sync>;

/// Settings that are complete. Scopes that would have the same ones share them.
pub type SharedConf = Arc<dyn Any + Send + Sync>;

/// A module: everything that the engine needs to know of it.
pub struct Module {
    /// nginx's name of the module without `ngx_` and `_module`: `http_limit_req`.
    pub name: &'static str,
    /// The directives that it understands.
    pub directives: &'static [Directive],
    /// How its settings come to be; `None` for a module without any.
    pub conf: Option<ConfType>,
    /// The variables that it defines.
    pub variables: &'static [Variable],
    /// What it does to a request, by phase. The order among modules stands in
    /// [`Order`], not here.
    pub handlers: &'static [(Phase, &'static dyn Handler)],
    /// What it does to a response. Same remark.
    pub filters: &'static [&'static dyn Filter],
}

impl Module {
    /// A module that does nothing: the base for struct update syntax.
    pub const EMPTY: Module =
        Module { name: "", directives: &[], conf: None, variables: &[], handlers: &[], filters: &[] };
}

/// Completes the settings of a scope from those of its parent, if it has one.
pub type Merge = fn(&mut dyn Any, Option<&dyn Any>, &mut Builder) -> Result<(), Diagnostic>;

/// How the settings of a module come to be and how a scope takes over what its
/// parent says, beyond what the directive table already does.
#[derive(Clone, Copy)]
pub struct ConfType {
    /// Makes settings in which nothing is set.
    pub make: fn() -> Conf,
    /// Called parents first, after the directive table's own inheritance, for settings
    /// that no single row describes: once per scope that says something, and once for
    /// all others in the same scope, which share the result.
    pub merge: Merge,
    /// Called once for the settings of the main level, when all of it was read.
    pub complete_main: fn(&mut dyn Any, &mut Builder) -> Result<(), Diagnostic>,
}

impl ConfType {
    /// Settings of type `C` whose rows say everything about inheritance.
    pub const fn of<C: Any + Default + Send + Sync>() -> ConfType {
        ConfType { make: || Box::new(C::default()), merge: |_, _, _| Ok(()), complete_main: |_, _| Ok(()) }
    }
}

/// The order in which modules act. One list per question, in the open
/// (`gale-modules`' `order.rs`), instead of priorities that nobody can see.
pub struct Order {
    /// Every module; directives and variables are looked up in this order.
    pub modules: &'static [&'static Module],
    /// Within each phase, the modules in the order in which they are asked.
    pub phases: &'static [(Phase, &'static [&'static Module])],
    /// The response filters, the first to act first.
    pub filters: &'static [&'static Module],
}
