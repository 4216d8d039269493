//! Traffic counters of a place with metrics: requests or sessions, responses by code, bytes and times; and TLS
//! handshakes.
//!
//! A place is a zone of servers or locations (`status_zone`), or a peer of a group. Its counters are a [`Tally`]: a
//! request costs some tens of plain instructions and writes no shared memory. A served request is converted once
//! ([`Served::ready`]) for all places that count it, and the usual outcome has one counter in place of several.
//!
//! Invariant: a request is in progress between begin and end, each of which is counted exactly once, on any thread.

use std::time::Duration;

use gale_base::tally::{Own, Tally};
use gale_runtime::Moment;

/// Codes with counters of their own, ascending. Other codes only count in their class, so arbitrary codes do not
/// enlarge the metrics.
const CODES: [u16; 78] = [
    100, 101, 102, 103, 200, 201, 202, 203, 204, 205, 206, 207, 208, 226, 300, 301, 302, 303, 304, 305, 306, 307, 308,
    400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417, 418, 421, 422, 423, 424,
    425, 426, 428, 429, 431, 444, 449, 451, 460, 463, 464, 494, 495, 496, 497, 498, 499, 500, 501, 502, 503, 504, 505,
    506, 507, 508, 509, 510, 511, 520, 521, 522,
];

/// Classes of codes: 1xx to 5xx.
pub const CLASSES: usize = 5;

/// Buckets of times; the last one has no bound.
pub const TIME_BUCKETS: usize = 16;

// Counters are read in this order, ends before beginnings: a request that ends during a read cannot show up as ended
// and not begun.
const ENDED: usize = 0;
/// Requests with the usual outcome: [`USUAL_CODE`], and both times in the first bucket. One counter replaces those of
/// the code, two buckets and the end, since most requests are of this kind.
const USUAL_ENDED: usize = 1;
/// The same for [`Traffic::pass`], which also replaces the counter of the beginning.
const USUAL_PASSED: usize = 2;
const BEGUN: usize = 3;
const RECEIVED: usize = 4;
const SENT: usize = 5;
/// Time when it was last chosen.
const CHOSEN: usize = 6;
/// Connections made, and the sum of their connect times, in microseconds.
const CONNECTS: usize = 7;
const CONNECTING: usize = 8;
/// Times to the first byte: their sum in microseconds, then the buckets.
const FIRST: usize = 9;
/// Times to the end.
const WHOLE: usize = FIRST + 1 + TIME_BUCKETS;
const OF_CODES: usize = WHOLE + 1 + TIME_BUCKETS;
/// Other codes by class, then those without a class.
const OTHERS: usize = OF_CODES + CODES.len();
/// Unread counter for requests without a time or a code.
const NOTHING: usize = OTHERS + CLASSES + 1;
const COUNTED: usize = NOTHING + 1;
/// A power of two, so that bounds checks of a byte index reduce to one bit.
const COUNTERS: usize = COUNTED.next_power_of_two();

/// Counter by code, for codes below 600.
static CODE_BUCKETS: [u8; 600] = code_buckets();

const fn code_buckets() -> [u8; 600] {
    const { assert!(COUNTERS <= 128, "there are at most 128 counters") };
    let mut buckets = [(OTHERS + CLASSES) as u8; 600];
    let mut code = 100;
    while code < 600 {
        buckets[code] = (OTHERS + code / 100 - 1) as u8;
        code += 1;
    }
    let mut number = 0;
    while number < CODES.len() {
        buckets[CODES[number] as usize] = (OF_CODES + number) as u8;
        number += 1;
    }
    buckets
}

const USUAL_CODE: u16 = 200;
const OF_USUAL_CODE: usize = code_buckets()[USUAL_CODE as usize] as usize;
const USUAL_BUCKETS: Buckets =
    Buckets { first: (FIRST + 1) as u8, whole: (WHOLE + 1) as u8, code: OF_USUAL_CODE as u8 };

/// Traffic counters of one place.
#[derive(Debug, Default)]
pub struct Traffic(Tally<COUNTERS>);

