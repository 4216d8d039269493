//! Lingering: what a client sends behind the end of its session is read and dropped for a while.
//!
//! A connection that is closed while something of the client's has not been read is reset, and the client gets an error
//! in place of the end of what was sent to it.

use std::future::poll_fn;
use std::time::Duration;

use gale_runtime::Buffer;

use super::Session;

/// A closing connection is read from in pieces of this size.
const DISCARD_BYTES: usize = 16 * 1024;

/// How long a closing connection is read from: as http does unless told otherwise.
const TIME_MAX: Duration = Duration::from_secs(30);

/// For how long nothing may come.
const SILENCE_MAX: Duration = Duration::from_secs(5);

impl Session {
    /// Says that nothing more will come and reads on, if the client has sent something that nobody has read.
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
