//! Sends the body of a response, item by item, as fast as the client accepts it.
//!
//! Each poll first checks if the client's queue has room. If it has, the body is polled for its next item; while the
//! body is pending, the client is watched, and if it leaves, the body is dropped, whatever it waits for. If the queue
//! has no room, the body may read ahead, and the socket reports when the client leaves.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use gale_base::log_level::Level;
use gale_runtime::Timer;

use crate::request::body::{Body, BodyError, BodyItem};
use crate::request::departure::Departure;
use crate::request::exchange::{Gone, LOW_WATER_BYTES, ResponseBody};
use crate::request::limit_rate::{Rate, split};
use crate::request::slow::{self, Cause, Wait};
use crate::request::{Request, Shared};

/// Sends a body to its end, or until the client leaves.
pub async fn send_rest(request: &Request, response: ResponseBody, body: Body) {
    let rate = Rate::of(request).map(Paced::new).map(Box::new);
    let notes = slow::notes_of(request);
    let mut pump = Pump { response, body, rate, departure: Departure::default(), broken: None, notes, wait: None };
    // An error means that nothing more can be sent. The body, with all that it waits for, is dropped with the pump.
    let _ = poll_fn(|context| pump.poll(request, context)).await;
}

struct Pump {
    response: ResponseBody,
    body: Body,
    rate: Option<Box<Paced>>,
    departure: Departure,
    /// Error that ended the body. The items before it are still sent.
    broken: Option<BodyError>,
    /// Records waits for `slow_request_log`, if that is in force.
    notes: Option<Rc<Shared>>,
    /// Current wait, while nothing is queued.
    wait: Option<Wait>,
}

impl Pump {
    fn poll(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let response = &self.response;
        self.wait = None;
        loop {
            if let Some(error) = &self.broken {
                // Items before the error are sent, even if `postpone_output` still gathers them. The result does not
                // matter: the response breaks off in any case.
                let _ = ready!(response.poll_sent(context));
                request.log(Level::Error, format_args!("the response ended prematurely: {error}"));
                response.abort();
                return Poll::Ready(Err(Gone::Aborted));
            }
            match response.poll_ready(LOW_WATER_BYTES, context) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => {
                    self.body.poll_ahead(request, context);
                    return Poll::Pending;
                }
            }
            let item = match &mut self.rate {
                None => slow::noting_pools(self.notes.as_ref(), || self.body.poll_next(request, context)),
                Some(rate) => match rate.poll_next(response, &mut self.body, request, context) {
                    Poll::Ready(Err(gone)) => return Poll::Ready(Err(gone)),
                    Poll::Ready(Ok(item)) => Poll::Ready(item),
                    Poll::Pending => {
                        // A client slowed down by `limit_rate` does not slow down the source of the body.
                        self.body.poll_ahead(request, context);
                        Poll::Pending
                    }
                },
            };
            match item {
                Poll::Ready(Some(Ok(item))) => {
                    self.departure.begin_again();
                    response.push(item);
                    // The last item and the end are sent together.
                    if self.is_at_end() {
                        end(request, response);
                        return Poll::Ready(Ok(()));
                    }
                }
                // The client has left, for which a subrequest's handler was cancelled: the error is a consequence.
                Poll::Ready(Some(Err(_))) if request.exchange().is_broken() => return self.client_has_left(request),
                Poll::Ready(Some(Err(error))) => match response.take_back(error) {
                    Ok(()) => return Poll::Ready(Err(Gone::Aborted)),
                    Err(error) => self.broken = Some(error),
                },
                Poll::Ready(None) => {
                    end(request, response);
                    return Poll::Ready(Ok(()));
                }
                Poll::Pending => {
                    // Queued bytes, such as the head, are sent without waiting for the next item.
                    if let Poll::Ready(sent) = response.poll_sent(context) {
                        sent?;
                        self.wait = self.notes.is_some().then(|| Wait::begin(request, self.cause()));
                    }
                    // A half-closed client is waited for no longer than one that accepts nothing: the disk behind the
                    // body may never answer.
                    let patience = self.body.patience(*request.scope().core.send_timeout.get());
                    ready!(self.departure.poll(request.exchange(), patience, context));
                    return self.client_has_left(request);
                }
            }
        }
    }

    /// Cause of the body's wait.
    fn cause(&self) -> Cause {
        if self.rate.as_ref().is_some_and(|rate| rate.is_pausing) { Cause::Rate } else { Cause::Source }
    }

    fn client_has_left(&self, request: &Request) -> Poll<Result<(), Gone>> {
        request.log(Level::Info, format_args!("client prematurely closed connection"));
        self.response.abort();
        Poll::Ready(Err(Gone::ByPeer))
    }

    fn is_at_end(&self) -> bool {
        self.body.is_at_end() && self.rate.as_ref().is_none_or(|rate| rate.item.is_none())
    }
}

/// Ends the body, after its trailers if it has any.
fn end(request: &Request, response: &ResponseBody) {
    if request.response.has_trailers {
        let configuration = Rc::clone(request.configuration());
        let scope = configuration.http().scope(request.scope);
        for bound in &scope.filters {
            bound.filter.add_trailers(request, scope.conf(bound.module));
        }
        response.push(BodyItem::Trailers(request.trailers().clone()));
    }
    response.end();
}

/// State of a body limited by `limit_rate`, which is sent in pieces with pauses between them.
struct Paced {
    rate: Rate,
    /// Unsent rest of the current item.
    item: Option<BodyItem>,
    /// Piece being sent: the number of bytes sent before it, and its length.
    piece: Option<(u64, u64)>,
    pause: Timer,
    is_pausing: bool,
}

impl Paced {
    fn new(rate: Rate) -> Paced {
        Paced { rate, item: None, piece: None, pause: Timer::new(), is_pausing: false }
    }

    /// Returns the next piece as soon as the rate allows it. By then all earlier pieces have been sent, since the rate
    /// counts sent bytes.
    fn poll_next(
        &mut self,
        response: &ResponseBody,
        body: &mut Body,
        request: &Request,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Result<BodyItem, BodyError>>, Gone>> {
        let exchange = request.exchange();
        self.is_pausing = false;
        if self.piece.is_some() {
            ready!(response.poll_sent(context))?;
            if let Some((before, length)) = self.piece.take() {
                self.rate.note(before, length, gale_runtime::now());
            }
        }
        if self.item.is_none() {
            match ready!(body.poll_next(request, context)) {
                Some(Ok(item)) if item.length() > 0 => self.item = Some(item),
                other => return Poll::Ready(Ok(other)),
            }
        }
        // Queued bytes, above all the head, count only once they are sent.
        ready!(response.poll_sent(context))?;
        let allowed = loop {
            match self.rate.allows(exchange.sent().bytes, gale_runtime::now()) {
                Ok(allowed) => break allowed,
                Err(until) => {
                    self.pause.set(until);
                    if self.pause.poll_expired(context).is_pending() {
                        // Here, as in nginx, a client that has half-closed its connection counts as one that has left.
                        self.is_pausing = true;
                        ready!(exchange.poll_gone(context));
                        response.abort();
                        return Poll::Ready(Err(Gone::ByPeer));
                    }
                }
            }
        };
        let item = self.item.as_mut().expect("there is one");
        let length = allowed.min(item.length());
        let piece = split(item, length);
        if item.length() == 0 {
            self.item = None;
        }
        self.piece = Some((exchange.sent().bytes, length));
        Poll::Ready(Ok(Some(Ok(piece))))
    }
}
