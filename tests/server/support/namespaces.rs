//! A test that mounts something, or changes how packets are routed, runs in a process and a namespace of its own, since
//! that would change how every other server on the machine works.

use std::process::Command;

use super::{is_root, skip};

/// Whether this is a process with mounts of its own. If not, the test is run once more in one that is.
#[track_caller]
pub fn has_own_mounts() -> bool {
    has_own("--mount", "GALE_TEST_HAS_OWN_MOUNTS", "only root can mount file systems")
}

/// Whether this is a process with a network of its own, in which nothing is up. If not, the test is run once more in
/// one that is.
#[track_caller]
pub fn has_own_network() -> bool {
    has_own("--net", "GALE_TEST_HAS_OWN_NETWORK", "only root can have a network of its own")
}

/// The name of the running test, by which the harness names the thread.
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
            // It has registered that itself.
            told.lines().filter(|line| line.starts_with("skipped")).for_each(|line| eprintln!("{line}"));
        }
        // The status of a failed test program.
        Ok(output) if output.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        other => {
            eprintln!("unshare {namespace}: {other:?}");
            skip(format!("no namespaces here ({namespace})"));
        }
    }
    false
}
