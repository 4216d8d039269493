//! Upgrade of the binary: the new one inherits the listening sockets.
//!
//! The way is nginx's, so that nginx can be upgraded to Gale and Gale to nginx: the environment variable `NGINX` lists
//! descriptor numbers, each ended by a semicolon; the old pid file is moved aside.
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

/// nginx's variable.
const VARIABLE: &str = "NGINX";
/// The old master's process number, beside it. nginx does not set this.
const MASTER_VARIABLE: &str = "GALE_OLD_MASTER";
/// The numbers of dead worker processes that the kernel holds, in the same way. They have the sockets, too.
const HELD_VARIABLE: &str = "GALE_HELD_PROCESSES";
/// Those of the sockets in nginx's variable that are the service manager's, in the same form.
const PASSED_VARIABLE: &str = "GALE_PASSED_SOCKETS";

/// The sockets that a previous binary left us; none when there was no previous binary.
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

/// The old binary's master, whose child this process is. None without an upgrade, and when the old master is gone
/// already, so that we have another parent. To be asked as early as possible: nginx does not say who it is.
pub(super) fn old_master() -> Option<Pid> {
    env::var_os(VARIABLE)?;
    let parent = rustix::process::getppid()?;
    let said = env::var(MASTER_VARIABLE).ok();
    said.is_none_or(|number| number == parent.to_string()).then_some(parent)
}

/// The dead worker processes that the old binary has left in the kernel's hands, as far as they had died before the
/// upgrade.
pub(super) fn left_behind() -> Vec<Pid> {
    let value = env::var(HELD_VARIABLE).unwrap_or_default();
    // What is no number is nobody's. The number of one that has ended by now may be another's, who is alive: it is
    // looked at again and again.
    value.split(';').filter_map(|number| Pid::from_raw(number.parse().ok().filter(|&number| number > 0)?)).collect()
}

/// What the new binary gets beside the sockets.
pub(super) struct Inherited<'m> {
    /// Dead worker processes that the kernel holds.
    pub held: &'m [Pid],
    pub secrets: &'m SecretKeeper,
    /// Where our idle connections come.
    pub arrivals: Option<&'m Arrivals>,
}

/// Starts the binary that `argv[0]` now names, on the sockets of `bundle`, which has those that the service manager has
/// passed and nobody listens on, too. The pid file is moved aside before, and back when that fails.
///
/// # Errors
/// Said in nginx's words.
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
    // Without them clients only have to begin anew.
    let secrets = inherited.secrets.to_memory().ok().flatten();
    let sockets: Vec<&Arc<OwnedFd>> = bundle.record.listeners.iter().flat_map(|listener| &listener.sockets).collect();
    let list: String = sockets.iter().map(|socket| format!("{};", socket.as_raw_fd())).collect();
    let passed = bundle.record.listeners.iter().filter(|listener| listener.opened_by == OpenedBy::ServiceManager);
    // Further ones for `reuseport` are ours, but what is asked of an address concerns all of its sockets.
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
    // The service manager has to hear from the new master.
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

/// Where the binary is by now: the name that we were started by, or, if the shell had found that in its PATH, what was
/// there then. A package upgrade has put another file under the same path, and ours counts as deleted.
fn path_of_binary(name: &OsStr) -> PathBuf {
    let path = Path::new(name);
    if name.as_bytes().contains(&b'/') {
        return path.to_owned();
    }
    let Ok(executable) = fs::read_link("/proc/self/exe") else { return path.to_owned() };
    let bytes = executable.as_os_str().as_bytes();
    PathBuf::from(OsStr::from_bytes(bytes.strip_suffix(b" (deleted)").unwrap_or(bytes)))
}

/// After the new binary has ended: our pid file gets its name back.
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

/// Lets descriptors survive an exec for the time of `spawn`. Only one thread of the master starts processes, and one at
/// a time, so no other child can catch them.
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
                    "invalid socket number \"{rest}\" in {variable} environment variable, ignoring the rest of the variable"
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