/// Outcome of a served request or session.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Status code, if there was a response.
    pub code: Option<u16>,
    /// Bytes received from the client or peer.
    pub received: u64,
    /// Bytes sent to it.
    pub sent: u64,
    /// Time to the first byte, if there was one.
    pub first_byte: Option<Nanos>,
    /// Time to the end.
    pub whole: Option<Nanos>,
}

/// A time in nanoseconds: the difference of two moments of a loop's clock, without the division of a [`Duration`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanos(u64);

/// Bound of the first bucket.
const FIRST_BOUND: Nanos = Nanos(1_000_000);

impl Nanos {
    fn micros(self) -> u64 {
        self.0 / 1000
    }

    /// The time from `earlier` to `later`, saturating at zero.
    #[inline]
    pub fn between(earlier: Moment, later: Moment) -> Nanos {
        Nanos(later.as_nanos().saturating_sub(earlier.as_nanos()))
    }
}

impl From<Duration> for Nanos {
    fn from(time: Duration) -> Nanos {
        Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// A served request, by the counters that it counts in.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    received: u64,
    sent: u64,
    first_micros: u64,
    whole_micros: u64,
    /// `None` for the usual outcome.
    buckets: Option<Buckets>,
}

/// Buckets of both times, and the code's counter.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    first: u8,
    whole: u8,
    code: u8,
}

impl Served {
    /// Converts it for all places that count it.
    #[inline]
    pub fn ready(&self) -> Ready {
        let (received, sent) = (self.received, self.sent);
        if let (Some(USUAL_CODE), Some(first), Some(whole)) = (self.code, self.first_byte, self.whole)
            && first.max(whole) <= FIRST_BOUND
        {
            let (first_micros, whole_micros) = (first.micros(), whole.micros());
            return Ready { received, sent, first_micros, whole_micros, buckets: None };
        }
        let (first_micros, first) = place_of(FIRST, self.first_byte);
        let (whole_micros, whole) = place_of(WHOLE, self.whole);
        let code = match self.code {
            Some(code) => CODE_BUCKETS.get(usize::from(code)).map_or((OTHERS + CLASSES) as u8, |&bucket| bucket),
            None => NOTHING as u8,
        };
        Ready { received, sent, first_micros, whole_micros, buckets: Some(Buckets { first, whole, code }) }
    }
}

/// Amount to add to the sum, in microseconds, and the counter of the bucket.
#[inline]
fn place_of(sum: usize, time: Option<Nanos>) -> (u64, u8) {
    match time {
        Some(time) => (time.micros(), (sum + 1 + bucket_of(time.0)) as u8),
        None => (0, NOTHING as u8),
    }
}

impl Ready {
    /// Counts everything. The usual outcome counts in `usual`, which includes the end; returns `true` in that case.
    #[inline]
    fn count(&self, own: Own<'_, COUNTERS>, usual: usize) -> bool {
        self.add_sums(own);
        match self.buckets {
            Some(buckets) => buckets.count(own),
            None => own.add(usual, 1),
        }
        self.buckets.is_none()
    }

    #[inline]
    fn add_sums(&self, own: Own<'_, COUNTERS>) {
        own.add_each([
            (WHOLE, self.whole_micros),
            (FIRST, self.first_micros),
            (SENT, self.sent),
            (RECEIVED, self.received),
        ]);
    }
}

impl Buckets {
    #[inline]
    fn count(self, own: Own<'_, COUNTERS>) {
        own.add_each([self.first, self.whole, self.code].map(|bucket| (usize::from(bucket) % COUNTERS, 1)));
    }
}

/// Splits combined counters into those that they replace.
fn apart(mut counters: [u64; COUNTERS]) -> [u64; COUNTERS] {
    let [ended, passed] = [USUAL_ENDED, USUAL_PASSED].map(|usual| std::mem::take(&mut counters[usual]));
    counters[BEGUN] += passed;
    for bucket in [ENDED, FIRST + 1, WHOLE + 1, OF_USUAL_CODE] {
        counters[bucket] += ended + passed;
    }
    counters
}

