//! The pool starter: a thread that starts pool threads for event loops, which must not wait for that. A new thread maps
//! a stack under a lock that other threads of the process hold while they wait for memory.
//!
//! The first thread of the first pool starts it. Until then, loops start threads themselves.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use super::Shared;

/// `None` if the thread could not be started.
static STARTER: OnceLock<Option<Sender<Arc<Shared>>>> = OnceLock::new();

/// Starts the thread once. Not for a loop.
pub(super) fn start() {
    STARTER.get_or_init(|| {
        let (sender, receiver) = channel::<Arc<Shared>>();
        let run = move || {
            crate::affinity::leave_processors();
            for pool in receiver {
                // If that fails and the pool has no thread, its tasks get the error.
                let _ = pool.start_thread();
            }
        };
        let started = std::thread::Builder::new().name("pool starter".to_owned()).spawn(run);
        started.is_ok().then_some(sender)
    });
}

/// Requests a thread for this pool, which counts the thread already; false if there is no starter.
pub(super) fn start_thread_for(pool: &Arc<Shared>) -> bool {
    // The thread never ends, since the sender is never dropped.
    STARTER.get().and_then(Option::as_ref).is_some_and(|starter| starter.send(Arc::clone(pool)).is_ok())
}
