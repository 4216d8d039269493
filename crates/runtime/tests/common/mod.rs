//! Shared by the tests, for the driver that the program names in `DRIVER`: a loop in virtual time, temporary
//! directories, pairs of connected sockets.
#![allow(dead_code, unused_imports)]

#[path = "../../../../tests/shared/skips.rs"]
mod skips;

use std::fs::FileTimes;
use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use gale_runtime::*;
pub use skips::skip;

/// Kernels with features that the ring uses; each run lacks those of later ones. The last one is the newest in use.
const KERNELS: &[&str] = &["5.13", "5.15", "5.17", "5.18", "5.19", "6.0", "6.1", "6.6", "6.15", "6.17"];

/// Runs this test program again for each of the older kernels, with a ring as it would be there, limited to tests whose
/// names contain one of these words. Tests that need a newer kernel do not count as skipped.
pub fn run_as_on_older_kernels(words: &[&str]) {
    const KERNEL_MAX: &str = "GALE_TEST_KERNEL_MAX";
    if std::env::var_os(KERNEL_MAX).is_some() {
        return;
    }
    for kernel in KERNELS {
        let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
        let output = tests.env(KERNEL_MAX, kernel).env_remove("GALE_SKIPS").args(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with what {kernel} has:\n{text}");
        assert!(!text.contains("running 0 tests"), "{text}");
    }
}

/// True if a ring has the features of this version of Linux; tests of their details need them.
pub fn kernel_has(major: u16, minor: u16) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    let version: (u16, u16) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let version = RingOptions::default().kernel_max.map_or(version, |max| version.min(max));
    let has = event_loop(simulated_time()).driver_name() == "io_uring" && version >= (major, minor);
    if !has {
        skip(format!("needs the io_uring of Linux {major}.{minor}"));
    }
    has
}

/// Real time, with this program's driver.
pub fn options() -> LoopOptions {
    LoopOptions { driver: crate::DRIVER, ..LoopOptions::default() }
}

/// Virtual time, with this program's driver.
pub fn simulated_time() -> LoopOptions {
    LoopOptions { driver: crate::DRIVER, ..LoopOptions::simulated_time() }
}

/// A loop with the requested driver, if the kernel supports it.
pub fn event_loop(options: LoopOptions) -> EventLoop {
    let event_loop = EventLoop::new(options).unwrap();
    if let Some(reason) = event_loop.driver_reason() {
        eprintln!("epoll is tested in place of io_uring: {reason}");
    }
    event_loop
}

/// Runs `main` on a loop of its own in virtual time.
pub fn run<T>(main: impl Future<Output = T>) -> T {
    event_loop(simulated_time()).run(main)
}

/// The same on a loop that survives panics of tasks, like a server's.
pub fn run_with_panics<T>(main: impl Future<Output = T>) -> T {
    event_loop(LoopOptions { survives_panics: true, ..simulated_time() }).run(main)
}

/// Runs `main` on a loop of its own in real time, for peers in other threads.
pub fn run_real<T>(main: impl Future<Output = T>) -> T {
    event_loop(options()).run(main)
}

/// A temporary directory, removed when the value is dropped.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        // A program may include this module several times, each with a count of its own.
        let module = module_path!().replace("::", "-");
        let path = std::env::temp_dir().join(format!("gale-runtime-{module}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().write_all(content).unwrap();
        path
    }

    /// The same for a file whose next reads do not update its access time.
    pub fn file_read_before(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.file(name, content);
        set_accessed(&path, SystemTime::now() + Duration::from_secs(3600));
        path
    }
}

pub fn set_accessed(path: &Path, time: SystemTime) {
    std::fs::File::open(path).unwrap().set_times(FileTimes::new().set_accessed(time)).unwrap();
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn any_port() -> SocketAddress {
    SocketAddress::Inet("127.0.0.1:0".parse().unwrap())
}

/// Both ends of a TCP connection, the accepted one first.
pub async fn tcp_pair() -> (Stream, Stream) {
    let listener = Listener::bind(&any_port(), 16, AcceptOptions::default()).unwrap();
    let client = Stream::connect(&listener.local_address().unwrap()).await.unwrap();
    let (server, _) = listener.accept().await.unwrap();
    (server, client)
}

pub fn unix_pair() -> (Stream, Stream) {
    let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
    (Stream::from_fd(a.into()).unwrap(), Stream::from_fd(b.into()).unwrap())
}

pub async fn send(stream: &Stream, bytes: &'static [u8]) {
    let mut output = Output::new();
    output.push(bytes);
    stream.send_all(&mut output).await.unwrap();
}

pub async fn receive(stream: &Stream, length: usize) -> Vec<u8> {
    let mut input = Buffer::new();
    while input.len() < length {
        let missing = length - input.len();
        assert_ne!(stream.recv(&mut input, missing).await.unwrap(), 0, "the stream ended early");
    }
    input.readable().to_vec()
}

/// Yields for this many turns of the loop, so that submitted operations can complete.
pub async fn turns(count: u32) {
    for _ in 0..count {
        yield_now().await;
    }
}

/// Polls a future once and returns the result.
pub async fn poll_once<F: Future + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx))).await
}

/// A pattern that reveals lost, duplicated or misplaced bytes.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}
