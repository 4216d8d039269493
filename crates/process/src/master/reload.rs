//! A reload in the master: a helper builds the bundle, and the worker process (or a new one) takes it over.
//!
//! ```text
//!   HUP ─► helping (helper builds) ─► preparing (worker builds) ─► committing (worker changes over) ─► done
//!                  │ refused, died         │ refused                    │ the bundle is the acknowledged one from here
//!                  └───────────────────────┴──► the old configuration serves on
//! ```
//!
//! One reload runs at a time; a signal that arrives meanwhile is remembered. A failure before the bundle is
//! acknowledged leaves the old configuration as it was.

use gale_base::log_level::Level;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit};

use super::Master;
use super::workers::{WorkerPhase, WorkerProcess};
use crate::bundle::Bundle;
use crate::control::Ending;
use crate::errors::{IN_FORCE, OLD_STAYS, Report, errno_text};
use crate::link::{Link, Message, Received};
use crate::listen::{self, OpenedBy};
use crate::program::Program;
use crate::spawn::Role;
use crate::{activation, pid_file, system};

/// Maximum run time of the reload helper: it may have to resolve names through slow servers.
const HELPER_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time for a worker process to build a new configuration: longer than its own timeout.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time for the change that follows: longer than the worker's own timeout.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Stage of a reload; see the head of the file.
pub(super) enum Reload {
    Helping {
        pid: Pid,
        /// `None` after the link was lost.
        link: Option<Link>,
        until: Instant,
        /// True if logs were reopened since the helper started, which may have opened the old files.
        reopened: bool,
    },
    Preparing {
        bundle: Box<Bundle>,
        worker: Pid,
        until: Instant,
    },
    /// Like `Preparing`, for a change that needs a new process: it starts with the bundle while the old one serves.
    Replacing {
        bundle: Box<Bundle>,
        worker: Pid,
    },
    Committing {
        worker: Pid,
        until: Instant,
    },
}

impl<P: Program> Master<P> {
    pub(super) fn reconfigure(&mut self) {
        if self.stop.is_some() {
            return self.control.refuse_all("the server is stopping\n");
        }
        // During an upgrade, HUP brings the old binary's worker back.
        if self.resting && self.new_binary.is_some() {
            self.resting = false;
            self.control.answer_waiting(Ending::Done, "the worker process is back\n");
            return self.spawn_worker();
        }
        if self.reload.is_some() || !self.serving_since_start {
            self.log.write(Level::Notice, "still busy with the previous configuration, this one follows");
            self.reload_wanted = true;
            return;
        }
        self.log.write(Level::Notice, "reconfiguring");
        self.control.reload_begins();
        self.notifier.reloading();
        let started = self.executable.start(Role::Helper, &self.bundle.request.program, &self.bundle.settings);
        let sent = started.and_then(|(pid, mut link)| {
            link.send_bundle(&self.bundle.with_unused(&self.passed))?;
            link.send(&Message::Build { request: self.bundle.request.clone() })?;
            Ok((pid, link))
        });
        match sent {
            Ok((pid, link)) => {
                let link = Some(link);
                self.reload =
                    Some(Reload::Helping { pid, link, until: Instant::now() + HELPER_TIMEOUT, reopened: false });
            }
            Err(error) => {
                self.reject(Report::new(
                    Level::Emerg,
                    format!("could not start the reload helper{}", errno_text(&error)),
                ));
            }
        }
    }

    pub(super) fn handle_helper(&mut self, received: Received) {
        match received {
            Received::Message(Message::Log { level, message }) => {
                self.control.say(&self.bundle.request.program, level, &message);
                self.log.write(level, &message);
            }
            Received::Message(Message::Refused { report, .. }) => self.reject(report),
            Received::BundleLost { .. } => {
                let text = "the master process has too many open files to receive the new configuration";
                self.reject(Report::new(Level::Emerg, text));
            }
            Received::Bundle(bundle) => {
                if let Some(Reload::Helping { link: Some(link), .. }) = &mut self.reload {
                    // From here on the master removes the socket files that the helper created. An error means that the
                    // helper has exited.
                    let _ = link.send(&Message::Taken);
                }
                self.prepare(bundle);
            }
            _ => self.log.write(Level::Alert, "unexpected message from the reload helper"),
        }
    }

