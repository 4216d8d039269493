//! A small HTTP/1 client for services: sends a request made of bytes and reads the whole response, on a connection of
//! its own.
//!
//! It knows no groups and no retries, follows no redirects, and keeps at most the part of the body that the caller
//! wants. The caller sets all timeouts.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_http::request::Request;
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Bytes, ConnectOptions, ConnectStep, Output, SocketAddress, Timer, now, timeout};
use gale_tls::Transport;
use gale_tls::{NamedFailure, TlsFailure, TlsStream};
use gale_upstream::PeerName;
use gale_worker::{CountedConnection, Worker};

use crate::failure::receive_failure;
use crate::http1::Http1Reader;
use crate::passing_tls::PassingTls;
use crate::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};
use crate::record::Records;

/// Number of bytes received at once.
const RECEIVE_BYTES: usize = 16 * 1024;

/// Timeouts.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Timeout between two writes of the request.
    pub send: Duration,
    /// Timeout between two reads.
    pub read: Duration,
    /// Timeout for the whole exchange, without connecting.
    pub whole: Duration,
}

/// An encoded request, with bounds on its response.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    /// The method, which determines the framing of the response.
    pub method: Method,
    /// The head and the body.
    pub bytes: Bytes,
    /// Maximum length of the response's head, in bytes.
    pub head_max: usize,
    /// Maximum length of the body that is kept, in bytes.
    pub body_max: usize,
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    /// Its head.
    pub head: UpstreamHead,
    /// Its body, up to the wanted length.
    pub body: Vec<u8>,
    /// The trailers, with HTTP/2 and if the body is complete.
    pub trailers: Vec<(Bytes, Bytes)>,
    /// Time until the head had arrived.
    pub header_time: Duration,
}

/// The current step, in nginx's words for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Connecting.
    Connecting,
    /// The TLS handshake.
    Handshaking,
    /// Sending the request.
    Sending,
    /// Reading the response's head.
    ReadingHead,
    /// Reading the response's body.
    ReadingBody,
}

/// Reason for which there is no response.
#[derive(Debug)]
pub enum ClientError {
    /// The worker has reached its limit of connections.
    NoConnections,
    /// This step of connecting has failed.
    NotConnected(ConnectStep, io::Error),
    /// The client certificate cannot be used.
    NoCertificate(NamedFailure),
    /// The TLS session cannot be created.
    NoSession(TlsFailure),
    /// A timeout.
    TimedOut(Step),
    /// The connection has failed.
    Failed(Step, io::Error),
    /// The connection ended before the response.
    Closed(Step),
    /// The response is invalid; described in nginx's words.
    Malformed(Step, String),
}

/// A connection to a server, for one or several requests in sequence.
pub struct ClientConnection {
    stream: Transport,
    input: Buffer,
    counted: CountedConnection,
}

impl Step {
    /// The step in messages.
    pub fn text(self) -> &'static str {
        match self {
            Step::Connecting => "connecting to upstream",
            Step::Handshaking => "SSL handshaking to upstream",
            Step::Sending => "sending request to upstream",
            Step::ReadingHead => "reading response header from upstream",
            Step::ReadingBody => "reading upstream",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl ClientError {
    /// The step that has failed.
    pub fn step(&self) -> Step {
        match self {
            ClientError::NoConnections | ClientError::NotConnected(..) => Step::Connecting,
            ClientError::NoCertificate(_) | ClientError::NoSession(_) => Step::Handshaking,
            ClientError::TimedOut(step)
            | ClientError::Failed(step, _)
            | ClientError::Closed(step)
            | ClientError::Malformed(step, _) => *step,
        }
    }
}

impl fmt::Display for ClientError {
    /// In nginx's words, with the step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::NoConnections => f.write_str("worker_connections are not enough")?,
            ClientError::NotConnected(step, error) => write!(f, "{step} failed {}", OsErrorText(error))?,
            ClientError::NoCertificate(failure) => write!(f, "{failure}")?,
            ClientError::NoSession(failure) => write!(f, "{failure}")?,
            ClientError::TimedOut(_) => f.write_str("upstream timed out (110: Connection timed out)")?,
            ClientError::Failed(step, error) => {
                if *step == Step::Sending {
                    write!(f, "send() failed {}", OsErrorText(error))?;
                } else {
                    f.write_str(&receive_failure(error))?;
                }
            }
            ClientError::Closed(_) => f.write_str("upstream prematurely closed connection")?,
            ClientError::Malformed(_, what) => f.write_str(what)?,
        }
        write!(f, " while {}", self.step())
    }
}

