//! The stage `Lingering`: a connection is read from for a while before it is closed, so that the client gets to see the
//! answer. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#lingering_close>)

use std::future::poll_fn;
use std::time::Duration;

use gale_runtime::Buffer;

use super::{HttpConnection, Stage};
use crate::request::configuration::settings::CoreSettings;

/// Size of a read from a closing connection.
const DISCARD_BYTES: usize = 16 * 1024;

/// Limits of the reading from a closing connection, as set by the location that answered.
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
    /// Ends our direction and reads on for a while. If the connection were closed at once, the kernel would take back
    /// what the client has not read yet.
    pub(super) async fn linger(&self, lingering: Lingering) {
        let stream = &self.client.stream;
        if stream.shutdown_write().is_err() {
            return;
        }
        self.enter(Stage::Lingering { was_multiplexed: self.is_multiplexed() });
        let mut discarded = Buffer::new();
        let everything = async {
            loop {
                let received = gale_runtime::timeout(
                    lingering.silence_max,
                    poll_fn(|context| stream.poll_recv(context, &mut discarded, DISCARD_BYTES)),
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
