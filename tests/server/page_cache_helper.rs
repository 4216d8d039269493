//! The helper process that tells a worker process which parts of files are in the page cache: rights, end, restart.

use std::fs;
use std::time::Instant;

use rustix::process::{Pid, Signal};

use crate::support::{
    DEADLINE, Driver, Server, Setup, http_configuration, page_cache_helpers_of, wait_ended, with_each_driver,
};

with_each_driver!(
    helper_has_one_capability_and_few_system_calls,
    helper_that_dies_is_started_again,
    helper_ends_with_its_worker_process,
    helper_of_a_new_worker_process_is_its_own,
);

fn start(driver: Driver) -> Server {
    Setup::configuration(&http_configuration(driver, "server { listen %UNIX%; return 200 here; }")).start()
}

/// Waits for a helper process of the server other than `before`.
fn helper_of(server: &Server, before: Option<Pid>) -> Pid {
    let end = Instant::now() + DEADLINE;
    loop {
        match page_cache_helpers_of(server.pid()).as_slice() {
            [helper] if Some(*helper) != before && has_filter(*helper) => return *helper,
            helpers => assert!(Instant::now() < end, "{helpers:?}\n{}", server.log()),
        }
        std::thread::yield_now();
    }
}

fn status_of(pid: Pid, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(field))?.trim().to_owned())
}

/// True if the helper is ready: the filter is the last step of its start.
fn has_filter(pid: Pid) -> bool {
    status_of(pid, "Seccomp:").as_deref() == Some("2")
}

fn helper_has_one_capability_and_few_system_calls(driver: Driver) {
    let server = start(driver);
    let helper = helper_of(&server, None);
    // The capabilities that the master may pass on.
    let own = status_of(rustix::process::getpid(), "CapPrm:").and_then(|set| u64::from_str_radix(&set, 16).ok());
    let capabilities = format!("{:016x}", own.expect("a set") & 1 << 3);
    for set in ["CapPrm:", "CapEff:"] {
        assert_eq!(status_of(helper, set), Some(capabilities.clone()), "{set}");
    }
    assert_eq!(status_of(helper, "NoNewPrivs:").as_deref(), Some("1"));
    assert_eq!(status_of(helper, "Threads:").as_deref(), Some("1"));
    server.stop();
}

fn helper_that_dies_is_started_again(driver: Driver) {
    let mut server = start(driver);
    let first = helper_of(&server, None);
    rustix::process::kill_process(first, Signal::KILL).expect("it runs");
    helper_of(&server, Some(first));
    assert_eq!(server.get("/").text(), "here");
    // `end`, not `stop`: the log has an alert about the death.
    server.end(Signal::TERM);
}

fn helper_ends_with_its_worker_process(driver: Driver) {
    let server = start(driver);
    let helper = helper_of(&server, None);
    server.stop();
    assert!(wait_ended(helper));
}

fn helper_of_a_new_worker_process_is_its_own(driver: Driver) {
    let mut server = start(driver);
    let first = helper_of(&server, None);
    rustix::process::kill_process(server.worker(), Signal::KILL).expect("it runs");
    helper_of(&server, Some(first));
    assert_eq!(server.get("/").text(), "here");
    server.end(Signal::TERM);
}