impl std::error::Error for ClientError {}

impl ClientConnection {
    /// Connects to a server, over TLS if `tls` is given. The connection is counted as one of the worker's. A handshake
    /// has the connect timeout again. `header`, the PROXY protocol's or empty, is sent before the handshake,
    /// unencrypted.
    ///
    /// # Errors
    /// The worker has reached its limit of connections, or connecting has failed or timed out.
    pub async fn open(
        worker: &Rc<Worker>,
        address: &SocketAddress,
        options: &ConnectOptions,
        header: Vec<u8>,
        tls: Option<&PassingTls>,
    ) -> Result<ClientConnection, ClientError> {
        let counted = CountedConnection::open(worker).ok_or(ClientError::NoConnections)?;
        let stream = options.connect(address).await.map_err(|failed| match failed.error.kind() {
            io::ErrorKind::TimedOut => ClientError::TimedOut(Step::Connecting),
            _ => ClientError::NotConnected(failed.step, failed.error),
        })?;
        if address.inet().is_some() {
            // An error is ignored: the option only affects latency.
            let _ = stream.set_nodelay(true);
        }
        if !header.is_empty() {
            let mut output = Output::new();
            output.push(header);
            // It fits into the kernel's buffer, so there is no wait for a server that does not read it.
            stream.send_all(&mut output).await.map_err(|error| ClientError::Failed(Step::Sending, error))?;
        }
        let stream = match tls {
            None => Transport::Plain(stream),
            Some(tls) => {
                let client = tls.client().await.map_err(ClientError::NoCertificate)?;
                let session = TlsStream::connect(stream, &client, &tls.name).map_err(ClientError::NoSession)?;
                let shaken = poll_fn(|context| session.poll_handshake(context));
                match options.timeout {
                    None => shaken.await,
                    Some(time_max) => {
                        timeout(time_max, shaken).await.map_err(|_| ClientError::TimedOut(Step::Handshaking))?
                    }
                }
                .map_err(ClientError::NoSession)?;
                Transport::Tls(Box::new(session))
            }
        };
        Ok(ClientConnection { stream, input: Buffer::new(), counted })
    }

    /// The parts, for another version of HTTP.
    pub(super) fn into_parts(self) -> (Transport, CountedConnection) {
        (self.stream, self.counted)
    }

    /// True if the server has neither closed the connection nor sent unrequested data.
    pub fn is_idle(&self) -> bool {
        self.input.is_empty() && self.stream.is_idle()
    }

    /// Sends a request and receives its response. Returns the connection too if it can carry another request.
    ///
    /// # Errors
    /// The reason for which there is no response. The connection is then closed.
    pub async fn ask(
        mut self,
        request: &ClientRequest,
        patience: Patience,
    ) -> Result<(Answer, Option<ClientConnection>), ClientError> {
        let mut conversation = Conversation::new(request, patience);
        let asked = timeout(patience.whole, conversation.run(&mut self)).await;
        let (answer, may_be_used_again) = asked.unwrap_or(Err(ClientError::TimedOut(conversation.step)))?;
        Ok((answer, may_be_used_again.then_some(self)))
    }
}

/// One request and its response.
struct Conversation<'r> {
    request: &'r ClientRequest,
    patience: Patience,
    step: Step,
    reader: Http1Reader,
    has_ended: bool,
}

