//! Subrequests: a request asks its own server, to include the response in its own, to decide by it, or to copy itself.
//! (<https://nginx.org/en/docs/dev/development_guide.html#http_subrequests>)
//!
//! ```text
//!   Subrequest::start   in line: a body item. Wrappers of the body pass it on as it is, down to the filter
//!                       `postpone`, which puts its output into its place. Those that lie ahead run at the same time.
//!   InMemorySubrequest  the body as one text, for a variable
//!   ask                 for a phase: waits for the head, drops the body
//!   run_in_background   a task of its own; the client's connection does not wait for it
//! ```
//!
//! A subrequest is a [`Request`] that goes through the phases (but for the access phase) and the filters like any
//! other. Its end differs: head and body are a value for its maker and are not sent. It shares the head, the variables
//! and the client of its parent, and has notes of its own.
//!
//! Dropping one cancels it. Bounds: depth of nesting, number in flight for a client's request, number in the background
//! of a worker, and the part of a body that is held ahead of its turn.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_process::ListenAddress;
use gale_protocol::request::Scheme;
use gale_protocol::uri;
use gale_runtime::{Bytes, SocketAddress};
use gale_tls::TlsStream;
use gale_worker::notes::Notes;

use crate::request::Request;
use crate::request::advance;
use crate::request::advance::Step;
use crate::request::body::{Body, BodyError, BodyItem, BodyStream};
use crate::request::counting;
use crate::request::exchange::{BodyLimits, Exchange, Permit, RequestBodyError, ResponseWriter, Sent};
use crate::request::kind::Kind;
use crate::request::phases::{LocalBoxFuture, Phase};
use crate::request::response::ShortText;
use crate::request::transform::InMemory;

/// Maximum number in flight for one request of a client, as in nginx.
const UNDER_WAY_MAX: u32 = 65535 - 1000;

/// With more than this number in flight for one request, a body is produced only in its turn. Pages that include each
/// other would otherwise unfold all at once.
const AHEAD_MAX: u32 = 256;

/// Maximum number of items of a body that are taken before its turn.
const AHEAD_ITEMS_MAX: usize = 32;

/// Bytes in memory after which no more is taken before its turn.
const AHEAD_BYTES_MAX: u64 = 16 * 1024;

/// URI, method and body of a subrequest.
#[derive(Default)]
pub struct Target {
    /// The normalised path.
    pub uri: Vec<u8>,
    /// Arguments behind the question mark.
    pub args: Vec<u8>,
    /// It has its parent's method; otherwise it is a GET.
    pub keeps_method: bool,
    /// It has the body that its parent has stored; otherwise none.
    pub shares_body: bool,
    /// Stands in for an answer that is an error or empty.
    pub fallback: Option<Fallback>,
}

/// Replacement for a response.
pub struct Fallback {
    /// Its media type.
    pub content_type: ShortText,
    /// The body. In place of an error it passes the filters; in place of an empty body it comes too late for them.
    pub text: Bytes,
}

impl Target {
    /// This path, as the configuration has it: a GET without arguments, with the body that its parent has stored.
    pub fn new(uri: &[u8]) -> Target {
        Target { uri: uri.into(), shares_body: true, ..Target::default() }
    }

    /// A path, perhaps with arguments, that stands in a document. `None`, and a line in the error log, if it leads out
    /// of the document root.
    pub fn parse(request: &Request, text: &[u8]) -> Option<Target> {
        let Some((path, args)) = uri::split_unsafe(text) else {
            request.log(Level::Error, format_args!("unsafe URI \"{}\" was detected", bstr::BStr::new(text)));
            return None;
        };
        Some(Target { args: args.into(), ..Target::new(&path) })
    }
}

/// A subrequest in line: its body becomes a part of its parent's. The filter `postpone` puts it into its place.
pub struct Subrequest {
    state: State,
    has_ended: Rc<Cell<bool>>,
}