    /// Has the serving worker process, or a new one, build the complete bundle.
    fn prepare(&mut self, mut bundle: Box<Bundle>) {
        self.generation += 1;
        bundle.generation = self.generation;
        if let Some(Reload::Helping { reopened: true, .. }) = &self.reload {
            self.reopen(bundle.record.logs.clone());
        }
        bundle.adopt(&self.bundle.with_unused(&self.passed));
        // Sent before the bundle: the first handshake with the new configuration may need them.
        self.renew_secrets(&bundle.settings.secret_lifetimes);
        let is_reachable = |worker: &WorkerProcess| worker.phase == WorkerPhase::Serving && worker.link.is_some();
        let serving = self.workers.iter().position(is_reachable);
        let Some(position) = serving else {
            return self.replace_worker(bundle);
        };
        if let Some(why) = self.bundle.settings.needs_new_process(&bundle.settings) {
            self.log.write(Level::Notice, &format!("a new worker process is needed: {why}"));
            return self.replace_worker(bundle);
        }
        self.raise_descriptor_limit(self.workers[position].pid, &bundle);
        let worker = &mut self.workers[position];
        let pid = worker.pid;
        match worker.link.as_mut().map(|link| link.send_bundle(&bundle)) {
            Some(Ok(())) => {
                let until = Instant::now() + PREPARE_TIMEOUT;
                self.reload = Some(Reload::Preparing { bundle, worker: pid, until });
            }
            _ => self.discard(*bundle, "the worker process cannot be reached"),
        }
    }

    pub(super) fn replace_worker(&mut self, bundle: Box<Bundle>) {
        match self.start_worker(&bundle) {
            Ok(worker) => {
                let pid = worker.pid;
                self.workers.push(worker);
                self.reload = Some(Reload::Replacing { bundle, worker: pid });
            }
            Err(error) => {
                let text = format!("fork() failed while spawning \"worker process\"{}", errno_text(&error));
                self.discard(*bundle, &text);
            }
        }
    }

    /// Raises the worker's descriptor limit, which it may not do itself. If the master may not either, the worker logs
    /// the failure. The worker lowers its limit itself when it commits; until then the present configuration holds.
    fn raise_descriptor_limit(&self, pid: Pid, bundle: &Bundle) {
        if let Some(limit) = bundle.settings.rlimit_nofile
            && system::descriptors_max_of(pid).is_some_and(|max| limit > max)
        {
            let limits = Rlimit { current: Some(limit), maximum: Some(limit) };
            let _ = rustix::process::prlimit(Some(pid), Resource::Nofile, limits);
        }
    }

