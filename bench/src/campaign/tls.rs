//! tls-logic: a server that wants certificates of its clients, and ways around it on the same address: by another
//! server's handshake, by another server's session, by early data that is sent twice.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::client::{ClientSessionMemoryCache, ClientSessionStore, Resumption};
use rustls::client::{Tls12ClientSessionValue, Tls13ClientSessionValue};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, NamedGroup, RootCertStore, StreamOwned};

use super::Experiment;
use super::exchange::{Reply, TimedRead, connect, get_with, read_reply};
use super::origin::{Origin, Then};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, text, wait_until};
use crate::servers::{Setting, free_port};
use crate::support::authority::{Authority, Pair};

pub const EXPERIMENT: Experiment = Experiment {
    name: "tls-logic",
    does: "Two servers of one address want certificates of two authorities, a third wants none; clients name one \
           server in the handshake and another in Host, come back with another server's session (TLS 1.2 and 1.3), and \
           send early data twice.",
    holds: "No client gets what it has no certificate for, and early data reach the application marked as such.",
    needs: &[],
    not_on_nginx: None,
    run,
};

const LIMIT: Duration = Duration::from_secs(10);
/// The server that wants no certificate, and those that do.
const OPEN: &str = "open.campaign";
const FIRST: &str = "first.campaign";
const SECOND: &str = "second.campaign";

/// Certificates of a client.
struct Clients {
    none: Option<Pair>,
    of_first: Option<Pair>,
    of_stranger: Option<Pair>,
}

struct Site {
    address: String,
    authority: Authority,
    clients: Clients,
}

/// Targets of requests in early data, each with true if the application was told so.
type Early = Arc<Mutex<Vec<(String, bool)>>>;

fn run(trial: &Trial) -> Result<Outcome, String> {
    let folder = trial.folder("tls")?;
    let early = Early::default();
    let seen = Arc::clone(&early);
    let origin = Origin::start(move |request, stream| {
        let is_marked = request.field("early-data") == Some("1");
        seen.lock().expect("nothing panics here").push((request.target.clone(), is_marked));
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nearly");
        Then::Close
    })?;
    let port = free_port()?;
    let (authority, first, second) = (Authority::new("servers"), Authority::new("first"), Authority::new("second"));
    let own = |authority: &Authority| Some(authority.ecdsa(&["client"]));
    let clients = Clients { none: None, of_first: own(&first), of_stranger: own(&Authority::new("stranger")) };
    let http = servers(&folder, port, &authority, &first, &second, &origin).map_err(|error| error.to_string())?;
    let watched = trial.start(Setting { http, ..Setting::default() })?;
    let site = Site { address: format!("127.0.0.1:{port}"), authority, clients };
    let tally = Tally::default();
    site.ask_by_names(&tally)?;
    let resumed = site.ask_with_sessions(&tally)?;
    let replayed = site.replay_early_data(&tally)?;
    let mut outcome = watched.finish(&tally);
    let requests = early.lock().expect("nothing panics here").clone();
    let unmarked = requests.iter().filter(|(target, is_marked)| target == "/early" && !is_marked).count();
    outcome.check(unmarked == 0, format!("{unmarked} requests in early data reached the application unmarked"));
    let repeated = requests.iter().filter(|(target, _)| target == "/early").count();
    outcome.notes.push(format!("{resumed} of 4 sessions were taken up again by their own server"));
    outcome.notes.push(match replayed {
        true => format!("early data sent three times reached the application {repeated} times"),
        false => "no early data is taken".to_owned(),
    });
    Ok(outcome)
}