enum State {
    /// In the phases.
    Deciding(LocalBoxFuture<'static, (Lent, Option<Body>)>),
    Answering(Box<Answering>),
    /// Its location closes the connection.
    Refusing,
    Ended,
}

struct Answering {
    request: Lent,
    body: Body,
    /// Items taken before its turn. An error is the last one.
    ahead: VecDeque<Result<BodyItem, BodyError>>,
    ahead_bytes: u64,
    has_ended: bool,
    is_empty: bool,
}

impl Subrequest {
    /// Begins one; it goes as far as it can without waiting. `None`, and a line in the error log, when there are too
    /// many, or too many within each other.
    pub fn start(parent: &Request, target: Target) -> Option<Subrequest> {
        let exchange = Side::of(parent);
        Some(Subrequest::begin(Lent::new(parent, target, exchange)?))
    }

    fn begin(mut request: Lent) -> Subrequest {
        let mut subrequest = Subrequest { state: State::Ended, has_ended: Rc::default() };
        match advance::advance(&mut request) {
            Step::Answer(body) => subrequest.decided(request, Some(body)),
            Step::Close => subrequest.decided(request, None),
            step => {
                subrequest.state = State::Deciding(Box::pin(async move {
                    let body = advance::finish(&mut request, step).await;
                    (request, body)
                }));
            }
        }
        subrequest
    }

    /// Begins to do the request once more, with this note, from the content phase of its location on: what comes is a
    /// piece of the request's own answer, and passes no filters but its. `None` as for [`Subrequest::start`].
    /// Copies of it in the background have the note, too.
    pub fn repeat<N: Clone + 'static>(parent: &Request, note: N) -> Option<Subrequest> {
        let mut request = Lent::again(parent, Side::of(parent))?;
        request.inherit_notes(parent);
        request.notes.put(Inherited(copy_note::<N>));
        request.notes.put(note);
        request.routing.skips_filters = true;
        Some(Subrequest::begin(request))
    }

    /// Becomes true when it has given all that it has.
    pub fn end_flag(&self) -> Rc<Cell<bool>> {
        Rc::clone(&self.has_ended)
    }

    /// Ready when it has an answer: the request with the head in it. `None` if there will be none, or it has ended.
    pub fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Option<&Request>> {
        if let State::Deciding(future) = &mut self.state {
            let (request, body) = ready!(future.as_mut().poll(context));
            self.decided(request, body);
        }
        Poll::Ready(match &self.state {
            State::Answering(answering) => Some(&answering.request),
            _ => None,
        })
    }

    /// Goes on although its turn has not come: through the first items of its body, so that what it includes begins,
    /// too.
    pub fn poll_ahead(&mut self, context: &mut Context<'_>) {
        if self.poll_answer(context).is_pending() {
            return;
        }
        if let State::Answering(answering) = &mut self.state {
            answering.take_ahead(context);
        }
    }

    /// The next item of its body, `None` at the end.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if self.poll_answer(context).is_pending() {
            return Poll::Pending;
        }
        match &mut self.state {
            State::Answering(answering) => {
                let item = match answering.ahead.pop_front() {
                    Some(item) => Some(item),
                    None => ready!(answering.poll_item(context)),
                };
                if item.as_ref().is_none_or(Result::is_err) {
                    self.end();
                }
                Poll::Ready(item)
            }
            State::Refusing => {
                self.state = State::Ended;
                Poll::Ready(Some(Err(BodyError::Other("a subrequest was closed without an answer".to_owned()))))
            }
            State::Deciding(_) | State::Ended => Poll::Ready(None),
        }
    }

    fn decided(&mut self, request: Lent, body: Option<Body>) {
        self.state = match body {
            Some(body) => State::Answering(Box::new(Answering::new(request, body))),
            None => State::Refusing,
        };
    }

    fn end(&mut self) {
        if let State::Answering(answering) = std::mem::replace(&mut self.state, State::Ended) {
            answering.request.end();
        }
        self.has_ended.set(true);
    }
}

