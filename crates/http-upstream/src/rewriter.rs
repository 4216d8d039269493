//! Rewrites the server's names in the head of its response: `proxy_redirect`, `proxy_cookie_domain` and the like.

use std::sync::Arc;

use gale_http::request::Request;
use gale_protocol::request::Scheme;

/// Rewrites fields that name the server, for `proxy_redirect` and similar directives.
pub trait HeadRewriter {
    /// The new value for a `Location`, or for the URL of a `Refresh`.
    fn location(&self, _request: &Request, _value: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The new value for a `Set-Cookie`.
    fn cookie(&self, _request: &Request, _value: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The server's names for the URIs of clients; `None` if it has none of its own.
    fn server_names(&self, _request: &Request) -> Option<ServerNames> {
        None
    }
}

/// A server's own names for the URIs of clients.
pub struct ServerNames {
    /// The scheme of its URLs.
    pub scheme: Scheme,
    /// The host, with its port unless that is the default.
    pub host: Arc<[u8]>,
    /// The replaced part of paths; `None` if paths are the same or unknown.
    pub replaced: Option<ReplacedPath>,
}

/// A prefix of clients' paths, and the server's prefix in its place.
pub struct ReplacedPath {
    /// The prefix for clients.
    pub client: Box<[u8]>,
    /// The prefix for the server.
    pub server: Box<[u8]>,
}

/// Rewrites nothing.
pub struct KeepHead;

impl HeadRewriter for KeepHead {}
