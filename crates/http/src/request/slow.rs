//! `slow_request_log TIME [LEVEL]`: logs each client's request that took longer than TIME, with its waiting times by
//! cause, to the error log.
//!
//! ```text
//!   slow request, in ms: whole 2013, head 0, body 0, delays 0, queue 0, disk 0, connect 1, first byte 2009,
//!   upstream 2010, sending 3, status 200, client: …
//! ```
//!
//! Times are recorded only where the directive is in force. The exception is a head that arrives in pieces, since its
//! server is not known yet. A request that never waits costs one check, at its end. The parts are waiting times, not
//! shares of the whole: those of subrequests and servers that run at the same time add up, and no part includes
//! computing time.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_log::{Describe, Fields};
use gale_protocol::request::Method;
use gale_runtime::Moment;

use super::{Context, Request, Shared};

/// Arguments of the directive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowRequestLog {
    /// Duration above which a request is logged.
    pub time: Duration,
    /// Level of the message.
    pub level: Level,
}

/// Cause of a wait, for waits that are recorded nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The client has sent only a part of the head.
    Head,
    /// A delay by `limit_req` or `auth_delay`.
    Delays,
    /// A pause by `limit_rate`.
    Rate,
    /// All servers of the upstream group are at their limit.
    Queue,
    /// Tasks of a thread pool, which may wait for a disk.
    Disk,
    /// The source of the response's body has nothing to send, and nothing is queued for the client.
    Source,
}

const CAUSES: usize = Cause::Source as usize + 1;

/// Waiting times of a request and its subrequests.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    by_cause: [Cell<Duration>; CAUSES],
    upstream: Cell<UpstreamTimes>,
}

/// Times of the upstream servers that were tried, each a sum over all of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct UpstreamTimes {
    /// Time until the connection was established.
    pub connect: Duration,
    /// Time until the head had arrived.
    pub first_byte: Duration,
    /// Time until the end of the response.
    pub whole: Duration,
}

/// Note of a request: the function that returns the times of the servers to which it was passed.
pub struct AsksUpstream(pub fn(&Request) -> UpstreamTimes);

/// Waiting times that an exchange records itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExchangeWaits {
    /// Time of waiting for the client, while it sends the body.
    pub body: Duration,
    /// Time of waiting for a disk, with nothing else to send.
    pub disk: Duration,
}

/// Returns `true` if the times of this request are recorded.
pub fn is_noted(request: &Request) -> bool {
    request.scope().core.slow_request_log.get_opt().is_some_and(Option::is_some)
}

/// Returns the place where the times of this request are recorded, or `None` if they are not.
pub(crate) fn notes_of(request: &Request) -> Option<Rc<Shared>> {
    is_noted(request).then(|| Rc::clone(&request.shared))
}

impl Shared {
    /// Adds `time` to the waits with this cause.
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
    /// Records the wait for the rest of the head, which has arrived or will not arrive any more.
    pub(crate) fn note_head_wait(&self) {
        self.shared.note_wait(Cause::Head, gale_runtime::now().since(self.arrival.started));
    }
}

/// A wait that has begun. Dropping it records its time.
pub struct Wait {
    noted: Option<(Rc<Shared>, Moment)>,
    cause: Cause,
}

impl Wait {
    /// Begins a wait. Its time is recorded if those of the request are.
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

/// Calls `poll`, and records the waiting time of the thread pool tasks whose results it takes.
pub(crate) fn noting_pools<T>(shared: Option<&Rc<Shared>>, poll: impl FnOnce() -> T) -> T {
    let Some(shared) = shared else { return poll() };
    gale_runtime::take_pool_wait();
    let polled = poll();
    shared.note_wait(Cause::Disk, gale_runtime::take_pool_wait());
    polled
}

/// Adds the upstream times of a subrequest that has ended.
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

/// Logs a client's request that has ended, if it was slow. A request for a tunnel counts until the tunnel begins.
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
    // Sending to the client took the time since the response began, less the waits for anything else.
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
