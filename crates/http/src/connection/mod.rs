//! Connections that speak HTTP, by version, and those of one event loop together.
//!
//! ```text
//!   accepted ─► header of the PROXY protocol (beginning.rs) ─► handshake (tls.rs) ─► requests (http1/, http2/)
//!            ─► lingering.rs
//! ```
//!
//! What belongs to a connection whatever it speaks is here and in the files beside this one. One that speaks HTTP/1 is
//! its own exchange, since it carries one at a time; above one that speaks HTTP/2 stand the streams of that.

mod beginning;
mod body_wait;
mod handover;
pub mod http1;
mod http2;
mod lingering;
mod output;
mod place;
mod tls;
pub mod worker;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::connections::{Connection, ConnectionInfo};
use gale_log::{Describe, Fields};
use gale_runtime::{Buffer, Moment, SocketAddress};
use gale_tls::Transport;

use self::beginning::{Beginning, FIRST_REQUEST_GRACE};
use self::http1::AfterExchange;
use self::place::AddressIndex;
use crate::connection::worker::HttpConnections;
use crate::request::configuration::settings::CoreSettings;
use crate::request::worker::{Configured, HttpWorker};

/// A connection of a client.
pub struct HttpConnection {
    info: ConnectionInfo,
    stream: Transport,
    connections: Rc<HttpConnections>,
    /// What HTTP/1 needs of it.
    http1: RefCell<http1::State>,
    first_configuration: Cell<Option<Rc<Configured>>>,
    /// Since when it waits for a request of which nothing has come; never while it does not.
    idle_since: Cell<Moment>,
    /// How long it may be idle after the last response, in milliseconds, 49 days at most.
    idle_max_ms: Cell<u32>,
    nodelay_is_set: Cell<bool>,
    /// It speaks HTTP/2.
    is_multiplexed: Cell<bool>,
    /// How it began; `None` while nobody knows.
    began: Cell<Option<Beginning>>,
    /// Its number in the worker's list, and one: 0 while it is in none.
    listed: Cell<Option<NonZeroU32>>,
    /// Where the connection belongs in the configuration of that generation; none has the generation 0.
    known_place: Cell<Option<AddressIndex>>,
    known_generation: Cell<u64>,
}

impl Connection for HttpConnection {
    /// When an idle connection may be closed to make room or to let the worker end:
    /// when `keepalive_min_timeout` has passed, or the grace for a first request. `None` while it is busy.
    fn may_close_at(&self) -> Option<Moment> {
        // One that speaks HTTP/2 ends by itself when the worker does: its client is told before.
        let kept_until = self.worker().idle_kept_until();
        if !self.is_idle() || self.is_multiplexed.get() && self.worker().is_draining() {
            return None;
        }
        let idle_since = self.idle_since.get();
        if self.info.requests.get() == 0 {
            return Some(kept_until.max(idle_since + FIRST_REQUEST_GRACE));
        }
        let configuration = self.worker().configuration();
        let http = configuration.http();
        let min = self.place(http).map_or(Duration::ZERO, |place| *place.core(http).keepalive_min_timeout.get());
        Some(kept_until.max(idle_since + min))
    }
}

impl HttpConnection {
    /// A connection that was just accepted.
    ///
    /// `first` is the configuration for the first exchange when that is not the
    /// worker's current one.
    pub fn new(
        info: ConnectionInfo,
        stream: Transport,
        connections: Rc<HttpConnections>,
        first: Option<Rc<Configured>>,
    ) -> HttpConnection {
        HttpConnection {
            info,
            stream,
            connections,
            http1: RefCell::default(),
            first_configuration: Cell::new(first),
            idle_since: Cell::new(Moment::NEVER),
            idle_max_ms: Cell::new(0),
            nodelay_is_set: Cell::new(false),
            is_multiplexed: Cell::new(false),
            began: Cell::new(None),
            listed: Cell::new(None),
            known_place: Cell::new(None),
            known_generation: Cell::new(0),
        }
    }

    /// What the requests of this loop share.
    fn worker(&self) -> &Rc<HttpWorker> {
        &self.connections.worker
    }

    /// Says which number the connection has in its worker's list, from which it is taken when it ends, however it ends.
    pub(crate) fn set_listed(&self, number: usize) {
        self.listed.set(u32::try_from(number + 1).ok().and_then(NonZeroU32::new));
    }

    /// The configuration for the next exchange.
    fn next_configuration(&self) -> Rc<Configured> {
        let first = self.first_configuration.take();
        self.first_configuration.set(first.clone());
        first.unwrap_or_else(|| self.worker().configuration())
    }

