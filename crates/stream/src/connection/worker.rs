//! The sessions of one event loop.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::configuration::Configuration;
use gale_engine::connections::{ConnectionInfo, ConnectionTable};
use gale_engine::listen::covers;
use gale_engine::protocol::{DatagramReceiver, Protocol, ProtocolWorker};
use gale_process::{ListenAddress, ListenerHandle, SocketKind, Successor};
use gale_runtime::SocketAddress;
use gale_tls::TlsStream;
use gale_tls::Transport;
use gale_worker::{IdleConnections, Worker};

use super::advance;
use super::datagrams::Receiver;
use super::listed::Listed;
use crate::session::configuration::{Address, Configured, StreamConfiguration};
use crate::session::{Client, Session};

/// Maximum number of idle UDP sessions closed for a new one, as in nginx.
const CLOSED_AT_ONCE: usize = 32;

/// Stream's part of a worker.
pub struct StreamWorker {
    pub(super) common: Rc<Worker>,
    pub(super) table: Rc<ConnectionTable<Listed>>,
    pub(super) configuration: RefCell<Rc<Configured>>,
    pub(super) is_draining: Cell<bool>,
    /// `worker_shutdown_timeout`
    shutdown_timeout: Cell<Option<Duration>>,
    itself: Weak<StreamWorker>,
}

impl Protocol for StreamConfiguration {
    fn name(&self) -> &'static str {
        "stream"
    }

    fn listeners(&self) -> Vec<ListenerHandle> {
        self.addresses.iter().map(|address| Arc::clone(&address.listening.listener)).collect()
    }

    fn start(&self, worker: &Rc<Worker>, configuration: &Arc<Configuration>) -> Rc<dyn ProtocolWorker> {
        Rc::new_cyclic(|itself| StreamWorker {
            table: ConnectionTable::new(Rc::clone(worker)),
            common: Rc::clone(worker),
            configuration: RefCell::new(configured(configuration)),
            is_draining: Cell::new(false),
            shutdown_timeout: Cell::new(configuration.process.shutdown_timeout),
            itself: itself.clone(),
        })
    }
}

fn configured(configuration: &Configuration) -> Rc<Configured> {
    Configured::new(configuration.protocol().expect("a worker of stream has a stream block"))
}

/// Returns true if sessions from this socket may belong to the address.
fn is_at(address: &Address, socket: &ListenAddress, kind: SocketKind) -> bool {
    let listening = &address.listening;
    listening.listener.spec.kind == kind && (listening.address == *socket || covers(socket, &listening.address))
}

/// Returns the index of the address that a session belongs to. If several addresses share the socket, the client's
/// destination address decides.
pub(super) fn place_of(
    stream: &StreamConfiguration,
    socket: &ListenAddress,
    kind: SocketKind,
    local: impl FnOnce() -> Option<SocketAddress>,
) -> Option<usize> {
    let mut places = stream.addresses.iter().enumerate().filter(|(_, address)| is_at(address, socket, kind));
    let (first, address) = places.next()?;
    if !address.listening.shares_socket {
        return Some(first);
    }
    let local = local()?.inet().map(|mut local| {
        local.set_ip(local.ip().to_canonical());
        ListenAddress::Inet(local)
    })?;
    let exact = |address: &Address| address.listening.address == local;
    let all = || stream.addresses.iter().enumerate().filter(|(_, address)| is_at(address, socket, kind));
    let found = all().find(|(_, address)| exact(address));
    found.or_else(|| all().find(|(_, address)| address.listening.address == *socket)).map(|(place, _)| place)
}

impl StreamWorker {
    /// Returns the configuration for new sessions.
    pub(super) fn configuration(&self) -> Rc<Configured> {
        Rc::clone(&self.configuration.borrow())
    }

    /// Ends sessions of this generation or older whose address has been removed. Other sessions hold only their own
    /// stream block and may continue while their address exists.
    fn close_gone(&self, newest: u64) {
        let current = self.configuration();
        let is_there = |listed: &Listed| {
            current.stream().addresses.iter().any(|address| is_at(address, &listed.address, listed.kind))
        };
        let is_gone = |listed: &Listed| self.is_draining.get() || !is_there(listed);
        self.table.close_some(|listed, _| listed.generation <= newest && is_gone(listed));
    }

    /// Calls `close_gone` after `worker_shutdown_timeout`. Sessions hold no configuration that the process layer could
    /// wait for, so the worker has a timer of its own.
    fn close_gone_later(&self, newest: u64) {
        let Some(timeout) = self.shutdown_timeout.get().filter(|_| !self.table.is_empty()) else { return };
        let worker = self.itself.clone();
        gale_runtime::spawn(async move {
            gale_runtime::sleep(timeout).await;
            worker.upgrade().into_iter().for_each(|worker| worker.close_gone(newest));
        });
    }

    /// Ends some of the UDP sessions that have been idle longest. TCP connections are never chosen.
    pub(super) fn close_silent(&self) {
        self.table.close_longest_idle(CLOSED_AT_ONCE);
    }
}

impl ProtocolWorker for StreamWorker {
    fn commit(&self, configuration: &Arc<Configuration>) {
        let old = self.configuration.replace(configured(configuration));
        self.shutdown_timeout.set(configuration.process.shutdown_timeout);
        self.table.look_at_all_again();
        self.close_gone_later(old.stream().generation);
    }

    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        configuration: Option<&Arc<Configuration>>,
    ) {
        let configured = configuration.map_or_else(|| self.configuration(), |own| configured(own));
        let stream = configured.stream();
        let info = ConnectionInfo::arrived(&self.common, remote, Rc::clone(address));
        let local = || info.local(|| transport.local_address().ok()).cloned();
        let Some(place) = place_of(stream, address, SocketKind::Stream, local) else { return };
        let speaks_tls = stream.addresses[place].listening.ssl;
        let transport = match transport {
            Transport::Plain(socket) if speaks_tls => Transport::Tls(Box::new(TlsStream::new(socket))),
            transport => transport,
        };
        let listed = Listed::new(&self.table, stream.generation, Rc::clone(address), None);
        let client = Client::Stream(transport);
        let session = Box::new(Session::new(configured, Rc::clone(&self.common), place, info, client));
        session.log_connected();
        listed.set_task(gale_runtime::spawn(advance::run(session, Rc::clone(&listed))));
    }

    fn receive(self: Rc<Self>, socket: OwnedFd, address: &Rc<ListenAddress>) -> io::Result<Rc<dyn DatagramReceiver>> {
        Receiver::start(self, socket, address)
    }

    fn drain(self: Rc<Self>, _: Option<&Successor>) {
        self.is_draining.set(true);
        self.table.drain();
        self.close_gone_later(u64::MAX);
    }

    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        self.table.poll_empty(context)
    }

    fn expire(&self, configuration: Option<&Configuration>) {
        let Some(configuration) = configuration else {
            return self.table.close_some(|_, _| true);
        };
        // A configuration without a stream block has no sessions.
        let Some(expired) = configuration.protocol::<StreamConfiguration>() else { return };
        self.close_gone(expired.generation);
    }

    fn connection_count(&self) -> usize {
        self.table.len()
    }
}

impl Session {
    /// Logs that the client has connected.
    pub(super) fn log_connected(&self) {
        let udp = if self.datagrams().is_some() { "udp " } else { "" };
        let connection = &self.connection;
        let (remote, listening) = (&connection.remote, &connection.listening);
        self.log_bare(Level::Info, format_args!("{udp}client {remote} connected to {listening}"));
    }
}
