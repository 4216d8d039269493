//! Round-trip time to a peer, measured with PING frames (RFC 9113 §6.7). The kernel's measurement ends at the next
//! proxy, and does not exist for Unix sockets.
//!
//! Frames queue behind others, so a measurement is too long rather than too short: the shortest one counts, for
//! [`KEPT_MAX`]. At most one PING is in flight, and measurements are at least [`MEASURED_EVERY`] apart. A peer can
//! delay its responses, but the result never exceeds [`TIME_MAX`].

use std::time::Duration;

/// Maximum round-trip time.
const TIME_MAX: Duration = Duration::from_secs(1);

/// Minimum time between two measurements.
const MEASURED_EVERY: Duration = Duration::from_secs(1);

/// Lifetime of the shortest measurement, since the path may change.
const KEPT_MAX: Duration = Duration::from_secs(60);

/// The known round-trip time. Times are in nanoseconds of the caller's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTrip {
    known: Option<Known>,
    /// Time at which the PING in flight was sent.
    sent: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    time: Duration,
    /// Time at which `time` was measured.
    since: u64,
    /// Time of the last measurement.
    measured: u64,
}

impl RoundTrip {
    /// Payload of the PINGs.
    pub const PAYLOAD: [u8; 8] = *b"way back";

    /// The round-trip time, if known.
    pub fn time(&self) -> Option<Duration> {
        self.known.map(|known| known.time)
    }

    /// Returns `true` if a PING should be sent now. Called when the round-trip time is needed.
    pub fn begin(&mut self, now: u64) -> bool {
        let is_recent = self.known.is_some_and(|known| elapsed(known.measured, now) < MEASURED_EVERY);
        if self.sent.is_some() || is_recent {
            return false;
        }
        self.sent = Some(now);
        true
    }

    /// Handles the acknowledgement of a PING with this payload.
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

    /// Measures the round-trip time, if a measurement is due.
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
        // A late response does not increase the result beyond the maximum.
        way.note_answer(RoundTrip::PAYLOAD, 99 * SECOND);
        assert_eq!(way.time(), Some(TIME_MAX));
        way.note_answer(RoundTrip::PAYLOAD, 99 * SECOND);
        assert!(!way.begin(99 * SECOND) && way.begin(101 * SECOND));
    }
}
