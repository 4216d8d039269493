//! A request on its way through the phases, with its response. A subrequest is a request, too.
//!
//! The structure knows no module: state of modules is in the notes. It lives for one exchange and then returns to the
//! spare ones of its worker, so that the next request finds memory allocated. Its fields stand in [`parts`].

pub(crate) mod advance;
pub(crate) mod begin;
pub mod body;
pub mod browser;
pub mod configuration;
mod counting;
pub mod departure;
pub mod error_page;
pub mod exchange;
pub mod files;
pub mod filters;
pub mod forwarded;
mod hooks;
mod kind;
pub mod limit_rate;
mod outcome;
pub mod own;
pub(crate) mod packed;
pub mod parts;
pub mod phases;
pub mod post_action;
pub(crate) mod pump;
pub mod request_body;
pub(crate) mod respond;
pub mod response;
mod routing;
pub mod server_field;
pub mod slow;
pub mod subrequest;
pub mod transform;
pub mod tunnel;
pub mod variables;
pub mod worker;

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bstr::{BStr, ByteSlice};
use gale_base::log_level::Level;
use gale_engine::configuration::{ScopeId, ServerId};
use gale_engine::connections::{ConnectionInfo, address_text};
use gale_engine::variables::subject::{Evaluation, Values};
use gale_log::{Describe, Fields};
use gale_protocol::Range32;
use gale_protocol::request::{Framing, HeaderField, KnownHeader, Method, RequestHead, Version};
use gale_protocol::uri::escape::{Class, escape};
use gale_resolver::Resolver;
use gale_runtime::{Buffer, Bytes, SocketAddress};
use gale_upstream::PeerName;
use gale_worker::notes::{Notes, SharedNotes};
use smallvec::SmallVec;

use crate::request::browser::Browser;
use crate::request::configuration::{HttpConfiguration, Scope, Server};
use crate::request::exchange::{BodyLimits, Exchange, Sent, Transferred};
use crate::request::kind::Kind;
use crate::request::parts::{Arrival, Extras, Outcome, Record, Routing};
use crate::request::phases::Phase;
use crate::request::request_body::StoredBody;
use crate::request::response::{ResponseHead, ShortText};
use crate::request::routing::{CountedMethod, UriFit, UriOrigin};
use crate::request::subrequest::{RepeatsMain, Target};
use crate::request::variables::template::any_is_true;
use crate::request::worker::{Configured, HttpWorker};

/// Maximum of internal redirects, as in nginx.
pub const REDIRECTS_MAX: u8 = 10;

/// Client behind a trusted proxy, which told its address.
struct Client {
    address: SocketAddress,
    text: Box<str>,
}

/// Server that a request is passed to, for messages.
pub struct PassedTo {
    /// `http://`
    pub scheme: &'static str,
    /// Its address, or the name of its group.
    pub peer: Arc<PeerName>,
    /// Path and arguments that it is asked for.
    pub uri: Bytes,
}

/// A request and the head of its response.
#[derive(Default)]
pub struct Request {
    /// Server block that answers.
    pub server: ServerId,
    /// Scope of the settings in force: the server's until the location is found.
    pub scope: ScopeId,

    /// The head as it came; `parsed` refers to it by offsets. Subrequests share both.
    pub head: Rc<Buffer>,
    /// Positions of everything in `head`.
    pub parsed: Rc<RequestHead>,
    /// Bytes at the end of `head` that the client has not sent: fields that were added.
    added_to_head: usize,
    /// The normalised path; redirects change it.
    pub uri: Vec<u8>,
    /// Arguments behind the question mark.
    pub args: Vec<u8>,
    /// The host asked for: lower case, without port; empty when there was none.
    pub host: ShortText,
    /// The response's head.
    pub response: ResponseHead,
    /// The request's body, once it was read as a whole.
    pub body: Option<StoredBody>,
    /// Notes of modules. A subrequest has notes of its own.
    pub notes: Notes,
    /// Facts of its arrival.
    pub arrival: Arrival,
    /// Way through the phases.
    pub routing: Routing,
    /// Decisions about the response.
    pub outcome: Outcome,
    /// Facts for the log.
    pub(crate) record: Record,
    /// Rare fields.
    pub(crate) extras: Extras,
    pub(crate) exchange: Option<Rc<dyn Exchange>>,
    pub(crate) shared: Rc<Shared>,
    /// `None` only in a spare request, like the configuration: a spare one must keep neither alive.
    pub(crate) worker: Option<Rc<HttpWorker>>,
    configuration: Option<Rc<Configured>>,
    pub(crate) evaluation: Evaluation,
}

