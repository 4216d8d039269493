//! Client of an issuer: signed requests with nonces (RFC 8555, section 6), over the HTTP client of services.
//!
//! A response is bounded in size and time, and redirects are not followed. If the issuer's own address is `https`, no
//! request is sent in the clear. A request with a rejected nonce is repeated a few times.

use std::cell::RefCell;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_http::request::response::FieldList;
use gale_http_upstream::PassingTls;
use gale_http_upstream::client::{ClientConnection, ClientError, ClientRequest, Patience};
use gale_protocol::request::Method;
use gale_runtime::{Bytes, ConnectOptions, SocketAddress, default_pool, wall_seconds};
use gale_worker::Worker;
use gale_worker::service::{Context, LockShare};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::issuer::Issuer;
use super::jws::{AccountKey, Identity};
use super::messages::{Directory, Problem, clean, retry_after};
use super::service::AcmeService;
use super::url::Url;
use crate::http::lookup::{self, NameServers};

/// Maximum length of a response's body: a chain of certificates has some ten thousand bytes.
const BODY_BYTES_MAX: usize = 256 * 1024;

/// Maximum length of a response's head.
const HEAD_BYTES_MAX: usize = 32 * 1024;

/// Timeout of connecting, and of the TLS handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(30);

/// Timeouts of a request.
const PATIENCE: Patience =
    Patience { send: Duration::from_secs(30), read: Duration::from_secs(30), whole: Duration::from_secs(60) };

/// Maximum number of times that a request is sent because its nonce was rejected.
const NONCES_MAX: usize = 4;

/// Maximum number of a host's addresses that are tried.
const ADDRESSES_MAX: usize = 8;

/// Reason why a request to an issuer failed.
#[derive(Debug)]
pub(super) enum AcmeError {
    /// The issuer cannot be reached. Trying again may help.
    Unreachable(String, ClientError),
    /// The issuer's name has no address.
    NotFound(String),
    /// The issuer refuses, and may say when to try again.
    Problem { problem: Problem, status: u16, retry_after: Option<Duration> },
    /// The response is malformed.
    Malformed(String),
    /// The issuer's validation of a name failed, or the account is not valid.
    NotAuthorized(String),
    /// The issuer did not decide in time.
    TimedOut(&'static str),
    /// The configuration forbids something that the issuer requires.
    Configuration(String),
    /// A local error.
    Local(String),
}

impl fmt::Display for AcmeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AcmeError::Unreachable(host, error) => {
                let text = error.to_string().replace("upstream", "issuer");
                write!(f, "{text}, issuer: {host}")
            }
            AcmeError::NotFound(why) | AcmeError::Configuration(why) | AcmeError::Local(why) => f.write_str(why),
            AcmeError::Problem { problem, status, .. } => {
                write!(f, "the issuer rejected the request with status {status} ({})", problem.describe())
            }
            AcmeError::Malformed(what) => write!(f, "the issuer sent an invalid response: {what}"),
            AcmeError::NotAuthorized(why) => write!(f, "the issuer could not validate it: {why}"),
            AcmeError::TimedOut(what) => write!(f, "the issuer took too long {what}"),
        }
    }
}

impl AcmeError {
    /// Error: a part of a response is missing or invalid.
    pub fn malformed(what: impl Into<String>) -> AcmeError {
        AcmeError::Malformed(what.into())
    }

    /// Returns the issuer's `Retry-After`.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            AcmeError::Problem { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns the issuer's name for the kind of problem: `rateLimited`.
    pub fn problem_kind(&self) -> &str {
        match self {
            AcmeError::Problem { problem, .. } => problem.short_kind(),
            _ => "",
        }
    }

    /// Returns `true` if only a change of the configuration can help.
    pub fn is_lasting(&self) -> bool {
        const LASTING: &[&str] = &[
            "externalAccountRequired",
            "invalidContact",
            "rejectedIdentifier",
            "unsupportedContact",
            "unsupportedIdentifier",
            "userActionRequired",
            "invalidProfile",
        ];
        matches!(self, AcmeError::Configuration(_)) || LASTING.contains(&self.problem_kind())
    }
}

/// A successful response.
pub(super) struct Reply {
    fields: FieldList,
    pub body: Vec<u8>,
}

