//! `slow_request_log TIME [LEVEL]`: a line in the error log for each client's request that took longer than TIME, with
//! where its time went.
//!
//! ```text
//!   slow request, in ms: whole 2013, head 0, body 0, delays 0, queue 0, disk 0, connect 1, first byte 2009,
//!   upstream 2010, sending 3, status 200, client: …
//! ```
//!
//! Times are noted only where the directive is in force, except for heads that come in pieces, whose server is not
//! known yet. A request that nothing keeps waiting notes none: it is asked once, at its end. The parts are what was
//! waited for, not shares of the whole: subrequests and servers that are asked at the same time add up, and computing
//! is in none of them.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_log::{Describe, Fields};
use gale_protocol::request::Method;
use gale_runtime::Moment;

use super::{Context, Request, Shared};

/// What the directive says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowRequestLog {
    /// A request that takes longer is slow.
    pub time: Duration,
    /// The level of the line.
    pub level: Level,
}

/// What kept a request waiting, as far as nobody else knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The client, in the middle of the head.
    Head,
    /// `limit_req`, `auth_delay`.
    Delays,
    /// `limit_rate`.
    Rate,
    /// A group of servers all of which are at their limit.
    Queue,
    /// Threads of a pool, and what they wait for.
    Disk,
    /// Where the response's body comes from, while the client takes whatever there is.
    Source,
}

const CAUSES: usize = Cause::Source as usize + 1;

/// What a request and its subrequests have waited for.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    by_cause: [Cell<Duration>; CAUSES],
    upstream: Cell<UpstreamTimes>,
}

/// The times of all servers that were tried, added up.
#[derive(Clone, Copy, Debug, Default)]
pub struct UpstreamTimes {
    /// Until there was a connection.
    pub connect: Duration,
    /// Until the head had come.
    pub first_byte: Duration,
    /// Until the end.
    pub whole: Duration,
}

/// Knows the times of the servers that a request was passed to: a note of the request.
pub struct AsksUpstream(pub fn(&Request) -> UpstreamTimes);

/// What an exchange knows of its client's waits and its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExchangeWaits {
    /// For the client, while it sends the body.
    pub body: Duration,
    /// For a disk, with nothing else to send.
    pub disk: Duration,
}

/// Whether the times of this request are noted.
pub fn is_noted(request: &Request) -> bool {
    request.scope().core.slow_request_log.get_opt().is_some_and(Option::is_some)
}

/// Where the times of this request are noted; `None` where they are not.
pub(crate) fn notes_of(request: &Request) -> Option<Rc<Shared>> {
    is_noted(request).then(|| Rc::clone(&request.shared))
}

impl Shared {
    /// Something was waited for so long.
    pub(crate) fn note_wait(&self, cause: Cause, time: Duration) {
        if !time.is_zero() {
            let sum = &self.waits.get_or_init(Box::default).by_cause[cause as usize];
            sum.set(sum.get() + time);
        }
    }

    fn waited(&self, cause: Cause) -> Duration {
        self.waits.get().map_or(Duration::ZERO, |waits| waits.by_cause[cause as usize].get())
    }
}

impl Request {
    /// The rest of its head was waited for, which has come or will not come any more.
    pub(crate) fn note_head_wait(&self) {
        self.shared.note_wait(Cause::Head, gale_runtime::now().since(self.arrival.started));
    }
}

/// A wait that is under way; it is noted when this is dropped.
pub struct Wait {
    noted: Option<(Rc<Shared>, Moment)>,
    cause: Cause,
}

impl Wait {
    /// Begins to wait, if the times of this request are noted.
    pub fn begin(request: &Request, cause: Cause) -> Wait {
        Wait { noted: notes_of(request).map(|shared| (shared, gale_runtime::now())), cause }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some((shared, since)) = self.noted.take()
            && let Some(now) = gale_runtime::try_now()
        {
            shared.note_wait(self.cause, now.since(since));
        }
    }
}

/// Calls `poll`, and notes how long pools were waited for of which it takes results.
pub(crate) fn noting_pools<T>(shared: Option<&Rc<Shared>>, poll: impl FnOnce() -> T) -> T {
    let Some(shared) = shared else { return poll() };
    gale_runtime::take_pool_wait();
    let polled = poll();
    shared.note_wait(Cause::Disk, gale_runtime::take_pool_wait());
    polled
}

/// A subrequest is over: the servers that it was passed to count.
pub(super) fn end_part(request: &Request) {
    if is_noted(request) {
        note_upstream(request);
    }
}

fn note_upstream(request: &Request) {
    if let Some(AsksUpstream(times)) = request.notes.get::<AsksUpstream>() {
        let UpstreamTimes { connect, first_byte, whole } = times(request);
        let sum = &request.shared.waits.get_or_init(Box::default).upstream;
        let before = sum.get();
        sum.set(UpstreamTimes {
            connect: before.connect + connect,
            first_byte: before.first_byte + first_byte,
            whole: before.whole + whole,
        });
    }
}

/// A client's request is over: writes the line if it was slow. The time of a tunnel is that until it began.
pub(super) fn end(request: &Request, slow: SlowRequestLog) {
    let now = gale_runtime::now();
    let is_tunnel = match request.response.status {
        101 => true,
        status => (200..300).contains(&status) && request.method() == Method::Connect,
    };
    let end = request.record.answered.filter(|_| is_tunnel).unwrap_or(now);
    let whole = end.since(request.arrival.started);
    if whole < slow.time {
        return;
    }
    let log = &request.scope().error_log;
    if !log.takes(slow.level) {
        return;
    }
    note_upstream(request);
    let shared = &request.shared;
    let exchange = request.exchange().waits();
    let upstream = shared.waits.get().map(|waits| waits.upstream.get()).unwrap_or_default();
    // What is left of the time since the response began is the client's.
    let sent_for = request.record.answered.map_or(Duration::ZERO, |answered| end.since(answered));
    let others = exchange.disk + shared.waited(Cause::Source) + shared.waited(Cause::Rate);
    let slow_request = SlowRequest {
        request,
        whole,
        head: shared.waited(Cause::Head),
        body: exchange.body,
        delays: shared.waited(Cause::Delays) + shared.waited(Cause::Rate),
        queue: shared.waited(Cause::Queue),
        disk: exchange.disk + shared.waited(Cause::Disk),
        upstream,
        sending: sent_for.saturating_sub(others),
    };
    log.write_about(slow.level, Some(request.connection().number), &"slow request", &slow_request);
}

struct SlowRequest<'r> {
    request: &'r Request,
    whole: Duration,
    head: Duration,
    body: Duration,
    delays: Duration,
    queue: Duration,
    disk: Duration,
    upstream: UpstreamTimes,
    sending: Duration,
}

impl Describe for SlowRequest<'_> {
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
        let mut time = |before, name, time: Duration| {
            fields.number(before, name, u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
        };
        time(", in ms: whole ", "whole_ms", self.whole)?;
        time(", head ", "head_ms", self.head)?;
        time(", body ", "body_ms", self.body)?;
        time(", delays ", "delays_ms", self.delays)?;
        time(", queue ", "queue_ms", self.queue)?;
        time(", disk ", "disk_ms", self.disk)?;
        time(", connect ", "connect_ms", self.upstream.connect)?;
        time(", first byte ", "first_byte_ms", self.upstream.first_byte)?;
        time(", upstream ", "upstream_ms", self.upstream.whole)?;
        time(", sending ", "sending_ms", self.sending)?;
        fields.number(", status ", "status", self.request.response.status.into())?;
        Context(self.request).describe(fields)
    }
}
