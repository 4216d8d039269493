//! Reads the head of a request, and prepares the exchange before the phases begin: the server, the path, and the
//! framing of the body.

use std::io;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::http1::{HeadParser, Limits, Offence, Status};
use gale_runtime::{Buffer, Moment};
use gale_worker::OwnCounters;

use super::body::RequestBody;
use super::persistence::Wish;
use super::{State, Transfer};
use crate::connection::HttpConnection;
use crate::connection::beginning::FIRST_READ;
use crate::request::Request;
use crate::request::advance::Step;
use crate::request::begin::{self, Refusal, choose_server, keep_first_line, part_read};
use crate::request::configuration::http2::head_limits;
use crate::request::exchange::Exchange;

/// Result of reading a head.
pub(super) enum Arrival {
    /// A whole head, or one that cannot be understood.
    Request(Box<Request>),
    /// The client closed the connection in the middle of a head.
    Left(Box<Request>),
    /// The client was silent for too long, perhaps in the middle of a head.
    TimedOut(Option<Box<Request>>),
    /// The client closed between requests, or the connection has no place in the
    /// configuration any more.
    Closed,
}

/// The request whose head is being read: kept by the caller, so that a connection that
/// waits for the first byte holds none.
pub(super) type PendingHead = Option<Box<Request>>;

/// State of a head that has come in part.
#[derive(Default)]
pub(super) struct HeadReading {
    parser: HeadParser,
    limits: Limits,
    /// Time for the rest of the head; `None` when the time runs already.
    timeout: Option<Duration>,
    first_read_max: usize,
    next_read_max: usize,
    /// The rest is waited for, and the connection counts as one that reads.
    is_counted: bool,
    /// The fault of the head that has come.
    offence: Option<Offence>,
}

impl HeadReading {
    /// Waits for the rest.
    fn begin_waiting(&mut self, counters: &OwnCounters) {
        if !std::mem::replace(&mut self.is_counted, true) {
            counters.begin_reading();
        }
    }

    /// Ends the wait for the rest. Returns `true` if there was one.
    pub(super) fn end_waiting(&mut self, counters: &OwnCounters) -> bool {
        let was_waiting = std::mem::take(&mut self.is_counted);
        if was_waiting {
            counters.end_reading();
        }
        was_waiting
    }

    /// Size of the next read when `length` bytes are there.
    fn read_max(&self, length: usize) -> usize {
        if length < self.first_read_max { self.first_read_max - length } else { self.next_read_max }
    }
}

impl HttpConnection {
    /// Reads until there is a whole head, or none to come.
    pub(super) fn poll_head(self: &Rc<Self>, context: &mut Context<'_>, pending: &mut PendingHead) -> Poll<Arrival> {
        let State { timer, transfer } = &mut *self.http1();
        let mut is_pipelined = self.client.info.requests.get() > 0;
        loop {
            if let Some(transfer) = transfer.as_mut().filter(|transfer| !transfer.input.is_empty()) {
                let Transfer { input, head, generation, body, sender, .. } = &mut **transfer;
                let head = &mut **head.get_or_insert_default();
                let mut request = match pending.take() {
                    Some(request) => request,
                    None => {
                        let Some(mut request) = self.begin_head(head) else {
                            // Earlier answers are sent first; the connection closes even if that fails.
                            let _ = ready!(sender.poll_held(&self.client.stream, context));
                            return Poll::Ready(Arrival::Closed);
                        };
                        *generation = NonZeroU64::new(request.http().generation);
                        request.arrival.is_pipelined = is_pipelined;
                        request.arrival.number_on_connection = self.client.info.requests.get() + 1;
                        head.parser.reset();
                        *body = RequestBody::default();
                        self.client.idle_since.set(Moment::NEVER);
                        request
                    }
                };
                match head.parser.parse(input.readable(), &head.limits, request.parsed_mut()) {
                    Ok(Status::NeedMore) => {
                        head.begin_waiting(&self.client.worker().common.counters);
                        if let Some(timeout) = head.timeout.take() {
                            timer.set_after(timeout);
                        }
                        *pending = Some(request);
                    }
                    // The timer is left as it is: the next wait sets it.
                    Ok(Status::Complete { consumed }) => {
                        if head.end_waiting(&self.client.worker().common.counters) {
                            request.note_head_wait();
                        }
                        let Some(head) = split_off(input, consumed) else {
                            // No memory within the worker's bound: it cannot even be refused.
                            self.client.worker().give_back(request);
                            return Poll::Ready(Arrival::Closed);
                        };
                        request.set_head(head);
                        return Poll::Ready(Arrival::Request(request));
                    }
                    Err(found) => {
                        if head.end_waiting(&self.client.worker().common.counters) {
                            request.note_head_wait();
                        }
                        request.set_head(std::mem::take(input));
                        head.offence = Some(found);
                        return Poll::Ready(Arrival::Request(request));
                    }
                }
            }
            is_pipelined = false;
            if let Some(transfer) = transfer.as_mut().filter(|transfer| transfer.sender.has_held())
                && ready!(transfer.sender.poll_held(&self.client.stream, context)).is_err()
            {
                return Poll::Ready(half_head(pending, &mut transfer.input).map_or(Arrival::Closed, Arrival::Left));
            }
            // A connection that waits for a request holds no receive buffer.
            let mut first = Buffer::new();
            let is_first = transfer.as_ref().is_none_or(|transfer| pending.is_none() && transfer.input.is_empty());
            let (input, read_max) = match transfer {
                Some(transfer) if pending.is_some() => {
                    let length = transfer.input.len();
                    let read_max = transfer.head.as_ref().map_or(FIRST_READ, |head| head.read_max(length));
                    (&mut transfer.input, read_max)
                }
                _ => (&mut first, FIRST_READ),
            };
            match self.client.stream.poll_recv(context, input, read_max) {
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::OutOfMemory => {
                    self.client.log_no_memory();
                    return Poll::Ready(Arrival::Closed);
                }
                Poll::Ready(Ok(0)) | Poll::Ready(Err(_)) => {
                    return Poll::Ready(half_head(pending, input).map_or(Arrival::Closed, Arrival::Left));
                }
                Poll::Ready(Ok(_)) if !is_first => {}
                Poll::Ready(Ok(_)) => {
                    transfer.get_or_insert_with(|| self.client.connections.take_transfer()).input = first
                }
                Poll::Pending => {
                    let polled = if pending.is_none() && !self.client.is_idle() {
                        let Some(wait) = self.client.first_wait() else { return Poll::Ready(Arrival::Closed) };
                        self.client.note_idle();
                        timer.poll_after(wait, context)
                    } else {
                        if pending.is_none() {
                            // A reload kept it only for a request that might have come.
                            if self.client.info.requests.get() > 0 && self.client.next_generation().is_some() {
                                return Poll::Ready(Arrival::Closed);
                            }
                            self.client.note_still_idle();
                        }
                        timer.poll_expired(context)
                    };
                    if polled.is_pending() {
                        return Poll::Pending;
                    }
                    return Poll::Ready(Arrival::TimedOut(half_head(pending, input)));
                }
            }
        }
    }

