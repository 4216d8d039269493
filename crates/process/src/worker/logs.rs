//! Log files of the worker process: reopened after the loops have written the lines they had buffered for the old
//! files.
//!
//! The master sends the opened files, because this process may lack the permission. Without a master, or when signalled
//! itself, the process opens the files that it may.

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

/// Time that reopening waits for loops that still buffer lines for the old files.
const LOOPS_REOPEN_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause before this process asks again for log files that it had no free descriptors to receive.
pub(super) const ASK_FOR_LOGS_PAUSE: Duration = Duration::from_secs(1);

/// A pending change of log files, while the loops flush their buffers.
pub(super) struct Reopening {
    pub waiting: BTreeSet<u64>,
    pub until: Instant,
    pub logs: Reopened,
}

/// Source of the new files.
pub(super) enum Reopened {
    /// Opened by this process, as far as permitted.
    Here,
    ByMaster(Vec<(PathBuf, OwnedFd)>),
}

impl<P: Program> Control<P> {
    pub(super) fn begin_reopening(&mut self, logs: Reopened) {
        self.log.write(Level::Notice, "reopening logs");
        if let (Origin::Single(_), Some(Reload::Building { .. })) = (&self.origin, &self.reload) {
            self.reopen_wanted = true; // the files that the builder has opened meanwhile are not known yet
        }
        let logs = match (self.reopening.take().map(|earlier| earlier.logs), logs) {
            (Some(Reopened::ByMaster(mut earlier)), Reopened::ByMaster(logs)) => {
                earlier.extend(logs);
                Reopened::ByMaster(earlier)
            }
            (Some(Reopened::ByMaster(earlier)), Reopened::Here) => {
                // These may be files that this process cannot open itself.
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

    /// Changes the files once every loop has flushed its buffer or the timeout has passed.
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

    /// Reopens the files that this process may open, without the master's help.
    fn reopen_logs(&mut self) {
        let paths: BTreeSet<PathBuf> = self.open_logs().map(|log| log.path().to_owned()).collect();
        for path in paths {
            match log_file::reopen(&path, None) {
                Ok(descriptor) => self.replace_log(&path, &descriptor),
                Err(message) => self.log.write(Level::Emerg, &message),
            }
        }
    }

    /// Logs of the current configuration and of the one being loaded.
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
