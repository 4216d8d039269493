//! What has passed by a place that figures are told of: requests or sessions, responses by code, bytes, times; and
//! handshakes.
//!
//! A place is a zone of servers or of locations (`status_zone`), or a peer of a group. Its counters are a [`Tally`]:
//! whoever is served costs some tens of plain instructions, and nothing that workers share is written. What was served
//! is made ready once ([`Served::ready`]) for all places that count it, and what has gone in the usual way has a
//! counter of its own in place of several.
//!
//! Invariant: what has begun and not ended is being processed, so both are counted exactly once, on whichever thread.

use std::time::Duration;

use gale_base::tally::{Own, Tally};
use gale_runtime::Moment;

/// The codes that are told one by one, ascending. A code that is none of them counts in its class alone: whoever
/// answers with codes of his own makes the figures no larger.
const CODES: [u16; 78] = [
    100, 101, 102, 103, 200, 201, 202, 203, 204, 205, 206, 207, 208, 226, 300, 301, 302, 303, 304, 305, 306, 307, 308,
    400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417, 418, 421, 422, 423, 424,
    425, 426, 428, 429, 431, 444, 449, 451, 460, 463, 464, 494, 495, 496, 497, 498, 499, 500, 501, 502, 503, 504, 505,
    506, 507, 508, 509, 510, 511, 520, 521, 522,
];

/// Codes have so many classes: 1xx to 5xx.
pub const CLASSES: usize = 5;

/// Above the last one, times fall into a bucket without a bound.
pub const TIME_BUCKETS: usize = 16;

// In this order they are read: what ends meanwhile is not counted as ended before it began.
const ENDED: usize = 0;
/// Those that have ended in the usual way: with [`USUAL_CODE`], and both times in the first bucket. What they count in,
/// the code, two buckets and the end, is one counter, since most requests are of this kind.
const USUAL_ENDED: usize = 1;
/// The same of those that pass: they have begun, too.
const USUAL_PASSED: usize = 2;
const BEGUN: usize = 3;
const RECEIVED: usize = 4;
const SENT: usize = 5;
/// When it was chosen last.
const CHOSEN: usize = 6;
/// How often a connection was made, and how long that took together, in microseconds.
const CONNECTS: usize = 7;
const CONNECTING: usize = 8;
/// Times until the first byte: their sum in microseconds, then the buckets.
const FIRST: usize = 9;
/// Times until the end.
const WHOLE: usize = FIRST + 1 + TIME_BUCKETS;
const OF_CODES: usize = WHOLE + 1 + TIME_BUCKETS;
/// Codes that are not in the list, by class; then those of no class.
const OTHERS: usize = OF_CODES + CODES.len();
/// What nobody reads: where a time or a code counts that there is none of.
const NOTHING: usize = OTHERS + CLASSES + 1;
const COUNTED: usize = NOTHING + 1;
/// A power of two, so that no place in a byte needs to be checked but for one bit.
const COUNTERS: usize = COUNTED.next_power_of_two();

/// By code, where it counts: codes below 600.
static CODE_BUCKETS: [u8; 600] = code_buckets();

const fn code_buckets() -> [u8; 600] {
    const { assert!(COUNTERS <= 128, "a place has a byte, and all of them eight lines") };
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

/// See the file's head.
#[derive(Debug, Default)]
pub struct Traffic(Tally<COUNTERS>);

/// How something that was served has gone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    /// Its code, if there was a response.
    pub code: Option<u16>,
    /// Bytes that came from the client, or from the peer.
    pub received: u64,
    /// Bytes that went to it.
    pub sent: u64,
    /// How long it took until the first byte, if one came.
    pub first_byte: Option<Nanos>,
    /// How long all of it took.
    pub whole: Option<Nanos>,
}

/// A time in nanoseconds: what two moments of a loop's clock differ by, without the division of a [`Duration`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanos(u64);

/// The bound of the first bucket.
const FIRST_BOUND: Nanos = Nanos(1_000_000);

impl Nanos {
    fn micros(self) -> u64 {
        self.0 / 1000
    }

    /// The time from `earlier` to `later`; zero when it is later itself.
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

/// What was served, by the counters that it counts in.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    received: u64,
    sent: u64,
    first_micros: u64,
    whole_micros: u64,
    /// `None` for what has gone in the usual way.
    buckets: Option<Buckets>,
}

/// The buckets of both times, and the code.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    first: u8,
    whole: u8,
    code: u8,
}

