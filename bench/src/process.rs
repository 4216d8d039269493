//! process: processes and cores as seen in /proc, and child processes pinned to cores.
//!
//! It sends no signals. CPU times are nanoseconds from `schedstat`, which are precise, unlike ticks; they are up to
//! date for sleeping threads, so readings are taken before the load begins and after it has ended. A process that exits
//! between two reads is left out, and is not an error.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A process, identified by its number and start time, which together are unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub id: u32,
    /// Start time in clock ticks since boot.
    started: u64,
}

impl Process {
    /// Returns the process with this number, or `None` if there is none.
    pub fn find(id: u32) -> Option<Process> {
        read_stat(id).map(|stat| stat.process)
    }

    /// Returns true if it is running. A zombie is not.
    pub fn is_alive(self) -> bool {
        read_stat(self.id).is_some_and(|stat| stat.process == self && stat.is_alive())
    }

    pub fn is_stopped(self) -> bool {
        read_stat(self.id).is_some_and(|stat| stat.process == self && stat.state == 'T')
    }

    /// Returns the CPU time of its threads, without threads that have exited.
    pub fn cpu_time(self) -> Duration {
        self.threads().values().map(|thread| thread.cpu_time).sum()
    }

    /// Returns the figures of its threads, by number.
    pub fn threads(self) -> Threads {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.id)) else {
            return Threads::new();
        };
        tasks
            .flatten()
            .filter_map(|task| Some((task.file_name().to_str()?.parse().ok()?, Thread::read(&task.path())?)))
            .collect()
    }

    /// Returns number, name and state of each thread.
    pub fn thread_states(self) -> Vec<(u32, String, char)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id)).into_iter().flatten().flatten();
        let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
        stats
            .filter_map(|stat| {
                let id = stat.split_once(' ')?.0.parse().ok()?;
                let name = stat.split_once('(')?.1.rsplit_once(')')?.0.to_owned();
                Some((id, name, fields_after_name(&stat).first()?.chars().next()?))
            })
            .collect()
    }

    /// Returns the children, ordered by number.
    pub fn children(self) -> Vec<Process> {
        all().into_iter().filter(|stat| stat.parent == self.id).map(|stat| stat.process).collect()
    }

    /// Returns the process and its descendants, except orphaned ones.
    pub fn tree(self) -> Vec<Process> {
        let all = all();
        let mut tree = vec![self];
        let mut next = 0;
        while next < tree.len() {
            let parent = tree[next].id;
            tree.extend(all.iter().filter(|stat| stat.parent == parent).map(|stat| stat.process));
            next += 1;
        }
        tree
    }

    /// Returns the number of open descriptors. Since 6.2 Linux reports it as the directory's size. Counting the entries
    /// makes the kernel cache an inode for each, a kilobyte that would count in a reading of its memory.
    pub fn descriptors(self) -> usize {
        let directory = format!("/proc/{}/fd", self.id);
        match fs::metadata(&directory).map_or(0, |metadata| metadata.len()) {
            0 => fs::read_dir(directory).map_or(0, Iterator::count),
            count => count as usize,
        }
    }
}

pub type Threads = BTreeMap<u32, Thread>;

/// Scheduling figures of a thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Thread {
    pub cpu_time: Duration,
    /// Time that it was ready and waited for a core.
    pub run_delay: Duration,
    pub voluntary_switches: u64,
    pub involuntary_switches: u64,
}

impl Thread {
    fn read(directory: &Path) -> Option<Thread> {
        let schedstat = fs::read_to_string(directory.join("schedstat")).ok()?;
        let status = fs::read_to_string(directory.join("status")).ok()?;
        let count = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        let mut nanos = schedstat.split_whitespace().map_while(|field| field.parse().ok().map(Duration::from_nanos));
        Some(Thread {
            cpu_time: nanos.next()?,
            run_delay: nanos.next()?,
            voluntary_switches: count("voluntary_ctxt_switches:")?,
            involuntary_switches: count("nonvoluntary_ctxt_switches:")?,
        })
    }

    pub fn since(self, earlier: Thread) -> Thread {
        Thread {
            cpu_time: self.cpu_time.saturating_sub(earlier.cpu_time),
            run_delay: self.run_delay.saturating_sub(earlier.run_delay),
            voluntary_switches: self.voluntary_switches.saturating_sub(earlier.voluntary_switches),
            involuntary_switches: self.involuntary_switches.saturating_sub(earlier.involuntary_switches),
        }
    }
}

pub fn threads(processes: &[Process]) -> Threads {
    processes.iter().flat_map(|process| process.threads()).collect()
}

/// A thread of a process, for repeated readings.
#[derive(Debug, Clone, Copy)]
pub struct ThreadId {
    pub process: Process,
    pub thread: u32,
}

impl ThreadId {
    /// Returns the time that it was ready but had no core.
    pub fn run_delay(self) -> Duration {
        run_delay_in(&format!("/proc/{}/task/{}/schedstat", self.process.id, self.thread))
    }
}

/// Returns the time that the calling thread was ready but had no core.
pub fn run_delay_of_this_thread() -> Duration {
    run_delay_in("/proc/thread-self/schedstat")
}

