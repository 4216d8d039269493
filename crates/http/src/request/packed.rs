//! A request that only waits for its end, in little memory: a tunnel may be open for days, and its request is needed
//! for the log line alone.
//!
//! The log line may name any variable, and a handler of the log phase may read any field, so that nothing but the
//! outcome is left out. The heads of request and response are packed into one allocation with short lengths; the other
//! parts move as they are. The structure returns to its worker meanwhile, and another one is filled for the end.

use std::rc::Rc;
use std::sync::Arc;

use gale_base::packed::{Packer, Unpacker};
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::variables::subject::Evaluation;
use gale_protocol::Range32;
use gale_protocol::host::Authority;
use gale_protocol::request::{Framing, HeaderField, KnownHeader, Method, RequestHead, Version};
use gale_protocol::uri;
use gale_runtime::{Buffer, Bytes};
use gale_upstream::PeerName;
use gale_worker::notes::Notes;

use crate::request::exchange::Exchange;
use crate::request::parts::{Arrival, Extras, Record, Routing};
use crate::request::request_body::StoredBody;
use crate::request::response::{Reason, ResponseHead};
use crate::request::worker::{Configured, HttpWorker};
use crate::request::{PassedTo, Request, Shared};

/// Longer heads are not packed, in bytes: the worker's account of buffers bounds the heads that clients make it keep,
/// and it does not cover packed ones.
const HEAD_BYTES_MAX: usize = 4 * 1024;

/// See the file's head.
pub(crate) struct PackedRequest {
    /// Texts and numbers, in the order in which [`Request::pack`] writes them.
    values: Box<[u8]>,
    notes: Notes,
    configuration: Option<Rc<Configured>>,
    /// `None` if nothing was shared with subrequests.
    shared: Option<Rc<Shared>>,
    passed_to: Option<(&'static str, Arc<PeerName>)>,
    arrival: Arrival,
    routing: Routing,
    record: Record,
    rare: Option<Box<Rare>>,
    outline: Outline,
}

/// Fields that few requests use by then.
#[derive(Default)]
struct Rare {
    body: Option<StoredBody>,
    extras: Extras,
    evaluation: Evaluation,
}

/// Enumerations of a request's head.
struct Outline {
    method: Method,
    form: uri::Form,
    version: Version,
}

impl Request {
    /// Packs the request. One that cannot be packed is returned, with its unused memory freed.
    pub(crate) fn pack(mut self: Box<Self>) -> Result<Box<PackedRequest>, Box<Self>> {
        if !self.is_main() || self.head.len() > HEAD_BYTES_MAX {
            self.shrink();
            return Err(self);
        }
        let worker = Rc::clone(self.worker());
        let packed = worker.with_scratch(|scratch| self.take_packed(scratch));
        worker.give_back(self);
        Ok(Box::new(packed))
    }