/// The three servers of one address.
fn servers(
    folder: &Path,
    port: u16,
    authority: &Authority,
    first: &Authority,
    second: &Authority,
    origin: &Origin,
) -> std::io::Result<String> {
    let pair = authority.ecdsa(&[OPEN, FIRST, SECOND, "127.0.0.1"]);
    let write = |name: &str, pem: &str| std::fs::write(folder.join(name), pem);
    write("chain.pem", &pair.certificate)?;
    write("key.pem", &pair.key)?;
    write("first.pem", &first.pem)?;
    write("second.pem", &second.pem)?;
    let folder = text(folder);
    let server = |name: &str, more: &str| {
        format!(
            "server {{ listen 127.0.0.1:{port} ssl; server_name {name}; {more} ssl_early_data on;
                ssl_certificate {folder}/chain.pem; ssl_certificate_key {folder}/key.pem;
                location / {{ return 200 \"{name}\"; }}
                location /early {{ proxy_pass http://{}; proxy_set_header Early-Data $ssl_early_data; }} }}\n",
            origin.address
        )
    };
    let wants = |name: &str| format!("ssl_verify_client on; ssl_client_certificate {folder}/{name}.pem;");
    let all = [server(OPEN, ""), server(FIRST, &wants("first")), server(SECOND, &wants("second"))];
    Ok(format!("ssl_session_cache shared:sessions:1m; ssl_session_tickets on;\n{}", all.concat()))
}

impl Site {
    /// Names of the handshake and of Host in all combinations.
    fn ask_by_names(&self, tally: &Tally) -> Result<(), String> {
        let clients = [
            ("no certificate", &self.clients.none),
            ("a certificate of the first", &self.clients.of_first),
            ("a stranger's certificate", &self.clients.of_stranger),
        ];
        for (who, pair) in clients {
            let config = Arc::new(self.config(pair.as_ref(), true)?);
            for named in [OPEN, FIRST, SECOND, "127.0.0.1"] {
                for host in [OPEN, FIRST, SECOND] {
                    let may = host == OPEN || (host == FIRST && named == FIRST && who == clients[1].0);
                    let must = named == host && may && (host == FIRST || who == clients[0].0);
                    let begun = Instant::now();
                    let reply = self.ask(&config, named, host).map(|(reply, _)| reply);
                    let what = format!("{who}, name {named}, Host {host}");
                    judge(tally, begun, &what, &reply, host, may, must);
                }
            }
        }
        Ok(())
    }

    /// A session of one server at another, without a certificate that the other wants; how many sessions were taken up
    /// by the server that had given them.
    fn ask_with_sessions(&self, tally: &Tally) -> Result<usize, String> {
        let mut resumed = 0;
        for is_13 in [true, false] {
            for (pair, own, other) in [(&self.clients.none, OPEN, FIRST), (&self.clients.of_first, FIRST, SECOND)] {
                let config = Arc::new(self.config(pair.as_ref(), is_13)?);
                let own_again = [self.ask(&config, own, own), self.ask(&config, own, own)];
                resumed += own_again.iter().flatten().filter(|(_, kind)| *kind == Some(HandshakeKind::Resumed)).count();
                let begun = Instant::now();
                let reply = self.ask(&config, other, other).map(|(reply, _)| reply);
                let what = format!("the session of {own} at {other}, TLS 1.{}", if is_13 { 3 } else { 2 });
                judge(tally, begun, &what, &reply, other, false, false);
            }
        }
        Ok(resumed)
    }

    /// Sends one first flight with a request in early data three times; false when the server takes none.
    fn replay_early_data(&self, tally: &Tally) -> Result<bool, String> {
        let mut config = self.config(None, true)?;
        config.enable_early_data = true;
        let config = Arc::new(config);
        self.ask(&config, OPEN, OPEN)?;
        let name = ServerName::try_from(OPEN).map_err(|error| error.to_string())?;
        let mut session = ClientConnection::new(config, name).map_err(|error| error.to_string())?;
        let Some(mut data) = session.early_data() else { return Ok(false) };
        data.write_all(&get_with("/early", "")).map_err(|error| error.to_string())?;
        let mut flight = Vec::new();
        while session.wants_write() {
            session.write_tls(&mut flight).map_err(|error| error.to_string())?;
        }
        for _ in 0..3 {
            let mut stream = connect(&self.address, LIMIT)?;
            stream.write_all(&flight).map_err(|error| error.to_string())?;
            tally.ended_by_fault();
            // Its own answer says that the flight has been taken; a copy cannot go on with the handshake.
            let mut piece = [0; 1024];
            let is_answered = wait_until(
                LIMIT,
                || !matches!(stream.read_for(&mut piece, Duration::from_millis(200)), Err(error) if is_waiting(&error)),
            );
            if !is_answered {
                return Err("early data are not answered".to_owned());
            }
        }
        Ok(true)
    }

    /// A client with a certificate, or without. It offers every session that it has to every server.
    fn config(&self, pair: Option<&Pair>, is_13: bool) -> Result<ClientConfig, String> {
        let fault = |error: rustls::Error| error.to_string();
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_slice(self.authority.pem.as_bytes()).map_err(|error| error.to_string())?;
        roots.add(root).map_err(fault)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let version = if is_13 { &rustls::version::TLS13 } else { &rustls::version::TLS12 };
        let builder =
            ClientConfig::builder_with_provider(provider).with_protocol_versions(&[version]).map_err(fault)?;
        let builder = builder.with_root_certificates(roots);
        let mut config = match pair {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let pem = |error: rustls::pki_types::pem::Error| error.to_string();
                let chain = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).map_err(pem)?];
                let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).map_err(pem)?;
                builder.with_client_auth_cert(chain, key).map_err(fault)?
            }
        };
        config.resumption = Resumption::store(Arc::new(OneStore(ClientSessionMemoryCache::new(8))));
        Ok(config)
    }

    /// One request, with the name of the handshake and that of Host.
    fn ask(
        &self,
        config: &Arc<ClientConfig>,
        named: &'static str,
        host: &str,
    ) -> Result<(Reply, Option<HandshakeKind>), String> {
        let stream = connect(&self.address, LIMIT)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(|error| error.to_string())?;
        let name = ServerName::try_from(named).map_err(|error| error.to_string())?;
        let session = ClientConnection::new(Arc::clone(config), name).map_err(|error| error.to_string())?;
        let mut connection = Connection(StreamOwned::new(session, stream));
        let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        connection.0.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        let reply = read_reply(&mut connection, LIMIT)?;
        Ok((reply, connection.0.conn.handshake_kind()))
    }
}