    /// Takes a request to read into. The exchange keeps its configuration to the end.
    fn begin_head(self: &Rc<Self>, reading: &mut HeadReading) -> Option<Box<Request>> {
        let configuration = self.client.next_configuration();
        let http = configuration.http();
        let place = self.client.place(http)?;
        let core = place.core(http);
        let limits = head_limits(core);
        // On a new connection that had to be waited for, the time runs since it was accepted; but the grace of a worker
        // that ends is for the first byte.
        let has_waited =
            self.client.info.requests.get() == 0 && self.client.is_idle() && !self.client.worker().is_draining();
        let timeout = (!has_waited).then(|| *core.client_header_timeout.get());
        let server = self.client.first_server(http, place);
        let mut request = self.client.worker().take_request();
        request.arrival.place = place.index();
        request.arrival.started = gale_runtime::now();
        request.begin(Rc::clone(&configuration), Rc::clone(self) as Rc<dyn Exchange>, server);
        reading.limits = limits;
        reading.timeout = timeout;
        reading.first_read_max = *core.client_header_buffer_size.get();
        reading.next_read_max = core.large_client_header_buffers.get().size;
        reading.is_counted = false;
        Some(request)
    }

    /// Ends a request that cannot be answered. As in nginx, the error log tells it at `info`, and the access log has a
    /// line.
    pub(super) fn give_up(&self, mut request: Box<Request>, what: &str, status: u16) {
        let reading = part_read(&request);
        self.client.worker().common.counters.begin_request();
        self.client.worker().common.counters.end_request();
        keep_first_line(&mut request);
        request.note_head_wait();
        request.log(Level::Info, format_args!("{what} while reading client {reading}"));
        request.response.status = status;
        self.end(request);
    }

    /// Prepares the exchange and goes through the phases as far as it gets.
    pub(super) fn begin(&self, request: &mut Request) -> Step {
        self.client.info.requests.set(self.client.info.requests.get() + 1);
        request.arrival.number_on_connection = self.client.info.requests.get();
        let offence = self.http1().transfer().head.as_mut().and_then(|head| head.offence.take());
        let wish = Wish::of(request, offence.is_some());
        let prepared = begin::prepare(request, offence);
        {
            let mut state = self.http1();
            let transfer = state.transfer();
            transfer.wish = wish;
            transfer.sender.begin(request.parsed.version);
            transfer.body.begin(&request.parsed, request.head.readable());
            if matches!(prepared, Err(Refusal::Head(_))) {
                transfer.body.never_mind();
            }
        }
        self.client.enter_phases(request, prepared)
    }
}

/// The part of a head that has come and will not be whole. It belongs to the server that it names, if the name has
/// come.
fn half_head(pending: &mut PendingHead, input: &mut Buffer) -> Option<Box<Request>> {
    let mut request = pending.take()?;
    request.set_head(std::mem::take(input));
    if request.parsed.authority.is_some() {
        let configuration = Rc::clone(request.configuration());
        // An error is logged already, and no answer of another server can be given.
        let _ = choose_server(&mut request, configuration.http());
    }
    Some(request)
}

/// The first `count` bytes; the others stay in `input`. `None` when there is no memory for a copy.
fn split_off(input: &mut Buffer, count: usize) -> Option<Buffer> {
    if input.len() == count {
        return Some(std::mem::take(input));
    }
    let mut head = Buffer::new();
    head.append(&input.readable()[..count]).ok()?;
    input.consume(count);
    Some(head)
}
