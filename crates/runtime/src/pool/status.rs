//! What is told of a pool: why a task gave no result, and what the pool is doing and has done.

use std::fmt;
use std::io;
use std::sync::Arc;

use gale_base::histogram::Snapshot;

/// Why a task gave no result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// The queue is full. The text is nginx's.
    Overflow {
        /// The pool's name.
        pool: Arc<str>,
        /// How many tasks wait.
        waiting: usize,
    },
    /// The task panicked; it was reported as every caught panic is.
    Panicked,
    /// The pool was stopped before the task began.
    Stopped,
    /// Not one thread could be started.
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

/// What a pool is doing and has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolCounters {
    /// Threads that there are.
    pub threads: usize,
    /// Tasks being executed.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub waiting: usize,
    /// Tasks executed since the start, panics included.
    pub completed: u64,
    /// Of these, how many panicked.
    pub panicked: u64,
    /// Tasks that were given up before they began.
    pub cancelled: u64,
    /// Tasks refused because the queue was full.
    pub refused: u64,
    /// How often the system refused to start a thread.
    pub thread_failures: u64,
}

/// What a pool does for a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolDevice {
    /// `st_dev` of stat(2).
    pub number: u64,
    /// Tasks being executed.
    pub running: usize,
    /// Tasks waiting for a thread.
    pub waiting: usize,
}

/// A pool as the status page shows it.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// Its name. A pool that was replaced may still be there under the same name.
    pub name: Arc<str>,
    /// The limit of its threads.
    pub threads_max: usize,
    /// The limit of the tasks that wait.
    pub queue_max: usize,
    /// It takes no tasks any more and ends when those that it has are done.
    pub is_ending: bool,
    /// What it does.
    pub counters: PoolCounters,
    /// What it does for devices of files: each that something runs or waits for, once.
    pub devices: Vec<PoolDevice>,
    /// How long tasks have waited for a thread.
    pub wait_times: Snapshot,
    /// How long tasks have run.
    pub run_times: Snapshot,
}
