//! Log files of the master: reopened on USR1, both for itself and for worker processes, which may lack the permission.
//!
//! The new file replaces the old one under the same descriptor number, so its users need not know. A log that cannot be
//! opened keeps the old file.

use gale_base::log_level::Level;
use std::sync::Arc;

use rustix::process::Pid;

use super::Master;
use super::reload::Reload;
use crate::errors::errno_text;
use crate::log_file::{self, LogHandle};
use crate::program::Program;
use crate::user;

impl<P: Program> Master<P> {
    pub(super) fn reopen_logs(&mut self) {
        self.log.write(Level::Notice, "reopening logs");
        if let Some(Reload::Helping { reopened, .. }) = &mut self.reload {
            *reopened = true;
        }
        let reopened = self.reopen(self.open_logs());
        let mut unreachable = Vec::new();
        for worker in &mut self.workers {
            if worker.link.as_mut().is_none_or(|link| link.send_reopened(&reopened).is_err()) {
                unreachable.push(worker.pid);
            }
        }
        for pid in unreachable {
            self.kill(pid, rustix::process::Signal::USR1);
        }
        self.redirect_standard_error();
    }

    /// Sends the log files again after the worker process had no free descriptors to receive them.
    pub(super) fn send_logs_again(&mut self, pid: Pid) {
        self.log.write(Level::Notice, &format!("sending the log files of worker process {pid} again"));
        let logs = self.open_logs();
        if let Some(link) = self.worker_mut(pid).and_then(|worker| worker.link.as_mut()) {
            // A lost link is found and logged when it is read.
            let _ = link.send_reopened(&logs);
        }
    }

    /// Logs of the current configuration and of the one being loaded.
    fn open_logs(&self) -> Vec<LogHandle> {
        let mut logs = self.bundle.record.logs.clone();
        if let Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) = &self.reload {
            let is_new = |log: &&LogHandle| !self.bundle.record.logs.iter().any(|known| Arc::ptr_eq(known, log));
            logs.extend(bundle.record.logs.iter().filter(is_new).cloned());
        }
        logs
    }

    /// Reopens log files and returns those that succeeded; failures are logged.
    pub(super) fn reopen(&self, logs: Vec<LogHandle>) -> Vec<LogHandle> {
        let owner = self.bundle.settings.account.as_ref().filter(|_| user::is_super_user()).map(|account| account.user);
        let is_reopened = |log: &LogHandle| {
            let replaced = log_file::reopen(log.path(), owner).and_then(|descriptor| {
                log.replace(&descriptor)
                    .map_err(|error| format!("dup3() \"{}\" failed{}", log.path().display(), errno_text(&error)))
            });
            replaced.inspect_err(|message| self.log.write(Level::Emerg, message)).is_ok()
        };
        logs.into_iter().filter(is_reopened).collect()
    }

    pub(super) fn redirect_standard_error(&self) {
        if let Some(file) = self.bundle.standard_error()
            && let Err(error) = rustix::stdio::dup2_stderr(&*file)
        {
            self.log.write(Level::Alert, &format!("dup2(STDERR) failed{}", errno_text(&error.into())));
        }
    }
}
