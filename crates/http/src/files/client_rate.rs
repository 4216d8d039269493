//! How fast a client takes what is sent to it, and so how much of a file it should hold in memory.
//!
//! Its socket takes what comes until it is full, and then some more at once; so what counts is what has been sent in a
//! second or more. A client whose socket was not full in that time is not slow, whatever it has got: something else
//! was. What is found holds for the next responses on the connection, too; the time between them does not count.

use std::time::Duration;

use gale_runtime::{Moment, try_now};

/// What is sent in less time says little: a socket takes a third of what it holds at once.
const PERIOD_MIN: Duration = Duration::from_secs(1);

/// A piece is what the client takes in this part of a second.
const PIECES_PER_SECOND: u64 = 10;

/// A piece has a page at least.
const PIECE_MIN: u64 = 4 * 1024;

/// See the file's head.
#[derive(Default)]
pub(super) struct ClientRate {
    /// How much of the period was in earlier responses, and when what belongs to this one began.
    before: Duration,
    since: Option<Moment>,
    /// What was given to be sent in it.
    bytes: u64,
    /// The socket was full in it.
    was_full: bool,
    piece: Option<u64>,
}

impl ClientRate {
    /// So many bytes have been given to be sent.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The socket takes nothing at the moment.
    pub fn note_full(&mut self) {
        self.was_full = true;
    }

    /// More is about to be given. A period that is long enough ends here.
    pub fn look(&mut self) {
        let Some(now) = try_now() else { return };
        let period = self.before + now.since(*self.since.get_or_insert(now));
        if period < PERIOD_MIN {
            return;
        }
        let bytes_per_second = u128::from(self.bytes) * 1000 / period.as_millis();
        let in_time = u64::try_from(bytes_per_second).unwrap_or(u64::MAX) / PIECES_PER_SECOND;
        // A power of two: pieces that begin at their multiples are those that others want, too.
        let piece = || in_time.max(PIECE_MIN).checked_next_power_of_two();
        self.piece = if self.was_full { piece() } else { None };
        *self = ClientRate { since: Some(now), piece: self.piece, ..ClientRate::default() };
    }

    /// The response has ended; its period goes on with the next one.
    pub fn pause(&mut self) {
        if let (Some(since), Some(now)) = (self.since.take(), try_now()) {
            self.before += now.since(since);
        }
    }

    /// How long pieces should be; `None` for a client of which nothing is known, or that is not what it waits for.
    pub fn piece(&self) -> Option<u64> {
        self.piece
    }
}