impl Traffic {
    /// Counts the beginning of a request.
    #[inline]
    pub fn begin(&self) {
        self.0.own().add(BEGUN, 1);
    }

    /// Counts the beginning, and stores the time of the choice by the loops' clock.
    #[inline]
    pub fn begin_at(&self, nanos: u64) {
        let own = self.0.own();
        own.add(BEGUN, 1);
        own.set(CHOSEN, nanos);
    }

    /// Counts a connection made for a request.
    pub fn note_connected(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.0.own().add_each([(CONNECTS, 1), (CONNECTING, micros)]);
    }

    /// Counts the end of a request.
    #[inline]
    pub fn end(&self) {
        self.0.own().add(ENDED, 1);
    }

    /// Counts the outcome, but not the end: see [`Traffic::end`].
    #[inline]
    pub fn note(&self, served: &Served) {
        let (own, served) = (self.0.own(), served.ready());
        served.add_sums(own);
        served.buckets.unwrap_or(USUAL_BUCKETS).count(own);
    }

    /// Counts the outcome and the end.
    #[inline]
    pub fn finish(&self, served: &Ready) {
        let own = self.0.own();
        // The end is written last and read first, so a reader that sees it sees all of the request.
        if !served.count(own, USUAL_ENDED) {
            own.add(ENDED, 1);
        }
    }

    /// Counts the beginning, the outcome and the end.
    #[inline]
    pub fn pass(&self, served: &Ready) {
        let own = self.0.own();
        if !served.count(own, USUAL_PASSED) {
            own.add_each([(BEGUN, 1), (ENDED, 1)]);
        }
    }

    /// Current figures.
    pub fn figures(&self) -> TrafficFigures {
        let ever = self.0.sums();
        let processing = ever[BEGUN].saturating_sub(ever[ENDED]).saturating_sub(ever[USUAL_ENDED]);
        TrafficFigures { processing, counters: apart(self.0.after_reset(ever)) }
    }

    /// Time when it was last chosen, by the loops' clock; `None` for never.
    pub fn chosen(&self) -> Option<u64> {
        Some(self.0.max(CHOSEN)).filter(|&nanos| nanos > 0)
    }

    /// Resets the figures.
    pub fn reset(&self) {
        self.0.reset();
    }
}

/// Bucket for a time in nanoseconds: the first one whose bound, a power of two of milliseconds, is at least the time.
#[inline]
fn bucket_of(nanos: u64) -> usize {
    // The usual case.
    if nanos <= FIRST_BOUND.0 {
        return 0;
    }
    let bits = u64::BITS - ((nanos - 1) / 1_000_000).leading_zeros();
    (bits as usize).min(TIME_BUCKETS - 1)
}

/// Figures of a place.
#[derive(Clone, Debug)]
pub struct TrafficFigures {
    processing: u64,
    counters: [u64; COUNTERS],
}

impl Default for TrafficFigures {
    fn default() -> TrafficFigures {
        TrafficFigures { processing: 0, counters: [0; COUNTERS] }
    }
}

impl TrafficFigures {
    /// Adds the figures of another place.
    pub fn add(&mut self, other: &TrafficFigures) {
        self.processing += other.processing;
        for (sum, counter) in self.counters.iter_mut().zip(&other.counters) {
            *sum = sum.wrapping_add(*counter);
        }
    }

    /// Requests in progress.
    pub fn processing(&self) -> u64 {
        self.processing
    }

    /// Requests begun.
    pub fn begun(&self) -> u64 {
        self.counters[BEGUN]
    }

    /// Requests ended.
    pub fn ended(&self) -> u64 {
        self.counters[ENDED]
    }

    /// Bytes received.
    pub fn received(&self) -> u64 {
        self.counters[RECEIVED]
    }

    /// Bytes sent.
    pub fn sent(&self) -> u64 {
        self.counters[SENT]
    }

    /// Number of responses.
    pub fn responses(&self) -> u64 {
        self.counters[OF_CODES..NOTHING].iter().sum()
    }

