//! The content handler of proxying modules.

use std::any::Any;
use std::marker::PhantomData;
use std::time::Duration;

use gale_engine::configuration::Reach;
use gale_http::request::Request;
use gale_http::request::configuration::Scope;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture, Phase};
use gale_http_upstream::caching::{CacheNote, Consulted, Serving, consult, try_hit};
use gale_http_upstream::settings::{HasGroup, StoreSettings, UpstreamOf, UpstreamProtocol, UpstreamSettings};
use gale_http_upstream::{HeadRewriter, KeepHead};
use gale_upstream::LookUpError;

/// Settings of a module that passes requests on.
pub(crate) trait PassesRequests: Sized + 'static {
    /// Protocol to the servers.
    type Protocol: UpstreamProtocol;

    /// Returns `true` if requests are passed on in this scope.
    fn has_target(&self) -> bool;

    /// Returns the upstream settings of the scope.
    fn upstream(&self) -> &UpstreamOf<Self::Protocol>;

    /// Returns the rewriter of cached heads.
    fn rewriter(&self) -> &dyn HeadRewriter {
        &KeepHead
    }

    /// Notes in the request everything that the cache key's variables use. Returns `false` if that has to wait.
    fn prepare(&self, _: &mut Request) -> bool {
        true
    }

    /// Passes a request on. The error is the status of the response.
    fn pass<'a>(&'a self, request: &'a mut Request) -> impl Future<Output = Result<Flow, u16>> + 'a;
}

/// A module's part in the content phase, for settings of type `C`.
pub(crate) struct PassRequests<C>(PhantomData<fn(C)>);

impl<C: PassesRequests> PassRequests<C> {
    /// The handlers of the module.
    pub const HANDLERS: &'static [(Phase, &'static dyn Handler)] = &[(Phase::Content, &PassRequests::<C>(PhantomData))];
}

/// Notes what `…_store` of a scope reaches.
pub(crate) fn note_store<C: PassesRequests>(conf: &dyn Any, scope: &Scope, reach: &mut Reach)
where
    C::Protocol: HasGroup<StoreSettings>,
{
    if let Some(conf) = conf.downcast_ref::<C>() {
        let directive = format!("{}_store", C::Protocol::PREFIX);
        conf.upstream().store.note_reach(scope, &directive, reach);
    }
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
    /// It is read completely first and not passed on.
    Kept,
}

/// Returns the source of this request's body. `streams_chunked`: the protocol can send a body of unknown length.
pub(crate) fn body_source(request: &Request, settings: &UpstreamSettings, streams_chunked: bool) -> BodySource {
    let declared = request.declared_body_length();
    let is_stored = request.body.is_some();
    // A body that another location has passed on is gone.
    if request.body_is_gone() || declared == Some(0) && !is_stored {
        return BodySource::None;
    }
    if !*settings.request_body.pass_request_body.get() {
        // As in nginx, its variables have values nevertheless.
        let variables = &request.http().variables;
        let is_mentioned = ["request_body", "request_body_file"].into_iter().any(|name| variables.mentions(name));
        return if is_mentioned && request.is_main() { BodySource::Kept } else { BodySource::None };
    }
    // A request that may be repeated needs its body stored.
    let can_stream = !settings.cache.takes(request.method())
        && (declared.is_some() || streams_chunked)
        && !is_stored
        && request.is_main();
    if can_stream && !*settings.request_body.request_buffering.get() { BodySource::Client } else { BodySource::Stored }
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

impl<C: PassesRequests> Handler for PassRequests<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        conf_of::<C>(conf).has_target()
    }

    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision {
        let conf: &C = conf_of(conf);
        let settings = conf.upstream();
        if settings.cache.is_on()
            && conf.prepare(request)
            && let Some(flow) = try_hit(request, serving(settings, conf.rewriter()))
        {
            return Decision::Flow(flow);
        }
        Decision::MustWait
    }

    fn outlives_client(&self, request: &Request, conf: &dyn Any) -> bool {
        let settings = conf_of::<C>(conf).upstream();
        // As in nginx, since the response may be stored.
        *settings.request_body.ignore_client_abort.get()
            || settings.cache.takes(request.method())
            || settings.store.is_on()
    }

    fn redirects_to_slash(&self) -> bool {
        true
    }

    fn patience(&self) -> Duration {
        // As in nginx, a server does not work for a client that has left.
        Duration::ZERO
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        let conf: &C = conf_of(conf);
        Box::pin(async { conf.pass(request).await.unwrap_or_else(Flow::Respond) })
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
