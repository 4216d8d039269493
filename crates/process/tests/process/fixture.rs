//! A server under test: its directory, process, log, and messages to the service manager. Every wait has a deadline and
//! polls a descriptor.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

/// Long enough for a debug build on a busy machine; only a failed test waits that long.
const DEADLINE: Duration = Duration::from_secs(120);

pub struct Server {
    pub directory: PathBuf,
    child: Child,
    log: File,
    log_text: String,
    notify: UnixDatagram,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub pid: i32,
    pub worker: usize,
    pub text: String,
}

impl Server {
    /// Starts a toy with this configuration in a directory of its own and waits until it is ready.
    pub fn start(configuration: &str) -> Server {
        let mut server = Server::launch(configuration);
        server.wait_notified("READY=1");
        server
    }

    /// Starts a toy without waiting until it is ready.
    pub fn launch(configuration: &str) -> Server {
        Server::launch_with(configuration, |_| {})
    }

    /// Starts a toy in a process that `prepare` has changed.
    pub fn launch_with(configuration: &str, prepare: impl FnOnce(&mut Command)) -> Server {
        let directory = new_directory();
        let notify = UnixDatagram::bind(directory.join("notify")).expect("a socket");
        notify.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let log_path = directory.join("error.log");
        // A FIFO can be polled; a file would have to be read repeatedly.
        make_fifo(&log_path);
        let log = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&log_path).expect("open");
        rustix::fs::chmod(&directory, 0o777.into()).expect("shared with the worker's user");
        write_configuration(&directory, configuration);
        let mut command = Command::new(std::env::current_exe().expect("our path"));
        command
            .arg("--toy")
            .arg(directory.join("conf"))
            .env("NOTIFY_SOCKET", directory.join("notify"))
            .stderr(Stdio::piped());
        prepare(&mut command);
        let child = command.spawn().expect("started");
        Server { directory, child, log, log_text: String::new(), notify }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Returns the only process that the master has besides `worker`.
    pub fn helper(&self, worker: i32) -> i32 {
        let master = self.pid();
        let children = fs::read_to_string(format!("/proc/{master}/task/{master}/children")).expect("it runs");
        let number = |word: &str| word.parse().expect("a number");
        children.split_whitespace().map(number).find(|pid| *pid != worker).expect("a helper")
    }

    /// Creates a FIFO in the server's directory, for `waits_open`.
    pub fn new_fifo(&self) -> PathBuf {
        let path = self.directory.join("fifo");
        make_fifo(&path);
        path
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it runs");
    }

    /// Writes another configuration and signals the master; returns when the reload has succeeded or failed.
    pub fn reload(&mut self, configuration: &str) {
        self.begin_reload(configuration);
        self.wait_notified("READY=1");
    }

    /// Starts a reload without waiting for its end.
    pub fn begin_reload(&mut self, configuration: &str) {
        write_configuration(&self.directory, configuration);
        self.signal(Signal::HUP);
        self.wait_notified("RELOADING=1");
    }

    /// Waits until the service manager has received a message that starts with `beginning`.
    pub fn wait_notified(&mut self, beginning: &str) {
        let mut heard = [0; 256];
        loop {
            let Ok(length) = self.notify.recv(&mut heard) else {
                self.read_log();
                let mut text = String::new();
                if let Ok(Some(_)) = self.child.try_wait() {
                    self.child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
                }
                panic!("no {beginning} in time; log:\n{}\nstderr:\n{text}", self.log_text);
            };
            if heard[..length].starts_with(beginning.as_bytes()) {
                return;
            }
        }
    }

    /// Waits for a line of the log that contains `text`, and returns it. Earlier lines count.
    pub fn wait_logged(&mut self, text: &str) -> String {
        self.wait_line(text, |line| line.contains(text))
    }

    /// Waits for the start of a worker process other than this one, and returns its pid.
    pub fn wait_started_after(&mut self, pid: i32) -> i32 {
        let number = |line: &str| line.split_once("start worker process ")?.1.parse::<i32>().ok();
        let line = self.wait_line("new worker process", |line| number(line).is_some_and(|started| started != pid));
        number(&line).expect("it was one")
    }

