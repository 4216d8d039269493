//! Detects that a client has left while the request waits for something else.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Moment, Timer};

use crate::request::exchange::Exchange;

/// Maximum time that a handler keeps waiting for a client that has half-closed its connection. Over TCP a closed socket
/// looks the same until something is sent to it, so without a limit a hung disk would keep such requests for ever. No
/// client waits an hour for an answer.
pub const HANDLER_PATIENCE: Duration = Duration::from_secs(3600);

/// Interval between checks of a half-closed connection.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Detector of a client that has left: its connection is broken. A client that only half-closes its connection, as
/// `nc -N` does, is still answered, for a limited time. nginx answers it, too, where it does not check its clients.
#[derive(Default)]
pub(crate) struct Departure(Option<Box<HalfClosed>>);

/// The client has half-closed its connection.
struct HalfClosed {
    next_look: Timer,
    until: Moment,
}

impl Departure {
    /// Ready when the client has left, or `patience` after it has half-closed its connection. To be polled when
    /// everything else is pending.
    pub fn poll(&mut self, exchange: &dyn Exchange, patience: Duration, context: &mut Context<'_>) -> Poll<()> {
        let half_closed = match &mut self.0 {
            Some(half_closed) => half_closed,
            none => {
                ready!(exchange.poll_gone(context));
                let until = gale_runtime::now() + patience;
                none.insert(Box::new(HalfClosed { next_look: Timer::after(Duration::ZERO), until }))
            }
        };
        loop {
            if exchange.is_broken() || half_closed.until <= gale_runtime::now() {
                return Poll::Ready(());
            }
            ready!(half_closed.next_look.poll_expired(context));
            half_closed.next_look.set_after(LOOK_EVERY);
        }
    }

    /// Restarts the waiting time: the request has made progress.
    pub fn begin_again(&mut self) {
        self.0 = None;
    }
}