impl Reply {
    /// Returns a header field's value as text.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields(name).next()
    }

    /// Returns the values of all header fields of this name.
    pub fn fields(&self, name: &str) -> impl Iterator<Item = &str> {
        let same = self.fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name.as_bytes()));
        same.filter_map(|field| std::str::from_utf8(&field.value).ok())
    }

    /// Returns the URL in `Location`.
    pub fn location(&self) -> Result<String, AcmeError> {
        let location = self.field("Location").filter(|text| Url::parse(text).is_ok());
        location.map(str::to_owned).ok_or_else(|| AcmeError::malformed("no URL in \"Location\""))
    }

    pub fn retry_after(&self) -> Option<Duration> {
        self.field("Retry-After").and_then(|text| retry_after(text.as_bytes(), wall_seconds()))
    }

    /// Parses the body as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, AcmeError> {
        serde_json::from_slice(&self.body).map_err(|error| AcmeError::malformed(clean(&error.to_string())))
    }
}

/// An account at an issuer.
pub(super) struct Account {
    /// The key that identifies it.
    pub key: Arc<AccountKey>,
    /// Its URL, once it is known.
    pub url: RefCell<Option<String>>,
}

/// A client of one issuer.
pub(super) struct AcmeClient {
    worker: Rc<Worker>,
    issuer: Arc<Issuer>,
    name_servers: Option<NameServers>,
    account: Rc<Account>,
    /// A share of the lock of the state directory; writers hold one, so that no other process writes at the same time.
    lock_share: Option<LockShare>,
    kept: RefCell<Option<(Url, ClientConnection)>>,
    nonce: RefCell<Option<String>>,
    directory: RefCell<Option<Rc<Directory>>>,
}

impl AcmeClient {
    /// Creates a client. Names are resolved by these servers, or by the system if there are none.
    pub fn new(
        context: &Context<AcmeService>,
        issuer: &Arc<Issuer>,
        name_servers: Option<NameServers>,
        account: &Rc<Account>,
    ) -> AcmeClient {
        AcmeClient {
            worker: Rc::clone(context.worker()),
            lock_share: context.lock_share(),
            issuer: Arc::clone(issuer),
            name_servers,
            account: Rc::clone(account),
            kept: RefCell::default(),
            nonce: RefCell::default(),
            directory: RefCell::default(),
        }
    }

    pub fn issuer(&self) -> &Arc<Issuer> {
        &self.issuer
    }

    pub fn lock_share(&self) -> Option<LockShare> {
        self.lock_share.clone()
    }

    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Returns the directory of the issuer's URLs, which is fetched once.
    pub async fn directory(&self) -> Result<Rc<Directory>, AcmeError> {
        if let Some(directory) = &*self.directory.borrow() {
            return Ok(Rc::clone(directory));
        }
        let directory: Directory = self.get(&self.issuer.uri).await?.json()?;
        if [&directory.new_nonce, &directory.new_account, &directory.new_order].into_iter().any(String::is_empty) {
            return Err(AcmeError::malformed("not an ACME directory"));
        }
        let directory = Rc::new(directory);
        self.directory.replace(Some(Rc::clone(&directory)));
        Ok(directory)
    }

    /// Fetches a public resource.
    pub async fn get(&self, url: &Url) -> Result<Reply, AcmeError> {
        let (reply, status) = self.ask(Method::Get, url, None).await?;
        match status {
            200..=299 => Ok(reply),
            status => Err(refusal(&reply, status)),
        }
    }

    /// Fetches a resource of the account.
    pub async fn fetch(&self, url: &str) -> Result<Reply, AcmeError> {
        self.post(url, None).await
    }

    /// Sends a signed request. Without a payload it fetches the resource ("POST-as-GET").
    pub async fn post(&self, url: &str, payload: Option<Value>) -> Result<Reply, AcmeError> {
        let parsed = self.parse(url)?;
        let payload = Arc::new(payload);
        let mut count = 0;
        loop {
            count += 1;
            let nonce = self.take_nonce().await?;
            let text = self.sign(nonce, url.to_owned(), Arc::clone(&payload)).await?;
            let (reply, status) = self.ask(Method::Post, &parsed, Some(text)).await?;
            if (200..=299).contains(&status) {
                return Ok(reply);
            }
            let error = refusal(&reply, status);
            // The response has brought a new nonce (RFC 8555, section 6.5).
            if error.problem_kind() != "badNonce" || count == NONCES_MAX {
                return Err(error);
            }
        }
    }

    /// Parses a URL from the issuer.
    pub fn parse(&self, text: &str) -> Result<Url, AcmeError> {
        let url = Url::parse(text).map_err(|why| AcmeError::malformed(format!("{why} in \"{}\"", clean(text))))?;
        match self.issuer.uri.is_tls && !url.is_tls {
            true => Err(AcmeError::malformed(format!("\"{url}\" is not an https URL"))),
            false => Ok(url),
        }
    }

