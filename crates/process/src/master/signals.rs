//! Signals to the master: the log message and the action of each. <https://nginx.org/en/docs/control.html>
//!
//! Most actions are implemented in the file of their concept (`stop.rs`, `reload.rs`, `logs.rs`, `workers.rs`); only
//! the start of a new binary is here, because no other event triggers it.

use super::Master;
use crate::handover;
use crate::program::Program;
use crate::signals::{Arrived, Signal};
use crate::upgrade::{self, Inherited};
use gale_base::log_level::Level;

impl<P: Program> Master<P> {
    pub(super) fn handle_signal(&mut self, arrived: &Arrived) {
        // As in nginx, no further upgrade is possible while our parent is the old binary or a new one runs. Nor during
        // a stop, which has closed the sockets.
        let ignored = arrived.signal == Signal::ChangeBinary && (self.upgrade_is_running() || self.stop.is_some());
        let action = match arrived.signal {
            Signal::Quit => ", shutting down",
            Signal::Terminate => ", exiting",
            Signal::StopAccepting if self.daemonized => ", stop accepting connections",
            Signal::Reconfigure => ", reconfiguring",
            Signal::Reopen => ", reopening logs",
            Signal::ChangeBinary if ignored => ", ignoring",
            Signal::ChangeBinary => ", changing binary",
            Signal::StopAccepting | Signal::Child | Signal::Other => "",
        };
        self.log.write(Level::Notice, &arrived.message(action));
        match arrived.signal {
            Signal::Quit => self.begin_graceful_stop(),
            Signal::Terminate => self.begin_fast_stop(),
            Signal::StopAccepting if self.daemonized => self.rest(),
            Signal::Reconfigure => self.reconfigure(),
            Signal::Reopen => self.reopen_logs(),
            Signal::ChangeBinary if ignored => self.log.write(
                Level::Crit,
                "the changing binary signal is ignored: \
                 you should shutdown or terminate before either old or new binary's process",
            ),
            Signal::ChangeBinary => self.change_binary(),
            Signal::Child => self.reap(),
            Signal::StopAccepting | Signal::Other => {}
        }
    }

    fn change_binary(&mut self) {
        self.log.write(Level::Notice, "changing binary");
        // Without the pair, idle connections are closed instead of being passed on.
        let (successor, arrivals) = handover::pair().ok().unzip();
        let inherited = Inherited { held: &self.all_held(), secrets: &self.secrets, arrivals: arrivals.as_ref() };
        let bundle = self.bundle.with_unused(&self.passed);
        match upgrade::start_new_binary(&bundle, &self.pid_path, &inherited) {
            Ok(pid) => {
                self.log.write(Level::Notice, &format!("start new binary process {pid}"));
                self.new_binary = Some(pid);
                self.successor = successor;
            }
            Err(message) => self.log.write(Level::Alert, &message),
        }
    }

    pub(super) fn upgrade_is_running(&self) -> bool {
        self.new_binary.is_some() || self.old_binary_runs()
    }

    fn old_binary_runs(&self) -> bool {
        self.old_master.is_some() && rustix::process::getppid() == self.old_master
    }
}
