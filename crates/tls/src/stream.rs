//! TLS connection over a socket.
//!
//! ```text
//!   socket ──► incoming ──► session ──► plain ──► poll_recv
//!              (records)        │       (decrypted, not yet read)
//!   socket ◄── outgoing ◄───────┴──────────────── poll_send, try_send, try_send_copy
//! ```
//!
//! Data to send stays with the caller until its records have left; then it is removed there and counts as sent, as on a
//! plain socket. So the stream needs no flush, and at most [`BATCH_RECORDS`] records wait.
//!
//! The session is rustls' unbuffered one: it buffers no records, and an idle connection holds no memory but its keys. A
//! connection begins unencrypted: with a PROXY protocol header, plain HTTP sent by mistake, or a handshake, which
//! [`TlsStream::start`] begins. [`Stage`] and [`Hold`] are its states.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_protocol::client_hello::ClientHello;
use gale_runtime::{Buffer, Effort, Lease, Moment, Output, PoolTask, Stream, charge_units, default_pool, poll_units};
use rustls::server::UnbufferedServerConnection;
use rustls::{CommonState, HandshakeKind, PeerIncompatible, ProtocolVersion};
use smallvec::SmallVec;

use super::certificate::Certificate;
use super::client::TlsClient;
use super::failure::TlsFailure;
use super::library::{Library, Step, StepFailed, Stepped, Writing};
use super::server::TlsServer;
use super::settings::VerifyClient;
use super::suites;
use super::verify::{self, Verdict};

/// Size of one receive: the largest possible record (RFC 8446, section 5.2, with the larger overhead of TLSv1.2).
const RECEIVE_BYTES: usize = 5 + 16 * 1024 + 2048;

/// Most bytes of incomplete messages: a client may send its certificates before anything is answered.
const INCOMING_MAX: usize = 96 * 1024;

/// Largest contents of a record (RFC 8446, section 5.1).
const RECORD_BYTES_MAX: usize = 16 * 1024;

/// Rounds of processing on an idle connection before it counts as not idle.
const IDLE_ROUNDS_MAX: usize = 4;

/// Most records that are encrypted ahead of sending. A piece of a file, of 64 KiB, leaves in one call with the head
/// before it.
pub(super) const BATCH_RECORDS: usize = 5;

/// Overhead of a record, with any supported suite.
const RECORD_OVERHEAD: usize = 64;

/// Contents of the first records of a connection, or after a pause. They fit into three packets, so a client can use
/// them before a whole large record has arrived.
const FIRST_RECORD_BYTES: usize = 4096 - RECORD_OVERHEAD;

/// Bytes after which the congestion window has grown and records get their full size.
const FIRST_BYTES: usize = 16 * 1024;

/// Pause after which the congestion window is small again, as in the kernel (RFC 5681, section 4.1).
const PAUSE: Duration = Duration::from_secs(1);

/// The alert `protocol_version` (RFC 8446, section 6.2).
const PROTOCOL_VERSION: u8 = 70;

/// Unit in which handshake steps are charged.
const MICROSECOND: Effort = Effort { usual_nanos: 1000, worst_nanos: 1000 };

/// Cost in microseconds of a handshake step that agrees on keys, signs or checks a signature. It exceeds the budget of
/// a light task, so a thousand concurrent handshakes queue up without delaying other tasks (0020). The quantum is
/// measured by the clock, so the estimate need not distinguish RSA from ECDSA.
const HEAVY_STEP: usize = 100;

/// Cost of a step that derives keys and makes tickets.
const LIGHT_STEP: usize = 25;

/// TLS connection over a socket.
pub struct TlsStream {
    socket: Socket,
    hello: RefCell<Hello>,
    stage: RefCell<Stage>,
}

/// Facts from the client's first message.
#[derive(Default)]
struct Hello {
    server_name: Option<Box<[u8]>>,
    /// The whole message, if variables need it.
    message: Option<Box<ClientHello<'static>>>,
}

/// The socket below; taken out by [`TlsStream::into_idle`].
struct Socket(Option<Stream>);

impl std::ops::Deref for Socket {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        self.0.as_ref().expect("there until the stream is taken apart")
    }
}

/// Stage of a connection.
#[expect(clippy::large_enum_variant, reason = "nearly all connections are encrypted, and none moves")]
enum Stage {
    /// Unencrypted.
    Clear,
    /// The client has begun a handshake; its server is not ready yet, or has refused it.
    Begun,
    /// In the handshake or encrypted.
    Tls(State),
}

/// State of a connection with a session.
struct State {
    hold: Hold,
    incoming: Buffer,
    plain: Buffer,
    outgoing: Outgoing,
    window: Window,
    progress: Progress,
    reading: Reading,
    farewell: Farewell,
}

/// The session, and where it is.
enum Hold {
    Here(Box<Session>),
    /// On a pool thread, for a slow signature.
    Signing(Pin<Box<PoolTask<Signed>>>),
    /// Stopped, and kept for its properties.
    Failed(Box<Session>, TlsFailure),
    /// No pool thread could be started for it, or it was taken out ([`TlsStream::into_idle`]).
    Gone,
}

/// Progress of the handshake.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    New,
    /// The session has processed something, or has sent first.
    Stepped,
    /// The client has sent early data.
    Early,
}

/// State of the peer's side.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    Open,
    /// The peer has sent close_notify, or the client has shut down its side.
    Ended,
    /// The server closed the connection without close_notify.
    CutShort,
}

/// State of our close_notify.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Farewell {
    Due,
    Encoded,
    /// Closing resets the connection, so no close_notify may claim that everything was sent.
    Withheld,
}

/// Records on their way to the socket.
#[derive(Default)]
pub(super) struct Outgoing {
    bytes: Output,
    /// Records in `bytes`.
    records: SmallVec<[Record; BATCH_RECORDS]>,
}

