//! The phases of a request, and the handlers that modules add to them.
//!
//! A handler decides and returns a [`Flow`]; only the pipeline performs effects. A handler that never waits is a plain
//! function; only a handler that waits pays for a boxed future.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::departure::HANDLER_PATIENCE;
use crate::request::tunnel::Tunnel;

/// Those of nginx's phases that modules take part in. The pipeline itself finds the location, between `ServerRewrite`
/// and `Rewrite`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The head has just been read.
    #[default]
    PostRead,
    /// Changes of the URI by the server's configuration.
    ServerRewrite,
    /// Changes of the URI by the location's configuration.
    Rewrite,
    /// Limits, such as `limit_req`.
    PreAccess,
    /// Access control.
    Access,
    /// Last changes before the content, for example `try_files`.
    PreContent,
    /// The response is produced.
    Content,
    /// After the response.
    Log,
}

/// Number of phases.
pub const PHASES: usize = 8;

impl Phase {
    /// All phases, in order.
    pub const ALL: [Phase; PHASES] = [
        Phase::PostRead,
        Phase::ServerRewrite,
        Phase::Rewrite,
        Phase::PreAccess,
        Phase::Access,
        Phase::PreContent,
        Phase::Content,
        Phase::Log,
    ];
}

/// Decision of a handler.
#[derive(Debug)]
pub enum Flow {
    /// No decision: the next handler runs.
    Next,
    /// The rest of this phase is skipped.
    PhaseDone,
    /// In the access phase: this module allows the request. With `satisfy any` no further module is asked.
    Allow,
    /// The request ends with this status, from which an error page or a redirect is made. 444 and [`CLIENT_LEFT`] close
    /// the connection without a response. In the access phase with `satisfy any`, 401, 403 and 407 are held back until
    /// the other modules have decided.
    Respond(u16),
    /// The response with this body. Its head is set in the request.
    Answer(Body),
    /// The connection becomes a tunnel to this other end. The response's head (101, or 2xx to CONNECT) is set in the
    /// request.
    Upgrade(Box<dyn Tunnel>),
    /// Internal redirect, as in nginx: the request starts again with another URI.
    Redirect {
        /// The new path, normalised.
        uri: Vec<u8>,
        /// The new arguments; `None` keeps those of the request.
        args: Option<Vec<u8>>,
    },
    /// The request continues in this named location.
    Named(Box<[u8]>),
    /// The same handler runs again after this time.
    Delay(Duration),
}

/// nginx's status of a request whose client has closed the connection before the response.
pub const CLIENT_LEFT: u16 = 499;

impl Flow {
    /// Returns an internal redirect to `target`, a path with optional arguments after a question mark. Without
    /// arguments in `target`, the new URI has none.
    pub fn redirect_to(mut target: Vec<u8>) -> Flow {
        let args = match memchr::memchr(b'?', &target) {
            Some(mark) => {
                let args = target.split_off(mark + 1);
                target.truncate(mark);
                args
            }
            None => Vec::new(),
        };
        Flow::Redirect { uri: target, args: Some(args) }
    }
}

/// A future that lives on one worker and borrows the request.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Result of [`Handler::decide`].
pub enum Decision {
    /// The handler has decided.
    Flow(Flow),
    /// The handler has to wait: call [`Handler::wait`].
    MustWait,
}

/// A module's part in one phase.
pub trait Handler: Sync {
    /// Returns `true` if the handler has anything to do with these settings. Called once, when the configuration is
    /// built.
    fn applies(&self, conf: &dyn Any) -> bool;
    /// Decides without waiting, if it can.
    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision;
    /// Returns `true` if the handler continues to wait after the client has left. Any other handler is cancelled then,
    /// and the request ends with [`CLIENT_LEFT`].
    fn outlives_client(&self, _request: &Request, _conf: &dyn Any) -> bool {
        false
    }
    /// Returns `true` if a location whose name ends with a slash redirects requests for the same URI without the slash.
    /// Handlers that pass requests to other servers do.
    /// (<https://nginx.org/en/docs/http/ngx_http_core_module.html#location>)
    fn redirects_to_slash(&self) -> bool {
        false
    }
    /// Maximum time to keep waiting for a client that has half-closed its connection. Over TCP a client that has left
    /// looks the same, so a handler that occupies the resources of others, such as upstream servers, should return a
    /// short time.
    fn patience(&self) -> Duration {
        HANDLER_PATIENCE
    }
    /// Decides, and waits for as long as it takes. Called only after [`Decision::MustWait`].
    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow>;
}

fn settings<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

/// A handler that never waits.
pub struct Decide<C: 'static> {
    /// See [`Handler::applies`].
    pub applies: fn(&C) -> bool,
    /// See [`Handler::decide`].
    pub run: fn(&mut Request, &C) -> Flow,
}

impl<C: 'static> Handler for Decide<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(settings(conf))
    }

    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision {
        Decision::Flow((self.run)(request, settings(conf)))
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        Box::pin(std::future::ready((self.run)(request, settings(conf))))
    }
}

/// A handler that may have to wait. `first` runs without a future, and returns `None` if `then` has to run.
pub struct Wait<C: 'static> {
    /// See [`Handler::applies`].
    pub applies: fn(&C) -> bool,
    /// The part that needs no waiting.
    pub first: fn(&mut Request, &C) -> Option<Flow>,
    /// The part that waits.
    pub then: for<'a> fn(&'a mut Request, &'a C) -> LocalBoxFuture<'a, Flow>,
}

impl<C: 'static> Handler for Wait<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(settings(conf))
    }

    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision {
        (self.first)(request, settings(conf)).map_or(Decision::MustWait, Decision::Flow)
    }

    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow> {
        (self.then)(request, settings(conf))
    }
}
