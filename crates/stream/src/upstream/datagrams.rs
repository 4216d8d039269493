//! Copies datagrams both ways between a client and its server.
//! (<https://nginx.org/en/docs/stream/ngx_stream_proxy_module.html#proxy_responses>)
//!
//! Each session has its own socket to the server, on an unpredictable port. After the first datagrams the listener's
//! task forwards the client's datagrams directly (`DatagramClient`); the session's task waits for answers and for the
//! end.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_runtime::{DatagramOptions, Moment, ReceiveBatch, Timer};
use gale_upstream::connecting::CONNECTING;
use gale_upstream::{Chosen, Timing};

use super::pass::{Connected, Failure};
use super::rate::Rate;
use super::settings::ProxySettings;
use crate::session::datagrams::{Arrived, DatagramClient, Outlet, PLACE_BYTES, count_of, is_lost, with_batch};
use crate::session::loss::Loss;
use crate::session::{self, Session};

/// A server that a session sends datagrams to.
pub(super) struct Server {
    outlet: Rc<Outlet>,
    chosen: Chosen,
}

/// Pause of receiving after memory was exhausted.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);

/// Opens a socket to the server. Its connection slot was reserved when the session began.
pub(super) fn open(
    session: &Session,
    settings: &ProxySettings,
    chosen: Chosen,
) -> Result<Connected, (Chosen, Failure)> {
    let options = settings.connect_options(session);
    let options = DatagramOptions {
        local: options.local,
        transparent: options.transparent,
        peer: Some(chosen.address().clone()),
        receive_buffer: options.receive_buffer,
        send_buffer: options.send_buffer,
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
            let outlet = Rc::new(Outlet::new(socket, chosen.address()));
            Ok(Connected::Datagrams(Server { outlet, chosen }))
        }
        Err(error) => {
            let (name, text) = (chosen.name(), OsErrorText(&error));
            if is_of_server(&error, options.local.is_some()) {
                session.log(Level::Error, format_args!("connect() to {name} failed {text} while {CONNECTING}"));
                return Err((chosen, Failure::OfServer));
            }
            // Another server would fail in the same way.
            let call = match error.raw_os_error() {
                Some(libc::EPERM) if options.transparent => "setsockopt(IP_TRANSPARENT)",
                _ if options.local.is_some() => "bind()",
                _ => "socket()",
            };
            session.log(Level::Crit, format_args!("{call} failed {text} while {CONNECTING}"));
            Err((chosen, Failure::Final(session::INTERNAL_SERVER_ERROR)))
        }
    }
}

/// Returns true if the socket could not be opened because the server is unreachable. Other errors are local.
pub(super) fn is_of_server(error: &io::Error, is_bound: bool) -> bool {
    match error.raw_os_error() {
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN | libc::ECONNREFUSED) => true,
        // Without a bound address the route is prohibited; with one the local port may be privileged.
        Some(libc::EACCES) => !is_bound,
        _ => false,
    }
}

/// The end of a session.
enum End {
    /// All expected answers have arrived.
    Done,
    /// The idle timeout has expired.
    Silent,
    /// The server cannot be reached.
    Lost(&'static str, io::Error),
}

/// Copies datagrams until the session is over. Returns its status.
pub(super) async fn carry(session: &Session, settings: &ProxySettings, server: Server) -> u16 {
    let client = session.datagrams().expect("a session over UDP has datagrams");
    let (upload_rate, download_rate) = settings.rates(session);
    let mut carrier = Carrier {
        session,
        settings,
        client,
        outlet: server.outlet,
        chosen: server.chosen,
        header: settings.proxy_header(session),
        upload: Rate::new(upload_rate),
        download: Rate::new(download_rate),
        answers: 0,
        is_joining: false,
        truncated: 0,
        last_passed: gale_runtime::now(),
        is_forwarding: false,
        sent: 0,
        idle: Timer::after(*settings.timeout.get()),
        pause: None,
    };
    let end = poll_fn(|context| carrier.poll(context)).await;
    carrier.finish(end)
}

struct Carrier<'s> {
    session: &'s Session,
    settings: &'s ProxySettings,
    client: &'s DatagramClient,
    outlet: Rc<Outlet>,
    chosen: Chosen,
    /// PROXY protocol header. It precedes the contents of the first datagram.
    header: Vec<u8>,
    upload: Rate,
    download: Rate,
    /// Datagrams received from the server.
    answers: u64,
    /// The kernel joins answers (`UDP_GRO`).
    is_joining: bool,
    /// Answers lost because they were longer than their buffer.
    truncated: u64,
    /// Time of the last datagram in either direction.
    last_passed: Moment,
    is_forwarding: bool,
    /// Bytes sent to the server by this task.
    sent: u64,
    idle: Timer,
    /// Runs after memory for receiving was exhausted.
    pause: Option<Timer>,
}

