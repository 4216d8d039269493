//! Measures how fast a client receives, to decide how much of a file to hold in memory for it.
//!
//! A socket takes data until its buffer is full, and then a large amount at once, so only periods of a second or more
//! count. A client whose socket was never full in a period is not slow, however little it received: something else was.
//! The result also holds for the next responses of the connection; the time between responses does not count.

use std::time::Duration;

use gale_runtime::{Moment, try_now};

/// A shorter period says little: a socket takes a third of its buffer at once.
const PERIOD_MIN: Duration = Duration::from_secs(1);

/// A piece is the amount that the client takes in this part of a second.
const PIECES_PER_SECOND: u64 = 10;

/// A piece is at least a page.
const PIECE_MIN: u64 = 4 * 1024;

/// Receive rate of one client, see the head of the file.
#[derive(Default)]
pub(super) struct ClientRate {
    /// Part of the period that was spent in earlier responses, and the beginning of the part in this response.
    before: Duration,
    since: Option<Moment>,
    /// Bytes given to the socket in the period.
    bytes: u64,
    /// True if the socket was full in the period.
    was_full: bool,
    piece: Option<u64>,
}

impl ClientRate {
    /// Counts bytes that were given to the socket.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Notes that the socket is full.
    pub fn note_full(&mut self) {
        self.was_full = true;
    }

    /// Ends the period if it is long enough. Called before more data is given to the socket.
    pub fn look(&mut self) {
        let Some(now) = try_now() else { return };
        let period = self.before + now.since(*self.since.get_or_insert(now));
        if period < PERIOD_MIN {
            return;
        }
        let bytes_per_second = u128::from(self.bytes) * 1000 / period.as_millis();
        let in_time = u64::try_from(bytes_per_second).unwrap_or(u64::MAX) / PIECES_PER_SECOND;
        // A power of two: other clients read pieces that begin at the same multiples.
        let piece = || in_time.max(PIECE_MIN).checked_next_power_of_two();
        self.piece = if self.was_full { piece() } else { None };
        *self = ClientRate { since: Some(now), piece: self.piece, ..ClientRate::default() };
    }

    /// Ends the response; the period continues with the next one.
    pub fn pause(&mut self) {
        if let (Some(since), Some(now)) = (self.since.take(), try_now()) {
            self.before += now.since(since);
        }
    }

    /// Length of a piece for this client; `None` if its rate is unknown or it is not the bottleneck.
    pub fn piece(&self) -> Option<u64> {
        self.piece
    }
}
