//! Replaced configurations: kept while a connection uses them, dropped on the control thread.
//!
//! With `worker_shutdown_timeout`, connections that still use one after that time are told to close.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Control;
use crate::loops::Order;
use crate::program::Program;

/// Interval between checks for old configurations that are no longer used.
pub(super) const RETIRED_CHECK: Duration = Duration::from_secs(1);

/// A replaced configuration that is still in use.
pub(super) struct Retired<C> {
    pub configuration: Arc<C>,
    pub expires: Option<Instant>,
}

impl<P: Program> Control<P> {
    /// Drops old configurations that are no longer used: on this thread, because it can take long and would block a
    /// loop.
    pub(super) fn check_retired(&mut self) {
        let now = Instant::now();
        self.retired.retain(|retired| Arc::strong_count(&retired.configuration) > 1);
        // The newest expired one stands for the older ones, too.
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
