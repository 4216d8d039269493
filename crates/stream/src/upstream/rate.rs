//! Rate limit of one direction, in bytes per second, computed as in nginx.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_download_rate>)

use std::task::{Context, Poll};
use std::time::Duration;

use gale_runtime::{Moment, Timer};

pub(super) struct Rate {
    per_second: u64,
    began: Moment,
    passed: u64,
    delay: Timer,
    is_delayed: bool,
}

impl Rate {
    /// Returns a limit that starts now; 0 for no limit.
    pub fn new(per_second: u64) -> Rate {
        Rate { per_second, began: gale_runtime::now(), passed: 0, delay: Timer::new(), is_delayed: false }
    }

    pub fn is_limited(&self) -> bool {
        self.per_second > 0
    }

    /// Ready with the number of bytes that may pass now, at least one.
    pub fn poll_allowance(&mut self, context: &mut Context<'_>) -> Poll<u64> {
        if !self.is_limited() {
            return Poll::Ready(u64::MAX);
        }
        loop {
            if self.is_delayed {
                if self.delay.poll_expired(context).is_pending() {
                    return Poll::Pending;
                }
                self.is_delayed = false;
            }
            let seconds = gale_runtime::now().since(self.began).as_secs() + 1;
            let allowed = self.per_second.saturating_mul(seconds);
            if allowed > self.passed {
                return Poll::Ready(allowed - self.passed);
            }
            let surplus = self.passed - allowed;
            self.wait(surplus.saturating_mul(1000) / self.per_second + 1);
        }
    }

    /// Counts bytes that have passed. The next bytes are delayed by the time that these take at the rate.
    pub fn note(&mut self, bytes: usize) {
        if !self.is_limited() {
            return;
        }
        self.passed += bytes as u64;
        let milliseconds = (bytes as u64).saturating_mul(1000) / self.per_second;
        if milliseconds > 0 {
            self.wait(milliseconds);
        }
    }

    fn wait(&mut self, milliseconds: u64) {
        self.delay.set(gale_runtime::now() + Duration::from_millis(milliseconds));
        self.is_delayed = true;
    }
}