impl Answering {
    fn new(request: Lent, body: Body) -> Answering {
        Answering { request, body, ahead: VecDeque::new(), ahead_bytes: 0, has_ended: false, is_empty: true }
    }

    /// Takes what is there, up to the bounds.
    fn take_ahead(&mut self, context: &mut Context<'_>) {
        while !self.has_ended
            && self.ahead.len() < AHEAD_ITEMS_MAX
            && self.ahead_bytes < AHEAD_BYTES_MAX
            && self.request.shared.subrequests.get() <= AHEAD_MAX
            && let Poll::Ready(item) = self.poll_item(context)
        {
            self.has_ended = !matches!(item, Some(Ok(_)));
            let Some(item) = item else { return };
            self.ahead_bytes += item.as_ref().map_or(0, |item| item.bytes().len() as u64);
            self.ahead.push_back(item);
        }
    }

    fn poll_item(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        loop {
            return Poll::Ready(match ready!(self.body.poll_next(&self.request, context)) {
                // They would end the parent's body.
                Some(Ok(BodyItem::Trailers(_))) => continue,
                Some(Ok(item)) => {
                    self.is_empty &= item.length() == 0;
                    Some(Ok(item))
                }
                None if self.is_empty => {
                    self.is_empty = false;
                    self.request.extras.fallback.take().map(|fallback| Ok(BodyItem::Bytes(fallback.text)))
                }
                last => last,
            });
        }
    }
}

impl Drop for Subrequest {
    fn drop(&mut self) {
        self.has_ended.set(true);
    }
}

impl fmt::Debug for Subrequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Deciding(_) => "deciding",
            State::Answering(_) => "answering",
            State::Refusing => "refusing",
            State::Ended => "ended",
        };
        write!(formatter, "Subrequest({state})")
    }
}

/// A subrequest whose body is collected in memory, as far as `subrequest_output_buffer_size` allows.
pub struct InMemorySubrequest(Gathering);

enum Gathering {
    Asking(Subrequest),
    Taking { status: u16, body: Box<InMemory>, text: Vec<u8>, bytes_max: usize },
    Done,
}

impl InMemorySubrequest {
    /// Begins one, like [`Subrequest::start`].
    pub fn start(parent: &Request, target: Target) -> Option<InMemorySubrequest> {
        Some(InMemorySubrequest(Gathering::Asking(Subrequest::start(parent, target)?)))
    }

    /// The status and the body. An error means that the parent's response cannot be completed.
    pub fn poll(&mut self, parent: &Request, context: &mut Context<'_>) -> Poll<Result<(u16, Bytes), BodyError>> {
        loop {
            match &mut self.0 {
                Gathering::Asking(subrequest) => {
                    let (status, bytes_max) = match ready!(subrequest.poll_answer(context)) {
                        Some(answer) => {
                            (answer.response.status, *answer.scope().core.subrequest_output_buffer_size.get())
                        }
                        None => (0, 0),
                    };
                    let Gathering::Asking(subrequest) = std::mem::replace(&mut self.0, Gathering::Done) else {
                        unreachable!("it is being asked");
                    };
                    let body = Box::new(InMemory::new(Body::Stream(Box::new(subrequest))));
                    self.0 = Gathering::Taking { status, body, text: Vec::new(), bytes_max };
                }
                Gathering::Taking { status, body, text, bytes_max } => {
                    match ready!(body.poll_next(parent, context)).transpose()? {
                        Some(item) if item.bytes().len() > *bytes_max - text.len() => {
                            return Poll::Ready(Err(BodyError::Other("too big subrequest response".to_owned())));
                        }
                        Some(item) => text.extend_from_slice(item.bytes()),
                        None => {
                            let answer = (*status, std::mem::take(text).into());
                            self.0 = Gathering::Done;
                            return Poll::Ready(Ok(answer));
                        }
                    }
                }
                Gathering::Done => return Poll::Ready(Ok((0, Bytes::new()))),
            }
        }
    }
}

/// Its body, for readers of bodies.
impl BodyStream for Subrequest {
    fn poll_next(&mut self, _parent: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        Subrequest::poll_next(self, context)
    }
}