/// Values that a request shares with its subrequests.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) values: Values,
    notes: RefCell<SharedNotes>,
    /// Values held for subrequests until the client's request is over.
    held: RefCell<Notes>,
    id: Cell<Option<[u8; 16]>>,
    /// The client, if it is not the other end of the connection.
    client: OnceCell<Client>,
    /// Number of subrequests in flight.
    pub(crate) subrequests: Cell<u32>,
    /// Bytes of bodies of subrequests that count as uses of a cache by themselves.
    pub(crate) counted_bytes: Cell<u64>,
    /// Waits, if `slow_request_log` is in force.
    waits: OnceCell<Box<slow::Waits>>,
}

impl Request {
    /// Resets it after its exchange and keeps the memory.
    pub(crate) fn reset(&mut self) {
        // `parsed` has offsets only, and the parser clears it. Subrequests keep what they still hold.
        match (Rc::get_mut(&mut self.head), Rc::get_mut(&mut self.parsed), Rc::get_mut(&mut self.shared)) {
            (Some(head), Some(_), Some(shared)) => {
                head.clear();
                shared.clear();
            }
            _ => {
                if self.is_main() {
                    // A copy in the background may share it for longer.
                    self.shared.held.borrow_mut().clear();
                }
                (self.head, self.parsed, self.shared) = Default::default();
            }
        }
        self.added_to_head = 0;
        self.uri.clear();
        self.args.clear();
        self.host.clear();
        self.response.clear();
        self.notes.clear();
        self.body = None;
        self.arrival = Arrival::default();
        self.routing = Routing::default();
        self.outcome = Outcome::default();
        self.record = Record::default();
        self.extras = Extras::default();
        self.exchange = None;
        self.configuration = None;
        self.worker = None;
        self.evaluation.clear();
    }

    /// Memory in bytes that it keeps when it has ended, of the parts that a client can make large.
    pub(crate) fn memory_bytes(&self) -> usize {
        let fields = self.parsed.headers.capacity() * size_of::<HeaderField>() + self.response.memory_bytes();
        self.uri.capacity() + self.args.capacity() + fields
    }

    /// Sets the head while it is read, before anything shares it.
    pub(crate) fn set_head(&mut self, head: Buffer) {
        *Rc::get_mut(&mut self.head).expect("no subrequest before the head") = head;
    }

    /// Positions in the head while it is read.
    pub(crate) fn parsed_mut(&mut self) -> &mut RequestHead {
        Rc::get_mut(&mut self.parsed).expect("no subrequest before the head")
    }

    /// Makes a subrequest before its first phase, with the same client, head, variables and configuration and another
    /// URI. (<https://nginx.org/en/docs/dev/development_guide.html#http_subrequests>)
    pub(crate) fn subrequest(&self, target: Target, exchange: Rc<dyn Exchange>) -> Box<Request> {
        let mut request = self.worker().take_request();
        request.begin(Rc::clone(self.configuration()), exchange, self.server);
        request.head = Rc::clone(&self.head);
        request.parsed = Rc::clone(&self.parsed);
        request.added_to_head = self.added_to_head;
        request.shared = Rc::clone(&self.shared);
        request.uri = target.uri;
        request.args = target.args;
        request.host.extend_from_slice(&self.host);
        request.body = if target.shares_body { self.body.clone() } else { Some(StoredBody::default()) };
        request.extras.fallback = target.fallback;
        request.arrival = Arrival { started: gale_runtime::now(), ..self.arrival };
        let method = self.routing.method;
        request.routing = Routing {
            kind: self.routing.kind.of_subrequest(),
            phase: Phase::ServerRewrite,
            origin: UriOrigin::Internal,
            method: if target.keeps_method { method } else { method.become_get(false) },
            ..Routing::default()
        };
        request
    }

