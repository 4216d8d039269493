//! How long a client may be waited for while it sends a body: `client_body_timeout` and `client_body_min_rate`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#client_body_timeout>)

use std::task::{Context, Poll};
use std::time::Duration;

use gale_runtime::{Moment, Timer};

use crate::request::exchange::{BodyLimits, RequestBodyError};

/// See the file's head.
#[derive(Debug, Default)]
pub(super) struct BodyWait {
    /// Since when the client is waited for: its deadline is running.
    since: Option<Moment>,
    /// How long it has been waited for before that.
    waited: Duration,
}

impl BodyWait {
    /// Something has come.
    pub fn stop(&mut self) {
        if let Some(since) = self.since.take() {
            self.waited += gale_runtime::now().since(since);
        }
    }

    /// How long it has been waited for.
    pub fn waited(&self) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| gale_runtime::now().since(since))
    }

    /// Waits for a client that has sent so many bytes; ready when that took too long. `timer` is stopped by whoever
    /// goes on.
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

    /// How much longer a client may be waited for that has sent so much. Only waiting counts: a client that we are too
    /// slow for is none that is slow.
    fn time_left(&self, received: u64, limits: &BodyLimits) -> Duration {
        let Some(rate) = limits.min_rate else { return Duration::MAX };
        let milliseconds = received.saturating_mul(1000) / rate.bytes_per_second;
        (rate.grace + Duration::from_millis(milliseconds)).saturating_sub(self.waited)
    }
}
