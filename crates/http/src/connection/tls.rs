//! The stage `Tls`: the beginning of a connection at an address with TLS. Also the rules of TLS about requests.
//!
//! ```text
//!   first bytes ─► header of the PROXY protocol, if the address wants one
//!               ─► a handshake: the client's first message ─► the server that it names ─► its rules
//!                                                           ─► an issuer of certificates that asks who is there
//!               ─► anything else: HTTP, answered with 497 (400 on the wire)
//! ```
//!
//! The whole stage has `client_header_timeout`, and the connection may be closed to make room, as if it waited for its
//! first request. Its `Beginning` is noted, so that a reload that changes the address ends the connection.

use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;

use gale_base::log_level::Level;
use gale_engine::configuration::ServerId;
use gale_protocol::client_hello;
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Moment, Timer};
use gale_tls::accepting::{self, FIRST_BYTES, FirstMessage, HandshakeOwner, Unfit};
use gale_tls::challenges::{self, Found};
use gale_tls::ocsp;
use gale_tls::settings::VerifyClient;
use gale_tls::{TlsServer, TlsStream};
use gale_worker::traffic::{Shaken, count_handshake};

use super::beginning::{Beginning, Preface, Untrusted};
use super::client::Client;
use super::place::AddressIndex;
use super::{Begun, HttpConnection, http1};
use crate::request::Request;
use crate::request::configuration::HttpConfiguration;
use crate::request::exchange::Exchange;

/// Meaning of the first bytes of a connection.
enum First {
    /// Not enough to tell.
    Unknown,
    /// Plain HTTP.
    Plain,
    /// A handshake, which was begun.
    Handshake,
    /// A handshake with this server, whose certificates have yet to be read; whether HTTP/2 is offered.
    NeedsCertificates(ServerId, bool),
    /// A handshake in which an issuer of certificates asks for the server of this name, of which another process may
    /// know.
    Challenge(Vec<u8>),
    /// Bytes that get no answer.
    Refused,
}

/// Receives the beginning of a connection, up to the end of the handshake.
pub(super) async fn begin(connection: &Rc<HttpConnection>) -> Begun {
    let client = &connection.client;
    let Some(stream) = client.stream.tls() else { return Begun::Closed };
    let Some(wait) = client.first_wait() else { return Begun::Closed };
    client.note_idle();
    let begun = gale_runtime::timeout(wait, handshake(connection, stream)).await;
    client.idle_since.set(Moment::NEVER);
    begun.unwrap_or_else(|_| {
        if stream.is_tls() {
            accepting::time_out(&Shaking { client, stream });
        }
        Begun::Closed
    })
}

async fn handshake(connection: &Rc<HttpConnection>, stream: &TlsStream) -> Begun {
    let client = &connection.client;
    let mut input = Buffer::new();
    let mut had_header = false;
    let mut may_be_challenge = true;
    loop {
        match poll_fn(|context| stream.poll_recv(context, &mut input, FIRST_BYTES)).await {
            Ok(1..) => {}
            Ok(0) | Err(_) => return Begun::Closed,
        }
        let mut first = client.look_at_first(stream, &mut input, &mut had_header, may_be_challenge);
        if let First::Challenge(name) = &first {
            if let Some(server) = challenges::tls_server_elsewhere(name).await {
                match client.start_session(stream, &server, Some(name), false, std::mem::take(&mut input)) {
                    true => break,
                    false => return Begun::Closed,
                }
            }
            may_be_challenge = false;
            first = client.look_at_first(stream, &mut input, &mut had_header, may_be_challenge);
        }
        match first {
            First::Unknown | First::Challenge(_) => {}
            First::Plain => match client.look_for_preface(input.readable()) {
                Preface::Begun => {}
                Preface::Whole => return Begun::Http2(input),
                Preface::Absent => {
                    return Begun::Http1(http1::State::begin(Timer::new(), input, &client.connections));
                }
            },
            First::Handshake => break,
            First::NeedsCertificates(server, http2) => {
                if !start_with_certificates(connection, stream, server, http2, std::mem::take(&mut input)).await {
                    return Begun::Closed;
                }
                break;
            }
            First::Refused => return Begun::Closed,
        }
    }
    drop(input);
    if !accepting::finish(&Shaking { client, stream }, stream).await {
        return Begun::Closed;
    }
    // The handshake was the answer (RFC 8737, section 3).
    let has_agreed_on = |protocol| stream.details(|details| details.alpn() == Some(protocol)) == Some(true);
    if has_agreed_on(challenges::ALPN) {
        return Begun::Closed;
    }
    let log = |level, message: &str| client.log_connection(level, format_args!("{message}"));
    Box::pin(ocsp::clients::validate(&client.worker().common, stream, log)).await;
    let configuration = client.next_configuration();
    if let Some(place) = client.place(configuration.http()) {
        client.set_nodelay(place.core(configuration.http()));
    }
    if has_agreed_on(b"h2") { Begun::Http2(Buffer::new()) } else { Begun::Http1(http1::State::default()) }
}