    /// Frees memory that is not needed until the end, which may be days away.
    fn shrink(&mut self) {
        if let Some(head) = Rc::get_mut(&mut self.head) {
            head.shrink();
        }
        if let Some(parsed) = Rc::get_mut(&mut self.parsed) {
            parsed.headers.shrink_to_fit();
        }
        self.response.fields.shrink();
        self.notes.shrink();
        if let Some(passed_to) = &mut self.outcome.passed_to {
            // It may be a slice of everything that was sent to the server.
            passed_to.uri = Bytes::copy_from_slice(&passed_to.uri);
        }
    }

    /// Forgets its response but for the status, and keeps the notes of modules and the time of its beginning.
    pub(crate) fn begin_anew(&mut self) {
        let status = self.response.status;
        self.response.clear();
        self.response.status = status;
        // The rest of the body is not read any more.
        self.body.get_or_insert_default();
        self.extras.trailers.get_mut().clear();
        self.outcome = Outcome::default();
        self.record.at_end = None;
        self.routing.redirects = 0;
    }

    /// True for the client's request, false for a subrequest.
    pub fn is_main(&self) -> bool {
        self.routing.kind == Kind::Main
    }

    /// True for a copy of the client's request, or a copy of such a copy.
    pub fn repeats_main(&self) -> bool {
        self.notes.has::<RepeatsMain>()
    }

    /// Marks the response as wrong, so that a cache does not keep it. May be called long after the response has begun.
    pub fn refuse_response(&self) {
        if let Some(refuse) = self.outcome.when_refused {
            refuse(self);
        }
    }

    /// True if subrequests would be nested too deep.
    pub(crate) fn is_nested_too_deep(&self) -> bool {
        self.routing.kind.is_nested_too_deep()
    }

