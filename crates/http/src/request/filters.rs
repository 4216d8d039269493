//! Response filters: the modules' changes to a response on its way out.
//!
//! A filter sees the head and the body before anything is sent. It changes the
//! head, and replaces the body (often by one that wraps it) only when it acts;
//! a response that no filter touches costs one call each. A filter never sends
//! anything: a filter that refuses the response returns the status in its place,
//! and the pipeline does the rest.
//!
//! Filters that transform the bytes of a body are built on `transform.rs`.

use std::any::Any;

use crate::request::Request;
use crate::request::body::Body;
use crate::request::response::FieldList;

/// A module's part in every response.
pub trait Filter: Sync {
    /// `true` if these settings enable the filter. Called once, when the configuration is built.
    fn applies(&self, conf: &dyn Any) -> bool;
    /// Inspects the head in `request.response` and the body, may change them, and decides whether they are sent.
    fn apply(&self, request: &mut Request, conf: &dyn Any, body: &mut Body) -> Filtered;
    /// Adds trailers ([`Request::add_trailer`]). Called at the end of the body, if the head has `has_trailers`.
    fn add_trailers(&self, _request: &Request, _conf: &dyn Any) {}
    /// `true` if a cache may store a response with this status and these fields from the upstream; `false` if the
    /// filter, or a reader of the body, will refuse it. Called before anything is stored, also for requests whose
    /// responses pass no filters.
    fn may_be_stored(&self, _request: &Request, _conf: &dyn Any, _status: u16, _fields: &FieldList) -> bool {
        true
    }
}

/// Decision of a filter about a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filtered {
    /// The response goes on.
    Goes,
    /// The response must not be sent. The request ends with this status, as if its handler had returned it:
    /// `error_page` applies, and the filters see the new response. It is sent with the fields that the filter leaves in
    /// `request.response.fields`.
    Respond(u16),
}

/// A filter that changes the response and never refuses it.
pub struct Change<C: 'static> {
    /// `true` if these settings enable the filter.
    pub applies: fn(&C) -> bool,
    /// [`Filter::apply`].
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
    /// `true` if these settings enable the filter.
    pub applies: fn(&C) -> bool,
    /// [`Filter::apply`].
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
    /// `true` if these settings enable the filter.
    pub applies: fn(&C) -> bool,
    /// Changes the head.
    pub run: fn(&mut Request, &C),
    /// [`Filter::add_trailers`].
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