impl Served {
    /// For every place that counts it.
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

/// What a time adds to a sum, in microseconds, and the place of its bucket behind that.
#[inline]
fn place_of(sum: usize, time: Option<Nanos>) -> (u64, u8) {
    match time {
        Some(time) => (time.micros(), (sum + 1 + bucket_of(time.0)) as u8),
        None => (0, NOTHING as u8),
    }
}

impl Ready {
    /// Counts all of it; for what has gone in the usual way, `usual` says that it is over, too. Whether that is so.
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

/// What is counted together as what it stands for.
fn apart(mut counters: [u64; COUNTERS]) -> [u64; COUNTERS] {
    let [ended, passed] = [USUAL_ENDED, USUAL_PASSED].map(|usual| std::mem::take(&mut counters[usual]));
    counters[BEGUN] += passed;
    for bucket in [ENDED, FIRST + 1, WHOLE + 1, OF_USUAL_CODE] {
        counters[bucket] += ended + passed;
    }
    counters
}

impl Traffic {
    /// It begins.
    #[inline]
    pub fn begin(&self) {
        self.0.own().add(BEGUN, 1);
    }

    /// It begins, chosen at this moment of the loops' clock.
    #[inline]
    pub fn begin_at(&self, nanos: u64) {
        let own = self.0.own();
        own.add(BEGUN, 1);
        own.set(CHOSEN, nanos);
    }

    /// A connection was made for it.
    pub fn note_connected(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.0.own().add_each([(CONNECTS, 1), (CONNECTING, micros)]);
    }

    /// It is over.
    #[inline]
    pub fn end(&self) {
        self.0.own().add(ENDED, 1);
    }

    /// How it has gone: [`Traffic::end`] counts that it is over.
    #[inline]
    pub fn note(&self, served: &Served) {
        let (own, served) = (self.0.own(), served.ready());
        served.add_sums(own);
        served.buckets.unwrap_or(USUAL_BUCKETS).count(own);
    }

    /// It is over, and has gone like this.
    #[inline]
    pub fn finish(&self, served: &Ready) {
        let own = self.0.own();
        // What is read first is written last: who sees that it has ended sees all of it.
        if !served.count(own, USUAL_ENDED) {
            own.add(ENDED, 1);
        }
    }

    /// It has begun, gone like this, and is over.
    #[inline]
    pub fn pass(&self, served: &Ready) {
        let own = self.0.own();
        if !served.count(own, USUAL_PASSED) {
            own.add_each([(BEGUN, 1), (ENDED, 1)]);
        }
    }

    /// The figures by now.
    pub fn figures(&self) -> TrafficFigures {
        let ever = self.0.sums();
        let processing = ever[BEGUN].saturating_sub(ever[ENDED]).saturating_sub(ever[USUAL_ENDED]);
        TrafficFigures { processing, counters: apart(self.0.after_reset(ever)) }
    }

    /// When it was chosen last, by the loops' clock; `None` for never.
    pub fn chosen(&self) -> Option<u64> {
        Some(self.0.max(CHOSEN)).filter(|&nanos| nanos > 0)
    }

    /// What was counted so far counts no more.
    pub fn reset(&self) {
        self.0.reset();
    }
}

/// The bucket for a time in nanoseconds: the first one whose bound, a power of two of milliseconds, is not below it.
#[inline]
fn bucket_of(nanos: u64) -> usize {
    // Most are.
    if nanos <= FIRST_BOUND.0 {
        return 0;
    }
    let bits = u64::BITS - ((nanos - 1) / 1_000_000).leading_zeros();
    (bits as usize).min(TIME_BUCKETS - 1)
}

/// What was counted at a place.
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
    /// Adds those of another place.
    pub fn add(&mut self, other: &TrafficFigures) {
        self.processing += other.processing;
        for (sum, counter) in self.counters.iter_mut().zip(&other.counters) {
            *sum = sum.wrapping_add(*counter);
        }
    }

    /// How many are being served.
    pub fn processing(&self) -> u64 {
        self.processing
    }

    /// How many have begun.
    pub fn begun(&self) -> u64 {
        self.counters[BEGUN]
    }

    /// How many have ended.
    pub fn ended(&self) -> u64 {
        self.counters[ENDED]
    }

    /// Bytes that have come.
    pub fn received(&self) -> u64 {
        self.counters[RECEIVED]
    }

    /// Bytes that have gone.
    pub fn sent(&self) -> u64 {
        self.counters[SENT]
    }

    /// How many responses there were.
    pub fn responses(&self) -> u64 {
        self.counters[OF_CODES..NOTHING].iter().sum()
    }

    /// How many have ended without a response.
    pub fn discarded(&self) -> u64 {
        self.ended().saturating_sub(self.responses())
    }

    /// How many responses there were of each class: 1xx to 5xx.
    pub fn classes(&self) -> [u64; CLASSES] {
        let mut classes: [u64; CLASSES] = std::array::from_fn(|class| self.counters[OTHERS + class]);
        self.codes().for_each(|(code, count)| classes[usize::from(code) / 100 - 1] += count);
        classes
    }

    /// How many responses there were of each code that there were any of, as far as they are told one by one.
    pub fn codes(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        let counts = CODES.iter().zip(&self.counters[OF_CODES..]);
        counts.map(|(&code, &count)| (code, count)).filter(|(_, count)| *count > 0)
    }

