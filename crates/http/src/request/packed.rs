//! A request that only waits for its end, in as little memory as that takes: a tunnel may be open for days, and what it
//! was asked by is wanted when it is logged and not before.
//!
//! Nothing is left out, since the log line may name any variable and a handler of the log phase may look at anything.
//! All that is text or a number is in one piece of memory, with every length as short as it can be. The rest is what
//! the request owns, and only where there is something. The structure itself goes back to its worker in the meantime,
//! and one of the worker's is filled for the end.

use std::rc::Rc;
use std::sync::Arc;

use gale_base::packed::{Packer, Unpacker};
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::variables::subject::Evaluation;
use gale_protocol::Range32;
use gale_protocol::host::Authority;
use gale_protocol::request::{Framing, HeaderField, KnownHeader, Method, RequestHead, Version};
use gale_protocol::uri;
use gale_runtime::{Buffer, Bytes, Moment};
use gale_upstream::PeerName;
use gale_worker::notes::Notes;

use crate::request::exchange::Exchange;
use crate::request::kind::Kind;
use crate::request::phases::Phase;
use crate::request::request_body::StoredBody;
use crate::request::response::{Reason, ResponseHead};
use crate::request::routing::{UriFit, UriOrigin};
use crate::request::subrequest::Fallback;
use crate::request::worker::{Configured, HttpWorker};
use crate::request::{PassedTo, Request, Shared};

/// A request with a longer head stays as it is, in bytes: its head is charged to the worker's account of buffers, which
/// bounds what clients can have the worker keep, and a packed one is not.
const HEAD_BYTES_MAX: usize = 4 * 1024;

/// See the file's head.
pub(crate) struct PackedRequest {
    /// Texts and numbers, in the order in which [`Request::pack`] writes them.
    values: Box<[u8]>,
    notes: Notes,
    configuration: Option<Rc<Configured>>,
    /// What it shares with subrequests, or could.
    shared: Option<Rc<Shared>>,
    passed_to: Option<(&'static str, Arc<PeerName>)>,
    at_end: Option<fn(&Request)>,
    rare: Option<Box<Rare>>,
    phase: Phase,
    kind: Kind,
    origin: UriOrigin,
    fit: UriFit,
    outline: Outline,
}

/// Few requests have any of these by then.
#[derive(Default)]
struct Rare {
    body: Option<StoredBody>,
    when_logged: Vec<fn(&mut Request)>,
    fallback: Option<Fallback>,
    trailers: Vec<(Bytes, Bytes)>,
    evaluation: Evaluation,
}

/// What is enumerated of a request's head.
struct Outline {
    method: Method,
    form: uri::Form,
    version: Version,
}

impl Request {
    /// Packs it. One that cannot be packed comes back, and keeps no memory that it does not need.
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

