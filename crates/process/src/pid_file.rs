//! The pid file: written when all sockets listen, removed on exit, renamed during an upgrade.
//! <https://nginx.org/en/docs/ngx_core_module.html#pid>

use gale_base::log_level::Level;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::errors::{ErrorLog, errno_text};

/// Writes our pid.
///
/// # Errors
/// `open() "/run/gale.pid" failed (13: Permission denied)`
pub(super) fn write(path: &Path) -> Result<(), String> {
    let name = path.display();
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(path)
        .map_err(|error| format!("open() \"{name}\" failed{}", errno_text(&error)))?;
    writeln!(file, "{}", std::process::id()).map_err(|error| format!("write() \"{name}\" failed{}", errno_text(&error)))
}

/// Checks for `-t` that the file can be written. Like nginx, this creates the file.
pub(super) fn test(path: &Path) -> Result<(), String> {
    let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(path);
    opened.map(drop).map_err(|error| format!("open() \"{}\" failed{}", path.display(), errno_text(&error)))
}

pub(super) fn remove(path: &Path, log: &dyn ErrorLog) {
    if let Err(error) = fs::remove_file(path) {
        log.write(Level::Alert, &format!("unlink() \"{}\" failed{}", path.display(), errno_text(&error)));
    }
}

/// Moves the file after a reload. A failure is logged, and the server keeps the old one. Returns `true` if the file was
/// moved.
pub(super) fn change(old: &Path, new: &Path, log: &dyn ErrorLog) -> bool {
    if old == new {
        return false;
    }
    let written = write(new);
    match &written {
        Ok(()) => remove(old, log),
        Err(message) => log.write(Level::Emerg, message),
    }
    written.is_ok()
}

/// Returns the path of the old binary's pid file during an upgrade.
pub(super) fn old_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".oldbin");
    name.into()
}

/// Reads the pid in `path`.
///
/// # Errors
/// nginx's text for a missing file and for one with other contents.
pub(super) fn read(path: &Path) -> Result<i32, String> {
    let name = path.display();
    let failed = |call: &str, error| format!("{call} \"{name}\" failed{}", errno_text(&error));
    let mut text = Vec::new();
    // nginx reads as many bytes as its longest number has.
    let file = fs::File::open(path).map_err(|error| failed("open()", error))?;
    file.take(22).read_to_end(&mut text).map_err(|error| failed("read()", error))?;
    while matches!(text.last(), Some(b'\r' | b'\n')) {
        text.pop();
    }
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = String::from_utf8_lossy(&text);
    let number = if digits { text.parse().ok().filter(|&number| number > 0) } else { None };
    number.ok_or_else(|| format!("invalid PID number \"{text}\" in \"{name}\""))
}
