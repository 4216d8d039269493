//! Copies bytes both ways between a client and its server.
//!
//! The directions are independent: if one waits for its source, its destination or its rate, the other continues. Plain
//! connections use a [`Splice`], which takes no memory while idle. With TLS or a rate limit bytes are copied through
//! memory.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::variables::subject::Subject;
use gale_runtime::{Buffer, Lease, Moment, Output, SocketAddress, Splice, Timer};
use gale_tls::TlsFailure;
use gale_tls::Transport;
use gale_upstream::Timing;

use super::pass::Server;
use super::rate::Rate;
use super::settings::ProxySettings;
use crate::session::{self, Session};

/// The end of a session.
enum End {
    /// This side has closed, and everything it sent was delivered.
    Disconnected(Side),
    /// The idle timeout has expired.
    Idle,
    /// Reading from or sending to a side has failed.
    Lost(Side, Act, io::Error),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Upstream,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    Reading,
    Sending,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Side::Client { "client" } else { "upstream" })
    }
}

/// Relays a session until it is over. Returns its status. `input` holds bytes that the client has already sent. (Not an
/// `async fn`: its future would hold the arguments as well as the values made from them.)
pub(super) fn carry<'s>(
    session: &'s Session,
    settings: &ProxySettings,
    server: Server,
    input: Buffer,
) -> impl Future<Output = u16> + use<'s> {
    let mut relay = Relay::new(session, settings, server, input);
    async move {
        let end = poll_fn(|context| relay.poll(context)).await;
        // The client may still be sending; lingering ensures that it receives the server's last bytes.
        let may_be_unread = matches!(end, End::Disconnected(Side::Upstream));
        relay.finish(end);
        if may_be_unread {
            Box::pin(session.linger()).await;
        }
        session::OK
    }
}

struct Relay<'s> {
    session: &'s Session,
    client: &'s Transport,
    server: Server,
    upload: Direction,
    download: Direction,
    half_close: bool,
    idle_max: Duration,
    /// Time when bytes last passed.
    last_moved: Moment,
    /// Idle timer. It is set again only when it expires, which is rarer than resetting it whenever bytes pass.
    idle: Timer,
    /// Expiry of the idle timer.
    idle_look: Moment,
    has_first_byte: bool,
}

impl Drop for Relay<'_> {
    /// Updates the server's statistics, also if the session is closed from outside.
    fn drop(&mut self) {
        let mut attempt = self.session.attempts.last();
        attempt.end(gale_runtime::now());
        self.server.chosen.note_served(&attempt.served());
    }
}