    /// Parts move as they are. The outcome is over, but for the name of the other end.
    fn take_packed(&mut self, scratch: &mut Vec<u8>) -> PackedRequest {
        let mut packer = Packer::new(scratch);
        packer.text(self.head.readable());
        let outline = pack_head(&self.parsed, &mut packer);
        pack_response(&self.response, &mut packer);
        packer.number(self.server.0);
        packer.number(self.scope.0);
        packer.size(self.added_to_head);
        packer.text(&self.uri);
        packer.text(&self.args);
        packer.text(&self.host);
        let passed_to = self.outcome.passed_to.take();
        if let Some(passed_to) = &passed_to {
            packer.text(&passed_to.uri);
        }
        let has_rare = self.body.is_some() || !self.extras.is_empty() || !self.evaluation.is_at_rest();
        let rare = has_rare.then(|| {
            Box::new(Rare {
                body: self.body.take(),
                extras: std::mem::take(&mut self.extras),
                evaluation: std::mem::take(&mut self.evaluation),
            })
        });
        self.notes.shrink();
        let shares = Rc::get_mut(&mut self.shared).is_none_or(|shared| !shared.is_at_rest());
        PackedRequest {
            values: scratch.as_slice().into(),
            notes: std::mem::take(&mut self.notes),
            configuration: self.configuration.take(),
            shared: shares.then(|| std::mem::take(&mut self.shared)),
            passed_to: passed_to.map(|passed_to| (passed_to.scheme, passed_to.peer)),
            arrival: self.arrival,
            routing: self.routing,
            record: std::mem::take(&mut self.record),
            rare,
            outline,
        }
    }
}

impl PackedRequest {
    /// Returns the request as it was, in one of this worker's and with its exchange.
    pub(crate) fn unpack(self, worker: &Rc<HttpWorker>, its_exchange: Rc<dyn Exchange>) -> Box<Request> {
        let mut request = worker.take_request();
        let unpacker = &mut Unpacker::new(&self.values);
        let mut text = Buffer::new();
        // Shorter than the bound of buffers, and freed soon.
        text.append_past_limit(unpacker.text());
        request.set_head(text);
        unpack_head(request.parsed_mut(), self.outline, unpacker);
        unpack_response(&mut request.response, unpacker);
        request.server = ServerId(unpacker.number32());
        request.scope = ScopeId(unpacker.number32());
        request.added_to_head = unpacker.size();
        request.uri.extend_from_slice(unpacker.text());
        request.args.extend_from_slice(unpacker.text());
        request.host.extend_from_slice(unpacker.text());
        request.outcome.passed_to = self.passed_to.map(|(scheme, peer)| {
            let uri = Bytes::copy_from_slice(unpacker.text());
            PassedTo { scheme, peer, uri }
        });
        debug_assert!(unpacker.is_empty(), "what is packed is unpacked in the same order");
        (request.arrival, request.routing, request.record) = (self.arrival, self.routing, self.record);
        request.notes = self.notes;
        request.configuration = self.configuration;
        request.exchange = Some(its_exchange);
        if let Some(shared) = self.shared {
            request.shared = shared;
        }
        if let Some(rare) = self.rare {
            (request.body, request.extras, request.evaluation) = (rare.body, rare.extras, rare.evaluation);
        }
        request
    }
}

fn pack_head(head: &RequestHead, packer: &mut Packer<'_>) -> Outline {
    // Positions of known fields are left out, since they follow from the fields.
    let uri::Target { form, plain, scheme, host, path, query } = head.target;
    pack_range(head.method_range, packer);
    pack_range(head.target_range, packer);
    pack_range(path, packer);
    for range in [scheme, host, query, head.connect_protocol, head.ignored_first] {
        pack_optional_range(range, packer);
    }
    pack_range(head.version_range, packer);
    pack_range(head.line, packer);
    packer.flags([
        plain,
        head.framing == Framing::Chunked,
        head.authority.is_some_and(|authority| authority.lowercase),
    ]);
    packer.optional(match head.framing {
        Framing::Length(length) => Some(length),
        Framing::None | Framing::Chunked => None,
    });
    pack_optional_range(head.authority.map(|authority| authority.name), packer);
    packer.optional(head.authority.and_then(|authority| authority.port));
    packer.number(head.ignored_count);
    packer.size(head.headers.len());
    for field in &head.headers {
        pack_range(field.name, packer);
        pack_range(field.value, packer);
        packer.optional(field.known.map(|known| known as u8));
    }
    Outline { method: head.method, form, version: head.version }
}

fn unpack_head(head: &mut RequestHead, outline: Outline, unpacker: &mut Unpacker<'_>) {
    head.clear();
    let Outline { method, form, version } = outline;
    (head.method, head.version) = (method, version);
    head.method_range = unpack_range(unpacker);
    head.target_range = unpack_range(unpacker);
    let path = unpack_range(unpacker);
    let [scheme, host, query, connect_protocol, ignored_first] = [(); 5].map(|()| unpack_optional_range(unpacker));
    head.version_range = unpack_range(unpacker);
    head.line = unpack_range(unpacker);
    let [plain, is_chunked, lowercase] = unpacker.flags();
    head.target = uri::Target { form, plain, scheme, host, path, query };
    (head.connect_protocol, head.ignored_first) = (connect_protocol, ignored_first);
    head.framing = match unpacker.optional() {
        Some(length) => Framing::Length(length),
        None if is_chunked => Framing::Chunked,
        None => Framing::None,
    };
    let name = unpack_optional_range(unpacker);
    let port = unpacker.optional16();
    head.authority = name.map(|name| Authority { name, port, lowercase });
    head.ignored_count = unpacker.number32();
    for _ in 0..unpacker.size() {
        let (name, value) = (unpack_range(unpacker), unpack_range(unpacker));
        let known = unpacker.optional().map(|known| KnownHeader::ALL[known as usize]);
        head.push(HeaderField { name, value, known });
    }
}

fn pack_response(response: &ResponseHead, packer: &mut Packer<'_>) {
    let ResponseHead {
        status,
        content_type,
        content_length,
        last_modified,
        etag,
        location,
        allows_ranges,
        fields,
        has_trailers,
        is_from_upstream,
        // A tunnel has no conditions.
        follows_rfc_conditions: _,
        omits_server,
        reason,
    } = response;
    packer.number(*status);
    packer.text(content_type);
    packer.optional(*content_length);
    packer.optional(*last_modified);
    packer.text(etag);
    packer.text(location);
    packer.flags([*allows_ranges, *has_trailers, *is_from_upstream, *omits_server]);
    packer.optional(reason.as_ref().map(|reason| reason.status));
    if let Some(reason) = reason {
        packer.text(&reason.phrase);
    }
    fields.pack(packer);
}

fn unpack_response(response: &mut ResponseHead, unpacker: &mut Unpacker<'_>) {
    response.status = unpacker.number16();
    response.content_type.extend_from_slice(unpacker.text());
    response.content_length = unpacker.optional();
    response.last_modified = unpacker.optional();
    response.etag.extend_from_slice(unpacker.text());
    response.location.extend_from_slice(unpacker.text());
    [response.allows_ranges, response.has_trailers, response.is_from_upstream, response.omits_server] =
        unpacker.flags();
    response.reason = unpacker.optional16().map(|status| {
        let phrase = Bytes::copy_from_slice(unpacker.text());
        Reason { status, phrase }
    });
    response.fields.unpack(unpacker);
}

fn pack_range(range: Range32, packer: &mut Packer<'_>) {
    packer.size(range.start());
    packer.size(range.len());
}

fn unpack_range(unpacker: &mut Unpacker<'_>) -> Range32 {
    let start = unpacker.size();
    Range32::new(start, start + unpacker.size())
}

fn pack_optional_range(range: Option<Range32>, packer: &mut Packer<'_>) {
    packer.flags([range.is_some()]);
    if let Some(range) = range {
        pack_range(range, packer);
    }
}

fn unpack_optional_range(unpacker: &mut Unpacker<'_>) -> Option<Range32> {
    let [is_there] = unpacker.flags();
    is_there.then(|| unpack_range(unpacker))
}

#[cfg(test)]
mod tests {
    use gale_engine::variables::subject::Subject;
    use gale_protocol::http1::{HeadParser, Limits, Status};
    use gale_protocol::response::ResponseField;
    use gale_runtime::{EventLoop, LoopOptions, Moment};

