//! Upgrade of the binary: the new one inherits the listening sockets.
//!
//! The protocol is nginx's, so that nginx can be upgraded to Gale and Gale to nginx: the environment variable `NGINX`
//! lists descriptor numbers, each followed by a semicolon; the old pid file is renamed.
//! <https://nginx.org/en/docs/control.html#upgrade>

use gale_base::log_level::Level;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::io::FdFlags;
use rustix::process::Pid;

use super::bundle::Bundle;
use super::claim::{CLAIMED_MAX, Claimed};
use super::errors::{ErrorLog, errno_text};
use super::handover::Arrivals;
use super::listen::{ListenerHandle, OpenedBy};
use super::pid_file;
use super::secrets::SecretKeeper;
use super::spawn::worker_environment;

/// nginx's variable with the listening sockets.
const VARIABLE: &str = "NGINX";
/// Variable with the pid of the old master. nginx does not set this.
const MASTER_VARIABLE: &str = "GALE_OLD_MASTER";
/// Variable with the pids of dead worker processes that are stuck in the kernel, which have the sockets, too.
const HELD_VARIABLE: &str = "GALE_HELD_PROCESSES";
/// Variable with those numbers in `NGINX` whose sockets belong to the service manager, in the same form.
const PASSED_VARIABLE: &str = "GALE_PASSED_SOCKETS";

/// Returns the sockets of a previous binary; `None` if there is no previous binary.
pub(super) fn inherited_listeners(log: &dyn ErrorLog) -> Option<Vec<ListenerHandle>> {
    let value = env::var_os(VARIABLE)?;
    let value = value.to_string_lossy().into_owned();
    log.write(Level::Notice, &format!("using inherited sockets from \"{value}\""));
    let passed = env::var_os(PASSED_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    let passed = passed.map(|value| numbers(&value, PASSED_VARIABLE, log)).unwrap_or_default();
    let mut claimed = Claimed::default();
    for number in numbers(&value, VARIABLE, log) {
        let is_passed = passed.contains(&number);
        let opened_by = if is_passed { OpenedBy::ServiceManager } else { OpenedBy::PreviousBinary };
        if let Err(message) = claimed.add(number, opened_by) {
            log.write(Level::Crit, &message);
        }
    }
    Some(claimed.into_listeners())
}

/// Returns the old binary's master, whose child this process is; `None` without an upgrade, and if the old master has
/// exited already and we have another parent. Call this as early as possible: nginx does not pass its pid.
pub(super) fn old_master() -> Option<Pid> {
    env::var_os(VARIABLE)?;
    let parent = rustix::process::getppid()?;
    let said = env::var(MASTER_VARIABLE).ok();
    said.is_none_or(|number| number == parent.to_string()).then_some(parent)
}

/// Returns the dead worker processes of the old binary that were stuck in the kernel before the upgrade.
pub(super) fn left_behind() -> Vec<Pid> {
    let value = env::var(HELD_VARIABLE).unwrap_or_default();
    // Invalid numbers are ignored. The pid of a process that has exited by now may belong to another one, which is
    // alive: it is checked repeatedly.
    value.split(';').filter_map(|number| Pid::from_raw(number.parse().ok().filter(|&number| number > 0)?)).collect()
}

/// State passed to the new binary beside the sockets.
pub(super) struct Inherited<'m> {
    /// Dead worker processes that are stuck in the kernel.
    pub held: &'m [Pid],
    pub secrets: &'m SecretKeeper,
    /// The end for the new binary at which our idle connections arrive.
    pub arrivals: Option<&'m Arrivals>,
}

