//! Starts the same binary again as a worker process or helper.
//!
//! The binary is opened when this process starts, because after a package upgrade the path would name another version.
//! The new process gets its end of the link as standard input, and its role in an environment variable.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;

use super::link::Link;
use super::settings::ProcessSettings;
use super::tunables;
use super::user::Account;

/// Environment variable with the role of a process that the master has started.
pub(super) const ROLE_VARIABLE: &str = "GALE_PROCESS";

/// Environment variable with the account that the page cache helper assumes, in JSON.
const ACCOUNT_VARIABLE: &str = "GALE_ACCOUNT";

/// Role of a process that the master has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Serves.
    Worker,
    /// Builds the bundle of a reload.
    Helper,
    /// Tells which parts of files are in memory.
    PageCacheHelper,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Worker => "worker",
            Role::Helper => "helper",
            Role::PageCacheHelper => "page-cache-helper",
        }
    }

    /// Returns the role in the environment.
    pub(super) fn from_environment() -> Option<Role> {
        let value = env::var_os(ROLE_VARIABLE)?;
        [Role::Worker, Role::Helper, Role::PageCacheHelper].into_iter().find(|role| value == role.name())
    }
}

/// The binary of this process.
pub(super) struct Executable {
    descriptor: OwnedFd,
}

impl Executable {
    pub fn open() -> io::Result<Executable> {
        let descriptor = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Executable { descriptor })
    }

    /// Starts a process. A worker's environment has only the variables of `env` and hints on the processor for the C
    /// library; the helper inherits the master's environment.
    pub fn start(&self, role: Role, program: &str, settings: &ProcessSettings) -> io::Result<(Pid, Link)> {
        let (link, theirs) = Link::pair()?;
        let mut command = self.command(role, program);
        if role == Role::Worker {
            // Variables of the configuration come last and take precedence.
            command.env_clear().envs(tunables::variable()).envs(worker_environment(settings));
        }
        Ok((spawn(command, role, theirs)?, link))
    }

    /// Starts the page cache helper, which answers on this socket, with this account.
    pub fn start_page_cache_helper(
        &self,
        program: &str,
        account: Option<&Account>,
        socket: OwnedFd,
    ) -> io::Result<Pid> {
        let mut command = self.command(Role::PageCacheHelper, program);
        command.env_clear();
        if let Some(account) = account {
            command.env(ACCOUNT_VARIABLE, serde_json::to_string(account)?);
        }
        spawn(command, Role::PageCacheHelper, socket)
    }

    fn command(&self, role: Role, program: &str) -> Command {
        // Resolved in the new process before its descriptors are closed: its table is a copy of ours.
        let mut command = Command::new(format!("/proc/self/fd/{}", self.descriptor.as_fd().as_raw_fd()));
        command.arg0(match role {
            Role::Worker => format!("{program}: worker process"),
            Role::Helper => format!("{program}: reload helper"),
            Role::PageCacheHelper => format!("{program}: page cache helper"),
        });
        command
    }
}

/// Starts a process with this role and the socket as standard input. The master's waitpid reaps it like every other
/// child.
fn spawn(mut command: Command, role: Role, socket: OwnedFd) -> io::Result<Pid> {
    command.env(ROLE_VARIABLE, role.name()).stdin(Stdio::from(socket));
    Ok(Pid::from_child(&command.spawn()?))
}

/// Takes the link that the master passed as standard input, which becomes /dev/null.
pub(super) fn inherited_link() -> io::Result<Link> {
    inherited_socket().map(Link::new)
}

/// Takes the socket that the master passed as standard input, which becomes /dev/null.
pub(super) fn inherited_socket() -> io::Result<OwnedFd> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::net::sockopt::socket_type(&socket)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    Ok(socket)
}

/// Returns the account that the master has passed, if any.
pub(super) fn inherited_account() -> io::Result<Option<Account>> {
    let Ok(text) = env::var(ACCOUNT_VARIABLE) else { return Ok(None) };
    Ok(Some(serde_json::from_str(&text)?))
}

/// Returns the variables of `env` in the configuration, and TZ. <https://nginx.org/en/docs/ngx_core_module.html#env>
pub(super) fn worker_environment(settings: &ProcessSettings) -> Vec<(OsString, OsString)> {
    let time_zone = settings.environment.iter().all(|entry| entry.name != "TZ").then(|| OsString::from("TZ"));
    let listed = settings.environment.iter().map(|entry| (entry.name.clone(), entry.value.clone()));
    listed
        .chain(time_zone.map(|name| (name, None)))
        .filter_map(|(name, value)| {
            let value = value.or_else(|| env::var_os(&name))?;
            Some((name, value))
        })
        .collect()
}
