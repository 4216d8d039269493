//! Settings of the process layer: directives of the main context, already resolved.
//! <https://nginx.org/en/docs/ngx_core_module.html>

use gale_base::log_level::{Level, LineForm};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::log_file::LogHandle;
use super::sandbox::Sandbox;
use super::text;
use super::user::Account;

/// Maximum number of event loops; a higher number is a typing error rather than a machine. The runtime has space for
/// twice as many, so that a reload can start new ones while old ones still drain.
pub const WORKERS_MAX: usize = 512;

/// The event method that does not use io_uring.
const EPOLL: &str = "epoll";

/// Settings of the processes. Plain values: they cross the link inside a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSettings {
    /// `daemon`: the starting process returns to the shell when the worker is ready.
    pub daemon: bool,
    /// `master_process`: off = everything in one process, without changing the user.
    pub master_process: bool,
    /// `pid`, absolute.
    #[serde(with = "text::path")]
    pub pid_path: PathBuf,
    /// `user`, looked up through `Resources::account`; `None` = do not change the user.
    pub account: Option<Account>,
    /// `worker_processes`, with `auto` resolved: event-loop threads of the worker process, at least 1.
    pub workers: usize,
    /// `use`: name of the event method of the loops.
    pub event_method: String,
    /// `worker_rlimit_nofile`, descriptors.
    pub rlimit_nofile: Option<u64>,
    /// `worker_rlimit_core`, bytes.
    pub rlimit_core: Option<u64>,
    /// `worker_priority`, the nice value.
    pub priority: i32,
    /// `env`; `TZ` is kept even when not listed.
    pub environment: Vec<EnvironmentEntry>,
    /// `working_directory`.
    #[serde(with = "text::optional_path")]
    pub working_directory: Option<PathBuf>,
    /// `sandbox`, with the access that the configuration needs.
    pub sandbox: Sandbox,
    /// `worker_shutdown_timeout`; `None` = unlimited.
    pub shutdown_timeout: Option<Duration>,
    /// Keep CAP_NET_RAW after the change of user (`proxy_bind … transparent`).
    pub keep_net_raw: bool,
    /// True if a log goes to standard error, which must not be redirected to the first log file then.
    pub keeps_standard_error: bool,
    /// Lifetimes in seconds, in ascending order, of data that worker processes encrypt with a shared secret: there is
    /// one of [`crate::SERIES_MAX`] series of secrets for each.
    pub secret_lifetimes: Vec<u32>,
    /// `error_log` of the main context. Files must have been opened with `Resources::log_file`.
    pub error_log: Vec<ErrorLogSetting>,
}

impl Default for ProcessSettings {
    /// nginx's defaults, apart from `pid`, which depends on the program's name.
    fn default() -> ProcessSettings {
        ProcessSettings {
            daemon: true,
            master_process: true,
            pid_path: PathBuf::new(),
            account: None,
            workers: 1,
            event_method: String::new(),
            rlimit_nofile: None,
            rlimit_core: None,
            priority: 0,
            environment: Vec::new(),
            working_directory: None,
            sandbox: Sandbox::default(),
            shutdown_timeout: None,
            keep_net_raw: false,
            keeps_standard_error: false,
            secret_lifetimes: Vec::new(),
            error_log: Vec::new(),
        }
    }
}

impl ProcessSettings {
    /// Returns the reason why a running worker process cannot take over `next` and a new one is needed; `None` if it
    /// can. The limit on descriptors and the number of event loops change in a live process; its user, environment,
    /// directory and event method do not, and no process leaves its sandbox.
    pub fn needs_new_process(&self, next: &ProcessSettings) -> Option<&'static str> {
        let changed = [
            (self.account != next.account, "\"user\" has changed"),
            (self.event_method != next.event_method, "\"use\" has changed"),
            (self.environment != next.environment, "\"env\" has changed"),
            (self.working_directory != next.working_directory, "\"working_directory\" has changed"),
            (self.priority != next.priority, "\"worker_priority\" has changed"),
            (self.rlimit_core != next.rlimit_core, "\"worker_rlimit_core\" has changed"),
            (self.keep_net_raw != next.keep_net_raw, "\"transparent\" has changed"),
            (self.lacks_rings(next), "its sandbox allows no more rings of io_uring"),
        ];
        let changed = changed.into_iter().find_map(|(is_so, why)| is_so.then_some(why));
        changed.or_else(|| self.sandbox.lacks(&next.sandbox))
    }

    /// True if loops may use io_uring, and there will be more of them than a process under `sandbox on` has rings for.
    fn lacks_rings(&self, next: &ProcessSettings) -> bool {
        self.sandbox.forbids_rings() && self.event_method != EPOLL && self.workers < next.workers
    }
}

/// One `env` directive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentEntry {
    /// Name of the variable.
    #[serde(with = "text::os_string")]
    pub name: OsString,
    /// Its value; `None` = inherited from the environment of the master.
    #[serde(with = "text::optional_os_string")]
    pub value: Option<OsString>,
}

/// One `error_log` directive of the main context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorLogSetting {
    /// Less severe messages are not written.
    pub level: Level,
    /// Format of the lines.
    pub form: LineForm,
    /// Destination.
    pub destination: ErrorLogDestination,
}

/// The destination of an error log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorLogDestination {
    /// `stderr`
    Stderr,
    /// A file, absolute.
    File(#[serde(with = "text::path")] PathBuf),
    /// The parameters after `syslog:`, with the host name resolved to an address.
    Syslog(String),
}

/// An error log with its opened file.
#[derive(Clone)]
pub struct ErrorLogTarget {
    /// Less severe messages are not written.
    pub level: Level,
    /// Format of the lines.
    pub form: LineForm,
    /// Destination.
    pub output: ErrorLogOutput,
}

/// Opened destination of an error log.
#[derive(Clone)]
pub enum ErrorLogOutput {
    /// Standard error.
    Stderr,
    /// An open file.
    File(LogHandle),
    /// The parameters after `syslog:`, with the host name resolved to an address.
    Syslog(String),
}