/// The answer to a subrequest that was asked for its head alone.
pub struct Answer(Lent);

impl Deref for Answer {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.0
    }
}

/// Makes a subrequest and waits for the head of its answer. `Err` is the status that the parent ends with when there is
/// none.
pub async fn ask(parent: &Request, target: Target) -> Result<Answer, u16> {
    let exchange = Side::of(parent);
    let mut request = Lent::new(parent, target, exchange).ok_or(500_u16)?;
    let step = advance::advance(&mut request);
    match advance::finish(&mut request, step).await {
        Some(_body) => {
            request.log_if_wanted();
            Ok(Answer(request))
        }
        None => Err(request.response.status),
    }
}

/// Makes a subrequest whose response is dropped. It goes on when its parent has ended, and the connection does not wait
/// for it. Returns `false`, with a line in the error log, when there are too many.
pub fn run_in_background(parent: &Request, target: Target) -> bool {
    let exchange = Side::left_behind(parent);
    let Some(mut request) = Lent::new(parent, target, exchange) else { return false };
    request.leave_family();
    let generation = request.http().generation;
    let worker = Rc::clone(request.worker());
    let started = worker.background.leave_behind(generation, async move {
        let step = advance::advance(&mut request);
        if advance::finish(&mut request, step).await.is_some() {
            request.log_if_wanted();
        }
    });
    if !started {
        let most = worker.background.left_behind_max();
        parent.log(Level::Error, format_args!("{most} background subrequests are not enough"));
    }
    started
}

/// Runs the request again in the background, from the content phase of its location on, with this note; its response is
/// dropped. Returns `false`, with a line in the error log, when there are too many.
pub fn repeat_in_background<N: 'static>(parent: &Request, note: N) -> bool {
    let Some(mut request) = Copy::of(parent) else { return false };
    request.0.inherit_notes(parent);
    request.0.notes.put(note);
    let (generation, worker) = (request.http().generation, Rc::clone(request.worker()));
    let started = worker.background.spawn(generation, async move {
        let step = advance::advance(&mut request.0);
        advance::finish(&mut request.0, step).await;
    });
    complain_of_background(parent, started)
}

/// Runs work in the background with a copy of the request: work that was begun for it and that others share. Returns
/// `false`, with a line in the error log, when there are too many.
pub fn copy_in_background<F: Future<Output = ()> + 'static>(parent: &Request, work: impl FnOnce(Copy) -> F) -> bool {
    let Some(request) = Copy::of(parent) else { return false };
    let (generation, worker) = (request.http().generation, Rc::clone(request.worker()));
    let started = worker.background.spawn(generation, work(request));
    complain_of_background(parent, started)
}

fn complain_of_background(parent: &Request, started: bool) -> bool {
    if !started {
        let most = parent.worker().background.max();
        parent.log(Level::Error, format_args!("{most} background subrequests are not enough"));
    }
    started
}

/// Continues a request that is over in the background, from the step that `begin` returns; its response is dropped.
/// Writes a line to the error log when there are too many.
pub(super) fn leave_behind(mut request: Box<Request>, begin: impl FnOnce(&mut Request) -> Step + 'static) {
    request.exchange = Some(Side::after(&request));
    request.routing.kind = Kind::LEFT_BEHIND;
    let mut request = Lent { request: Some(request), is_counted: false };
    let (generation, worker) = (request.http().generation, Rc::clone(request.worker()));
    let error_log = Arc::clone(request.configuration().error_log());
    let number = request.connection().number;
    let started = worker.background.leave_behind(generation, async move {
        let step = begin(&mut request);
        if advance::finish(&mut request, step).await.is_some() {
            request.log_if_wanted();
        }
    });
    if !started {
        let most = worker.background.left_behind_max();
        let message = format_args!("{most} background subrequests are not enough");
        error_log.write(Level::Error, Some(number), &message);
    }
}

/// A copy of a request that outlives it, where that stands: in the content phase of its location.
pub struct Copy(Lent);

