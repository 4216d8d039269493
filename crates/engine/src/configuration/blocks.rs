//! Blocks of the main level that belong to a protocol, such as `http`. The engine stores their builders by type and
//! knows none of them; the module that opens a block provides its builder.

use std::any::Any;
use std::sync::Arc;

use gale_config::Diagnostic;
use gale_process::{Account, ListenSpec, ListenerHandle, Resources};

use super::builder::Builder;
use super::protocol::Protocol;
use super::scopes::ScopeTree;

/// Builder of a block while it is read.
pub trait BlockBuilder: Any {
    /// Levels of settings of the block.
    fn scopes(&mut self) -> &mut ScopeTree;
}

/// A block that was checked completely; only its resources are not open yet.
pub trait BlockDraft {
    /// Sockets that it needs.
    fn listens(&self) -> Vec<ListenSpec>;

    /// Ensures that directories exist. `owner` is the user of the worker process.
    ///
    /// # Errors
    /// A directory cannot be created or used.
    fn prepare(&self, resources: &mut dyn Resources, owner: Option<&Account>) -> Result<(), Diagnostic>;

    /// Builds the protocol. `listeners` are the requested sockets, in order.
    fn finish(self: Box<Self>, listeners: Vec<ListenerHandle>) -> Arc<dyn Protocol>;
}

/// Completes a block after the whole text was read. The builder still has the block, so defaults can be added to it.
pub type Complete = fn(&mut Builder, &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic>;

pub(super) struct OpenBlock {
    pub builder: Box<dyn BlockBuilder>,
    pub complete: Complete,
}
