//! Carries datagrams both ways between a client and its server.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_responses>)
//!
//! A session has a socket of its own to the server, on a port that nobody can foretell. What a client sends goes on
//! without this task, once the first datagrams have (`DatagramClient`); the task waits for answers and for the end.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::upstream::connecting::CONNECTING;
use gale_engine::upstream::{Chosen, Timing};
use gale_engine::variables::subject::Subject;
use gale_engine::worker::CountedConnection;
use gale_runtime::{Datagram, DatagramOptions, Moment, ReceiveBatch, Timer, Transmit};

use super::header;
use super::pass::{Connected, Failure, count_connection};
use super::rate::Rate;
use super::settings::ProxySettings;
use crate::session::datagrams::{Arrived, DatagramClient, send_segments, with_batch};
use crate::session::{self, Session};

/// A server that a session sends datagrams to.
pub(super) struct Outlet {
    socket: Rc<Datagram>,
    chosen: Chosen,
    _counted: CountedConnection,
}

/// Opens a socket to the server.
pub(super) fn open(
    session: &Session,
    settings: &ProxySettings,
    chosen: Chosen,
) -> Result<Connected, (Chosen, Failure)> {
    let counted = match count_connection(session) {
        Ok(counted) => counted,
        Err(failure) => return Err((chosen, failure)),
    };
    let options = settings.connect_options(session);
    let options = DatagramOptions {
        local: options.local,
        peer: Some(chosen.address().clone()),
        receive_buffer: options.receive_buffer,
        send_buffer: options.send_buffer,
        gro: true,
        ..DatagramOptions::default()
    };
    match options.open() {
        Ok(socket) => {
            let mut chosen = chosen;
            let time = {
                let mut attempt = session.attempts.last();
                let time = gale_runtime::now().since(attempt.started);
                *attempt.connect_time.insert(time)
            };
            chosen.connected(time);
            if session.scope().error_log.takes(Level::Info)
                && let Ok(local) = socket.local_address()
            {
                session.log_bare(Level::Info, format_args!("udp proxy {local} connected to {}", chosen.name()));
            }
            Ok(Connected::Datagrams(Outlet { socket: Rc::new(socket), chosen, _counted: counted }))
        }
        Err(error) => {
            let (name, text) = (chosen.name(), OsErrorText(&error));
            session.log(Level::Error, format_args!("connect() to {name} failed {text} while {CONNECTING}"));
            Err((chosen, Failure::OfServer))
        }
    }
}

/// How a session is over.
enum End {
    /// Everything has been answered.
    Done,
    /// Nothing has come for too long.
    Silent,
    /// The server cannot be reached.
    Lost(&'static str, io::Error),
}

/// Carries a session until it is over; the result is its status.
pub(super) async fn carry(session: &Session, settings: &ProxySettings, outlet: Outlet) -> u16 {
    let client = session.datagrams().expect("a session over UDP has datagrams");
    let (upload_rate, download_rate) = settings.rates(session);
    let mut carrier = Carrier {
        session,
        settings,
        client,
        socket: Rc::clone(&outlet.socket),
        chosen: outlet.chosen,
        header: header::header(session, *settings.protocol.get()),
        upload: Rate::new(upload_rate),
        download: Rate::new(download_rate),
        answers: 0,
        last_answer: gale_runtime::now(),
        is_forwarding: false,
        sent: 0,
        idle: Timer::after(*settings.timeout.get()),
    };
    let end = poll_fn(|context| carrier.poll(context)).await;
    carrier.finish(end)
}

struct Carrier<'s> {
    session: &'s Session,
    settings: &'s ProxySettings,
    client: &'s DatagramClient,
    socket: Rc<Datagram>,
    chosen: Chosen,
    /// Goes before the first datagram, in the same one.
    header: Vec<u8>,
    upload: Rate,
    download: Rate,
    /// How many datagrams have come from the server.
    answers: u64,
    last_answer: Moment,
    is_forwarding: bool,
    /// How many bytes this task has sent to the server.
    sent: u64,
    idle: Timer,
}

