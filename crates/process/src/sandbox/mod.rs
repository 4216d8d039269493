//! The sandbox of a worker process: it gives up rights, so that foreign code in it does not have them.
//! (docs/decisions/0055-sandbox.md)
//!
//! ```text
//!   calls.rs       system calls (seccomp)            diagnosis.rs   names of the forbidden ones
//!   landlock.rs    files                             places.rs      the files that the worker needs
//! ```
//!
//! A worker process enters it after it has changed its user and before it starts threads; everything that it needs from
//! outside has arrived with the bundle by then. The master and its other children stay outside: a sandbox cannot be
//! left, and the new binary of an upgrade is the master's child.

mod calls;
mod diagnosis;
mod landlock;
mod places;

use std::io;
use std::path::{Path, PathBuf};

use gale_base::log_level::Level;
use serde::{Deserialize, Serialize};

use self::calls::Strictness;
use self::landlock::Rules;
pub(crate) use self::places::OpenPlace;
pub use self::places::{Place, Places, Ports};
use crate::errors::{ErrorLog, errno_text};

/// `sandbox auto|on|off`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxMode {
    /// Restrictions that the kernel supports and no site notices: system calls, programs and writing.
    Auto,
    /// All restrictions, or the process does not start.
    On,
    /// No restrictions.
    #[default]
    Off,
}

impl SandboxMode {
    /// Returns the value as written in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            SandboxMode::Auto => "auto",
            SandboxMode::On => "on",
            SandboxMode::Off => "off",
        }
    }
}

/// Files that every worker process reads: data about itself, its memory and its disks, and time zones.
const READABLE: [&str; 5] = ["/proc", "/sys", "/dev/null", "/etc/localtime", "/usr/share/zoneinfo"];

/// The sandbox of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Strictness.
    pub mode: SandboxMode,
    /// True if forbidden system calls are named in the error log.
    pub diagnoses: bool,
    /// Places of files that are written, removed and renamed.
    pub writable: Places,
    /// Places of files that are read.
    pub readable: Places,
    /// Ports of servers.
    pub ports: Ports,
}

impl Sandbox {
    /// True unless `sandbox off`.
    pub fn is_on(&self) -> bool {
        self.mode != SandboxMode::Off
    }

    /// True if the process makes no rings of io_uring after its start.
    pub(crate) fn forbids_rings(&self) -> bool {
        self.mode == SandboxMode::On
    }

    /// Resolves the directories of the places and opens those that are written to. Runs in the process that opens the
    /// configuration's resources.
    pub(crate) fn find_places(&mut self) -> Vec<OpenPlace> {
        if !self.is_on() {
            return Vec::new();
        }
        self.readable.find_exactly();
        self.writable.find()
    }

