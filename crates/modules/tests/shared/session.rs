//! A toy protocol: a `stream` block with sessions that are not requests. It implements only what the shared modules
//! need.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_config::{
    Body, Contexts, Custom, Diagnostic, Files, ManyWith, One, Setting, Sources, Statement, Takes, parse_text, slot,
    values,
};
use gale_engine::configuration::{BlockBuilder, BlockDraft, Builder, ScopeRef, ScopeTree};
use gale_engine::connections::ConnectionInfo;
use gale_engine::module::{ConfType, Directive, Module, Order, SharedConf};
use gale_engine::variables::subject::{Evaluation, Subject, Values};
use gale_engine::variables::template::Template;
use gale_engine::variables::{HasVariables, Variable, VariableTable, VariablesDraft};
use gale_log::ErrorLog;
use gale_modules::shared::access::{Rule, rule};
use gale_modules::shared::limit_conn::{Counting, Limits, append_status, zone_directive};
use gale_modules::shared::log_format::Formats;
use gale_modules::shared::realip::{self, Trusted, trusted};
use gale_modules::shared::{geo, map, split_clients};
use gale_process::{BuildRequest, ListenAddress, Resources};
use gale_runtime::{Moment, SocketAddress};
use gale_worker::notes::Notes;

/// A client's session.
pub struct Session {
    configuration: Arc<Configuration>,
    connection: ConnectionInfo,
    client: OnceCell<SocketAddress>,
    values: Values,
    evaluation: Evaluation,
    notes: RefCell<Notes>,
    held: Notes,
    /// Messages written to the error log.
    pub told: RefCell<Vec<String>>,
}

impl Session {
    /// Creates a session of a client with this address.
    pub fn new(configuration: &Arc<Configuration>, client: &str) -> Session {
        let remote = SocketAddress::Inet((client.parse::<std::net::IpAddr>().unwrap(), 4711).into());
        let listening = Rc::new(ListenAddress::Inet(([127, 0, 0, 1], 25).into()));
        Session {
            configuration: Arc::clone(configuration),
            connection: ConnectionInfo::new(7, remote, listening, Moment::from_nanos(0)),
            client: OnceCell::new(),
            values: Values::default(),
            evaluation: Evaluation::default(),
            notes: RefCell::default(),
            held: Notes::default(),
            told: RefCell::default(),
        }
    }

    /// Returns the text of the line `text NAME TEXT` of the configuration, expanded for this session.
    pub fn text(&self, name: &str) -> String {
        let texts = self.configuration.conf().texts.get();
        let text = texts.iter().find(|text| text.name == name).expect("a text of this name");
        String::from_utf8(text.text.evaluate(self)).unwrap()
    }
}

impl Counting for Session {
    const FIGURES: &'static str = "toy limit_conn";
}

impl Subject for Session {
    type Block = StreamBuilder;

    fn connection(&self) -> &ConnectionInfo {
        &self.connection
    }

    fn remote(&self) -> &SocketAddress {
        self.client.get().unwrap_or(&self.connection.remote)
    }

    fn is_remote_set(&self) -> bool {
        self.client.get().is_some()
    }

    fn set_remote(&self, address: SocketAddress) {
        self.client.get_or_init(|| address);
    }

    fn shared_note<T: Default + 'static>(&self) -> Rc<T> {
        let mut notes = self.notes.borrow_mut();
        if !notes.has::<Rc<T>>() {
            notes.put(Rc::<T>::default());
        }
        Rc::clone(notes.get().expect("it was put there"))
    }

    fn hold<T: 'static>(&mut self, value: T) {
        self.held.put(value);
    }

    fn variables(&self) -> &VariableTable<Session> {
        &self.configuration.variables
    }

    fn values(&self) -> &Values {
        &self.values
    }

    fn evaluation(&self) -> &Evaluation {
        &self.evaluation
    }

    fn log(&self, _: Level, message: fmt::Arguments<'_>) {
        self.told.borrow_mut().push(message.to_string());
    }

    fn error_log(&self) -> &Arc<ErrorLog> {
        &self.configuration.error_log
    }
}

/// The complete block.
pub struct Configuration {
    variables: VariableTable<Session>,
    conf: SharedConf,
    error_log: Arc<ErrorLog>,
}

impl Configuration {
    /// The settings of the block.
    pub fn conf(&self) -> &Conf {
        self.conf.downcast_ref().expect("the toy's settings")
    }
}

/// The block while it is parsed.
#[derive(Default)]
pub struct StreamBuilder {
    variables: VariablesDraft<Session>,
    tree: ScopeTree,
}

impl BlockBuilder for StreamBuilder {
    fn scopes(&mut self) -> &mut ScopeTree {
        &mut self.tree
    }
}

impl HasVariables<Session> for StreamBuilder {
    fn variables(&mut self) -> &mut VariablesDraft<Session> {
        &mut self.variables
    }
}

/// The settings of the block.
#[derive(Default)]
pub struct Conf {
    pub rules: Setting<Vec<Rule>>,
    pub limits: Limits<Session>,
    pub trusted: Setting<Vec<Trusted>>,
    pub formats: Formats<Session>,
    texts: Setting<Vec<Text>>,
}

#[derive(Clone)]
struct Text {
    name: String,
    text: Template<Session>,
}

/// Counterpart of `HttpPart`.
struct StreamPart {
    variables: &'static [Variable<Session>],
}

