//! A second protocol beside http: a block that echoes its input, built only from the engine's interface for protocols.
//! It proves that the engine can serve other protocols than http.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::{BlockBuilder, BlockDraft, Builder, Configuration, ScopeRef, ScopeTree, ServerId};
use gale_engine::connections::{Connection, ConnectionInfo, ConnectionTable};
use gale_engine::listen::{Address, Listen, ListenDefaults, ListenPlan};
use gale_engine::module::{Directive, Module, Order};
use gale_engine::protocol::{Protocol, ProtocolWorker};
use gale_modules::order::ORDER;
use gale_process::{Account, ListenAddress, ListenSpec, ListenerHandle, Resources, Successor, Worker as _};
use gale_runtime::simulation::{Faults, Simulation, each_seed};
use gale_runtime::{Buffer, Moment, Output, SocketAddress, Stream, sleep};
use gale_tls::Transport;
use gale_worker::Worker;
use gale_worker::service::{self, Service, ServiceSpec};

use crate::support::address;
use crate::support::{SLOT, Site};

static ECHO: Module = Module {
    name: "echo",
    directives: &[
        Directive {
            name: "echo",
            contexts: Contexts::MAIN,
            takes: Takes::Exactly(0),
            body: Body::Block,
            default: "",
            about: "Echoes what is sent to its addresses.",
            store: &Custom(block),
        },
        Directive {
            name: "listen",
            contexts: Contexts::STREAM,
            takes: Takes::AtLeast(1),
            body: Body::None,
            default: "",
            about: "An address.",
            store: &Custom(listen),
        },
    ],
    ..Module::EMPTY
};

/// Not deferred, as for protocols in which the server speaks first.
const DEFAULTS: ListenDefaults = ListenDefaults { port: 7, deferred: false, datagrams: false };

#[derive(Default)]
struct EchoBuilder {
    scopes: ScopeTree,
    listens: Vec<Listen>,
}

impl BlockBuilder for EchoBuilder {
    fn scopes(&mut self) -> &mut ScopeTree {
        &mut self.scopes
    }
}

fn block(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut echo = EchoBuilder::default();
    let scope = echo.scopes.add_root(builder);
    builder.open_block(echo, complete);
    builder.walk(statement.body(), Contexts::STREAM, ScopeRef::Block(scope));
    builder.add_service(ServiceSpec::per_worker("echo pulse", Pulse), statement.span)
}

/// A service beside the protocol's connections.
struct Pulse;

thread_local! {
    static PULSES: Cell<u32> = const { Cell::new(0) };
}

impl Service for Pulse {
    async fn run(context: service::Context<Self>) {
        context.every(Duration::from_secs(10), async || PULSES.set(PULSES.get() + 1)).await;
    }
}

fn listen(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let (listen, warnings) = Listen::parse(statement, DEFAULTS)?;
    builder.note(warnings);
    builder.block::<EchoBuilder>().expect("inside of the block").listens.push(listen);
    Ok(())
}

fn complete(builder: &mut Builder, resources: &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic> {
    let listens = std::mem::take(&mut builder.block::<EchoBuilder>().expect("it is being completed").listens);
    let mut addresses = Vec::new();
    for listen in &listens {
        listen.add_to(&mut addresses, ServerId(0), builder, resources)?;
    }
    Ok(Box::new(EchoDraft(ListenPlan::new(addresses))))
}

struct EchoDraft(ListenPlan);

impl BlockDraft for EchoDraft {
    fn listens(&self) -> Vec<ListenSpec> {
        self.0.specs()
    }

    fn prepare(&self, _: &mut dyn Resources, _: Option<&Account>) -> Result<(), Diagnostic> {
        Ok(())
    }

    fn finish(self: Box<Self>, listeners: Vec<ListenerHandle>) -> Arc<dyn Protocol> {
        Arc::new(Echo { addresses: self.0.addresses(&listeners) })
    }
}

struct Echo {
    addresses: Vec<Address>,
}

impl Protocol for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn listeners(&self) -> Vec<ListenerHandle> {
        self.addresses.iter().map(|address| Arc::clone(&address.listener)).collect()
    }

    fn start(&self, worker: &Rc<Worker>, _: &Arc<Configuration>) -> Rc<dyn ProtocolWorker> {
        Rc::new(EchoWorker { connections: ConnectionTable::new(Rc::clone(worker)) })
    }
}

