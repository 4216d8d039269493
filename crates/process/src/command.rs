//! Entry points for `main`: start, test, send a signal, or run a role assigned by a master.

use gale_base::log_level::Level;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use rustix::process::Pid;

use super::activation;
use super::bundle::Bundle;
use super::daemon::{self, Forked, Waiting};
use super::errors::{ErrorLog, KeptLog, Report, SignalError, StderrLog, errno_text, say};
use super::handover::Arrivals;
use super::helper;
use super::listen::{self, ListenerHandle, OpenedBy};
use super::master::{Master, Start};
use super::notify::Notifier;
use super::page_cache_helper;
use super::pid_file;
use super::program::{BuildRequest, Built, Program};
use super::secrets::SecretKeeper;
use super::settings::ProcessSettings;
use super::signals::{self, Signals};
use super::spawn::{self, Executable, Role};
use super::system::SystemResources;
use super::upgrade;
use super::worker::{self, Single};

/// Returns the role that a master assigned to this process. Call this first: such a process has no command line.
pub fn inherited_role() -> Option<Role> {
    Role::from_environment()
}

/// Runs the role until the process ends.
pub fn run_role<P: Program>(role: Role, program: P) -> ExitCode {
    // Signals first: signals to the whole service (`systemctl kill`) reach a process that has just started, too.
    let run = || match role {
        Role::Worker => {
            let signals = Signals::take()?;
            Ok(worker::run(program, signals, spawn::inherited_link()?))
        }
        Role::Helper => {
            signals::ignore_orders()?;
            Ok(helper::run(&program, spawn::inherited_link()?))
        }
        Role::PageCacheHelper => {
            signals::ignore_all_orders()?;
            page_cache_helper::run(&program)
        }
    };
    run().unwrap_or_else(|error: io::Error| {
        let variable = spawn::ROLE_VARIABLE;
        say(&format!("{variable} is set, but the link to a master process on standard input fails: {error}\n"));
        ExitCode::FAILURE
    })
}

/// Starts the server: builds the configuration, opens its resources, leaves the terminal if `daemon` is on, and becomes
/// the master. Returns when the server has ended; in the process that was started from the terminal, when the daemon is
/// ready.
pub fn start<P: Program>(program: P, request: BuildRequest) -> ExitCode {
    worker::forbid_core_files();
    // The process on the terminal waits until this is dropped, after the last message.
    let mut waiting = None;
    let log = Arc::new(BootLog { terminal: terminal_log(&request), kept: KeptLog::default() });
    match prepare(&program, request.clone(), &log, &mut waiting) {
        Ok(Prepared::Ended(code)) => code,
        Ok(Prepared::Single { signals, bundle, configuration, passed }) => {
            let notifier = Notifier::from_environment();
            let single = Single { waiting: waiting.take(), notifier, passed };
            worker::run_single(program, signals, bundle, configuration, single)
        }
        Ok(Prepared::Master {
            executable,
            bundle,
            signals,
            daemonized,
            old_master,
            left_behind,
            secrets,
            arrivals,
            passed,
        }) => {
            let notifier = Notifier::from_environment();
            let waiting = waiting.take();
            let start = Start {
                bundle,
                signals,
                notifier,
                waiting,
                daemonized,
                old_master,
                left_behind,
                secrets,
                arrivals,
                passed,
            };
            Master::new(program, executable, start).run()
        }
        Err(report) => {
            say(&report.render(&request.program));
            if let Some(failures) = program.failure_log(&request) {
                log.kept.pass_on(&*failures);
                report.log_to(&*failures);
            }
            ExitCode::FAILURE
        }
    }
}

/// Builds the configuration as `-t` does: opens everything, keeps nothing, and ignores addresses in use.
///
/// # Errors
/// All errors of the configuration.
pub fn test<P: Program>(program: &P, request: BuildRequest) -> Result<Built<P::Configuration>, Report> {
    let log = Arc::new(terminal_log(&request));
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
    /// Reopens the logs.
    Reopen,
    /// Reloads the configuration.
    Reload,
}

