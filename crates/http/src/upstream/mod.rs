//! Passing requests on to other servers, whatever the protocol that these speak.
//!
//! ```text
//!  module (proxy, fastcgi, …)     makes the request's bytes, knows how responses are read
//!     │ Passing
//!     ▼
//!  caching     what the cache has, or how the servers are asked for what it is to keep
//!     ▼
//!  attempt     a server of the group, a connection, the request, the response's head; or the next server
//!     │ answering    a request under way and its response: exclusive, on a connection of its own, or http2, on one
//!     │              that it shares
//!     │ sending      the request: its head and its body, framed
//!     │ receiving    what a protocol's reader of responses is asked (http1, fastcgi, cgi: SCGI and uwsgi, memcached)
//!     ▼
//!  response    what becomes of the head: hidden fields, X-Accel-*, redirects
//!     │
//!     ▼
//!  body        the response's body as it comes, ahead of a slow client within bounds
//!  tunnel      or, after a 101, bytes both ways
//!  store       a file that the response becomes beside that: proxy_store
//!
//!  client      what services ask servers with: one request, its whole response
//!  settings    what the location says       record    what the $upstream_* variables tell
//! ```
//!
//! Groups of servers, the choice among them and idle connections are the engine's (`gale_engine::upstream`).

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
