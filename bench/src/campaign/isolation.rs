//! isolation: an experiment in a process of its own, with mounts and process numbers of its own where the system allows
//! it. When that process ends, however it ends, the kernel ends every process below it and every mount goes; the
//! temporary folder is removed here.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::outcome::Outcome;

/// A thing that an experiment needs beside a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Mounts of its own.
    Mounts,
    /// A file system in user space.
    Fuse,
    /// A file system in a file.
    LoopDevice,
    /// A control group that limits memory.
    MemoryGroup,
    Strace,
    /// libfaketime.
    FakeTime,
}

impl Need {
    /// Its name if the machine lacks it.
    pub fn lacking(self) -> Option<String> {
        let lacks = |is_there: bool, what: &str| (!is_there).then(|| what.to_owned());
        match self {
            Need::Mounts => lacks(can_isolate(), "nothing can be mounted here (root, unshare)"),
            Need::Fuse => Need::Mounts.lacking().or_else(|| {
                let opened = fs::File::options().read(true).write(true).open("/dev/fuse");
                lacks(opened.is_ok(), "/dev/fuse cannot be opened")
            }),
            Need::LoopDevice => Need::Mounts.lacking().or_else(|| {
                let has_tools = runs("mkfs.ext4", "-V") && runs("losetup", "--version");
                lacks(has_tools && Path::new("/dev/loop-control").exists(), "no loop devices with ext4")
            }),
            Need::MemoryGroup => {
                let [v1, v2] = ["memory/memory.limit_in_bytes", "cgroup.controllers"]
                    .map(|name| Path::new("/sys/fs/cgroup").join(name).exists());
                lacks(rustix::process::geteuid().is_root() && (v1 || v2), "no control group for memory (root)")
            }
            Need::Strace => lacks(runs("strace", "-V"), "no strace"),
            Need::FakeTime => lacks(fake_time_library().is_some(), "no libfaketime"),
        }
    }
}

/// The library that changes what a program takes for the time.
pub fn fake_time_library() -> Option<PathBuf> {
    let folders = ["/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib/faketime"];
    let libraries = folders.iter().map(|folder| Path::new(folder).join("libfaketimeMT.so.1"));
    libraries.into_iter().find(|path| path.exists())
}

/// Runs this program with these words, in isolation; its standard output is an outcome.
pub fn run(words: &[String], limit: Duration) -> Result<Outcome, String> {
    let folder = TemporaryFolder::make()?;
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = if can_isolate() {
        let mut command = Command::new("unshare");
        command.args(UNSHARE).arg(&own);
        command
    } else {
        Command::new(&own)
    };
    command.args(words).env("TMPDIR", &folder.0).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    end_with_parent(&mut command);
    catch_interrupts();
    let mut child = command.spawn().map_err(|error| format!("{}: {error}", own.display()))?;
    let mut output = child.stdout.take().ok_or("no output")?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = output.read_to_string(&mut text);
        text
    });
    let ended = wait(&mut child, limit);
    let text = reader.join().unwrap_or_default();
    ended?;
    let outcome = text.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    outcome.ok_or_else(|| "it ended without an outcome".to_owned())
}

/// The child alone has these; its own children go with it.
const UNSHARE: [&str; 5] = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"];

fn can_isolate() -> bool {
    let mut command = Command::new("unshare");
    let status = command.args(UNSHARE).arg("true").stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn runs(program: &str, option: &str) -> bool {
    let mut command = Command::new(program);
    let status = command.arg(option).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Waits for its end; ends it and everything that it has started when the time is up or the user wants it.
fn wait(child: &mut Child, limit: Duration) -> Result<(), String> {
    const LOOK_EVERY: Duration = Duration::from_millis(20);
    let deadline = Instant::now() + limit;
    loop {
        let error = match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("{status}; its error is above")),
            Err(error) => error.to_string(),
            Ok(None) if is_interrupted() => "interrupted".to_owned(),
            Ok(None) if Instant::now() >= deadline => format!("it did not end within {} s", limit.as_secs()),
            Ok(None) => {
                std::thread::sleep(LOOK_EVERY);
                continue;
            }
        };
        if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = child.wait();
        return Err(error);
    }
}

/// The user wants the end of it.
pub fn is_interrupted() -> bool {
    IS_INTERRUPTED.load(Ordering::Relaxed)
}

static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Ctrl-C ends the experiment first, and then this program.
fn catch_interrupts() {
    extern "C" fn interrupted(_: libc::c_int) {
        IS_INTERRUPTED.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, interrupted as *const () as libc::sighandler_t) };
    }
}

/// The kernel ends the child when this program is killed.
fn end_with_parent(command: &mut Command) {
    let set = || {
        // SAFETY: prctl(2) with this option takes a number and touches no memory.
        match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe { command.pre_exec(set) };
}

/// Removed when dropped.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn make() -> Result<TemporaryFolder, String> {
        let path = std::env::temp_dir().join(format!("gale-campaign-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(TemporaryFolder(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