static MODULE: Module = Module {
    name: "stream_toy",
    directives: &[
        Directive { name: "stream", contexts: Contexts::MAIN, body: Body::Block, store: &Custom(stream_block), ..ROW },
        map::directive::<Session>(Contexts::STREAM),
        geo::directive::<Session, ()>(Contexts::STREAM),
        split_clients::directive::<Session>(Contexts::STREAM),
        zone_directive::<Session>(Contexts::STREAM),
        Directive {
            name: "limit_conn",
            takes: Takes::Exactly(2),
            store: &Custom(|conf: &mut Conf, builder, statement| conf.limits.add(builder, statement)),
            ..ROW
        },
        Directive {
            name: "limit_conn_log_level",
            takes: Takes::Exactly(1),
            default: "error",
            store: &One { parse: |_| Ok(Level::Error), slot: slot!(Conf, limits.log_level) },
            ..ROW
        },
        Directive {
            name: "limit_conn_dry_run",
            takes: Takes::Flag,
            default: "off",
            store: &One { parse: values::flag, slot: slot!(Conf, limits.dry_run) },
            ..ROW
        },
        Directive {
            name: "allow",
            takes: Takes::Exactly(1),
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, true), slot: slot!(Conf, rules) },
            ..ROW
        },
        Directive {
            name: "deny",
            takes: Takes::Exactly(1),
            store: &ManyWith { parse: |builder, statement| rule(builder, statement, false), slot: slot!(Conf, rules) },
            ..ROW
        },
        Directive {
            name: "set_real_ip_from",
            takes: Takes::Exactly(1),
            store: &ManyWith { parse: trusted, slot: slot!(Conf, trusted) },
            ..ROW
        },
        Directive {
            name: "log_format",
            takes: Takes::AtLeast(2),
            store: &Custom(|conf: &mut Conf, builder, statement| conf.formats.add(builder, statement)),
            ..ROW
        },
        Directive {
            name: "text",
            takes: Takes::Exactly(2),
            store: &ManyWith { parse: text, slot: slot!(Conf, texts) },
            ..ROW
        },
    ],
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[
        &StreamPart {
            variables: &[
                Variable::named("connection", |session: &Session, _, out| {
                    out.extend_from_slice(session.connection.number.to_string().as_bytes());
                    true
                }),
                Variable::named("limit_conn_status", append_status),
            ],
        },
        &StreamPart { variables: &realip::variables::<Session>() },
    ],
};

const ROW: Directive = Directive {
    name: "",
    contexts: Contexts::STREAM,
    takes: Takes::Exactly(0),
    body: Body::None,
    default: "",
    about: "",
    store: &gale_config::Inert,
};

static ORDER: Order = Order { modules: &[&MODULE], protocols: &[], figures: None };

fn stream_block(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let mut stream = StreamBuilder::default();
    let scope = stream.tree.add_root(builder);
    builder.open_block(stream, never_complete);
    builder.walk(statement.body(), Contexts::STREAM, ScopeRef::Block(scope));
    Ok(())
}

fn never_complete(_: &mut Builder, _: &mut dyn Resources) -> Result<Box<dyn BlockDraft>, Diagnostic> {
    unreachable!("a test completes the block by itself")
}

fn text(builder: &mut Builder, statement: &Statement) -> Result<Text, Diagnostic> {
    let [name, text] = statement.args.as_slice() else { unreachable!("two arguments") };
    Ok(Text { name: name.text.to_string(), text: builder.variables::<Session>().template(text)? })
}

fn merge(conf: &mut dyn std::any::Any, _: Option<&dyn std::any::Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    conf.downcast_mut::<Conf>().expect("the toy's settings").limits.inherit(None);
    Ok(())
}

/// Parses and completes the contents of a `stream` block.
///
/// # Errors
/// The messages of all errors.
pub fn read(text: &str) -> Result<Arc<Configuration>, Vec<String>> {
    let request = BuildRequest {
        program: "gale".to_owned(),
        configuration_path: "/etc/gale/gale.conf".into(),
        prefix: "/srv".into(),
        test: true,
        ..BuildRequest::default()
    };
    let mut builder = Builder::new(&ORDER, &request);
    let text = format!("stream {{ {text} }}");
    let parsed = parse_text(&mut Sources::new(), &mut NoFiles, "test", text.into_bytes(), Path::new("/"));
    builder.walk(&parsed.statements, Contexts::MAIN, ScopeRef::Main);
    let errors: Vec<String> = builder.diagnostics.iter().map(|error| error.message.clone()).collect();
    if !errors.is_empty() {
        return Err(errors);
    }
    let stream = builder.block::<StreamBuilder>().expect("the block was read");
    let (mut tree, variables) = (std::mem::take(&mut stream.tree), std::mem::take(&mut stream.variables));
    let mut confs = tree.complete(&mut builder, Contexts::STREAM, |_| true).map_err(|error| vec![error.message])?;
    let parts = MODULE.parts.iter().filter_map(|part| part.downcast_ref::<StreamPart>());
    let variables = variables.complete(parts.flat_map(|part| part.variables)).map_err(|error| vec![error.message])?;
    let conf = confs[0][0].take().expect("the toy has settings");
    Ok(Arc::new(Configuration { variables, conf, error_log: Arc::new(ErrorLog::new(Vec::new())) }))
}

struct NoFiles;

impl Files for NoFiles {
    fn read(&mut self, _: &Path) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn glob(&mut self, _: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}
