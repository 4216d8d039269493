//! test_hooks: handlers for tests of the whole program, built only with the feature `test-hooks`, which `cargo test`
//! enables.
//!   test_panic [waiting];    location    panics, at once or in a separate future
//!   test_echo;               location    sends the request's body back while it is received
//!   test_head STATUS PHRASE [FIELD ...];
//!                            location    answers with this head, as a proxy does; FIELD is NAME:VALUE
//!   test_tunnel;             location    opens a tunnel that sends everything back
//!   test_store_body;         location    reads the whole body and describes how it was stored
//!   test_worker;             location    answers with the number of its worker
//!   test_count_body [held];  location    reads and drops the body; held: after its release
//!   test_release;            location    releases the requests that this worker holds
//!   test_early_hints;        location    sends 103 (RFC 8297) before the response
//!   test_stall FIFO;         location    blocks the whole event loop until a writer writes to or closes the FIFO
//!   test_pool NAME SOCKET [DEVICE];
//!                            location    connects to the socket in a thread of the pool and waits for its end
//!   test_leases [BYTES];     location    sets and shows the maximum number of leased bytes of the worker
//!   test_pools;              location    describes the state of the thread pools
//!   test_files;              location    describes the delivery of files
//!   test_resolve NAME;       location    answers with the addresses of a name, or the error
//!   test_attempt HOW WHAT;   location    tries an operation that worker processes never use (exec, call,
//!                                        write, read, connect) and answers with the error number
//!
//! They exercise paths that no other module reaches yet: a panic, a response that begins before the request has ended,
//! a stored body, a consumer that stalls, an interim response, a stall, a separate thread pool. Nothing may depend on
//! them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::units;
use gale_config::{Body as BlockBody, Contexts, Custom, Diagnostic, Statement, Takes, values};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::Rung;
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::exchange::BodyLimits;
use gale_http::request::files::thread_pool::PoolName;
use gale_http::request::phases::{Decide, Flow, LocalBoxFuture, Phase, Wait};
use gale_http::request::request_body::{StoredBody, log_error, read_body};
use gale_http::request::response::Reason;
use gale_http::request::tunnel::Tunnel;
use gale_http::variables::template::Template;
use gale_protocol::response::ResponseField;
use gale_runtime::{Bytes, Device, PoolCounters};
use gale_spool::SpoolError;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_test_hooks",
    directives: &[
        Directive {
            name: "test_panic",
            takes: Takes::Between(0, 1),
            about: "For tests: panics.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, statement| set_panic(conf, statement)),
            ..HOOK
        },
        Directive {
            name: "test_echo",
            about: "For tests: sends the request's body back while it is still coming.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Echo)),
            ..HOOK
        },
        Directive {
            name: "test_head",
            takes: Takes::AtLeast(2),
            about: "For tests: answers with this status, reason phrase and fields, as a proxy does.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, statement| set_head(conf, statement)),
            ..HOOK
        },
        Directive {
            name: "test_tunnel",
            about: "For tests: becomes a tunnel that sends everything back.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Tunnel)),
            ..HOOK
        },
        Directive {
            name: "test_store_body",
            about: "For tests: reads the whole body of the request and tells what became of it.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::StoreBody)),
            ..HOOK
        },
        Directive {
            name: "test_worker",
            about: "For tests: tells the worker's number.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Worker)),
            ..HOOK
        },
        Directive {
            name: "test_stall",
            takes: Takes::Exactly(1),
            about: "For tests: blocks the event loop.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, statement| {
                conf.stalls_by = Some(OsStr::from_bytes(&statement.args[0].text).into());
                Ok(())
            }),
            ..HOOK
        },
        Directive {
            name: "test_count_body",
            takes: Takes::Between(0, 1),
            about: "For tests: reads the whole body of the request and keeps nothing of it.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, statement| set_count(conf, statement)),
            ..HOOK
        },
        Directive {
            name: "test_release",
            about: "For tests: lets this worker's consumers that are held read on.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Release)),
            ..HOOK
        },
        Directive {
            name: "test_early_hints",
            about: "For tests: sends a 103 before the answer, if early_hints lets it.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| {
                conf.sends_early_hints = true;
                Ok(())
            }),
            ..HOOK
        },
        Directive {
            name: "test_pool",
            takes: Takes::Between(2, 3),
            about: "For tests: waits in a thread pool until a Unix socket is closed.",
            store: &Custom(set_pool),
            ..HOOK
        },
        Directive {
            name: "test_leases",
            takes: Takes::Between(0, 2),
            about: "For tests: reports, or changes, the limits on leased and shared bytes.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, statement| set_leases(conf, statement)),
            ..HOOK
        },
        Directive {
            name: "test_pools",
            about: "For tests: tells what the thread pools do.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Pools)),
            ..HOOK
        },
        Directive {
            name: "test_files",
            about: "For tests: tells how files reached the clients.",
            store: &Custom(|conf: &mut Conf, _: &mut Builder, _| set(conf, Answer::Files)),
            ..HOOK
        },
        Directive {
            name: "test_resolve",
            takes: Takes::Exactly(1),
            about: "For tests: resolves a name.",
            store: &Custom(|conf: &mut Conf, builder: &mut Builder, statement| {
                conf.name = Some(builder.http_mut().template(&statement.args[0])?);
                set(conf, Answer::Resolve)
            }),
            ..HOOK
        },
        Directive {
            name: "test_attempt",
            takes: Takes::Exactly(2),
            about: "For tests: does what no worker process does, and tells the error number.",
            store: &Custom(|conf: &mut Conf, builder: &mut Builder, statement| {
                let mut template = |word| builder.http_mut().template(word);
                conf.attempt = Some((template(&statement.args[0])?, template(&statement.args[1])?));
                set(conf, Answer::Attempt)
            }),
            ..HOOK
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[
            (
                Phase::PreAccess,
                &Decide { applies: |conf: &Conf| conf.sends_early_hints, run: |request, _| hint(request) },
            ),
            (Phase::PreAccess, &Decide { applies: |conf: &Conf| conf.stalls_by.is_some(), run: |_, conf| stall(conf) }),
            (
                Phase::Content,
                &Wait { applies: |conf: &Conf| conf.answer.is_some(), first: answer_at_once, then: answer },
            ),
        ],
        ..HttpPart::EMPTY
    }],
};

