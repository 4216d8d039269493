//! Runs the real binary: its directory, its processes, its logs, and its messages to the service manager.
//!
//! Every wait is a wait on a descriptor (the service manager's socket, a pidfd, inotify, a connection) with a generous
//! deadline; nothing sleeps, and nothing is retried until it happens to work.
//!
//! Addresses. nginx's language cannot ask for "any free port", and a port that a test has found free may be taken a
//! moment later. So most tests use a Unix socket in the server's own directory (`%UNIX%`). Where TCP matters, `%TCP%`,
//! `%TCP2%` and `%TCP3%` are unique addresses: all of 127.0.0.0/8 is this machine, so the test's process number makes
//! the address (a quarter of 127.0.0.0/8 holds every process number of Linux, and a number belongs to one process at a
//! time), and a counter makes the port, below the kernel's range of ephemeral ports. `%PORT%` is the port of `%TCP%`
//! alone, for wildcards and IPv6; concurrent test programs might share it, so it is used sparingly, and for datagrams
//! with `turn_of_wildcards`.
//!
//! A server's processes are recognised by their working directory, which is the test's own.

pub mod answers;
pub mod authority;
mod backend;
pub mod browser;
mod client;
mod crowds;
pub mod devtools;
mod directory;
pub mod fuse;
mod gate;
pub mod http2;
pub mod http2_server;
pub mod issuer;
pub mod mmdb;
mod namespaces;
pub mod otlp;
mod processes;
#[path = "../../shared/scratch.rs"]
pub mod scratch;
#[path = "../../shared/skips.rs"]
mod skips;
mod small_disk;
pub mod tls;

use std::ffi::OsString;
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, setrlimit};

pub use backend::{Asked, Backend, Serving};
pub use client::{Client, Response};
pub use crowds::{descriptor_limit, turn_of_crowds};
pub use directory::{Directory, Watch};
pub use gate::{Gate, Task};
pub use namespaces::{has_own_mounts, has_own_network};
pub use processes::{
    anonymous_memory, children_of, cpu_time, descriptors_of, forget_peak_memory, in_directory, page_cache_helpers_of,
    resident_memory, threads_named, wait_ended,
};
pub use skips::skip;
pub use small_disk::SmallDisk;

/// Reason for skipping a test of disks.
pub const NO_MOUNTS: &str = "no file system can be mounted here";

/// Long enough for a debug build on a busy machine; only a failing test waits so long.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Kernel interface, as named by `use`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    Epoll,
    IoUring,
}

impl Driver {
    pub fn name(self) -> &'static str {
        match self {
            Driver::Epoll => "epoll",
            Driver::IoUring => "io_uring",
        }
    }
}

/// Expands functions that take a [`Driver`] into one test for each driver: `epoll::NAME` and `io_uring::NAME`.
macro_rules! with_each_driver {
    ($($(#[$attribute:meta])* $name:ident),* $(,)?) => {
        mod epoll {
            $($(#[$attribute])* #[test] fn $name() { super::$name(crate::support::Driver::Epoll) })*
        }
        mod io_uring {
            $($(#[$attribute])* #[test] fn $name() { super::$name(crate::support::Driver::IoUring) })*
        }
    };
}
pub(crate) use with_each_driver;

/// Number of the unprivileged user and group that Linux systems have.
pub const NOBODY: u32 = 65534;

/// Returns the kernel's version of Landlock; skips and returns `None` where Landlock cannot restrict workers (before
/// 2).
pub fn landlock() -> Option<i64> {
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the call takes no ruleset and returns a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0, VERSION) };
    if version < 2 || std::env::var_os("GALE_TEST_KERNEL_MAX").is_some() {
        skip("the kernel has no Landlock, or none that is used");
        return None;
    }
    Some(version)
}

/// `true` if the tests run as root. Tests that need root are skipped otherwise.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// While this lock is held no other test has it. It serves datagrams at a wildcard address: the kernel lets two servers
/// bind the same one (both with `SO_REUSEADDR`, as in nginx) and delivers to the later one.
pub fn turn_of_wildcards() -> File {
    let file = File::create(std::env::temp_dir().join("gale-test-wildcards")).expect("a file");
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).expect("a turn");
    file
}

/// Repeats an attempt that returns `None` because the machine was too slow.
#[track_caller]
pub fn until_in_time<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < end, "never in time: {what}");
    }
}