impl Carrier<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        match self.poll_all(context) {
            Ok(()) => {}
            Err(end) => return Poll::Ready(end),
        }
        if self.is_answered() {
            return Poll::Ready(End::Done);
        }
        loop {
            let last = self.last_answer.max(self.client.last());
            let deadline = last + *self.settings.timeout.get();
            if self.idle.deadline() != Some(deadline) {
                self.idle.set(deadline);
            }
            if self.idle.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
            if self.last_answer.max(self.client.last()) == last {
                return Poll::Ready(End::Silent);
            }
        }
    }

    fn poll_all(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        self.poll_client(context)?;
        self.poll_server(context)
    }

    /// Sends on what waits.
    fn poll_client(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        loop {
            match self.client.poll_arrived(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Err(End::Lost("send() failed", error)),
                Poll::Pending => {
                    if !self.upload.is_limited() && !std::mem::replace(&mut self.is_forwarding, true) {
                        self.client.forward_to(Rc::clone(&self.socket));
                    }
                    return Ok(());
                }
            }
            if self.upload.poll_allowance(context).is_pending() {
                return Ok(());
            }
            let Some(Arrived { bytes, stride }) = self.client.take() else { continue };
            let sent = if self.header.is_empty() {
                send_segments(&self.socket, Transmit::to_peer(&bytes), stride)
            } else {
                self.send_with_header(&bytes, stride)
            };
            match sent {
                Ok(()) => self.sent += bytes.len() as u64,
                // As in a network, what there is no room for is lost.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(End::Lost("send() failed", error)),
            }
            self.upload.note(bytes.len());
        }
    }

    fn send_with_header(&mut self, bytes: &[u8], stride: usize) -> io::Result<()> {
        let (first, rest) = bytes.split_at(bytes.len().min(stride));
        let mut datagram = std::mem::take(&mut self.header);
        self.sent += datagram.len() as u64;
        datagram.extend_from_slice(first);
        send_segments(&self.socket, Transmit::to_peer(&datagram), datagram.len())?;
        if rest.is_empty() { Ok(()) } else { send_segments(&self.socket, Transmit::to_peer(rest), stride) }
    }

    /// Gives the client what the server has answered.
    fn poll_server(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        loop {
            if self.download.poll_allowance(context).is_pending() {
                return Ok(());
            }
            let received = with_batch(|batch| match self.socket.poll_recv_batch(context, batch) {
                Poll::Pending => None,
                Poll::Ready(Ok(_)) => {
                    self.pass_answers(batch);
                    batch.clear();
                    Some(Ok(()))
                }
                Poll::Ready(Err(error)) => Some(Err(error)),
            });
            match received {
                None => return Ok(()),
                Some(Ok(())) => {}
                Some(Err(error)) => return Err(End::Lost("recv() failed", error)),
            }
            if self.is_answered() {
                return Ok(());
            }
        }
    }

    fn pass_answers(&mut self, batch: &ReceiveBatch) {
        self.last_answer = gale_runtime::now();
        let session = self.session;
        for (received, bytes) in batch.iter() {
            let answer = Arrived::count_of(bytes.len(), received.stride.max(1));
            self.answers += answer;
            self.download.note(bytes.len());
            {
                let mut attempt = session.attempts.last();
                attempt.bytes_received += bytes.len() as u64;
                if attempt.first_byte_time.is_none() {
                    let time = self.last_answer.since(attempt.started);
                    attempt.first_byte_time = Some(time);
                    self.chosen.header_received(time);
                    self.chosen.is_there();
                }
            }
            // A client that cannot be reached misses it, as it would any other.
            if self.client.send(bytes, received.stride.max(1)).is_ok() {
                session.count_sent(bytes.len());
            }
        }
    }

    /// Whether so many answers have come as are expected.
    fn is_answered(&self) -> bool {
        let Some(&responses) = self.settings.responses.get_opt() else { return false };
        let requests = self.client.datagrams();
        let requests_max = *self.settings.requests.get();
        (requests_max == 0 || requests >= requests_max) && self.answers >= responses.saturating_mul(requests)
    }

    /// Whether nobody knows how many answers are to come, or all have.
    fn may_end(&self) -> bool {
        let expected = self.settings.responses.get_opt();
        expected.is_none_or(|responses| self.answers >= responses.saturating_mul(self.client.datagrams()))
    }

    fn finish(mut self, end: End) -> u16 {
        let session = self.session;
        session.count_received(usize::try_from(self.client.bytes()).unwrap_or(usize::MAX));
        session.attempts.last().bytes_sent = self.sent + self.client.forwarded();
        let (status, word) = match end {
            End::Done => (session::OK, "done"),
            End::Silent if self.may_end() => (session::OK, "timed out"),
            End::Silent => {
                let message = "upstream timed out (110: Connection timed out) while proxying connection";
                session.log(Level::Error, format_args!("{message}"));
                self.fail();
                return session::BAD_GATEWAY;
            }
            End::Lost(what, error) => {
                let error = OsErrorText(&error);
                session.log(Level::Error, format_args!("{what} {error} while proxying connection"));
                self.fail();
                return session::BAD_GATEWAY;
            }
        };
        let (response, header) = {
            let attempt = session.attempts.last();
            let header = if self.chosen.counts_connecting() { attempt.connect_time } else { attempt.first_byte_time };
            (gale_runtime::now().since(attempt.started), header)
        };
        self.chosen.succeed(Timing { header, response });
        let (requests, answers) = (self.client.datagrams(), self.answers);
        let (from, to) = (session.received(), session.sent());
        let attempt = session.attempts.last();
        let (from_upstream, to_upstream) = (attempt.bytes_received, attempt.bytes_sent);
        session.log_bare(
            Level::Info,
            format_args!(
                "udp {word}, packets from/to client:{requests}/{answers}, bytes from/to client:{from}/{to}, bytes \
                 from/to upstream:{from_upstream}/{to_upstream}"
            ),
        );
        status
    }

    fn fail(&mut self) {
        if self.chosen.fail() {
            let message = "upstream server temporarily disabled while proxying connection";
            self.session.log(Level::Warn, format_args!("{message}"));
        }
    }
}
