//! What `main` calls: start, test, signal, or the part that a master gave us.

use std::fmt;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use rustix::process::Pid;

use super::daemon::{self, Forked, Waiting};
use super::errors::{ErrorLog, Level, Report, StderrLog, errno_text, say};
use super::helper;
use super::listen;
use super::master::{Master, Start};
use super::notify::Notifier;
use super::pid_file;
use super::program::{BuildRequest, Built, Program};
use super::settings::ProcessSettings;
use super::signals::{self, Signals};
use super::spawn::{self, Executable, Role};
use super::system::SystemResources;
use super::upgrade;
use super::worker::{self, Single};

/// The part that a master gave this process. To be asked before anything else: such a process has no command line.
pub fn inherited_role() -> Option<Role> {
    Role::from_environment()
}

/// Plays that part to its end.
pub fn run_role<P: Program>(role: Role, program: P) -> ExitCode {
    // First of all: signals to the whole service (`systemctl kill`) reach a process that has just begun, too.
    let run = || match role {
        Role::Worker => {
            let signals = Signals::take()?;
            Ok(worker::run(program, signals, spawn::inherited_link()?))
        }
        Role::Helper => {
            signals::ignore_orders()?;
            Ok(helper::run(&program, spawn::inherited_link()?))
        }
    };
    run().unwrap_or_else(|error: io::Error| {
        let variable = spawn::ROLE_VARIABLE;
        say(&format!("{variable} is set, but the link to a master process on standard input fails: {error}\n"));
        ExitCode::FAILURE
    })
}

/// Starts the server: builds, opens, leaves the terminal if `daemon` says so, and becomes the master. Returns when the
/// server has ended, or in the process that was started from the terminal when the daemon is ready.
pub fn start<P: Program>(program: P, request: BuildRequest) -> ExitCode {
    // The process on the terminal waits until this is dropped: after the last word.
    let mut waiting = None;
    match try_start(program, request.clone(), &mut waiting) {
        Ok(code) => code,
        Err(report) => {
            say(&report.render(&request.program));
            ExitCode::FAILURE
        }
    }
}

/// Builds the configuration as `-t` does: opens everything, keeps nothing, minds no address in use.
///
/// # Errors
/// Everything that is wrong with it.
pub fn test<P: Program>(program: &P, request: BuildRequest) -> Result<Built<P::Configuration>, Report> {
    let log = boot_log(&request);
    let helper::Fresh { bundle, built, .. } = helper::build(program, request, SystemResources::new(log).for_test())?;
    pid_file::test(&bundle.settings().pid_path).map_err(|message| Report::new(Level::Emerg, message))?;
    Ok(built)
}

/// `-s NAME`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Fast stop.
    Stop,
    /// Graceful stop.
    Quit,
    /// Open the logs again.
    Reopen,
    /// Read the configuration again.
    Reload,
}

impl FromStr for Command {
    type Err = ();

    fn from_str(name: &str) -> Result<Command, ()> {
        match name {
            "stop" => Ok(Command::Stop),
            "quit" => Ok(Command::Quit),
            "reopen" => Ok(Command::Reopen),
            "reload" => Ok(Command::Reload),
            _ => Err(()),
        }
    }
}

/// Why a signal could not be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalError {
    /// nginx's level for it.
    pub level: Level,
    /// nginx's words.
    pub message: String,
}

impl fmt::Display for SignalError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "[{}] {}", self.level.name(), self.message)
    }
}

/// Sends the signal of `command` to the process that `pid_path` names.
///
/// # Errors
/// The file cannot be read, holds no number, or there is no such process.
pub fn send_signal(pid_path: &Path, command: Command) -> Result<(), SignalError> {
    let number = pid_file::read(pid_path).map_err(|message| SignalError { level: Level::Error, message })?;
    let signal = signals::number_of_command(command);
    let pid = Pid::from_raw(number).expect("a pid file's number is positive");
    // Every number in the table is one of a named signal.
    let named = rustix::process::Signal::from_named_raw(signal).expect("a named signal");
    rustix::process::kill_process(pid, named).map_err(|error| SignalError {
        level: Level::Alert,
        message: format!("kill({number}, {signal}) failed{}", errno_text(&error.into())),
    })
}

fn try_start<P: Program>(program: P, request: BuildRequest, waiting: &mut Option<Waiting>) -> Result<ExitCode, Report> {
    let old_master = upgrade::old_master();
    let emerg = |message: String| Report::new(Level::Emerg, message);
    let executable =
        Executable::open().map_err(|error| emerg(format!("open() \"/proc/self/exe\" failed{}", errno_text(&error))))?;
    let log = boot_log(&request);
    // Before anything opens a socket: the numbers in the list are the previous binary's.
    let inherited = upgrade::inherited_listeners(&*log);
    let upgraded = inherited.is_some();
    let resources = SystemResources::new(Arc::clone(&log)).with_existing(inherited.unwrap_or_default());
    let fresh = helper::build(&program, request, resources)?;
    let (bundle, built) = (fresh.bundle, fresh.built);
    say(&built.warnings.render(&bundle.request().program));

    for listener in bundle.record.listeners.iter().filter(|listener| listener.inherited) {
        listen::configure_inherited(listener, &*log);
    }

    let settings = bundle.settings().clone();
    if settings.daemon && !upgraded {
        match daemon::daemonize() {
            Ok(Forked::Daemon(starter)) => *waiting = Some(starter),
            Ok(Forked::Starter(true)) => return Ok(ExitCode::SUCCESS),
            Ok(Forked::Starter(false)) => return Ok(ExitCode::FAILURE),
            Err(message) => {
                fresh.socket_files.remove(&*log);
                return Err(emerg(message));
            }
        }
    }
    let signals = become_server(&settings).map_err(|message| {
        fresh.socket_files.remove(&*log);
        emerg(message)
    })?;
    let waiting = waiting.take();
    let notifier = Notifier::from_environment();
    if !settings.master_process {
        return Ok(worker::run_single(program, signals, bundle, built.configuration, Single { waiting, notifier }));
    }
    // The master never needs it again: a respawn and a reload build it elsewhere.
    drop(built);
    let daemonized = settings.daemon || upgraded;
    Ok(Master::new(program, executable, Start { bundle, signals, notifier, waiting, daemonized, old_master }).run())
}

fn become_server(settings: &ProcessSettings) -> Result<Signals, String> {
    let signals = Signals::take().map_err(|error| format!("signalfd() failed{}", errno_text(&error)))?;
    pid_file::write(&settings.pid_path)?;
    Ok(signals)
}

fn boot_log(request: &BuildRequest) -> Arc<dyn ErrorLog> {
    Arc::new(StderrLog { program: request.program.clone(), level: Level::Notice })
}