impl Client {
    fn look_at_first(
        &self,
        stream: &TlsStream,
        input: &mut Buffer,
        had_header: &mut bool,
        may_be_challenge: bool,
    ) -> First {
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return First::Refused };
        let listening = &http.addresses[place.index()].listening;
        if listening.proxy_protocol && !*had_header {
            match self.take_proxy_header(input) {
                Ok(false) => return First::Unknown,
                Ok(true) => *had_header = true,
                Err(Untrusted) => return First::Refused,
            }
        }
        let began = Beginning { proxy_protocol: listening.proxy_protocol, ssl: listening.ssl };
        match input.readable().first() {
            None => return First::Unknown,
            Some(&first) if !listening.ssl || stream.is_tls() || !client_hello::is_tls(first) => {
                self.began.set(Some(began));
                return First::Plain;
            }
            Some(_) => {}
        }
        let Some(first) = FirstMessage::read(input.readable()) else { return First::Unknown };
        let FirstMessage { name, asks_challenge, old_version, hello } = first;
        if let Some(version) = old_version {
            stream.note_server_name(name.as_deref());
            accepting::refuse_version(&Shaking { client: self, stream }, stream, version);
            return First::Refused;
        }
        if let Some(hello) = hello.filter(|_| http.keeps_client_hello) {
            stream.keep_client_hello(hello);
        }
        let asking = name.as_deref().filter(|_| may_be_challenge && asks_challenge);
        let challenged = asking.map_or(Found::Nothing, challenges::tls_server);
        self.began.set(Some(began));
        // Before all rules of servers, so that an issuer can always validate the name.
        match challenged {
            Found::Nothing => {}
            Found::Ask => return First::Challenge(name.unwrap_or_default()),
            Found::Known(server) => {
                return match self.start_session(stream, &server, name.as_deref(), false, std::mem::take(input)) {
                    true => First::Handshake,
                    false => First::Refused,
                };
            }
        }
        let server = server_named(http, place, name.as_deref());
        let offers_http2 = listening.http2 || http.server(server).http2;
        let has_tls = |server: &ServerId| http.server(*server).tls.is_some();
        let Some(server) = Some(server).filter(has_tls).or(Some(place.default_server(http)).filter(has_tls)) else {
            return First::Refused;
        };
        let Some(tls) = &http.server(server).tls else { return First::Refused };
        if tls.rejects() {
            accepting::reject(&Shaking { client: self, stream }, stream);
            count_handshake(http.server(server).zone.as_deref(), Shaken::Failed);
            return First::Refused;
        }
        if tls.needs_certificates() {
            stream.note_server_name(name.as_deref());
            return First::NeedsCertificates(server, offers_http2);
        }
        match self.start_session(stream, tls, name.as_deref(), offers_http2, std::mem::take(input)) {
            true => First::Handshake,
            false => First::Refused,
        }
    }

    fn start_session(
        &self,
        stream: &TlsStream,
        tls: &Arc<TlsServer>,
        name: Option<&[u8]>,
        offers_http2: bool,
        input: Buffer,
    ) -> bool {
        match stream.start(tls, name, offers_http2, input) {
            Ok(()) => true,
            Err(failure) => {
                accepting::fail(&Shaking { client: self, stream }, &failure);
                false
            }
        }
    }

    /// The server of a request until its head has come: the one that the handshake has named, else the address' default
    /// one.
    pub(super) fn first_server(&self, http: &HttpConfiguration, place: AddressIndex) -> ServerId {
        let stream = self.stream.tls().filter(|stream| stream.is_tls());
        let named =
            stream.and_then(|stream| stream.details(|details| server_named(http, place, details.server_name())));
        named.unwrap_or_else(|| place.default_server(http))
    }

    /// Status with which TLS refuses a request on this connection, if it does.
    pub(super) fn refusal(&self, request: &Request) -> Option<u16> {
        let stream = self.stream.tls()?;
        if !stream.is_tls() {
            if self.began.get().is_none_or(|began| !began.ssl) {
                return None;
            }
            request.log(Level::Info, format_args!("client sent plain HTTP request to HTTPS port"));
            return Some(497);
        }
        // Early data may be replayed by an attacker (RFC 8470, section 5.2): the client asks again.
        let is_safe = matches!(request.parsed.method, Method::Get | Method::Head | Method::Options | Method::Trace);
        if !is_safe && stream.details(|details| details.is_early()) == Some(true) {
            request.log(Level::Info, format_args!("client sent a request with an unsafe method as early data"));
            return Some(425);
        }
        let mode = request.server().verify_client;
        if mode == VerifyClient::Off {
            return None;
        }
        // A server without certificates of its own shares those of the default server, and its rules.
        let http = request.http();
        let default = http.server(http.addresses[request.arrival.place].servers.default).tls.as_ref();
        let wanted = request.server().tls.as_ref().or(default)?;
        stream.details(|details| {
            if !Arc::ptr_eq(details.server(), wanted) && !details.server().asks_the_same(wanted) {
                let what = "client attempted to request the server name different from the one that was negotiated";
                request.log(Level::Info, format_args!("{what}"));
                // After a reload its rules may be others: only a new handshake helps.
                request.close_after_response();
                return Some(421);
            }
            let log = |message: fmt::Arguments<'_>| request.log(Level::Info, message);
            let unfit = accepting::check_certificate(mode, details.verdict(), request.server().zone.as_deref(), log)?;
            Some(match unfit {
                Unfit::Bad => 495,
                Unfit::Missing => 496,
            })
        })?
    }
}

