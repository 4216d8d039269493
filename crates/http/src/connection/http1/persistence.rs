//! Persistence: decides if a connection carries another request after a response, or how it closes. (RFC 9112 §9)
//! (<https://nginx.org/en/docs/http/ngx_http_core_module.html#keepalive_timeout>)

use gale_protocol::http1::wants_keep_alive;
use gale_protocol::request::Method;

use crate::request::Request;
use crate::request::browser::Browser;
use crate::request::configuration::settings::{CoreSettings, KeepaliveDisable, LingeringClose};

/// Wish of a client for its connection after the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wish {
    /// To send nothing more.
    #[default]
    Close,
    /// Unknown, since the head is malformed. The connection is closed, while more may be on its way.
    Unknown,
    /// To send another request.
    Keep,
}

impl Wish {
    pub(super) fn of(request: &Request, is_malformed: bool) -> Wish {
        match is_malformed {
            true => Wish::Unknown,
            false if wants_keep_alive(&request.parsed, request.head.readable()) => Wish::Keep,
            false => Wish::Close,
        }
    }

    /// Returns `true` if the connection may carry another request, as far as the client, the request and its location
    /// decide. The ends of the bodies may still forbid it.
    pub(super) fn may_be_kept(self, request: &Request, core: &CoreSettings) -> bool {
        let age = gale_runtime::now().since(request.connection().accepted);
        self == Wish::Keep
            && !request.closes_connection()
            && !core.keepalive_timeout.get().idle.is_zero()
            && request.arrival.number_on_connection < *core.keepalive_requests.get()
            && age <= *core.keepalive_time.get()
            && !is_old_browser(request, core.keepalive_disable.get())
    }

    /// `lingering_close` as it applies to the request. A connection that the client would have kept is read from: the
    /// next request may be on its way, and the kernel's reset can cost the client the answer that it has not read yet
    /// (RFC 9112, section 9.6). If no connection is ever kept, nginx's rule applies.
    pub(super) fn lingering_close(self, request: &Request, core: &CoreSettings) -> LingeringClose {
        let never_keeps = || core.keepalive_timeout.get().idle.is_zero() && request.arrival.number_on_connection <= 1;
        match *core.lingering_close.get() {
            LingeringClose::On if self != Wish::Close && !never_keeps() => LingeringClose::Always,
            setting => setting,
        }
    }
}

/// Browsers that mishandle kept connections, as `keepalive_disable` lists them.
fn is_old_browser(request: &Request, disabled: &KeepaliveDisable) -> bool {
    let may_be = disabled.msie6 && request.method() == Method::Post || disabled.safari;
    may_be
        && match request.browser() {
            Browser::Msie { is_6 } => is_6 && disabled.msie6 && request.method() == Method::Post,
            Browser::Safari => disabled.safari,
            Browser::Chrome | Browser::Other => false,
        }
}
