//! Lingering close: reads and discards what the client still sends after the end of its session.
//!
//! The kernel resets a connection that is closed with unread data. The client then gets an error in place of the last
//! bytes sent to it.

use std::future::poll_fn;
use std::time::Duration;

use gale_runtime::Buffer;

use super::Session;

/// Size of a read.
const DISCARD_BYTES: usize = 16 * 1024;

/// Total time for reading, like the default of http's `lingering_time`.
const TIME_MAX: Duration = Duration::from_secs(30);

/// Longest wait for more data.
const SILENCE_MAX: Duration = Duration::from_secs(5);

impl Session {
    /// Shuts the sending side down and discards input, if the client has sent data that was not read.
    pub async fn linger(&self) {
        let Some(transport) = self.transport().filter(|transport| transport.has_unread()) else { return };
        if transport.shutdown_write().is_err() {
            return;
        }
        let everything = async {
            let mut discarded = Buffer::new();
            loop {
                let received = poll_fn(|context| transport.poll_recv(context, &mut discarded, DISCARD_BYTES));
                match gale_runtime::timeout(SILENCE_MAX, received).await {
                    Ok(Ok(1..)) => discarded.clear(),
                    _ => return,
                }
            }
        };
        let _ = gale_runtime::timeout(TIME_MAX, everything).await;
    }
}
