//! Runs a test in a process and a namespace of its own. Tests that mount something or change the routing of packets
//! need that, because they would affect every other server on the machine.

use std::process::Command;

use super::{is_root, skip};

/// `true` in a process with its own mounts. Otherwise the test is run once more in such a process.
#[track_caller]
pub fn has_own_mounts() -> bool {
    has_own("--mount", "GALE_TEST_HAS_OWN_MOUNTS", "only root can mount file systems")
}

/// `true` in a process with its own network, in which no interface is up. Otherwise the test is run once more in such a
/// process.
#[track_caller]
pub fn has_own_network() -> bool {
    has_own("--net", "GALE_TEST_HAS_OWN_NETWORK", "only root can have a network of its own")
}

/// Name of the running test, which the harness gives to the thread.
#[track_caller]
fn own_name() -> String {
    std::thread::current().name().expect("a test's thread").to_owned()
}

#[track_caller]
fn has_own(namespace: &str, mark: &str, refusal: &str) -> bool {
    if std::env::var_os(mark).is_some() {
        return true;
    }
    if !is_root() {
        skip(refusal);
        return false;
    }
    let test = own_name();
    let program = std::env::current_exe().expect("a test program");
    let mut command = Command::new("unshare");
    command.arg(namespace).arg(program).args(["--exact", &test, "--nocapture"]).env(mark, "yes");
    match command.output() {
        Ok(output) if output.status.success() => {
            assert!(
                String::from_utf8_lossy(&output.stdout).contains("1 passed"),
                "there is no test {test}: {output:?}"
            );
            let told = String::from_utf8_lossy(&output.stderr);
            // The child process has registered the skip itself.
            told.lines().filter(|line| line.starts_with("skipped")).for_each(|line| eprintln!("{line}"));
        }
        // Exit status of a failed test program.
        Ok(output) if output.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        other => {
            eprintln!("unshare {namespace}: {other:?}");
            skip(format!("no namespaces here ({namespace})"));
        }
    }
    false
}
