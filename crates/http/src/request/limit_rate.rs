//! Limit on the rate of a response: `limit_rate` and `limit_rate_after`.
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#limit_rate>)
//!
//! As in nginx, the bytes sent, the head included, never exceed the rate times the seconds since the request began, the
//! current second included. So bodies are sent in pieces with pauses between them. The head never waits.

use std::time::Duration;

use gale_runtime::Moment;

use crate::request::Request;
use crate::request::body::BodyItem;

/// Maximum size of a piece, in bytes, at any rate: nginx's default for `sendfile_max_chunk`.
const PIECE_MAX: u64 = 2 * 1024 * 1024;

/// A note that overrides `limit_rate_after`, in bytes.
pub struct RateAfter(pub u64);

/// Rate limit of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per second; not zero.
    per_second: u64,
    /// Bytes sent before the limit applies.
    after: u64,
    started: Moment,
    /// Earliest time of the next piece.
    next: Moment,
}

impl Rate {
    /// Returns the limit for this request, if its location sets one.
    pub fn of(request: &Request) -> Option<Rate> {
        let per_second = request.limit_rate();
        if per_second == 0 {
            return None;
        }
        let after = match request.notes.get::<RateAfter>() {
            Some(after) => after.0,
            None => request.scope().core.limit_rate_after.get().evaluate(request),
        };
        Some(Rate { per_second, after, started: request.arrival.started, next: request.arrival.started })
    }

    /// Returns the number of bytes that may be sent now, after `sent` bytes. An error is the time to wait until.
    pub(super) fn allows(&self, sent: u64, now: Moment) -> Result<u64, Moment> {
        if now < self.next {
            return Err(self.next);
        }
        let seconds = now.since(self.started).as_secs() + 1;
        let allowed = self.per_second.saturating_mul(seconds).saturating_add(self.after);
        match allowed.checked_sub(sent) {
            // The first second that allows more than has been sent.
            None | Some(0) => {
                Err(self.started + Duration::from_secs(sent.saturating_sub(self.after) / self.per_second))
            }
            Some(count) => Ok(count.min(PIECE_MAX)),
        }
    }

    /// Records a piece of `count` bytes, sent after `before` bytes.
    pub(super) fn note(&mut self, before: u64, count: u64, now: Moment) {
        let counted = (before + count).saturating_sub(self.after.max(before));
        self.next = now + self.time_for(counted);
    }

    fn time_for(&self, bytes: u64) -> Duration {
        Duration::from_millis(bytes.saturating_mul(1000) / self.per_second)
    }
}

/// Splits the first `count` bytes off; the item has at least as many.
pub(super) fn split(item: &mut BodyItem, count: u64) -> BodyItem {
    let size = usize::try_from(count).unwrap_or(usize::MAX);
    match item {
        BodyItem::Bytes(bytes) => BodyItem::Bytes(bytes.split_to(size)),
        BodyItem::File(rest) => {
            let mut piece = rest.clone();
            piece.length = count;
            rest.offset += count;
            rest.length -= count;
            BodyItem::File(piece)
        }
        BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => unreachable!("they have no bytes"),
    }
}

#[cfg(test)]
mod tests {
    use gale_runtime::{EventLoop, Lease, LoopOptions};

    use super::*;
    use crate::request::body::Body;
    use crate::request::exchange::mock::{Event, MockExchange, request, settings};
    use crate::request::respond;
    use crate::request::variables::template::SizeTemplate;

    fn at(milliseconds: u64) -> Moment {
        Moment::from_nanos(milliseconds * 1_000_000)
    }

    fn rate(per_second: u64, after: u64) -> Rate {
        Rate { per_second, after, started: at(0), next: at(0) }
    }

    #[test]
    fn every_second_begun_allows_as_much_again() {
        let rate = rate(1000, 0);
        assert_eq!(rate.allows(0, at(0)), Ok(1000));
        assert_eq!(rate.allows(400, at(999)), Ok(600));
        assert_eq!(rate.allows(1000, at(1000)), Ok(1000));
        assert_eq!(rate.allows(1000, at(500)), Err(at(1000)));
        assert_eq!(rate.allows(2500, at(0)), Err(at(2000)));
    }

    #[test]
    fn what_comes_before_the_limit_does_not_count() {
        let mut rate = rate(1000, 5000);
        assert_eq!(rate.allows(0, at(0)), Ok(6000));
        rate.note(0, 6000, at(0));
        assert_eq!(rate.next, at(1000));
        assert_eq!(rate.allows(6000, at(1000)), Ok(1000));
    }

    #[test]
    fn a_piece_is_followed_by_the_pause_that_it_is_worth() {
        let mut rate = rate(1000, 0);
        rate.note(0, 500, at(10));
        assert_eq!(rate.allows(500, at(10)), Err(at(510)));
        assert_eq!(rate.allows(500, at(510)), Ok(500));
    }

    #[test]
    fn a_lease_goes_out_whole_and_nothing_behind_it() {
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let client = MockExchange::new();
            let mut core = settings();
            core.limit_rate.set(SizeTemplate::Constant(1 << 20), None);
            let mut request = request(&client, core);
            request.response.status = 200;
            let lease = || {
                let mut lease = Lease::new(3).unwrap();
                lease.truncate(3);
                lease.copy_from_slice(b"abc");
                BodyItem::Bytes(lease.freeze())
            };
            let body = Body::Items([lease(), lease()].into());
            let rest = respond::start_response(&mut request, body).expect("items are sent one by one");
            rest.send(&request).await;
            let piece = || Event::Piece("abc".into());
            let saw = client.saw();
            assert!(matches!(saw[0], Event::Start(200, _)), "{saw:?}");
            assert_eq!(saw[1..], [piece(), piece(), Event::End]);
        });
    }

    #[test]
    fn no_rate_overflows() {
        let mut rate = rate(u64::MAX, u64::MAX);
        assert_eq!(rate.allows(u64::MAX - 1, at(5)), Ok(1));
        rate.note(u64::MAX - 2, 1, at(5));
        let slow = Rate { per_second: 1, ..rate };
        assert!(slow.time_for(u64::MAX) > Duration::from_secs(1));
    }
}
