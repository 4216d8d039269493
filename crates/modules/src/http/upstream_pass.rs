//! The handler of modules that pass requests on.

use std::any::Any;
use std::time::Duration;

use gale_engine::upstream::LookUpError;
use gale_http::request::Request;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture};
use gale_http::upstream::HeadRewriter;
use gale_http::upstream::caching::{CacheNote, Consulted, Serving, consult, try_hit};
use gale_http::upstream::settings::UpstreamSettings;

/// A module's part in the content phase, for settings of type `C`.
pub(crate) struct PassRequests<C: 'static> {
    /// Whether requests are passed on in this scope.
    pub has_target: fn(&C) -> bool,
    /// What the scope says of that.
    pub settings: fn(&C) -> &UpstreamSettings,
    /// What becomes of heads that are in the cache.
    pub rewriter: fn(&C) -> &dyn HeadRewriter,
    /// Has the request know what the key of the cache may be made of; `false` if that has to be waited for.
    pub prepare: fn(&mut Request, &C) -> bool,
    /// Passes a request on.
    pub pass: for<'a> fn(&'a mut Request, &'a C) -> LocalBoxFuture<'a, Flow>,
}

/// Where the body comes from that a server gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BodySource {
    /// There is none, or it is not passed on.
    None,
    /// The client, while it sends.
    Client,
    /// Memory or a file: it is read to its end before.
    Stored,
}

/// Where the body of this request comes from. `streams_chunked`: a body can be sent whose length is not known.
pub(crate) fn body_source(request: &Request, settings: &UpstreamSettings, streams_chunked: bool) -> BodySource {
    let declared = request.declared_body_length();
    let is_stored = request.body.is_some();
    // What is left of a body that another location has passed on is no body.
    if !*settings.pass_request_body.get() || request.body_is_gone() || declared == Some(0) && !is_stored {
        return BodySource::None;
    }
    // What may be asked for once more is read before.
    let can_stream = !settings.cache.takes(request.method())
        && (declared.is_some() || streams_chunked)
        && !is_stored
        && request.is_main();
    if can_stream && !*settings.request_buffering.get() { BodySource::Client } else { BodySource::Stored }
}

/// What a location does to heads out of its cache.
pub(crate) fn serving<'s>(settings: &'s UpstreamSettings, rewriter: &'s dyn HeadRewriter) -> Serving<'s> {
    Serving { settings, rewriter, converts_head: false }
}

/// Asks the cache, if the location has one. Requests of others do not pay for a future that has room for that.
pub(crate) async fn consult_cache(request: &mut Request, serving: Serving<'_>) -> Consulted {
    if serving.settings.cache.is_on() {
        return Box::pin(consult(request, serving)).await;
    }
    // What another location has noted for its own request is none of this one's.
    if request.notes.has::<CacheNote>() {
        request.notes.put(CacheNote::default());
    }
    Consulted::Ask(None)
}

fn conf_of<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl<C: 'static> Handler for PassRequests<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.has_target)(conf_of(conf))
    }

    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision {
        let conf = conf_of(conf);
        let settings = (self.settings)(conf);
        if settings.cache.is_on()
            && (self.prepare)(request, conf)
            && let Some(flow) = try_hit(request, serving(settings, (self.rewriter)(conf)))
        {
            return Decision::Flow(flow);
        }
        Decision::MustWait
    }

    fn outlives_client(&self, request: &Request, conf: &dyn Any) -> bool {
        let settings = (self.settings)(conf_of(conf));
        // As nginx: what comes may be stored.
        *settings.ignore_client_abort.get() || settings.cache.takes(request.method()) || settings.store.is_on()
    }

    fn redirects_to_slash(&self) -> bool {
        true
    }

    fn patience(&self) -> Duration {
        // As nginx: a server is not to work for a client that has left.
        Duration::ZERO
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        (self.pass)(request, conf_of(conf))
    }
}

/// The status that answers a request whose servers are not found.
pub(crate) fn look_up_status(error: LookUpError) -> u16 {
    match error {
        LookUpError::NoAddress => 500,
        LookUpError::NotResolved => 502,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    /// The future of an asynchronous function, which need not be called for that, is no larger than what the allocator
    /// gives out quickly: more takes seven times as long.
    pub(crate) fn assert_small<A, F: Future>(_function: impl FnOnce(A) -> F) {
        let bytes = size_of::<F>();
        assert!(bytes <= 1024, "the future has {bytes} bytes");
    }
}