impl Conversation<'_> {
    fn new(request: &ClientRequest, patience: Patience) -> Conversation<'_> {
        let reader = Http1Reader::new(request.method, request.head_max);
        Conversation { request, patience, step: Step::Sending, reader, has_ended: false }
    }

    /// Returns the answer, and whether the connection can be reused.
    async fn run(&mut self, connection: &mut ClientConnection) -> Result<(Answer, bool), ClientError> {
        let began = now();
        self.send(connection).await?;
        self.step = Step::ReadingHead;
        let head = loop {
            match self.read_head(connection)? {
                Some(head) => break head,
                None => self.receive(connection, self.request.head_max).await?,
            }
        };
        let header_time = now().since(began);
        self.step = Step::ReadingBody;
        let mut body = Vec::new();
        let is_whole = loop {
            match self.reader.read_body(&mut connection.input, self.has_ended).map_err(|error| self.malformed(error))? {
                BodyRead::End => break true,
                BodyRead::Piece(piece) => {
                    let room = self.request.body_max - body.len();
                    body.extend_from_slice(&piece[..piece.len().min(room)]);
                    if piece.len() > room {
                        break false;
                    }
                }
                BodyRead::Partial => self.receive(connection, RECEIVE_BYTES).await?,
            }
        };
        let may_be_used_again = is_whole && self.reader.keeps_alive() && !self.has_ended && connection.input.is_empty();
        Ok((Answer { head, body, trailers: Vec::new(), header_time }, may_be_used_again))
    }

    async fn send(&self, connection: &ClientConnection) -> Result<(), ClientError> {
        let mut output = Output::new();
        output.push(self.request.bytes.clone());
        while !output.is_empty() {
            let sent =
                timeout(self.patience.send, poll_fn(|context| connection.stream.poll_send(context, &mut output))).await;
            match sent {
                Ok(Ok(_)) => {}
                // The server may have sent its reason before it closed the connection.
                Ok(Err(error)) if is_closed(&error) => return Ok(()),
                Ok(Err(error)) => return Err(ClientError::Failed(Step::Sending, error)),
                Err(_) => return Err(ClientError::TimedOut(Step::Sending)),
            }
        }
        Ok(())
    }

    fn read_head(&mut self, connection: &mut ClientConnection) -> Result<Option<UpstreamHead>, ClientError> {
        loop {
            match self.reader.read_head(&mut connection.input, self.has_ended).map_err(|error| self.malformed(error))? {
                HeadRead::Whole(head) => return Ok(Some(*head)),
                // Its fields are also in the final response.
                HeadRead::Interim(..) => {}
                HeadRead::Partial if self.has_ended => return Err(ClientError::Closed(self.step)),
                HeadRead::Partial => return Ok(None),
            }
        }
    }

    async fn receive(&mut self, connection: &mut ClientConnection, max: usize) -> Result<(), ClientError> {
        let mut silence = Timer::new();
        silence.set_after(self.patience.read);
        let step = self.step;
        let wanted = self.reader.wants().map_or(max, |wanted| usize::try_from(wanted).unwrap_or(max).clamp(1, max));
        let received = poll_fn(|context: &mut Context<'_>| {
            match connection.stream.poll_recv(context, &mut connection.input, wanted) {
                Poll::Ready(Ok(count)) => Poll::Ready(Ok(count)),
                Poll::Ready(Err(error)) => Poll::Ready(Err(ClientError::Failed(step, error))),
                Poll::Pending => silence.poll_expired(context).map(|()| Err(ClientError::TimedOut(step))),
            }
        })
        .await?;
        self.has_ended = received == 0;
        Ok(())
    }

    fn malformed(&self, malformed: Malformed) -> ClientError {
        ClientError::Malformed(self.step, malformed.0)
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// Adds a server that is about to be asked to the `$upstream_*` variables of a request.
pub fn note_server(request: &mut Request, server: Arc<PeerName>) {
    Records::begin(request).add(server, now());
}

/// Records the answer of that server.
pub fn note_answer(request: &Request, answer: &Answer) {
    let Some(records) = Records::of(request) else { return };
    records.note(|attempt, now| {
        attempt.status = answer.head.status;
        attempt.header_time = Some(answer.header_time);
        attempt.response_length = answer.body.len() as u64;
        attempt.end(now);
    });
    records.set_fields(Rc::new(answer.head.fields.clone()));
}
