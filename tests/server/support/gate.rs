//! Tasks that block at will: the directive `test_pool` makes a thread of a pool connect to a Unix socket of the test
//! and wait there until the connection closes. So a test knows that a task has begun, and decides when it ends.

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DEADLINE, Server};

/// The socket at which a server's tasks wait.
pub struct Gate {
    listener: UnixListener,
}

/// A task that waits at the gate; it continues when this is dropped.
pub struct Task {
    stream: UnixStream,
}

impl Gate {
    /// Listens at the socket `gate` in the server's directory.
    #[track_caller]
    pub fn new(server: &Server) -> Gate {
        let path = server.directory.path().join("gate");
        let listener = UnixListener::bind(&path).expect("a socket");
        // The worker may run as another user.
        fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).expect("ours");
        listener.set_nonblocking(true).expect("an option");
        Gate { listener }
    }

    /// Accepts the next task that has begun.
    #[track_caller]
    pub fn task(&self) -> Task {
        wait_readable(&self.listener);
        let (stream, _) = self.listener.accept().expect("somebody is there");
        Task { stream }
    }

    /// `true` if no task waits at the gate.
    pub fn is_empty(&self) -> bool {
        matches!(self.listener.accept(), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }
}

impl Task {
    /// Reads the task's message: the arguments of the request.
    #[track_caller]
    pub fn says(&mut self) -> String {
        let mut text = [0; 100];
        wait_readable(&self.stream);
        let length = self.stream.read(&mut text).expect("it speaks");
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    /// Waits until the thread has ended with its process.
    #[track_caller]
    pub fn wait_closed(&mut self) {
        wait_readable(&self.stream);
        assert_eq!(self.stream.read(&mut [0]).expect("closed by the kernel"), 0);
    }
}

#[track_caller]
fn wait_readable(descriptor: &impl AsFd) {
    let end = Instant::now() + DEADLINE;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => panic!("no task has begun in time"),
            Ok(_) => return,
            Err(error) => assert_eq!(error, rustix::io::Errno::INTR),
        }
    }
}
