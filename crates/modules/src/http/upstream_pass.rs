//! The handler of modules that pass requests on.

use std::any::Any;
use std::time::Duration;

use gale_http::request::Request;
use gale_http::request::phases::{Decision, Flow, Handler, LocalBoxFuture};
use gale_http::upstream::settings::UpstreamSettings;

/// A module's part in the content phase, for settings of type `C`.
pub(crate) struct PassRequests<C: 'static> {
    /// Whether requests are passed on in this scope.
    pub has_target: fn(&C) -> bool,
    /// What the scope says of that.
    pub settings: fn(&C) -> &UpstreamSettings,
    /// Passes a request on.
    pub pass: for<'a> fn(&'a mut Request, &'a C) -> LocalBoxFuture<'a, Flow>,
}

fn conf_of<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl<C: 'static> Handler for PassRequests<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.has_target)(conf_of(conf))
    }

    fn decide(&self, _: &mut Request, _: &dyn Any) -> Decision {
        Decision::MustWait
    }

    fn outlives_client(&self, conf: &dyn Any) -> bool {
        *(self.settings)(conf_of(conf)).ignore_client_abort.get()
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