struct EchoWorker {
    connections: Rc<ConnectionTable<Session>>,
}

impl ProtocolWorker for EchoWorker {
    fn commit(&self, _: &Arc<Configuration>) {}

    fn serve(
        self: Rc<Self>,
        transport: Transport,
        remote: SocketAddress,
        address: &Rc<ListenAddress>,
        _: Option<&Arc<Configuration>>,
    ) {
        let info = ConnectionInfo::accepted(remote, Rc::clone(address));
        assert!(info.number > 0);
        let connections = Rc::clone(&self.connections);
        let session = Rc::new(Session { transport, connections, number: Cell::new(None), idle: Cell::new(None) });
        let number = self.connections.insert(&session);
        session.number.set(Some(number));
        self.connections.set_task(number, gale_runtime::spawn(session.run()));
    }

    fn drain(self: Rc<Self>, _: Option<&Successor>) {
        self.connections.drain();
    }

    fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        self.connections.poll_empty(context)
    }

    fn expire(&self, configuration: Option<&Configuration>) {
        self.connections.close_some(|_, _| configuration.is_none());
    }

    fn connection_count(&self) -> usize {
        self.connections.len()
    }
}

/// A connection that echoes.
struct Session {
    transport: Transport,
    connections: Rc<ConnectionTable<Session>>,
    number: Cell<Option<usize>>,
    idle: Cell<Option<Moment>>,
}

impl Connection for Session {
    fn may_close_at(&self) -> Option<Moment> {
        self.idle.get()
    }
}

