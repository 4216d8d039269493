//! Executes files of the suite, several in parallel, each in a process group and temporary folder of its own.
//!
//! Every file has a time limit. When a file ends, the rest of its process group is killed before the leader is reaped,
//! so that the group's number cannot be in use by another. Parallel files do not collide: the suite locks each port by
//! binding its UDP (or TCP) counterpart, and takes another of the same five hundred numbers if that is taken.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Serialize;

use super::expected::{Seen, Status};
use super::tap::{Outcome, Plan, Tap};

/// Interval for checking a running file. Files take 0.2 s or longer.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Time between SIGTERM and SIGKILL. A fast shutdown of nginx takes milliseconds.
const TERMINATION_GRACE: Duration = Duration::from_secs(3);

/// Set by SIGINT and SIGTERM: running files are killed, and no others start.
pub static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Settings shared by all files of a run.
#[derive(Debug)]
pub struct Setup {
    pub suite: PathBuf,
    /// A symlink called `nginx`: only under that name does the binary answer `-V` in nginx's format.
    pub binary: PathBuf,
    /// Parent of the files' temporary folders. Its path is short, because Unix socket paths end at 107 bytes.
    pub scratch: PathBuf,
    /// Folder for the outputs: FILE.out and FILE.err.
    pub outputs: PathBuf,
    pub time_limit: Duration,
    /// Environment variables for every file.
    pub environment: Vec<(&'static str, String)>,
}

#[derive(Debug, Clone)]
pub struct Ran {
    pub file: String,
    pub seen: Seen,
    pub passed: u32,
    pub total: u32,
    pub todo: u32,
    /// Number and name of every failed test point.
    pub failed_points: Vec<(u32, String)>,
    /// The server's error message if it did not start.
    pub startup_error: Option<String>,
    pub ending: Ending,
    pub duration: Duration,
    /// The file did not pass in parallel with others; this is the result of a second run, alone.
    pub repeated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    Exited(i32),
    Signalled(i32),
    TimedOut,
    Interrupted,
    /// It could not be started or waited for.
    Failed(String),
}

/// Runs `files` on `jobs` threads and calls `report` for each. Results are in the order of `files`. After an
/// interruption some are missing.
pub fn run_all(setup: &Setup, files: &[String], jobs: usize, report: &(dyn Fn(&Ran) + Sync)) -> Vec<Ran> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, files.len().max(1)) {
            scope.spawn(|| {
                while !INTERRUPTED.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(index) else { return };
                    let ran = run_one(setup, file);
                    report(&ran);
                    results.lock().expect("no thread panics while it holds the list").push((index, ran));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics while it holds the list");
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, ran)| ran).collect()
}

fn run_one(setup: &Setup, file: &str) -> Ran {
    let started = Instant::now();
    let out = setup.outputs.join(format!("{file}.out"));
    let ending = execute(setup, file, &out).unwrap_or_else(|error| Ending::Failed(error.to_string()));
    let read = |path: &Path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let mut ran = judge(file, &Tap::parse(&read(&out)), ending, started.elapsed());
    if ran.seen.status == Status::Differs {
        ran.startup_error = find_startup_error(&read(&out.with_extension("err")));
    }
    ran
}

/// Computes the result from the output and the end of the process.
fn judge(file: &str, tap: &Tap, ending: Ending, duration: Duration) -> Ran {
    let clean = ending == Ending::Exited(0);
    let (status, skip_reason) = match &tap.plan {
        Plan::SkipAll(reason) if clean && tap.points.is_empty() => (Status::Skip, reason.clone()),
        _ if clean && tap.is_success() => (Status::Pass, String::new()),
        _ => (Status::Differs, String::new()),
    };
    let failing = if status == Status::Differs { tap.failing() } else { Vec::new() };
    let failed = tap.points.iter().filter(|point| point.outcome == Outcome::Failed);
    Ran {
        file: file.to_owned(),
        passed: tap.passed(),
        total: tap.total(),
        todo: tap.todo(),
        failed_points: failed.map(|point| (point.number, point.name.clone())).collect(),
        seen: Seen { status, failing, skip_reason },
        startup_error: None,
        ending,
        duration,
        repeated: false,
    }
}

/// Returns the message of the first `[emerg]` line, without the position, which contains the temporary folder.
fn find_startup_error(stderr: &str) -> Option<String> {
    let message = stderr.lines().find_map(|line| line.split_once("[emerg] "))?.1;
    Some(message.split(" in /").next().unwrap_or(message).to_owned())
}