    /// Returns the note of this type that a request and its subrequests share; an empty one at first.
    pub fn shared_note<T: Default + 'static>(&self) -> Rc<T> {
        self.shared.notes.borrow_mut().note()
    }

    /// Calls `then` when the request is logged, after the handlers of the log phase. It is for things that few requests
    /// need; a handler would run for all of them.
    pub fn when_logged(&mut self, then: fn(&mut Request)) {
        self.extras.when_logged.push(then);
    }

    /// Drops `value` when the request is over. A subrequest is over with the client's request that it is a part of; a
    /// copy in the background is over by itself. A later value of the same type replaces the earlier one.
    pub fn hold<T: 'static>(&mut self, value: T) {
        if self.routing.kind.is_background() {
            self.notes.put(value);
        } else {
            self.shared.held.borrow_mut().put(value);
        }
    }

    /// Drops the values that were held until the request is over.
    pub(super) fn let_go(&self) {
        self.shared.held.borrow_mut().clear();
    }

    /// Begins an exchange. The configuration stays the same until the exchange ends.
    pub(crate) fn begin(&mut self, configuration: Rc<Configured>, exchange: Rc<dyn Exchange>, server: ServerId) {
        self.server = server;
        self.scope = configuration.http().server(server).scope;
        self.configuration = Some(configuration);
        self.exchange = Some(exchange);
    }

    /// The worker.
    pub fn worker(&self) -> &Rc<HttpWorker> {
        self.worker.as_ref().expect("a request in use has its worker")
    }

    /// The configuration that the exchange began with.
    pub fn configuration(&self) -> &Rc<Configured> {
        self.configuration.as_ref().expect("a request in use has its configuration")
    }

    /// The configuration of the http block.
    pub fn http(&self) -> &HttpConfiguration {
        self.configuration().http()
    }

    /// The connection.
    pub fn connection(&self) -> &ConnectionInfo {
        self.exchange.as_ref().expect("a request in use has its exchange").connection()
    }

    /// The client's address: the one that a trusted proxy told, or that of the connection.
    pub fn remote(&self) -> &SocketAddress {
        self.shared.client.get().map_or(&self.connection().remote, |client| &client.address)
    }

    /// The client's address without its port, as `$remote_addr` has it.
    pub fn remote_text(&self) -> &str {
        self.shared.client.get().map_or_else(|| self.connection().remote_text(), |client| &client.text)
    }

    /// Sets the address of the client for the request, its subrequests and its log lines. Only the first call counts.
    pub fn set_remote(&self, address: SocketAddress) {
        self.shared.client.get_or_init(|| Client { text: address_text(&address), address });
    }

    /// True if a trusted proxy told the client's address.
    pub fn is_remote_set(&self) -> bool {
        self.shared.client.get().is_some()
    }

    /// The settings in force.
    pub fn scope(&self) -> &Scope {
        self.http().scope(self.scope)
    }

    /// The server block that answers.
    pub fn server(&self) -> &Server {
        self.http().server(self.server)
    }

    /// The method that counts: GET while an error page is made.
    pub fn method(&self) -> Method {
        match self.routing.method {
            CountedMethod::Sent => self.parsed.method,
            CountedMethod::Get | CountedMethod::ShownGet => Method::Get,
        }
    }

    /// True if it counts as a GET whatever its method is.
    pub fn counts_as_get(&self) -> bool {
        self.routing.method != CountedMethod::Sent
    }

    /// True after an internal redirect: to another URI, a named location, or an error page. The rewrites of a server or
    /// location are none.
    pub fn is_redirected(&self) -> bool {
        self.routing.redirects > 0
    }

    /// True if the URI is the one that the client has sent: no redirect and no rewrite has changed it.
    pub fn has_sent_uri(&self) -> bool {
        self.routing.origin.is_client()
    }

    /// True unless the URI led a client to the location: the `internal` directive lets the request in.
    pub fn is_internal(&self) -> bool {
        self.routing.origin.is_internal()
    }

    /// True unless a rewrite has changed the URI and left the request in its location.
    pub fn is_in_its_location(&self) -> bool {
        self.routing.fit != UriFit::Stays
    }

    /// Redirects the client to this URI with a slash at the end. Returns the status.
    pub fn redirect_to_slash(&mut self) -> u16 {
        let mut location = Vec::with_capacity(self.uri.len() + 1);
        escape(Class::Uri, &self.uri, &mut location);
        location.push(b'/');
        if !self.args.is_empty() {
            location.push(b'?');
            location.extend_from_slice(&self.args);
        }
        self.response.location = location;
        301
    }

    /// The protocol that the client asks to change to on this connection (RFC 9110 §7.8).
    pub fn asked_upgrade(&self) -> Option<&[u8]> {
        let token = self.header(KnownHeader::Upgrade)?;
        let names_it = |name: &&[u8]| name.eq_ignore_ascii_case(b"upgrade");
        (self.version() >= Version::Http11 && self.may_upgrade() && self.connection_fields().iter().any(names_it))
            .then_some(token)
    }

    /// True if its connection, or its stream (RFC 8441), may change to another protocol.
    pub fn may_upgrade(&self) -> bool {
        match self.version() {
            Version::Http2 | Version::Http3 => self.parsed.connect_protocol.is_some(),
            Version::Http09 | Version::Http10 | Version::Http11 => true,
        }
    }

    /// The names in its `Connection` fields: fields for this connection alone (RFC 9110 §7.6.1). A field that is just
    /// `keep-alive`, as most clients write it, is left out: `Keep-Alive` never leaves this connection anyway.
    pub fn connection_fields(&self) -> SmallVec<[&[u8]; 4]> {
        let values = self.parsed.values(self.head.readable(), KnownHeader::Connection);
        let values = values.filter(|value| *value != b"keep-alive");
        let names = values.flat_map(|value| value.split(|&byte| byte == b','));
        names.map(<[u8]>::trim_ascii).filter(|name| !name.is_empty()).collect()
    }

    /// The target as it was sent, without scheme and host.
    pub fn target_in_origin_form(&self) -> &[u8] {
        let target = self.target();
        if target.starts_with(b"/") || target == b"*" {
            return target;
        }
        let after_scheme = target.find(b"://").map_or(target, |at| &target[at + 3..]);
        after_scheme.find_byteset(b"/?").map_or(b"/", |at| &after_scheme[at..])
    }

    /// The method as it was sent.
    pub fn method_name(&self) -> &[u8] {
        self.parsed.method_range.of_lenient(self.head.readable())
    }

    /// The method of the client's request, also in a subrequest, as `$request_method` has it.
    pub fn shown_method(&self) -> &[u8] {
        if self.routing.method == CountedMethod::ShownGet { b"GET" } else { self.method_name() }
    }

    /// True if only the head of the response is wanted.
    pub fn is_head(&self) -> bool {
        self.method() == Method::Head
    }

    /// Makes the request count as a GET.
    pub fn become_get(&mut self) {
        self.routing.method = self.routing.method.become_get(self.is_main());
    }

    /// Makes the response that of a GET, although the client has sent no method.
    pub(crate) fn answer_as_get(&mut self) {
        self.routing.method = self.routing.method.become_get(false);
    }

    /// The request's target as it was sent, with its arguments.
    pub fn target(&self) -> &[u8] {
        self.parsed.target_range.of_lenient(self.head.readable())
    }

    /// Length of the body by the head; `None` for a chunked body.
    pub fn declared_body_length(&self) -> Option<u64> {
        match self.parsed.framing {
            Framing::None => Some(0),
            Framing::Length(length) => Some(length),
            Framing::Chunked => None,
        }
    }

    /// Limits of the location for reading the body.
    pub fn body_limits(&self) -> BodyLimits {
        let core = &self.scope().core;
        BodyLimits {
            length_max: *core.client_max_body_size.get(),
            silence_max: *core.client_body_timeout.get(),
            min_rate: *core.client_body_min_rate.get(),
        }
    }

    /// True if some of the body was read and passed on, so that it cannot be read again.
    pub fn body_is_gone(&self) -> bool {
        self.is_main() && self.body.is_none() && self.exchange().received() > 0
    }

    /// The protocol version.
    pub fn version(&self) -> Version {
        self.parsed.version
    }

    /// The request line as it was sent, without its line end; for logs.
    pub fn request_line(&self) -> &[u8] {
        self.parsed.line.of_lenient(self.head.readable())
    }

    /// The fields of the head in the order in which they came.
    pub fn fields(&self) -> impl Iterator<Item = (&HeaderField, &[u8], &[u8])> {
        let head = self.head.readable();
        self.parsed.headers.iter().map(move |field| (field, field.name.of_lenient(head), field.value.of_lenient(head)))
    }

    /// Sets a field of the head in place of those that the client has sent by this name, for every module and for
    /// servers
    /// that the request is passed to. An empty value removes them.
    ///
    /// # Errors
    /// There is no memory within the worker's bound. Nothing has changed then.
    pub fn set_field(&mut self, name: &[u8], value: &[u8]) -> io::Result<()> {
        if Rc::get_mut(&mut self.head).is_none() {
            // Subrequests in flight keep the head that they began with.
            let mut copy = Buffer::new();
            copy.append(self.head.readable())?;
            self.head = Rc::new(copy);
        }
        let head = Rc::get_mut(&mut self.head).expect("the head has one owner by now");
        let mut field = None;
        if !value.is_empty() {
            let start = head.len();
            head.append(&[name, value].concat())?;
            let (middle, end) = (start + name.len(), head.len());
            self.added_to_head += end - start;
            let (name, value, known) =
                (Range32::new(start, middle), Range32::new(middle, end), KnownHeader::from_name(name));
            field = Some(HeaderField { name, value, known });
        }
        Rc::make_mut(&mut self.parsed).replace(head.readable(), name, field);
        Ok(())
    }

    /// The value of the first field of this kind.
    pub fn header(&self, known: KnownHeader) -> Option<&[u8]> {
        self.parsed.value(self.head.readable(), known)
    }

    /// Returns true once if variables have become too costly: the response has to be an error.
    pub(crate) fn take_too_costly(&self) -> bool {
        self.evaluation.take_too_costly()
    }

    /// Replaces the URI. At the end of the phase of rewrites the location for it is searched, unless the request
    /// [stays](Request::stay_in_location).
    pub fn rewrite_uri(&mut self, uri: Vec<u8>) {
        self.uri = uri;
        self.routing.origin = UriOrigin::Internal;
        self.routing.fit = UriFit::Rewritten;
    }

    /// Keeps the request in its location although its URI was replaced. Settings that replace the location's part of
    /// the URI do not apply to it any more.
    pub fn stay_in_location(&mut self) {
        self.routing.fit.stay();
    }

    /// True if the path came with encoded characters or plus signs. Text from it must be encoded again in arguments.
    pub fn came_encoded(&self) -> bool {
        let target = self.target();
        let path = target.split(|&byte| byte == b'?').next().unwrap_or_default();
        path.iter().any(|byte| matches!(byte, b'%' | b'+'))
    }

    /// The exchange, for modules that read the body or send by themselves.
    pub fn exchange(&self) -> &dyn Exchange {
        &**self.exchange.as_ref().expect("a request in use has its exchange")
    }

    /// The exchange, for work beside the request that ends before it.
    pub(crate) fn exchange_handle(&self) -> Rc<dyn Exchange> {
        Rc::clone(self.exchange.as_ref().expect("a request in use has its exchange"))
    }

    /// Sends `103 Early Hints` before the response if `early_hints` is on and there are fields.
    /// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#early_hints>)
    pub fn send_early_hints(&self, fields: &[(Bytes, Bytes)]) {
        if !fields.is_empty() && any_is_true(self.scope().core.early_hints.get(), self) {
            self.exchange().interim(103, fields);
        }
    }

    /// Amount of the response that was sent.
    pub fn sent(&self) -> Sent {
        self.exchange.as_ref().map(|exchange| exchange.sent()).unwrap_or_default()
    }

    /// Bytes that came from the client: the head (in HTTP/2 its block of fields), and the body once all of it has come.
    /// Bytes of a chunked or an incomplete body are not counted.
    pub fn received(&self) -> u64 {
        let line = self.parsed.line;
        if line.is_empty() {
            return 0;
        }
        let exchange = self.exchange();
        let text = || (self.head.len() - self.added_to_head - line.start()) as u64;
        exchange.head_bytes().unwrap_or_else(text) + exchange.received()
    }

    /// [`Request::received`] and [`Request::sent`] in one call, which is cheaper.
    pub(crate) fn transferred(&self) -> Transferred {
        let Some(exchange) = &self.exchange else { return Transferred::default() };
        let line = self.parsed.line;
        if line.is_empty() {
            return Transferred { received: 0, sent: exchange.sent() };
        }
        exchange.transferred((self.head.len() - self.added_to_head - line.start()) as u64)
    }

    /// Adds a field behind the response's body. Later fields may ask for the values of earlier ones.
    pub fn add_trailer(&self, name: &[u8], value: Vec<u8>) {
        self.extras.trailers.borrow_mut().push((Bytes::copy_from_slice(name), value.into()));
    }

    /// The fields behind the response's body, once it has ended.
    pub fn trailers(&self) -> Ref<'_, Vec<(Bytes, Bytes)>> {
        self.extras.trailers.borrow()
    }

    /// Maximum of bytes of the response in a second; zero for no limit. It is evaluated once.
    pub fn limit_rate(&self) -> u64 {
        let rate = self.record.limit_rate.get().unwrap_or_else(|| self.scope().core.limit_rate.get().evaluate(self));
        self.record.limit_rate.set(Some(rate));
        rate
    }

    /// The rate that was set or evaluated: `$limit_rate`.
    pub fn known_limit_rate(&self) -> u64 {
        self.record.limit_rate.get().unwrap_or(0)
    }

    /// Sets the rate, whatever the location says.
    pub fn set_limit_rate(&self, per_second: u64) {
        self.record.limit_rate.set(Some(per_second));
    }

    /// A unique number that is hard to guess: `$request_id`.
    pub fn id(&self) -> [u8; 16] {
        let id = self.shared.id.get().unwrap_or_else(unique_id);
        self.shared.id.set(Some(id));
        id
    }

    /// The client's browser.
    pub fn browser(&self) -> Browser {
        self.header(KnownHeader::UserAgent).map_or(Browser::Other, Browser::of)
    }

    /// Ends the connection after the response, since the following bytes are unreliable or the server is in trouble.
    /// A version whose requests are independent of each other may carry on.
    pub fn close_after_response(&self) {
        self.record.closes_connection.set(true);
    }

    /// True after [`Request::close_after_response`].
    pub(crate) fn closes_connection(&self) -> bool {
        self.record.closes_connection.get()
    }

    /// The resolver in force and its timeout; `None` if no name servers are configured.
    pub fn resolver(&self) -> Option<(Rc<Resolver>, Duration)> {
        let core = &self.scope().core;
        let settings = core.resolver.get_opt()?;
        Some((self.worker().common.resolver(settings), *core.resolver_timeout.get()))
    }

    /// Writes a line to the error log in force if that takes the level. Lines are rare, so the compiler keeps the calls
    /// out of the usual path.
    #[cold]
    #[inline(never)]
    pub fn log(&self, level: Level, message: fmt::Arguments<'_>) {
        let log = &self.scope().error_log;
        if !log.takes(level) {
            return;
        }
        log.write_about(level, Some(self.connection().number), &message, &Context(self));
    }
}

