//! Active health check of a server: a connection or a datagram, an optional request, and the expected response.
//! (<https://nginx.org/en/docs/stream/ngx_stream_upstream_hc_module.html>)

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_runtime::{Buffer, Bytes, ConnectOptions, ConnectStep, DatagramOptions, Output, SocketAddress};
use gale_tls::TlsStream;
use gale_tls::Transport;
use gale_upstream::connecting::{CONNECTING, SHAKING_HANDS};
use gale_upstream::without_port;
use gale_worker::CountedConnection;

use super::datagrams::is_of_server;
use super::settings::ProxySettings;
use crate::session::Session;

/// Parameters of a check.
pub struct Question<'q> {
    /// Use UDP.
    pub is_udp: bool,
    /// Request, if any.
    pub send: Option<Bytes>,
    /// Test of the response. Without it a connection is enough.
    pub expect: Option<Judge<'q>>,
    /// Time limit for the whole check.
    pub timeout: Duration,
    /// Name of the group in `proxy_pass`.
    pub group: &'q str,
}

/// Judges the response received so far.
pub type Judge<'q> = &'q dyn Fn(&[u8]) -> Verdict;

/// Result for the response received so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It matches.
    Good,
    /// It is incomplete.
    NeedMore,
    /// It does not match.
    Bad,
}

/// Reason why a check has not succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckError {
    /// The check could not be made on this machine, so the server's state is unknown. `None` if the reason was logged
    /// already.
    Local(Option<String>),
    /// The server did not answer as expected.
    Server {
        /// Error.
        text: String,
        /// Action that failed.
        action: &'static str,
    },
}

const SENDING: &str = "sending request to upstream";
const READING: &str = "reading response from upstream";

/// Checks a server, with the connection settings of `session`'s server.
///
/// # Errors
/// The check has not succeeded.
pub async fn ask(
    session: &Session,
    settings: &ProxySettings,
    address: &SocketAddress,
    question: &Question<'_>,
) -> Result<(), CheckError> {
    let Some(_counted) = CountedConnection::open(session.worker()) else {
        session.worker().complain_of_connections();
        return Err(CheckError::Local(None));
    };
    let asking = Asking { session, settings, address, question, action: Cell::new(CONNECTING) };
    let asked = async { if question.is_udp { asking.ask_over_udp().await } else { asking.ask_over_tcp().await } };
    match gale_runtime::timeout(question.timeout, asked).await {
        Ok(result) => result,
        Err(_) => Err(asking.failed("upstream timed out (110: Connection timed out)")),
    }
}

struct Asking<'a> {
    session: &'a Session,
    settings: &'a ProxySettings,
    address: &'a SocketAddress,
    question: &'a Question<'a>,
    action: Cell<&'static str>,
}

impl Asking<'_> {
    fn failed(&self, text: impl std::fmt::Display) -> CheckError {
        let action = self.action.get();
        CheckError::Server { text: format!("{text} while {action}"), action }
    }

    fn failed_call(&self, call: &str, error: &io::Error) -> CheckError {
        self.failed(format_args!("{call} failed {}", OsErrorText(error)))
    }

    async fn ask_over_tcp(&self) -> Result<(), CheckError> {
        let Asking { session, settings, question, .. } = self;
        let options = ConnectOptions { timeout: None, ..settings.connect_options(session) };
        let stream = options.connect(self.address).await.map_err(|failed| match failed.step {
            ConnectStep::Connect => self.failed_call("connect()", &failed.error),
            step => CheckError::Local(Some(format!("{step} failed {}", OsErrorText(&failed.error)))),
        })?;
        let mut output = Output::new();
        let header = settings.proxy_header(session);
        if !header.is_empty() {
            output.push(header);
        }
        let transport = if *settings.ssl.get() {
            self.action.set(SENDING);
            stream.send_all(&mut output).await.map_err(|error| self.failed_call("send()", &error))?;
            self.action.set(SHAKING_HANDS);
            let client = settings.tls_client(session).await;
            let client = client.map_err(|failure| CheckError::Local(Some(failure.to_string())))?;
            let name = settings.tls_name(session, question.group);
            let shaken =
                TlsStream::connect(stream, &client, without_port(&name)).map_err(|fault| self.failed(fault))?;
            poll_fn(|context| shaken.poll_handshake(context)).await.map_err(|fault| self.failed(fault))?;
            Transport::Tls(Box::new(shaken))
        } else {
            Transport::Plain(stream)
        };
        self.action.set(SENDING);
        question.send.clone().into_iter().for_each(|bytes| output.push(bytes));
        while !output.is_empty() {
            let sent = poll_fn(|context| transport.poll_send(context, &mut output)).await;
            sent.map_err(|error| self.failed_call("send()", &error))?;
        }
        let Some(expect) = question.expect else { return Ok(()) };
        self.action.set(READING);
        let mut input = Buffer::new();
        loop {
            let room = settings.piece_bytes().saturating_sub(input.len());
            if room == 0 {
                return Err(self.failed("unexpected data"));
            }
            let received = poll_fn(|context| transport.poll_recv(context, &mut input, room)).await;
            let is_at_end = received.map_err(|error| self.failed_call("recv()", &error))? == 0;
            match expect(input.readable()) {
                Verdict::Good => return Ok(()),
                Verdict::NeedMore if is_at_end => return Err(self.failed("upstream prematurely closed connection")),
                Verdict::NeedMore => {}
                Verdict::Bad => return Err(self.failed("unexpected data")),
            }
        }
    }

    async fn ask_over_udp(&self) -> Result<(), CheckError> {
        let Asking { session, settings, question, .. } = self;
        let options = settings.connect_options(session);
        let is_bound = options.local.is_some();
        let options = DatagramOptions {
            local: options.local,
            transparent: options.transparent,
            peer: Some(self.address.clone()),
            ..DatagramOptions::default()
        };
        let socket = options.open().map_err(|error| {
            if is_of_server(&error, is_bound) {
                return self.failed_call("connect()", &error);
            }
            CheckError::Local(Some(format!("socket() failed {}", OsErrorText(&error))))
        })?;
        self.action.set(SENDING);
        let mut datagram = settings.proxy_header(session);
        datagram.extend_from_slice(question.send.as_deref().unwrap_or_default());
        socket.send(&datagram).map_err(|error| self.failed_call("send()", &error))?;
        self.action.set(READING);
        let Some(expect) = question.expect else { return Ok(()) };
        let mut bytes = vec![0; settings.piece_bytes().min(usize::from(u16::MAX))];
        let (length, _) = socket.recv(&mut bytes).await.map_err(|error| self.failed_call("recv()", &error))?;
        match expect(&bytes[..length]) {
            Verdict::Good => Ok(()),
            // A datagram has no continuation.
            Verdict::NeedMore | Verdict::Bad => Err(self.failed("unexpected data")),
        }
    }
}