/// Estimate of the congestion window, which decides the size of records.
#[derive(Default)]
struct Window {
    /// Bytes sent since the last pause.
    sent_bytes: usize,
    last_sent: Option<Moment>,
}

/// Session returned from a pool thread.
struct Signed {
    session: Box<Session>,
    /// Received bytes, as left by the session.
    incoming: Vec<u8>,
    /// Bytes to send.
    encoded: Vec<u8>,
    stepped: Result<usize, StepFailed>,
}

/// A session and its owner.
struct Session {
    library: Library,
    /// Largest contents of a record.
    record_bytes: usize,
    /// `true` if its own signature takes milliseconds and is made on a pool thread.
    signs_slowly: bool,
    /// `None` on the client's side.
    server: Option<Arc<TlsServer>>,
    /// Verdict on the client's certificate, determined at the first use.
    verdict: Cell<Option<Verdict>>,
}

/// Session without its socket, between two requests to a server; it may move to another thread.
pub struct IdleTls(Box<Session>);

/// A record in [`Outgoing`].
#[derive(Clone, Copy, Debug)]
struct Record {
    /// Bytes that have not left.
    left: u32,
    /// Application bytes in the record.
    plain: u32,
}

/// State of the session.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// The handshake needs more data from the peer.
    Handshake,
    /// Both sides may send.
    Open,
    /// The peer sends no more.
    Ended,
}

impl TlsStream {
    /// A connection on which nothing has been received yet.
    pub fn new(socket: Stream) -> TlsStream {
        let socket = Socket(Some(socket));
        TlsStream { socket, hello: RefCell::default(), stage: RefCell::new(Stage::Clear) }
    }

