//! Processes of a server, found in /proc by their working directory, and waited for through pidfds.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};

use super::DEADLINE;
use super::directory::wait_readable_any;

/// Makes the test program the parent of daemons and workers whose parent has died, so that it can wait for them
/// everywhere: not every process 1 of a container does.
pub(super) fn adopt_orphans() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("a prctl"));
}

/// `true` if the process ends before the deadline.
pub fn wait_ended(pid: Pid) -> bool {
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => wait_readable_any(&handle, None::<&OwnedFd>, Instant::now() + DEADLINE),
        Err(_) => true,
    }
}

/// Waits until all threads of a stopped process have stopped.
pub(super) fn wait_stopped(pid: Pid) {
    let end = Instant::now() + DEADLINE;
    let is_stopped = |task: fs::DirEntry| {
        let stat = fs::read_to_string(task.path().join("stat")).expect("it is there");
        stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with('T'))
    };
    while !fs::read_dir(format!("/proc/{pid}/task")).expect("it is there").flatten().all(is_stopped) {
        assert!(Instant::now() < end, "{pid} runs on");
        std::thread::yield_now();
    }
}

/// Waits until no process works in `directory`; returns the command lines of processes that do not end.
pub(super) fn wait_none_left(directory: &Path) -> Vec<String> {
    for pid in in_directory(directory) {
        if !wait_ended(pid) {
            let describe = |pid: &Pid| format!("{pid} {}", command_line(*pid));
            return in_directory(directory).iter().map(describe).collect();
        }
        reap(pid);
    }
    Vec::new()
}

/// Kills every process that works in `directory`, and their new children.
pub(super) fn kill_all(directory: &Path) {
    loop {
        let left = in_directory(directory);
        if left.is_empty() {
            return;
        }
        for pid in left {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            if !wait_ended(pid) {
                return;
            }
            reap(pid);
        }
    }
}

/// Reaps an adopted orphan; other processes' children are left alone.
fn reap(pid: Pid) {
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
}

/// Processes whose working directory is `directory`.
pub fn in_directory(directory: &Path) -> Vec<Pid> {
    let is_inside =
        |pid: &Pid| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|working| working.starts_with(directory));
    all().filter(is_inside).collect()
}

/// Command line of a process; empty when it has ended.
pub(super) fn command_line(pid: Pid) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// Page cache helpers of a master.
pub fn page_cache_helpers_of(master: Pid) -> Vec<Pid> {
    all_children_of(master).into_iter().filter(|&pid| is_page_cache_helper(pid)).collect()
}

fn is_page_cache_helper(pid: Pid) -> bool {
    command_line(pid).contains(": page cache helper")
}

/// Running children of a process, without page cache helpers.
pub fn children_of(parent: Pid) -> Vec<Pid> {
    all_children_of(parent).into_iter().filter(|&pid| !is_page_cache_helper(pid)).collect()
}

fn all_children_of(parent: Pid) -> Vec<Pid> {
    let is_child = |pid: &Pid| {
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        // The fields after the name, which may contain any byte: state and parent.
        let mut fields = stat.rsplit(") ").next().unwrap_or("").split(' ');
        let (state, parent_text) = (fields.next(), fields.next());
        state != Some("Z") && parent_text.and_then(|text| text.parse().ok()) == Some(parent.as_raw_pid())
    };
    all().filter(is_child).collect()
}

/// Number of open descriptors of a process.
pub fn descriptors_of(pid: Pid) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count()
}

/// Processor time used by a process.
pub fn cpu_time(pid: Pid) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("fields").split(' ').collect();
    // Fields 14 and 15 of the line: user and system time in ticks.
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Resident memory of a process now, and its peak since [`forget_peak_memory`]; in bytes.
pub fn resident_memory(pid: Pid) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    (kib_of(&status, "VmRSS:") * 1024, kib_of(&status, "VmHWM:") * 1024)
}

/// Resets the peak of resident memory to its present value.
pub fn forget_peak_memory(pid: Pid) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("ours");
}

/// Anonymous memory of a process that has been written to, in bytes. Mapped files do not count: their pages become
/// resident on access.
pub fn anonymous_memory(pid: Pid) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    kib_of(&rollup, "Anonymous:") * 1024
}

/// Number of threads of a process with this name.
pub fn threads_named(pid: Pid, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|own| own.trim_end() == name).count()
}

fn kib_of(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB")?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {text}"))
}

fn all() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(Pid::from_raw)
}