/// Begins a handshake with a server whose certificates have to be read first. If their names have variables, an empty
/// request stands for the connection.
async fn start_with_certificates(
    connection: &Rc<HttpConnection>,
    stream: &TlsStream,
    server: ServerId,
    offers_http2: bool,
    input: Buffer,
) -> bool {
    let client = &connection.client;
    let configuration = client.next_configuration();
    let own = configuration.http().server(server);
    let Some(tls) = &own.tls else { return false };
    let names = || {
        let mut request = client.worker().take_request();
        request.begin(Rc::clone(&configuration), Rc::clone(connection) as Rc<dyn Exchange>, server);
        let names = own.certificate_names.iter();
        let names = names.map(|(own, key)| (own.evaluate(&request), key.evaluate(&request))).collect();
        client.worker().give_back(request);
        names
    };
    match accepting::with_certificates(&Shaking { client, stream }, stream, tls, names).await {
        Some(tls) => client.start_session(stream, &tls, stream.server_name().as_deref(), offers_http2, input),
        None => false,
    }
}

/// A connection with its client's handshake.
struct Shaking<'c> {
    client: &'c Client,
    stream: &'c TlsStream,
}

impl HandshakeOwner for Shaking<'_> {
    fn log_handshake(&self, level: Level, message: fmt::Arguments<'_>) {
        self.client.log_connection(level, message);
    }

    fn count_handshake(&self, shaken: Shaken) {
        let configuration = self.client.next_configuration();
        let http = configuration.http();
        let server = self.client.place(http).map(|place| {
            let name = self.stream.server_name();
            http.server(server_named(http, place, name.as_deref()))
        });
        count_handshake(server.and_then(|server| server.zone.as_deref()), shaken);
    }
}

/// The server of this name at an address, else the default one. An expression that cannot be run finds none.
fn server_named(http: &HttpConfiguration, place: AddressIndex, name: Option<&[u8]>) -> ServerId {
    let servers = &http.addresses[place.index()].servers;
    let found = name.and_then(|name| servers.names.find(name).ok().flatten());
    found.map_or(servers.default, |(server, _)| server)
}
