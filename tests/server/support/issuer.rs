//! An ACME server after RFC 8555 (and 8737, 9773): it verifies requests, validates challenges at an address that the
//! test sets, and fails as the test asks.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use gale_tls::from_base64_url;
use rcgen::{CertificateSigningRequestParams, SerialNumber};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use super::authority::Authority;
use super::tls::AnyCertificate;
use super::{Asked, Client, DEADLINE};

/// `acmeIdentifier`, critical, and the beginning of its value (RFC 8737, section 3).
const ACME_IDENTIFIER: &[u8] = b"\x06\x08\x2b\x06\x01\x05\x05\x07\x01\x1f\x01\x01\xff\x04\x22\x04\x20";

/// See the file's head.
pub struct AcmeServer {
    /// Authority of the certificates that it issues.
    pub authority: Arc<Authority>,
    /// Authority of its own server's certificate, in PEM.
    pub root_pem: String,
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// Address at which challenges are validated.
#[derive(Clone, Debug)]
pub enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A fault that happens once.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The nonce is rejected.
    BadNonce,
    /// The request is refused, perhaps with a `Retry-After`.
    Refused { status: u16, kind: &'static str, retry_after: Option<&'static str> },
    /// The answer consists of these bytes.
    Answer(Vec<u8>),
    /// The connection is closed without an answer.
    Closed,
}

/// A request: path, JWS header and payload.
pub type Seen = (String, Value, Value);

struct Shared {
    authority: Arc<Authority>,
    address: SocketAddr,
    tls: Arc<ServerConfig>,
    state: Mutex<State>,
    changed: Condvar,
    is_over: AtomicBool,
}

#[derive(Default)]
struct State {
    place: Option<Place>,
    faults: Vec<(String, Fault)>,
    seen: Vec<Seen>,
    nonces: HashSet<String>,
    count: u64,
    /// Keys of accounts by the path of the account's URL.
    accounts: HashMap<String, Value>,
    orders: Vec<Order>,
    external_key: Option<Vec<u8>>,
    /// Renewal windows in order; the last one is repeated.
    windows: Vec<(&'static str, &'static str)>,
}

#[derive(Default)]
struct Order {
    names: Vec<String>,
    /// State of each name: pending, valid or invalid, and the reason.
    states: Vec<(&'static str, String)>,
    chain: Option<String>,
    has_been_polled: bool,
}

impl AcmeServer {
    pub fn start() -> AcmeServer {
        AcmeServer::at("127.0.0.1:0".parse().expect("an address"))
    }

    /// Starts a server at an address that an earlier one had.
    pub fn at(address: SocketAddr) -> AcmeServer {
        let root = Authority::new("server's authority");
        let pair = root.ecdsa(&["127.0.0.1"]);
        let chain = CertificateDer::pem_slice_iter(pair.certificate.as_bytes()).collect::<Result<_, _>>().expect("PEM");
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("PEM");
        let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
        let tls = Arc::new(builder.with_single_cert(chain, key).expect("a pair"));
        let listener = TcpListener::bind(address).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let authority = Arc::new(Authority::new("issuing authority"));
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared {
            authority: Arc::clone(&authority),
            address,
            tls,
            state,
            changed,
            is_over: AtomicBool::new(false),
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if own.is_over.load(Ordering::SeqCst) {
                    break;
                }
                let own = Arc::clone(&own);
                std::thread::spawn(move || own.serve(stream));
            }
        });
        AcmeServer { authority, root_pem: root.pem, shared, address, thread: Some(thread) }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// URL of its directory.
    pub fn uri(&self) -> String {
        format!("https://{}/directory", self.address)
    }

    /// Sets the address at which challenges are validated; until then validation waits.
    pub fn set_place(&self, place: Place) {
        self.shared.lock().place = Some(place);
        self.shared.changed.notify_all();
    }

    /// Makes the next request fail whose path begins with `path`.
    pub fn fail(&self, path: &str, fault: Fault) {
        self.shared.lock().faults.push((path.to_owned(), fault));
    }