    /// How long connecting took, on average; nothing if no connection was made.
    pub fn mean_connect(&self) -> Option<Duration> {
        self.counters[CONNECTING].checked_div(self.counters[CONNECTS]).map(Duration::from_micros)
    }

    /// How long it took until the first byte.
    pub fn first_byte(&self) -> Times<'_> {
        Times(&self.counters[FIRST..WHOLE])
    }

    /// How long all of it took.
    pub fn whole(&self) -> Times<'_> {
        Times(&self.counters[WHOLE..OF_CODES])
    }
}

/// Times, counted in buckets.
#[derive(Clone, Copy, Debug)]
pub struct Times<'f>(&'f [u64]);

impl Times<'_> {
    /// All of them together.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.0[0])
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0[1..].iter().sum()
    }

    /// The mean; nothing if there is none.
    pub fn mean(&self) -> Option<Duration> {
        self.0[0].checked_div(self.count()).map(Duration::from_micros)
    }

    /// For each bound how many are not above it; the last one has no bound.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<Duration>, u64)> + '_ {
        let mut sum = 0;
        self.0[1..].iter().enumerate().map(move |(bucket, count)| {
            sum += count;
            let bound = (bucket < TIME_BUCKETS - 1).then(|| Duration::from_millis(1 << bucket));
            (bound, sum)
        })
    }
}

/// What became of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shaken {
    /// It is done.
    Full,
    /// It has gone on with a session of before.
    Resumed,
    /// It has failed, for another reason than those below.
    Failed,
    /// The peer took too long.
    TimedOut,
    /// There is no version of TLS that both sides speak.
    NoCommonProtocol,
    /// There is no cipher suite that both sides have.
    NoCommonCipher,
    /// The peer says that our certificate is not good.
    CertificateRejected,
}

const OUTCOMES: usize = 7;

/// Why the certificate of a peer is not good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unverified {
    /// It has none, and needs one.
    Missing,
    /// It has expired.
    Expired,
    /// It was revoked.
    Revoked,
    /// It is for other names.
    WrongName,
    /// Anything else.
    Other,
}

const REASONS: usize = 5;

/// Handshakes, counted.
#[derive(Debug)]
pub struct Handshakes(Tally<{ OUTCOMES + REASONS }>);

/// All handshakes with clients, whether or not their servers have a zone.
pub static ALL_HANDSHAKES: Handshakes = Handshakes::new();

impl Handshakes {
    /// None yet.
    pub const fn new() -> Handshakes {
        Handshakes(Tally::new())
    }

    /// One is over.
    pub fn count(&self, shaken: Shaken) {
        self.0.own().add(shaken as usize, 1);
    }

    /// A certificate was not good, whatever became of the handshake: clients are told of it afterwards.
    pub fn count_unverified(&self, reason: Unverified) {
        self.0.own().add(OUTCOMES + reason as usize, 1);
    }

    /// The figures by now.
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

    /// What was counted so far counts no more.
    pub fn reset(&self) {
        self.0.reset();
    }
}

impl Default for Handshakes {
    fn default() -> Handshakes {
        Handshakes::new()
    }
}

/// How many handshakes there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandshakeFigures {
    /// That are done.
    pub done: u64,
    /// Of these, that have gone on with a session of before.
    pub reused: u64,
    /// That have failed.
    pub failed: u64,
    /// Of these, because the peer took too long.
    pub timed_out: u64,
    /// Of these, because there was no version that both sides speak.
    pub no_common_protocol: u64,
    /// Of these, because there was no cipher suite that both sides have.
    pub no_common_cipher: u64,
    /// Of these, because the peer took our certificate for bad.
    pub certificate_rejected: u64,
    /// Certificates of peers that were not good.
    pub unverified: UnverifiedFigures,
}

/// Certificates of peers that were not good, by [`Unverified`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are those of the enum")]
pub struct UnverifiedFigures {
    pub missing: u64,
    pub expired: u64,
    pub revoked: u64,
    pub wrong_name: u64,
    pub other: u64,
}

/// A zone of servers: `status_zone`.
#[derive(Debug, Default)]
pub struct ServerZone {
    /// Their requests, or sessions.
    pub traffic: Traffic,
    /// Their handshakes.
    pub handshakes: Handshakes,
}

/// Counts the end of a handshake, also for the zone of its server.
pub fn count_handshake(zone: Option<&ServerZone>, shaken: Shaken) {
    ALL_HANDSHAKES.count(shaken);
    if let Some(zone) = zone {
        zone.handshakes.count(shaken);
    }
}

/// Counts that the certificate of a client was not good, also for the zone of its server.
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
    fn what_goes_in_the_usual_way_counts_as_everything_else_does() {
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
    fn handshakes_are_counted_by_what_became_of_them() {
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