    fn wait_line(&mut self, wanted: &str, is_it: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + DEADLINE;
        loop {
            self.read_log();
            if let Some(line) = self.log_text.lines().find(|line| is_it(line)) {
                return line.to_owned();
            }
            assert!(wait_readable(&self.log, end), "no \"{wanted}\" in time in the log:\n{}", self.log_text);
        }
    }

    pub fn logged(&mut self) -> &str {
        self.read_log();
        &self.log_text
    }

    fn read_log(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = self.log.read(&mut bytes) {
            self.log_text.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
    }

    pub fn wait_exited(&mut self) -> ExitStatus {
        let handle = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty()).expect("a pidfd");
        let exited = wait_readable(&handle, Instant::now() + DEADLINE);
        assert!(exited, "still running; log:\n{}", self.logged());
        self.child.wait().expect("it has ended")
    }

    pub fn stderr(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
        text
    }

    /// Returns the addresses that the worker listens on.
    pub fn addresses(&self) -> Vec<String> {
        let text = fs::read_to_string(self.directory.join("addresses")).expect("written before it was ready");
        text.lines().map(str::to_owned).collect()
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.addresses()[0])
    }

    /// Opens a connection, sends a line, and closes it.
    pub fn ask(&self) -> Answer {
        self.connect().ask("x")
    }

    pub fn pid_in_file(&self) -> Pid {
        let text = fs::read_to_string(self.directory.join("pid")).expect("a pid file");
        Pid::from_raw(text.trim_end().parse().expect("a number")).expect("positive")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // Tests stop their server; this is for failed ones.
            let _ = rustix::process::kill_process(self.pid(), Signal::TERM);
            let handle = rustix::process::pidfd_open(self.pid(), PidfdFlags::empty());
            let gone = handle.is_ok_and(|handle| wait_readable(&handle, Instant::now() + DEADLINE));
            if !gone {
                let _ = self.child.kill();
            }
            let _ = self.child.wait();
        }
        // A failed test may leave a daemon; a pid that has been reused is not signalled.
        for name in ["pid", "pid.oldbin"] {
            let text = fs::read_to_string(self.directory.join(name)).unwrap_or_default();
            let pid = text.trim_end().parse().ok().and_then(Pid::from_raw);
            let ours = self.directory.display().to_string();
            let is_ours = |pid: &Pid| {
                fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&ours))
            };
            if let Some(pid) = pid.filter(is_ours) {
                let _ = rustix::process::kill_process(pid, Signal::TERM);
            }
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A connection that stays open.
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    pub fn connect(address: &str) -> Client {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        Client { stream: BufReader::new(stream) }
    }

    pub fn ask(&mut self, line: &str) -> Answer {
        let text = self.say(line);
        let mut words = text.trim_end().splitn(3, ' ');
        let mut word = || words.next().unwrap_or_else(|| panic!("an answer, not {text:?}")).to_owned();
        Answer { pid: word().parse().expect("pid"), worker: word().parse().expect("worker"), text: word() }
    }

    /// Sends a line; returns the line of the answer, empty if the connection was closed.
    pub fn say(&mut self, line: &str) -> String {
        self.send(line);
        let mut text = String::new();
        let _ = self.stream.read_line(&mut text);
        text
    }

    pub fn send(&mut self, line: &str) {
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).expect("sent");
    }

    /// Waits until the server has closed the connection.
    pub fn wait_closed(&mut self) {
        let mut text = String::new();
        match self.stream.read_line(&mut text) {
            Ok(0) => {}
            Ok(_) => panic!("an unexpected line: {text}"),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "closed in time"),
        }
    }
}

pub fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o666.into(), 0).expect("a FIFO");
}

/// True if a process exits before the deadline.
pub fn ends(pid: Pid) -> bool {
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => wait_readable(&handle, Instant::now() + DEADLINE),
        Err(_) => true,
    }
}

pub fn new_directory() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir().join(format!("gale-process-{}-{number}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    directory
}

/// `DIR` in a configuration stands for its directory; pid, log and the file of addresses are always set.
fn write_configuration(directory: &Path, configuration: &str) {
    let common = "pid DIR/pid\nerror_log DIR/error.log\naddresses DIR/addresses\n";
    let text = format!("{common}{configuration}").replace("DIR", &directory.display().to_string());
    fs::write(directory.join("conf"), text).expect("written");
}

fn wait_readable(descriptor: &impl AsFd, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    rustix::event::poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
}
