//! Idle connections on their way out of a worker process whose successor serves already: after an upgrade of the
//! binary, or where a reload needed another process.
//!
//! ```text
//!   idle, in the clear ──────────────► passed: its next request is the successor's, and the client notices nothing
//!   idle, over TLS, or told of by a
//!   proxy ── its next answer says that it closes ──► closed; without a request after some seconds
//!   HTTP/2 ── GOAWAY (http2/shutdown.rs)
//! ```

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_process::{IdleNote, Successor};
use gale_runtime::{Detached, TaskId};
use gale_tls::Transport;

use super::beginning::Beginning;
use super::worker::HttpConnections;
use super::{HttpConnection, Stage};

/// Time for which a connection that cannot be passed is kept: the answer to its next request says that it closes.
const KEPT_TIME: Duration = Duration::from_secs(10);

/// Longest time in which the successor has to make room for all.
const PASSING_TIME: Duration = Duration::from_secs(10);

/// Pause between two attempts while the successor has no room.
const PASSING_PAUSE: Duration = Duration::from_millis(2);

/// Connections that are passed before other tasks have their turn.
const PASSED_AT_ONCE: usize = 32;

/// Passes idle connections on, and closes the others in time.
pub(super) fn pass_idle(connections: &Rc<HttpConnections>, successor: &Successor) {
    connections.worker.keep_idle_until(gale_runtime::now() + KEPT_TIME);
    let idle = connections.table.some(|connection, is_awake| !is_awake && connection.can_be_passed());
    let (all, successor) = (Rc::clone(connections), successor.clone());
    let generation = connections.worker.with_configuration(|configuration| configuration.http().generation);
    let passing = async move {
        let until = gale_runtime::now() + PASSING_TIME;
        let mut passed = 0_usize;
        for (place, (task, connection)) in idle.into_iter().enumerate() {
            if place % PASSED_AT_ONCE == PASSED_AT_ONCE - 1 {
                gale_runtime::yield_now().await;
            }
            let Some((note, detached)) = connection.upgrade().and_then(|connection| connection.leave(task)) else {
                continue;
            };
            gale_runtime::abort(task);
            let Some(received) = detached.received() else { continue };
            // A client whose connection is not passed finds it closed, as if there were no successor.
            loop {
                match successor.pass(detached.as_fd(), &note, received) {
                    Ok(()) => passed += 1,
                    Err(error) if error.kind() == ErrorKind::WouldBlock && gale_runtime::now() < until => {
                        gale_runtime::sleep(PASSING_PAUSE).await;
                        continue;
                    }
                    Err(_) => {}
                }
                break;
            }
        }
        if passed > 0 {
            let message = format!("{passed} idle connections were passed to the new worker process");
            all.worker.configuration().error_log().write(Level::Notice, None, &message);
        }
        all.table.drain();
    };
    if !connections.worker.background.spawn(generation, passing) {
        connections.table.drain();
    }
}

impl HttpConnection {
    /// Returns `true` if the connection is idle and an [`IdleNote`] tells all there is to know of it.
    fn can_be_passed(&self) -> bool {
        let client = &self.client;
        let began = client.began.get();
        let is_new = began.is_none() && client.info.requests.get() == 0;
        let is_plain = began == Some(Beginning { proxy_protocol: false, ssl: false });
        matches!(client.stream, Transport::Plain(_))
            && client.is_idle()
            && (is_new || is_plain)
            && client.next_generation().is_none()
            && self.holds_nothing()
            && client.info.passes() == 0
            && !client.info.has_notes()
    }

    /// Returns `true` if the stage holds nothing that another process would have to know.
    fn holds_nothing(&self) -> bool {
        match &*self.stage.borrow() {
            Stage::Beginning(first) => first.is_empty(),
            Stage::Http1(http1) => !http1.has_input(),
            Stage::Tls | Stage::Preface(_) | Stage::Http2(_) | Stage::Lingering { .. } => false,
        }
    }

    /// Takes the socket out of the loop, if the connection is still idle. The connection has to be closed then.
    fn leave(&self, task: TaskId) -> Option<(IdleNote, Detached)> {
        if gale_runtime::is_awake(task) || !self.can_be_passed() {
            return None;
        }
        let client = &self.client;
        let Transport::Plain(stream) = &client.stream else { return None };
        let note = IdleNote {
            listening: (*client.info.listening).clone(),
            requests: client.info.requests.get(),
            age: gale_runtime::now().since(client.info.accepted),
            idle_max: self.idle_left(),
        };
        Some((note, stream.release().ok()?))
    }

    /// Idle time that is left.
    fn idle_left(&self) -> Duration {
        let idle = gale_runtime::now().since(self.client.idle_since.get());
        Duration::from_millis(self.client.idle_max_ms.get().into()).saturating_sub(idle)
    }

    /// Continues a connection that another process has served.
    pub(super) fn resume(&self, idle_max: Duration) {
        self.client.began.set(Some(Beginning { proxy_protocol: false, ssl: false }));
        self.client.idle_max_ms.set(u32::try_from(idle_max.as_millis()).unwrap_or(u32::MAX));
    }
}
