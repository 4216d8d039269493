//! The page cache helper of each worker process: started with it, and restarted when it dies.
//!
//! The master keeps the helper's end of the socket pair, so that a new helper uses the same one. The helper exits by
//! itself when the worker process is gone.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use gale_base::log_level::Level;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, WaitStatus};

use super::Master;
use crate::bundle::Bundle;
use crate::errors::errno_text;
use crate::program::Program;
use crate::spawn::Executable;
use crate::user::Account;

/// Pause before a helper that lived for less than this pause is restarted; doubled each time.
const RESTART_PAUSE_MIN: Duration = Duration::from_secs(1);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(600);

pub(super) struct PageCacheHelper {
    pub pid: Option<Pid>,
    pub restart_at: Option<Instant>,
    since: Instant,
    pause: Duration,
    socket: OwnedFd,
    program: String,
    account: Option<Account>,
}

impl PageCacheHelper {
    /// Starts a helper. Returns it with the worker process's end of the socket pair.
    pub fn start(executable: &Executable, bundle: &Bundle) -> io::Result<(PageCacheHelper, OwnedFd)> {
        let (socket, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let pause = RESTART_PAUSE_MIN;
        let (program, account) = (bundle.request.program.clone(), bundle.settings.account.clone());
        let mut helper =
            PageCacheHelper { pid: None, restart_at: None, since: Instant::now(), pause, socket, program, account };
        helper.start_again(executable)?;
        Ok((helper, theirs))
    }

    fn start_again(&mut self, executable: &Executable) -> io::Result<()> {
        let socket = self.socket.try_clone()?;
        self.pid = Some(executable.start_page_cache_helper(&self.program, self.account.as_ref(), socket)?);
        (self.since, self.restart_at) = (Instant::now(), None);
        Ok(())
    }

    /// Returns when to restart a helper that has just died: at once if it has lived for a while.
    fn restart_after_death(&mut self, now: Instant) -> Instant {
        if now - self.since >= self.pause {
            self.pause = RESTART_PAUSE_MIN;
            return now;
        }
        let at = now + self.pause;
        self.pause = (2 * self.pause).min(RESTART_PAUSE_MAX);
        at
    }
}

impl<P: Program> Master<P> {
    /// Handles the exit of a helper; `false` if the process is none.
    pub(super) fn handle_page_cache_helper_exit(&mut self, pid: Pid, status: WaitStatus) -> bool {
        let mut helpers = self.workers.iter_mut().filter_map(|worker| worker.page_cache_helper.as_mut());
        let Some(helper) = helpers.find(|helper| helper.pid == Some(pid)) else { return false };
        helper.pid = None;
        if status.exit_status() == Some(0) {
            // Its worker process is gone.
            return true;
        }
        let now = Instant::now();
        helper.restart_at = Some(helper.restart_after_death(now));
        self.log_exit("page cache helper", pid, status);
        true
    }

    pub(super) fn restart_page_cache_helpers(&mut self, now: Instant) {
        if self.stop.is_some() {
            let helpers = self.workers.iter_mut().filter_map(|worker| worker.page_cache_helper.as_mut());
            return helpers.for_each(|helper| helper.restart_at = None);
        }
        let helpers = self.workers.iter_mut().filter_map(|worker| worker.page_cache_helper.as_mut());
        for helper in helpers.filter(|helper| helper.restart_at.is_some_and(|at| at <= now)) {
            if let Err(error) = helper.start_again(&self.executable) {
                helper.restart_at = Some(now + RESTART_PAUSE_MAX);
                let text = format!("fork() failed while spawning \"page cache helper\"{}", errno_text(&error));
                self.log.write(Level::Alert, &text);
            }
        }
    }
}
