//! Repeats the tests of the other programs on io_uring, and then with the features of older kernels.
#![allow(clippy::duplicate_mod, reason = "each of the files brings what the tests share")]

use gale_runtime::DriverChoice;

const DRIVER: DriverChoice = DriverChoice::IoUring;

#[path = "connect.rs"]
mod connect;
#[path = "datagrams.rs"]
mod datagrams;
#[path = "dropped_futures.rs"]
mod dropped_futures;
#[path = "executor.rs"]
mod executor;
#[path = "idle_streams.rs"]
mod idle_streams;
#[path = "pool.rs"]
mod pool;
#[path = "sockets.rs"]
mod sockets;
#[path = "splice.rs"]
mod splice;
#[path = "stall.rs"]
mod stall;
#[path = "sync.rs"]
mod sync;
#[path = "takeover.rs"]
mod takeover;
#[path = "wakeups.rs"]
mod wakeups;

#[test]
fn sockets_work_the_same_with_features_of_older_kernels() {
    sockets::common::run_as_on_older_kernels(&[
        "sockets::",
        "connect::",
        "datagrams::",
        "splice::",
        "stall::",
        "takeover::",
        "dropped_futures::",
    ]);
}