    /// Client side of a connection to the server of this name, before the handshake.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn connect(socket: Stream, client: &TlsClient, name: &[u8]) -> Result<TlsStream, TlsFailure> {
        let library = Library::Client(client.connection(name)?);
        let session = Session {
            library,
            record_bytes: RECORD_BYTES_MAX,
            signs_slowly: client.signs_slowly(),
            server: None,
            verdict: Cell::new(None),
        };
        Ok(TlsStream::from_idle(socket, IdleTls(Box::new(session))))
    }

    /// Puts a session back on its socket.
    pub fn from_idle(socket: Stream, session: IdleTls) -> TlsStream {
        let socket = Socket(Some(socket));
        TlsStream { socket, hello: RefCell::default(), stage: RefCell::new(Stage::Tls(State::new(session.0))) }
    }

    /// Takes an idle connection apart. One that is not idle is closed, and the result is `None`.
    pub fn into_idle(mut self) -> Option<(Stream, IdleTls)> {
        if !self.is_idle() {
            return None;
        }
        let Stage::Tls(state) = self.stage.get_mut() else { return None };
        if !state.incoming.is_empty() || !state.outgoing.is_empty() {
            return None;
        }
        // Without a session, dropping sends no close_notify.
        let Hold::Here(session) = std::mem::replace(&mut state.hold, Hold::Gone) else { return None };
        Some((self.socket.0.take()?, IdleTls(session)))
    }

    /// `true` if nothing has been received but tickets and KeyUpdates. Makes a system call only if something has been
    /// received.
    pub fn is_idle(&self) -> bool {
        let Stage::Tls(state) = &mut *self.stage.borrow_mut() else { return false };
        for _ in 0..IDLE_ROUNDS_MAX {
            let stands = matches!(state.advance(), Ok(Standing::Open));
            if !stands
                || state.reading == Reading::Ended
                || !state.plain.is_empty()
                || self.send_control(state).is_err()
            {
                return false;
            }
            if self.socket.is_idle() {
                return true;
            }
            let context = &mut Context::from_waker(std::task::Waker::noop());
            match self.socket.poll_recv(context, &mut state.incoming, RECEIVE_BYTES) {
                Poll::Pending => return true,
                Poll::Ready(Ok(0) | Err(_)) => return false,
                Poll::Ready(Ok(_)) => {}
            }
        }
        false
    }

    /// The socket below.
    pub fn socket(&self) -> &Stream {
        &self.socket
    }

    /// `true` once a handshake has begun.
    pub fn is_tls(&self) -> bool {
        !matches!(*self.stage.borrow(), Stage::Clear)
    }

    /// Begins the handshake with the settings of `server`. `received` are the bytes received so far, `server_name` is
    /// the client's SNI, and `http2` adds HTTP/2 to ALPN.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn start(
        &self,
        server: &Arc<TlsServer>,
        server_name: Option<&[u8]>,
        http2: bool,
        received: Buffer,
    ) -> Result<(), TlsFailure> {
        let config = Arc::clone(server.config(http2));
        let library = UnbufferedServerConnection::new(config).map_err(TlsFailure::of)?;
        let mut state = State::new(Box::new(Session {
            library: Library::Server(library),
            record_bytes: server.record_bytes(),
            signs_slowly: server.signs_slowly(),
            server: Some(Arc::clone(server)),
            verdict: Cell::new(None),
        }));
        state.incoming = received;
        self.hello.borrow_mut().server_name = server_name.map(Box::from);
        self.stage.replace(Stage::Tls(state));
        Ok(())
    }

    /// Overrides the verdict on the client's certificate.
    pub fn set_verdict(&self, verdict: Verdict) {
        if let Some(session) = self.stage.borrow().session() {
            session.verdict.set(Some(verdict));
        }
    }

    /// Keeps the client's first message for variables.
    pub fn keep_client_hello(&self, hello: ClientHello<'_>) {
        self.hello.borrow_mut().message = Some(Box::new(hello.into_owned()));
    }

    /// The client's first message, if it was kept.
    pub fn client_hello<T>(&self, ask: impl FnOnce(&ClientHello<'static>) -> T) -> Option<T> {
        self.hello.borrow().message.as_deref().map(ask)
    }

    /// Stores the client's SNI before the server is chosen.
    pub fn note_server_name(&self, server_name: Option<&[u8]>) {
        self.hello.borrow_mut().server_name = server_name.map(Box::from);
        self.stage.replace(Stage::Begun);
    }

    /// Refuses a client without TLSv1.2 or newer, in its own version (`version`), before there is a session: the
    /// library would report another fault. Returns the failure.
    pub fn refuse_version(&self, version: u16) -> TlsFailure {
        let [_, low] = version.to_be_bytes();
        // If the alert cannot be sent at once, the client only sees the connection close.
        let _ = self.socket.try_send_copy(&[21, 3, low, 0, 2, 2, PROTOCOL_VERSION], false);
        TlsFailure::of(PeerIncompatible::Tls12NotOfferedOrEnabled.into())
    }

    /// The client's SNI, once known.
    pub fn server_name(&self) -> Option<Box<[u8]>> {
        self.hello.borrow().server_name.clone()
    }

    /// Completes the handshake; ready when its last message was given to the socket.
    ///
    /// # Errors
    /// Why it failed. An alert was sent if possible.
    pub fn poll_handshake(&self, context: &mut Context<'_>) -> Poll<Result<(), TlsFailure>> {
        let Stage::Tls(state) = &mut *self.stage.borrow_mut() else { return Poll::Ready(Err(TlsFailure::Closed)) };
        loop {
            if let Err(failure) = ready!(state.poll_signing(context)) {
                let _ = self.socket.try_send(&mut state.outgoing.bytes, false);
                return Poll::Ready(Err(failure));
            }
            let micros = state.step_micros();
            ready!(poll_units(context, MICROSECOND, micros));
            charge_units(MICROSECOND, micros);
            state.progress.note_step();
            let standing = match state.advance() {
                Ok(standing) => standing,
                Err(failure) => {
                    // If the alert cannot be sent at once, the client only sees the connection close.
                    let _ = self.socket.try_send(&mut state.outgoing.bytes, false);
                    return Poll::Ready(Err(failure));
                }
            };
            while !state.outgoing.is_empty() {
                match ready!(self.socket.poll_send(context, &mut state.outgoing.bytes)) {
                    Ok(count) => drop(state.outgoing.note_left(count)),
                    Err(error) => return Poll::Ready(Err(TlsFailure::of_socket(error))),
                }
            }
            match standing {
                // Early data is answered before the handshake ends; otherwise its end is awaited.
                Standing::Open if state.progress == Progress::Early || !state.is_handshaking() => {
                    return Poll::Ready(Ok(()));
                }
                Standing::Ended => return Poll::Ready(Err(TlsFailure::Closed)),
                Standing::Open | Standing::Handshake => {}
            }
            match ready!(self.socket.poll_recv(context, &mut state.incoming, RECEIVE_BYTES)) {
                Ok(0) => return Poll::Ready(Err(TlsFailure::Closed)),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(TlsFailure::of_socket(error))),
            }
        }
    }

    /// See [`Stream::poll_recv`]. Errors also include those of records.
    pub fn poll_recv(&self, context: &mut Context<'_>, into: &mut Buffer, max: usize) -> Poll<io::Result<usize>> {
        let stage = &mut *self.stage.borrow_mut();
        let state = match stage {
            Stage::Clear => return self.socket.poll_recv(context, into, max),
            Stage::Begun => return self.poll_recv_end(context),
            Stage::Tls(state) => state,
        };
        loop {
            if !state.plain.is_empty() {
                return Poll::Ready(state.take_plain(into, max));
            }
            match state.reading {
                Reading::Open => {}
                Reading::Ended => return Poll::Ready(Ok(0)),
                Reading::CutShort => return Poll::Ready(Err(TlsFailure::CutShort.into())),
            }
            // Sending may have detected a failure.
            if let Hold::Failed(_, failure) = &state.hold {
                return Poll::Ready(Err(failure.clone().into()));
            }
            if !state.incoming.is_empty() {
                let advanced = state.advance_for(Some((&mut *into, max)));
                // Sends answers to KeyUpdates, and alerts; the rest leaves with the next data.
                if let Err(error) = self.send_control(state) {
                    return Poll::Ready(Err(error));
                }
                match advanced {
                    Ok((_, 0)) => {}
                    Ok((_, count)) => return Poll::Ready(Ok(count)),
                    Err(failure) => return Poll::Ready(Err(failure.into())),
                }
                if !state.plain.is_empty() || state.reading == Reading::Ended {
                    continue;
                }
            }
            match ready!(self.socket.poll_recv(context, &mut state.incoming, RECEIVE_BYTES)) {
                // End without close_notify. A request shows by itself whether it is complete; not every response does.
                Ok(0) if state.is_client() => state.reading = Reading::CutShort,
                Ok(0) => state.reading = Reading::Ended,
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Receives until the peer's end, before there is a session: any data is an error.
    fn poll_recv_end(&self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match ready!(self.socket.poll_recv(context, &mut Buffer::new(), RECEIVE_BYTES)) {
            Ok(1..) => Poll::Ready(Err(TlsFailure::Closed.into())),
            ended => Poll::Ready(ended),
        }
    }

    /// See [`Stream::put_back`].
    pub fn put_back(&self, mut bytes: Buffer) {
        let Stage::Tls(state) = &mut *self.stage.borrow_mut() else { return self.socket.put_back(bytes) };
        if state.plain.is_empty() || bytes.append(state.plain.readable()).is_ok() {
            state.plain = bytes;
        }
    }

    /// Sends the session's own messages, if no application data is queued.
    fn send_control(&self, state: &mut State) -> io::Result<()> {
        if state.outgoing.is_empty() || state.outgoing.has_data() {
            return Ok(());
        }
        let sent = self.socket.try_send(&mut state.outgoing.bytes, false)?;
        state.outgoing.note_left(sent);
        Ok(())
    }

    /// See [`Stream::poll_send`]. Unsent bytes are still at the front of `out` at the next call.
    pub fn poll_send(&self, context: &mut Context<'_>, out: &mut Output) -> Poll<io::Result<usize>> {
        let stage = &mut *self.stage.borrow_mut();
        let state = match stage {
            Stage::Clear => return self.socket.poll_send(context, out),
            Stage::Begun if out.is_empty() => return Poll::Ready(Ok(0)),
            Stage::Begun => return Poll::Ready(Err(TlsFailure::Closed.into())),
            Stage::Tls(state) => state,
        };
        loop {
            while !state.outgoing.is_empty() {
                state.outgoing.bytes.set_more_follows(out.more_follows());
                let sent = match ready!(self.socket.poll_send(context, &mut state.outgoing.bytes)) {
                    Ok(sent) => sent,
                    Err(error) => return Poll::Ready(Err(error)),
                };
                let plain = state.outgoing.note_left(sent);
                if plain > 0 {
                    out.consume(plain);
                    return Poll::Ready(Ok(plain));
                }
            }
            if out.is_empty() {
                return Poll::Ready(Ok(0));
            }
            ready!(gale_runtime::poll_copy(context, out.len_bytes()));
            state.encrypt_batch(out)?;
        }
    }

    /// See [`Stream::try_send`].
    pub fn try_send(&self, out: &mut Output, is_last: bool) -> io::Result<usize> {
        let stage = &mut *self.stage.borrow_mut();
        let state = match stage {
            Stage::Clear => return self.socket.try_send(out, is_last),
            Stage::Begun if out.is_empty() => return Ok(0),
            Stage::Begun => return Err(TlsFailure::Closed.into()),
            Stage::Tls(state) => state,
        };
        if !state.outgoing.is_empty() || out.is_empty() {
            return Ok(0);
        }
        let encrypted = state.encrypt_batch(out)?;
        let is_last = is_last && encrypted == out.len_bytes();
        if is_last {
            state.close()?;
        }
        let sent = self.socket.try_send(&mut state.outgoing.bytes, is_last)?;
        let plain = state.outgoing.note_left(sent);
        out.consume(plain);
        Ok(plain)
    }

    /// See [`Stream::try_send_copy`]. Unsent bytes have to be passed to [`TlsStream::poll_send`] before any others.
    pub fn try_send_copy(&self, bytes: &[u8], is_last: bool) -> io::Result<usize> {
        let stage = &mut *self.stage.borrow_mut();
        let state = match stage {
            Stage::Clear => return self.socket.try_send_copy(bytes, is_last),
            Stage::Begun if bytes.is_empty() => return Ok(0),
            Stage::Begun => return Err(TlsFailure::Closed.into()),
            Stage::Tls(state) => state,
        };
        if !state.outgoing.is_empty() || bytes.is_empty() {
            return Ok(0);
        }
        let limit = state.record_bytes();
        let mut encrypted = 0;
        for piece in bytes.chunks(limit).take(BATCH_RECORDS) {
            state.encrypt(piece)?;
            encrypted += piece.len();
        }
        let is_last = is_last && encrypted == bytes.len();
        if is_last {
            state.close()?;
        }
        let sent = self.socket.try_send(&mut state.outgoing.bytes, is_last)?;
        Ok(state.outgoing.note_left(sent))
    }

    /// Sends close_notify; ready when the kernel has taken it.
    ///
    /// # Errors
    /// Errors of the connection or the session.
    pub fn poll_goodbye(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self.stage.borrow_mut() {
            Stage::Clear => return Poll::Ready(Ok(())),
            Stage::Begun => {}
            Stage::Tls(state) => state.close()?,
        }
        self.poll_send(context, &mut Output::new()).map_ok(drop)
    }

    /// Sends close_notify and shuts down sending; see [`Stream::shutdown_write`].
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.say_goodbye();
        self.socket.shutdown_write()
    }

    /// See [`Stream::set_linger_reset`].
    pub fn set_linger_reset(&self) -> io::Result<()> {
        if let Stage::Tls(state) = &mut *self.stage.borrow_mut() {
            state.farewell = Farewell::Withheld;
        }
        self.socket.set_linger_reset()
    }

    /// See [`Stream::has_unread`].
    pub fn has_unread(&self) -> bool {
        let has_received = match &*self.stage.borrow() {
            Stage::Tls(state) => !state.plain.is_empty() || !state.incoming.is_empty(),
            Stage::Clear | Stage::Begun => false,
        };
        has_received || self.socket.has_unread()
    }

    /// Sends close_notify, unless data that was encrypted has not left.
    fn say_goodbye(&self) {
        let Ok(mut stage) = self.stage.try_borrow_mut() else { return };
        let Stage::Tls(state) = &mut *stage else { return };
        let is_withheld = state.farewell == Farewell::Withheld || state.outgoing.has_data();
        if is_withheld || state.close().is_err() || state.outgoing.is_empty() {
            return;
        }
        // If close_notify cannot be sent at once, the client only sees the connection close.
        if let Ok(sent) = self.socket.try_send(&mut state.outgoing.bytes, false) {
            state.outgoing.note_left(sent);
        }
    }

    /// `true` if a completed handshake resumed a session.
    pub fn is_resumed(&self) -> bool {
        let stage = self.stage.borrow();
        stage.session().is_some_and(|session| session.library.handshake_kind() == Some(HandshakeKind::Resumed))
    }

    /// Properties of a client's session; `None` without TLS, during the handshake and on the client side.
    pub fn details<T>(&self, ask: impl FnOnce(&TlsDetails<'_>) -> T) -> Option<T> {
        let stage = self.stage.borrow();
        let Stage::Tls(state) = &*stage else { return None };
        let session = state.hold.session()?;
        let (has_early, is_handshaking) = (state.progress == Progress::Early, session.library.is_handshaking());
        if is_handshaking && !has_early {
            return None;
        }
        let server = session.server.as_ref()?;
        let hello = self.hello.borrow();
        let server_name = hello.server_name.as_deref();
        Some(ask(&TlsDetails { session, server, is_early: has_early && is_handshaking, server_name }))
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.say_goodbye();
        }
    }
}

impl Stage {
    fn session(&self) -> Option<&Session> {
        match self {
            Stage::Tls(state) => state.hold.session(),
            Stage::Clear | Stage::Begun => None,
        }
    }
}

impl Hold {
    /// The session, unless a pool thread has it.
    fn session(&self) -> Option<&Session> {
        match self {
            Hold::Here(session) | Hold::Failed(session, _) => Some(session),
            Hold::Signing(_) | Hold::Gone => None,
        }
    }
}

impl Progress {
    fn note_step(&mut self) {
        if *self == Progress::New {
            *self = Progress::Stepped;
        }
    }
}

impl State {
    fn new(session: Box<Session>) -> State {
        State {
            hold: Hold::Here(session),
            incoming: Buffer::new(),
            plain: Buffer::new(),
            outgoing: Outgoing::default(),
            window: Window::default(),
            progress: Progress::New,
            reading: Reading::Open,
            farewell: Farewell::Due,
        }
    }

    /// Ready when no slow handshake step is pending. A signature with a long RSA key takes milliseconds, so the whole
    /// session moves to a thread of the default pool for that step.
    fn poll_signing(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TlsFailure>> {
        let is_slow = |session: &Session| session.signs_slowly && session.library.is_handshaking();
        self.hold = match std::mem::replace(&mut self.hold, Hold::Gone) {
            Hold::Here(mut session) if !self.incoming.is_empty() && is_slow(&session) => {
                let mut incoming = self.incoming.readable().to_vec();
                Hold::Signing(Box::pin(default_pool().run(move || {
                    let mut encoded = Vec::new();
                    let stepped = session.library.step_slowly(&mut incoming, &mut encoded);
                    Signed { session, incoming, encoded, stepped }
                })))
            }
            other => other,
        };
        let Hold::Signing(signing) = &mut self.hold else { return Poll::Ready(Ok(())) };
        let signed = ready!(signing.as_mut().poll(context));
        self.hold = Hold::Gone;
        let Signed { session, incoming, encoded, stepped } = signed
            .map_err(|error| TlsFailure::of_socket(io::Error::new(io::ErrorKind::OutOfMemory, error.to_string())))?;
        self.hold = Hold::Here(session);
        self.progress.note_step();
        self.incoming.readable_mut().copy_from_slice(&incoming);
        if !encoded.is_empty() {
            self.outgoing.append(&encoded).map_err(TlsFailure::of_socket)?;
        }
        let (discard, failure) = match stepped {
            Ok(discard) => (discard, None),
            Err((discard, failure)) => (discard, Some(failure)),
        };
        self.incoming.consume(discard);
        Poll::Ready(match failure {
            None => Ok(()),
            Some(failure) => {
                self.fail(&failure);
                Err(failure)
            }
        })
    }

    /// Estimated cost of the next handshake step: see [`HEAVY_STEP`].
    fn step_micros(&self) -> usize {
        let Hold::Here(session) = &self.hold else { return 0 };
        match &session.server {
            _ if self.progress == Progress::New => HEAVY_STEP,
            _ if self.incoming.is_empty() => 0,
            // TLSv1.2 agrees on keys in the last step, as does TLSv1.3 after a HelloRetryRequest.
            Some(server) => {
                let is_light = session.library.protocol_version() == Some(ProtocolVersion::TLSv1_3)
                    && session.library.handshake_kind() != Some(HandshakeKind::FullWithHelloRetryRequest)
                    && server.verify_client() == VerifyClient::Off;
                if is_light { LIGHT_STEP } else { HEAVY_STEP }
            }
            None => HEAVY_STEP,
        }
    }

    /// Records a failure: the session stops and the peer gets an alert.
    fn fail(&mut self, failure: &TlsFailure) {
        self.hold = match std::mem::replace(&mut self.hold, Hold::Gone) {
            Hold::Here(mut session) => {
                self.outgoing.push_alerts(&mut session.library, &mut self.incoming);
                Hold::Failed(session, failure.clone())
            }
            other => other,
        };
        self.incoming.clear();
    }

    fn is_handshaking(&self) -> bool {
        self.hold.session().is_some_and(|session| session.library.is_handshaking())
    }

    fn is_client(&self) -> bool {
        self.hold.session().is_some_and(|session| session.server.is_none())
    }

    /// Processes received bytes. Decrypted data waits in `plain`.
    fn advance(&mut self) -> Result<Standing, TlsFailure> {
        self.advance_for(None).map(|(standing, _)| standing)
    }

    /// As [`State::advance`], but puts the first decrypted piece into the reader's buffer, as far as there is room, and
    /// returns its length. Stops after that piece.
    fn advance_for(&mut self, mut reader: Option<(&mut Buffer, usize)>) -> Result<(Standing, usize), TlsFailure> {
        if let Hold::Failed(_, failure) = &self.hold {
            return Err(failure.clone());
        }
        let advanced = self.process(&mut reader);
        if let Err(failure) = &advanced {
            self.fail(failure);
        }
        advanced
    }

    fn process(&mut self, reader: &mut Option<(&mut Buffer, usize)>) -> Result<(Standing, usize), TlsFailure> {
        loop {
            let Hold::Here(session) = &mut self.hold else { return Err(TlsFailure::Closed) };
            let step = Step {
                plain: &mut self.plain,
                outgoing: &mut self.outgoing,
                reading: &mut self.reading,
                progress: &mut self.progress,
            };
            let stepped = session.library.step(self.incoming.readable_mut(), step, reader);
            let Stepped { discard, standing, delivered } = match stepped {
                Ok(stepped) => stepped,
                Err((discard, failure)) => {
                    self.incoming.consume(discard);
                    return Err(failure);
                }
            };
            self.incoming.consume(discard);
            if let Some(standing) = standing {
                if self.incoming.len() > INCOMING_MAX {
                    return Err(TlsFailure::TooLarge);
                }
                return Ok((standing, delivered));
            }
        }
    }

    fn take_plain(&mut self, into: &mut Buffer, max: usize) -> io::Result<usize> {
        if into.is_empty() && self.plain.len() <= max {
            *into = std::mem::take(&mut self.plain);
            return Ok(into.len());
        }
        let count = self.plain.len().min(max);
        into.append(&self.plain.readable()[..count])?;
        self.plain.consume(count);
        Ok(count)
    }

    /// Largest contents of a record at this time.
    fn record_bytes(&mut self) -> usize {
        let Hold::Here(session) = &self.hold else { return FIRST_RECORD_BYTES };
        self.window.record_bytes(session.record_bytes)
    }

    /// Encrypts the beginning of `out`, which stays there, and appends it to `outgoing`. Returns the length.
    ///
    /// # Errors
    /// Errors of the session; `OutOfMemory` if there was no memory for any record.
    fn encrypt_batch(&mut self, out: &Output) -> io::Result<usize> {
        thread_local! {
            /// Buffer that joins pieces into one record.
            static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        SCRATCH.with_borrow_mut(|scratch| {
            let mut encrypted = 0;
            let mut chunks = out.chunks();
            let mut rest: &[u8] = &[];
            for _ in 0..BATCH_RECORDS {
                let limit = self.record_bytes();
                if rest.is_empty() {
                    let Some(next) = chunks.next() else { break };
                    rest = next;
                }
                let (mut record, behind) = rest.split_at(rest.len().min(limit));
                rest = behind;
                if record.len() < limit
                    && let Some(mut next) = chunks.next()
                {
                    scratch.clear();
                    scratch.extend_from_slice(record);
                    loop {
                        let (now, later) = next.split_at(next.len().min(limit - scratch.len()));
                        scratch.extend_from_slice(now);
                        rest = later;
                        if scratch.len() == limit {
                            break;
                        }
                        match chunks.next() {
                            Some(chunk) => next = chunk,
                            None => break,
                        }
                    }
                    record = scratch;
                }
                match self.encrypt(record) {
                    // The rest follows when this has left.
                    Err(error) if error.kind() == io::ErrorKind::OutOfMemory && encrypted > 0 => break,
                    result => result?,
                }
                encrypted += record.len();
            }
            Ok(encrypted)
        })
    }

    /// Encrypts one record.
    fn encrypt(&mut self, plain: &[u8]) -> io::Result<()> {
        let record = self.write(plain.len() + RECORD_OVERHEAD, Writing::Plain(plain))?;
        self.window.sent_bytes = self.window.sent_bytes.saturating_add(plain.len());
        self.outgoing.push(record, plain.len());
        Ok(())
    }

    /// Encodes close_notify, once.
    fn close(&mut self) -> io::Result<()> {
        let Hold::Here(session) = &self.hold else { return Ok(()) };
        if session.library.is_handshaking() || self.farewell != Farewell::Due {
            return Ok(());
        }
        self.farewell = Farewell::Encoded;
        let alert = self.write(RECORD_OVERHEAD, Writing::CloseNotify)?;
        self.outgoing.push(alert, 0);
        Ok(())
    }

    /// Encodes data into a lease of about this size.
    fn write(&mut self, size: usize, writing: Writing<'_>) -> io::Result<Lease> {
        // Received data is processed first, because the session requires this order.
        if self.advance()? != Standing::Open {
            return Err(TlsFailure::Closed.into());
        }
        let Hold::Here(session) = &mut self.hold else { return Err(TlsFailure::Closed.into()) };
        let (discard, record) = session.library.write(self.incoming.readable_mut(), size, writing)?;
        self.incoming.consume(discard);
        Ok(record)
    }
}

impl Outgoing {
    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// `true` if application data is queued.
    fn has_data(&self) -> bool {
        self.records.iter().any(|record| record.plain > 0)
    }

    /// Appends messages of the session.
    pub(super) fn append(&mut self, messages: &[u8]) -> io::Result<()> {
        self.bytes.append(messages)?;
        self.records.push(Record { left: messages.len() as u32, plain: 0 });
        Ok(())
    }

    /// Appends a record with this number of application bytes.
    fn push(&mut self, record: Lease, plain: usize) {
        self.records.push(Record { left: record.len() as u32, plain: plain as u32 });
        self.bytes.push(record.freeze());
    }

    /// Encodes alerts after a failure. The library must not process further records: it does not while it has something
    /// to send, but it relies on seeing the records that it has seen before.
    fn push_alerts(&mut self, library: &mut Library, incoming: &mut Buffer) {
        while library.wants_write() {
            let mut alert = [0; 256];
            let Some(count) = library.encode_alert(incoming.readable_mut(), &mut alert) else { return };
            if self.append(&alert[..count]).is_err() {
                return;
            }
        }
    }

    /// Notes that bytes have left; returns how many application bytes they contained.
    fn note_left(&mut self, mut count: usize) -> usize {
        let (mut plain, mut done) = (0, 0);
        for record in &mut self.records {
            let left = count.min(record.left as usize);
            record.left -= left as u32;
            count -= left;
            if record.left > 0 {
                break;
            }
            plain += record.plain as usize;
            done += 1;
        }
        self.records.drain(..done);
        plain
    }
}

impl Window {
    /// Largest contents of a record at this time, if it is `largest` in a grown window.
    fn record_bytes(&mut self, largest: usize) -> usize {
        let now = gale_runtime::now();
        if self.last_sent.replace(now).is_none_or(|last| now.since(last) > PAUSE) {
            self.sent_bytes = 0;
        }
        if self.sent_bytes < FIRST_BYTES { largest.min(FIRST_RECORD_BYTES) } else { largest }
    }
}

/// Properties of a session.
pub struct TlsDetails<'s> {
    session: &'s Session,
    server: &'s Arc<TlsServer>,
    server_name: Option<&'s [u8]>,
    is_early: bool,
}

impl TlsDetails<'_> {
    fn common(&self) -> &CommonState {
        &self.session.library
    }

    /// `true` if the client's data is early data, which an attacker may have recorded and replayed: the handshake is
    /// not complete.
    pub fn is_early(&self) -> bool {
        self.is_early
    }

    /// The server whose rules the handshake followed.
    pub fn server(&self) -> &Arc<TlsServer> {
        self.server
    }

    /// The client's SNI.
    pub fn server_name(&self) -> Option<&[u8]> {
        self.server_name
    }

    /// `TLSv1.3`
    pub fn version(&self) -> &'static str {
        self.common().protocol_version().map_or("", suites::version_name)
    }

    /// OpenSSL's name of the cipher suite.
    pub fn cipher(&self) -> &'static str {
        self.common().negotiated_cipher_suite().map_or("", |suite| suites::suite_name(suite.suite()))
    }

    /// OpenSSL's name of the key exchange group; `None` in a resumed TLSv1.2 session.
    pub fn curve(&self) -> Option<&'static str> {
        self.common().negotiated_key_exchange_group().map(|group| suites::group_name(group.name()))
    }

    /// The protocol negotiated with ALPN.
    pub fn alpn(&self) -> Option<&[u8]> {
        self.common().alpn_protocol()
    }

    /// `true` if the session was resumed.
    pub fn is_resumed(&self) -> bool {
        self.common().handshake_kind() == Some(HandshakeKind::Resumed)
    }

    /// The client's certificate.
    pub fn client_certificate(&self) -> Option<Certificate<'_>> {
        self.common().peer_certificates()?.first().and_then(|certificate| Certificate::of(certificate))
    }

    /// Verdict on the client's certificate.
    pub fn verdict(&self) -> Verdict {
        let judge = || verify::judge(self.server.client_rules(), self.common().peer_certificates().unwrap_or(&[]));
        let verdict = self.session.verdict.get().unwrap_or_else(judge);
        self.session.verdict.set(Some(verdict));
        verdict
    }

    /// The chain from the client's certificate to the authority; empty if verification failed.
    pub fn verified_chain(&self) -> Vec<Vec<u8>> {
        verify::verified_chain(self.server.client_rules(), self.common().peer_certificates().unwrap_or(&[]))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::net::TcpListener;
    use std::rc::Rc;

    use super::*;

    use gale_runtime::{EventLoop, LoopOptions, SocketAddress, spawn, yield_now};
    use rustls::pki_types::{PrivateKeyDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, SupportedProtocolVersion};

    /// Configurations of a server, and of a client that trusts it.
    fn configs(version: &'static SupportedProtocolVersion) -> (ServerConfig, Arc<ClientConfig>) {
        let own = rcgen::generate_simple_self_signed(["example.com".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_protocol_versions(&[version]).unwrap().with_no_client_auth();
        let server = builder.with_single_cert(vec![own.cert.der().clone()], key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(own.cert.der().clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
        (server, Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
    }

    /// Server side before the handshake, and a client that trusts it.
    fn sides(version: &'static SupportedProtocolVersion) -> (State, ClientConnection) {
        let (server, client) = configs(version);
        let client = ClientConnection::new(client, ServerName::try_from("example.com").unwrap()).unwrap();
        let server = TlsServer::of_config(server);
        let library = Library::Server(UnbufferedServerConnection::new(Arc::clone(server.config(false))).unwrap());
        let (record_bytes, server) = (server.record_bytes(), Some(server));
        let session = Session { library, record_bytes, signs_slowly: false, server, verdict: Cell::new(None) };
        (State::new(Box::new(session)), client)
    }

    /// Passes bytes to the tested side in pieces of this size, with one byte changed if its place is among them.
    /// Returns the number of bytes.
    fn carry(
        state: &mut State,
        mut bytes: Vec<u8>,
        piece: usize,
        change: Option<(usize, u8)>,
    ) -> Result<usize, TlsFailure> {
        if let Some((place, value)) = change
            && let Some(byte) = bytes.get_mut(place)
        {
            *byte ^= value;
        }
        for piece in bytes.chunks(piece) {
            state.incoming.append(piece).unwrap();
            if let Err(failure) = state.advance() {
                // Later calls fail as well.
                assert!(state.advance().is_err() && state.close().is_ok());
                assert!(state.write(9, Writing::CloseNotify).is_err());
                return Err(failure);
            }
        }
        Ok(bytes.len())
    }

    /// Passes the client's bytes to the server in pieces of this size, with one byte changed, and the answers back.
    /// Returns the bytes that the server has read, or its failure.
    fn talk(
        version: &'static SupportedProtocolVersion,
        piece: usize,
        change: Option<(usize, u8)>,
    ) -> Result<(Vec<u8>, usize), TlsFailure> {
        let (mut state, mut client) = sides(version);
        let (mut sent, mut has_asked) = (0, false);
        for _ in 0..20 {
            if !client.is_handshaking() && !std::mem::replace(&mut has_asked, true) {
                io::Write::write_all(&mut client.writer(), &[b'x'; 20_000]).unwrap();
                client.refresh_traffic_keys().ok();
                client.send_close_notify();
            }
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            sent += carry(&mut state, bytes, piece, change.map(|(place, value)| (place.wrapping_sub(sent), value)))?;
            let answer: Vec<u8> = state.outgoing.bytes.chunks().flatten().copied().collect();
            let length = answer.len();
            state.outgoing = Outgoing::default();
            if client.read_tls(&mut &answer[..]).is_err() || client.process_new_packets().is_err() {
                break;
            }
            if has_asked && length == 0 {
                break;
            }
        }
        Ok((state.plain.readable().to_vec(), sent))
    }

    /// As [`talk`], with the client as the tested side.
    fn listen(
        version: &'static SupportedProtocolVersion,
        piece: usize,
        change: Option<(usize, u8)>,
    ) -> Result<(Vec<u8>, usize), TlsFailure> {
        let (server, client) = configs(version);
        let mut server = rustls::ServerConnection::new(Arc::new(server)).unwrap();
        let name = ServerName::try_from("example.com").unwrap();
        let library = Library::Client(rustls::client::UnbufferedClientConnection::new(client, name).unwrap());
        let verdict = Cell::new(None);
        let session = Session { library, record_bytes: RECORD_BYTES_MAX, signs_slowly: false, server: None, verdict };
        let mut state = State::new(Box::new(session));
        state.advance()?;
        let (mut sent, mut has_answered) = (0, false);
        for _ in 0..20 {
            let asked: Vec<u8> = state.outgoing.bytes.chunks().flatten().copied().collect();
            state.outgoing = Outgoing::default();
            if server.read_tls(&mut &asked[..]).is_err() || server.process_new_packets().is_err() {
                break;
            }
            if !server.is_handshaking() && !std::mem::replace(&mut has_answered, true) {
                io::Write::write_all(&mut server.writer(), &[b'x'; 20_000]).unwrap();
                server.refresh_traffic_keys().ok();
                server.send_close_notify();
            }
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            if bytes.is_empty() && asked.is_empty() {
                break;
            }
            sent += carry(&mut state, bytes, piece, change.map(|(place, value)| (place.wrapping_sub(sent), value)))?;
        }
        Ok((state.plain.readable().to_vec(), sent))
    }

    /// Signature of [`talk`] and [`listen`].
    type Carries =
        fn(&'static SupportedProtocolVersion, usize, Option<(usize, u8)>) -> Result<(Vec<u8>, usize), TlsFailure>;

    fn assert_that_changed_bytes_are_never_accepted(carries: Carries) {
        for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
            let (read, length) = carries(version, usize::MAX, None).unwrap();
            assert_eq!(read, [b'x'; 20_000]);
            for piece in [1, 7, 600] {
                assert_eq!(carries(version, piece, None).unwrap().0, [b'x'; 20_000]);
            }
            // Every third place in the handshake, and some behind it.
            let places = (0..length).filter(|place| *place < 2200 && place % 3 == 0 || place % 977 == 0);
            for place in places {
                for (piece, value) in [(usize::MAX, 1 << (place % 8)), (61, 0xff)] {
                    if let Ok((read, _)) = carries(version, piece, Some((place, value))) {
                        // The end may be lost; or the byte did not matter, as in an unused name.
                        assert!(read.iter().all(|&byte| byte == b'x'));
                    }
                }
            }
        }
    }

    #[test]
    fn changed_bytes_of_a_client_neither_panic_nor_are_accepted() {
        assert_that_changed_bytes_are_never_accepted(talk);
    }

    #[test]
    fn changed_bytes_of_a_server_neither_panic_nor_are_accepted() {
        assert_that_changed_bytes_are_never_accepted(listen);
    }

    #[test]
    fn a_task_that_wants_little_goes_before_handshakes_that_begin_at_once() {
        let (config, client) = configs(&rustls::version::TLS13);
        let server = TlsServer::of_config(config);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = SocketAddress::from(listener.local_addr().unwrap());
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let mut ends = Vec::new();
            let mut streams = Vec::new();
            for _ in 0..10 {
                let name = ServerName::try_from("example.com").unwrap();
                let (mut hello, mut received) = (Vec::new(), Buffer::new());
                ClientConnection::new(Arc::clone(&client), name).unwrap().write_tls(&mut hello).unwrap();
                received.append(&hello).unwrap();
                let stream = Rc::new(TlsStream::new(Stream::connect(&address).await.unwrap()));
                ends.push(listener.accept().unwrap());
                stream.start(&server, None, false, received).unwrap();
                streams.push(stream);
            }
            for stream in &streams {
                let stream = Rc::clone(stream);
                spawn(async move { drop(poll_fn(|context| stream.poll_handshake(context)).await) });
            }
            let has_stepped = |stream: &Rc<TlsStream>| match &*stream.stage.borrow() {
                Stage::Tls(state) => state.progress != Progress::New,
                Stage::Clear | Stage::Begun => false,
            };
            let answered = Rc::new(move || streams.iter().filter(|stream| has_stepped(stream)).count());
            let before_quiet = Rc::new(Cell::new(usize::MAX));
            let (quiet, seen) = (Rc::clone(&before_quiet), Rc::clone(&answered));
            spawn(async move { quiet.set(seen()) });
            while answered() < 10 {
                let before = answered();
                yield_now().await;
                assert!(answered() - before <= 5, "five take a turn's share of the loop");
            }
            assert_eq!(before_quiet.get(), 0);
        });
    }

    #[test]
    fn bytes_count_as_sent_when_their_record_is() {
        let mut outgoing = Outgoing::default();
        for (left, plain) in [(100, 0), (50, 30), (40, 20), (10, 0)] {
            outgoing.records.push(Record { left, plain });
        }
        assert_eq!([outgoing.note_left(99), outgoing.note_left(50), outgoing.note_left(1)], [0, 0, 30]);
        assert_eq!([outgoing.note_left(39), outgoing.note_left(11)], [0, 20]);
        assert!(outgoing.records.is_empty());
    }
}