impl Command {
    fn signal(self) -> rustix::process::Signal {
        use rustix::process::Signal;
        match self {
            Command::Stop => Signal::TERM,
            Command::Quit => Signal::QUIT,
            Command::Reopen => Signal::USR1,
            Command::Reload => Signal::HUP,
        }
    }
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

/// Sends the signal of `command` to the process in the pid file `pid_path`.
///
/// # Errors
/// The file cannot be read, holds no number, or there is no such process.
pub fn send_signal(pid_path: &Path, command: Command) -> Result<(), SignalError> {
    let number = pid_file::read(pid_path).map_err(|message| SignalError { level: Level::Error, message })?;
    let signal = command.signal();
    let pid = Pid::from_raw(number).expect("a pid file's number is positive");
    rustix::process::kill_process(pid, signal).map_err(|error| SignalError {
        level: Level::Alert,
        message: format!("kill({number}, {}) failed{}", signal.as_raw(), errno_text(&error.into())),
    })
}

/// Result of the part of a start that can fail.
enum Prepared<C> {
    /// In the process on the terminal: the daemon has reported success or failure.
    Ended(ExitCode),
    /// `master_process off`
    Single { signals: Signals, bundle: Bundle, configuration: C, passed: Vec<ListenerHandle> },
    Master {
        executable: Executable,
        bundle: Bundle,
        signals: Signals,
        daemonized: bool,
        old_master: Option<Pid>,
        left_behind: Vec<Pid>,
        secrets: SecretKeeper,
        arrivals: Option<Arrivals>,
        passed: Vec<ListenerHandle>,
    },
}

fn prepare<P: Program>(
    program: &P,
    request: BuildRequest,
    log: &Arc<BootLog>,
    waiting: &mut Option<Waiting>,
) -> Result<Prepared<P::Configuration>, Report> {
    let old_master = upgrade::old_master();
    let left_behind = if old_master.is_some() { upgrade::left_behind() } else { Vec::new() };
    let emerg = |message: String| Report::new(Level::Emerg, message);
    let executable =
        Executable::open().map_err(|error| emerg(format!("open() \"/proc/self/exe\" failed{}", errno_text(&error))))?;
    // Before the process opens a socket: the numbers are the previous binary's, or the service manager's.
    let inherited = upgrade::inherited_listeners(&**log);
    let upgraded = inherited.is_some();
    let arrivals = if upgraded { Arrivals::inherited() } else { None };
    let existing = inherited.unwrap_or_else(|| activation::passed_listeners(&**log));
    let is_passed = |listener: &&ListenerHandle| listener.opened_by == OpenedBy::ServiceManager;
    let passed: Vec<ListenerHandle> = existing.iter().filter(is_passed).cloned().collect();
    let secrets = match upgraded {
        true => SecretKeeper::inherited(|message| log.write(Level::Notice, message)),
        false => SecretKeeper::default(),
    };
    let resources = SystemResources::new(Arc::clone(log) as Arc<dyn ErrorLog>).with_existing(existing);
    let fresh = helper::build(program, request, resources)?;
    let (bundle, built) = (fresh.bundle, fresh.built);
    say(&built.warnings.render(&bundle.request().program));

    for listener in bundle.record.listeners.iter().filter(|listener| listener.opened_by != OpenedBy::Us) {
        listen::configure_inherited(listener, &**log);
    }
    activation::tell_unused(&bundle, &passed, &**log);

    let settings = bundle.settings().clone();
    if settings.daemon && !upgraded {
        match daemon::daemonize() {
            Ok(Forked::Daemon(starter)) => *waiting = Some(starter),
            Ok(Forked::Starter(true)) => return Ok(Prepared::Ended(ExitCode::SUCCESS)),
            Ok(Forked::Starter(false)) => return Ok(Prepared::Ended(ExitCode::FAILURE)),
            Err(message) => {
                fresh.socket_files.remove(&**log);
                return Err(emerg(message));
            }
        }
    }
    let signals = become_server(&settings).map_err(|message| {
        fresh.socket_files.remove(&**log);
        emerg(message)
    })?;
    if !settings.master_process {
        return Ok(Prepared::Single { signals, bundle, configuration: built.configuration, passed });
    }
    // The master never needs the built configuration: restarts and reloads build it in other processes.
    let daemonized = settings.daemon || upgraded;
    Ok(Prepared::Master { executable, bundle, signals, daemonized, old_master, left_behind, secrets, arrivals, passed })
}

fn become_server(settings: &ProcessSettings) -> Result<Signals, String> {
    let signals = Signals::take().map_err(|error| format!("signalfd() failed{}", errno_text(&error)))?;
    pid_file::write(&settings.pid_path)?;
    Ok(signals)
}

/// The log before there is a configuration: the terminal, and messages kept for the error log in case the start fails.
struct BootLog {
    terminal: StderrLog,
    kept: KeptLog,
}

impl ErrorLog for BootLog {
    fn write(&self, level: Level, message: &str) {
        self.terminal.write(level, message);
        self.kept.write(level, message);
    }
}

fn terminal_log(request: &BuildRequest) -> StderrLog {
    StderrLog { program: request.program.clone(), level: Level::Notice }
}
