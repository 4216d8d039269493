//! The one interface between the process layer and the program that serves.
//!
//! The engine implements [`Program`] for the web server, the tests implement it for a toy. The process layer never
//! looks inside a configuration; it asks for [`ProcessSettings`] and hands `Arc`s of it to the event loops.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::errors::{ErrorLog, Report};
use super::handover::{Arrivals, Successor};
use super::resources::Resources;
use super::secrets::SecretSeries;
use super::settings::{ErrorLogTarget, ProcessSettings};
use super::text;

/// The main future of an event loop; resolves when the loop is to stop.
pub type LoopMain = Pin<Box<dyn Future<Output = ()>>>;

/// A request to build a configuration: the parts of the command line that determine it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRequest {
    /// Name at the beginning of messages on the terminal: `gale` or `nginx`.
    pub program: String,
    /// The configuration file (`-c`), absolute.
    #[serde(with = "text::path")]
    pub configuration_path: PathBuf,
    /// Prefix of relative paths (`-p`).
    #[serde(with = "text::path")]
    pub prefix: PathBuf,
    /// Directives given with `-g`.
    pub global_directives: String,
    /// The error log given with `-e`; the program's default when absent.
    #[serde(with = "text::optional_path")]
    pub error_log_path: Option<PathBuf>,
    /// True if the user who starts the program is root; stays true in the worker process, which changes its user.
    pub privileged: bool,
    /// True for a test (`-t`), which changes nothing that exists.
    pub test: bool,
    /// Text of a configuration that is no file (`gale serve`): read instead of `configuration_path`.
    pub configuration_text: Option<String>,
}

/// A built configuration with its warnings.
pub struct Built<C> {
    /// The configuration, ready to serve.
    pub configuration: C,
    /// Warnings and notices, in the order of the file.
    pub warnings: Report,
}

/// Position of one event loop among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerSlot {
    /// Number of this worker, from 0. A slot may be reused while its previous owner still drains.
    pub worker: usize,
    /// Number of workers that serve. Sockets of a listener with several belong to worker `index % workers`.
    pub workers: usize,
}

/// Resolves when an operation is complete; polled on the loop that returned it.
pub type Completion = Pin<Box<dyn Future<Output = ()>>>;