impl Session {
    async fn run(self: Rc<Self>) {
        let (mut input, mut output) = (Buffer::new(), Output::new());
        loop {
            self.idle.set(Some(gale_runtime::now()));
            self.number.get().into_iter().for_each(|number| self.connections.note_idle(number));
            let received = poll_fn(|context| self.transport.poll_recv(context, &mut input, 4096)).await;
            self.idle.set(None);
            if !matches!(received, Ok(1..)) || output.append(input.readable()).is_err() {
                return;
            }
            input.clear();
            while !output.is_empty() {
                if poll_fn(|context| self.transport.poll_send(context, &mut output)).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.number.get().into_iter().for_each(|number| self.connections.remove(number));
    }
}

const ECHO_ADDRESS: &str = "192.0.2.1:7";

fn echo_address() -> SocketAddress {
    SocketAddress::Inet(ECHO_ADDRESS.parse().expect("an address"))
}

/// Both protocols, with room for two connections.
const BOTH: &str = "error_log /log; events { worker_connections 2; } echo { listen 192.0.2.1:7; }
    http { access_log off; client_body_temp_path %TEMP%; server { listen %ADDRESS%; return 200 hello; } }";
const HTTP_ALONE: &str = "error_log /log; events { worker_connections 2; }
    http { access_log off; client_body_temp_path %TEMP%; server { listen %ADDRESS%; return 200 hello; } }";

/// Gale's modules and the echo.
fn order() -> &'static Order {
    let mut modules = ORDER.modules.to_vec();
    modules.push(&ECHO);
    Box::leak(Box::new(Order { modules: modules.leak(), protocols: ORDER.protocols, figures: None }))
}

/// Sends a text and reads as many bytes; `None` when the connection is closed before.
async fn echoed(stream: &Stream, text: &[u8]) -> Option<Vec<u8>> {
    let mut output = Output::new();
    output.append(text).expect("memory");
    stream.send_all(&mut output).await.ok()?;
    let mut input = Buffer::new();
    while input.len() < text.len() {
        match stream.recv(&mut input, 4096).await {
            Ok(1..) => {}
            _ => return None,
        }
    }
    Some(input.readable().to_vec())
}

/// `true` if the connection is closed without a byte.
async fn is_closed(stream: &Stream) -> bool {
    let mut input = Buffer::new();
    matches!(stream.recv(&mut input, 100).await, Ok(0) | Err(_))
}

async fn hello_is_answered() -> bool {
    let stream = Stream::connect(&address()).await.expect("http listens");
    let mut output = Output::new();
    output.append(b"GET / HTTP/1.0\r\n\r\n").expect("memory");
    stream.send_all(&mut output).await.expect("sent");
    let mut input = Buffer::new();
    while matches!(stream.recv(&mut input, 4096).await, Ok(1..)) {}
    input.readable().ends_with(b"hello")
}

#[test]
fn two_protocols_are_served_by_one_loop_and_count_together() {
    each_seed(20, |simulation| {
        Site::with_order(simulation, order(), BOTH).run(Default::default(), async |serving| {
            let stream = Stream::connect(&echo_address()).await.expect("the echo listens");
            assert_eq!(echoed(&stream, b"one").await.as_deref(), Some(&b"one"[..]));
            assert!(hello_is_answered().await);
            // Room for two connections: the third one takes the place of an idle one of either protocol.
            let others = [echo_address(), echo_address()];
            let mut open = Vec::new();
            for address in others {
                let other = Stream::connect(&address).await.expect("the echo listens");
                assert_eq!(echoed(&other, b"more").await.as_deref(), Some(&b"more"[..]));
                open.push(other);
            }
            assert!(is_closed(&stream).await, "it was idle longest");
            assert!(hello_is_answered().await && serving.connections() <= 2);
        });
    });
}

#[test]
fn a_reload_without_its_block_ends_a_protocol_and_not_the_other() {
    let simulation = Simulation::new(1, Faults::NONE);
    let site = Site::with_order(&simulation, order(), BOTH);
    site.run(Default::default(), async |serving| {
        let stream = Stream::connect(&echo_address()).await.expect("the echo listens");
        assert_eq!(echoed(&stream, b"one").await.as_deref(), Some(&b"one"[..]));
        // The same configuration again leaves connections alone.
        serving.commit(SLOT, site.build()).await;
        assert_eq!(echoed(&stream, b"two").await.as_deref(), Some(&b"two"[..]));
        serving.commit(SLOT, site.build_text(HTTP_ALONE)).await;
        assert!(is_closed(&stream).await, "it was idle");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(serving.connections(), 0);
        assert!(hello_is_answered().await);
    });
}

#[test]
fn a_service_of_a_protocol_runs_as_long_as_its_block_is_there() {
    let simulation = Simulation::new(1, Faults::NONE);
    let site = Site::with_order(&simulation, order(), BOTH);
    site.run(Default::default(), async |serving| {
        sleep(Duration::from_secs(25)).await;
        assert_eq!(PULSES.take(), 3);
        serving.commit(SLOT, site.build_text(HTTP_ALONE)).await;
        serving.settled();
        sleep(Duration::from_secs(100)).await;
        assert_eq!(PULSES.take(), 0);
        serving.commit(SLOT, site.build()).await;
        serving.settled();
        sleep(Duration::from_secs(5)).await;
        assert_eq!(PULSES.take(), 1);
        serving.drain(None).await;
        sleep(Duration::from_secs(100)).await;
        assert_eq!(PULSES.take(), 0);
    });
}

#[test]
fn an_address_belongs_to_one_protocol() {
    let simulation = Simulation::new(1, Faults::NONE);
    let site = Site::with_order(&simulation, order(), &BOTH.replace("listen 192.0.2.1:7", "listen %ADDRESS%"));
    let message = site.refusal();
    assert!(message.contains("[emerg] a duplicate listen 192.0.2.1:80"), "{message}");
}

#[test]
fn a_protocol_that_is_gone_holds_no_configuration() {
    let simulation = Simulation::new(1, Faults::NONE);
    let site = Site::with_order(&simulation, order(), BOTH);
    site.run(Default::default(), async |serving| {
        let without_http = site.build_text("error_log /log; events { } echo { listen 192.0.2.1:7; }");
        let old = site.build();
        let is_held = Arc::downgrade(&old);
        serving.commit(SLOT, old).await;
        assert!(hello_is_answered().await);
        serving.commit(SLOT, without_http).await;
        sleep(Duration::from_secs(5)).await;
        assert_eq!(is_held.strong_count(), 0);
    });
}

#[test]
fn a_protocol_is_drained_with_the_worker() {
    let simulation = Simulation::new(1, Faults::NONE);
    Site::with_order(&simulation, order(), BOTH).run(Default::default(), async |serving| {
        let stream = Stream::connect(&echo_address()).await.expect("the echo listens");
        assert_eq!(echoed(&stream, b"one").await.as_deref(), Some(&b"one"[..]));
        serving.stop_accepting(true).await;
        serving.drain(None).await;
        assert!(is_closed(&stream).await && serving.connections() == 0);
    });
}
