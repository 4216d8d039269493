//! `post_action URI|@NAME`: runs another request after a request has ended; its response is dropped.
//!
//! nginx does not document the directive. There the client's request itself continues, which delays its log line and
//! its connection. Here the request is logged as it ended, the connection goes on, and a copy of the request runs in
//! the background: like a subrequest, it skips the access phase, becomes no tunnel and has no `post_action` of its own.

use crate::request::Request;
use crate::request::advance;
use crate::request::outcome::conclude;
use crate::request::phases::Flow;
use crate::request::subrequest;

/// Argument of the directive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PostAction {
    /// A path, the target of an internal redirect.
    Path(Box<[u8]>),
    /// A named location, without its `@`.
    Named(Box<[u8]>),
}

/// Starts the `post_action` of a request that is over and logged. The request is empty afterwards.
pub(super) fn begin(request: &mut Request) {
    // Nothing follows status 444 or a request without a path.
    if !request.is_main() || request.response.status == 444 || request.uri.is_empty() {
        return;
    }
    let configuration = request.configuration().clone();
    let Some(action) = configuration.http().scope(request.scope).core.post_action.get_opt() else { return };
    let flow = match action {
        PostAction::Path(path) => Flow::Redirect { uri: path.to_vec(), args: None },
        PostAction::Named(name) => Flow::Named(name.clone()),
    };
    // The client's request is over: `limit_conn` no longer counts it.
    request.let_go();
    let mut over = request.worker().take_request();
    std::mem::swap(&mut *over, request);
    subrequest::leave_behind(over, move |request| {
        request.begin_anew();
        conclude(request, flow).unwrap_or_else(|| advance::advance(request))
    });
}