/// Common fields of the directive rows.
const HOOK: Directive = Directive {
    name: "",
    contexts: Contexts::LOCATION,
    takes: Takes::Exactly(0),
    body: BlockBody::None,
    default: "",
    about: "",
    store: &Custom(|_: &mut (), _: &mut Builder, _| Ok(())),
};

/// Not inherited.
#[derive(Default)]
struct Conf {
    answer: Option<Answer>,
    sends_early_hints: bool,
    stalls_by: Option<PathBuf>,
    /// Arguments of `test_pool`.
    pool: Option<PoolHook>,
    head: Option<HeadHook>,
    /// Argument of `test_resolve`.
    name: Option<Template>,
    /// Arguments of `test_attempt`.
    attempt: Option<(Template, Template)>,
}

struct PoolHook {
    pool: PoolName,
    socket: Template,
    device: Template,
}

/// Arguments of `test_head`: parts of one text.
struct HeadHook {
    status: u16,
    text: Bytes,
    phrase: Range<usize>,
    fields: Vec<(Range<usize>, Range<usize>)>,
}

#[derive(Clone, Copy)]
enum Answer {
    Panic,
    PanicWaiting,
    Echo,
    Head,
    Tunnel,
    StoreBody,
    Worker,
    Leases { bytes_max: Option<usize>, shared_max: Option<usize> },
    Pool,
    Pools,
    Files,
    CountBody { is_held: bool },
    Release,
    Resolve,
    Attempt,
}

fn set(conf: &mut Conf, answer: Answer) -> Result<(), Diagnostic> {
    conf.answer = Some(answer);
    Ok(())
}

fn set_panic(conf: &mut Conf, statement: &Statement) -> Result<(), Diagnostic> {
    match statement.args.first() {
        None => set(conf, Answer::Panic),
        Some(word) if word.text == "waiting" => set(conf, Answer::PanicWaiting),
        Some(word) => Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
    }
}

fn set_pool(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let pool = PoolName::new(builder, &statement.args[0])?;
    let socket = builder.http_mut().template(&statement.args[1])?;
    let device = statement.args.get(2).map(|word| builder.http_mut().template(word)).transpose()?.unwrap_or_default();
    conf.pool = Some(PoolHook { pool, socket, device });
    set(conf, Answer::Pool)
}

fn set_head(conf: &mut Conf, statement: &Statement) -> Result<(), Diagnostic> {
    let status = units::parse_number(&statement.args[0].text).and_then(|status| u16::try_from(status).ok());
    let status = status.ok_or_else(|| statement.directive_error("invalid status").at(statement.args[0].span))?;
    let mut text = statement.args[1].text.to_vec();
    let phrase = 0..text.len();
    let mut fields = Vec::new();
    for word in &statement.args[2..] {
        let colon = word.text.iter().position(|&byte| byte == b':');
        let colon = colon.ok_or_else(|| statement.directive_error("invalid field").at(word.span))?;
        let start = text.len();
        text.extend_from_slice(&word.text);
        fields.push((start..start + colon, start + colon + 1..text.len()));
    }
    conf.head = Some(HeadHook { status, text: text.into(), phrase, fields });
    set(conf, Answer::Head)
}

