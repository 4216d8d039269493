//! A session: a client's TCP connection, or the datagrams from one client port over UDP, with the answers.
//!
//! A session belongs to the task that runs it. Modules keep their state in its notes, never in fields. It holds the
//! stream block that it began with until its end, also after a reload.

pub mod attempts;
pub mod configuration;
pub mod datagrams;
mod lingering;
pub mod loss;
pub mod phases;

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

use gale_base::log_level::Level;
use gale_engine::configuration::ServerId;
use gale_engine::connections::{Carried, ConnectionInfo};
use gale_engine::variables::subject::{Evaluation, Subject, Values};
use gale_process::ListenAddress;
use gale_runtime::{Buffer, SocketAddress};
use gale_tls::TlsStream;
use gale_tls::Transport;
use gale_worker::Worker;
use gale_worker::notes::{Notes, SharedNotes};

use self::attempts::Attempts;
use self::configuration::{Address, Configured, CoreSettings, Scope, StreamConfiguration};
use self::datagrams::DatagramClient;

/// The session ended normally.
pub const OK: u16 = 200;
/// The client sent invalid data.
pub const BAD_REQUEST: u16 = 400;
/// Access is denied.
pub const FORBIDDEN: u16 = 403;
/// Internal error.
pub const INTERNAL_SERVER_ERROR: u16 = 500;
/// No server could be reached.
pub const BAD_GATEWAY: u16 = 502;
/// A limit on connections or sessions was reached.
pub const SERVICE_UNAVAILABLE: u16 = 503;

/// See the module's documentation.
pub struct Session {
    /// Bytes received from the client and not yet consumed.
    pub input: Buffer,
    /// State of modules.
    pub notes: Notes,
    /// Attempts with servers.
    pub attempts: Attempts,
    pub(crate) configuration: Rc<Configured>,
    pub(crate) worker: Rc<Worker>,
    /// Index of the address that accepted the session.
    place: usize,
    server: ServerId,
    pub(crate) connection: ConnectionInfo,
    client: Client,
    /// Client address from a trusted source, such as the PROXY protocol, if it replaces that of the connection.
    pub(crate) address: OnceCell<SocketAddress>,
    pub(crate) values: Values,
    pub(crate) evaluation: Evaluation,
    pub(crate) shared_notes: RefCell<SharedNotes>,
    pub(crate) held: Notes,
    /// Bytes received from the client.
    received: Cell<u64>,
    /// Bytes sent to the client.
    sent: Cell<u64>,
    status: Cell<u16>,
}

/// The client's end of a session.
pub enum Client {
    /// Over TCP or a Unix socket.
    Stream(Transport),
    /// Over UDP.
    Datagrams(DatagramClient),
    /// Taken by another owner, or never there.
    Passed,
}

impl Session {
    /// Returns a session that begins at the address `place` of the configuration.
    pub fn new(
        configuration: Rc<Configured>,
        worker: Rc<Worker>,
        place: usize,
        connection: ConnectionInfo,
        client: Client,
    ) -> Session {
        let server = configuration.stream().addresses[place].servers.default;
        Session {
            input: Buffer::new(),
            notes: Notes::default(),
            attempts: Attempts::default(),
            configuration,
            worker,
            place,
            server,
            connection,
            client,
            address: OnceCell::new(),
            values: Values::default(),
            evaluation: Evaluation::default(),
            shared_notes: RefCell::default(),
            held: Notes::default(),
            received: Cell::new(0),
            sent: Cell::new(0),
            status: Cell::new(0),
        }
    }

    /// Returns a session without a client, for evaluating server settings outside of any client's session.
    pub fn own(configuration: Rc<Configured>, worker: Rc<Worker>, server: ServerId) -> Session {
        let nowhere = Rc::new(ListenAddress::Unix(PathBuf::new()));
        let connection = ConnectionInfo::new(0, SocketAddress::Unix(None), nowhere, gale_runtime::now());
        let mut session = Session::new(configuration, worker, 0, connection, Client::Passed);
        session.server = server;
        session
    }

    /// Returns the handle on the configuration that the session began with.
    pub fn configuration(&self) -> &Rc<Configured> {
        &self.configuration
    }

    /// Returns the stream block that the session began with.
    pub fn stream(&self) -> &StreamConfiguration {
        self.configuration.stream()
    }

    /// Returns the state that all protocols of the loop share.
    pub fn worker(&self) -> &Rc<Worker> {
        &self.worker
    }

