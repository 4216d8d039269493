//! Requests of a service that asks other servers and whose settings may have variables.
//!
//! They have no client, so that most variables are empty, and pass through no phase.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;

use gale_engine::configuration::{Configuration, ScopeId, ServerId};
use gale_worker::Worker;

use crate::request::Request;
use crate::request::routing::UriOrigin;
use crate::request::subrequest::no_client;
use crate::request::worker::{Configured, HttpWorker};

/// Makes requests for one service.
pub struct OwnRequests {
    worker: Rc<HttpWorker>,
    server: ServerId,
    scope: ScopeId,
}

impl OwnRequests {
    /// Requests in this scope of this server, in a configuration that has an http block.
    pub fn new(
        worker: &Rc<Worker>,
        configuration: Arc<Configuration>,
        server: ServerId,
        scope: ScopeId,
    ) -> OwnRequests {
        let worker = HttpWorker::new(Rc::clone(worker), Configured::new(configuration));
        OwnRequests { worker, server, scope }
    }

    /// Makes a request.
    pub fn begin(&self) -> OwnRequest {
        let mut request = self.worker.take_request();
        request.begin(self.worker.configuration(), no_client(), self.server);
        request.scope = self.scope;
        request.arrival.started = gale_runtime::now();
        request.routing.origin = UriOrigin::Internal;
        request.answer_as_get();
        OwnRequest(Some(request))
    }
}

/// Request of a service. Its worker takes it back in the end.
pub struct OwnRequest(Option<Box<Request>>);

impl Deref for OwnRequest {
    type Target = Request;

    fn deref(&self) -> &Request {
        self.0.as_deref().expect("there until it is dropped")
    }
}

impl DerefMut for OwnRequest {
    fn deref_mut(&mut self) -> &mut Request {
        self.0.as_deref_mut().expect("there until it is dropped")
    }
}

impl Drop for OwnRequest {
    fn drop(&mut self) {
        let Some(request) = self.0.take() else { return };
        // The state of the request is unknown after a panic.
        if !std::thread::panicking() {
            let worker = Rc::clone(request.worker());
            worker.give_back(request);
        }
    }
}