    /// Every field of it is here, and in [`PackedRequest::unpack`].
    fn take_packed(&mut self, scratch: &mut Vec<u8>) -> PackedRequest {
        let Request {
            server,
            scope,
            head,
            parsed,
            added_to_head,
            uri,
            args,
            host,
            response,
            body,
            notes,
            makes_subrequests,
            origin,
            is_error_page,
            status_override,
            content_type_override,
            started,
            adds_uri_to_alias,
            is_pipelined,
            number_on_connection,
            place,
            phase,
            next_handler,
            fit,
            redirects_left,
            tunnel: _,
            body_was_refused,
            refusal,
            passed_to,
            exchange: _,
            is_counted,
            when_logged,
            at_end,
            when_refused: _,
            answered,
            closes_connection,
            kind,
            skips_filters,
            fallback,
            shared,
            worker: _,
            configuration,
            is_get_forced,
            shows_get,
            trailers,
            limit_rate,
            evaluation,
        } = self;
        let mut packer = Packer::new(scratch);
        packer.text(head.readable());
        let outline = pack_head(parsed, &mut packer);
        pack_response(response, &mut packer);
        packer.number(server.0);
        packer.number(scope.0);
        packer.size(*added_to_head);
        packer.text(uri);
        packer.text(args);
        packer.text(host);
        packer.optional(*status_override);
        pack_optional_text(content_type_override.as_deref(), &mut packer);
        packer.number(started.as_nanos());
        packer.optional(answered.map(Moment::as_nanos));
        packer.number(*number_on_connection);
        packer.size(*place);
        packer.size(*next_handler);
        packer.number(*redirects_left);
        packer.optional(*refusal);
        packer.optional(limit_rate.get());
        packer.flags([
            *makes_subrequests,
            *is_error_page,
            *adds_uri_to_alias,
            *is_pipelined,
            *body_was_refused,
            *is_counted,
            closes_connection.get(),
            *skips_filters,
            *is_get_forced,
            *shows_get,
        ]);
        if let Some(passed_to) = passed_to {
            packer.text(&passed_to.uri);
        }
        let trailers = trailers.get_mut();
        let has_rare = body.is_some()
            || !when_logged.is_empty()
            || fallback.is_some()
            || !trailers.is_empty()
            || !evaluation.is_at_rest();
        let rare = has_rare.then(|| {
            Box::new(Rare {
                body: body.take(),
                when_logged: std::mem::take(when_logged),
                fallback: fallback.take(),
                trailers: std::mem::take(trailers),
                evaluation: std::mem::take(evaluation),
            })
        });
        notes.shrink();
        let shares = Rc::get_mut(shared).is_none_or(|shared| !shared.is_at_rest());
        PackedRequest {
            values: scratch.as_slice().into(),
            notes: std::mem::take(notes),
            configuration: configuration.take(),
            shared: shares.then(|| std::mem::take(shared)),
            passed_to: passed_to.take().map(|passed_to| (passed_to.scheme, passed_to.peer)),
            at_end: *at_end,
            rare,
            phase: *phase,
            kind: *kind,
            origin: *origin,
            fit: *fit,
            outline,
        }
    }
}

impl PackedRequest {
    /// The request as it was, in one of this worker's; with the exchange that it has always had.
    pub(crate) fn unpack(self, worker: &Rc<HttpWorker>, its_exchange: Rc<dyn Exchange>) -> Box<Request> {
        let mut request = worker.take_request();
        let unpacker = &mut Unpacker::new(&self.values);
        let mut text = Buffer::new();
        // Shorter than what is bounded, and soon gone again.
        text.append_past_limit(unpacker.text());
        request.set_head(text);
        unpack_head(request.parsed_mut(), self.outline, unpacker);
        let Request {
            server,
            scope,
            head: _,
            parsed: _,
            added_to_head,
            uri,
            args,
            host,
            response,
            body,
            notes,
            makes_subrequests,
            origin,
            is_error_page,
            status_override,
            content_type_override,
            started,
            adds_uri_to_alias,
            is_pipelined,
            number_on_connection,
            place,
            phase,
            next_handler,
            fit,
            redirects_left,
            tunnel: _,
            body_was_refused,
            refusal,
            passed_to,
            exchange,
            is_counted,
            when_logged,
            at_end,
            when_refused: _,
            answered,
            closes_connection,
            kind,
            skips_filters,
            fallback,
            shared,
            worker: _,
            configuration,
            is_get_forced,
            shows_get,
            trailers,
            limit_rate,
            evaluation,
        } = &mut *request;
        unpack_response(response, unpacker);
        *server = ServerId(unpacker.number32());
        *scope = ScopeId(unpacker.number32());
        *added_to_head = unpacker.size();
        uri.extend_from_slice(unpacker.text());
        args.extend_from_slice(unpacker.text());
        host.extend_from_slice(unpacker.text());
        *status_override = unpacker.optional16();
        *content_type_override = unpack_optional_text(unpacker).map(Into::into);
        *started = Moment::from_nanos(unpacker.number());
        *answered = unpacker.optional().map(Moment::from_nanos);
        *number_on_connection = unpacker.number();
        *place = unpacker.size();
        *next_handler = unpacker.size();
        *redirects_left = unpacker.number8();
        *refusal = unpacker.optional16();
        limit_rate.set(unpacker.optional());
        let closes;
        [
            *makes_subrequests,
            *is_error_page,
            *adds_uri_to_alias,
            *is_pipelined,
            *body_was_refused,
            *is_counted,
            closes,
            *skips_filters,
            *is_get_forced,
            *shows_get,
        ] = unpacker.flags();
        closes_connection.set(closes);
        *passed_to = self.passed_to.map(|(scheme, peer)| {
            let uri = Bytes::copy_from_slice(unpacker.text());
            PassedTo { scheme, peer, uri }
        });
        debug_assert!(unpacker.is_empty(), "what is packed is unpacked in the same order");
        *phase = self.phase;
        (*kind, *origin, *fit) = (self.kind, self.origin, self.fit);
        *notes = self.notes;
        *configuration = self.configuration;
        *exchange = Some(its_exchange);
        *at_end = self.at_end;
        if let Some(its_own) = self.shared {
            *shared = its_own;
        }
        if let Some(rare) = self.rare {
            *body = rare.body;
            *when_logged = rare.when_logged;
            *fallback = rare.fallback;
            *trailers.get_mut() = rare.trailers;
            *evaluation = rare.evaluation;
        }
        request
    }
}

fn pack_head(head: &RequestHead, packer: &mut Packer<'_>) -> Outline {
    // What is not here is where the known fields stand, which follows from the fields.
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

fn pack_optional_text(text: Option<&[u8]>, packer: &mut Packer<'_>) {
    packer.flags([text.is_some()]);
    packer.text(text.unwrap_or_default());
}

fn unpack_optional_text<'p>(unpacker: &mut Unpacker<'p>) -> Option<&'p [u8]> {
    let [is_there] = unpacker.flags();
    let text = unpacker.text();
    is_there.then_some(text)
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
    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;
    use crate::request::exchange::mock::{self, MockExchange};

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
        let numbers = (
            (request.server.0, request.scope.0, request.started, request.answered, request.place, request.phase),
            (request.kind, request.origin, request.fit),
            (request.number_on_connection, request.added_to_head, request.next_handler, request.redirects_left),
            (request.status_override, request.refusal, request.limit_rate.get(), request.when_logged.len()),
        );
        let flags = [
            request.makes_subrequests,
            request.is_error_page,
            request.adds_uri_to_alias,
            request.is_pipelined,
            request.body_was_refused,
            request.is_counted,
            request.closes_connection(),
            request.skips_filters,
            request.is_get_forced,
            request.shows_get,
        ];
        let texts = (&request.uri, &request.args, &request.host, &request.content_type_override);
        let passed_to = request.passed_to.as_ref().map(|to| (to.scheme, &to.peer, &to.uri));
        let fields: Vec<_> = request.fields().collect();
        let known = KnownHeader::ALL.iter().map(|&known| request.parsed.field(known)).collect::<Vec<_>>();
        format!(
            "{numbers:?} {flags:?} {texts:?} {passed_to:?} {fields:?} {known:?} {:?} {:?} {:?} {:?} {:?} {}",
            request.response,
            (&request.head.readable(), &request.body, &*request.trailers()),
            (request.parsed.method, request.parsed.target, request.parsed.version, request.parsed.framing),
            (request.parsed.authority, request.parsed.connect_protocol, request.parsed.ignored_first),
            (request.target(), request.method_name(), request.request_line(), request.parsed.ignored_count),
            request.fallback.is_some(),
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
        (request.status_override, request.refusal) = (Some(200), Some(403));
        request.content_type_override = Some(b"text/html".as_slice().into());
        (request.started, request.answered) = (Moment::from_nanos(u64::MAX / 2), Some(Moment::from_nanos(5)));
        (request.number_on_connection, request.place, request.next_handler) = (u64::MAX, 4, 2);
        (request.phase, request.redirects_left) = (Phase::Content, 7);
        (request.origin, request.fit, request.is_counted) = (UriOrigin::ClientRedirected, UriFit::Stays, true);
        (request.is_pipelined, request.body_was_refused, request.shows_get) = (true, true, true);
        request.close_after_response();
        request.set_limit_rate(1000);
        let uri = Bytes::copy_from_slice(b"/behind");
        request.passed_to = Some(PassedTo { scheme: "http://", peer: PeerName::of_group("127.0.0.1:80"), uri });
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
            request.at_end = Some(|_| {});
            let before = written(&request);
            let Ok(packed) = request.pack() else { unreachable!("it can be packed") };
            assert_eq!(Rc::strong_count(&dropped), 2);
            let request = packed.unpack(&worker, exchange);
            assert_eq!((written(&request), request.id()), (before, id));
            assert!(request.at_end.is_some() && request.evaluation().is_at_rest());
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