impl Carrier<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        match self.poll_all(context) {
            Ok(()) => {}
            Err(end) => return Poll::Ready(end),
        }
        if self.is_over() {
            return Poll::Ready(End::Done);
        }
        loop {
            let last = self.last_passed.max(self.client.last());
            let deadline = last + *self.settings.timeout.get();
            if self.idle.deadline() != Some(deadline) {
                self.idle.set(deadline);
            }
            if self.idle.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
            if self.last_passed.max(self.client.last()) == last {
                // Datagrams delayed by the rate limit do not count as idleness.
                return if self.client.has_waiting() { Poll::Pending } else { Poll::Ready(End::Silent) };
            }
        }
    }

    fn poll_all(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        self.poll_client(context)?;
        self.poll_server(context)
    }

    /// Sends the queued datagrams to the server.
    fn poll_client(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        loop {
            match self.client.poll_arrived(context) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Err(End::Lost("send() failed", error)),
                Poll::Pending => {
                    let may_forward = !self.upload.is_limited() && self.header.is_empty();
                    if may_forward && !std::mem::replace(&mut self.is_forwarding, true) {
                        self.client.forward_to(Rc::clone(&self.outlet));
                    }
                    return Ok(());
                }
            }
            if self.upload.poll_allowance(context).is_pending() {
                return Ok(());
            }
            let Some(Arrived { bytes, stride }) = self.client.take() else { continue };
            let sent = if self.header.is_empty() {
                self.outlet.send(&bytes, stride)
            } else {
                self.send_with_header(&bytes, stride)
            };
            match sent {
                Ok(()) => self.sent += bytes.len() as u64,
                Err(error) if is_lost(&error) => Loss::NoRoom.note(Arrived::count_of(bytes.len(), stride)),
                Err(error) => return Err(End::Lost("send() failed", error)),
            }
            self.last_passed = gale_runtime::now();
            self.upload.note(bytes.len());
        }
    }

    fn send_with_header(&mut self, bytes: &[u8], stride: usize) -> io::Result<()> {
        let (first, rest) = bytes.split_at(bytes.len().min(stride));
        let datagram = [&self.header, first].concat();
        self.outlet.send(&datagram, datagram.len())?;
        // If this datagram is lost, the next one carries the header.
        self.sent += std::mem::take(&mut self.header).len() as u64;
        if rest.is_empty() { Ok(()) } else { self.outlet.send(rest, stride) }
    }

    /// Sends the server's answers to the client.
    fn poll_server(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        if let Some(pause) = &mut self.pause {
            if pause.poll_expired(context).is_pending() {
                return Ok(());
            }
            self.pause = None;
        }
        loop {
            if self.download.poll_allowance(context).is_pending() {
                return Ok(());
            }
            let received = with_batch(|batch| match self.poll_answers(context, batch) {
                Poll::Pending => None,
                Poll::Ready(Ok(())) => {
                    self.pass_answers(batch);
                    batch.clear();
                    Some(Ok(()))
                }
                Poll::Ready(Err(error)) => Some(Err(error)),
            });
            match received {
                None => return Ok(()),
                Some(Ok(())) => {}
                // The error is local, not the server's.
                Some(Err(error)) if is_lost(&error) => {
                    let pause = self.pause.insert(Timer::after(MEMORY_PAUSE));
                    if pause.poll_expired(context).is_pending() {
                        return Ok(());
                    }
                }
                Some(Err(error)) => return Err(End::Lost("recv() failed", error)),
            }
            if self.is_over() {
                return Ok(());
            }
        }
    }

    /// Receives answers from the server. Most sessions have only one. From the second on, the kernel is asked to join
    /// them.
    fn poll_answers(&mut self, context: &mut Context<'_>, batch: &mut ReceiveBatch) -> Poll<io::Result<()>> {
        let socket = self.outlet.socket();
        if self.answers == 0 {
            return socket.poll_recv_single(context, batch).map_ok(drop);
        }
        let received = ready!(socket.poll_recv_batch(context, batch))?;
        if received > 0 && self.chosen.address().inet().is_some() && !std::mem::replace(&mut self.is_joining, true) {
            // A kernel without `UDP_GRO` delivers them one by one.
            let _ = socket.set_gro();
        }
        Poll::Ready(Ok(()))
    }

    fn pass_answers(&mut self, batch: &ReceiveBatch) {
        let now = gale_runtime::now();
        self.last_passed = now;
        let session = self.session;
        for (received, bytes) in batch.iter() {
            let answer = Arrived::count_of(bytes.len(), received.stride.max(1));
            self.answers += answer;
            self.download.note(bytes.len());
            {
                let mut attempt = session.attempts.last();
                attempt.bytes_received += bytes.len() as u64;
                if attempt.first_byte_time.is_none() {
                    let time = now.since(attempt.started);
                    attempt.first_byte_time = Some(time);
                    self.chosen.header_received(time);
                    self.chosen.is_there();
                }
            }
        }
        // Truncated datagrams count as answers but are not passed on: the client must not mistake a part for the whole.
        let truncated = batch.iter().filter(|(received, _)| received.is_truncated).count() as u64;
        Loss::Truncated.note(truncated);
        self.truncated += truncated;
        let whole = batch.iter().filter(|(received, _)| !received.is_truncated);
        let whole = whole.map(|(received, bytes)| (bytes, received.stride.max(1)));
        // Sending errors are not fatal: if the client is unreachable, these answers are lost.
        self.client.send_all(whole, |transmit, sent| match sent {
            Ok(()) => session.count_sent(transmit.contents.len()),
            Err(_) => Loss::NoRoom.note(count_of(transmit)),
        });
    }

    /// Returns true if all datagrams were sent to the server and all answers have arrived.
    fn is_over(&self) -> bool {
        self.is_answered() && !self.client.has_waiting()
    }

    /// Returns true if `proxy_responses` is set and that many answers have arrived for all datagrams.
    fn is_answered(&self) -> bool {
        let Some(&responses) = self.settings.responses.get_opt() else { return false };
        let requests = self.client.datagrams();
        let requests_max = *self.settings.requests.get();
        (requests_max == 0 || requests >= requests_max) && self.answers >= responses.saturating_mul(requests)
    }

    /// Returns true if the number of answers is not configured, or if all have arrived.
    fn may_end(&self) -> bool {
        let expected = self.settings.responses.get_opt();
        expected.is_none_or(|responses| self.answers >= responses.saturating_mul(self.client.datagrams()))
    }

    fn finish(mut self, end: End) -> u16 {
        let session = self.session;
        self.count_sent();
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

    fn count_sent(&self) {
        self.session.attempts.last().bytes_sent = self.sent + self.client.forwarded();
    }

    fn fail(&mut self) {
        if self.chosen.fail() {
            let message = "upstream server temporarily disabled while proxying connection";
            self.session.log(Level::Warn, format_args!("{message}"));
        }
    }
}

impl Drop for Carrier<'_> {
    /// Records the bytes sent and the end of the attempt, also for a session that is closed from outside.
    fn drop(&mut self) {
        self.count_sent();
        if self.truncated > 0 {
            let truncated = self.truncated;
            let message = format_args!(
                "recvmsg() truncated data: {truncated} answers were lost, longer than {PLACE_BYTES} bytes, while \
                 proxying connection"
            );
            self.session.log(Level::Warn, message);
        }
        let mut attempt = self.session.attempts.last();
        attempt.end(gale_runtime::now());
        self.chosen.note_served(&attempt.served());
    }
}