impl Shared {
    /// True if it is like a new one. Otherwise it frees unused memory.
    fn is_at_rest(&mut self) -> bool {
        let Shared { values, notes, held, id, client, subrequests, counted_bytes, waits } = self;
        let has_values = !values.shrink();
        held.get_mut().shrink();
        let has_notes = !notes.get_mut().is_empty() || !held.get_mut().is_empty();
        let has_client = id.get().is_some() || client.get().is_some();
        let has_counted = subrequests.get() > 0 || counted_bytes.get() > 0 || waits.get().is_some();
        !has_values && !has_notes && !has_client && !has_counted
    }

    fn clear(&mut self) {
        self.values.clear();
        self.notes.get_mut().clear();
        self.held.get_mut().clear();
        self.id.set(None);
        self.client.take();
        self.subrequests.set(0);
        self.counted_bytes.set(0);
        self.waits.take();
    }
}

/// Returns a counter behind a keyed hash (SipHash): as good as random, without a system call, and unrelated to earlier
/// values.
fn unique_id() -> [u8; 16] {
    thread_local! {
        static KEY: RandomState = RandomState::new();
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }
    let count = COUNT.get();
    COUNT.set(count + 1);
    let half = |number: u8| KEY.with(|key| key.hash_one((count, number))).to_be_bytes();
    let mut id = [0; 16];
    id[..8].copy_from_slice(&half(0));
    id[8..].copy_from_slice(&half(1));
    id
}