    /// Requests that ended without a response.
    pub fn discarded(&self) -> u64 {
        self.ended().saturating_sub(self.responses())
    }

    /// Responses by class: 1xx to 5xx.
    pub fn classes(&self) -> [u64; CLASSES] {
        let mut classes: [u64; CLASSES] = std::array::from_fn(|class| self.counters[OTHERS + class]);
        self.codes().for_each(|(code, count)| classes[usize::from(code) / 100 - 1] += count);
        classes
    }

    /// Responses by code, for codes with counters of their own; zeros are omitted.
    pub fn codes(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        let counts = CODES.iter().zip(&self.counters[OF_CODES..]);
        counts.map(|(&code, &count)| (code, count)).filter(|(_, count)| *count > 0)
    }

    /// Mean connect time; `None` if no connection was made.
    pub fn mean_connect(&self) -> Option<Duration> {
        self.counters[CONNECTING].checked_div(self.counters[CONNECTS]).map(Duration::from_micros)
    }

    /// Times to the first byte.
    pub fn first_byte(&self) -> Times<'_> {
        Times(&self.counters[FIRST..WHOLE])
    }

    /// Times to the end.
    pub fn whole(&self) -> Times<'_> {
        Times(&self.counters[WHOLE..OF_CODES])
    }
}

/// Times in buckets.
#[derive(Clone, Copy, Debug)]
pub struct Times<'f>(&'f [u64]);

impl Times<'_> {
    /// Sum of all times.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.0[0])
    }

    /// Number of times.
    pub fn count(&self) -> u64 {
        self.0[1..].iter().sum()
    }

    /// Mean; `None` if there are no times.
    pub fn mean(&self) -> Option<Duration> {
        self.0[0].checked_div(self.count()).map(Duration::from_micros)
    }

    /// Cumulative counts with their bounds; the last one has no bound.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<Duration>, u64)> + '_ {
        let mut sum = 0;
        self.0[1..].iter().enumerate().map(move |(bucket, count)| {
            sum += count;
            let bound = (bucket < TIME_BUCKETS - 1).then(|| Duration::from_millis(1 << bucket));
            (bound, sum)
        })
    }
}

/// Outcome of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shaken {
    /// Full handshake completed.
    Full,
    /// Handshake completed with a resumed session.
    Resumed,
    /// Failed for a reason not listed below.
    Failed,
    /// Timed out.
    TimedOut,
    /// No common TLS version.
    NoCommonProtocol,
    /// No common cipher suite.
    NoCommonCipher,
    /// The peer rejected the own certificate.
    CertificateRejected,
}

const OUTCOMES: usize = 7;

/// Reason why a peer's certificate was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unverified {
    /// Required, but missing.
    Missing,
    /// Expired.
    Expired,
    /// Revoked.
    Revoked,
    /// Wrong name.
    WrongName,
    /// Any other reason.
    Other,
}

const REASONS: usize = 5;

/// Counters of handshakes.
#[derive(Debug)]
pub struct Handshakes(Tally<{ OUTCOMES + REASONS }>);

/// Counters of all handshakes with clients, whether or not their servers have a zone.
pub static ALL_HANDSHAKES: Handshakes = Handshakes::new();

impl Handshakes {
    /// Counters at zero.
    pub const fn new() -> Handshakes {
        Handshakes(Tally::new())
    }

    /// Counts the end of a handshake.
    pub fn count(&self, shaken: Shaken) {
        self.0.own().add(shaken as usize, 1);
    }

    /// Counts a rejected certificate, separately from the handshake's outcome, since clients get an answer afterwards.
    pub fn count_unverified(&self, reason: Unverified) {
        self.0.own().add(OUTCOMES + reason as usize, 1);
    }

