//! Levels of settings, one inside of another: the tree that a block such as `http` gathers while it is read.
//!
//! While the text is walked, a scope holds only what it says itself. When all of it is known, every scope is completed
//! from its parent, so that whoever looks at one finds everything in it.

use std::any::Any;
use std::sync::Arc;

use gale_config::{Contexts, Diagnostic};

use super::builder::Builder;
use super::module::{Conf, ConfType, Directive, Module, SharedConf};

/// A scope, as an index into the scopes of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScopeId(pub u32);

/// A `server { }`, as an index into the servers of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServerId(pub u32);

/// The settings of every module in one scope, complete; none for those of other protocols.
pub type Confs = Vec<Option<SharedConf>>;

/// The scopes of a block while it is read, parents before their children.
#[derive(Default)]
pub struct ScopeTree(Vec<Node>);

struct Node {
    parent: Option<ScopeId>,
    /// The settings of the modules that are mentioned.
    confs: Vec<Option<Conf>>,
}

impl ScopeTree {
    /// Adds the scope of the block itself, in which every module has settings.
    pub fn add_root(&mut self, builder: &Builder) -> ScopeId {
        self.push(None, builder.fresh_confs())
    }

    /// Adds a scope inside of `parent`, with [`Builder::no_confs`] for settings.
    pub fn add(&mut self, parent: ScopeId, confs: Vec<Option<Conf>>) -> ScopeId {
        self.push(Some(parent), confs)
    }

    fn push(&mut self, parent: Option<ScopeId>, confs: Vec<Option<Conf>>) -> ScopeId {
        let id = ScopeId(u32::try_from(self.0.len()).expect("fewer scopes than 2^32"));
        self.0.push(Node { parent, confs });
        id
    }

    /// The scope around this one; `None` for that of the block.
    pub fn parent(&self, scope: ScopeId) -> Option<ScopeId> {
        self.0[scope.0 as usize].parent
    }

    /// The settings of a scope, by module.
    pub fn confs(&mut self, scope: ScopeId) -> &mut Vec<Option<Conf>> {
        &mut self.0[scope.0 as usize].confs
    }

    /// Completes every scope, parents first: what it did not say it takes from its parent, and the block itself from
    /// the defaults. `places` are the contexts whose directives write into scopes; `has_part` says whether a module
    /// that has none of them has settings nevertheless.
    ///
    /// # Errors
    /// What a module finds wrong with the settings of a scope.
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

/// Completes scope after scope.
struct Completion<'b> {
    builder: &'b mut Builder,
    /// Of each module, the directives that a scope may say.
    rows: Vec<Vec<&'static Directive>>,
    /// Whether a module is one of the protocol's.
    has_part: fn(&Module) -> bool,
    /// The scopes that are complete.
    scopes: Vec<Confs>,
    /// By parent, what those of its children share that say nothing of a module: it follows from the parent alone.
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

    /// The settings of a module in a child of `parent` that says nothing of it.
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
