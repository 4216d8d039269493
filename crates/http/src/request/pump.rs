//! Sends the body of a response: asks it for items as the client takes them.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use gale_base::log_level::Level;

use crate::request::Request;
use crate::request::body::{Body, BodyItem};
use crate::request::limit_rate::{self, Rate};

/// Sends a body that comes in several items, waiting for the client between them.
pub async fn send_rest(request: &Request, mut body: Body) {
    let exchange = request.exchange();
    let mut rate = Rate::of(request).map(Box::new);
    loop {
        let next = poll_fn(|context| match body.poll_next(request, context) {
            Poll::Ready(item) => Poll::Ready(Ok(item)),
            // What is queued, the head at first, need not wait for what comes.
            Poll::Pending => match exchange.poll_sent(context) {
                Poll::Ready(Err(gone)) => Poll::Ready(Err(gone)),
                Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
            },
        });
        let Ok(item) = next.await else { return };
        match item {
            Some(Ok(item)) => match &mut rate {
                None => exchange.push(item),
                Some(rate) => {
                    if Box::pin(limit_rate::push(&*exchange, rate, item)).await.is_err() {
                        return;
                    }
                }
            },
            Some(Err(error)) => {
                let Err(error) = exchange.take_back(error) else { return };
                request.log(Level::Error, format_args!("the response broke off: {error}"));
                // What came before is the client's, also if it was still being gathered. Without the client nothing is.
                let _ = poll_fn(|context| exchange.poll_sent(context)).await;
                return exchange.abort();
            }
            None => return end_response(request),
        }
        // The last item and the end leave together.
        if body.is_at_end() {
            return end_response(request);
        }
        if exchange.may_gather() {
            continue;
        }
        if poll_fn(|context| exchange.poll_sent(context)).await.is_err() {
            return;
        }
    }
}

fn end_response(request: &Request) {
    let exchange = request.exchange();
    if request.response.has_trailers {
        let configuration = Rc::clone(request.configuration());
        let scope = configuration.http().scope(request.scope);
        for bound in &scope.filters {
            bound.filter.add_trailers(request, scope.conf(bound.module));
        }
        exchange.push(BodyItem::Trailers(request.trailers().clone()));
    }
    exchange.end();
}
