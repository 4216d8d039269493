//! `post_action URI|@NAME`: what is done when a request is over, with all that is known of it; its answer is dropped.
//!
//! nginx has the directive without documentation. There the client's request itself goes on, so that its log line and
//! its connection wait. Here the request is logged as it ended, the connection goes on, and what follows is a copy in
//! the background: like a subrequest it passes no access rules, becomes no tunnel and has no `post_action` of its own.

use crate::request::Request;
use crate::request::advance;
use crate::request::outcome::conclude;
use crate::request::phases::Flow;
use crate::request::subrequest;

/// What the directive says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PostAction {
    /// A path, which is looked up as after an internal redirect.
    Path(Box<[u8]>),
    /// A named location, without its `@`.
    Named(Box<[u8]>),
}

/// Begins what follows a request that is over and logged. The request is empty afterwards.
pub(super) fn begin(request: &mut Request) {
    // 444 is no answer, and what has no path was none to begin with.
    if !request.is_main() || request.response.status == 444 || request.uri.is_empty() {
        return;
    }
    let configuration = request.configuration().clone();
    let Some(action) = configuration.http().scope(request.scope).core.post_action.get_opt() else { return };
    let flow = match action {
        PostAction::Path(path) => Flow::Redirect { uri: path.to_vec(), args: None },
        PostAction::Named(name) => Flow::Named(name.clone()),
    };
    // For the client it is over: `limit_conn` has a place again.
    request.let_go();
    let mut over = request.worker().take_request();
    std::mem::swap(&mut *over, request);
    subrequest::leave_behind(over, move |request| {
        request.begin_anew();
        conclude(request, flow).unwrap_or_else(|| advance::advance(request))
    });
}
