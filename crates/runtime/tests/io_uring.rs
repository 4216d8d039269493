//! The tests of every other program here once more, on io_uring.
#![allow(clippy::duplicate_mod, reason = "each of the files brings what the tests share")]

use gale_runtime::DriverChoice;

const DRIVER: DriverChoice = DriverChoice::IoUring;

#[path = "executor.rs"]
mod executor;
#[path = "files.rs"]
mod files;
#[path = "pool.rs"]
mod pool;
#[path = "sockets.rs"]
mod sockets;
#[path = "wakeups.rs"]
mod wakeups;