impl<'s> Relay<'s> {
    fn new(session: &'s Session, settings: &ProxySettings, mut server: Server, input: Buffer) -> Relay<'s> {
        let client = session.transport().expect("a session over TCP has a connection");
        let (upload_rate, download_rate) = settings.rates(session);
        let is_plain = client.plain().is_some() && server.transport.plain().is_some();
        let piece_bytes = settings.piece_bytes();
        let mut upload = Direction::new(upload_rate, is_plain, piece_bytes);
        let mut download = Direction::new(download_rate, is_plain, piece_bytes);
        if *session.core().tcp_nodelay.get() {
            upload.set_nodelay(&server.transport, server.chosen.address());
            download.set_nodelay(client, &session.connection().remote);
        }
        // The client's first bytes follow the PROXY protocol header.
        let mut ahead = Output::new();
        let header = std::mem::take(&mut server.header);
        if !header.is_empty() {
            ahead.push(header);
        }
        if let Some(input) = input.into_lease() {
            ahead.push(input);
        }
        upload.begin_with(ahead);
        Relay {
            session,
            client,
            server,
            upload,
            download,
            half_close: *settings.half_close.get(),
            idle_max: *settings.timeout.get(),
            last_moved: gale_runtime::now(),
            idle: Timer::new(),
            // In the past: the first poll sets the timer.
            idle_look: Moment::from_nanos(0),
            has_first_byte: false,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        let has_moved = match self.poll_both(context) {
            Ok(has_moved) => has_moved,
            Err(end) => return Poll::Ready(end),
        };
        // A direction that waits for its rate is not idle.
        let is_silent = !has_moved && !self.upload.waits_for_rate && !self.download.waits_for_rate;
        self.poll_idle(context, is_silent).map(|()| End::Idle)
    }

    /// Ready if the idle timeout has expired.
    fn poll_idle(&mut self, context: &mut Context<'_>, is_silent: bool) -> Poll<()> {
        let now = gale_runtime::now();
        if !is_silent {
            self.last_moved = now;
        }
        if now < self.idle_look {
            return Poll::Pending;
        }
        self.idle_look = self.last_moved + self.idle_max;
        self.idle.set(self.idle_look);
        self.idle.poll_expired(context)
    }

    /// Copies what is available in both directions. Returns whether any bytes passed; the error is the end of the
    /// session.
    ///
    /// A direction that returned `Pending` wakes the task itself, so the loop polls only the other one again.
    fn poll_both(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        let (mut up, mut down, mut has_moved) = (true, true, false);
        while up || down {
            up = up && self.poll_upload(context)?;
            down = down && self.poll_download(context)?;
            if self.upload.is_over && self.download.is_over {
                return Err(End::Disconnected(if down { Side::Upstream } else { Side::Client }));
            }
            has_moved |= up || down;
        }
        Ok(has_moved)
    }

    fn poll_upload(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        let Relay { session, client, server, upload, .. } = self;
        let polled = upload.poll(context, client, &server.transport);
        session.count_received(upload.take_received());
        match polled {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => self.end_of(Side::Client),
            Poll::Ready(Ok(count)) => {
                session.attempts.last().bytes_sent += count as u64;
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(lost(error, upload.failed_act(), Side::Client, Side::Upstream)),
        }
    }

    fn poll_download(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        let Relay { session, client, server, download, has_first_byte, .. } = self;
        let polled = download.poll(context, &server.transport, client);
        let received = download.take_received();
        if received > 0 {
            let mut attempt = session.attempts.last();
            attempt.bytes_received += received as u64;
            if !std::mem::replace(has_first_byte, true) {
                let time = gale_runtime::now().since(attempt.started);
                attempt.first_byte_time = Some(time);
                server.chosen.header_received(time);
            }
        }
        match polled {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => self.end_of(Side::Upstream),
            Poll::Ready(Ok(count)) => {
                session.count_sent(count);
                Ok(true)
            }
            Poll::Ready(Err(error)) => Err(lost(error, download.failed_act(), Side::Upstream, Side::Client)),
        }
    }

    /// A side has closed, and everything it sent was delivered: shuts the other side down with half-close, else ends
    /// the session.
    fn end_of(&mut self, side: Side) -> Result<bool, End> {
        let (direction, destination) = match side {
            Side::Client => (&mut self.upload, &self.server.transport),
            Side::Upstream => (&mut self.download, self.client),
        };
        if direction.is_over {
            return Ok(false);
        }
        direction.is_over = true;
        if !self.half_close {
            return Err(End::Disconnected(side));
        }
        // If the destination has closed meanwhile, the next read reports it.
        let _ = destination.shutdown_write();
        Ok(true)
    }

    /// Logs the end of the session.
    fn finish(mut self, end: End) {
        let session = self.session;
        let started = session.attempts.last().started;
        let response = gale_runtime::now().since(started);
        let header = {
            let attempt = session.attempts.last();
            if self.server.chosen.counts_connecting() { attempt.connect_time } else { attempt.first_byte_time }
        };
        self.server.chosen.succeed(Timing { header, response });
        match end {
            End::Disconnected(side) => {
                let (from, to) = (session.received(), session.sent());
                let (from_upstream, to_upstream) = {
                    let attempt = session.attempts.last();
                    (attempt.bytes_received, attempt.bytes_sent)
                };
                session.log_bare(
                    Level::Info,
                    format_args!(
                        "{side} disconnected, bytes from/to client:{from}/{to}, bytes from/to \
                         upstream:{from_upstream}/{to_upstream}"
                    ),
                );
            }
            End::Idle => {
                let message = "connection timed out (110: Connection timed out) while proxying connection";
                session.log(Level::Info, format_args!("{message}"));
            }
            End::Lost(side, act, error) => {
                let (call, doing) = match act {
                    Act::Reading => ("recv()", "reading from"),
                    Act::Sending => ("send()", "sending to"),
                };
                let level = if side == Side::Client { Level::Info } else { Level::Error };
                match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsFailure>()) {
                    Some(failure) => session.log(level, format_args!("{failure} while proxying and {doing} {side}")),
                    None => {
                        let error = OsErrorText(&error);
                        session.log(level, format_args!("{call} failed {error} while proxying and {doing} {side}"));
                    }
                }
            }
        }
        // Lingering needs no connection slot for the server.
        drop(self.server.counted.take());
    }
}

fn lost(error: io::Error, act: Act, from: Side, to: Side) -> End {
    End::Lost(if act == Act::Reading { from } else { to }, act, error)
}

struct Direction {
    way: Way,
    /// The rate limit alone delays receiving.
    waits_for_rate: bool,
    /// Bytes received and not yet counted.
    received: usize,
    /// The source has closed, and everything was delivered.
    is_over: bool,
}

enum Way {
    /// From socket to socket. `counted` is the number of bytes in the pipe that were counted as received.
    Splice { splice: Splice, counted: usize },
    /// Through memory.
    Copy(Box<Copying>),
}

struct Copying {
    rate: Rate,
    /// Size of a read.
    piece_bytes: usize,
    /// Present only while there are bytes to send.
    output: Option<Box<Output>>,
    has_ended: bool,
    is_sending: bool,
}

impl Direction {
    fn new(rate: u64, is_plain: bool, piece_bytes: usize) -> Direction {
        let way = if is_plain && rate == 0 {
            Way::Splice { splice: Splice::new(), counted: 0 }
        } else {
            let rate = Rate::new(rate);
            Way::Copy(Box::new(Copying { rate, piece_bytes, output: None, has_ended: false, is_sending: false }))
        };
        Direction { way, waits_for_rate: false, received: 0, is_over: false }
    }

    /// Sets `TCP_NODELAY` for a destination with this address. (With TLS it is set before the handshake.)
    fn set_nodelay(&mut self, to: &Transport, address: &SocketAddress) {
        let Some(socket) = to.plain().filter(|_| address.inet().is_some()) else { return };
        match &mut self.way {
            Way::Splice { splice, .. } => splice.set_nodelay(),
            // A failure costs only speed.
            Way::Copy { .. } => drop(socket.set_nodelay(true)),
        }
    }

    /// Queues bytes to send first. They were counted as received before.
    fn begin_with(&mut self, ahead: Output) {
        let length = ahead.len_bytes();
        match &mut self.way {
            Way::Splice { splice, counted } => {
                splice.begin_with(ahead);
                *counted = length;
            }
            Way::Copy(copying) => copying.output = (length > 0).then(|| Box::new(ahead)),
        }
    }

    /// Copies what is available. Ready with the number of bytes delivered, or with 0 when the source has closed and
    /// everything was delivered.
    fn poll(&mut self, context: &mut Context<'_>, from: &Transport, to: &Transport) -> Poll<io::Result<usize>> {
        self.waits_for_rate = false;
        if self.is_over {
            return Poll::Pending;
        }
        match &mut self.way {
            Way::Splice { splice, counted } => {
                let (Some(from), Some(to)) = (from.plain(), to.plain()) else {
                    return Poll::Ready(Err(io::ErrorKind::Unsupported.into()));
                };
                let polled = splice.poll_transfer(context, from, to);
                if let Poll::Ready(Ok(sent)) = &polled {
                    let under_way = splice.under_way();
                    self.received += (sent + under_way).saturating_sub(*counted);
                    *counted = under_way;
                } else {
                    let under_way = splice.under_way();
                    self.received += under_way.saturating_sub(*counted);
                    *counted = under_way;
                }
                polled
            }
            Way::Copy(copying) => loop {
                if let Some(output) = &mut copying.output {
                    copying.is_sending = true;
                    let sent = ready!(to.poll_send(context, output));
                    if output.is_empty() {
                        copying.output = None;
                    }
                    return Poll::Ready(sent);
                }
                copying.is_sending = false;
                if copying.has_ended {
                    if let Some(tls) = to.tls() {
                        // Without `close_notify` the peer would regard the data as truncated. An error appears with the
                        // next byte.
                        let _ = ready!(tls.poll_goodbye(context));
                    }
                    return Poll::Ready(Ok(0));
                }
                let Poll::Ready(allowance) = copying.rate.poll_allowance(context) else {
                    self.waits_for_rate = true;
                    return Poll::Pending;
                };
                let max = usize::try_from(allowance).unwrap_or(usize::MAX).min(copying.piece_bytes);
                let mut input = Buffer::new();
                let count = ready!(from.poll_recv(context, &mut input, max))?;
                copying.has_ended = count == 0;
                copying.rate.note(count);
                self.received += count;
                if let Some(lease) = input.take_lease() {
                    copying.output.get_or_insert_default().push(Lease::freeze(lease));
                }
            },
        }
    }

    /// Returns the number of bytes received since the last call.
    fn take_received(&mut self) -> usize {
        std::mem::take(&mut self.received)
    }

    fn failed_act(&self) -> Act {
        let is_sending = match &self.way {
            Way::Splice { splice, .. } => splice.failed_sending(),
            Way::Copy(copying) => copying.is_sending,
        };
        if is_sending { Act::Sending } else { Act::Reading }
    }
}
