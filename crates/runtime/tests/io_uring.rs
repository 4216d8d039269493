//! The tests of every other program here once more, on io_uring, and then with what older kernels have of it.
#![allow(clippy::duplicate_mod, reason = "each of the files brings what the tests share")]

use gale_runtime::DriverChoice;

const DRIVER: DriverChoice = DriverChoice::IoUring;

#[path = "datagrams.rs"]
mod datagrams;
#[path = "dropped_futures.rs"]
mod dropped_futures;
#[path = "executor.rs"]
mod executor;
#[path = "files.rs"]
mod files;
#[path = "pool.rs"]
mod pool;
#[path = "sockets.rs"]
mod sockets;
#[path = "stall.rs"]
mod stall;
#[path = "takeover.rs"]
mod takeover;
#[path = "wakeups.rs"]
mod wakeups;

/// The kernels that brought something that the ring uses, each without what came later.
const KERNELS: &[&str] = &["5.13", "5.18", "5.19", "6.0", "6.1", "6.15"];

#[test]
fn sockets_work_the_same_with_what_older_kernels_have() {
    if std::env::var_os(sockets::common::KERNEL_MAX).is_some() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    for kernel in KERNELS {
        let mut tests = std::process::Command::new(&program);
        tests.env(sockets::common::KERNEL_MAX, kernel).args([
            "sockets::",
            "stall::",
            "takeover::",
            "dropped_futures::",
        ]);
        let output = tests.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with what {kernel} has:\n{text}");
        assert!(!text.contains("running 0 tests"), "{text}");
    }
}
