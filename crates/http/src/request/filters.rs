//! Response filters: what modules do to a response on its way out.
//!
//! A filter sees the head and the body before anything is sent. It changes the
//! head, and replaces the body (often by one that wraps it) only when it acts;
//! a response that no filter touches costs one call each. A filter never sends
//! anything: one that finds that the response must not go out says which status
//! takes its place, and the pipeline does the rest.
//!
//! Filters that make other bytes of a body's bytes are built on `transform.rs`.

use std::any::Any;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::response::FieldList;

/// A module's part in every response.
pub trait Filter: Sync {
    /// Whether it has anything to do with these settings. Asked once, when the
    /// configuration is built.
    fn applies(&self, conf: &dyn Any) -> bool;
    /// Looks at the head in `request.response` and at the body, changes them or not, and says what
    /// becomes of them.
    fn apply(&self, request: &mut Request, conf: &dyn Any, body: &mut Body) -> Filtered;
    /// Adds fields that go out behind the body ([`Request::add_trailer`]). Asked when the body has come to its end, if
    /// the head said `has_trailers`.
    fn add_trailers(&self, _request: &Request, _conf: &dyn Any) {}
    /// Whether a cache may store a response with this status and these fields of its server's: not if the filter, or
    /// whoever reads the body, is going to refuse it. Asked before anything of it is stored; also of requests whose
    /// answers pass no filters.
    fn may_be_stored(&self, _request: &Request, _conf: &dyn Any, _status: u16, _fields: &FieldList) -> bool {
        true
    }
}

/// What a filter made of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filtered {
    /// It goes on.
    Goes,
    /// It must not be sent. The request ends with this status instead, as if its
    /// handler had said so: `error_page` applies, and the filters see the answer
    /// that is made of it. What the filter leaves in `request.response.fields`
    /// goes out with it.
    Respond(u16),
}

/// A filter that changes the response and never refuses it.
pub struct Change<C: 'static> {
    /// Whether there is anything to do with these settings.
    pub applies: fn(&C) -> bool,
    /// What it does.
    pub run: fn(&mut Request, &C, &mut Body),
}

impl<C: 'static> Filter for Change<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(settings(conf))
    }

    fn apply(&self, request: &mut Request, conf: &dyn Any, body: &mut Body) -> Filtered {
        (self.run)(request, settings(conf), body);
        Filtered::Goes
    }
}

/// A filter that may refuse the response.
pub struct Judge<C: 'static> {
    /// Whether there is anything to do with these settings.
    pub applies: fn(&C) -> bool,
    /// What it does.
    pub run: fn(&mut Request, &C, &mut Body) -> Filtered,
}

impl<C: 'static> Filter for Judge<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(settings(conf))
    }

    fn apply(&self, request: &mut Request, conf: &dyn Any, body: &mut Body) -> Filtered {
        (self.run)(request, settings(conf), body)
    }
}

/// A filter that changes the head and adds fields behind the body.
pub struct Fields<C: 'static> {
    /// Whether there is anything to do with these settings.
    pub applies: fn(&C) -> bool,
    /// What it does to the head.
    pub run: fn(&mut Request, &C),
    /// What it adds at the end.
    pub trailers: fn(&Request, &C),
}

impl<C: 'static> Filter for Fields<C> {
    fn applies(&self, conf: &dyn Any) -> bool {
        (self.applies)(settings(conf))
    }

    fn apply(&self, request: &mut Request, conf: &dyn Any, _body: &mut Body) -> Filtered {
        (self.run)(request, settings(conf));
        Filtered::Goes
    }

    fn add_trailers(&self, request: &Request, conf: &dyn Any) {
        (self.trailers)(request, settings(conf));
    }
}

fn settings<C: 'static>(conf: &dyn Any) -> &C {
    conf.downcast_ref().expect("a filter's settings are of its module's type")
}
