//! Mounts that nobody else sees: a test that mounts something runs in a process of its own.

use std::process::Command;

use super::is_root;

/// Whether this is a process with mounts of its own. If not, the test is run once more in one that is: what it mounts
/// changes how every other server on the machine opens files.
#[track_caller]
pub fn has_own_mounts(test: &str) -> bool {
    const MARK: &str = "GALE_TEST_HAS_OWN_MOUNTS";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    if !is_root() {
        eprintln!("skipped: only root can mount file systems");
        return false;
    }
    let program = std::env::current_exe().expect("a test program");
    let mut command = Command::new("unshare");
    command.arg("--mount").arg(program).args(["--exact", test, "--nocapture"]).env(MARK, "yes");
    match command.output() {
        Ok(output) if output.status.success() => {
            assert!(
                String::from_utf8_lossy(&output.stdout).contains("1 passed"),
                "there is no test {test}: {output:?}"
            );
            let told = String::from_utf8_lossy(&output.stderr);
            told.lines().filter(|line| line.starts_with("skipped")).for_each(|line| eprintln!("{line}"));
        }
        // The status of a failed test program.
        Ok(output) if output.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        other => eprintln!("skipped: no mounts of one's own here: {other:?}"),
    }
    false
}
