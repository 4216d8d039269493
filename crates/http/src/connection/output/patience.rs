//! `send_timeout`: the longest time in which a client may take nothing.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#send_timeout>)

use std::task::{Context, Poll};
use std::time::Duration;

use gale_runtime::Timer;

/// Waits for a client, from the moment on when it takes nothing.
#[derive(Default)]
pub(super) struct Patience {
    timer: Timer,
    send_timeout: Duration,
    is_running: bool,
}

impl Patience {
    /// Sets the time from now on.
    pub(super) fn set(&mut self, send_timeout: Duration) {
        self.send_timeout = send_timeout;
    }

    /// Ready when the client has taken nothing for too long since the first call.
    pub(super) fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if !std::mem::replace(&mut self.is_running, true) {
            self.timer.set_after(self.send_timeout);
        }
        self.timer.poll_expired(context)
    }

    /// It has taken something: the next wait begins anew. The timer is left as it is, as more waits may follow.
    pub(super) fn stop(&mut self) {
        self.is_running = false;
    }

    /// There is nothing to wait for.
    pub(super) fn clear(&mut self) {
        self.timer.clear();
    }
}
