//! auth_basic: access control by user name and password (RFC 7617).
//!   auth_basic REALM | off;                                      http, server, location, limit_except
//!   auth_basic_user_file FILE;                                   http, server, location, limit_except
//! (<https://nginx.org/en/docs/http/ngx_http_auth_basic_module.html>)
//!
//! The file is opened for every request, so changes take effect at once. A separate pool reads it and hashes the
//! password: a slow hash blocks neither an event loop nor the pools that read files. A client that has just given the
//! right password skips this (`recent`): the worker keeps a digest of the user, the password and the state of the file.

mod credentials;
mod des_crypt;
mod md5_crypt;
mod passwords;
mod recent;
mod user_file;

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_config::{Body, Contexts, Diagnostic, OneWith, Setting, Statement, Takes, Word, slot};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_files::{self as files, OpenFlags};
use gale_http::configuration::builder::InHttp;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::template::Template;
use gale_protocol::request::{KnownHeader, Method};
use gale_protocol::response::ResponseField;
use gale_runtime::ThreadPool;

use credentials::Credentials;
pub(super) use credentials::append_user;
use recent::Proof;
use user_file::Found;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_auth_basic",
    directives: &[
        Directive {
            name: "auth_basic",
            contexts: Contexts::ANYWHERE.or(Contexts::LIMIT_EXCEPT),
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "off",
            about: "Enables HTTP Basic authentication with this realm, or disables it (off).",
            store: &OneWith { parse: realm, slot: slot!(Conf, realm) },
        },
        Directive {
            name: "auth_basic_user_file",
            contexts: Contexts::ANYWHERE.or(Contexts::LIMIT_EXCEPT),
            takes: Takes::Exactly(1),
            body: Body::None,
            default: "",
            about: "Specifies the file with user names and hashed passwords.",
            store: &OneWith { parse: user_file, slot: slot!(Conf, user_file) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart { handlers: &[(Phase::Access, &Wait { applies, first, then })], ..HttpPart::EMPTY }],
};

#[derive(Default)]
struct Conf {
    realm: Setting<Template>,
    user_file: Setting<UserFile>,
}

#[derive(Clone)]
struct UserFile {
    path: Template,
    /// Directory of relative paths.
    directory: PathBuf,
}

fn realm(builder: &mut Builder, statement: &Statement) -> Result<Template, Diagnostic> {
    builder.http_mut().template(&statement.args[0])
}

fn user_file(builder: &mut Builder, statement: &Statement) -> Result<UserFile, Diagnostic> {
    let path = builder.http_mut().template(&statement.args[0])?;
    // Created here, because this asks the system for the number of cores.
    hashing_pool();
    let directory = builder.configuration_directory.clone();
    if let Some(name) = path.as_constant().filter(|_| builder.is_test) {
        let missing = warning(&directory.join(Path::new(OsStr::from_bytes(name))), &statement.args[0]);
        builder.note(missing);
    }
    builder.reach.reads_in(&directory, path.known_path(), "auth_basic_user_file");
    Ok(UserFile { path, directory })
}

/// Returns a warning about a missing file. It is not an error, since the file may be created later.
fn warning(path: &Path, word: &Word) -> Option<Diagnostic> {
    let error = path.metadata().err()?;
    let is_missing = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    let message = || format!("there is no \"{}\" {}", path.display(), OsErrorText(&error));
    let hint = "with auth_basic, requests get 403 while the file is missing";
    is_missing.then(|| Diagnostic::warn(message()).at(word.span).hint(hint))
}

const OFF: &[u8] = b"off";

fn applies(conf: &Conf) -> bool {
    conf.user_file.is_set() && conf.realm.get().as_constant() != Some(OFF)
}

/// Returns the pool that reads password files and hashes. It uses half of the cores, so that password guessing cannot
/// take all of them from the event loops, and its queue is bounded.
fn hashing_pool() -> &'static ThreadPool {
    const QUEUE_MAX: usize = 1024;
    static POOL: OnceLock<ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        ThreadPool::new("auth_basic", cores.div_ceil(2), QUEUE_MAX)
    })
}

fn first(request: &mut Request, conf: &Conf) -> Option<Flow> {
    let realm = conf.realm.get().evaluate(request);
    if realm == OFF {
        return Some(Flow::Next);
    }
    let Some(credentials) = given(request) else {
        request.log(Level::Info, format_args!("no user/password was provided for basic authentication"));
        return Some(challenge(request, &realm));
    };
    let Some(path) = path_of(request, conf) else { return Some(Flow::Respond(403)) };
    // The metadata of a path in the kernel's cache may suffice to answer at once.
    let opened = files::try_open(&path, OpenFlags::READ)?.ok()?;
    recent::knows(request.worker(), &Proof::new(opened.metadata(), &credentials)).then_some(Flow::Allow)
}

