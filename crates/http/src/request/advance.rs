//! Way of a request through the phases: the next handler decides, and its decision leads on.
//!
//! [`advance`] goes as far as it can without waiting, so that a request that never waits costs no future. [`finish`]
//! waits. `outcome` acts on decisions; `respond` and the pump send the response.

use std::any::Any;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::configuration::ScopeId;
use gale_runtime::Timer;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::configuration::{BoundHandler, HttpConfiguration};
use crate::request::counting;
use crate::request::departure::Departure;
use crate::request::files;
use crate::request::outcome::{conclude, deny, perform, spend_redirect};
use crate::request::phases::{CLIENT_LEFT, Decision, Flow, Handler, Phase};
use crate::request::post_action;
use crate::request::request_body;
use crate::request::routing::UriFit;
use crate::request::slow::{self, Cause, Wait};
use gale_engine::variables::subject::Subject;

/// State of a request that cannot go on by itself.
#[derive(Debug)]
pub enum Step {
    /// The body is ready to be sent, and the head is in the request. Both have passed the filters.
    Answer(Body),
    /// A handler has to wait.
    Wait(Waiting),
    /// The request waits for this time.
    Delay(Duration, AfterDelay),
    /// The connection is closed without an answer (444).
    Close,
}

/// Continuation of a request after a delay.
#[derive(Clone, Copy, Debug)]
pub enum AfterDelay {
    /// The handler that asked for the delay is asked again.
    AskAgain,
    /// The request ends with this status.
    Respond(u16),
}

/// Handler that has to wait, with the scope that it was asked in. Its settings are those of that scope, although the
/// handler may bring the request into another one.
pub struct Waiting(BoundHandler, ScopeId);

impl std::fmt::Debug for Waiting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Waiting")
    }
}

/// Runs a request from its current phase as far as it goes without waiting.
pub fn advance(request: &mut Request) -> Step {
    let configuration = Rc::clone(request.configuration());
    let http = configuration.http();
    loop {
        let scope = request.scope;
        let handlers = &http.scope(scope).handlers[request.routing.phase as usize];
        let step = match handlers.get(request.routing.next_handler) {
            Some(bound) => {
                request.routing.next_handler += 1;
                match bound.handler.decide(request, http.conf(bound, scope)) {
                    // Most handlers have no objection.
                    Decision::Flow(Flow::Next) => continue,
                    Decision::Flow(flow) => perform(request, flow),
                    Decision::MustWait => return Step::Wait(Waiting(*bound, scope)),
                }
            }
            None => match end_phase(http, request) {
                None => continue,
                Some(End::Flow(flow)) => conclude(request, flow),
                Some(End::Denied(status)) => deny(request, status),
            },
        };
        if let Some(step) = step {
            return step;
        }
    }
}

/// Goes on from a step that has to wait, until there is a response.
pub async fn finish(request: &mut Request, mut step: Step) -> Option<Body> {
    loop {
        let performed = match step {
            Step::Answer(body) => return Some(body),
            Step::Close => return None,
            Step::Delay(time, afterwards) => match (client_stays(request, time).await, afterwards) {
                (false, _) => conclude(request, Flow::Respond(CLIENT_LEFT)),
                (true, AfterDelay::Respond(status)) => conclude(request, Flow::Respond(status)),
                (true, AfterDelay::AskAgain) => {
                    request.routing.next_handler -= 1;
                    None
                }
            },
            Step::Wait(Waiting(bound, scope)) => {
                let configuration = Rc::clone(request.configuration());
                let conf = configuration.http().conf(&bound, scope);
                let flow = wait(bound.handler, request, conf).await;
                perform(request, flow)
            }
        };
        step = match performed {
            Some(step) => step,
            None => advance(request),
        };
    }
}

/// Waits for a handler. If the client leaves, the handler is dropped, and its task in a pool is cancelled unless it has
/// begun.
async fn wait(handler: &dyn Handler, request: &mut Request, conf: &dyn Any) -> Flow {
    let exchange = request.exchange_handle();
    let stays = handler.outlives_client(request, conf);
    // A new connection may have waited in the kernel longer than its client. Events tell that of later requests, and
    // the end of the body that of one with a body.
    let is_only_head = request.arrival.number_on_connection == 1 && exchange.body_is_read();
    if is_only_head && !stays && handler.patience() == Duration::ZERO && exchange.has_left() {
        return Flow::Respond(CLIENT_LEFT);
    }
    let notes = slow::notes_of(request);
    let mut departure = Departure::default();
    let mut waiting = handler.wait(request, conf);
    let flow = poll_fn(|context| match slow::noting_pools(notes.as_ref(), || waiting.as_mut().poll(context)) {
        Poll::Pending if !stays => {
            departure.poll(&*exchange, handler.patience(), context).map(|()| Flow::Respond(CLIENT_LEFT))
        }
        polled => polled,
    })
    .await;
    slow::noting_pools(notes.as_ref(), || drop(waiting));
    flow
}

