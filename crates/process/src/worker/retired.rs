//! Configurations that were replaced: kept while a connection uses them, dropped on the control thread.
//!
//! With `worker_shutdown_timeout` the connections that still hold one are told to close when that has passed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Control;
use crate::loops::Order;
use crate::program::Program;

/// How often it is looked whether an old configuration is free.
pub(super) const RETIRED_CHECK: Duration = Duration::from_secs(1);

/// A configuration that was replaced and that something still holds.
pub(super) struct Retired<C> {
    pub configuration: Arc<C>,
    pub expires: Option<Instant>,
}

impl<P: Program> Control<P> {
    /// Drops old configurations that nobody holds any more: here, because that can take a while and a loop has no time.
    pub(super) fn check_retired(&mut self) {
        let now = Instant::now();
        self.retired.retain(|retired| Arc::strong_count(&retired.configuration) > 1);
        // The newest of them stands for the older ones too.
        let mut expired = None;
        for retired in &mut self.retired {
            if retired.expires.is_some_and(|at| at <= now) {
                retired.expires = None;
                expired = Some(Arc::clone(&retired.configuration));
            }
        }
        if expired.is_some() {
            for each in &self.loops {
                each.handle.order(Order::Expire { configuration: expired.clone() });
            }
        }
    }
}
