//! A small HTTP/1 client for services: a request that is made up of bytes, and its whole response, over a connection of
//! its own.
//!
//! It knows no groups and no retries, follows no redirects, and keeps in memory what a caller wants of the body, at
//! most. Everything about time is the caller's to say.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::os_error::OsErrorText;
use gale_engine::tls::{NamedFailure, TlsFailure, TlsStream};
use gale_engine::transport::Transport;
use gale_engine::upstream::PeerName;
use gale_engine::worker::{CountedConnection, Worker};
use gale_protocol::request::Method;
use gale_runtime::{Buffer, Bytes, ConnectOptions, ConnectStep, Output, SocketAddress, Timer, now, timeout};

use crate::request::Request;
use crate::upstream::attempt::{PassingTls, receive_failure};
use crate::upstream::http1::Http1Reader;
use crate::upstream::receiving::{BodyRead, HeadRead, Malformed, ResponseReader, UpstreamHead};
use crate::upstream::record::Records;

/// How much is received at once.
const RECEIVE_BYTES: usize = 16 * 1024;

/// How long what may take.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long the server may take nothing of the request.
    pub send: Duration,
    /// How long the server may be silent.
    pub read: Duration,
    /// How long all of it may take, but for connecting.
    pub whole: Duration,
}

/// A request as it goes on the wire, and what is wanted of its response.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    /// Its method, on which the framing of the response depends.
    pub method: Method,
    /// The head and the body.
    pub bytes: Bytes,
    /// How long the response's head may be, in bytes.
    pub head_max: usize,
    /// How much of the response's body is kept, in bytes.
    pub body_max: usize,
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    /// Its head.
    pub head: UpstreamHead,
    /// Its body, or as much of it as was wanted.
    pub body: Vec<u8>,
    /// The fields behind the body, if HTTP/2 is spoken and the body is whole.
    pub trailers: Vec<(Bytes, Bytes)>,
    /// How long it took until the head was there.
    pub header_time: Duration,
}

/// What was being done: nginx's words for messages.
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

/// Why there is no response.
#[derive(Debug)]
pub enum ClientError {
    /// The worker has as many connections as it may.
    NoConnections,
    /// The connection was not made: this step has failed.
    NotConnected(ConnectStep, io::Error),
    /// There is no certificate to show to the server.
    NoCertificate(NamedFailure),
    /// There is no TLS session.
    NoSession(TlsFailure),
    /// The server took too long.
    TimedOut(Step),
    /// The connection has failed.
    Failed(Step, io::Error),
    /// The connection ended before the response did.
    Closed(Step),
    /// What came is no response, in nginx's words.
    Malformed(Step, String),
}

/// A connection to a server, which may carry several requests, one after the other.
pub struct ClientConnection {
    stream: Transport,
    input: Buffer,
    counted: CountedConnection,
}

impl Step {
    /// As messages have it.
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
    /// What was being done.
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
    /// In nginx's words, with what was being done.
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
    /// Connects to a server, over TLS if that is asked for; it counts as one of the worker's connections. A handshake
    /// may take as long again as connecting. `header` goes before it, in the clear: that of the PROXY protocol, or
    /// nothing.
    ///
    /// # Errors
    /// There are as many connections as may be, or connecting has failed or took too long.
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
            // Whether the kernel waits for more is a matter of speed alone.
            let _ = stream.set_nodelay(true);
        }
        if !header.is_empty() {
            let mut output = Output::new();
            output.push(header);
            // It fits into the kernel's buffer: of a server that does not take it there is nothing to wait for.
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

    /// What another version of HTTP is spoken on.
    pub(super) fn into_parts(self) -> (Transport, CountedConnection) {
        (self.stream, self.counted)
    }

    /// Whether the server has neither closed it nor sent anything of its own accord.
    pub fn is_idle(&self) -> bool {
        self.input.is_empty() && self.stream.is_idle()
    }

    /// Sends a request and receives its response. Returns the connection, too, if it may carry another request.
    ///
    /// # Errors
    /// Why there is none. The connection is closed then.
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

    /// The answer, and whether the connection may be used again.
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
                // The server may have said why before it closed the connection.
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
                // What it announces comes with the final one.
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

/// Has the `$upstream_*` variables of a request tell of this server, which is about to be asked.
pub fn note_server(request: &mut Request, server: Arc<PeerName>) {
    Records::begin(request).add(server, now());
}

/// What it has answered.
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
