//! Settings of the main context that the engine uses itself.
//!
//! Their directive table is `gale-modules`' `core.rs`. (<https://nginx.org/en/docs/ngx_core_module.html>)

use std::path::PathBuf;
use std::time::Duration;

use gale_config::Setting;
use gale_log::{Destination, Target};
use gale_process::{EnvironmentEntry, ErrorLogDestination, ErrorLogSetting, ProcessSettings, Sandbox, SandboxMode};

use super::cpu_affinity::CpuAffinity;

/// Settings named like their directives, unless noted otherwise.
#[derive(Default)]
#[allow(missing_docs, reason = "the fields are nginx's directives")]
pub struct MainSettings {
    /// User and optional group.
    pub user: Setting<(String, Option<String>)>,
    /// `worker_processes`, with `auto` resolved.
    pub worker_processes: Setting<usize>,
    pub worker_cpu_affinity: Setting<CpuAffinity>,
    pub worker_rlimit_nofile: Setting<u64>,
    pub worker_rlimit_core: Setting<u64>,
    pub worker_priority: Setting<i32>,
    pub worker_shutdown_timeout: Setting<Duration>,
    pub working_directory: Setting<PathBuf>,
    pub sandbox: Setting<SandboxSettings>,
    pub env: Setting<Vec<EnvironmentEntry>>,
    pub daemon: Setting<bool>,
    pub master_process: Setting<bool>,
    pub pid: Setting<PathBuf>,
    pub lock_file: Setting<PathBuf>,
    pub error_log: Setting<Vec<Destination>>,
    pub thread_pool: Setting<Vec<ThreadPoolSettings>>,
}

/// `sandbox auto|on|off [diagnose]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SandboxSettings {
    /// Strictness.
    pub mode: SandboxMode,
    /// `true` if forbidden system calls are named in the error log.
    pub diagnoses: bool,
}

/// `thread_pool NAME threads=N [max_queue=N]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadPoolSettings {
    /// Name of the pool.
    pub name: String,
    /// Threads for each event loop.
    pub threads: usize,
    /// Most waiting tasks for each event loop.
    pub max_queue: usize,
}

impl ThreadPoolSettings {
    /// Name of the pool that always exists.
    pub const DEFAULT_NAME: &str = "default";
}

impl Default for ThreadPoolSettings {
    /// nginx's default: `thread_pool default threads=32 max_queue=65536`.
    fn default() -> ThreadPoolSettings {
        ThreadPoolSettings { name: ThreadPoolSettings::DEFAULT_NAME.to_owned(), threads: 32, max_queue: 65536 }
    }
}

impl MainSettings {
    /// The settings for the process layer.
    pub fn to_process_settings(&self) -> ProcessSettings {
        ProcessSettings {
            daemon: *self.daemon.get(),
            master_process: *self.master_process.get(),
            pid_path: self.pid.get().clone(),
            account: None,
            workers: *self.worker_processes.get(),
            event_method: String::new(),
            rlimit_nofile: self.worker_rlimit_nofile.get_opt().copied(),
            rlimit_core: self.worker_rlimit_core.get_opt().copied(),
            priority: *self.worker_priority.get(),
            environment: self.env.get().clone(),
            working_directory: self.working_directory.get_opt().cloned(),
            sandbox: self.sandbox(),
            shutdown_timeout: self.worker_shutdown_timeout.get_opt().copied(),
            keep_net_raw: false,
            keeps_standard_error: false,
            secret_lifetimes: Vec::new(),
            error_log: self.error_log.get().iter().map(to_process_log).collect(),
        }
    }

    /// The sandbox, without the files and ports that the configuration needs.
    fn sandbox(&self) -> Sandbox {
        let SandboxSettings { mode, diagnoses } = *self.sandbox.get();
        // Without a master no other process can do what the sandbox forbids to this one.
        let mode = if *self.master_process.get() { mode } else { SandboxMode::Off };
        Sandbox { mode, diagnoses, ..Sandbox::default() }
    }
}

fn to_process_log(Destination { level, form, target }: &Destination) -> ErrorLogSetting {
    let destination = match target {
        Target::Stderr => ErrorLogDestination::Stderr,
        Target::File(log) => ErrorLogDestination::File(log.path().to_owned()),
        Target::Syslog(server) => ErrorLogDestination::Syslog(server.settings().to_string()),
    };
    ErrorLogSetting { level: *level, form: *form, destination }
}
