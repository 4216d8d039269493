//! Lingering close: a connection is read from for a while before it is closed, so that the client gets to see the
//! answer. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#lingering_close>)

use std::future::poll_fn;
use std::time::Duration;

use gale_runtime::Buffer;

use super::HttpConnection;
use crate::request::configuration::settings::CoreSettings;

/// A closing connection is read from in pieces of this size.
const DISCARD_BYTES: usize = 16 * 1024;

/// How long a closing connection is read from: as the location says that answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Lingering {
    time_max: Duration,
    silence_max: Duration,
}

impl Lingering {
    pub(super) fn of(core: &CoreSettings) -> Lingering {
        Lingering { time_max: *core.lingering_time.get(), silence_max: *core.lingering_timeout.get() }
    }
}

impl HttpConnection {
    /// Lingering close: says that nothing more will come, and reads on for a while;
    /// closing at once would make the kernel take back what the client has not
    /// read yet. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#lingering_close>)
    pub(super) async fn linger(&self, lingering: Lingering) {
        if self.stream.shutdown_write().is_err() {
            return;
        }
        self.http1.borrow_mut().forget();
        let mut discarded = Buffer::new();
        let everything = async {
            loop {
                let received = gale_runtime::timeout(
                    lingering.silence_max,
                    poll_fn(|context| self.stream.poll_recv(context, &mut discarded, DISCARD_BYTES)),
                )
                .await;
                match received {
                    Ok(Ok(1..)) => discarded.clear(),
                    _ => return,
                }
            }
        };
        let _ = gale_runtime::timeout(lingering.time_max, everything).await;
    }
}
