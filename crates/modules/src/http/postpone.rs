//! postpone: inserts the output of subrequests where earlier filters have put the subrequests.
//!
//! There are no directives. The filter has the same position as in nginx: the output of a subrequest passes the filters
//! of the subrequest's location up to here, and from here on those of the client's request, as part of its body.
//!
//! Output is in order, but the work is not. While a subrequest is sent, the body behind it is read ahead, and
//! subrequests in it are started. The read-ahead is bounded in items and in bytes.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_engine::module::Module;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::filters::Change;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_postpone_filter",
    parts: &[&HttpPart { filters: &[&Change { applies: |_: &()| true, run: put_in_place }], ..HttpPart::EMPTY }],
    ..Module::EMPTY
};

/// Maximum number of items read ahead behind a subrequest, and so of subrequests of one document that run concurrently.
const ITEMS_MAX: usize = 64;

/// Maximum number of bytes in memory that are read ahead behind a subrequest.
const BYTES_MAX: usize = 64 * 1024;

fn put_in_place(request: &mut Request, _: &(), body: &mut Body) {
    if std::mem::take(&mut request.outcome.makes_subrequests) {
        let source = std::mem::take(body);
        *body = Body::Stream(Box::new(Postponed { source: Some(source), waiting: VecDeque::new(), waiting_bytes: 0 }));
    }
}

struct Postponed {
    /// Body from the earlier filters; `None` after its end.
    source: Option<Body>,
    /// Items read ahead, in order. An error is the last one.
    waiting: VecDeque<Result<BodyItem, BodyError>>,
    waiting_bytes: usize,
}

impl BodyStream for Postponed {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        loop {
            if self.waiting.is_empty() {
                let Some(source) = &mut self.source else { return Poll::Ready(None) };
                let item = ready!(source.poll_next(request, context));
                self.take(item, context);
                continue;
            }
            self.look_ahead(request, context);
            let Some(Ok(BodyItem::Subrequest(first))) = self.waiting.front_mut() else {
                return Poll::Ready(self.give());
            };
            match first.poll_next(context) {
                Poll::Ready(Some(item)) => return Poll::Ready(Some(item)),
                Poll::Ready(None) => drop(self.waiting.pop_front()),
                Poll::Pending => {
                    self.run_others(context);
                    return Poll::Pending;
                }
            }
        }
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        if let Some(source) = &mut self.source {
            source.poll_ahead(request, context);
        }
    }

    fn patience(&self, default: Duration) -> Duration {
        self.source.as_ref().map_or(default, |source| source.patience(default))
    }

    fn is_at_end(&self) -> bool {
        self.waiting.is_empty() && self.source.as_ref().is_none_or(Body::is_at_end)
    }
}

impl Postponed {
    /// Reads ahead behind a subrequest, as far as data is available and there is room.
    fn look_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        while matches!(self.waiting.front(), Some(Ok(BodyItem::Subrequest(_))))
            && self.waiting.len() < ITEMS_MAX
            && self.waiting_bytes < BYTES_MAX
            && let Some(source) = &mut self.source
            && let Poll::Ready(item) = source.poll_next(request, context)
        {
            self.take(item, context);
        }
    }

    fn take(&mut self, item: Option<Result<BodyItem, BodyError>>, context: &mut Context<'_>) {
        if !matches!(item, Some(Ok(_))) {
            self.source = None;
        }
        let Some(mut item) = item else { return };
        match &mut item {
            Ok(BodyItem::Subrequest(subrequest)) => subrequest.poll_ahead(context),
            Ok(item) => self.waiting_bytes += bytes_in_memory(item),
            Err(_) => {}
        }
        self.waiting.push_back(item);
    }

    fn give(&mut self) -> Option<Result<BodyItem, BodyError>> {
        let item = self.waiting.pop_front()?;
        if let Ok(item) = &item {
            self.waiting_bytes -= bytes_in_memory(item);
        }
        Some(item)
    }

    /// Lets the other subrequests run while the first one waits.
    fn run_others(&mut self, context: &mut Context<'_>) {
        for item in self.waiting.iter_mut().skip(1) {
            if let Ok(BodyItem::Subrequest(subrequest)) = item {
                subrequest.poll_ahead(context);
            }
        }
    }
}

fn bytes_in_memory(item: &BodyItem) -> usize {
    match item {
        BodyItem::Bytes(bytes) => bytes.len(),
        BodyItem::File(_) | BodyItem::Flush | BodyItem::Trailers(_) | BodyItem::Subrequest(_) => 0,
    }
}