/// Waits for a time; returns `false` if the client leaves before.
async fn client_stays(request: &Request, time: Duration) -> bool {
    let _wait = Wait::begin(request, Cause::Delays);
    let exchange = request.exchange();
    let mut timer = Timer::after(time);
    let stays = poll_fn(|context| match timer.poll_expired(context) {
        Poll::Ready(()) => Poll::Ready(true),
        Poll::Pending => exchange.poll_gone(context).map(|()| false),
    })
    .await;
    if !stays {
        request.log(Level::Info, format_args!("client prematurely closed connection"));
    }
    stays
}

/// Ends a request with a status before the first phase, since its head is invalid.
pub fn fail(request: &mut Request, status: u16) -> Step {
    conclude(request, Flow::Respond(status)).unwrap_or_else(|| advance(request))
}

/// End of the phases.
enum End {
    Flow(Flow),
    /// The access phase refuses the client with this status.
    Denied(u16),
}

/// Goes on to the next phase after the last handler of this one. Steps between phases belong to no module: a location
/// is found, and searched again for a changed URI.
fn end_phase(http: &HttpConfiguration, request: &mut Request) -> Option<End> {
    request.routing.next_handler = 0;
    request.routing.phase = match request.routing.phase {
        Phase::PostRead => Phase::ServerRewrite,
        Phase::ServerRewrite => match find_location(http, request) {
            Ok(()) => Phase::Rewrite,
            Err(status) => return Some(End::Flow(Flow::Respond(status))),
        },
        Phase::Rewrite if request.routing.fit == UriFit::Rewritten => {
            if !spend_redirect(request) {
                request.log(
                    Level::Error,
                    format_args!(
                        "rewrite or internal redirection cycle while processing \"{}\"",
                        bstr::BStr::new(&request.uri)
                    ),
                );
                return Some(End::Flow(Flow::Respond(500)));
            }
            request.scope = http.server(request.server).scope;
            match find_location(http, request) {
                Ok(()) => Phase::Rewrite,
                Err(status) => return Some(End::Flow(Flow::Respond(status))),
            }
        }
        Phase::Rewrite => Phase::PreAccess,
        // The access phase has decided about the client's own request.
        Phase::PreAccess if !request.is_main() => Phase::PreContent,
        Phase::PreAccess => Phase::Access,
        Phase::Access => match request.outcome.refusal.take() {
            Some(status) => return Some(End::Denied(status)),
            None => Phase::PreContent,
        },
        Phase::PreContent => Phase::Content,
        Phase::Content | Phase::Log => return Some(End::Flow(no_content(request))),
    };
    None
}

/// Returns the response if no module has one.
fn no_content(request: &Request) -> Flow {
    if request.uri.last() == Some(&b'/') {
        let mut path = Vec::new();
        if files::find_path(request, &mut path).is_ok() {
            request.log(Level::Error, format_args!("directory index of \"{}\" is forbidden", bstr::BStr::new(&path)));
        }
        return Flow::Respond(403);
    }
    request.log(Level::Error, format_args!("no handler found"));
    Flow::Respond(404)
}

/// Puts the request into the location for its URI.
fn find_location(http: &HttpConfiguration, request: &mut Request) -> Result<(), u16> {
    request.routing.fit = UriFit::Found;
    let server = http.server(request.server);
    if http.redirects_to_slash
        && !request.uri.ends_with(b"/")
        && let Some(scope) = server.locations.find_slashed(&request.uri)
        && http.scope(scope).redirects_to_slash
    {
        request.scope = scope;
        // A location that refuses the client does not show that it exists.
        let is_refused = *http.scope(scope).core.internal.get() && !request.is_internal();
        return Err(if is_refused { 404 } else { request.redirect_to_slash() });
    }
    let found = server.locations.find(&request.uri).map_err(|error| {
        request.log(Level::Alert, format_args!("{}", error.0));
        500_u16
    })?;
    if let Some(found) = found {
        request.scope = http.scope_for(found.scope, request.method());
        if let Some(matched) = found.matched {
            let subject = std::mem::take(&mut request.uri);
            request.take_match(matched, &subject);
            request.uri = subject;
        }
    }
    let core = &http.scope(request.scope).core;
    if *core.internal.get() && !request.is_internal() {
        return Err(404);
    }
    if request_body::is_refused(request) { Err(413) } else { Ok(()) }
}

/// Runs the handlers of the log phase at the end of a request, and begins `post_action`.
pub fn log(request: &mut Request) {
    let configuration = Rc::clone(request.configuration());
    let scope = configuration.http().scope(request.scope);
    counting::end(request, configuration.http());
    for bound in &scope.handlers[Phase::Log as usize] {
        // A handler of this phase neither waits nor decides.
        let _ = bound.handler.decide(request, scope.conf(bound.module));
    }
    for then in std::mem::take(&mut request.extras.when_logged) {
        then(request);
    }
    if scope.core.post_action.is_set() {
        post_action::begin(request);
    }
}
