//! Limits of the wait for a client that sends a body: `client_body_timeout` and `client_body_min_rate`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#client_body_timeout>)

use std::task::{Context, Poll};
use std::time::Duration;

use gale_runtime::{Moment, Timer};

use crate::request::exchange::{BodyLimits, RequestBodyError};

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct BodyWait {
    /// Start of the current wait, if the client is being waited for. Its deadline is running.
    since: Option<Moment>,
    /// Total of the waits before the current one.
    waited: Duration,
}

impl BodyWait {
    /// Ends the current wait: bytes have come.
    pub fn stop(&mut self) {
        if let Some(since) = self.since.take() {
            self.waited += gale_runtime::now().since(since);
        }
    }

    /// Total time that the client has been waited for.
    pub fn waited(&self) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| gale_runtime::now().since(since))
    }

    /// Waits for a client that has sent `received` bytes. Ready when the wait was too long. The caller stops `timer`
    /// when it goes on.
    pub fn poll_ended(
        &mut self,
        timer: &mut Timer,
        received: u64,
        limits: &BodyLimits,
        context: &mut Context<'_>,
    ) -> Poll<RequestBodyError> {
        let since = self.since.unwrap_or_else(|| {
            let now = gale_runtime::now();
            timer.set(now + limits.silence_max.min(self.time_left(received, limits)));
            now
        });
        self.since = Some(since);
        timer.poll_expired(context).map(|()| {
            let is_silent = gale_runtime::now().since(since) >= limits.silence_max;
            if is_silent { RequestBodyError::TimedOut } else { RequestBodyError::TooSlow }
        })
    }

    /// Time that is left for a client that has sent `received` bytes. Only waiting counts: a client is not slow because
    /// we are.
    fn time_left(&self, received: u64, limits: &BodyLimits) -> Duration {
        let Some(rate) = limits.min_rate else { return Duration::MAX };
        let milliseconds = received.saturating_mul(1000) / rate.bytes_per_second;
        (rate.grace + Duration::from_millis(milliseconds)).saturating_sub(self.waited)
    }
}
