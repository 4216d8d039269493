//! The phases of a session, in nginx's order, and what a module may do in one.
//! (<https://nginx.org/en/docs/stream/stream_processing.html>)

use std::any::Any;
use std::future::Future;
use std::pin::Pin;

use super::Session;

/// A stage of a session. The handshake of TLS comes behind `Access`, the content behind `Start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The client was accepted, and its header of the PROXY protocol read.
    PostAccept,
    /// Before it is decided who may come in.
    PreAccess,
    /// Who may come in.
    Access,
    /// What the client says first is looked at.
    Preread,
    /// It is about to be served.
    Start,
    /// The session is over.
    Log,
}

/// How many phases there are.
pub const PHASES: usize = 6;

/// What a handler has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The next handler.
    Next,
    /// The phase is done.
    PhaseDone,
    /// More of what the client says is needed; in `Preread` alone.
    NeedMore,
    /// The session ends with this status.
    Finish(u16),
}

/// A future of a session, which borrows it.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A module's part in a phase. It never waits.
pub trait Handler: Sync {
    /// Whether a server with these settings needs it.
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

/// Serves sessions to their end.
pub trait Content: Sync {
    /// Whether a server with these settings is served by it.
    fn applies(&self, conf: &dyn Any) -> bool;

    /// Serves a session; the result is its status.
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
