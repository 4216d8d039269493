//! Notices that a client has left while it is something else that is waited for.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_runtime::{Moment, Timer};

use crate::request::exchange::Exchange;

/// How long a client that has ended its own direction is waited with by a handler. Over TCP one that has closed its
/// socket looks the same until something is sent to it; so a disk that hangs would keep them for ever. An hour is
/// longer than anybody waits for an answer.
pub const HANDLER_PATIENCE: Duration = Duration::from_secs(3600);

/// How often the connection of such a client is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Whether a client has left: its connection is broken. One that has only ended its own direction, as `nc -N` does, is
/// still answered, as nginx does where it does not look at its clients meanwhile; but not for ever.
#[derive(Default)]
pub(crate) struct Departure(Option<Box<HalfClosed>>);

/// The client has ended its own direction.
struct HalfClosed {
    next_look: Timer,
    until: Moment,
}

impl Departure {
    /// Ready when the client has left; one that has ended its own direction, after so much patience. To be polled when
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

    /// Something has come that was waited for: patience begins anew.
    pub fn begin_again(&mut self) {
        self.0 = None;
    }
}
