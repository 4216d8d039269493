//! The part of a connection that all of its stages share: the client's address, the socket, the place in the
//! configuration, and the idle time.
//!
//! It knows no version of HTTP: a stage asks it, and it asks no stage.

use std::cell::Cell;
use std::fmt;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_log::{Describe, Fields};
use gale_protocol::request::Scheme;
use gale_runtime::{Moment, SocketAddress, TcpInfo};
use gale_tls::{TlsStream, Transport};

use super::beginning::{Beginning, FIRST_REQUEST_GRACE};
use super::place::AddressIndex;
use crate::connection::worker::HttpConnections;
use crate::request::configuration::settings::CoreSettings;
use crate::request::worker::{Configured, HttpWorker};

/// See the file's head.
pub(super) struct Client {
    pub info: ConnectionInfo,
    pub stream: Transport,
    pub connections: Rc<HttpConnections>,
    /// Start of the wait for a request of which nothing has come; never while the connection is busy.
    pub idle_since: Cell<Moment>,
    /// Longest idle time after the last response, in milliseconds, 49 days at most.
    pub idle_max_ms: Cell<u32>,
    nodelay_is_set: Cell<bool>,
    /// The worker keeps a configuration for the next exchange ([`HttpConnections::kept_configurations`]).
    has_kept_configuration: Cell<bool>,
    /// Beginning of the connection; `None` until its first bytes have been read.
    pub began: Cell<Option<Beginning>>,
    /// Number in the worker's table plus one; `None` before the connection is listed.
    listed: Cell<Option<NonZeroU32>>,
    /// Address of the connection in the configuration of `known_generation`. Generation 0 is none.
    pub known_place: Cell<Option<AddressIndex>>,
    pub known_generation: Cell<u64>,
}

impl Client {
    /// A client that was just accepted.
    pub fn new(info: ConnectionInfo, stream: Transport, connections: Rc<HttpConnections>) -> Client {
        Client {
            info,
            stream,
            connections,
            idle_since: Cell::new(Moment::NEVER),
            idle_max_ms: Cell::new(0),
            nodelay_is_set: Cell::new(false),
            has_kept_configuration: Cell::new(false),
            began: Cell::new(None),
            listed: Cell::new(None),
            known_place: Cell::new(None),
            known_generation: Cell::new(0),
        }
    }

    /// State that all requests of this event loop share.
    pub fn worker(&self) -> &Rc<HttpWorker> {
        &self.connections.worker
    }

    /// Notes the number of the connection in its worker's table. The connection removes itself there when it ends.
    pub fn set_listed(&self, number: usize) {
        self.listed.set(u32::try_from(number + 1).ok().and_then(NonZeroU32::new));
    }

    /// The configuration of the next exchange.
    pub fn next_configuration(&self) -> Rc<Configured> {
        self.with_kept(Rc::clone).unwrap_or_else(|| self.worker().configuration())
    }

    /// Calls `ask` with the configuration kept for the next exchange, or with `None` if none is kept.
    fn with_kept<T>(&self, ask: impl FnOnce(&Rc<Configured>) -> T) -> Option<T> {
        if !self.has_kept_configuration.get() {
            return None;
        }
        self.connections.kept_configurations.borrow().get(&self.number_in_list()?).map(ask)
    }

    /// Uses `configuration` for the next exchange, unless an older one is kept for it already.
    pub fn begin_with(&self, configuration: &Rc<Configured>) {
        if let Some(number) = self.number_in_list()
            && !self.has_kept_configuration.replace(true)
        {
            self.connections.kept_configurations.borrow_mut().insert(number, Rc::clone(configuration));
        }
    }

    /// The exchange that used the configuration kept by [`Client::begin_with`] is over.
    pub fn forget_kept_configuration(&self) {
        if self.has_kept_configuration.replace(false)
            && let Some(number) = self.number_in_list()
        {
            self.connections.kept_configurations.borrow_mut().remove(&number);
        }
    }

