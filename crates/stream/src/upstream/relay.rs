//! Carries bytes both ways between a client and its server.
//!
//! Each direction is on its own: it waits for its source, its destination or its rate, and the other one goes on. In
//! the clear bytes pass by a [`Splice`], which costs no memory while nothing comes; over TLS, and with a rate, piece by
//! piece through memory.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_engine::tls::TlsFailure;
use gale_engine::transport::Transport;
use gale_engine::upstream::Timing;
use gale_engine::variables::subject::Subject;
use gale_runtime::{Buffer, Lease, Moment, Output, SocketAddress, Splice, Timer};

use super::pass::Server;
use super::rate::Rate;
use super::settings::ProxySettings;
use crate::session::{self, Session};

/// How a session between two ends is over.
enum End {
    /// This side has ended, and the other one has all of it.
    Disconnected(Side),
    /// Nothing has passed for too long.
    Idle,
    /// A side was lost.
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

/// Carries a session until it is over; the result is its status.
/// Nobody has taken `input`, what the client has said so far. (A block, because the future of an `async fn` holds its
/// arguments and what they have become.)
pub(super) fn carry<'s>(
    session: &'s Session,
    settings: &ProxySettings,
    server: Server,
    input: Buffer,
) -> impl Future<Output = u16> + use<'s> {
    let mut relay = Relay::new(session, settings, server, input);
    async move {
        let end = poll_fn(|context| relay.poll(context)).await;
        // What a server has said to its end is to reach a client that is still sending.
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
    /// When something has passed last.
    last_moved: Moment,
    /// Stays where it is while something passes, and is set anew when it expires: that is rarer.
    idle: Timer,
    /// When that is.
    idle_look: Moment,
    has_first_byte: bool,
}

impl Drop for Relay<'_> {
    /// The server's figures have it, also if the session is closed from outside.
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
        // What the client has said so far goes behind our own words.
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
            // The first time when it is looked at.
            idle_look: Moment::from_nanos(0),
            has_first_byte: false,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        let has_moved = match self.poll_both(context) {
            Ok(has_moved) => has_moved,
            Err(end) => return Poll::Ready(end),
        };
        // A direction that waits for its rate is not silent.
        let is_silent = !has_moved && !self.upload.waits_for_rate && !self.download.waits_for_rate;
        self.poll_idle(context, is_silent).map(|()| End::Idle)
    }

    /// Ready when nothing has passed for too long.
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

    /// Carries what there is. Says whether anything has passed; the error is the end.
    ///
    /// A direction that has nothing more is woken by itself: only the other one is asked again.
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

    /// A side has ended, and the other one has all of it: it is told, or everything is over.
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
        // Who has closed the connection meanwhile is found out by reading.
        let _ = destination.shutdown_write();
        Ok(true)
    }

    /// Says how it ended.
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
        // A connection that nobody reads to its end would be reset with what is on its way to the client.
        drop(self.server.counted.take());
    }
}

fn lost(error: io::Error, act: Act, from: Side, to: Side) -> End {
    End::Lost(if act == Act::Reading { from } else { to }, act, error)
}

/// One direction.
struct Direction {
    way: Way,
    /// Nothing else keeps it from receiving.
    waits_for_rate: bool,
    /// What was received and not counted yet.
    received: usize,
    /// The source has ended, and the destination has all.
    is_over: bool,
}

/// How bytes pass.
enum Way {
    /// From socket to socket. So much of it was counted as received.
    Splice { splice: Splice, counted: usize },
    /// Through memory.
    Copy(Box<Copying>),
}

/// How bytes pass through memory.
struct Copying {
    rate: Rate,
    /// So much is received at once.
    piece_bytes: usize,
    /// While there is something to send.
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

    /// Has small pieces leave at once, for a destination of this address. (Over TLS they have since the handshake.)
    fn set_nodelay(&mut self, to: &Transport, address: &SocketAddress) {
        let Some(socket) = to.plain().filter(|_| address.inet().is_some()) else { return };
        match &mut self.way {
            Way::Splice { splice, .. } => splice.set_nodelay(),
            // Whether the kernel waits for more is a matter of speed alone.
            Way::Copy { .. } => drop(socket.set_nodelay(true)),
        }
    }

    /// Sends this first. It counts as received before.
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

    /// Moves what there is; ready with how much the destination has taken, or with 0 when the source has ended and all
    /// was taken.
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
                        // Who is not told would take what it has for cut short. An error comes up with the next byte.
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

    /// What has been received since this was asked last.
    fn take_received(&mut self) -> usize {
        std::mem::take(&mut self.received)
    }

    /// What was being done when an error came up.
    fn failed_act(&self) -> Act {
        let is_sending = match &self.way {
            Way::Splice { splice, .. } => splice.failed_sending(),
            Way::Copy(copying) => copying.is_sending,
        };
        if is_sending { Act::Sending } else { Act::Reading }
    }
}
