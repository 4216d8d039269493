//! Master, worker process, bundle: how Gale starts, reloads, survives crashes and stops.
//!
//! ```text
//!   command line ── build ──► bundle ──► master (one thread, supervises)
//!                                          │  link: bundles, orders, reports
//!                       helper ◄───────────┼───────────► worker process
//!              (parses a reload,           │            control thread + one event loop per worker
//!               opens, exits)              └── signals, pid file, respawn
//! ```
//!
//! This crate knows no directive and no protocol: the program that serves implements [`Program`]. It never parses in
//! the master and never blocks an event loop: blocking work runs in the helper or on the worker's builder thread.
//!
//! Invariant: the master holds the complete bundle that was acknowledged last, so that a worker process can be
//! restarted at any time without reading a file.

mod activation;
mod bundle;
mod claim;
mod command;
mod control;
mod daemon;
mod data_file;
mod errors;
#[doc(hidden)]
pub mod fuzzing;
mod handover;
mod helper;
mod hostname;
mod link;
mod listen;
mod lock_file;
mod log_file;
mod loops;
mod master;
mod notify;
mod page_cache_helper;
mod pid_file;
mod program;
mod resources;
mod sandbox;
mod secrets;
mod settings;
mod signals;
mod spawn;
mod system;
mod text;
mod tunables;
mod upgrade;
mod user;
mod worker;

pub use bundle::{Bundle, BundleResources, PROTOCOL_VERSION};
pub use command::{Command, inherited_role, run_role, send_signal, start, test};
pub use control::{Reloaded, reload, status};
pub use data_file::{DataFile, DataHandle, DataMapping};
pub use errors::{ErrorLog, Report, ReportEntry, ResourceError, SignalError, StderrLog, errno_text};
pub use handover::{Arrivals, Arrived, IdleNote, Successor};
pub use hostname::hostname;
pub use listen::{
    KeepAlive, ListenAddress, ListenSpec, Listener, ListenerHandle, OpenedBy, SocketKind, stop_deferring,
};
pub use lock_file::{LockFile, LockGuard, LockHandle, TryLockError};
pub use log_file::{LogFile, LogHandle};
pub use program::{BuildRequest, Built, Completion, LoopMain, Program, Worker, WorkerSlot};
pub use resources::Resources;
pub use sandbox::{Place, Places, Ports, Sandbox, SandboxMode, sandbox_support};
pub use secrets::{SERIES_MAX, Secret, SecretSeries};
pub use settings::{
    EnvironmentEntry, ErrorLogDestination, ErrorLogOutput, ErrorLogSetting, ErrorLogTarget, ProcessSettings,
};
pub use spawn::Role;
pub use system::SystemResources;
pub use user::{Account, USER_IGNORED, is_super_user};
pub use worker::respawned;
