//! The phases of a session, in nginx's order, and the handlers of modules in them.
//! (<https://nginx.org/en/docs/stream/stream_processing.html>)

use std::any::Any;
use std::future::Future;
use std::pin::Pin;

use super::Session;

/// A phase of a session. The TLS handshake follows `Access`, the content follows `Start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// After accepting the client and reading its PROXY protocol header.
    PostAccept,
    /// Before access control.
    PreAccess,
    /// Access control.
    Access,
    /// Inspection of the client's first bytes.
    Preread,
    /// Right before the content handler.
    Start,
    /// After the end of the session.
    Log,
}

/// Number of phases.
pub const PHASES: usize = 6;

/// Decision of a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Run the next handler.
    Next,
    /// Skip the other handlers of the phase.
    PhaseDone,
    /// Read more from the client and run the phase again; only in `Preread`.
    NeedMore,
    /// End the session with this status.
    Finish(u16),
}

/// A boxed future that borrows its session.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A handler of a module in a phase. It never waits.
pub trait Handler: Sync {
    /// Returns true if servers with these settings need the handler.
    fn applies(&self, conf: &dyn Any) -> bool;

    /// Decides about a session.
    fn decide(&self, session: &mut Session, conf: &dyn Any) -> Flow;
}

/// A handler for settings of type `C`.
pub struct Decide<C> {
    /// See [`Handler::applies`].
    pub applies: fn(&C) -> bool,
    /// See [`Handler::decide`].
    pub run: fn(&mut Session, &C) -> Flow,
}

/// A content handler, which serves sessions to their end.
pub trait Content: Sync {
    /// Returns true if it serves servers with these settings.
    fn applies(&self, conf: &dyn Any) -> bool;

    /// Serves a session and returns its status.
    fn serve<'a>(&'a self, session: &'a mut Session, conf: &'a dyn Any) -> LocalBoxFuture<'a, u16>;
}

/// A content handler for settings of type `C`.
pub struct Serve<C: 'static> {
    /// See [`Content::applies`].
    pub applies: fn(&C) -> bool,
    /// See [`Content::serve`].
    pub serve: for<'a> fn(&'a mut Session, &'a C) -> LocalBoxFuture<'a, u16>,
}

fn conf_of<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a handler's settings are of its module's type")
}

impl<C: 'static> Handler for Decide<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(conf_of(conf))
    }

    fn decide(&self, session: &mut Session, conf: &dyn Any) -> Flow {
        (self.run)(session, conf_of(conf))
    }
}

impl<C: 'static> Content for Serve<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(conf_of(conf))
    }

    fn serve<'a>(&'a self, session: &'a mut Session, conf: &'a dyn Any) -> LocalBoxFuture<'a, u16> {
        (self.serve)(session, conf_of(conf))
    }
}
