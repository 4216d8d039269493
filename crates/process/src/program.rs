//! The one interface between the process layer and what is served.
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

/// What is to be built: the command line, reduced to what decides the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRequest {
    /// Name that begins a message on the terminal: `gale` or `nginx`.
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
    /// Whether whoever starts the program is root: the same in the worker process, which no longer is.
    pub privileged: bool,
    /// Only a test (`-t`): nothing that exists is changed.
    pub test: bool,
    /// A configuration that is no file (`gale serve`): read in place of `configuration_path`.
    pub configuration_text: Option<String>,
}

/// A configuration that was built, with what there was to say about it.
pub struct Built<C> {
    /// The configuration, ready to serve.
    pub configuration: C,
    /// Warnings and notices, in the order of the file.
    pub warnings: Report,
}

/// One event loop's place among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerSlot {
    /// Number of this worker, from 0. A slot may be taken again while its previous owner still drains.
    pub worker: usize,
    /// Number of workers that serve. Sockets of a listener with several belong to worker `index % workers`.
    pub workers: usize,
}

/// Resolves when what a call has begun is complete; polled on the loop that returned it.
pub type Completion = Pin<Box<dyn Future<Output = ()>>>;

/// What runs in the processes. Shared by all threads of a process.
pub trait Program: Send + Sync + Sized + 'static {
    /// The whole configuration, immutable once built.
    type Configuration: Send + Sync + 'static;
    /// The state of one event loop; made and dropped on its thread.
    type Worker: Worker<Configuration = Self::Configuration>;

    /// Parses, checks, and opens through `resources`. Deterministic: run in the worker process with what was recorded
    /// in the master or helper, it asks for the same things. Must not start threads: it runs before privileges are
    /// dropped.
    ///
    /// # Errors
    /// Everything that is wrong with the configuration, rendered.
    fn build(
        &self,
        request: &BuildRequest,
        resources: &mut dyn Resources,
    ) -> Result<Built<Self::Configuration>, Report>;

    /// The part of a configuration that the process layer acts on.
    fn process_settings<'c>(&self, configuration: &'c Self::Configuration) -> &'c ProcessSettings;

    /// What was counted, for whoever asks over the control socket; `None` for a program that tells nothing. Called in
    /// a thread of its own, which may take its time.
    fn figures(&self, _configuration: &Arc<Self::Configuration>) -> Option<String> {
        None
    }

    /// The log for messages that belong to no connection. Called in the master too, which has no configuration.
    fn error_log(&self, targets: &[ErrorLogTarget]) -> Arc<dyn ErrorLog>;

    /// Where else it is told why a start has failed: whoever started the program may not see its terminal.
    fn failure_log(&self, _request: &BuildRequest) -> Option<Arc<dyn ErrorLog>> {
        None
    }

    /// Runs `main` to its end on an event loop of the calling thread: `EventLoop::new(options)?.run(main)`. Must not
    /// keep `configuration`, which is only there to choose the options: a later one may replace it.
    ///
    /// # Errors
    /// The loop cannot be set up; `main` must not have been polled then.
    fn run_loop(&self, worker: usize, configuration: Arc<Self::Configuration>, main: LoopMain) -> io::Result<()>;

    /// Whether worker processes have a process beside them that says what of files is in memory.
    fn has_page_cache_helper(&self) -> bool {
        false
    }

    /// The part of that process: answers what comes over this socket (SOCK_SEQPACKET), and ends the process when the
    /// worker process is gone. Called in a process with one thread.
    ///
    /// # Errors
    /// Why it cannot answer.
    fn serve_page_cache_questions(&self, _socket: OwnedFd) -> io::Result<Infallible> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Has the process at the other end of this socket answer what this one asks.
    ///
    /// # Errors
    /// Why it cannot be asked.
    fn use_page_cache_helper(&self, _socket: OwnedFd) -> io::Result<()> {
        Ok(())
    }

    /// Begins to serve on the calling event loop: starts accepting.
    ///
    /// # Errors
    /// Why this worker cannot serve. At start this ends the process, at reload it is logged.
    fn start(&self, slot: WorkerSlot, configuration: Arc<Self::Configuration>) -> Result<Self::Worker, String>;

    /// From now on these are the secrets that worker processes have in common: called before the first configuration is
    /// built, and whenever they change. A series for each of `ProcessSettings::secret_lifetimes`.
    fn use_secrets(&self, _series: &[SecretSeries]) {}

    /// Has every event loop look whether connections wait at sockets that it shares with others: the kernel may have
    /// told of them a process that can do nothing any more. Called about once a second then.
    fn look_for_connections(&self) {}

    /// Last call before the process exits: flush logs. To take about a second at most; a worker process does not wait
    /// longer.
    fn finish(&self) {}
}

/// One event loop's share of the program.
pub trait Worker: 'static {
    /// See [`Program::Configuration`].
    type Configuration;

    /// From now on new exchanges use `configuration`. Accepts on listeners that are new to it, takes over sockets whose
    /// worker is gone, and stops on those that were removed, after accepting what they have queued; resolves then. A
    /// socket present in both configurations is the same `Arc`. A slot outside of `0..workers` means that there are
    /// fewer workers now and this loop is drained next: it accepts nothing more. Sockets that are in no configuration
    /// any more are closed under all their holders once every loop has settled.
    fn commit(&mut self, slot: WorkerSlot, configuration: Arc<Self::Configuration>) -> Completion;

    /// Every loop uses the configuration that this one was last told of, so that the start or the reload can no longer
    /// fail: what runs beside the exchanges begins. Not called on loops that are drained next.
    fn settled(&mut self) {}

    /// Stops accepting, but for what waits at the sockets already: whoever else has them may not have been told.
    /// `is_last`: nobody else does, so who waits there is lost with them. Resolves when that is accepted;
    /// [`Worker::drain`] follows.
    fn stop_accepting(&mut self, is_last: bool) -> Completion;

    /// Passes idle connections on to `successor`, if there is one, and closes those that cannot be passed; resolves
    /// when the last connection is closed or passed.
    fn drain(&mut self, successor: Option<&Successor>) -> Completion;

    /// Serves the idle connections that another worker process passes to this one.
    fn receive(&mut self, _arrivals: &Arrivals) {}

    /// The time of `worker_shutdown_timeout` is over: closes exchanges that still hold this configuration or an older
    /// one. Without one it is the end of a drain: closes everything.
    fn expire(&mut self, configuration: Option<&Arc<Self::Configuration>>);

    /// Log files are opened again next (USR1): what this loop has gathered for them is written to the old ones now.
    fn reopen(&mut self) {}

    /// Connections open on this loop, for messages.
    fn connections(&self) -> usize;
}
