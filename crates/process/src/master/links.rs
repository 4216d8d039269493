//! The links of the master: receives messages of the worker processes and of the reload helper, and finds lost links.
//!
//! All pending messages are read before any is handled, because handling one may end the process that sent it.

use gale_base::log_level::Level;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::Master;
use super::reload::Reload;
use crate::link::{Link, Message, Received};
use crate::program::Program;

/// Time that a process may take to exit after it has closed its link; one that still lives then is replaced.
const LOST_GRACE: Duration = Duration::from_secs(1);

/// A message or an error that was read from a link, in order of arrival.
enum Heard {
    Worker(Pid, io::Result<Received>),
    Helper(io::Result<Received>),
}

impl<P: Program> Master<P> {
    pub(super) fn handle_links(&mut self) {
        for heard in self.hear() {
            match heard {
                Heard::Worker(pid, Ok(received)) => self.handle_worker(pid, received),
                Heard::Worker(pid, Err(error)) => self.handle_lost(pid, &error),
                Heard::Helper(Ok(received)) => self.handle_helper(received),
                // SIGCHLD reports the exit; the helper removes the files of sockets that it opened before it exits.
                Heard::Helper(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                Heard::Helper(Err(error)) => {
                    self.log.write(Level::Alert, &format!("the link to the reload helper was lost: {error}"));
                }
            }
        }
    }

    fn hear(&mut self) -> VecDeque<Heard> {
        let mut heard = VecDeque::new();
        for worker in &mut self.workers {
            let Some(link) = &mut worker.link else {
                continue;
            };
            let result = drain(link, |received| heard.push_back(Heard::Worker(worker.pid, Ok(received))));
            if let Err(error) = result {
                worker.link = None;
                worker.replace_at = Some(Instant::now() + LOST_GRACE);
                heard.push_back(Heard::Worker(worker.pid, Err(error)));
            }
        }
        if let Some(Reload::Helping { link: maybe_link, .. }) = &mut self.reload
            && let Some(link) = maybe_link
        {
            let result = drain(link, |received| heard.push_back(Heard::Helper(Ok(received))));
            if let Err(error) = result {
                *maybe_link = None;
                heard.push_back(Heard::Helper(Err(error)));
            }
        }
        heard
    }

    fn handle_worker(&mut self, pid: Pid, received: Received) {
        let Received::Message(message) = received else {
            return self.log.write(Level::Alert, &format!("unexpected bundle from worker process {pid}"));
        };
        match message {
            Message::Ready { .. } => self.handle_ready(pid),
            Message::Prepared { generation } => self.handle_prepared(pid, generation),
            Message::Committed { .. } => self.handle_committed(pid),
            Message::Refused { report, .. } => self.handle_refused(pid, report),
            Message::Log { level, message } => self.log.write(level, &message),
            Message::Leaving => self.handle_leaving(pid),
            Message::AcceptingEnded => self.handle_accepting_ended(pid),
            Message::Ending => self.handle_ending(pid),
            Message::ReopenAgain => self.send_logs_again(pid),
            _ => self.log.write(Level::Alert, &format!("unexpected message from worker process {pid}")),
        }
    }

    /// Handles an unusable link. An exited process is handled by SIGCHLD, a living one that closed its link by
    /// `replace_lost`. A process that sends invalid messages is terminated.
    fn handle_lost(&mut self, pid: Pid, error: &io::Error) {
        if matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
        ) {
            return;
        }
        self.log.write(Level::Alert, &format!("the link to worker process {pid} was lost: {error}"));
        self.kill(pid, rustix::process::Signal::TERM);
    }
}

/// Reads all pending messages, including those before an error.
fn drain(link: &mut Link, mut hear: impl FnMut(Received)) -> io::Result<()> {
    let flushed = link.flush();
    while let Some(received) = link.receive()? {
        hear(received);
    }
    flushed
}