fn run_delay_in(schedstat: &str) -> Duration {
    let text = fs::read_to_string(schedstat).unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0))
}

/// Returns the kernel stack of a thread, with a function per line; empty if it is not in the kernel, or if reading is
/// not permitted.
pub fn thread_stack(process: Process, thread: u32) -> String {
    fs::read_to_string(format!("/proc/{}/task/{thread}/stack", process.id)).unwrap_or_default()
}

/// Returns the name of the thread with this number, or `None` if there is none.
pub fn thread_name(id: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{id}/comm")).ok()?.trim_end().to_owned())
}

/// Returns the kernel thread that processes packets on this core when interrupts cannot handle them all.
pub fn packet_thread(core: usize) -> Option<Process> {
    let name = format!("ksoftirqd/{core}");
    all().into_iter().map(|stat| stat.process).find(|process| thread_name(process.id).as_ref() == Some(&name))
}

/// Returns the CPU time of all children of this program that have exited and been waited for, in ticks of 10 ms.
pub fn ended_children_cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = fields_after_name(&stat);
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(13) + ticks(14)) * TICK_MS)
}

#[derive(Debug, Clone, Copy, Default)]
pub struct CoreTime {
    busy: u64,
    total: u64,
}

impl CoreTime {
    /// Reads the sum for these cores.
    pub fn read(cores: &[usize]) -> CoreTime {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let mut time = CoreTime::default();
        for core in cores {
            let name = format!("cpu{core} ");
            let line = stat.lines().find(|line| line.starts_with(&name)).unwrap_or("");
            // user nice system idle iowait irq softirq steal; the guest columns are included in user.
            let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|t| t.parse().ok()).collect();
            let total: u64 = ticks.iter().sum();
            time.total += total;
            time.busy += total - ticks.iter().skip(3).take(2).sum::<u64>();
        }
        time
    }

    /// Returns the share of the time since `earlier` that the cores were busy, whatever ran on them: 0 to 1.
    pub fn utilisation_since(self, earlier: CoreTime) -> f64 {
        let total = self.total.saturating_sub(earlier.total).max(1);
        self.busy.saturating_sub(earlier.busy) as f64 / total as f64
    }

    /// Returns the busy time of the cores since `earlier`, added up.
    pub fn busy_since(self, earlier: CoreTime) -> Duration {
        Duration::from_millis(self.busy.saturating_sub(earlier.busy) * TICK_MS)
    }
}

/// Starts a command pinned to these cores, with all its child processes.
pub fn spawn_pinned(command: &mut Command, cores: &[usize]) -> Result<Child, String> {
    let name = command.get_program().display().to_string();
    let mut only = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            return Err(format!("there is no core {core}"));
        }
        only.set(core);
    }
    // A child inherits the affinity of the thread that starts it.
    let before = sched_getaffinity(None).map_err(|error| format!("affinity: {error}"))?;
    sched_setaffinity(None, &only).map_err(|error| format!("cores {cores:?}: {error}"))?;
    let child = command.spawn().map_err(|error| format!("{name}: {error}"));
    sched_setaffinity(None, &before).map_err(|error| format!("affinity: {error}"))?;
    child
}

/// USER_HZ is 100 on every architecture that Gale supports.
const TICK_MS: u64 = 10;

struct Stat {
    process: Process,
    parent: u32,
    state: char,
}

impl Stat {
    fn is_alive(&self) -> bool {
        !matches!(self.state, 'Z' | 'X')
    }
}

/// Returns all processes except zombies.
fn all() -> Vec<Stat> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut all: Vec<Stat> = ids.filter_map(read_stat).filter(Stat::is_alive).collect();
    all.sort_by_key(|stat| stat.process);
    all
}

fn read_stat(id: u32) -> Option<Stat> {
    parse_stat(id, &fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
}

fn parse_stat(id: u32, text: &str) -> Option<Stat> {
    let fields = fields_after_name(text);
    let started = fields.get(19)?.parse().ok()?;
    let process = Process { id, started };
    Some(Stat { process, parent: fields.get(1)?.parse().ok()?, state: fields.first()?.chars().next()? })
}

/// Returns the fields from the state on (the third of proc(5)). The name before them may contain spaces and
/// parentheses.
fn fields_after_name(stat: &str) -> Vec<&str> {
    stat.rfind(')').map_or(Vec::new(), |end| stat[end + 1..].split_whitespace().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_anything() {
        let text = "7 (a) b (c) S 3 7 7 0 -1 0 0 0 0 0 1 2 30 40 20 0 1 0 555 0";
        let stat = parse_stat(7, text).unwrap();
        assert_eq!((stat.parent, stat.state, stat.process.started), (3, 'S', 555));
    }

    #[test]
    fn a_child_is_found_in_the_tree_and_gone_after_it_ended() {
        let mut child = Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = Process::find(child.id()).unwrap();
        assert!(Process::find(std::process::id()).unwrap().tree().contains(&process));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn cpu_time_grows_with_work() {
        let me = Process::find(std::process::id()).unwrap();
        let before = me.cpu_time();
        let mut sum = 0u64;
        while me.cpu_time() < before + Duration::from_millis(1) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(me.cpu_time() > before);
    }
}
