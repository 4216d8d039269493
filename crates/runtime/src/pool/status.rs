//! Status of a pool: errors of tasks, counters and limits.

use std::fmt;
use std::io;
use std::sync::Arc;

use gale_base::histogram::Snapshot;

/// The reason why a task has no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// The queue is full. The message is nginx's.
    Overflow {
        /// The pool's name.
        pool: Arc<str>,
        /// Number of waiting tasks.
        waiting: usize,
    },
    /// The task panicked, which was reported like every caught panic.
    Panicked,
    /// The pool was stopped before the task began.
    Stopped,
    /// No thread could be started.
    NoThread(io::ErrorKind),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::Overflow { pool, waiting } => {
                write!(f, "thread pool \"{pool}\" queue overflow: {waiting} tasks waiting")
            }
            PoolError::Panicked => f.write_str("a task in a thread pool panicked"),
            PoolError::Stopped => f.write_str("the thread pool has stopped"),
            PoolError::NoThread(kind) => write!(f, "cannot start a thread: {kind}"),
        }
    }
}

impl std::error::Error for PoolError {}

impl From<PoolError> for io::Error {
    fn from(error: PoolError) -> Self {
        io::Error::other(error)
    }
}

/// Counters of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolCounters {
    /// Current number of threads.
    pub threads: usize,
    /// Tasks that are running.
    pub running: usize,
    /// Tasks that wait for a thread.
    pub waiting: usize,
    /// Tasks that have run since the start, panics included.
    pub completed: u64,
    /// Tasks of these that panicked.
    pub panicked: u64,
    /// Tasks that were cancelled before they began.
    pub cancelled: u64,
    /// Tasks refused because the queue was full.
    pub refused: u64,
    /// Times that the system refused to start a thread.
    pub thread_failures: u64,
}

/// Pool tasks of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolDevice {
    /// `st_dev` of stat(2).
    pub number: u64,
    /// Tasks that are running.
    pub running: usize,
    /// Tasks that wait for a thread.
    pub waiting: usize,
}

/// Status of a pool, for the status page.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// The name. A pool that was replaced may still exist under the same name.
    pub name: Arc<str>,
    /// Limit of threads.
    pub threads_max: usize,
    /// Limit of waiting tasks.
    pub queue_max: usize,
    /// The pool accepts no more tasks and ends with the existing ones.
    pub is_ending: bool,
    /// Counters.
    pub counters: PoolCounters,
    /// Devices of files with running or waiting tasks, each once.
    pub devices: Vec<PoolDevice>,
    /// Times that tasks have waited for a thread.
    pub wait_times: Snapshot,
    /// Times that tasks have run.
    pub run_times: Snapshot,
}
