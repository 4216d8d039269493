//! Socket activation: the service manager opens the listening sockets and passes them when it starts us.
//!
//! `LISTEN_FDS` is their number; the descriptors begin with 3. `LISTEN_PID` is the pid of the intended process.
//! `LISTEN_FDNAMES` has their names, separated by colons, which appear in messages only. A socket is used for the
//! `listen` with its address. A socket without a `listen` is kept, because the manager keeps it, too: a later
//! configuration could not open the address.
//! <https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html>

use std::env;
use std::os::fd::RawFd;

use gale_base::log_level::Level;

use super::bundle::Bundle;
use super::claim::{CLAIMED_MAX, Claimed};
use super::errors::ErrorLog;
use super::listen::{ListenerHandle, OpenedBy};

/// SD_LISTEN_FDS_START
const FIRST: RawFd = 3;

/// Returns the sockets passed to this process. Must be called before the process opens a socket.
pub(super) fn passed_listeners(log: &dyn ErrorLog) -> Vec<ListenerHandle> {
    let variable = |name| env::var(name).ok();
    let (pid, count) = (variable("LISTEN_PID"), variable("LISTEN_FDS"));
    let count = count_for(std::process::id(), pid.as_deref(), count.as_deref()).unwrap_or_else(|message| {
        log.write(Level::Emerg, &message);
        0
    });
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut claimed = Claimed::default();
    for number in (FIRST..).take(count) {
        let name = names.next().unwrap_or_default().escape_default();
        match claimed.add(number, OpenedBy::ServiceManager) {
            Ok(spec) => {
                log.write(Level::Notice, &format!("using passed socket #{number} \"{name}\", {}", spec.address));
            }
            Err(message) => log.write(Level::Crit, &format!("{message}, passed as \"{name}\", ignored")),
        }
    }
    claimed.into_listeners()
}

/// Warns of passed sockets without a `listen`: clients that connect to them wait in vain.
pub(super) fn tell_unused(bundle: &Bundle, passed: &[ListenerHandle], log: &dyn ErrorLog) {
    for listener in bundle.unused(passed) {
        let text = format!("no \"listen\" for the passed socket {}, it is kept unused", listener.spec.address);
        log.write(Level::Warn, &text);
    }
}

/// Returns the number of sockets intended for the process `own`.
fn count_for(own: u32, pid: Option<&str>, count: Option<&str>) -> Result<usize, String> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(0) };
    let invalid = |name: &str, value: &str| {
        format!("invalid {name} environment variable \"{}\", ignoring", value.escape_default())
    };
    let pid: u32 = pid.parse().map_err(|_| invalid("LISTEN_PID", pid))?;
    // Intended for the process that started us, which checks the values itself.
    if pid != own {
        return Ok(0);
    }
    count.parse().ok().filter(|&count| count <= CLAIMED_MAX).ok_or_else(|| invalid("LISTEN_FDS", count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_for_the_intended_process() {
        assert_eq!(count_for(7, Some("7"), Some("2")), Ok(2));
        assert_eq!(count_for(7, Some("8"), Some("2")), Ok(0), "our parent's");
        assert_eq!(count_for(7, Some("8"), Some("x")), Ok(0), "our parent's");
        assert_eq!(count_for(7, None, Some("2")), Ok(0));
        assert_eq!(count_for(7, Some("7"), None), Ok(0));
        for wrong in ["", "-1", "two", "65537", "99999999999999999999"] {
            assert!(count_for(7, Some("7"), Some(wrong)).is_err(), "{wrong}");
        }
        assert!(count_for(7, Some("seven"), Some("2")).is_err());
    }
}