    /// Current figures.
    pub fn figures(&self) -> HandshakeFigures {
        let counters = self.0.since_reset();
        let of = |shaken: Shaken| counters[shaken as usize];
        let of_reason = |reason: Unverified| counters[OUTCOMES + reason as usize];
        let reused = of(Shaken::Resumed);
        HandshakeFigures {
            done: of(Shaken::Full) + reused,
            reused,
            failed: counters[Shaken::Failed as usize..OUTCOMES].iter().sum(),
            timed_out: of(Shaken::TimedOut),
            no_common_protocol: of(Shaken::NoCommonProtocol),
            no_common_cipher: of(Shaken::NoCommonCipher),
            certificate_rejected: of(Shaken::CertificateRejected),
            unverified: UnverifiedFigures {
                missing: of_reason(Unverified::Missing),
                expired: of_reason(Unverified::Expired),
                revoked: of_reason(Unverified::Revoked),
                wrong_name: of_reason(Unverified::WrongName),
                other: of_reason(Unverified::Other),
            },
        }
    }

    /// Resets the figures.
    pub fn reset(&self) {
        self.0.reset();
    }
}

impl Default for Handshakes {
    fn default() -> Handshakes {
        Handshakes::new()
    }
}

/// Figures of handshakes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandshakeFigures {
    /// Completed handshakes.
    pub done: u64,
    /// Resumed ones among them.
    pub reused: u64,
    /// Failed handshakes.
    pub failed: u64,
    /// Timeouts among them.
    pub timed_out: u64,
    /// Failures without a common version.
    pub no_common_protocol: u64,
    /// Failures without a common cipher suite.
    pub no_common_cipher: u64,
    /// Failures because the peer rejected the own certificate.
    pub certificate_rejected: u64,
    /// Rejected certificates of peers.
    pub unverified: UnverifiedFigures,
}

/// Rejected certificates of peers, by [`Unverified`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are those of the enum")]
pub struct UnverifiedFigures {
    pub missing: u64,
    pub expired: u64,
    pub revoked: u64,
    pub wrong_name: u64,
    pub other: u64,
}

/// Counters of a zone of servers: `status_zone`.
#[derive(Debug, Default)]
pub struct ServerZone {
    /// Requests or sessions.
    pub traffic: Traffic,
    /// Handshakes.
    pub handshakes: Handshakes,
}

/// Counts the end of a handshake, also for the zone of its server.
pub fn count_handshake(zone: Option<&ServerZone>, shaken: Shaken) {
    ALL_HANDSHAKES.count(shaken);
    if let Some(zone) = zone {
        zone.handshakes.count(shaken);
    }
}

