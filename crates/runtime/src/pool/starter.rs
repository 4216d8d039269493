//! Starts threads of pools for event loops, which must not wait for that: a new thread has a new stack, and to map it
//! needs a lock that others of the process hold while they wait for memory.
//!
//! It is a thread itself, started by the first thread of the first pool. Until it is there, loops start threads
//! themselves.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::Shared;

/// `None` where there can be no such thread.
static STARTER: OnceLock<Option<Sender<Arc<Shared>>>> = OnceLock::new();

/// Starts it, if nobody has. Not for a loop.
pub(super) fn start() {
    STARTER.get_or_init(|| {
        let (sender, receiver) = channel::<Arc<Shared>>();
        let run = move || {
            crate::affinity::leave_processors();
            for pool in receiver {
                // Tasks of a pool that then has no thread are told.
                let _ = pool.start_thread();
            }
        };
        let started = std::thread::Builder::new().name("pool starter".to_owned()).spawn(run);
        started.is_ok().then_some(sender)
    });
}

/// Has it start a thread for this pool, which counts the thread already; false if it cannot.
pub(super) fn start_thread_for(pool: &Arc<Shared>) -> bool {
    // It never ends, since the sender is never dropped.
    STARTER.get().and_then(Option::as_ref).is_some_and(|starter| starter.send(Arc::clone(pool)).is_ok())
}
