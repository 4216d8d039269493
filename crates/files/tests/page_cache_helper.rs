//! The page cache helper in a process of its own, and loops that ask it.

use std::future::poll_fn;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use gale_files::{self as files, CachedRead, File, ReadHow, file_counters};
use gale_runtime::{EventLoop, LoopOptions, ThreadPool};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Set in the helper's process.
const ROLE: &str = "GALE_TEST_ANSWERS";

#[path = "../../../tests/shared/skips.rs"]
mod skips;
use skips::skip;

const LENGTH: usize = 300_000;

fn main() {
    if std::env::var_os(ROLE).is_some() {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let error = files::serve_page_cache_questions(&socket).unwrap_err();
        panic!("{error}");
    }
    if !can_be_told() {
        skip("the kernel does not tell what of a file is in memory here");
        return println!("test result: ok. 0 passed; 0 failed");
    }
    let (ours, theirs) = pair();
    let mut helper = Helper::start(theirs.try_clone().unwrap());
    files::use_page_cache_helper(ours).unwrap();
    helper_reports_pages_in_memory();
    helper_that_dies_loses_no_read(&mut helper);
    helper_that_is_started_again_answers_on_the_same_socket(theirs);
    println!("test result: ok. 3 passed; 0 failed");
}

fn pair() -> (OwnedFd, OwnedFd) {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

struct Helper(Child);

impl Helper {
    fn start(socket: OwnedFd) -> Helper {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Helper(command.env(ROLE, "1").stdin(Stdio::from(socket)).spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A file in memory whose reads do not update its access time.
fn file_in_memory() -> File {
    let path = std::env::temp_dir().join(format!("gale-helper-{}", std::process::id()));
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&[b'x'; LENGTH]).unwrap();
    let read_at = SystemTime::now() + Duration::from_secs(3600);
    file.set_times(std::fs::FileTimes::new().set_accessed(read_at)).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    File::from_std(file).unwrap()
}

/// True if a file that was just written can be read without waiting: not on every file system.
fn can_be_told() -> bool {
    EventLoop::new(LoopOptions::default())
        .unwrap()
        .run(async { matches!(file_in_memory().look(0, 4096).unwrap(), CachedRead::Found(_)) })
}

/// Reads 64 KiB with unknown state, while the device is busy. True if the helper has answered, and if the rest of the
/// file may go by `sendfile` then, since the helper holds it.
fn read_unlooked(offset: u64) -> bool {
    EventLoop::new(LoopOptions::default()).unwrap().run(async {
        let file = file_in_memory();
        let nowhere = ThreadPool::new("nowhere", 1, 100);
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let task = nowhere.run(move || held.recv().is_err());
        // Four reads that wait for the only thread.
        let mut reads = Vec::new();
        for number in 0..4 {
            let mut read = file.begin_read(&nowhere, number * 1000, 1000, ReadHow::default()).unwrap();
            poll_fn(|cx| Poll::Ready(Pin::new(&mut read).poll(cx).is_pending())).await.then_some(()).unwrap();
            reads.push(read);
        }
        let before = file_counters();
        let how = ReadHow { for_sendfile: true, ..CachedRead::NotLooked.how() };
        let other = ThreadPool::new("other", 1, 100);
        let piece = file.begin_read(&other, offset, 1 << 16, how).unwrap().await.unwrap();
        assert!(piece.len() == (1 << 16) && piece.iter().all(|&byte| byte == b'x'));
        let after = file_counters();
        let rest = offset.next_multiple_of(1 << 16);
        let is_held = file.sendfile_length(rest, LENGTH as u64 - rest).unwrap() == LENGTH as u64 - rest;
        // A thread may have read it if the page was evicted or the answer was late.
        let was_told = after.resident_answers > before.resident_answers && other.counters().completed == 0;
        drop((reads, hold));
        task.await.unwrap();
        was_told && is_held
    })
}

fn helper_reports_pages_in_memory() {
    wait_for_answer(0);
    wait_for_answer(5000);
}

/// Waits until answers arrive: the helper's announcement may be late, and so may answers.
fn wait_for_answer(offset: u64) {
    let end = Instant::now() + Duration::from_secs(60);
    while !read_unlooked(offset) {
        assert!(Instant::now() < end, "no answer");
    }
}

fn helper_that_dies_loses_no_read(helper: &mut Helper) {
    helper.kill();
    assert!(!read_unlooked(0), "a thread has read it");
}

fn helper_that_is_started_again_answers_on_the_same_socket(socket: OwnedFd) {
    let _helper = Helper::start(socket);
    wait_for_answer(0);
}
