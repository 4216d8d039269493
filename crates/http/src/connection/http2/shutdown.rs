//! The end of a connection: in two steps that lose no request (RFC 9113, section 6.8), by a timeout, or because of an
//! offence of the client.
//!
//! ```text
//!   GOAWAY (all streams), PING ─► a round trip, or a second ─► GOAWAY (the last stream) ─► its last answer ─► end
//! ```

use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::http2::ConnectionFault;
use gale_runtime::Moment;

use super::{Ending, Http2};
use crate::request::configuration::settings::CoreSettings;

/// Longest wait for the answer to a PING.
const ROUND_TRIP_MAX: Duration = Duration::from_secs(1);

/// Payload of the PING.
const PING: [u8; 8] = *b"shutdown";

/// Progress of the end of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Shutdown {
    /// The connection goes on.
    #[default]
    No,
    /// The client is to be told.
    Wanted,
    /// It was told that no more requests are wanted; those under way are served.
    Announced(Moment),
    /// It was told which request is the last one.
    Final,
}

impl Shutdown {
    /// The connection is to end.
    pub fn want(&mut self) {
        if *self == Shutdown::No {
            *self = Shutdown::Wanted;
        }
    }

    /// Returns `true` if the client knows the last request.
    pub fn is_final(self) -> bool {
        self == Shutdown::Final
    }
}

impl Http2 {
    /// Does the next step, if it is due.
    pub(super) fn poll_shutdown(&self) {
        let must_close = self.client().must_close();
        let state = &mut *self.state.borrow_mut();
        if must_close {
            state.shutdown.want();
        }
        match state.shutdown {
            Shutdown::Wanted => {
                state.codec.announce_shutdown();
                state.codec.ping(PING);
                state.shutdown = Shutdown::Announced(gale_runtime::now() + ROUND_TRIP_MAX);
            }
            Shutdown::Announced(until) if until <= gale_runtime::now() => {
                state.codec.shutdown();
                state.shutdown = Shutdown::Final;
            }
            _ => {}
        }
    }

    /// A PING was answered. If it is the one behind the announcement, everything has come that the client sent before
    /// it knew.
    pub(super) fn note_answer_to_ping(&self, payload: [u8; 8]) {
        let state = &mut *self.state.borrow_mut();
        state.round_trip.note_answer(payload, gale_runtime::now().as_nanos());
        if matches!(state.shutdown, Shutdown::Announced(_)) && payload == PING {
            state.codec.shutdown();
            state.shutdown = Shutdown::Final;
        }
    }

    /// Returns `true` if the last answer has left.
    pub(super) fn is_done(&self) -> bool {
        let state = self.state.borrow();
        state.shutdown.is_final() && state.streams.is_empty() && state.unsent_bytes() == 0 && !state.codec.has_control()
    }

    /// Waits for the next deadline of the client. Ready when the connection ends because of it.
    pub(super) fn poll_deadlines(&self, is_in_head: bool, context: &mut Context<'_>) -> Poll<Ending> {
        loop {
            let now = gale_runtime::now();
            let head_until = self.head_until(is_in_head, now);
            let idle_until = self.idle_until();
            let state = &mut *self.state.borrow_mut();
            let send_until = match state.unsent_since {
                Moment::NEVER => Moment::NEVER,
                since => since + state.send_timeout,
            };
            let mut until = head_until.min(idle_until).min(send_until);
            if until <= now {
                let what = if send_until <= now || head_until <= now {
                    "client timed out (110: Connection timed out)"
                } else {
                    ""
                };
                let ending = if send_until <= now { Ending::Close } else { Ending::Linger };
                if !what.is_empty() {
                    self.client()
                        .log_connection(Level::Info, format_args!("{what} while processing HTTP/2 connection"));
                }
                return Poll::Ready(ending);
            }
            state.time_out_blocked(now);
            until = until.min(state.next_blocked_due());
            if let Shutdown::Announced(step) = state.shutdown {
                until = until.min(step);
            }
            if !state.finished.is_empty() {
                // Handled in the next turn.
                context.waker().wake_by_ref();
            }
            if until == Moment::NEVER {
                state.timer.clear();
                return Poll::Pending;
            }
            state.timer.set(until);
            if state.timer.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
            if let Shutdown::Announced(step) = state.shutdown
                && step <= gale_runtime::now()
            {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    /// Deadline of the rest of a head: `client_header_timeout`.
    fn head_until(&self, is_in_head: bool, now: Moment) -> Moment {
        let since = {
            let state = &mut *self.state.borrow_mut();
            if !is_in_head && !state.codec.is_in_head() {
                state.head_since = Moment::NEVER;
                return Moment::NEVER;
            }
            if state.head_since == Moment::NEVER {
                state.head_since = now;
            }
            state.head_since
        };
        self.of_server(|core| since + *core.client_header_timeout.get())
    }

    /// A connection is idle when its last answer has left.
    pub(super) fn note_idle_or_not(&self) {
        let is_at_rest = {
            let state = self.state.borrow();
            state.streams.is_empty() && state.unsent_bytes() == 0
        };
        if is_at_rest && !self.client().is_idle() {
            self.client().note_idle();
        }
    }

    /// Deadline of a connection without streams: `keepalive_timeout`, before the first request `client_header_timeout`.
    fn idle_until(&self) -> Moment {
        // A connection whose client was told ends by itself.
        if !self.client().is_idle() || self.state.borrow().shutdown != Shutdown::No {
            return Moment::NEVER;
        }
        let since = self.client().idle_since.get();
        self.client().first_wait().map_or(since, |wait| since + wait)
    }

    /// A deadline from the settings of the address' default server.
    fn of_server(&self, ask: impl FnOnce(&CoreSettings) -> Moment) -> Moment {
        let configuration = self.client().next_configuration();
        let http = configuration.http();
        self.client().place(http).map_or(Moment::NEVER, |place| ask(place.core(http)))
    }

    /// The client broke a rule of the connection.
    pub(super) fn note_fault(&self, fault: ConnectionFault) {
        // It was told why.
        self.state.borrow_mut().shutdown = Shutdown::Final;
        let level = if let ConnectionFault::Flood(_) = fault { Level::Warn } else { Level::Info };
        let code = fault.code();
        self.client()
            .log_connection(level, format_args!("client sent {fault}, the HTTP/2 connection ends with {code}"));
    }

    /// The client has left, perhaps in the middle of something.
    pub(super) fn note_left(&self) {
        if !self.state.borrow().streams.is_empty() {
            self.client().log_connection(Level::Info, format_args!("client prematurely closed HTTP/2 connection"));
        }
    }
}
