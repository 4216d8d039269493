//! Interface of a module to the engine: its directives, the type of its settings, and its part of each protocol.
//!
//! The engine knows no module by name. A module keeps its state of a request in the request's notes, never in the
//! request itself. Its settings have a type of its own, with one value for each scope (http, server, location).

use std::any::Any;
use std::sync::Arc;

use gale_config::Diagnostic;

use super::Configuration;
use super::builder::Builder;

/// A row of a directive table for the engine's builder.
pub type Directive = gale_config::Directive<Builder>;

/// Settings of one module in one scope, as an opaque type.
pub type Conf = Box<dyn Any + Send + Sync>;

/// Complete settings, shared by scopes with equal ones.
pub type SharedConf = Arc<dyn Any + Send + Sync>;

/// A module. Its background work, such as a periodic task, is added to a configuration with [`Builder::add_service`].
pub struct Module {
    /// nginx's name of the module without `ngx_` and `_module`: `http_limit_req`.
    pub name: &'static str,
    /// Its directives.
    pub directives: &'static [Directive],
    /// Its type of settings; `None` for a module without settings.
    pub conf: Option<ConfType>,
    /// Its parts for protocols, each of the protocol's own type.
    pub parts: &'static [&'static (dyn Any + Send + Sync)],
}

impl Module {
    /// A module that does nothing, as a base for struct update syntax.
    pub const EMPTY: Module = Module { name: "", directives: &[], conf: None, parts: &[] };

    /// Its part for the protocol whose parts have this type.
    pub fn part<P: 'static>(&self) -> Option<&'static P> {
        self.parts.iter().find_map(|part| part.downcast_ref())
    }
}

/// Completes the settings of a scope from those of its parent, if it has one.
pub type Merge = fn(&mut dyn Any, Option<&dyn Any>, &mut Builder) -> Result<(), Diagnostic>;

/// Creation and inheritance of a module's settings, beyond the inheritance in the directive table.
#[derive(Clone, Copy)]
pub struct ConfType {
    /// Creates settings with nothing set.
    pub make: fn() -> Conf,
    /// Merge function, called for parents first, after the directive table's inheritance, for settings that no single
    /// row describes: once for each scope with directives of the module, and once for all others in the same parent,
    /// which share the result.
    pub merge: Merge,
    /// Called once for the settings of the main level, after all of it was read.
    pub complete_main: fn(&mut dyn Any, &mut Builder) -> Result<(), Diagnostic>,
}

impl ConfType {
    /// Settings of type `C` whose rows describe their inheritance completely.
    pub const fn of<C: Any + Default + Send + Sync>() -> ConfType {
        ConfType { make: || Box::new(C::default()), merge: |_, _, _| Ok(()), complete_main: |_, _| Ok(()) }
    }
}

/// Order in which modules act: one explicit list for each purpose (`gale-modules`' `order.rs`) instead of hidden
/// priorities.
pub struct Order {
    /// All modules; directives and variables are looked up in this order.
    pub modules: &'static [&'static Module],
    /// Further lists by protocol, each of the protocol's own type.
    pub protocols: &'static [&'static (dyn Any + Send + Sync)],
    /// Renders all metrics for the control socket, in a thread outside of the event loops.
    pub figures: Option<fn(&Arc<Configuration>) -> String>,
}

impl Order {
    /// The lists of this type.
    pub fn of<O: 'static>(&self) -> Option<&'static O> {
        self.protocols.iter().find_map(|order| order.downcast_ref())
    }
}
