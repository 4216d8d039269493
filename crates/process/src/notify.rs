//! The service manager's protocol: READY, RELOADING, STOPPING. Without NOTIFY_SOCKET nothing is sent.
//! <https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html>

use std::env;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process;

/// The service manager, if there is one.
pub(super) struct Notifier {
    address: Option<SocketAddr>,
}

impl Notifier {
    pub fn from_environment() -> Notifier {
        let address = env::var_os("NOTIFY_SOCKET").and_then(|name| match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
            _ => SocketAddr::from_pathname(&name).ok(),
        });
        Notifier { address }
    }

    pub fn ready(&self) {
        self.send(&format!("READY=1\nMAINPID={}\n", process::id()));
    }

    pub fn reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}\n"));
    }

    pub fn stopping(&self) {
        self.send("STOPPING=1\n");
    }

    /// Sends without blocking and ignores errors: a manager that does not read must not hold up the master.
    fn send(&self, text: &str) {
        let Some(address) = &self.address else { return };
        let Ok(socket) = UnixDatagram::unbound() else {
            return;
        };
        let _ = socket.set_nonblocking(true);
        let _ = socket.send_to_addr(text.as_bytes(), address);
    }
}
