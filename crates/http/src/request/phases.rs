//! The phases of a request and what a module may do in them.
//!
//! A handler decides and returns a [`Flow`]; the pipeline alone performs the
//! effects. A handler that never waits is a plain function; one that does pays
//! for a boxed future, and nobody else.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::departure::HANDLER_PATIENCE;
use crate::request::tunnel::Tunnel;

/// nginx's phases, as far as modules take part in them. Finding the location
/// comes between `ServerRewrite` and `Rewrite` and belongs to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The head has just been read.
    #[default]
    PostRead,
    /// Changes of the URI at the level of the server.
    ServerRewrite,
    /// Changes of the URI at the level of the location.
    Rewrite,
    /// Limits.
    PreAccess,
    /// Who may.
    Access,
    /// Last changes before the content, for example `try_files`.
    PreContent,
    /// The answer.
    Content,
    /// After the answer.
    Log,
}

/// How many phases there are.
pub const PHASES: usize = 8;

impl Phase {
    /// All of them, in order.
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

/// What a handler decided.
#[derive(Debug)]
pub enum Flow {
    /// Nothing to say: ask the next handler.
    Next,
    /// The rest of this phase is skipped.
    PhaseDone,
    /// In the access phase: the client may come in, as far as this module is concerned. With `satisfy any` nobody else
    /// is asked then.
    Allow,
    /// The request ends with this status: an error page (or a redirect) is made
    /// from it. 444 closes the connection without an answer, and so does
    /// [`CLIENT_LEFT`]. In the access phase with `satisfy any`, 401, 403 and 407 wait for what the others say.
    Respond(u16),
    /// The response's head is set in the request; this is its body.
    Answer(Body),
    /// The connection becomes a tunnel: the response's head is set in the request (101, or 2xx to CONNECT), and this is
    /// the other end.
    Upgrade(Box<dyn Tunnel>),
    /// Start again with another URI, as nginx's internal redirect. `None` for
    /// the arguments keeps those of the request.
    Redirect {
        /// The normalised path.
        uri: Vec<u8>,
        /// What follows the question mark.
        args: Option<Vec<u8>>,
    },
    /// Go on in a named location.
    Named(Box<[u8]>),
    /// Come back to the same handler after this time.
    Delay(Duration),
}

/// nginx's own status: there is nobody left to answer.
pub const CLIENT_LEFT: u16 = 499;

impl Flow {
    /// An internal redirect to `target`, a path that may be followed by a question mark
    /// and arguments; without any the new URI has none.
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

/// What a handler did at once.
pub enum Decision {
    /// It decided.
    Flow(Flow),
    /// It has to wait: call [`Handler::wait`].
    MustWait,
}

/// A module's part in one phase.
pub trait Handler: Sync {
    /// Whether it has anything to do with these settings. Asked once, when the
    /// configuration is built.
    fn applies(&self, conf: &dyn Any) -> bool;
    /// Decides without waiting, if it can.
    fn decide(&self, request: &mut Request, conf: &dyn Any) -> Decision;
    /// Whether what it waits for goes on when the client has left. Any other is dropped then, and the request ends with
    /// [`CLIENT_LEFT`].
    fn outlives_client(&self, _request: &Request, _conf: &dyn Any) -> bool {
        false
    }
    /// Whether a location whose name ends with a slash answers the same URI without it by a redirect: what is passed to
    /// other servers. (<https://nginx.org/en/docs/http/ngx_http_core_module.html#location>)
    fn redirects_to_slash(&self) -> bool {
        false
    }
    /// How long a client that has ended its own direction is waited with. Over TCP one that has left looks the same, so
    /// that what costs somebody else something should not go on for long.
    fn patience(&self) -> Duration {
        HANDLER_PATIENCE
    }
    /// Decides, waiting as long as it takes. Called only after `MustWait`.
    fn wait<'a>(&'a self, request: &'a mut Request, conf: &'a dyn Any) -> LocalBoxFuture<'a, Flow>;
}

fn settings<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

/// A handler that never waits.
pub struct Decide<C: 'static> {
    /// Whether there is anything to do with these settings.
    pub applies: fn(&C) -> bool,
    /// What it does.
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

/// A handler that may have to wait: `first` is tried without a future, and says
/// `None` when `then` has to do it.
pub struct Wait<C: 'static> {
    /// Whether there is anything to do with these settings.
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