    /// Returns the reason why a process in this sandbox cannot serve a configuration that needs `next`, or `None`.
    pub(crate) fn lacks(&self, next: &Sandbox) -> Option<&'static str> {
        if (self.mode, self.diagnoses) != (next.mode, next.diagnoses) {
            Some("\"sandbox\" has changed")
        } else if self.is_on() && !self.writable.cover(&next.writable) {
            Some("it writes to other directories")
        } else if self.is_on() && !self.readable.cover(&next.readable) {
            Some("it reads from other directories")
        } else if self.is_on() && !self.ports.cover(&next.ports) {
            Some("it connects to other ports")
        } else {
            None
        }
    }

    /// Enters the sandbox irrevocably. Must be called before the first thread is started. `writable` is the result of
    /// [`Sandbox::find_places`].
    ///
    /// # Errors
    /// `sandbox on` cannot be enforced here.
    pub(crate) fn enter(&self, writable: Vec<OpenPlace>, dumps_core: bool, log: &dyn ErrorLog) -> Result<(), String> {
        if !self.is_on() {
            return Ok(());
        }
        let mode = self.mode.name();
        let files = self.restrict_files(writable, dumps_core, log);
        let calls = self.restrict_calls().map_err(|error| format!("seccomp() failed{}", errno_text(&error)));
        if self.mode == SandboxMode::On
            && let (Err(why), _) | (_, Err(why)) = (&files, &calls)
        {
            return Err(format!("\"sandbox on\" cannot be had here: {why}"));
        }
        let told = |restricted: Result<String, String>, what: &str| match restricted {
            Ok(how) => how,
            Err(why) => format!("{what} not restricted ({why})"),
        };
        let calls = told(calls.map(|()| "system calls restricted".to_owned()), "system calls");
        let files = told(files, "files");
        log.write(Level::Notice, &format!("sandbox {mode}: {calls}, {files}"));
        Ok(())
    }

    /// Restricts access to files and ports; returns a description of the remaining access.
    fn restrict_files(
        &self,
        mut writable: Vec<OpenPlace>,
        dumps_core: bool,
        log: &dyn ErrorLog,
    ) -> Result<String, String> {
        let (found, missing) = self.writable.paths();
        for path in missing {
            let text =
                format!("sandbox: \"{}\" is not there, and cannot be written to before a reload", path.display());
            log.write(Level::Notice, &text);
        }
        // A file that this process cannot open needs no rule.
        let open = |path: &Path| OpenPlace::open(path).ok();
        writable.extend(open(Path::new("/dev/null")));
        writable.extend(core_directory().filter(|_| dumps_core).and_then(|path| open(&path)));
        let named = self.readable.paths().0;
        let readable = named.iter().map(PathBuf::as_path).chain(READABLE.iter().map(Path::new)).filter_map(open);
        let rules = Rules {
            writable: (self.writable != Places::Anywhere).then_some(writable),
            // Files that are written are read, too.
            readable: (self.readable != Places::Anywhere && self.writable != Places::Anywhere)
                .then(|| readable.collect()),
            ports: match &self.ports {
                Ports::Any => None,
                Ports::Only(ports) => Some(ports.iter().copied().collect()),
            },
        };
        let has_ports = landlock::restrict(&rules)?;
        let mut left = match &self.writable {
            Places::Anywhere => "writing not restricted (a path begins with a variable)".to_owned(),
            Places::Below(_) => format!("writing restricted to {} directories", found.len()),
        };
        if self.mode == SandboxMode::On {
            left += &match &self.readable {
                Places::Anywhere => ", reading not restricted".to_owned(),
                Places::Below(places) => format!(", reading to {}", places.len()),
            };
            left += &match &self.ports {
                Ports::Any => ", connecting not restricted".to_owned(),
                Ports::Only(_) if !has_ports => ", connecting not restricted (before Linux 6.7)".to_owned(),
                Ports::Only(ports) => format!(", connecting to {} TCP ports", ports.len()),
            };
        }
        Ok(left)
    }

    fn restrict_calls(&self) -> io::Result<()> {
        if self.diagnoses {
            diagnosis::install()?;
            return calls::restrict(Strictness::Diagnosed);
        }
        calls::restrict(Strictness::Enforced)
    }
}

/// Forbids new io_uring rings in this process. Without seccomp nothing is forbidden, as the log says.
///
/// # Errors
/// Error of the kernel.
pub(crate) fn forbid_rings() -> io::Result<()> {
    if gale_runtime::seccomp::is_available() { calls::forbid_rings() } else { Ok(()) }
}

/// Returns the directory of core files; `None` if the kernel passes them to a program.
fn core_directory() -> Option<PathBuf> {
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").ok()?;
    match pattern.as_bytes().first()? {
        b'|' | b'@' => None,
        b'/' => Some(Path::new(pattern.trim_end()).parent()?.to_owned()),
        _ => std::env::current_dir().ok(),
    }
}

/// Returns the kernel's sandbox features, for `-V`.
pub fn sandbox_support() -> String {
    let calls = if gale_runtime::seccomp::is_available() { "system calls (seccomp)" } else { "" };
    let files = landlock::version().map(|version| format!("files (Landlock {version})"));
    match (calls, files) {
        ("", None) => "nothing, the kernel has neither seccomp nor Landlock".to_owned(),
        (calls, None) => format!("{calls}, the kernel has no Landlock"),
        ("", Some(files)) => files,
        (calls, Some(files)) => format!("{calls}, {files}"),
    }
}