fn then<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        match given(request) {
            Some(credentials) => check(request, conf, credentials).await,
            None => unreachable!("a request without credentials is not waited for"),
        }
    })
}

/// Returns the client's credentials.
fn given(request: &Request) -> Option<Credentials> {
    let value = match request.method() {
        Method::Connect => {
            let mut fields = request.fields();
            fields.find(|(_, name, _)| name.eq_ignore_ascii_case(b"Proxy-Authorization")).map(|(_, _, value)| value)
        }
        _ => request.header(KnownHeader::Authorization),
    };
    Credentials::parse(value?)
}

/// Returns the path of the password file, or `None` if a variable leads out of its directory.
fn path_of(request: &Request, conf: &Conf) -> Option<PathBuf> {
    let UserFile { path, directory } = conf.user_file.get();
    let mut name = Vec::with_capacity(64);
    path.append_path(request, &mut name).then(|| directory.join(Path::new(OsStr::from_bytes(&name))))
}

async fn check(request: &mut Request, conf: &Conf, credentials: Credentials) -> Flow {
    let Some(path) = path_of(request, conf) else { return Flow::Respond(403) };
    let file = match files::open(&path, OpenFlags::READ).await {
        Ok(file) => file,
        Err(error) => {
            let (level, status) = match error.kind() {
                io::ErrorKind::NotFound => (Level::Error, 403),
                _ => (Level::Crit, 500),
            };
            request.log(level, format_args!("open() \"{}\" failed {}", path.display(), OsErrorText(&error)));
            return Flow::Respond(status);
        }
    };
    let proof = Proof::new(file.metadata(), &credentials);
    let user = credentials.user().to_vec();
    let task = hashing_pool().run(move || judge(&file, &credentials));
    match task.await {
        Ok(Ok(Verdict::Right)) => {
            recent::remember(request.worker(), proof);
            Flow::Allow
        }
        Ok(Ok(Verdict::Wrong)) => {
            request.log(Level::Error, format_args!("user \"{}\": password mismatch", Printable(&user)));
            challenge(request, &conf.realm.get().evaluate(request))
        }
        Ok(Ok(Verdict::NotFound)) => {
            let (user, path) = (Printable(&user), path.display());
            request.log(Level::Error, format_args!("user \"{user}\" was not found in \"{path}\""));
            challenge(request, &conf.realm.get().evaluate(request))
        }
        Ok(Err(error)) => {
            request.log(Level::Crit, format_args!("pread() \"{}\" failed {}", path.display(), OsErrorText(&error)));
            Flow::Respond(500)
        }
        Err(refused) => {
            request.log(Level::Error, format_args!("{refused}"));
            Flow::Respond(503)
        }
    }
}

/// Result of checking credentials against a file.
enum Verdict {
    Right,
    Wrong,
    NotFound,
}

/// Checks credentials. Blocks, and computes for long.
fn judge(file: &files::File, credentials: &Credentials) -> io::Result<Verdict> {
    Ok(match user_file::find(file, credentials.user())? {
        Found::Password(stored) if passwords::is_right(credentials.password(), &stored) => Verdict::Right,
        Found::Password(_) => Verdict::Wrong,
        Found::Nobody(other) => {
            // A password is hashed all the same, so that the time of the response does not reveal whether the user
            // exists.
            std::hint::black_box(other.map(|stored| passwords::is_right(credentials.password(), &stored)));
            Verdict::NotFound
        }
    })
}

/// Sends the challenge for a user and a password.
fn challenge(request: &mut Request, realm: &[u8]) -> Flow {
    let (field, status) = match request.method() {
        Method::Connect => (ResponseField::ProxyAuthenticate, 407),
        _ => (ResponseField::WwwAuthenticate, 401),
    };
    let value = [b"Basic realm=\"", realm, b"\""].concat();
    request.response.set(field, value);
    Flow::Respond(status)
}

/// A client's text on one line of the log: control characters are escaped.
struct Printable<'t>(&'t [u8]);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character.is_control() {
                    true => write!(formatter, "\\x{:02X}", u32::from(character))?,
                    false => write!(formatter, "{character}")?,
                }
            }
            for byte in chunk.invalid() {
                write!(formatter, "\\x{byte:02X}")?;
            }
        }
        Ok(())
    }
}
