//! A session: a client's connection over TCP, or what a client sends from one port over UDP, with the answers.
//!
//! A session belongs to the task that runs it. Its module's state is in its notes, never in the session itself. It
//! holds the stream block that it began with to its end, whatever is reloaded meanwhile.

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
use gale_engine::notes::{Notes, SharedNotes};
use gale_engine::tls::TlsStream;
use gale_engine::transport::Transport;
use gale_engine::variables::subject::{Evaluation, Subject, Values};
use gale_engine::worker::Worker;
use gale_process::ListenAddress;
use gale_runtime::{Buffer, SocketAddress};

use self::attempts::Attempts;
use self::configuration::{Address, Configured, CoreSettings, Scope, StreamConfiguration};
use self::datagrams::DatagramClient;

/// How a session ends that has gone as it should.
pub const OK: u16 = 200;
/// The client has sent what it must not.
pub const BAD_REQUEST: u16 = 400;
/// The client may not come in.
pub const FORBIDDEN: u16 = 403;
/// Something is wrong here.
pub const INTERNAL_SERVER_ERROR: u16 = 500;
/// No server could be reached.
pub const BAD_GATEWAY: u16 = 502;
/// There is no capacity for the session.
pub const SERVICE_UNAVAILABLE: u16 = 503;

/// See the file's head.
pub struct Session {
    /// What the client has sent and nobody has taken.
    pub input: Buffer,
    /// What modules write down about it.
    pub notes: Notes,
    /// The servers that it was passed to.
    pub attempts: Attempts,
    pub(crate) configuration: Rc<Configured>,
    pub(crate) worker: Rc<Worker>,
    /// Which of the configuration's addresses it came to.
    place: usize,
    server: ServerId,
    pub(crate) connection: ConnectionInfo,
    client: Client,
    /// Where it comes from, if somebody knows better than the connection.
    pub(crate) address: OnceCell<SocketAddress>,
    pub(crate) values: Values,
    pub(crate) evaluation: Evaluation,
    pub(crate) shared_notes: RefCell<SharedNotes>,
    pub(crate) held: Notes,
    /// What came from the client, in bytes.
    received: Cell<u64>,
    /// What went to the client, in bytes.
    sent: Cell<u64>,
    status: Cell<u16>,
}

/// The client's end.
pub enum Client {
    /// Over TCP or a Unix socket.
    Stream(Transport),
    /// Over UDP.
    Datagrams(DatagramClient),
    /// It is somebody else's by now.
    Passed,
}

impl Session {
    /// A session that begins at the address `place` of the configuration.
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

    /// A session of our own, without a client: what is said of servers is evaluated with it when nobody comes.
    pub fn own(configuration: Rc<Configured>, worker: Rc<Worker>, server: ServerId) -> Session {
        let nowhere = Rc::new(ListenAddress::Unix(PathBuf::new()));
        let connection = ConnectionInfo::new(0, SocketAddress::Unix(None), nowhere, gale_runtime::now());
        let mut session = Session::new(configuration, worker, 0, connection, Client::Passed);
        session.server = server;
        session
    }

    /// The block that it began with.
    pub fn configuration(&self) -> &Rc<Configured> {
        &self.configuration
    }

    /// The block that it began with.
    pub fn stream(&self) -> &StreamConfiguration {
        self.configuration.stream()
    }

    /// What the protocols of its loop share.
    pub fn worker(&self) -> &Rc<Worker> {
        &self.worker
    }

    /// The address that it came to.
    pub fn place(&self) -> &Address {
        &self.stream().addresses[self.place]
    }

    /// The server that it is for: the address' default one, unless the client has named another.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// The name that the client has given belongs to this server.
    pub fn set_server(&mut self, server: ServerId) {
        self.server = server;
    }

    /// Its server's settings.
    pub fn scope(&self) -> &Scope {
        self.stream().scope_of(self.server)
    }

    /// Its server's core settings.
    pub fn core(&self) -> &CoreSettings {
        &self.scope().core
    }

    /// The client's end.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The client's end, which somebody else goes on with.
    pub fn take_client(&mut self) -> Client {
        std::mem::replace(&mut self.client, Client::Passed)
    }

    /// Nobody else has gone on with the client's end.
    pub fn give_back(&mut self, client: Client) {
        self.client = client;
    }

    /// The client's connection; `None` over UDP.
    pub fn transport(&self) -> Option<&Transport> {
        match &self.client {
            Client::Stream(transport) => Some(transport),
            Client::Datagrams(_) | Client::Passed => None,
        }
    }

    /// The client's end over UDP.
    pub fn datagrams(&self) -> Option<&DatagramClient> {
        match &self.client {
            Client::Datagrams(client) => Some(client),
            Client::Stream(_) | Client::Passed => None,
        }
    }

    /// `$protocol`
    pub fn protocol(&self) -> &'static str {
        if self.datagrams().is_some() { "UDP" } else { "TCP" }
    }

    /// Our address, as the client sees it.
    pub fn local_address(&self) -> Option<&SocketAddress> {
        self.connection.local(|| match &self.client {
            Client::Stream(transport) => transport.local_address().ok(),
            Client::Datagrams(client) => Some(client.local_address()),
            Client::Passed => None,
        })
    }

    /// How much came from the client so far, in bytes.
    pub fn received(&self) -> u64 {
        self.datagrams().map_or(self.received.get(), DatagramClient::bytes)
    }

    /// So much has come from the client, over TCP. (Datagrams are counted where they come in.)
    pub fn count_received(&self, bytes: usize) {
        self.received.set(self.received.get() + bytes as u64);
    }

    /// How much went to the client so far, in bytes.
    pub fn sent(&self) -> u64 {
        self.sent.get()
    }

    /// So much has gone to the client.
    pub fn count_sent(&self, bytes: usize) {
        self.sent.set(self.sent.get() + bytes as u64);
    }

    /// What its connection takes along when it is passed to another address.
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

    /// Nobody has taken it.
    pub fn give_back_carried(&mut self, carried: Carried) {
        let notes = carried.held.into_iter().find_map(|held| held.downcast().ok());
        self.held = notes.map(|notes| *notes).unwrap_or_default();
    }

    /// How it has ended; 0 as long as it has not.
    pub fn status(&self) -> u16 {
        self.status.get()
    }

    /// It ends with this status.
    pub fn set_status(&self, status: u16) {
        self.status.set(status);
    }

    /// Writes a line to the error log that is in force, without what is known of the session.
    pub fn log_bare(&self, level: Level, message: fmt::Arguments<'_>) {
        self.scope().error_log.write(level, Some(self.connection.number), &message);
    }
}

impl Session {
    /// The client's connection, if it speaks TLS or may come to.
    pub fn tls(&self) -> Option<&TlsStream> {
        self.transport()?.tls()
    }
}

impl Session {
    /// The client has asked for a host of this name, in lower case: its session is that of the server which has it. An
    /// expression that cannot be run finds none.
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
