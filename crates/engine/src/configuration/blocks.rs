//! Blocks of the main level that are a protocol's: `http`. The engine keeps what they gather by its type and knows none
//! of them; the module that opens a block brings its builder.

use std::any::Any;
use std::sync::Arc;

use gale_config::Diagnostic;
use gale_process::{Account, ListenSpec, ListenerHandle, Resources};

use super::builder::Builder;
use super::protocol::Protocol;
use super::scopes::ScopeTree;

/// A block while it is read: it gathers its directives.
pub trait BlockBuilder: Any {
    /// Its levels of settings.
    fn scopes(&mut self) -> &mut ScopeTree;
}

/// A block that was understood and is complete but for what has to be opened.
pub trait BlockDraft {
    /// The sockets that it needs.
    fn listens(&self) -> Vec<ListenSpec>;

    /// Makes sure of directories. `owner` is the user that the worker process runs as.
    ///
    /// # Errors
    /// One cannot be had.
    fn prepare(&self, resources: &mut dyn Resources, owner: Option<&Account>) -> Result<(), Diagnostic>;

    /// What is served, with the sockets that were asked for, in their order.
    fn finish(self: Box<Self>, listeners: Vec<ListenerHandle>) -> Arc<dyn Protocol>;
}

/// Completes a block when all of the text was read. The block is still the builder's: defaults may add to it.
pub type Complete = fn(&mut Builder, &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic>;

/// A block that the text has.
pub(super) struct OpenBlock {
    pub builder: Box<dyn BlockBuilder>,
    pub complete: Complete,
}