    async fn sign(&self, nonce: String, url: String, payload: Arc<Option<Value>>) -> Result<String, AcmeError> {
        let key = Arc::clone(&self.account.key);
        let account = self.account.url.borrow().clone();
        let sign = move || {
            let identity = account.as_deref().map_or(Identity::Key, Identity::Account);
            key.sign(&identity, &nonce, &url, (*payload).as_ref())
        };
        let signed = default_pool().run(sign).await.map_err(|error| AcmeError::Local(error.to_string()))?;
        signed.map_err(AcmeError::Local)
    }

    async fn take_nonce(&self) -> Result<String, AcmeError> {
        if let Some(nonce) = self.nonce.take() {
            return Ok(nonce);
        }
        let url = self.parse(&self.directory().await?.new_nonce)?;
        let (reply, status) = self.ask(Method::Head, &url, None).await?;
        if !(200..=299).contains(&status) {
            return Err(refusal(&reply, status));
        }
        self.nonce.take().ok_or_else(|| AcmeError::malformed("no nonce"))
    }

    /// Sends one request, over the previous connection if that can be reused.
    async fn ask(&self, method: Method, url: &Url, body: Option<String>) -> Result<(Reply, u16), AcmeError> {
        let request = ClientRequest {
            method,
            bytes: head(method, url, body),
            head_max: HEAD_BYTES_MAX,
            body_max: BODY_BYTES_MAX + 1,
        };
        let unreachable = |error| AcmeError::Unreachable(url.host_field(), error);
        let kept = self.kept.take().filter(|(origin, kept)| origin.has_same_origin(url) && kept.is_idle());
        let mut kept = kept.map(|(_, connection)| connection);
        let (answer, connection) = loop {
            let is_kept = kept.is_some();
            let connection = match kept.take() {
                Some(connection) => connection,
                None => self.connect(url).await?,
            };
            match connection.ask(&request, PATIENCE).await {
                Ok(asked) => break asked,
                // The issuer may have closed the kept connection meanwhile.
                Err(ClientError::Closed(_) | ClientError::Failed(..)) if is_kept => {}
                Err(error) => return Err(unreachable(error)),
            }
        };
        self.kept.replace(connection.map(|connection| (url.clone(), connection)));
        if answer.body.len() > BODY_BYTES_MAX {
            return Err(AcmeError::malformed("response too long"));
        }
        let reply = Reply { fields: answer.head.fields, body: answer.body };
        if let Some(nonce) = reply.field("Replay-Nonce") {
            self.nonce.replace(Some(nonce.to_owned()));
        }
        Ok((reply, answer.head.status))
    }

    async fn connect(&self, url: &Url) -> Result<ClientConnection, AcmeError> {
        let tls = match url.is_tls {
            false => None,
            true => {
                let client = self.issuer.tls.get().map(Arc::clone);
                let client = client.ok_or_else(|| AcmeError::Local("TLS is not set up".to_owned()))?;
                Some(PassingTls { client, name: url.host.as_bytes().into(), certificate: None })
            }
        };
        let options = ConnectOptions { timeout: Some(CONNECT_TIME_MAX), ..ConnectOptions::default() };
        let mut last = AcmeError::NotFound(format!("{} could not be resolved", url.host));
        let found = lookup::addresses(&self.worker, &url.host, self.name_servers.as_ref()).await;
        for address in found.map_err(AcmeError::NotFound)?.into_iter().take(ADDRESSES_MAX) {
            let address = SocketAddress::Inet(SocketAddr::new(address, url.port));
            match ClientConnection::open(&self.worker, &address, &options, Vec::new(), tls.as_ref()).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = AcmeError::Unreachable(url.host_field(), error),
            }
        }
        Err(last)
    }
}

/// Returns the request's bytes on the wire.
fn head(method: Method, url: &Url, body: Option<String>) -> Bytes {
    let name = match method {
        Method::Post => "POST",
        Method::Head => "HEAD",
        _ => "GET",
    };
    let mut text = format!(
        "{name} {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: Gale/{} (ACME)\r\nAccept-Language: en\r\n",
        url.target,
        url.host_field(),
        env!("CARGO_PKG_VERSION")
    );
    if let Some(body) = body {
        text += &format!("Content-Type: application/jose+json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    } else {
        text += "\r\n";
    }
    Bytes::from(text.into_bytes())
}

/// Returns the error of a response that is a refusal; without a problem document its status decides.
fn refusal(reply: &Reply, status: u16) -> AcmeError {
    let problem = serde_json::from_slice(&reply.body).unwrap_or_default();
    AcmeError::Problem { problem, status, retry_after: reply.retry_after() }
}