    /// Returns the address that accepted the session.
    pub fn place(&self) -> &Address {
        &self.stream().addresses[self.place]
    }

    /// Returns the session's server: the address's default server, unless the client has named another.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// Selects the server.
    pub fn set_server(&mut self, server: ServerId) {
        self.server = server;
    }

    /// Returns the settings of its server.
    pub fn scope(&self) -> &Scope {
        self.stream().scope_of(self.server)
    }

    /// Returns the core settings of its server.
    pub fn core(&self) -> &CoreSettings {
        &self.scope().core
    }

    /// Returns the client's end.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Takes the client's end, to pass it on.
    pub fn take_client(&mut self) -> Client {
        std::mem::replace(&mut self.client, Client::Passed)
    }

    /// Puts back a client's end that was not passed on.
    pub fn give_back(&mut self, client: Client) {
        self.client = client;
    }

    /// Returns the client's connection; `None` over UDP.
    pub fn transport(&self) -> Option<&Transport> {
        match &self.client {
            Client::Stream(transport) => Some(transport),
            Client::Datagrams(_) | Client::Passed => None,
        }
    }

    /// Returns the client's end over UDP; `None` over TCP.
    pub fn datagrams(&self) -> Option<&DatagramClient> {
        match &self.client {
            Client::Datagrams(client) => Some(client),
            Client::Stream(_) | Client::Passed => None,
        }
    }

    /// Value of `$protocol`.
    pub fn protocol(&self) -> &'static str {
        if self.datagrams().is_some() { "UDP" } else { "TCP" }
    }

    /// Returns the local address that the client sees.
    pub fn local_address(&self) -> Option<&SocketAddress> {
        self.connection.local(|| match &self.client {
            Client::Stream(transport) => transport.local_address().ok(),
            Client::Datagrams(client) => Some(client.local_address()),
            Client::Passed => None,
        })
    }

    /// Bytes received from the client.
    pub fn received(&self) -> u64 {
        self.datagrams().map_or(self.received.get(), DatagramClient::bytes)
    }

    /// Counts bytes received over TCP. (Datagrams are counted by [`DatagramClient`].)
    pub fn count_received(&self, bytes: usize) {
        self.received.set(self.received.get() + bytes as u64);
    }

    /// Bytes sent to the client.
    pub fn sent(&self) -> u64 {
        self.sent.get()
    }

    /// Counts bytes sent to the client.
    pub fn count_sent(&self, bytes: usize) {
        self.sent.set(self.sent.get() + bytes as u64);
    }

    /// Takes the state that stays with the connection when it is passed to another address.
    pub fn take_carried(&mut self) -> Carried {
        let mut held = self.connection.take_held();
        held.insert(0, Box::new(std::mem::take(&mut self.held)));
        Carried {
            resumed: None,
            passes: self.connection.passes() + 1,
            proxied: self.connection.proxied().cloned().map(Box::new),
            held,
        }
    }

    /// Puts back the state of a connection that was not passed on.
    pub fn give_back_carried(&mut self, carried: Carried) {
        let notes = carried.held.into_iter().find_map(|held| held.downcast().ok());
        self.held = notes.map(|notes| *notes).unwrap_or_default();
    }

    /// Returns the final status; 0 while the session runs.
    pub fn status(&self) -> u16 {
        self.status.get()
    }

    /// Sets the final status.
    pub fn set_status(&self, status: u16) {
        self.status.set(status);
    }

    /// Writes a line to the error log without the session's fields.
    pub fn log_bare(&self, level: Level, message: fmt::Arguments<'_>) {
        self.scope().error_log.write(level, Some(self.connection.number), &message);
    }
}

impl Session {
    /// Returns the client's connection if it uses TLS, or may still begin to.
    pub fn tls(&self) -> Option<&TlsStream> {
        self.transport()?.tls()
    }
}

impl Session {
    /// Selects the server with this name, which is in lower case. A regular expression that fails to run matches
    /// nothing.
    pub fn choose_server(&mut self, name: &[u8]) {
        let configuration = Rc::clone(&self.configuration);
        let servers = &configuration.stream().addresses[self.place].servers;
        let Some((server, matched)) = servers.names.find(name).ok().flatten() else { return };
        self.server = server;
        if let Some(matched) = matched {
            self.take_match(matched, name);
        }
    }
}