impl Copy {
    fn of(parent: &Request) -> Option<Copy> {
        let mut request = Lent::again(parent, Side::left_behind(parent))?;
        request.leave_family();
        Some(Copy(request))
    }
}

impl Deref for Copy {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.0
    }
}

/// Marks a copy of a client's request, and copies of that.
pub(super) struct RepeatsMain;

/// Copies the note that a copy was begun with from its notes into those of another copy.
struct Inherited(fn(&Notes, &mut Notes));

fn copy_note<N: Clone + 'static>(from: &Notes, into: &mut Notes) {
    if let Some(note) = from.get::<N>() {
        into.put(note.clone());
    }
}

/// Request of a subrequest. Its worker takes it back however the subrequest ends.
struct Lent {
    request: Option<Box<Request>>,
    /// It counts among those that are under way for its client's request.
    is_counted: bool,
}

impl Lent {
    fn new(parent: &Request, target: Target, exchange: Rc<dyn Exchange>) -> Option<Lent> {
        let name = bstr::BStr::new(&target.uri);
        if parent.is_nested_too_deep() {
            parent.log(Level::Error, format_args!("subrequests cycle while processing \"{name}\""));
            return None;
        }
        let under_way = parent.shared.subrequests.get();
        if under_way >= UNDER_WAY_MAX {
            let message = format_args!("request reference counter overflow while processing \"{name}\"");
            parent.log(Level::Crit, message);
            return None;
        }
        parent.shared.subrequests.set(under_way + 1);
        Some(Lent { request: Some(parent.subrequest(target, exchange)), is_counted: true })
    }

    /// The same request once more, where it stands: in the content phase of its location.
    fn again(parent: &Request, exchange: Rc<dyn Exchange>) -> Option<Lent> {
        let target = Target {
            uri: parent.uri.clone(),
            args: parent.args.clone(),
            keeps_method: true,
            shares_body: true,
            fallback: None,
        };
        let mut request = Lent::new(parent, target, exchange)?;
        request.scope = parent.scope;
        request.routing.phase = Phase::Content;
        (request.routing.origin, request.routing.fit) = (parent.routing.origin, parent.routing.fit);
        request.evaluation = parent.evaluation.copy_captures();
        Some(request)
    }

    /// Notes what it is a copy of.
    fn inherit_notes(&mut self, parent: &Request) {
        if parent.is_main() || parent.repeats_main() {
            self.notes.put(RepeatsMain);
        }
        if let Some(Inherited(copy)) = parent.notes.get::<Inherited>() {
            copy(&parent.notes, &mut self.notes);
            self.notes.put(Inherited(*copy));
        }
    }

    /// Detaches it from the client's request. Shared values stay as they are.
    fn leave_family(&mut self) {
        self.is_counted = false;
        self.routing.kind = self.routing.kind.in_background();
        let count = &self.shared.subrequests;
        count.set(count.get() - 1);
    }

    /// Ends a subrequest whose body has been taken.
    fn end(mut self) {
        self.log_if_wanted();
    }

    /// `log_subrequest`
    fn log_if_wanted(&mut self) {
        if *self.scope().core.log_subrequest.get() {
            advance::log(self);
        }
    }
}

impl Deref for Lent {
    type Target = Request;

