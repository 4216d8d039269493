//! The worker process's end of the link: orders from the master and reports to it.
//!
//! If the link is lost, the process serves on until it is signalled.

use gale_base::log_level::Level;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::logs::{ASK_FOR_LOGS_PAUSE, Reopened};
use super::{Control, Origin};
use crate::errors::{Report, errno_text};
use crate::link::{Message, Received};
use crate::program::Program;

/// Number of earlier worker processes that died and were replaced.
static RESPAWNED: AtomicU64 = AtomicU64::new(0);

/// Returns how many worker processes died and were replaced.
pub fn respawned() -> u64 {
    RESPAWNED.load(Ordering::Relaxed)
}

/// Reason why a message with descriptors could not be received.
pub(super) const NO_ROOM: &str = "the worker process has too many open files to receive more (worker_rlimit_nofile)";

impl<P: Program> Control<P> {
    pub(super) fn handle_link(&mut self) {
        loop {
            let Origin::Master(Some(link)) = &mut self.origin else {
                return;
            };
            let flushed = link.flush();
            // Read everything that has arrived, even if nothing can be sent any more.
            let received = match link.receive() {
                Ok(None) => flushed.map(|()| None),
                received => received,
            };
            match received {
                Ok(Some(received)) => self.handle_received(received),
                Ok(None) => return,
                Err(error) => {
                    let why = match error.kind() {
                        io::ErrorKind::UnexpectedEof => String::new(),
                        _ => format!(": {error}"),
                    };
                    let text = format!("the link to the master process was lost{why}, serving on until signalled");
                    self.log.write(Level::Alert, &text);
                    self.origin = Origin::Master(None);
                }
            }
        }
    }

    fn handle_received(&mut self, received: Received) {
        match received {
            Received::Bundle(bundle) => self.begin_reload(bundle),
            Received::BundleLost { generation } => {
                self.tell_refused(generation, Report::new(Level::Emerg, NO_ROOM));
            }
            Received::ReopenedLost => {
                self.log.write(Level::Alert, &format!("log files could not be reopened: {NO_ROOM}, trying again"));
                self.ask_for_logs_at = Some(Instant::now() + ASK_FOR_LOGS_PAUSE);
            }
            Received::Reopened(logs) => self.begin_reopening(Reopened::ByMaster(logs)),
            Received::Successor(successor) => self.successor = Some(successor),
            Received::Arrivals(arrivals) => {
                self.arrivals = Some(arrivals);
                self.receive_arrivals();
            }
            Received::PageCacheHelper(socket) => {
                if let Err(error) = self.program.use_page_cache_helper(socket) {
                    let text = format!("the page cache helper cannot be used{}", errno_text(&error));
                    self.log.write(Level::Alert, &text);
                }
            }
            Received::Status(socket) => self.tell_figures(socket),
            Received::Message(Message::Quit { is_last }) => {
                self.begin_graceful_stop(is_last);
                // If the stop had begun before, the master may have missed the report that accepting has ended.
                self.check_accepting();
            }
            Received::Message(Message::Terminate) => self.begin_fast_stop(),
            Received::Message(Message::Look) => self.program.look_for_connections(),
            Received::Message(Message::Secrets { series }) => self.program.use_secrets(&series),
            Received::Message(Message::Respawned { count }) => RESPAWNED.store(count, Ordering::Relaxed),
            Received::Message(_) => self.log.write(Level::Alert, "unexpected message from the master process"),
        }
    }

    pub(super) fn tell_master(&mut self, message: &Message) {
        if let Origin::Master(Some(link)) = &mut self.origin
            && link.send(message).is_err()
        {
            // Logged when the link is next read.
        }
    }

    pub(super) fn tell_refused(&mut self, generation: u64, report: Report) {
        self.tell_master(&Message::Refused { generation, report: report.bounded() });
    }
}
