//! Work that must be done although a pool has no room for it now: it is tried again, for a bounded time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{Device, PoolError, ThreadPool};
use crate::environment::now;
use crate::time::sleep;

/// For how long: as long as a disk may take for what waits in a full queue. Whoever waits for longer learns it.
const TRIED_FOR: Duration = Duration::from_secs(5);

/// The pauses: at first what a thread takes to come free that has just ended its task, then doubled up to this.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(64);

impl ThreadPool {
    /// As [`ThreadPool::run_for`], for a loop: while the pool refuses the task it is tried again, for some seconds at
    /// most. Errors: the pool's, also the last refusal.
    pub async fn run_when_there_is_room<T, F>(&self, device: Device, task: F) -> Result<T, PoolError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // A task that is refused is dropped; what it is to do stays here.
        let task = Arc::new(Mutex::new(Some(task)));
        let end = now() + TRIED_FOR;
        let mut pause = PAUSE_MIN;
        loop {
            let taken = Arc::clone(&task);
            let run = move || {
                let task = taken.lock().take();
                task.expect("one attempt at most is not refused")()
            };
            match self.run_for(device, run).await {
                Err(PoolError::Overflow { .. } | PoolError::NoThread(_)) if now() < end => sleep(pause).await,
                ended => return ended,
            }
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}
