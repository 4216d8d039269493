//! Log files of the worker process: opened again when the loops have written what they had gathered for the old ones.
//!
//! The master sends the files opened, because this process may not be allowed to; without a master, or on a signal of
//! its own, it opens what it may.

use gale_base::log_level::Level;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::event_loops::{Loop, LoopPhase};
use super::reload::Reload;
use super::{Control, Origin};
use crate::errors::errno_text;
use crate::link::Message;
use crate::log_file::{self, LogHandle};
use crate::loops::Order;
use crate::program::Program;

/// How long a change of log files waits for loops that still hold lines for the old ones.
const LOOPS_REOPEN_TIMEOUT: Duration = Duration::from_millis(500);
/// How long this process waits before it asks once more for logs that it had no descriptors for.
pub(super) const ASK_FOR_LOGS_PAUSE: Duration = Duration::from_secs(1);

/// Log files are about to change; the loops write out what they have gathered first.
pub(super) struct Reopening {
    pub waiting: BTreeSet<u64>,
    pub until: Instant,
    pub logs: Reopened,
}

/// Who opens the files.
pub(super) enum Reopened {
    /// This process, as far as it may.
    Here,
    ByMaster(Vec<(PathBuf, OwnedFd)>),
}

impl<P: Program> Control<P> {
    pub(super) fn begin_reopening(&mut self, logs: Reopened) {
        self.log.write(Level::Notice, "reopening logs");
        if let (Origin::Single(_), Some(Reload::Building { .. })) = (&self.origin, &self.reload) {
            self.reopen_wanted = true; // what the builder has opened meanwhile is not known yet
        }
        let logs = match (self.reopening.take().map(|earlier| earlier.logs), logs) {
            (Some(Reopened::ByMaster(mut earlier)), Reopened::ByMaster(logs)) => {
                earlier.extend(logs);
                Reopened::ByMaster(earlier)
            }
            (Some(Reopened::ByMaster(earlier)), Reopened::Here) => {
                // What we may not be able to open ourselves.
                self.replace_logs(earlier);
                Reopened::Here
            }
            (_, logs) => logs,
        };
        let has_taken = |each: &&Loop<_>| each.phase != LoopPhase::Stopping && each.handle.order(Order::Reopen);
        let waiting = self.loops.iter().filter(has_taken).map(|each| each.id).collect();
        self.reopening = Some(Reopening { waiting, until: Instant::now() + LOOPS_REOPEN_TIMEOUT, logs });
        self.check_reopening(None);
    }

    /// Every loop has written out what it had, or is stuck: now the files change.
    pub(super) fn check_reopening(&mut self, reopened: Option<u64>) {
        let Some(reopening) = &mut self.reopening else {
            return;
        };
        if let Some(id) = reopened {
            reopening.waiting.remove(&id);
        }
        if (reopening.waiting.is_empty() || reopening.until <= Instant::now())
            && let Some(reopening) = self.reopening.take()
        {
            match reopening.logs {
                Reopened::Here => self.reopen_logs(),
                Reopened::ByMaster(logs) => self.replace_logs(logs),
            }
            self.redirect_standard_error();
        }
    }

    /// A signal of our own, without the master's help: what we may open ourselves.
    fn reopen_logs(&mut self) {
        let paths: BTreeSet<PathBuf> = self.open_logs().map(|log| log.path().to_owned()).collect();
        for path in paths {
            match log_file::reopen(&path, None) {
                Ok(descriptor) => self.replace_log(&path, &descriptor),
                Err(message) => self.log.write(Level::Emerg, &message),
            }
        }
    }

    /// Those of the configuration, and of the one that is under way.
    fn open_logs(&self) -> impl Iterator<Item = &LogHandle> {
        let coming = match &self.reload {
            Some(Reload::Building { logs, .. }) => logs.as_slice(),
            Some(Reload::Growing { bundle, .. }) => &bundle.record.logs,
            Some(Reload::Committing { .. }) | None => &[],
        };
        self.bundle.record.logs.iter().chain(coming)
    }

    fn replace_logs(&self, logs: Vec<(PathBuf, OwnedFd)>) {
        logs.iter().for_each(|(path, descriptor)| self.replace_log(path, descriptor));
    }

    fn replace_log(&self, path: &Path, descriptor: &OwnedFd) {
        for log in self.open_logs().filter(|log| log.path() == path) {
            if let Err(error) = log.replace(descriptor) {
                self.log.write(Level::Alert, &format!("dup3() \"{}\" failed{}", path.display(), errno_text(&error)));
            }
        }
    }

    pub(super) fn check_lost_logs(&mut self) {
        if self.ask_for_logs_at.is_some_and(|at| at <= Instant::now()) {
            self.ask_for_logs_at = None;
            self.tell_master(&Message::ReopenAgain);
        }
    }

    pub(super) fn redirect_standard_error(&self) {
        if let Some(file) = self.bundle.standard_error()
            && let Err(error) = rustix::stdio::dup2_stderr(&*file)
        {
            self.log.write(Level::Alert, &format!("dup2(STDERR) failed{}", errno_text(&error.into())));
        }
    }
}
