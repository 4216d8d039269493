//! The life of a stream's request: it begins, is answered, and ends.
//!
//! A request is answered at once as far as that needs no waiting; the rest is a task of its own. It is logged when it
//! ends, however it ends.

use std::future::poll_fn;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::Offence;
use gale_protocol::http2::{ErrorCode, Refusal, StreamId};
use gale_runtime::{Buffer, Moment};

use super::Http2;
use super::body::RequestBody;
use super::receiving::Progress;
use super::stream::Stream;
use super::websocket;
use crate::request::Request;
use crate::request::advance::{self, Step};
use crate::request::begin;
use crate::request::exchange::{Exchange, ResponseWriter};
use crate::request::packed::PackedRequest;
use crate::request::respond::{self, Answered, Rest};
use crate::request::tunnel;

/// Streams whose requests are still being ended after the client has reset them, beyond those that it may have open.
const RESET_STREAMS_MAX: usize = 128;

/// nginx's own status, for the log: the connection ended before there was an answer.
const CLOSED_UNDER_REQUEST: u16 = 499;

/// Continuation of a request that was not answered at once.
enum Waits {
    /// It is on its way through the phases.
    Step(Step),
    /// The rest of the answer is to be sent.
    Rest(Rest),
}

impl Http2 {
    /// A head has come, and is in the fields of this loop.
    pub(super) fn begin_request(
        self: &Rc<Self>,
        id: StreamId,
        is_complete: bool,
        refusal: Option<Refusal>,
    ) -> Progress {
        let Some((stream, mut request)) = self.take_request(id, is_complete, refusal) else {
            // Nothing was done about it: the client may try again (RFC 9113, section 8.7).
            self.state.borrow_mut().codec.reset(id, ErrorCode::REFUSED_STREAM);
            return Progress::Answered;
        };
        let offence = match refusal {
            Some(Refusal::Offence(offence)) => Some(offence),
            Some(Refusal::Malformed(_)) => Some(Offence::InvalidRequest),
            None => None,
        };
        if let Some(Refusal::Malformed(fault)) = refusal {
            self.client().log_connection(Level::Info, format_args!("client sent {fault} in HTTP/2 stream {id}"));
        }
        let prepared = begin::prepare(&mut request, offence);
        self.note_request(&request);
        let mut in_flight = InFlight::new(stream, request);
        let step = self.client().enter_phases(in_flight.request(), prepared);
        let waits = match step {
            Step::Answer(body) => match respond::start_response(in_flight.request(), body) {
                Some(rest) => Waits::Rest(rest),
                None => {
                    in_flight.keep_or_end();
                    return Progress::Answered;
                }
            },
            step => Waits::Step(step),
        };
        let stream = Rc::clone(&in_flight.stream);
        stream.set_task(gale_runtime::spawn(in_flight.go_on(waits)));
        Progress::Waits
    }

    /// The stream with its request, before anything was decided. `None` if there is no room for it.
    fn take_request(
        self: &Rc<Self>,
        id: StreamId,
        is_complete: bool,
        refusal: Option<Refusal>,
    ) -> Option<(Rc<Stream>, Box<Request>)> {
        let client = self.client();
        let configuration = client.next_configuration();
        let http = configuration.http();
        let place = client.place(http)?;
        let streams_max = http.addresses[place.index()].http2.limits.concurrent_streams_max as usize;
        if self.state.borrow().streams.len() >= streams_max.saturating_add(RESET_STREAMS_MAX) {
            return None;
        }
        let server = client.first_server(http, place);
        let fields = &mut *client.connections.fields.borrow_mut();
        let mut head = Buffer::new();
        head.append(&fields.text).ok()?;
        let mut request = client.worker().take_request();
        std::mem::swap(request.parsed_mut(), &mut fields.request);
        if refusal.is_none() && websocket::translate(request.parsed_mut(), &mut head).is_err() {
            client.worker().give_back(request);
            return None;
        }
        let body = RequestBody::new(&request.parsed, head.readable(), fields.block_bytes, is_complete);
        request.set_head(head);
        let stream = Stream::new(Rc::clone(self), id, http.generation, refusal, body);
        request.arrival.place = place.index();
        request.arrival.started = gale_runtime::now();
        request.begin(Rc::clone(&configuration), Rc::clone(&stream) as Rc<dyn Exchange>, server);
        client.info.requests.set(client.info.requests.get() + 1);
        request.arrival.number_on_connection = client.info.requests.get();
        client.worker().common.counters.begin_request();
        client.idle_since.set(Moment::NEVER);
        self.state.borrow_mut().streams.push_back(Rc::clone(&stream));
        Some((stream, request))
    }

