//! What a module is to the engine: a table of directives, the type of
//! its settings, and what it is to each protocol.
//!
//! The engine knows no module by name. A module keeps its state for one request
//! in that request's notes, never in the request itself, and its settings in a
//! type of its own of which every scope (http, server, location) has one value.

use std::any::Any;
use std::sync::Arc;

use gale_config::Diagnostic;

use super::Configuration;
use super::builder::Builder;

/// A row of a directive table, as the engine's builder understands it.
pub type Directive = gale_config::Directive<Builder>;

/// The settings of one module in one scope, behind a type that the engine does
/// not know.
pub type Conf = Box<dyn Any + Send + Sync>;

/// Settings that are complete. Scopes that would have the same ones share them.
pub type SharedConf = Arc<dyn Any + Send + Sync>;

/// A module: everything that the engine needs to know of it. What it runs beside requests, every ten seconds for
/// example, it adds to a configuration by [`Builder::add_service`].
pub struct Module {
    /// nginx's name of the module without `ngx_` and `_module`: `http_limit_req`.
    pub name: &'static str,
    /// The directives that it understands.
    pub directives: &'static [Directive],
    /// How its settings come to be; `None` for a module without any.
    pub conf: Option<ConfType>,
    /// What it is to protocols: of each, a part of the protocol's own type.
    pub parts: &'static [&'static (dyn Any + Send + Sync)],
}

impl Module {
    /// A module that does nothing: the base for struct update syntax.
    pub const EMPTY: Module = Module { name: "", directives: &[], conf: None, parts: &[] };

    /// What the module is to the protocol whose parts have this type.
    pub fn part<P: 'static>(&self) -> Option<&'static P> {
        self.parts.iter().find_map(|part| part.downcast_ref())
    }
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
    /// What else has an order, by protocol: of each, a list of the protocol's own type.
    pub protocols: &'static [&'static (dyn Any + Send + Sync)],
    /// Tells all that was counted, for the control socket, in a thread that belongs to no loop.
    pub figures: Option<fn(&Arc<Configuration>) -> String>,
}

impl Order {
    /// The lists of the protocol whose lists have this type.
    pub fn of<O: 'static>(&self) -> Option<&'static O> {
        self.protocols.iter().find_map(|order| order.downcast_ref())
    }
}