fn set_leases(conf: &mut Conf, statement: &Statement) -> Result<(), Diagnostic> {
    let bytes_max = if statement.args.is_empty() { None } else { Some(values::size(statement)? as usize) };
    let shared_max = statement.args.get(1).and_then(|word| word.text.to_string().parse().ok());
    set(conf, Answer::Leases { bytes_max, shared_max })
}

fn set_count(conf: &mut Conf, statement: &Statement) -> Result<(), Diagnostic> {
    match statement.args.first() {
        None => set(conf, Answer::CountBody { is_held: false }),
        Some(word) if word.text == "held" => set(conf, Answer::CountBody { is_held: true }),
        Some(word) => Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", word.text)).at(word.span)),
    }
}

fn hint(request: &mut Request) -> Flow {
    let link = (Bytes::from_static(b"Link"), Bytes::from_static(b"</style.css>; rel=preload"));
    request.send_early_hints(&[link]);
    Flow::Next
}

/// Waits for a writer, and then until it has written or closed.
fn stall(conf: &Conf) -> Flow {
    let path = conf.stalls_by.as_ref().expect("a location with this handler has the setting");
    match File::open(path).and_then(|mut fifo| fifo.read(&mut [0])) {
        Ok(_) => Flow::Next,
        Err(_) => Flow::Respond(500),
    }
}

fn answer_at_once(request: &mut Request, conf: &Conf) -> Option<Flow> {
    match conf.answer.expect("a location with this handler has the setting") {
        Answer::Panic => panic!("a test wanted it"),
        Answer::Echo => Some(echo(request)),
        Answer::Head => conf.head.as_ref().map(|head| answer_with(request, head)),
        Answer::Tunnel => Some(tunnel(request)),
        Answer::Worker => Some(tell_worker(request)),
        Answer::Leases { bytes_max, shared_max } => Some(tell_leases(request, bytes_max, shared_max)),
        Answer::Pools => Some(text(request, describe_pools())),
        Answer::Files => Some(text(request, describe_files())),
        Answer::Release => Some(release(request)),
        Answer::Attempt => conf.attempt.as_ref().map(|(how, what)| attempt(request, how, what)),
        Answer::PanicWaiting | Answer::StoreBody | Answer::Pool | Answer::CountBody { .. } | Answer::Resolve => None,
    }
}

fn answer<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        if let Some(Answer::PanicWaiting) = conf.answer {
            gale_runtime::yield_now().await;
            panic!("a test wanted it later");
        }
        if let (Some(Answer::Pool), Some(hook)) = (conf.answer, &conf.pool) {
            return wait_in_pool(request, hook).await;
        }
        if let (Some(Answer::Resolve), Some(name)) = (conf.answer, &conf.name) {
            return resolve(request, name).await;
        }
        if let Some(Answer::CountBody { is_held }) = conf.answer {
            if is_held {
                released().await;
            }
            return count_body(request).await;
        }
        match read_body(request).await {
            Ok(stored) => describe(request, &stored).await.unwrap_or(Flow::Respond(500)),
            Err(error) => Flow::Respond(error.status()),
        }
    })
}

fn tell_worker(request: &mut Request) -> Flow {
    text(request, gale_runtime::worker().to_string())
}

/// Sets the limit, which lasts until a reload divides the memory among the workers again.
fn tell_leases(request: &mut Request, bytes_max: Option<usize>, shared_max: Option<usize>) -> Flow {
    shared_max.into_iter().for_each(gale_runtime::set_shared_bytes_max);
    bytes_max.into_iter().for_each(gale_runtime::set_leased_bytes_max);
    text(request, gale_runtime::leased_bytes_max().to_string())
}

