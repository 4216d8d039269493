//! Settings of content handlers that a directive switches on in its location, such as `empty_gif;`.

use std::marker::PhantomData;

use gale_config::{Custom, Store};
use gale_engine::configuration::Builder;

/// Settings of the module `M`. Not inherited, as in nginx: a location's content handler is its own.
pub(crate) struct ContentSwitch<M> {
    is_on: bool,
    module: PhantomData<fn(M)>,
}

impl<M> Default for ContentSwitch<M> {
    fn default() -> ContentSwitch<M> {
        ContentSwitch { is_on: false, module: PhantomData }
    }
}

impl<M: 'static> ContentSwitch<M> {
    /// Store of the directive, which may be repeated.
    pub const TURN_ON: &'static dyn Store<Builder> = &Custom(|switch: &mut ContentSwitch<M>, _, _| {
        switch.is_on = true;
        Ok(())
    });

    /// Returns `true` in a scope with the directive.
    pub fn is_on(&self) -> bool {
        self.is_on
    }
}