/// An address whose socket is bound but does not listen: connections are refused while the socket is kept.
pub fn dead_address() -> (OwnedFd, SocketAddr) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket");
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
    let address = getsockname(&socket).expect("bound").try_into().expect("an address of IPv4");
    (socket, address)
}

/// An idle process, until it is dropped: its process number belongs to the test.
pub struct IdleProcess(Child);

impl IdleProcess {
    pub fn start() -> IdleProcess {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        IdleProcess(child.expect("every system has cat"))
    }

    pub fn number(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for IdleProcess {
    fn drop(&mut self) {
        // The process reads its standard input to the end.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Options for starting a server.
#[derive(Clone, Debug)]
pub struct Setup {
    configuration: String,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    program: &'static str,
    files: Vec<(String, Vec<u8>)>,
    templates: Vec<(String, String)>,
    links: Vec<(String, String)>,
    is_unprivileged: bool,
    umask: Option<u32>,
    may_leave_core_files: bool,
}

impl Setup {
    /// A complete configuration, in which `%DIR%`, `%UNIX%`, `%TCP%`, `%TCP2%`, `%TCP3%` are replaced. Nothing is
    /// added.
    pub fn configuration(text: &str) -> Setup {
        Setup {
            configuration: text.to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            program: "gale",
            files: Vec::new(),
            templates: Vec::new(),
            links: Vec::new(),
            is_unprivileged: false,
            umask: None,
            may_leave_core_files: false,
        }
    }

    /// Contents of the http block. The rest of the configuration suits tests: no daemon, two workers, all messages in
    /// `%DIR%/error.log`, requests in `%DIR%/access.log`.
    pub fn http(driver: Driver, text: &str) -> Setup {
        Setup::configuration(&http_configuration(driver, text))
    }

    /// Contents of the stream block. A server with `%LOG%` logs each session in `%DIR%/access.log`.
    pub fn stream(driver: Driver, text: &str) -> Setup {
        Setup::configuration(&stream_configuration(driver, text))
    }

    /// Contents of the block of one server on `%UNIX%`.
    pub fn server(driver: Driver, text: &str) -> Setup {
        Setup::http(driver, &format!("server {{\n listen %UNIX%;\n{text}\n}}"))
    }

    /// Replaces every `from` in the configuration.
    pub fn replace(mut self, from: &str, to: &str) -> Setup {
        assert!(self.configuration.contains(from), "{from} is not in the configuration");
        self.configuration = self.configuration.replace(from, to);
        self
    }

    /// Writes a file in the server's directory before the start.
    pub fn file(mut self, path: &str, contents: impl AsRef<[u8]>) -> Setup {
        self.files.push((path.to_owned(), contents.as_ref().to_owned()));
        self
    }

    /// [`Setup::file`] with `%DIR%` and so on replaced.
    pub fn template(mut self, path: &str, contents: &str) -> Setup {
        self.templates.push((path.to_owned(), contents.to_owned()));
        self
    }

    /// Makes a symbolic link in the server's directory before the start.
    pub fn link(mut self, target: &str, path: &str) -> Setup {
        self.links.push((target.to_owned(), path.to_owned()));
        self
    }

    /// Adds a word to the command line; `%DIR%` and so on are replaced.
    pub fn argument(mut self, word: &str) -> Setup {
        self.arguments.push(word.into());
        self
    }

    pub fn environment(mut self, name: &str, value: &str) -> Setup {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Sets the name under which the program is started.
    pub fn program(mut self, name: &'static str) -> Setup {
        self.program = name;
        self
    }

    /// Starts the server as an ordinary user even when the tests run as root.
    pub fn unprivileged(mut self) -> Setup {
        self.is_unprivileged = true;
        self
    }

    /// Sets the umask.
    pub fn umask(mut self, umask: u32) -> Setup {
        self.umask = Some(umask);
        self
    }

    /// Allows core files of any size (`ulimit -c unlimited`), as far as the hard limit permits.
    pub fn may_leave_core_files(mut self) -> Setup {
        self.may_leave_core_files = true;
        self
    }

    /// Starts the server and waits until it is ready.
    #[track_caller]
    pub fn start(self) -> Server {
        let mut server = self.launch();
        server.wait_notified("READY=1");
        server
    }

    /// Starts the server without waiting.
    pub fn launch(self) -> Server {
        self.launch_in(Directory::new(), &[])
    }

    /// Starts the server in an existing directory and passes it these open sockets (`LISTEN_FDS`), as a service manager
    /// does; does not wait.
    pub fn launch_in(self, directory: Directory, sockets: &[OwnedFd]) -> Server {
        for (path, contents) in &self.files {
            directory.write(path, contents);
        }
        for (path, contents) in &self.templates {
            directory.write(path, directory.replaced(contents));
        }
        for (target, path) in &self.links {
            std::os::unix::fs::symlink(target, directory.path().join(path)).expect("a link");
        }
        directory.write("gale.conf", directory.replaced(&self.configuration));
        let notify = directory.notify_socket();
        let child = self.command(&directory, sockets).spawn().expect("the binary starts");
        Server { directory, child, status: None, notify }
    }

    /// The command that starts the binary with `-c` in this directory. Standard error goes to the file `stderr` there.
    fn command(&self, directory: &Directory, sockets: &[OwnedFd]) -> Command {
        processes::adopt_orphans();
        let mut command = match sockets {
            [] => binary(self.is_unprivileged),
            _ => activated(sockets),
        };
        if sockets.is_empty() {
            command.arg0(self.program);
        }
        if let Some(umask) = self.umask {
            let set_umask = move || {
                rustix::process::umask(umask.into());
                Ok(())
            };
            // SAFETY: it makes one system call.
            unsafe { command.pre_exec(set_umask) };
        }
        if self.may_leave_core_files {
            let limit = getrlimit(Resource::Core);
            let raise = move || Ok(setrlimit(Resource::Core, Rlimit { current: limit.maximum, ..limit })?);
            // SAFETY: as above.
            unsafe { command.pre_exec(raise) };
        }
        command.arg("-c").arg(directory.path().join("gale.conf"));
        for word in &self.arguments {
            command.arg(directory.replaced(word.to_str().expect("arguments of tests are text")));
        }
        command
            .env("NOTIFY_SOCKET", directory.path().join("notify"))
            .envs(self.environment.iter().cloned())
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(directory.create("stdout"))
            .stderr(directory.create("stderr"));
        command
    }
}

/// The complete configuration around the contents of an http block.
pub fn http_configuration(driver: Driver, text: &str) -> String {
    configuration(
        driver,
        &format!("http {{\n access_log %DIR%/access.log;\n client_body_temp_path %DIR%/body;\n{text}\n}}"),
    )
}

/// The complete configuration around the contents of a stream block.
pub fn stream_configuration(driver: Driver, text: &str) -> String {
    configuration(driver, &format!("stream {{\n{text}\n}}").replace("%LOG%", "access_log %DIR%/access.log line;"))
}

/// The complete configuration around these blocks.
pub fn configuration(driver: Driver, blocks: &str) -> String {
    // Workers inherit only the variables that are named.
    let environment =
        if std::env::var_os("GALE_TEST_KERNEL_MAX").is_some() { "env GALE_TEST_KERNEL_MAX;\n" } else { "" };
    format!(
        "{environment}daemon off;
worker_processes 2;
pid %DIR%/pid;
error_log %DIR%/error.log info;
events {{
    use {driver};
    worker_connections 128;
}}
{blocks}
",
        driver = driver.name(),
    )
}

/// The binary under test. Another user runs it through a descriptor, because that user may lack permission to walk to
/// the build directory.
pub fn binary(is_unprivileged: bool) -> Command {
    const PATH: &str = env!("CARGO_BIN_EXE_gale");
    if !(is_unprivileged && is_root()) {
        return Command::new(PATH);
    }
    static BINARY: std::sync::OnceLock<File> = std::sync::OnceLock::new();
    let file = BINARY.get_or_init(|| File::open(PATH).expect("the binary is built"));
    let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    command.uid(NOBODY).gid(NOBODY);
    command
}

/// The binary under test with these sockets at descriptors 3 and up. `LISTEN_PID` is its process number, so a shell
/// sets the variable and then executes the binary.
fn activated(sockets: &[OwnedFd]) -> Command {
    /// Higher than any descriptor in use here.
    const APART: i32 = 200;
    let numbers: Vec<i32> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
    let mut command = Command::new("sh");
    command.arg("-c").arg("LISTEN_PID=${LISTEN_PID-$$}; export LISTEN_PID; exec \"$@\"").arg("sh");
    command.arg(env!("CARGO_BIN_EXE_gale")).env("LISTEN_FDS", sockets.len().to_string());
    let place = move || {
        // First move the descriptors out of each other's way.
        let apart: Vec<i32> =
            // SAFETY: `fcntl` and `dup2` only change the new process's own table of descriptors.
            numbers.iter().map(|number| unsafe { libc::fcntl(*number, libc::F_DUPFD_CLOEXEC, APART) }).collect();
        for (number, from) in (3..).zip(apart) {
            // SAFETY: as above.
            if unsafe { libc::dup2(from, number) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes these calls and allocates a vector, which the C library allows after a
    // fork.
    unsafe { command.pre_exec(place) };
    command
}

/// A running server.
pub struct Server {
    pub directory: Directory,
    child: Child,
    status: Option<ExitStatus>,
    notify: std::os::unix::net::UnixDatagram,
}

impl Server {
    /// Starts a server on `%UNIX%` with this text in its block.
    #[track_caller]
    pub fn start(driver: Driver, text: &str) -> Server {
        Setup::server(driver, text).start()
    }

    /// Connects to `%UNIX%`.
    #[track_caller]
    pub fn connect(&self) -> Client {
        Client::unix(&self.directory.path().join("gale.sock"))
    }

    /// Connects to `%TCP%`, `%TCP2%` or `%TCP3%`, numbered from 1.
    #[track_caller]
    pub fn connect_tcp(&self, number: usize) -> Client {
        Client::tcp(self.directory.address(number))
    }

    /// Requests `path` on a new connection to `%UNIX%`.
    #[track_caller]
    pub fn get(&self, path: &str) -> Response {
        self.connect().get(path)
    }

    /// Process number of the started process: the master, unless it became a daemon.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Process number of the master, from the pid file.
    #[track_caller]
    pub fn pid_in_file(&self) -> Pid {
        let text = self.directory.read("pid");
        Pid::from_raw(text.trim_end().parse().expect("a number")).expect("positive")
    }

    /// Process number of the worker. (The helper of a reload may end shortly after the reload.)
    #[track_caller]
    pub fn worker(&self) -> Pid {
        let mut children = children_of(self.pid_in_file());
        let is_worker = |line: String| !line.is_empty() && !line.contains(": reload helper");
        children.retain(|child| is_worker(processes::command_line(*child)));
        match children.as_slice() {
            [worker] => *worker,
            _ => panic!("one worker process, not {children:?}\n{self}"),
        }
    }

    /// Runs `act` while the worker process is stopped, so that the worker sees all effects at once.
    #[track_caller]
    pub fn with_worker_stopped(&self, act: impl FnOnce()) {
        let worker = self.worker();
        rustix::process::kill_process(worker, Signal::STOP).expect("it runs");
        processes::wait_stopped(worker);
        act();
        rustix::process::kill_process(worker, Signal::CONT).expect("it is there");
    }

    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it runs");
    }

    /// Writes a new configuration and signals the master; returns when the reload has succeeded or failed.
    #[track_caller]
    pub fn reload(&mut self, configuration: &str) {
        self.begin_reload(configuration);
        self.wait_reloaded();
    }

    /// Writes a new configuration and signals the master.
    #[track_caller]
    pub fn begin_reload(&self, configuration: &str) {
        self.directory.write("gale.conf", self.directory.replaced(configuration));
        rustix::process::kill_process(self.pid_in_file(), Signal::HUP).expect("it runs");
    }

    /// Waits until the reload has succeeded or failed.
    #[track_caller]
    pub fn wait_reloaded(&mut self) {
        self.wait_notified("RELOADING=1");
        self.wait_notified("READY=1");
    }

    /// [`Server::reload`] with the contents of the http block.
    #[track_caller]
    pub fn reload_http(&mut self, driver: Driver, text: &str) {
        self.reload(&http_configuration(driver, text));
    }

    /// Waits until the service manager has received a message with this beginning.
    #[track_caller]
    pub fn wait_notified(&mut self, beginning: &str) {
        let end = Instant::now() + DEADLINE;
        let mut heard = [0; 256];
        // The wait ends when the server fails.
        let process = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty()).ok();
        loop {
            while let Ok(length) = self.notify.recv(&mut heard) {
                if heard[..length].starts_with(beginning.as_bytes()) {
                    return;
                }
            }
            let is_daemon = self.directory.try_read("gale.conf").is_some_and(|text| text.contains("daemon on;"));
            let process = process.as_ref().filter(|_| !is_daemon);
            let in_time = directory::wait_readable_any(&self.notify, process, end);
            let is_news = directory::is_readable(&self.notify) || !process.is_some_and(directory::is_readable);
            assert!(in_time && is_news, "no {beginning}\n{self}");
        }
    }

    /// Polls for a condition that no file in the server's directory itself reveals.
    #[track_caller]
    pub fn look_until(&self, what: &str, mut is_true: impl FnMut() -> bool) {
        let end = Instant::now() + DEADLINE;
        while !is_true() {
            assert!(Instant::now() < end, "no {what} in time: {self}");
            std::thread::yield_now();
        }
    }

    /// Waits for a line of `error.log` that contains `text`, and returns it. Earlier lines count.
    #[track_caller]
    pub fn wait_logged(&self, text: &str) -> String {
        self.directory.wait_line("error.log", text)
    }

    /// Waits until this number of lines in `error.log` contain `text`.
    #[track_caller]
    pub fn wait_logged_times(&self, text: &str, times: usize) {
        self.directory.wait_until(&format!("{times} lines with \"{text}\" in error.log"), |directory| {
            let log = directory.try_read("error.log").unwrap_or_default();
            log.lines().filter(|line| line.contains(text)).count() >= times
        });
    }

    /// The error log so far.
    pub fn log(&self) -> String {
        self.directory.try_read("error.log").unwrap_or_default()
    }

    /// The server's standard error so far.
    pub fn stderr(&self) -> String {
        self.directory.read("stderr")
    }

    /// Waits until the started process has ended.
    #[track_caller]
    pub fn wait_exited(&mut self) -> ExitStatus {
        if let Some(status) = self.status {
            return status;
        }
        assert!(processes::wait_ended(self.pid()), "still running\n{self}");
        let status = self.child.wait().expect("it has ended");
        self.status = Some(status);
        status
    }

    /// Stops the server with SIGTERM. Asserts that it succeeds, leaves nothing behind, and logged no failure before.
    #[track_caller]
    pub fn stop(mut self) {
        let log = self.log();
        let is_wrong = |line: &&str| ["[alert]", "[emerg]", "panicked"].iter().any(|mark| line.contains(mark));
        let wrong: Vec<&str> = log.lines().filter(is_wrong).collect();
        assert!(wrong.is_empty(), "{}\n{self}", wrong.join("\n"));
        self.end(Signal::TERM);
    }

    /// Stops the server with this signal. Asserts that it succeeds and leaves nothing behind.
    #[track_caller]
    pub fn end(&mut self, signal: Signal) {
        self.signal(signal);
        let status = self.wait_exited();
        assert!(status.success(), "{status}\n{self}");
        self.assert_nothing_left();
    }

    /// Asserts that no process, pid file or socket file is left.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let left = processes::wait_none_left(self.directory.path());
        assert!(left.is_empty(), "left running: {left:?}\n{self}");
        for name in ["pid", "gale.sock"] {
            assert!(!self.directory.path().join(name).exists(), "{name} is left\n{self}");
        }
    }
}

/// Everything that helps to explain a failed test.
impl std::fmt::Display for Server {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for name in ["gale.conf", "stderr", "error.log"] {
            let text = self.directory.try_read(name).unwrap_or_default();
            writeln!(formatter, "---- {name} ----\n{text}")?;
        }
        Ok(())
    }
}

impl Drop for Server {
    /// Tests stop their server themselves; this cleans up after failed ones.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read(self.directory.path().join("error.log")).unwrap_or_default();
            eprintln!("the server's error log:\n{}", String::from_utf8_lossy(&log));
        }
        processes::kill_all(self.directory.path());
    }
}