    fn deref(&self) -> &Request {
        self.request.as_deref().expect("there until it is dropped")
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Request {
        self.request.as_deref_mut().expect("there until it is dropped")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        // The state of the request is unknown after a panic.
        if std::thread::panicking() {
            return;
        }
        if self.is_counted {
            let count = &request.shared.subrequests;
            count.set(count.get() - 1);
        }
        counting::end_part(&request);
        let worker = Rc::clone(request.worker());
        worker.give_back(request);
    }
}

/// Exchange of a subrequest: it knows the client, but neither reads from it nor sends to it.
enum Side {
    /// Beside the client's exchange, which is there longer.
    Of(Rc<dyn Exchange>),
    /// Values known of the client, which may have left.
    LeftBehind { connection: Box<ConnectionInfo>, local_address: Option<SocketAddress>, scheme: Scheme, over: Over },
}

/// Counts of a client's exchange that is over; zero while it may go on.
#[derive(Clone, Copy, Default)]
struct Over {
    sent: Sent,
    received: u64,
    is_complete: bool,
}

/// Exchange of a request without a client.
pub(crate) fn no_client() -> Rc<dyn Exchange> {
    let nowhere = Rc::new(ListenAddress::Unix(PathBuf::new()));
    let connection = ConnectionInfo::new(0, SocketAddress::Unix(None), nowhere, gale_runtime::now());
    let connection = Box::new(connection);
    Rc::new(Side::LeftBehind { connection, local_address: None, scheme: Scheme::Http, over: Over::default() })
}

impl Side {
    fn of(parent: &Request) -> Rc<dyn Exchange> {
        if parent.is_main() { Rc::new(Side::Of(parent.exchange_handle())) } else { parent.exchange_handle() }
    }

    fn left_behind(parent: &Request) -> Rc<dyn Exchange> {
        Side::leave(parent, Over::default())
    }

    /// Exchange of a background request that follows a request that is over.
    fn after(request: &Request) -> Rc<dyn Exchange> {
        let exchange = request.exchange();
        let over = Over { sent: exchange.sent(), received: exchange.received(), is_complete: exchange.is_complete() };
        Side::leave(request, over)
    }

    fn leave(parent: &Request, over: Over) -> Rc<dyn Exchange> {
        let exchange = parent.exchange();
        let local_address = exchange.local_address().cloned();
        let scheme = exchange.scheme();
        Rc::new(Side::LeftBehind { connection: Box::new(exchange.connection().copy()), local_address, scheme, over })
    }

    fn over(&self) -> Over {
        match self {
            Side::Of(_) => Over::default(),
            Side::LeftBehind { over, .. } => *over,
        }
    }

    fn client(&self) -> Option<&Rc<dyn Exchange>> {
        match self {
            Side::Of(client) => Some(client),
            Side::LeftBehind { .. } => None,
        }
    }
}

impl Exchange for Side {
    fn connection(&self) -> &ConnectionInfo {
        match self {
            Side::Of(client) => client.connection(),
            Side::LeftBehind { connection, .. } => connection,
        }
    }

    fn local_address(&self) -> Option<&SocketAddress> {
        match self {
            Side::Of(client) => client.local_address(),
            Side::LeftBehind { local_address, .. } => local_address.as_ref(),
        }
    }

    fn scheme(&self) -> Scheme {
        match self {
            Side::Of(client) => client.scheme(),
            Side::LeftBehind { scheme, .. } => *scheme,
        }
    }

    fn tls(&self) -> Option<&TlsStream> {
        self.client().and_then(|client| client.tls())
    }

    /// Interim responses are about the client's request.
    fn interim(&self, _status: u16, _fields: &[(Bytes, Bytes)]) {}

    /// The response to a subrequest is a value: it is a part of its parent's, or dropped.
    fn writer(self: Rc<Self>, _permit: Permit) -> Rc<dyn ResponseWriter> {
        unreachable!("the response to a subrequest is a value, which is never sent")
    }

    /// The client's body is its own request's; what that has stored is shared.
    fn poll_body(
        &self,
        _context: &mut Context<'_>,
        _limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>> {
        Poll::Ready(Ok(None))
    }

    fn body_is_read(&self) -> bool {
        true
    }

    fn received(&self) -> u64 {
        self.over().received
    }

    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        match self.client() {
            Some(client) => client.poll_gone(context),
            None => Poll::Pending,
        }
    }

    fn is_broken(&self) -> bool {
        self.client().is_some_and(|client| client.is_broken())
    }

    fn is_complete(&self) -> bool {
        self.over().is_complete
    }

    fn sent(&self) -> Sent {
        self.client().map_or_else(|| self.over().sent, |client| client.sent())
    }
}