    /// Applies the settings of the request's server to the connection: its idle time, and the end of its service.
    fn note_request(&self, request: &Request) {
        let core = &request.scope().core;
        let idle_max = core.keepalive_timeout.get().idle;
        self.client().idle_max_ms.set(u32::try_from(idle_max.as_millis()).unwrap_or(u32::MAX));
        let age = gale_runtime::now().since(self.client().info.accepted);
        let has_served_enough = request.arrival.number_on_connection >= *core.keepalive_requests.get()
            || age > *core.keepalive_time.get()
            || idle_max == Duration::ZERO;
        if has_served_enough {
            self.state.borrow_mut().shutdown.want();
        }
    }

    /// Ends the requests that were answered without a task and whose answers have left. Returns `true` if there were
    /// any.
    pub(super) fn finish_streams(&self) -> bool {
        let mut has_ended = false;
        loop {
            let finished = std::mem::take(&mut self.state.borrow_mut().finished);
            if finished.is_empty() {
                return has_ended;
            }
            has_ended = true;
            for stream in finished {
                stream.end_kept();
            }
        }
    }

    /// A request has ended; its stream is of no use any more.
    fn end(&self, stream: &Stream) {
        let state = &mut *self.state.borrow_mut();
        if let Some(place) = state.place_of(stream.id) {
            state.streams.remove(place);
        }
        let is_complete = stream.is_complete();
        match stream.malformed() {
            Some(refusal) => state.codec.reset_refused(stream.id, refusal),
            // The answer is complete: the rest of the request's body is not needed.
            None if is_complete => state.codec.discard(stream.id),
            None => state.codec.reset(stream.id, ErrorCode::INTERNAL_ERROR),
        }
        state.wake();
    }
}

impl Stream {
    /// The connection ends: so does the request, with its task.
    pub(super) fn end_with_connection(self: Rc<Self>) {
        if let Some(task) = self.take_task() {
            gale_runtime::abort(task);
        }
        self.end_kept();
    }

    /// Ends the request that was kept with it, if one was.
    fn end_kept(self: Rc<Self>) {
        if let Some(request) = self.take_kept() {
            drop(InFlight::new(self, request));
        }
    }
}

/// A request on its way. It is logged when it ends, however it ends: also when the connection is closed under it.
struct InFlight {
    stream: Rc<Stream>,
    /// `None` while it is packed.
    request: Option<Box<Request>>,
    /// The request, while there is a tunnel, which needs none.
    packed: Option<Box<PackedRequest>>,
}

impl InFlight {
    fn new(stream: Rc<Stream>, request: Box<Request>) -> InFlight {
        InFlight { stream, request: Some(request), packed: None }
    }

    fn request(&mut self) -> &mut Request {
        self.request.as_mut().expect("there until it ends, but for a tunnel")
    }

    fn pack(&mut self) {
        match self.request.take().map(Request::pack) {
            Some(Ok(packed)) => self.packed = Some(packed),
            kept => self.request = kept.and_then(Result::err),
        }
    }

    fn unpack(&mut self) {
        if let Some(packed) = self.packed.take() {
            let exchange = Rc::clone(&self.stream) as Rc<dyn Exchange>;
            self.request = Some(packed.unpack(self.stream.connection.client().worker(), exchange));
        }
    }

    /// The request was answered: it ends when the answer has left, which may be so already.
    fn keep_or_end(mut self) {
        if !self.stream.is_over()
            && let Some(request) = self.request.take()
        {
            self.stream.keep(request);
        }
    }

    /// Waits, answers, and waits until the answer has left.
    async fn go_on(mut self, waits: Waits) {
        let answered = match waits {
            Waits::Step(step) => respond::finish_and_send(self.request(), step).await,
            Waits::Rest(rest) => rest.send(self.request()).await,
        };
        match answered {
            Answered::Not => return self.stream.abort(),
            Answered::Wholly => {}
            Answered::Tunnel(opened) => {
                self.pack();
                let end = Box::pin(tunnel::carry(opened)).await;
                self.unpack();
                end.tell(self.request());
            }
        }
        // The stream knows if the answer is whole.
        let _ = poll_fn(|context| self.stream.poll_sent(context)).await;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.request.is_none() && self.packed.is_none() {
            // Kept with its stream.
            return;
        }
        let http2 = Rc::clone(&self.stream.connection);
        http2.client().worker().common.counters.end_request();
        self.stream.take_task();
        http2.end(&self.stream);
        // After a panic nothing in the request is relied on; the panic itself is logged.
        if std::thread::panicking() {
            return;
        }
        self.unpack();
        let Some(mut request) = self.request.take() else { return };
        let (is_started, failure) =
            self.stream.with_response(|response| (response.is_started, response.failure.take()));
        if let Some(error) = failure {
            request.log(error.level(), format_args!("{error}"));
        }
        if request.response.status == 0 && !is_started {
            request.response.status = CLOSED_UNDER_REQUEST;
        }
        advance::log(&mut request);
        http2.client().worker().give_back(request);
    }
}
