//! The content handler of proxying modules.

use std::any::Any;
use std::time::Duration;

use gale_http::request::Request;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture};
use gale_http::upstream::HeadRewriter;
use gale_http::upstream::caching::{CacheNote, Consulted, Serving, consult, try_hit};
use gale_http::upstream::settings::UpstreamSettings;
use gale_upstream::LookUpError;

/// A module's part in the content phase, for settings of type `C`.
pub(crate) struct PassRequests<C: 'static> {
    /// Returns `true` if requests are passed on in this scope.
    pub has_target: fn(&C) -> bool,
    /// Returns the upstream settings of the scope.
    pub settings: fn(&C) -> &UpstreamSettings,
    /// Returns the rewriter of cached heads.
    pub rewriter: fn(&C) -> &dyn HeadRewriter,
    /// Notes in the request everything that the cache key's variables use. Returns `false` if that has to wait.
    pub prepare: fn(&mut Request, &C) -> bool,
    /// Passes a request on.
    pub pass: for<'a> fn(&'a mut Request, &'a C) -> LocalBoxFuture<'a, Flow>,
}

/// Source of the body that a server gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BodySource {
    /// There is none, or it is not passed on.
    None,
    /// The client, while it sends.
    Client,
    /// Memory or a file: it is read completely first.
    Stored,
}

/// Returns the source of this request's body. `streams_chunked`: the protocol can send a body of unknown length.
pub(crate) fn body_source(request: &Request, settings: &UpstreamSettings, streams_chunked: bool) -> BodySource {
    let declared = request.declared_body_length();
    let is_stored = request.body.is_some();
    // A body that another location has passed on is gone.
    if !*settings.pass_request_body.get() || request.body_is_gone() || declared == Some(0) && !is_stored {
        return BodySource::None;
    }
    // A request that may be repeated needs its body stored.
    let can_stream = !settings.cache.takes(request.method())
        && (declared.is_some() || streams_chunked)
        && !is_stored
        && request.is_main();
    if can_stream && !*settings.request_buffering.get() { BodySource::Client } else { BodySource::Stored }
}

/// Returns how a location serves heads from its cache.
pub(crate) fn serving<'s>(settings: &'s UpstreamSettings, rewriter: &'s dyn HeadRewriter) -> Serving<'s> {
    Serving { settings, rewriter, converts_head: false }
}

/// Looks the request up in the cache, if the location has one. Other requests do not pay for the larger future.
pub(crate) async fn consult_cache(request: &mut Request, serving: Serving<'_>) -> Consulted {
    if serving.settings.cache.is_on() {
        return Box::pin(consult(request, serving)).await;
    }
    // Notes of another location's lookup do not apply here.
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
        // As in nginx, since the response may be stored.
        *settings.ignore_client_abort.get() || settings.cache.takes(request.method()) || settings.store.is_on()
    }

    fn redirects_to_slash(&self) -> bool {
        true
    }

    fn patience(&self) -> Duration {
        // As in nginx, a server does not work for a client that has left.
        Duration::ZERO
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        (self.pass)(request, conf_of(conf))
    }
}

/// Returns the status for a failed lookup of servers.
pub(crate) fn look_up_status(error: LookUpError) -> u16 {
    match error {
        LookUpError::NoAddress => 500,
        LookUpError::NotResolved => 502,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    /// Asserts that the future of an asynchronous function, which is not called, is no larger than the allocator's fast
    /// sizes; a larger one takes seven times as long to allocate.
    pub(crate) fn assert_small<A, F: Future>(_function: impl FnOnce(A) -> F) {
        let bytes = size_of::<F>();
        assert!(bytes <= 1024, "the future has {bytes} bytes");
    }
}