    /// Requires accounts to be bound to this key.
    pub fn require_external_key(&self, key: &[u8]) {
        self.shared.lock().external_key = Some(key.to_vec());
    }

    /// Sets the renewal windows that it suggests.
    pub fn set_windows(&self, windows: &[(&'static str, &'static str)]) {
        self.shared.lock().windows = windows.to_vec();
    }

    /// Requests whose path begins with `path`.
    pub fn seen(&self, path: &str) -> Vec<Seen> {
        self.shared.lock().seen.iter().filter(|(own, ..)| own.starts_with(path)).cloned().collect()
    }

    /// Closes its socket.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        drop(TcpStream::connect(self.address));
        thread.join().expect("the issuer did not panic");
    }
}

impl Drop for AcmeServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// A TLS session that sends `close_notify` at its end.
struct End(StreamOwned<ServerConnection, TcpStream>);

impl Read for End {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for End {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.0.conn.send_close_notify();
        let _ = self.0.flush();
    }
}

/// A response before framing.
struct Reply {
    status: u16,
    fields: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn json(status: u16, body: &Value) -> Reply {
        Reply { status, fields: Vec::new(), body: body.to_string().into_bytes() }
    }

    fn problem(status: u16, kind: &str, detail: &str) -> Reply {
        Reply::json(status, &json!({ "type": format!("urn:ietf:params:acme:error:{kind}"), "detail": detail }))
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.fields.push((name, value.into()));
        self
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    fn serve(&self, stream: TcpStream) {
        stream.set_read_timeout(Some(DEADLINE)).expect("an option");
        let connection = ServerConnection::new(Arc::clone(&self.tls)).expect("a configuration");
        let mut stream = StreamOwned::new(connection, stream);
        while stream.conn.is_handshaking() {
            if stream.conn.complete_io(&mut stream.sock).is_err() {
                return;
            }
        }
        let mut client = Client::above(End(stream));
        while let Some(asked) = client.request_or_end() {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            let Some(reply) = self.answer(&asked) else { return };
            let mut head = format!("HTTP/1.1 {} X\r\nContent-Length: {}\r\n", reply.status, reply.body.len());
            let nonce = self.nonce();
            for (name, value) in reply.fields.iter().chain(&[("Replay-Nonce", nonce)]) {
                head += &format!("{name}: {value}\r\n");
            }
            let body = if asked.method == "HEAD" { &[][..] } else { &reply.body };
            if client.try_send([head.as_bytes(), b"\r\n", body].concat()).is_err() {
                return;
            }
        }
    }

    fn nonce(&self) -> String {
        let mut state = self.lock();
        state.count += 1;
        let nonce = format!("nonce-{}", state.count);
        state.nonces.insert(nonce.clone());
        nonce
    }

    /// Answers a request; `None` closes the connection.
    fn answer(&self, asked: &Asked) -> Option<Reply> {
        let path = asked.target.as_str();
        let fault = {
            let mut state = self.lock();
            let place = state.faults.iter().position(|(own, _)| path.starts_with(own.as_str()));
            place.map(|place| state.faults.remove(place).1)
        };
        match fault {
            Some(Fault::Closed) => return None,
            Some(Fault::BadNonce) => return Some(Reply::problem(400, "badNonce", "another one")),
            Some(Fault::Answer(body)) => return Some(Reply { status: 200, fields: Vec::new(), body }),
            Some(Fault::Refused { status, kind, retry_after }) => {
                let reply = Reply::problem(status, kind, "because");
                return Some(retry_after.into_iter().fold(reply, |reply, value| reply.with("Retry-After", value)));
            }
            None => {}
        }
        Some(match (asked.method.as_str(), path) {
            ("GET", "/directory") => self.directory(),
            ("HEAD", "/nonce") => Reply::json(200, &json!({})),
            ("GET", path) if path.starts_with("/info/") => self.renewal_info(path),
            ("POST", path) => match self.open(asked) {
                Ok((account, protected, payload)) => {
                    self.lock().seen.push((path.to_owned(), protected.clone(), payload.clone()));
                    self.answer_signed(path, &account, &protected, &payload)
                }
                Err(reply) => reply,
            },
            _ => Reply::problem(404, "malformed", "no such resource"),
        })
    }

    fn directory(&self) -> Reply {
        let state = self.lock();
        let mut directory = json!({
            "newNonce": self.url("/nonce"),
            "newAccount": self.url("/account"),
            "newOrder": self.url("/new-order"),
            "meta": {
                "termsOfService": "https://issuer.example/terms",
                "externalAccountRequired": state.external_key.is_some(),
                "profiles": { "short": "a week" },
            },
        });
        if !state.windows.is_empty() {
            directory["renewalInfo"] = json!(self.url("/info"));
        }
        Reply::json(200, &directory)
    }

    fn renewal_info(&self, path: &str) -> Reply {
        let mut state = self.lock();
        state.seen.push((path.to_owned(), Value::Null, Value::Null));
        let window = if state.windows.len() > 1 { state.windows.remove(0) } else { state.windows[0] };
        Reply::json(200, &json!({ "suggestedWindow": { "start": window.0, "end": window.1 } }))
            .with("Retry-After", "21600")
    }

    /// Verifies a signed request; returns the account's path (empty for a new account), the header and the payload.
    fn open(&self, asked: &Asked) -> Result<(String, Value, Value), Reply> {
        let wrong = |detail: &str| Reply::problem(400, "malformed", detail);
        assert_eq!(asked.header("Content-Type"), Some("application/jose+json"));
        let jws: Value = serde_json::from_slice(&asked.body).map_err(|_| wrong("no JSON"))?;
        let part = |name: &str| from_base64_url(jws[name].as_str().unwrap_or_default().as_bytes()).expect("base64url");
        let protected: Value = serde_json::from_slice(&part("protected")).map_err(|_| wrong("no head"))?;
        let payload = part("payload");
        let payload = if payload.is_empty() { Value::Null } else { serde_json::from_slice(&payload).expect("JSON") };
        assert_eq!(part("signature").len(), 64, "ES256");
        if protected["url"] != json!(self.url(&asked.target)) {
            return Err(wrong("another URL"));
        }
        let mut state = self.lock();
        if !state.nonces.remove(protected["nonce"].as_str().unwrap_or_default()) {
            return Err(Reply::problem(400, "badNonce", "used or unknown"));
        }
        let account = match protected["kid"].as_str() {
            None => String::new(),
            Some(kid) => {
                let path = kid.strip_prefix(&self.url("")).unwrap_or_default().to_owned();
                if !state.accounts.contains_key(&path) {
                    return Err(Reply::problem(400, "accountDoesNotExist", "who?"));
                }
                path
            }
        };
        Ok((account, protected, payload))
    }

    fn answer_signed(&self, path: &str, account: &str, protected: &Value, payload: &Value) -> Reply {
        let words: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let number = |place: usize| words.get(place).and_then(|word| word.parse::<usize>().ok()).unwrap_or(usize::MAX);
        match words[0] {
            "account" => self.new_account(protected, payload),
            _ if account.is_empty() => Reply::problem(401, "unauthorized", "no account"),
            "new-order" => self.new_order(payload),
            "order" => self.order(number(1)),
            "authorization" => self.authorization(number(1), number(2)),
            "challenge" => self.challenge(number(1), number(2), account, words[3]),
            "finalize" => self.finalize(number(1), payload),
            "certificate" => {
                let chain = self.lock().orders[number(1)].chain.clone().expect("a certificate");
                Reply { status: 200, fields: Vec::new(), body: chain.into_bytes() }
            }
            _ => Reply::problem(404, "malformed", "no such resource"),
        }
    }

    fn new_account(&self, protected: &Value, payload: &Value) -> Reply {
        let mut state = self.lock();
        let known = state.accounts.iter().find(|(_, jwk)| **jwk == protected["jwk"]).map(|(path, _)| path.clone());
        if known.is_none() {
            if payload["termsOfServiceAgreed"] != json!(true) {
                return Reply::problem(403, "userActionRequired", "terms");
            }
            if let Some(key) = &state.external_key {
                let bound = &payload["externalAccountBinding"];
                let head =
                    from_base64_url(bound["protected"].as_str().unwrap_or_default().as_bytes()).expect("base64url");
                let head: Value = serde_json::from_slice(&head).unwrap_or_default();
                let input = format!(
                    "{}.{}",
                    bound["protected"].as_str().unwrap_or_default(),
                    bound["payload"].as_str().unwrap_or_default()
                );
                let signature = from_base64_url(bound["signature"].as_str().unwrap_or_default().as_bytes());
                if head["kid"] != json!("kid-1")
                    || signature.as_deref() != Some(&hmac_sha256(key, input.as_bytes())[..])
                {
                    return Reply::problem(401, "unauthorized", "not bound");
                }
            }
        }
        let (status, path) = match known {
            Some(path) => (200, path),
            None => (201, format!("/account/{}", state.accounts.len())),
        };
        state.accounts.insert(path.clone(), protected["jwk"].clone());
        Reply::json(status, &json!({ "status": "valid" })).with("Location", self.url(&path))
    }

    fn new_order(&self, payload: &Value) -> Reply {
        let names = payload["identifiers"].as_array().expect("a list");
        let names: Vec<String> = names.iter().map(|own| own["value"].as_str().expect("a name").to_owned()).collect();
        let mut state = self.lock();
        let states = vec![("pending", String::new()); names.len()];
        state.orders.push(Order { names, states, ..Order::default() });
        let number = state.orders.len() - 1;
        drop(state);
        let reply = self.order(number);
        Reply { status: 201, ..reply }.with("Location", self.url(&format!("/order/{number}")))
    }

    fn order(&self, number: usize) -> Reply {
        let mut state = self.lock();
        let order = &mut state.orders[number];
        let status = match &order.chain {
            // The first poll comes too early.
            Some(_) if !std::mem::replace(&mut order.has_been_polled, true) => "processing",
            Some(_) => "valid",
            None if order.states.iter().all(|(state, _)| *state == "valid") => "ready",
            None if order.states.iter().any(|(state, _)| *state == "invalid") => "invalid",
            None => "pending",
        };
        let url = |path: &str| self.url(&format!("/{path}/{number}"));
        let authorizations: Vec<String> =
            (0..order.names.len()).map(|name| url("authorization") + &format!("/{name}")).collect();
        let mut body = json!({ "status": status, "authorizations": authorizations, "finalize": url("finalize") });
        if status == "valid" {
            body["certificate"] = json!(url("certificate"));
        }
        Reply::json(200, &body)
    }

    fn authorization(&self, number: usize, name: usize) -> Reply {
        let state = self.lock();
        let order = &state.orders[number];
        let (status, why) = &order.states[name];
        let challenge = |kind: &str| {
            let mut challenge = json!({
                "type": kind, "token": token(number, name), "status": status,
                "url": self.url(&format!("/challenge/{number}/{name}/{kind}")),
            });
            if !why.is_empty() {
                challenge["error"] = json!({ "type": "urn:ietf:params:acme:error:incorrectResponse", "detail": why });
            }
            challenge
        };
        let body = json!({
            "status": status,
            "identifier": { "type": "dns", "value": order.names[name] },
            "challenges": [challenge("dns-01"), challenge("http-01"), challenge("tls-alpn-01")],
        });
        Reply::json(200, &body)
    }

    /// Validates a challenge, once the address is known.
    fn challenge(&self, number: usize, name: usize, account: &str, kind: &str) -> Reply {
        let (place, host, expected) = {
            let state = self.lock();
            let is_unknown = |state: &mut State| state.place.is_none() && !self.is_over.load(Ordering::SeqCst);
            let waited = self.changed.wait_timeout_while(state, DEADLINE, is_unknown);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let thumbprint = base64_url(&sha256(state.accounts[account].to_string().as_bytes()));
            let expected = format!("{}.{thumbprint}", token(number, name));
            (state.place.clone().expect("a place"), state.orders[number].names[name].clone(), expected)
        };
        let looked = match kind {
            "http-01" => look_over_http(&place, &host, &expected),
            _ => look_over_tls(&place, &host, &expected),
        };
        self.lock().orders[number].states[name] = match looked {
            Ok(()) => ("valid", String::new()),
            Err(why) => ("invalid", why),
        };
        Reply::json(200, &json!({ "status": "processing" }))
    }

    fn finalize(&self, number: usize, payload: &Value) -> Reply {
        let request = from_base64_url(payload["csr"].as_str().unwrap_or_default().as_bytes()).expect("base64url");
        let request = CertificateSigningRequestDer::from(request);
        let mut request = CertificateSigningRequestParams::from_der(&request).expect("a request");
        let mut state = self.lock();
        state.count += 1;
        request.params.serial_number = Some(SerialNumber::from(state.count));
        request.params.use_authority_key_identifier_extension = true;
        request.params.not_before = rcgen::date_time_ymd(2024, 1, 1);
        request.params.not_after = rcgen::date_time_ymd(2090, 1, 1);
        let chain = self.authority.sign_request(&request);
        state.orders[number].chain = Some(chain);
        drop(state);
        self.order(number)
    }
}

fn token(number: usize, name: usize) -> String {
    format!("token-{number}_{name}")
}

fn look_over_http(place: &Place, host: &str, expected: &str) -> Result<(), String> {
    let mut client = match place {
        Place::Tcp(address) => Client::tcp(*address),
        Place::Unix(path) => Client::unix(path),
    };
    let token = expected.split('.').next().unwrap_or_default();
    let answer = client.ask(format!("GET /.well-known/acme-challenge/{token} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    match answer.status == 200 && answer.body == expected.as_bytes() {
        true => Ok(()),
        false => Err(format!("status {} for {host}", answer.status)),
    }
}

fn look_over_tls(place: &Place, host: &str, expected: &str) -> Result<(), String> {
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions");
    let mut config =
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate::default())).with_no_client_auth();
    config.alpn_protocols = vec![b"acme-tls/1".to_vec()];
    let name = ServerName::try_from(host.to_owned()).expect("a name");
    let mut session = ClientConnection::new(Arc::new(config), name).expect("a session");
    let shaken = match place {
        Place::Tcp(address) => session.complete_io(&mut TcpStream::connect(address).expect("it listens")),
        Place::Unix(path) => session.complete_io(&mut UnixStream::connect(path).expect("it listens")),
    };
    shaken.map_err(|error| error.to_string())?;
    let own = session.peer_certificates().and_then(|chain| chain.first()).ok_or("no certificate")?;
    let wanted = [ACME_IDENTIFIER, &sha256(expected.as_bytes())].concat();
    match session.alpn_protocol() == Some(b"acme-tls/1") && own.windows(wanted.len()).any(|part| part == wanted) {
        true => Ok(()),
        false => Err("another certificate".to_owned()),
    }
}

fn suite() -> &'static rustls::Tls13CipherSuite {
    aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().expect("of this version")
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    suite().common.hash_provider.hash(bytes).as_ref().to_vec()
}

/// RFC 2104
fn hmac_sha256(key: &[u8], bytes: &[u8]) -> Vec<u8> {
    let pad = |with: u8| -> Vec<u8> { (0..64).map(|place| key.get(place).unwrap_or(&0) ^ with).collect() };
    let inner = sha256(&[&pad(0x36)[..], bytes].concat());
    sha256(&[&pad(0x5c)[..], &inner].concat())
}

fn base64_url(bytes: &[u8]) -> String {
    gale_tls::base64_url(bytes)
}
