//! Passes HTTP requests on to other servers, over any of their protocols and by way of the cache.
//!
//! ```text
//!  module (proxy, fastcgi, …)     encodes the request, knows how responses are read
//!     │ passing: the request as it has prepared it, with passing_tls
//!     ▼
//!  caching     the cache's answer, or how the servers are asked for a response to store
//!     ▼
//!  attempt     a server of the group, a connection, the request, the response's head; or the next server
//!     │ answering    a request in flight and its response: exclusive, on a connection of its own, or http2, on a
//!     │              shared one
//!     │ sending      the request: its head and its body, framed
//!     │ receiving    interface of a protocol's reader of responses (http1, fastcgi, cgi: SCGI and uwsgi, memcached)
//!     ▼
//!  response    begins the client's response: from the cache, with a body, or as a tunnel
//!     │ client_head  its head: hidden fields, X-Accel-*, redirects, names that a rewriter replaces
//!     │ beside_head  early hints and trailers
//!     ▼
//!  body        the response's body as it arrives, ahead of a slow client within bounds
//!  tunnel      or, after a 101, bytes both ways
//!  store       writes the response to a file as well: proxy_store (store_settings)
//!
//!  client      requests of services: one request, its whole response
//!  settings    settings of a location             record        data of the $upstream_* variables
//!  failure     reasons for which there is no head heading       state while it is awaited
//!  caching_state  the cache's state for a request that is passed on
//! ```
//!
//! Groups of servers, the choice among them and idle connections are in `gale_upstream`.

mod answering;
mod attempt;
mod beside_head;
mod body;
pub mod caching;
mod caching_state;
pub mod cgi;
pub mod client;
mod client_head;
mod exclusive;
mod failure;
pub mod fastcgi;
mod head;
mod heading;
pub mod http1;
mod http2;
pub mod memcached;
mod passing;
mod passing_tls;
pub mod receiving;
pub mod record;
mod response;
mod rewriter;
pub mod sending;
pub mod settings;
mod store;
pub mod store_settings;
mod tunnel;

pub use attempt::pass_on;
pub use caching_state::Caching;
pub use client_head::{AccelCharset, USUALLY_HIDDEN};
pub use http2::{Http2Client, Http2Request};
pub use passing::{Alone, Passing, Wire, WriteRequest, written_before};
pub use passing_tls::PassingTls;
pub use rewriter::{HeadRewriter, KeepHead, ReplacedPath, ServerNames};