/// Counts a client's rejected certificate, also for the zone of its server.
pub fn count_unverified(zone: Option<&ServerZone>, reason: Unverified) {
    ALL_HANDSHAKES.count_unverified(reason);
    if let Some(zone) = zone {
        zone.handshakes.count_unverified(reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_told_one_by_one_and_by_class() {
        assert!(CODES.is_sorted_by(|one, next| one < next));
        let traffic = Traffic::default();
        for code in [200, 200, 404, 299, 599, 0, 700, 999, 65535] {
            traffic.begin();
            traffic.note(&Served { code: Some(code), ..Served::default() });
            traffic.end();
        }
        traffic.begin();
        traffic.begin();
        traffic.end();
        let figures = traffic.figures();
        assert_eq!(figures.codes().collect::<Vec<_>>(), [(200, 2), (404, 1)]);
        assert_eq!((figures.classes(), figures.responses()), ([0, 3, 0, 1, 1], 9));
        assert_eq!((figures.begun(), figures.ended(), figures.processing(), figures.discarded()), (11, 10, 1, 1));
        traffic.reset();
        let figures = traffic.figures();
        assert_eq!((figures.begun(), figures.responses(), figures.processing()), (0, 0, 1));
    }

    #[test]
    fn usual_requests_count_as_all_others() {
        let millis = |millis: u64| Some(Nanos::from(Duration::from_millis(millis)));
        let (whole, sent) = (millis(1), 7);
        let usual = Served { code: Some(200), received: 5, sent, first_byte: millis(0), whole };
        let others = [
            Served { whole: millis(2), ..usual },
            Served { first_byte: None, ..usual },
            Served { code: Some(201), ..usual },
            Served { code: None, ..usual },
        ];
        assert!(usual.ready().buckets.is_none() && others.iter().all(|other| other.ready().buckets.is_some()));
        let all = || others.iter().chain([&usual, &usual]);
        let (finished, passed, noted) = (Traffic::default(), Traffic::default(), Traffic::default());
        for served in all() {
            finished.begin();
            finished.finish(&served.ready());
            passed.pass(&served.ready());
            noted.begin();
            noted.note(served);
            noted.end();
        }
        finished.begin();
        assert_eq!((finished.figures().processing(), finished.figures().begun()), (1, 7));
        assert_eq!((passed.figures().processing(), passed.figures().begun()), (0, 6));
        for figures in [finished.figures(), passed.figures(), noted.figures()] {
            assert_eq!((figures.ended(), figures.responses(), figures.discarded()), (6, 5, 1));
            assert_eq!(figures.codes().collect::<Vec<_>>(), [(200, 4), (201, 1)]);
            assert_eq!((figures.received(), figures.sent()), (30, 42));
            assert_eq!((figures.whole().count(), figures.whole().sum()), (6, Duration::from_millis(7)));
            let counts: Vec<_> = figures.whole().cumulative().map(|(_, count)| count).collect();
            assert_eq!((counts[0], counts[1], figures.first_byte().count()), (5, 6, 5));
        }
        passed.reset();
        all().for_each(|served| passed.pass(&served.ready()));
        let figures = passed.figures();
        assert_eq!((figures.begun(), figures.ended(), figures.responses()), (6, 6, 5));
    }

    #[test]
    fn a_time_is_in_the_first_bucket_whose_bound_is_not_below_it() {
        for (nanos, bucket) in [
            (0, 0),
            (1, 0),
            (1_000_000, 0),
            (1_000_001, 1),
            (2_000_000, 1),
            (2_000_001, 2),
            (4_000_000, 2),
            (4_000_001, 3),
            (16_384_000_000, 14),
            (16_384_000_001, 15),
            (u64::MAX, 15),
        ] {
            assert_eq!(bucket_of(nanos), bucket, "{nanos}");
        }
        let traffic = Traffic::default();
        for millis in [1, 3, 20_000] {
            let whole = Some(Duration::from_millis(millis).into());
            traffic.note(&Served { whole, ..Served::default() });
        }
        let figures = traffic.figures();
        let whole = figures.whole();
        assert_eq!((whole.count(), whole.sum()), (3, Duration::from_millis(20_004)));
        let counts: Vec<_> = whole.cumulative().collect();
        assert_eq!(counts[0], (Some(Duration::from_millis(1)), 1));
        assert_eq!(counts[2], (Some(Duration::from_millis(4)), 2));
        assert_eq!((counts[14], counts[15]), ((Some(Duration::from_millis(16_384)), 2), (None, 3)));
        assert_eq!((figures.first_byte().mean(), figures.first_byte().count()), (None, 0));
    }

    #[test]
    fn handshakes_are_counted_by_result() {
        let zone = ServerZone::default();
        use Shaken::{CertificateRejected, Failed, Full, NoCommonCipher, NoCommonProtocol, Resumed, TimedOut};
        let all = [Full, Resumed, Failed, TimedOut, NoCommonProtocol, NoCommonCipher, CertificateRejected];
        assert_eq!(all.map(|shaken| shaken as usize), std::array::from_fn::<_, OUTCOMES, _>(|outcome| outcome));
        all.into_iter().for_each(|shaken| count_handshake(Some(&zone), shaken));
        count_unverified(Some(&zone), Unverified::WrongName);
        count_unverified(Some(&zone), Unverified::Other);
        let expected = HandshakeFigures {
            done: 2,
            reused: 1,
            failed: 5,
            timed_out: 1,
            no_common_protocol: 1,
            no_common_cipher: 1,
            certificate_rejected: 1,
            unverified: UnverifiedFigures { wrong_name: 1, other: 1, ..UnverifiedFigures::default() },
        };
        assert_eq!(zone.handshakes.figures(), expected);
        zone.handshakes.reset();
        assert_eq!(zone.handshakes.figures(), HandshakeFigures::default());
    }
}