/// Counts an answer of `host`: a client that may has it, all others have an error.
fn judge(tally: &Tally, begun: Instant, what: &str, reply: &Result<Reply, String>, host: &str, may: bool, must: bool) {
    let is_told = reply.as_ref().is_ok_and(|reply| reply.status == 200 && reply.body == host.as_bytes());
    let is_odd = reply.as_ref().is_ok_and(|reply| reply.status == 200 && reply.body != host.as_bytes());
    let status = reply.as_ref().map(|reply| reply.status);
    match is_told {
        true if !may => tally.wrong(format!("{what}: answered with 200")),
        false if must || is_odd => tally.lost(format!("{what}: {status:?}")),
        _ => tally.answered(begun),
    }
}

/// Sessions under one name, so that each is offered to every server.
#[derive(Debug)]
struct OneStore(ClientSessionMemoryCache);

fn one_name() -> ServerName<'static> {
    ServerName::try_from(OPEN).expect("a name")
}

impl ClientSessionStore for OneStore {
    fn set_kx_hint(&self, _: ServerName<'static>, group: NamedGroup) {
        self.0.set_kx_hint(one_name(), group);
    }

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        self.0.kx_hint(&one_name())
    }

    fn set_tls12_session(&self, _: ServerName<'static>, value: Tls12ClientSessionValue) {
        self.0.set_tls12_session(one_name(), value);
    }

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        self.0.tls12_session(&one_name())
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {
        self.0.remove_tls12_session(&one_name());
    }

    fn insert_tls13_ticket(&self, _: ServerName<'static>, value: Tls13ClientSessionValue) {
        self.0.insert_tls13_ticket(one_name(), value);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.0.take_tls13_ticket(&one_name())
    }
}

/// A connection over TLS, whose end may come without a word.
struct Connection(StreamOwned<ClientConnection, TcpStream>);

impl TimedRead for Connection {
    fn read_for(&mut self, piece: &mut [u8], time: Duration) -> std::io::Result<usize> {
        self.0.sock.set_read_timeout(Some(time))?;
        match self.0.read(piece) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(0),
            result => result,
        }
    }
}

fn is_waiting(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
