//! Nested levels of settings: the tree that a block such as `http` builds while it is read.
//!
//! During the walk a scope only contains its own settings. After the whole text was read, each scope is completed from
//! its parent, so that a look-up needs only one scope.

use std::any::Any;
use std::sync::Arc;

use gale_config::{Contexts, Diagnostic};

use super::builder::Builder;
use super::module::{Conf, ConfType, Directive, Module, SharedConf};

/// Index of a scope in its block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ScopeId(pub u32);

/// Index of a `server { }` in its block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ServerId(pub u32);

/// Complete settings of all modules in one scope; `None` for modules of other protocols.
pub type Confs = Vec<Option<SharedConf>>;

/// Scopes of a block while it is read, parents before children.
#[derive(Default)]
pub struct ScopeTree(Vec<Node>);

struct Node {
    parent: Option<ScopeId>,
    /// Settings of the modules with directives in the scope.
    confs: Vec<Option<Conf>>,
}

impl ScopeTree {
    /// Adds the scope of the block itself, with settings of all modules.
    pub fn add_root(&mut self, builder: &Builder) -> ScopeId {
        self.push(None, builder.fresh_confs())
    }

    /// Adds a scope inside `parent`, with settings from [`Builder::no_confs`].
    pub fn add(&mut self, parent: ScopeId, confs: Vec<Option<Conf>>) -> ScopeId {
        self.push(Some(parent), confs)
    }

    fn push(&mut self, parent: Option<ScopeId>, confs: Vec<Option<Conf>>) -> ScopeId {
        let id = ScopeId(u32::try_from(self.0.len()).expect("fewer scopes than 2^32"));
        self.0.push(Node { parent, confs });
        id
    }

    /// The enclosing scope; `None` for that of the block.
    pub fn parent(&self, scope: ScopeId) -> Option<ScopeId> {
        self.0[scope.0 as usize].parent
    }

    /// Settings of a scope, by module.
    pub fn confs(&mut self, scope: ScopeId) -> &mut Vec<Option<Conf>> {
        &mut self.0[scope.0 as usize].confs
    }

    /// Completes all scopes, parents first: unset values come from the parent, and those of the block from the
    /// defaults. `places` are the contexts whose directives write to scopes; `has_part` returns `true` for a module
    /// that has settings without such directives.
    ///
    /// # Errors
    /// Faults that a module finds in the settings of a scope.
    pub fn complete(
        &mut self,
        builder: &mut Builder,
        places: Contexts,
        has_part: fn(&Module) -> bool,
    ) -> Result<Vec<Confs>, Diagnostic> {
        let mut rows: Vec<Vec<&'static Directive>> = vec![Vec::new(); builder.order.modules.len()];
        for row in builder.tables().iter() {
            if row.directive.contexts.overlaps(places) {
                rows[row.owner].push(row.directive);
            }
        }
        let count = self.0.len();
        let scopes = Vec::with_capacity(count);
        let mut completion = Completion { builder, rows, has_part, scopes, of_silent: vec![Confs::new(); count] };
        for node in &mut self.0 {
            completion.complete_scope(std::mem::take(&mut node.confs), node.parent)?;
        }
        Ok(completion.scopes)
    }
}

/// Completes scopes one by one.
struct Completion<'b> {
    builder: &'b mut Builder,
    /// Directives allowed in a scope, by module.
    rows: Vec<Vec<&'static Directive>>,
    /// `true` if a module belongs to the protocol.
    has_part: fn(&Module) -> bool,
    scopes: Vec<Confs>,
    /// Settings of modules without directives in a child, by parent. They depend on the parent only and are shared.
    of_silent: Vec<Confs>,
}

impl Completion<'_> {
    fn complete_scope(&mut self, own: Vec<Option<Conf>>, parent: Option<ScopeId>) -> Result<(), Diagnostic> {
        let modules = self.builder.order.modules;
        let mut confs = Confs::with_capacity(modules.len());
        for ((owner, own), module) in own.into_iter().enumerate().zip(modules) {
            let is_here = !self.rows[owner].is_empty() || (self.has_part)(module);
            let conf = module.conf.as_ref().filter(|_| is_here).map(|conf_type| match (own, parent) {
                (None, Some(parent)) => self.conf_of_silent(owner, conf_type, parent),
                (own, parent) => self.complete_conf(own.unwrap_or_else(conf_type.make), owner, conf_type, parent),
            });
            confs.push(conf.transpose()?);
        }
        self.scopes.push(confs);
        Ok(())
    }

    /// Settings of a module in a child of `parent` without directives of it.
    fn conf_of_silent(
        &mut self,
        owner: usize,
        conf_type: &ConfType,
        parent: ScopeId,
    ) -> Result<SharedConf, Diagnostic> {
        let place = parent.0 as usize;
        if let Some(Some(known)) = self.of_silent[place].get(owner) {
            return Ok(Arc::clone(known));
        }
        let conf = self.complete_conf((conf_type.make)(), owner, conf_type, Some(parent))?;
        self.of_silent[place].resize(self.rows.len(), None);
        self.of_silent[place][owner] = Some(Arc::clone(&conf));
        Ok(conf)
    }

    fn complete_conf(
        &mut self,
        mut conf: Conf,
        owner: usize,
        conf_type: &ConfType,
        parent: Option<ScopeId>,
    ) -> Result<SharedConf, Diagnostic> {
        let outer = parent.and_then(|parent| self.scopes[parent.0 as usize][owner].as_deref());
        let outer = outer.map(|conf| conf as &dyn Any);
        for row in &self.rows[owner] {
            if let Some(outer) = outer {
                row.store.inherit(conf.as_mut(), outer);
            }
            row.store.finish(conf.as_mut(), self.builder, row.name, row.default);
        }
        (conf_type.merge)(conf.as_mut(), outer, self.builder)?;
        Ok(conf.into())
    }
}