/// Starts the binary that `argv[0]` names now, with the sockets of `bundle`, which includes unused ones of the service
/// manager. The pid file is renamed before, and back if the start fails.
///
/// # Errors
/// nginx's text.
pub(super) fn start_new_binary(bundle: &Bundle, pid_path: &Path, inherited: &Inherited<'_>) -> Result<Pid, String> {
    let mut arguments = env::args_os();
    let name = arguments.next().ok_or("the name of the binary is unknown")?;
    let (current, old) = (pid_path, pid_file::old_path(pid_path));
    fs::rename(current, &old).map_err(|error| {
        format!(
            "rename() {} to {} failed before executing new binary process \"{}\"{}",
            current.display(),
            old.display(),
            name.display(),
            errno_text(&error)
        )
    })?;
    // Without them, clients only lose their sessions.
    let secrets = inherited.secrets.to_memory().ok().flatten();
    let sockets: Vec<&Arc<OwnedFd>> = bundle.record.listeners.iter().flat_map(|listener| &listener.sockets).collect();
    let list: String = sockets.iter().map(|socket| format!("{};", socket.as_raw_fd())).collect();
    let passed = bundle.record.listeners.iter().filter(|listener| listener.opened_by == OpenedBy::ServiceManager);
    // Further sockets for `reuseport` are ours, but each address is marked as a whole.
    let passed = passed.flat_map(|listener| &listener.sockets);
    let passed: String = passed.map(|socket| format!("{};", socket.as_raw_fd())).collect();
    let mut command = Command::new(path_of_binary(&name));
    command.arg0(&name).args(arguments).env_clear().envs(worker_environment(&bundle.settings));
    command.env(VARIABLE, list).env(MASTER_VARIABLE, std::process::id().to_string()).stdin(Stdio::inherit());
    if !inherited.held.is_empty() {
        command.env(HELD_VARIABLE, inherited.held.iter().map(|pid| format!("{pid};")).collect::<String>());
    }
    if !passed.is_empty() {
        command.env(PASSED_VARIABLE, passed);
    }
    command.envs(secrets.as_ref().map(SecretKeeper::variable));
    command.envs(inherited.arrivals.map(Arrivals::variable));
    // The service manager must be notified by the new master.
    if let Some(socket) = env::var_os("NOTIFY_SOCKET") {
        command.env("NOTIFY_SOCKET", socket);
    }
    let arrivals = inherited.arrivals.map(|arrivals| &**arrivals.descriptor());
    let descriptors = sockets.iter().map(|socket| &***socket).chain(&secrets).chain(arrivals);
    let spawned = with_inheritable(&descriptors.collect::<Vec<_>>(), || command.spawn());
    spawned.map(|child| Pid::from_child(&child)).map_err(|error| {
        let mut message =
            format!("execve() failed while executing new binary process \"{}\"{}", name.display(), errno_text(&error));
        if let Err(error) = fs::rename(&old, current) {
            message.push_str(&format!(
                "; rename() {} back to {} failed{}",
                old.display(),
                current.display(),
                errno_text(&error)
            ));
        }
        message
    })
}

/// Returns the current path of the binary: the name that we were started by or, if a shell found that in its PATH, the
/// path of our file. After a package upgrade another file has the same path, and ours is marked as deleted.
fn path_of_binary(name: &OsStr) -> PathBuf {
    let path = Path::new(name);
    if name.as_bytes().contains(&b'/') {
        return path.to_owned();
    }
    let Ok(executable) = fs::read_link("/proc/self/exe") else { return path.to_owned() };
    let bytes = executable.as_os_str().as_bytes();
    PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(b" (deleted)").unwrap_or(bytes)))
}

/// Renames our pid file back after the new binary has exited.
pub(super) fn restore_pid_file(current: &Path, log: &dyn ErrorLog) {
    let old = pid_file::old_path(current);
    if let Err(error) = fs::rename(&old, current) {
        let text = format!(
            "rename() {} back to {} failed after the new binary process exited{}",
            old.display(),
            current.display(),
            errno_text(&error)
        );
        log.write(Level::Alert, &text);
    }
}

/// Makes descriptors survive an exec during `spawn`. Only one thread of the master starts processes, one at a time, so
/// no other child can inherit them.
fn with_inheritable<T>(sockets: &[&OwnedFd], spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let set_all = |flags| sockets.iter().try_for_each(|socket| rustix::io::fcntl_setfd(socket, flags));
    let result = set_all(FdFlags::empty()).map_err(io::Error::from).and_then(|()| spawn());
    set_all(FdFlags::CLOEXEC)?;
    result
}

fn numbers(value: &str, variable: &str, log: &dyn ErrorLog) -> Vec<RawFd> {
    let mut numbers = Vec::new();
    let mut rest = value;
    while let Some(end) = rest.find([':', ';']) {
        match rest[..end].parse::<RawFd>() {
            Ok(number) if number > 2 && numbers.len() < CLAIMED_MAX && !numbers.contains(&number) => {
                numbers.push(number)
            }
            _ => {
                let text = format!(
                    "invalid socket number \"{rest}\" in {variable} environment variable, ignoring the rest of the \
                     variable"
                );
                log.write(Level::Emerg, &text);
                return numbers;
            }
        }
        rest = &rest[end + 1..];
    }
    if !rest.is_empty() {
        let text = format!("invalid socket number \"{rest}\" in {variable} environment variable, ignoring");
        log.write(Level::Emerg, &text);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::StderrLog;

    #[test]
    fn the_list_is_read_as_far_as_it_is_sound() {
        let log = StderrLog { program: "test".into(), level: Level::Emerg };
        assert_eq!(numbers("6;7:8;", VARIABLE, &log), [6, 7, 8]);
        assert_eq!(numbers("6;x;8;", VARIABLE, &log), [6]);
        assert_eq!(numbers("6;7", VARIABLE, &log), [6]);
        assert_eq!(numbers("6;6;", VARIABLE, &log), [6], "one owner each");
        assert_eq!(numbers("-1;", VARIABLE, &log), [0; 0]);
    }
}