    /// Returns `true` if a request may have begun: no request has been read yet, or bytes of one have come.
    pub fn may_have_begun(&self) -> bool {
        self.info.requests.get() == 0 || !self.is_idle()
    }

    /// Generation of the configuration kept for the next exchange; `None` if none is kept.
    pub fn next_generation(&self) -> Option<u64> {
        self.with_kept(|kept| kept.http().generation)
    }

    /// Returns `true` while the connection waits for a request of which nothing has come.
    pub fn is_idle(&self) -> bool {
        self.idle_since.get() != Moment::NEVER
    }

    /// The connection waits for a request from now on: it may be closed to make room for another one.
    pub fn note_idle(&self) {
        self.idle_since.set(gale_runtime::now());
        self.note_still_idle();
    }

    /// The task ran, and nothing had come.
    pub fn note_still_idle(&self) {
        if let Some(number) = self.number_in_list() {
            self.connections.table.note_idle(number);
        }
    }

    /// Number in the worker's table, once the connection is listed.
    pub fn number_in_list(&self) -> Option<usize> {
        self.listed.get().map(|number| number.get() as usize - 1)
    }

    /// Time from which an idle connection may be closed to make room or to let the worker end: when
    /// `keepalive_min_timeout` has passed, or the grace for a first request.
    pub fn idle_may_close_at(&self) -> Moment {
        let kept_until = self.worker().idle_kept_until();
        let idle_since = self.idle_since.get();
        if self.info.requests.get() == 0 {
            return kept_until.max(idle_since + FIRST_REQUEST_GRACE);
        }
        let configuration = self.worker().configuration();
        let http = configuration.http();
        let min = self.place(http).map_or(Duration::ZERO, |place| *place.core(http).keepalive_min_timeout.get());
        kept_until.max(idle_since + min)
    }

    /// Returns `true` if the current response must be the last one: the worker ends, or the address is gone.
    pub fn must_close(&self) -> bool {
        let has_place = |configuration: &Configured| self.place(configuration.http()).is_some();
        self.worker().is_draining() || !self.worker().with_configuration(has_place)
    }

    /// `tcp_nodelay`: set once, when the connection turns out to be kept.
    pub fn set_nodelay(&self, core: &CoreSettings) {
        let is_inet = matches!(self.info.remote, SocketAddress::Inet(_));
        if is_inet && *core.tcp_nodelay.get() && !self.nodelay_is_set.replace(true) {
            // A failure costs latency, nothing else.
            let _ = self.stream.set_nodelay(true);
        }
    }

    /// Our address on the connection, looked up once.
    pub fn local_address(&self) -> Option<&SocketAddress> {
        self.info.local(|| self.stream.local_address().ok())
    }

    pub fn scheme(&self) -> Scheme {
        if self.stream.is_encrypted() { Scheme::Https } else { Scheme::Http }
    }

    /// The TLS session, if the client speaks TLS.
    pub fn tls(&self) -> Option<&TlsStream> {
        self.stream.tls().filter(|stream| stream.is_tls())
    }

    pub fn tcp_info(&self) -> Option<TcpInfo> {
        self.stream.tcp_info().ok()
    }

    /// Logs a message about the connection, in the log of the address' default server.
    pub fn log_connection(&self, level: Level, message: fmt::Arguments<'_>) {
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return };
        let log = &http.scope(http.server(place.default_server(http)).scope).error_log;
        log.write_about(level, Some(self.info.number), &message, &Context(&self.info));
    }

    /// The end of the connection will be a reset.
    pub fn reset(&self) {
        // If it fails, the connection is closed in the usual way.
        let _ = self.stream.set_linger_reset();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.forget_kept_configuration();
        if let Some(number) = self.number_in_list() {
            self.connections.table.remove(number);
        }
    }
}

/// The part that nginx adds to a message about a connection.
struct Context<'c>(&'c ConnectionInfo);

impl Describe for Context<'_> {
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
        let Context(info) = self;
        fields.text(", client: ", "client", &info.remote_text(), "")?;
        fields.text(", server: ", "server", &info.listening, "")
    }
}