/// Runs on the loop itself, since none of the attempts blocks.
fn attempt(request: &mut Request, how: &Template, what: &Template) -> Flow {
    let (how, what) = (how.evaluate(request), what.evaluate(request));
    let path = Path::new(OsStr::from_bytes(&what));
    let number = |text: &[u8]| units::parse_number(text).and_then(|number| i64::try_from(number).ok());
    let attempted = match &how[..] {
        b"exec" => Err(Command::new(path).exec()),
        b"write" => std::fs::write(path, "x"),
        b"read" => File::open(path).and_then(|mut file| file.read(&mut [0])).map(drop),
        b"connect" => String::from_utf8_lossy(&what)
            .parse()
            .map_err(io::Error::other)
            .and_then(|address: SocketAddr| TcpStream::connect(address).map(drop)),
        b"call" => number(&what).map_or(Ok(()), |number| {
            // SAFETY: whatever the call is, none of its arguments points to memory.
            match unsafe { libc::syscall(number, -1, 0, 0, 0, 0, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            }
        }),
        _ => return Flow::Respond(404),
    };
    let error = attempted.err().map(|error| error.raw_os_error().unwrap_or(-1));
    text(request, error.map_or("done".to_owned(), |number| number.to_string()))
}

/// Runs in a thread, which sends the request's arguments when it begins. With the argument `panic` it panics when it is
/// released.
async fn wait_in_pool(request: &mut Request, hook: &PoolHook) -> Flow {
    let Some(pool) = hook.pool.find(request) else {
        return Flow::Respond(500);
    };
    let socket = PathBuf::from(OsString::from_vec(hook.socket.evaluate(request)));
    let device = hook.device.evaluate(request);
    let device = units::parse_number(&device).map_or(Device::NONE, Device::key);
    let args = request.args.to_vec();
    let waited = pool.run_for(device, move || -> io::Result<()> {
        let mut stream = UnixStream::connect(socket)?;
        // Released when the peer closes or resets the connection, now or later.
        let _ = stream.write_all(&args);
        let _ = stream.read(&mut [0]);
        if args == b"panic" {
            panic!("a test wanted it in a pool");
        }
        Ok(())
    });
    match waited.await.unwrap_or_else(|error| Err(error.into())) {
        Ok(()) => text(request, "done".to_owned()),
        Err(error) => {
            request.log(Level::Error, format_args!("{error}"));
            Flow::Respond(500)
        }
    }
}

async fn resolve(request: &mut Request, name: &Template) -> Flow {
    let name = name.evaluate(request);
    let Some((resolver, time_max)) = request.resolver() else {
        return text(request, "no resolver defined".to_owned());
    };
    let resolving = async move { resolver.resolve(&name, time_max).await };
    match resolving.await {
        Err(error) => text(request, error.to_string()),
        Ok(resolved) => {
            let mut addresses: Vec<String> = resolved.found.iter().map(ToString::to_string).collect();
            addresses.sort();
            text(request, addresses.join(" "))
        }
    }
}

/// Returns a line for each pool, sorted by name.
fn describe_files() -> String {
    let counters = gale_files::file_counters();
    let rungs = Rung::ALL.iter().zip(counters.pieces).zip(counters.bytes);
    let mut text: String = rungs
        .map(|((rung, pieces), bytes)| format!("{}={pieces} {}_bytes={bytes} ", rung.name(), rung.name()))
        .collect();
    text.push_str(&format!(
        "probe_hits={} probe_misses={} unlooked={} pool_hits={} mispredictions={} shared_reads={}\n",
        counters.probe_hits,
        counters.probe_misses,
        counters.unlooked,
        counters.pool_hits,
        counters.mispredictions,
        counters.shared_reads,
    ));
    text
}

fn describe_pools() -> String {
    let mut lines: Vec<String> = gale_runtime::pools()
        .iter()
        .map(|pool| {
            let PoolCounters { running, waiting, completed, panicked, cancelled, refused, .. } = pool.counters;
            format!(
                "{} threads_max={} queue_max={} is_ending={} running={running} waiting={waiting} completed={completed} \
                 panicked={panicked} cancelled={cancelled} refused={refused} waited={} ran={}\n",
                pool.name,
                pool.threads_max,
                pool.queue_max,
                pool.is_ending,
                pool.wait_times.count(),
                pool.run_times.count(),
            )
        })
        .collect();
    lines.sort();
    lines.concat()
}

fn text(request: &mut Request, text: String) -> Flow {
    request.response.status = 200;
    Flow::Answer(Body::Bytes(text.into()))
}

fn echo(request: &mut Request) -> Flow {
    request.response.status = 200;
    Flow::Answer(Body::Stream(Box::new(Echo(request.body_limits()))))
}

struct Echo(BodyLimits);

impl BodyStream for Echo {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        let item = request.exchange().poll_body(context, &self.0);
        item.map(|item| item.map_err(BodyError::Request).transpose())
    }
}