    use super::*;
    use crate::request::exchange::mock::{self, MockExchange};
    use crate::request::phases::Phase;
    use crate::request::routing::{UriFit, UriOrigin};

    const HEAD: &[u8] = b"POST http://Example.org:81/a%20b?c=d HTTP/1.1\r\nHost: other\r\nCookie: a=1\r\nX-Own:\r\n\
        Upgrade: websocket\r\nCookie: b=2\r\nContent-Length: 300\r\n\r\n";

    fn with_request(test: impl FnOnce(Box<Request>, Rc<HttpWorker>, Rc<dyn Exchange>)) {
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            let exchange = MockExchange::new();
            let request = Box::new(mock::request(&exchange, mock::settings()));
            let worker = Rc::clone(request.worker());
            test(request, worker, exchange);
        });
    }

    fn parse(request: &mut Request, text: &[u8]) {
        let mut head = Buffer::new();
        head.append(text).unwrap();
        let status = HeadParser::new().parse(head.readable(), &Limits::default(), request.parsed_mut());
        assert!(matches!(status, Ok(Status::Complete { .. })));
        request.set_head(head);
    }

    /// All that can be written down of a request.
    fn written(request: &Request) -> String {
        let parts = (request.server, request.scope, &request.arrival, &request.routing, &request.record);
        let texts =
            (&request.uri, &request.args, &request.host, request.added_to_head, request.extras.when_logged.len());
        let passed_to = request.outcome.passed_to.as_ref().map(|to| (to.scheme, &to.peer, &to.uri));
        let fields: Vec<_> = request.fields().collect();
        let known = KnownHeader::ALL.iter().map(|&known| request.parsed.field(known)).collect::<Vec<_>>();
        format!(
            "{parts:?} {texts:?} {passed_to:?} {fields:?} {known:?} {:?} {:?} {:?} {:?} {:?} {}",
            request.response,
            (&request.head.readable(), &request.body, &*request.trailers()),
            (request.parsed.method, request.parsed.target, request.parsed.version, request.parsed.framing),
            (request.parsed.authority, request.parsed.connect_protocol, request.parsed.ignored_first),
            (request.target(), request.method_name(), request.request_line(), request.parsed.ignored_count),
            request.extras.fallback.is_some(),
        )
    }

    fn fill(request: &mut Request) {
        request.set_field(b"X-Added", b"later").unwrap();
        (request.server, request.scope) = (ServerId(3), ScopeId(70_000));
        (request.uri, request.args) = (b"/a b".into(), b"c=d".into());
        request.host.extend_from_slice(b"example.org");
        let response = &mut request.response;
        response.status = 101;
        response.content_type.extend_from_slice(b"text/plain");
        (response.content_length, response.last_modified) = (Some(0), Some(784_111_777));
        response.etag.extend_from_slice(b"\"x\"");
        response.location = b"/elsewhere".into();
        (response.has_trailers, response.omits_server) = (true, true);
        response.reason = Some(Reason { status: 101, phrase: "Of course".into() });
        response.add(ResponseField::Upgrade, b"websocket");
        response.add(b"x-own", vec![b'y'; 200]);
        request.arrival = Arrival {
            started: Moment::from_nanos(u64::MAX / 2),
            number_on_connection: u64::MAX,
            place: 4,
            is_pipelined: true,
            body_was_refused: true,
        };
        request.routing.phase = Phase::Content;
        (request.routing.next_handler, request.routing.redirects) = (2, 3);
        (request.routing.origin, request.routing.fit) = (UriOrigin::ClientRedirected, UriFit::Stays);
        request.become_get();
        request.record.answered = Some(Moment::from_nanos(5));
        request.record.is_counted = true;
        request.close_after_response();
        request.set_limit_rate(1000);
        let uri = Bytes::copy_from_slice(b"/behind");
        request.outcome.passed_to = Some(PassedTo { scheme: "http://", peer: PeerName::of_group("127.0.0.1:80"), uri });
    }

    #[test]
    fn a_packed_request_comes_back_as_it_was() {
        with_request(|mut request, worker, exchange| {
            parse(&mut request, HEAD);
            fill(&mut request);
            request.notes.put(7_u8);
            let before = written(&request);
            let Ok(packed) = request.pack() else { unreachable!("it can be packed") };
            assert!(packed.shared.is_none() && packed.rare.is_none(), "it has nothing of this");
            let request = packed.unpack(&worker, Rc::clone(&exchange));
            assert_eq!(written(&request), before);
            assert_eq!(request.notes.get::<u8>(), Some(&7));
            assert!(Rc::ptr_eq(&request.exchange_handle(), &exchange));
        });
    }

    #[test]
    fn what_few_requests_have_is_packed_with_them() {
        with_request(|mut request, worker, exchange| {
            parse(&mut request, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
            let id = request.id();
            let dropped = Rc::new(());
            request.hold(Rc::clone(&dropped));
            request.body = Some(StoredBody::default());
            request.when_logged(|_| {});
            request.add_trailer(b"x", b"y".into());
            request.record.at_end = Some(|_| {});
            let before = written(&request);
            let Ok(packed) = request.pack() else { unreachable!("it can be packed") };
            assert_eq!(Rc::strong_count(&dropped), 2);
            let request = packed.unpack(&worker, exchange);
            assert_eq!((written(&request), request.id()), (before, id));
            assert!(request.record.at_end.is_some() && request.evaluation().is_at_rest());
            worker.give_back(request);
            assert_eq!(Rc::strong_count(&dropped), 1);
        });
    }

    #[test]
    fn a_request_with_a_long_head_stays_charged_to_its_worker() {
        with_request(|mut request, _, _| {
            let head = [b"GET /", vec![b'x'; HEAD_BYTES_MAX].as_slice(), b" HTTP/1.1\r\nHost: a\r\n\r\n"].concat();
            parse(&mut request, &head);
            assert!(request.pack().is_err());
        });
    }
}