/// Fields that nginx adds to every message about a request.
struct Context<'r>(&'r Request);

impl Describe for Context<'_> {
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
        let Context(request) = self;
        fields.text(", client: ", "client", &request.remote_text(), "")?;
        fields.text(", server: ", "server", &BStr::new(&request.server().name), "")?;
        if !request.request_line().is_empty() {
            fields.text(", request: \"", "request", &BStr::new(request.request_line()), "\"")?;
        }
        if !request.is_main() {
            fields.text(", subrequest: \"", "subrequest", &BStr::new(&request.uri), "\"")?;
        }
        if let Some(PassedTo { scheme, peer, uri }) = &request.outcome.passed_to {
            // The path of a socket ends with a colon.
            let separator = if peer.starts_with("unix:") { ":" } else { "" };
            let upstream = format_args!("{scheme}{peer}{separator}{}", BStr::new(uri));
            fields.text(", upstream: \"", "upstream", &upstream, "\"")?;
        }
        if let Some(host) = request.header(KnownHeader::Host) {
            fields.text(", host: \"", "host", &BStr::new(host), "\"")?;
        }
        if let Some(referer) = request.header(KnownHeader::Referer) {
            fields.text(", referrer: \"", "referrer", &BStr::new(referer), "\"")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_between_requests_and_between_threads() {
        let mut ids: Vec<[u8; 16]> = (0..100).map(|_| unique_id()).collect();
        ids.extend(std::thread::spawn(|| [unique_id(), unique_id()]).join().unwrap());
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 102);
    }
}