fn execute(setup: &Setup, file: &str, out: &Path) -> std::io::Result<Ending> {
    let temporary = setup.scratch.join(file.trim_end_matches(".t"));
    std::fs::create_dir(&temporary)?;
    // Files in place of pipes: a backend that outlives its test file would keep a pipe open.
    let child = Command::new("perl")
        .arg(file)
        .current_dir(&setup.suite)
        .env("TMPDIR", &temporary)
        .env("TEST_NGINX_BINARY", &setup.binary)
        .envs(setup.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(File::create(out)?)
        .stderr(File::create(out.with_extension("err"))?)
        .process_group(0)
        .spawn()?;
    let ending = supervise(child, setup.time_limit);
    // A temporary folder that cannot be removed now is removed with the scratch folder, or stays for inspection.
    let _ = std::fs::remove_dir_all(&temporary);
    ending
}

/// Waits for the child to exit or for its time limit, then kills the rest of its group.
fn supervise(mut child: Child, time_limit: Duration) -> std::io::Result<Ending> {
    let group = Pid::from_child(&child);
    let deadline = Instant::now() + time_limit;
    let forced = loop {
        if has_exited(group)? {
            break None;
        } else if INTERRUPTED.load(Ordering::Relaxed) {
            break Some(Ending::Interrupted);
        } else if Instant::now() >= deadline {
            break Some(Ending::TimedOut);
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    if forced.is_some() {
        let _ = kill_process_group(group, Signal::TERM);
        let grace_end = Instant::now() + TERMINATION_GRACE;
        while !has_exited(group)? && Instant::now() < grace_end {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    // The leader is a zombie, or will be soon, and still holds the group's number. ESRCH means that the group is empty.
    let _ = kill_process_group(group, Signal::KILL);
    let status = child.wait()?;
    Ok(forced.unwrap_or_else(|| ending_of(status)))
}

/// Returns true if the child has exited. Does not reap it.
fn has_exited(child: Pid) -> std::io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(child), options)?.is_some())
}

fn ending_of(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited(code),
        (None, Some(signal)) => Ending::Signalled(signal),
        (None, None) => Ending::Failed(status.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};

    use super::*;

    fn status_of(output: &str, ending: Ending) -> Status {
        judge("a.t", &Tap::parse(output), ending, Duration::ZERO).seen.status
    }

    #[test]
    fn a_file_passes_only_with_all_points_and_a_clean_exit() {
        assert_eq!(status_of("1..1\nok 1\n", Ending::Exited(0)), Status::Pass);
        assert_eq!(status_of("1..1\nok 1\n", Ending::Exited(1)), Status::Differs);
        assert_eq!(status_of("1..1\nok 1\n", Ending::TimedOut), Status::Differs);
        assert_eq!(status_of("1..1\nnot ok 1\n", Ending::Exited(1)), Status::Differs);
        assert_eq!(status_of("", Ending::Exited(0)), Status::Differs);
        assert_eq!(status_of("1..0 # SKIP no ssl\n", Ending::Exited(0)), Status::Skip);
        assert_eq!(status_of("1..0 # SKIP no ssl\n", Ending::Signalled(9)), Status::Differs);
    }

    #[test]
    fn the_reason_for_not_starting_is_found() {
        let stderr = "note\nnginx: [emerg] unknown directive \"x\" in /tmp/a/nginx.conf:7\n  x;\n";
        assert_eq!(find_startup_error(stderr).unwrap(), "unknown directive \"x\"");
        assert_eq!(find_startup_error("# Failed test\n"), None);
    }

    #[test]
    fn the_whole_group_is_gone_when_the_time_is_up() {
        // A grandchild that ignores SIGTERM holds the pipe. The read below ends once it is killed.
        let script = "(trap '' TERM; echo started; sleep 60) & wait";
        let mut child =
            Command::new("sh").args(["-c", script]).process_group(0).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        let started = Instant::now();
        assert_eq!(supervise(child, Duration::ZERO).unwrap(), Ending::TimedOut);
        output.read_to_end(&mut Vec::new()).unwrap();
        assert!(started.elapsed() < Duration::from_secs(30), "nothing was killed");
    }

    #[test]
    fn a_command_that_ends_by_itself_keeps_its_status() {
        let child = Command::new("sh").args(["-c", "exit 3"]).process_group(0).spawn().unwrap();
        assert_eq!(supervise(child, Duration::from_secs(60)).unwrap(), Ending::Exited(3));
    }
}
