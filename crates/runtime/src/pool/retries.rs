//! Retries of tasks that must be done although the pool has no room, for a bounded time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Device, PoolError, ThreadPool};
use crate::environment::now;
use crate::time::sleep;

/// Total time: as long as a disk may take for a full queue. After that the caller gets the error.
const TRIED_FOR: Duration = Duration::from_secs(5);

/// Pauses between tries: at first the time that a thread needs to become free after its task, then doubled up to the
/// maximum.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(64);

impl ThreadPool {
    /// As [`ThreadPool::run_for`], for a loop: while the pool refuses the task, it is retried for some seconds. Errors:
    /// the pool's, including the last refusal.
    pub async fn run_when_there_is_room<T, F>(&self, device: Device, task: F) -> Result<T, PoolError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // A refused task is dropped, but its closure stays here.
        let task = Arc::new(Mutex::new(Some(task)));
        let end = now() + TRIED_FOR;
        let mut pause = PAUSE_MIN;
        loop {
            let taken = Arc::clone(&task);
            let run = move || {
                let task = taken.lock().take();
                task.expect("a task runs once: every other attempt was refused")()
            };
            match self.run_for(device, run).await {
                Err(PoolError::Overflow { .. } | PoolError::NoThread(_)) if now() < end => sleep(pause).await,
                ended => return ended,
            }
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}