/// Answers with parts of the configured text. With the argument `intercept` the status goes to the error pages.
fn answer_with(request: &mut Request, head: &HeadHook) -> Flow {
    let response = &mut request.response;
    response.status = head.status;
    response.reason = Some(Reason { status: head.status, phrase: head.text.slice(head.phrase.clone()) });
    for (name, value) in &head.fields {
        response.add(head.text.slice(name.clone()), head.text.slice(value.clone()));
    }
    if request.args == b"intercept" {
        return Flow::Respond(head.status);
    }
    Flow::Answer(Body::Bytes(Bytes::from_static(b"hello")))
}

fn tunnel(request: &mut Request) -> Flow {
    request.response.status = 101;
    request.response.add(ResponseField::Upgrade, b"echo");
    Flow::Upgrade(Box::<EchoTunnel>::default())
}

/// Sends its input back, and holds a bounded part of it.
#[derive(Default)]
struct EchoTunnel {
    held: VecDeque<Bytes>,
    held_bytes: usize,
    has_ended: bool,
    waker: Option<Waker>,
}

impl Tunnel for EchoTunnel {
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BodyError>> {
        match self.held.pop_front() {
            Some(bytes) => {
                self.held_bytes -= bytes.len();
                self.waker.take().into_iter().for_each(Waker::wake);
                Poll::Ready(Ok(Some(bytes)))
            }
            None if self.has_ended => Poll::Ready(Ok(None)),
            None => {
                self.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        if self.held_bytes < 64 * 1024 || self.has_ended {
            return Poll::Ready(Ok(()));
        }
        self.waker = Some(context.waker().clone());
        Poll::Pending
    }

    fn write(&mut self, bytes: Bytes) {
        self.held_bytes += bytes.len();
        self.held.push_back(bytes);
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    fn end(&mut self) {
        self.has_ended = true;
        self.waker.take().into_iter().for_each(Waker::wake);
    }

    fn idle_max(&self) -> Duration {
        Duration::from_secs(60)
    }
}

thread_local! {
    /// Consumers of this worker that wait for their release.
    static HELD: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
}

/// Completes after the first `test_release` that follows the first poll.
async fn released() {
    let mut is_waiting = false;
    poll_fn(|context| {
        // No other event wakes this handler.
        if std::mem::replace(&mut is_waiting, true) {
            return Poll::Ready(());
        }
        HELD.with_borrow_mut(|held| held.push(context.waker().clone()));
        Poll::Pending
    })
    .await;
}

fn release(request: &mut Request) -> Flow {
    let held = HELD.take();
    request.response.status = 200;
    let answer = format!("{} released", held.len());
    held.iter().for_each(Waker::wake_by_ref);
    Flow::Answer(Body::Bytes(answer.into()))
}

/// Answers with `LENGTH CHECKSUM`; the checksum covers only every 61st byte, since debug builds are slow.
async fn count_body(request: &mut Request) -> Flow {
    const STRIDE: u64 = 61;
    let (exchange, limits) = (request.exchange(), request.body_limits());
    let (mut length, mut sum) = (0u64, FNV_START);
    loop {
        let item = poll_fn(|context| exchange.poll_body(context, &limits)).await;
        let bytes: &[u8] = match &item {
            Ok(Some(BodyItem::Bytes(bytes))) => bytes,
            Ok(Some(_)) => continue,
            Ok(None) => break,
            Err(error) => {
                log_error(request, *error);
                return Flow::Respond(error.status());
            }
        };
        let first = length.next_multiple_of(STRIDE) - length;
        sum = bytes.iter().skip(first as usize).step_by(STRIDE as usize).fold(sum, |sum, &byte| fnv(sum, &[byte]));
        length += bytes.len() as u64;
    }
    request.response.status = 200;
    Flow::Answer(Body::Bytes(format!("{length} {sum:016x}").into()))
}

/// Answers with `LENGTH memory|file CHECKSUM`; the checksum is 64 bits of FNV-1a in hexadecimal digits.
async fn describe(request: &mut Request, stored: &StoredBody) -> Result<Flow, SpoolError> {
    /// Size of a read.
    const PIECE_BYTES: usize = 64 * 1024;
    let mut sum = FNV_START;
    if let Some(mut reader) = stored.read(..) {
        while let Some(piece) = reader.read(PIECE_BYTES).await? {
            sum = fnv(sum, &piece);
        }
    }
    let place = if stored.file().is_some() { "file" } else { "memory" };
    request.response.status = 200;
    Ok(Flow::Answer(Body::Bytes(format!("{} {place} {sum:016x}", stored.length()).into())))
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(sum: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(sum, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
