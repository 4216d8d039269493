//! Socket activation: the service manager has opened the listening sockets and passes them when it starts us.
//!
//! `LISTEN_FDS` says how many there are, from number 3 on; `LISTEN_PID` whom they are meant for; `LISTEN_FDNAMES`, with
//! colons between, what the manager calls them, which is told in messages alone. A socket is used for the `listen` that
//! has its address. One that nobody listens on is kept, because the manager keeps it, too: a later configuration could
//! not open it. <https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html>

use std::env;
use std::os::fd::RawFd;

use gale_base::log_level::Level;

use super::bundle::Bundle;
use super::claim::{CLAIMED_MAX, Claimed};
use super::errors::ErrorLog;
use super::listen::{ListenerHandle, OpenedBy};

/// SD_LISTEN_FDS_START
const FIRST: RawFd = 3;

/// The sockets that were passed to this process. To be asked before it opens one itself.
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

/// Tells of passed sockets that the configuration does not listen on: who connects to them waits for an answer.
pub(super) fn tell_unused(bundle: &Bundle, passed: &[ListenerHandle], log: &dyn ErrorLog) {
    for listener in bundle.unused(passed) {
        let text = format!("no \"listen\" for the passed socket {}, it is kept unused", listener.spec.address);
        log.write(Level::Warn, &text);
    }
}

/// How many sockets are meant for the process `own`.
fn count_for(own: u32, pid: Option<&str>, count: Option<&str>) -> Result<usize, String> {
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(0) };
    let invalid = |name: &str, value: &str| {
        format!("invalid {name} environment variable \"{}\", ignoring", value.escape_default())
    };
    let pid: u32 = pid.parse().map_err(|_| invalid("LISTEN_PID", pid))?;
    // Somebody else's, who has started us: not ours to judge.
    if pid != own {
        return Ok(0);
    }
    count.parse().ok().filter(|&count| count <= CLAIMED_MAX).ok_or_else(|| invalid("LISTEN_FDS", count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_for_whom_they_are_meant() {
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
