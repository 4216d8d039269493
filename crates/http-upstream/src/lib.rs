//! Passes HTTP requests on to other servers, over any of their protocols and by way of the cache.
//!
//! ```text
//!  module (proxy, fastcgi, …)     encodes the request, knows how responses are read
//!     │ Passing
//!     ▼
//!  caching     the cache's answer, or how the servers are asked for a response to store
//!     ▼
//!  attempt     a server of the group, a connection, the request, the response's head; or the next server
//!     │ answering    a request in flight and its response: exclusive, on a connection of its own, or http2, on a
//!     │              shared one
//!     │ sending      the request: its head and its body, framed
//!     │ receiving    interface of a protocol's reader of responses (http1, fastcgi, cgi: SCGI and uwsgi, memcached)
//!     ▼
//!  response    processes the head: hidden fields, X-Accel-*, redirects
//!     │
//!     ▼
//!  body        the response's body as it arrives, ahead of a slow client within bounds
//!  tunnel      or, after a 101, bytes both ways
//!  store       writes the response to a file as well: proxy_store
//!
//!  client      requests of services: one request, its whole response
//!  settings    settings of a location       record    data of the $upstream_* variables
//! ```
//!
//! Groups of servers, the choice among them and idle connections are in `gale_upstream`.

mod answering;
mod attempt;
mod body;
pub mod caching;
pub mod cgi;
pub mod client;
mod exclusive;
pub mod fastcgi;
mod head;
pub mod http1;
mod http2;
pub mod memcached;
pub mod receiving;
pub mod record;
mod response;
pub mod sending;
pub mod settings;
pub mod store;
mod tunnel;

pub use attempt::{Alone, Passing, PassingTls, Wire, WriteRequest, pass_on, written_before};
pub use http2::{Http2Client, Http2Request};
pub use response::{AccelCharset, HeadRewriter, KeepHead, ReplacedPath, ServerNames, USUALLY_HIDDEN};