/// The program that the processes run. Shared by all threads of a process.
pub trait Program: Send + Sync + Sized + 'static {
    /// The whole configuration, immutable once built.
    type Configuration: Send + Sync + 'static;
    /// State of one event loop; created and dropped on its thread.
    type Worker: Worker<Configuration = Self::Configuration>;

    /// Parses, checks, and opens resources through `resources`. Deterministic: in the worker process it must request
    /// the same resources that the master or helper recorded. Must not start threads: it runs before privileges are
    /// dropped.
    ///
    /// # Errors
    /// All errors of the configuration, rendered.
    fn build(
        &self,
        request: &BuildRequest,
        resources: &mut dyn Resources,
    ) -> Result<Built<Self::Configuration>, Report>;

    /// Returns the part of a configuration that the process layer uses.
    fn process_settings<'c>(&self, configuration: &'c Self::Configuration) -> &'c ProcessSettings;

    /// Returns the statistics for clients of the control socket; `None` for a program without any. Called in a thread
    /// of its own, where it may block.
    fn figures(&self, _configuration: &Arc<Self::Configuration>) -> Option<String> {
        None
    }

    /// Returns the log for messages that belong to no connection. Also called in the master, which has no
    /// configuration.
    fn error_log(&self, targets: &[ErrorLogTarget]) -> Arc<dyn ErrorLog>;

    /// Returns a further log for the reason of a failed start, whose terminal output the user may not see.
    fn failure_log(&self, _request: &BuildRequest) -> Option<Arc<dyn ErrorLog>> {
        None
    }

    /// Runs `main` to completion on an event loop of the calling thread: `EventLoop::new(options)?.run(main)`. Must not
    /// keep `configuration`, which only serves to choose the options: a later one may replace it.
    ///
    /// # Errors
    /// The loop cannot be set up; `main` must not have been polled then.
    fn run_loop(&self, worker: usize, configuration: Arc<Self::Configuration>, main: LoopMain) -> io::Result<()>;

    /// True if a helper process beside each worker process tells which parts of files are in memory.
    fn has_page_cache_helper(&self) -> bool {
        false
    }

    /// Runs in the page cache helper: answers questions from this socket (SOCK_SEQPACKET), and ends the process when
    /// the worker process is gone. Called in a process with one thread.
    ///
    /// # Errors
    /// The reason why it cannot answer.
    fn serve_page_cache_questions(&self, _socket: OwnedFd) -> io::Result<Infallible> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Uses the page cache helper at the other end of this socket.
    ///
    /// # Errors
    /// The reason why the helper cannot be used.
    fn use_page_cache_helper(&self, _socket: OwnedFd) -> io::Result<()> {
        Ok(())
    }

    /// Starts to serve on the calling event loop: starts accepting.
    ///
    /// # Errors
    /// The reason why this worker cannot serve. At start this ends the process, at reload it is logged.
    fn start(&self, slot: WorkerSlot, configuration: Arc<Self::Configuration>) -> Result<Self::Worker, String>;

    /// Replaces the secrets that worker processes share: called before the first configuration is built, and on each
    /// change. There is a series for each of `ProcessSettings::secret_lifetimes`.
    fn use_secrets(&self, _series: &[SecretSeries]) {}

    /// Has every event loop poll the listening sockets that it shares with other processes: the kernel may have
    /// reported a connection to a process that is stuck. Called about once a second while there is one.
    fn look_for_connections(&self) {}

    /// Last call before the process exits: flushes logs. Should take a second at most; a worker process does not wait
    /// longer.
    fn finish(&self) {}
}

/// The state of the program on one event loop.
pub trait Worker: 'static {
    /// See [`Program::Configuration`].
    type Configuration;

    /// Uses `configuration` for new exchanges. Accepts on new listeners, takes over sockets whose worker is gone, and
    /// stops on removed ones after accepting their queued connections; then resolves. A socket in both configurations
    /// is the same `Arc`. A slot outside of `0..workers` means that there are fewer workers now and this loop is
    /// drained next: it accepts nothing more. Sockets that no configuration uses any more are closed under all their
    /// holders once every loop has settled.
    fn commit(&mut self, slot: WorkerSlot, configuration: Arc<Self::Configuration>) -> Completion;

    /// Called when every loop uses the latest configuration, so that the start or the reload can no longer fail: starts
    /// the background tasks. Not called on loops that are drained next.
    fn settled(&mut self) {}

    /// Stops accepting, after the connections that are already queued: other processes with the same sockets may not
    /// have been notified of them. `is_last`: no other process has the sockets, so connections that are still queued
    /// when they are closed are lost. Resolves when the queued connections are accepted; [`Worker::drain`] follows.
    fn stop_accepting(&mut self, is_last: bool) -> Completion;

    /// Passes idle connections on to `successor`, if there is one, and closes those that cannot be passed; resolves
    /// when the last connection is closed or passed.
    fn drain(&mut self, successor: Option<&Successor>) -> Completion;

    /// Serves the idle connections that another worker process passes to this one.
    fn receive(&mut self, _arrivals: &Arrivals) {}

    /// Closes exchanges that still use this configuration or an older one, after `worker_shutdown_timeout`; with
    /// `None`, at the end of a drain, closes everything.
    fn expire(&mut self, configuration: Option<&Arc<Self::Configuration>>);

    /// Flushes buffers to the log files, which are about to be reopened (USR1).
    fn reopen(&mut self) {}

    /// Number of connections open on this loop, for messages.
    fn connections(&self) -> usize;
}