    pub(super) fn handle_prepared(&mut self, pid: Pid, generation: u64) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, worker, .. }) if worker == pid && bundle.generation == generation => {
                self.acknowledge(bundle);
                self.reload = Some(Reload::Committing { worker, until: Instant::now() + COMMIT_TIMEOUT });
            }
            other => {
                self.reload = other;
                self.handle_prepared_late(pid);
            }
        }
    }

    /// Replaces a worker process that changes to a configuration that was given up.
    fn handle_prepared_late(&mut self, pid: Pid) {
        if self.stop.is_some() || self.worker_mut(pid).is_some_and(|worker| worker.phase == WorkerPhase::Leaving) {
            // The order to exit may still be on its way to it.
            return;
        }
        self.log.write(Level::Alert, &format!("worker process {pid} was prepared too late"));
        if let Some(worker) = self.worker_mut(pid) {
            worker.link = None;
            worker.replace_at = Some(Instant::now());
        }
    }

    /// Makes the bundle the current configuration, whatever happens to the worker. Our copies of removed sockets are
    /// closed with the previous bundle. The worker still has its copies, accepts the connections queued on them, and
    /// closes them last. If the master closed last, connections queued after the worker's last accept would be reset.
    ///
    /// Clients can connect to a removed Unix socket as long as its file exists, so the file is removed first.
    pub(super) fn acknowledge(&mut self, bundle: Box<Bundle>) {
        let previous = std::mem::replace(&mut self.bundle, bundle);
        // Drops secrets that only the old configuration needed.
        self.renew_secrets(&[]);
        system::remove_old_socket_files(&previous.own_addresses(), &self.bundle, &*self.log);
        self.log = self.program.error_log(&self.bundle.error_log_targets());
        for listener in &self.bundle.record.listeners {
            match previous.spec_of(listener) {
                Some(old) => listen::configure(listener, Some(old), &*self.log),
                // Passed at the start, and used from now on.
                None if listener.opened_by == OpenedBy::ServiceManager => {
                    listen::configure_inherited(listener, &*self.log);
                }
                None => {}
            }
        }
        activation::tell_unused(&self.bundle, &self.passed, &*self.log);
        self.move_pid_file();
        self.redirect_standard_error();
    }

    /// Moves the pid file to the configured path, except while a new binary's file is there.
    pub(super) fn move_pid_file(&mut self) {
        let wanted = &self.bundle.settings.pid_path;
        if self.new_binary.is_none() && pid_file::change(&self.pid_path, wanted, &*self.log) {
            self.pid_path = wanted.clone();
        }
    }

    pub(super) fn handle_committed(&mut self, pid: Pid) {
        match self.reload.take() {
            Some(Reload::Committing { worker, .. }) if worker == pid => {
                self.log.write(Level::Notice, IN_FORCE);
                self.finish_commit();
            }
            other => self.reload = other,
        }
    }

    pub(super) fn finish_commit(&mut self) {
        self.notifier.ready();
        self.control.reload_ended(Ending::Done, "");
        self.take_up_wanted_reload();
    }

    pub(super) fn take_up_wanted_reload(&mut self) {
        if self.reload.is_none() && std::mem::take(&mut self.reload_wanted) {
            self.reconfigure();
        }
    }

    /// Gives up a stage whose timeout has passed.
    pub(super) fn check_reload(&mut self, now: Instant) {
        match self.reload.take() {
            Some(Reload::Helping { pid, until, .. }) if until <= now => {
                self.kill(pid, rustix::process::Signal::KILL);
                let text = format!("the configuration was not built within {} seconds", HELPER_TIMEOUT.as_secs());
                self.reject(Report::new(Level::Emerg, text));
            }
            Some(Reload::Preparing { bundle, until, .. }) if until <= now => {
                let seconds = PREPARE_TIMEOUT.as_secs();
                self.discard(*bundle, &format!("the worker process was not prepared within {seconds} seconds"));
            }
            Some(Reload::Committing { worker, until }) if until <= now => {
                let text = format!("worker process {worker} has not changed to the new configuration completely");
                self.log.write(Level::Alert, &text);
                self.finish_commit();
            }
            other => self.reload = other,
        }
    }

    pub(super) fn handle_refused(&mut self, pid: Pid, report: Report) {
        let ours = matches!(&self.reload,
            Some(Reload::Preparing { worker, .. } | Reload::Replacing { worker, .. }) if *worker == pid);
        if ours {
            self.reject(report);
        } else if self.serving_since_start {
            // A restarted worker process that cannot serve: it exits, and is restarted later.
            report.log_to(&*self.log);
        } else {
            self.fail(&report);
        }
    }

    /// Ends the part of a worker process in the running reload when it can report no more.
    pub(super) fn end_reload_of(&mut self, pid: Pid, why: &str) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, worker, .. } | Reload::Replacing { bundle, worker }) if worker == pid => {
                self.discard(*bundle, why);
            }
            // Acknowledged: the next process starts with the new configuration.
            Some(Reload::Committing { worker, .. }) if worker == pid => self.finish_commit(),
            other => self.reload = other,
        }
    }

    /// Refuses the new configuration and reports why; the old one stays in force.
    pub(super) fn reject(&mut self, report: Report) {
        match self.reload.take() {
            Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) => {
                system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
            }
            Some(Reload::Helping { .. } | Reload::Committing { .. }) | None => {}
        }
        report.log_to(&*self.log);
        self.log.write(Level::Error, OLD_STAYS);
        self.control.reload_ended(Ending::Refused, &report.render(&self.bundle.request.program));
        self.notifier.ready();
        self.take_up_wanted_reload();
    }

    fn discard(&mut self, bundle: Bundle, why: &str) {
        self.reload = None;
        system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
        drop(bundle);
        self.reject(Report::new(Level::Emerg, why));
    }

    pub(super) fn drop_reload(&mut self) {
        self.reload_wanted = false;
        self.control.refuse_all("the server is stopping\n");
        match self.reload.take() {
            Some(Reload::Helping { pid, .. }) => self.kill(pid, rustix::process::Signal::KILL),
            Some(Reload::Preparing { bundle, .. } | Reload::Replacing { bundle, .. }) => {
                system::remove_rejected_socket_files(&bundle, &self.bundle, &*self.log);
            }
            Some(Reload::Committing { .. }) | None => {}
        }
    }
}