    /// Its next exchange will use `configuration`, if it begins by what has come already or comes first of all.
    pub fn begin_with(&self, configuration: &Rc<Configured>) {
        let next = self.first_configuration.take();
        self.first_configuration.set(next.or_else(|| Some(Rc::clone(configuration))));
    }

    /// Whether a request may have begun: it is the first one and nobody knows, or something has come.
    pub fn may_have_begun(&self) -> bool {
        self.info.requests.get() == 0 || !self.is_idle()
    }

    /// Whether the connection speaks HTTP/2.
    pub fn is_multiplexed(&self) -> bool {
        self.is_multiplexed.get()
    }

    /// The generation of the oldest configuration of an exchange under way, if any.
    pub fn exchange_generation(&self) -> Option<u64> {
        if self.is_multiplexed() {
            return self.connections.http2_of(self.number_in_list()?)?.oldest_generation();
        }
        self.http1.borrow().generation()
    }

    /// Whether the configuration still has the address that the connection came by.
    pub fn has_place(&self, configuration: &Configured) -> bool {
        self.place(configuration.http()).is_some()
    }

    /// Whether it waits for a request of which nothing has come.
    pub fn is_idle(&self) -> bool {
        self.idle_since.get() != Moment::NEVER
    }

    /// It waits for a request from now on: it may make room for another connection.
    fn note_idle(&self) {
        self.idle_since.set(gale_runtime::now());
        self.note_still_idle();
    }

    /// It was awake, and nothing had come.
    fn note_still_idle(&self) {
        if let Some(number) = self.number_in_list() {
            self.connections.table.note_idle(number);
        }
    }

    /// Its place among the connections of its worker, once it has one.
    fn number_in_list(&self) -> Option<usize> {
        self.listed.get().map(|number| number.get() as usize - 1)
    }

    /// The generation of the configuration that it holds for its next exchange, if it holds one.
    pub fn next_generation(&self) -> Option<u64> {
        let next = self.first_configuration.take();
        let generation = next.as_ref().map(|next| next.http().generation);
        self.first_configuration.set(next);
        generation
    }

    /// Serves the connection to its end. (A block, because the future of an `async fn` holds its arguments and what
    /// they have become.)
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` would be larger")]
    pub fn serve(self: Rc<Self>) -> impl Future<Output = ()> {
        async move {
            if self.stream.tls().is_some() && !Box::pin(self.begin_tls()).await {
                return;
            }
            if self.agreed_on_http2() {
                return Box::pin(http2::serve(self, Buffer::new())).await;
            }
            while let Some(request) = self.next_request().await {
                match self.exchange(request).await {
                    AfterExchange::KeepAlive if self.must_yield() => gale_runtime::yield_now().await,
                    AfterExchange::KeepAlive => {}
                    AfterExchange::Close => return,
                    AfterExchange::Linger(lingering) => return Box::pin(self.linger(lingering)).await,
                }
            }
            if self.is_multiplexed() {
                let input = self.http1.borrow_mut().take_input();
                Box::pin(http2::serve(self, input)).await;
            }
        }
    }

    /// Whether this response is the last one here, whatever the client wants: the worker ends, or the address is gone.
    fn must_close(&self) -> bool {
        self.worker().is_draining() || self.worker().with_configuration(|configuration| !self.has_place(configuration))
    }

    /// `tcp_nodelay`: once, when the connection turns out to be kept.
    fn set_nodelay(&self, core: &CoreSettings) {
        let is_inet = matches!(self.info.remote, SocketAddress::Inet(_));
        if is_inet && *core.tcp_nodelay.get() && !self.nodelay_is_set.replace(true) {
            // A failure costs latency, nothing else.
            let _ = self.stream.set_nodelay(true);
        }
    }

    /// A message about the connection, in the log of the address' default server.
    fn log_connection(&self, level: Level, message: fmt::Arguments<'_>) {
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return };
        let log = &http.scope(http.server(place.default_server(http)).scope).error_log;
        log.write_about(level, Some(self.info.number), &message, &Context(&self.info));
    }

    fn reset(&self) {
        // If it fails, the connection is closed in the usual way.
        let _ = self.stream.set_linger_reset();
    }
}

/// What nginx adds to a message about a connection.
struct Context<'c>(&'c ConnectionInfo);

impl Describe for Context<'_> {
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
        let Context(info) = self;
        fields.text(", client: ", "client", &info.remote_text(), "")?;
        fields.text(", server: ", "server", &info.listening, "")
    }
}

impl Drop for HttpConnection {
    fn drop(&mut self) {
        self.http1.get_mut().end(&self.stream, &self.connections);
        if let Some(number) = self.number_in_list() {
            self.connections.table.remove(number);
        }
    }
}
