//! How long the way to a peer and back takes, measured by PINGs (RFC 9113 §6.7), as far as its frames are concerned:
//! what the kernel knows of the way ends at the next relay, and for a Unix socket it knows nothing.
//!
//! Frames wait behind others, so that what was measured is too much rather than too little: the shortest time counts,
//! for [`KEPT_MAX`]. One PING is under way at a time, and another one is wanted [`MEASURED_EVERY`] later at the
//! earliest. A peer that answers late looks far away, but never farther than [`TIME_MAX`].

use std::time::Duration;

/// The largest time that is believed.
const TIME_MAX: Duration = Duration::from_secs(1);

/// How much time is between two measurements.
const MEASURED_EVERY: Duration = Duration::from_secs(1);

/// For how long the shortest of the times counts: ways change.
const KEPT_MAX: Duration = Duration::from_secs(60);

/// What is known of the way. Times are those of the caller's clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTrip {
    known: Option<Known>,
    /// When the PING was sent that is under way.
    sent: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    time: Duration,
    /// When that was measured.
    since: u64,
    /// When anything was.
    measured: u64,
}

impl RoundTrip {
    /// What the PINGs carry.
    pub const PAYLOAD: [u8; 8] = *b"way back";

    /// The time, if it is known.
    pub fn time(&self) -> Option<Duration> {
        self.known.map(|known| known.time)
    }

    /// Somebody wants to know the time. True if a PING is to be sent for that, now.
    pub fn begin(&mut self, now: u64) -> bool {
        let is_recent = self.known.is_some_and(|known| elapsed(known.measured, now) < MEASURED_EVERY);
        if self.sent.is_some() || is_recent {
            return false;
        }
        self.sent = Some(now);
        true
    }

    /// A PING is answered with this payload.
    pub fn note_answer(&mut self, payload: [u8; 8], now: u64) {
        if payload != Self::PAYLOAD {
            return;
        }
        let Some(sent) = self.sent.take() else { return };
        let time = elapsed(sent, now).min(TIME_MAX);
        match &mut self.known {
            Some(known) if known.time < time && elapsed(known.since, now) < KEPT_MAX => known.measured = now,
            known => *known = Some(Known { time, since: now, measured: now }),
        }
    }
}

fn elapsed(from: u64, to: u64) -> Duration {
    Duration::from_nanos(to.saturating_sub(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Measures, if that is wanted.
    fn measure(way: &mut RoundTrip, at: u64, time: Duration) -> bool {
        let begins = way.begin(at);
        if begins {
            way.note_answer(RoundTrip::PAYLOAD, at + time.as_nanos() as u64);
        }
        begins
    }

    #[test]
    fn the_shortest_time_counts_for_a_while() {
        let mut way = RoundTrip::default();
        assert_eq!(way.time(), None);
        let milliseconds = Duration::from_millis;
        assert!(measure(&mut way, 0, milliseconds(50)));
        assert_eq!(way.time(), Some(milliseconds(50)));
        assert!(!measure(&mut way, SECOND / 2, milliseconds(10)), "that is known well enough");
        assert!(measure(&mut way, 2 * SECOND, milliseconds(80)));
        assert_eq!(way.time(), Some(milliseconds(50)));
        assert!(measure(&mut way, 4 * SECOND, milliseconds(40)));
        assert!(measure(&mut way, 60 * SECOND, milliseconds(90)));
        assert_eq!(way.time(), Some(milliseconds(40)));
        assert!(measure(&mut way, 65 * SECOND, milliseconds(90)));
        assert_eq!(way.time(), Some(milliseconds(90)), "the way is another one");
    }

    #[test]
    fn one_ping_is_under_way_and_only_its_answer_counts() {
        let mut way = RoundTrip::default();
        way.note_answer(RoundTrip::PAYLOAD, 5);
        assert!(way.time().is_none() && way.begin(10) && !way.begin(99 * SECOND));
        way.note_answer(*b"shutdown", 11);
        assert_eq!(way.time(), None);
        // Whoever answers late is not the farther away for that.
        way.note_answer(RoundTrip::PAYLOAD, 99 * SECOND);
        assert_eq!(way.time(), Some(TIME_MAX));
        way.note_answer(RoundTrip::PAYLOAD, 99 * SECOND);
        assert!(!way.begin(99 * SECOND) && way.begin(101 * SECOND));
    }
}
