//! trial: a server under one experiment, and its memory and descriptors before.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::exchange::{self, get};
use super::outcome::{Outcome, Tally};
use crate::memory::Memory;
use crate::options::Options;
use crate::process::Process;
use crate::servers::{POLL_INTERVAL, Program, Running, SMALL_BODY, Setting, file_body};

/// One experiment for one server.
pub struct Trial<'a> {
    pub program: &'a Program,
    pub options: &'a Options,
}

/// A server that has been read before the experiment.
pub struct Watched {
    pub server: Running,
    before: Memory,
    descriptors_before: Vec<String>,
}

/// A client that nothing holds up has its answer by then, in milliseconds, also on a machine that is busy with the
/// attack itself.
pub const WAIT_MAX_MS: f64 = 1000.0;

/// Growth that is allowed: buffers that are kept for the next burst.
const GROWTH_MIB_MAX: f64 = 16.0;
/// Closed connections and old processes get this long to go.
const SETTLE_TIME_LIMIT: Duration = Duration::from_secs(10);
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(10);

impl Trial<'_> {
    /// Starts the server, has it work once in each ordinary way, and reads it.
    pub fn start(&self, setting: Setting) -> Result<Watched, String> {
        Watched::from_now(self.program.start(setting)?)
    }

    /// A folder for the experiment's own files; it ends with the process's temporary folder.
    pub fn folder(&self, name: &str) -> Result<PathBuf, String> {
        let path = std::env::temp_dir().join(format!("gale-campaign-{name}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }
}

impl Watched {
    /// Reads the server after it has worked.
    pub fn from_now(server: Running) -> Result<Watched, String> {
        let mut watched = Watched { server, before: Memory::default(), descriptors_before: Vec::new() };
        watched.read_after_work()?;
        Ok(watched)
    }

    /// Has the server work, and reads it then. A server opens some descriptors when it first needs them: Gale's watch
    /// of files (an inotify and an eventfd) and the table of mounts with the first file that is asked for repeatedly.
    pub fn read_after_work(&mut self) -> Result<(), String> {
        const ROUNDS: usize = 100;
        for _ in 0..ROUNDS {
            self.server.ask_both()?;
        }
        self.read_again();
        Ok(())
    }

    pub fn address(&self) -> &str {
        &self.server.address
    }

    /// Reads it again: from now on everything before counts as its ordinary state.
    pub fn read_again(&mut self) {
        self.before = Memory::read(&self.server.root.tree());
        self.descriptors_before = descriptors(&self.server.root.tree());
    }

    /// Memory as it is now is its ordinary one.
    pub fn read_memory_again(&mut self) {
        self.before.pss_kib = Memory::read(&self.server.root.tree()).pss_kib;
    }

    /// Requires that the server works, waits until it holds no more descriptors and processes than before, and ends it.
    pub fn finish(self, tally: &Tally) -> Outcome {
        self.finish_within(tally, GROWTH_MIB_MAX)
    }

    /// The same for a server that may keep so much more memory.
    pub fn finish_within(self, tally: &Tally, growth_mib_max: f64) -> Outcome {
        let server = &self.server;
        let works = server.ask_both();
        let deadline = Instant::now() + SETTLE_TIME_LIMIT;
        let mut after = Memory::read(&server.root.tree());
        while after.descriptors > self.before.descriptors || after.processes > self.before.processes {
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(POLL_INTERVAL * 20);
            after = Memory::read(&server.root.tree());
        }
        let mib = |memory: &Memory| memory.pss_kib as f64 / 1024.0;
        let mut outcome = Outcome {
            descriptors_left: after.descriptors.saturating_sub(self.before.descriptors) as u64,
            before_mib: mib(&self.before),
            after_mib: mib(&after),
            ..tally.outcome()
        };
        if outcome.descriptors_left > 0 {
            let mut left = descriptors(&server.root.tree());
            for name in &self.descriptors_before {
                left.iter().position(|own| own == name).map(|place| left.remove(place));
            }
            outcome.notes.push(format!("descriptors left: {}", left.join(", ")));
        }
        outcome.check(works.is_ok(), format!("afterwards it answers {works:?}"));
        let grown = outcome.after_mib - outcome.before_mib;
        outcome.check(grown <= growth_mib_max, format!("{grown:.0} MiB more than before"));
        let left = after.processes.saturating_sub(self.before.processes);
        outcome.check(left == 0, format!("{left} processes more than before"));
        let panics = server.error_log().lines().filter(|line| line.contains("panicked")).count();
        outcome.check(panics == 0, format!("{panics} panics in the error log"));
        outcome
    }
}

impl Running {
    /// Asks for two bytes and for a file, and requires both.
    pub fn ask_both(&self) -> Result<(), String> {
        for (path, body) in [("/return", SMALL_BODY.to_vec()), ("/file", file_body())] {
            let reply = exchange::ask(&self.address, &get(path), ANSWER_TIME_LIMIT)?;
            if reply.status != 200 || reply.body != body {
                return Err(format!("{path}: {}, {} bytes", reply.status, reply.body.len()));
            }
        }
        Ok(())
    }

    /// Its address as the system has it.
    pub fn socket_address(&self) -> SocketAddr {
        self.address.parse().expect("the harness has written it")
    }
}

/// The files and sockets behind the descriptors of some processes, without their numbers.
fn descriptors(processes: &[Process]) -> Vec<String> {
    let links = processes.iter().flat_map(|process| std::fs::read_dir(format!("/proc/{}/fd", process.id))).flatten();
    let names = links.flatten().filter_map(|link| std::fs::read_link(link.path()).ok());
    names.map(|name| text(&name).split(":[").next().unwrap_or_default().to_owned()).collect()
}

/// Runs `work` in so many threads, which have numbers from 0, and waits for all.
pub fn in_threads(count: usize, work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        for number in 0..count {
            let work = &work;
            scope.spawn(move || work(number));
        }
    });
}

/// Shares the numbers below `count` among some threads.
pub fn each_in_threads(threads: usize, count: usize, work: impl Fn(usize) + Sync) {
    in_threads(threads, |thread| (thread..count).step_by(threads).for_each(&work));
}

/// Waits until something is so; whether it came to be in time.
pub fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !is_so() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}

/// Directives that place cache, temporary files and large uploads on a disk; the cache's zone is `cache`.
pub fn storage_on(disk: &Path) -> String {
    let disk = text(disk);
    format!(
        "proxy_cache_path {disk}/cache keys_zone=cache:1m use_temp_path=off; proxy_temp_path {disk}/proxy; \
         client_body_temp_path {disk}/body; client_body_buffer_size 8k;"
    )
}

/// A path as configurations have it.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}
