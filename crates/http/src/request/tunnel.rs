//! Tunnels: connections that carry plain bytes both ways after a 101, or a 2xx to CONNECT. (RFC 9110 §7.8 and §9.3.6)
//!
//! The directions are independent: each continues when the other one waits or has ended, so two ends that both write
//! before they read do not deadlock. The bytes buffered for each direction are bounded.

use std::fmt;
use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_runtime::{Bytes, Timer};

use crate::request::Request;
use crate::request::body::{BodyError, BodyItem};
use crate::request::exchange::{BodyLimits, Gone, LOW_WATER_BYTES, RequestBodyError, ResponseBody};

/// The other end of a client's tunnel, which a module gives with
/// [`Flow::Upgrade`](crate::request::phases::Flow::Upgrade).
pub trait Tunnel {
    /// The next bytes for the client; `None` at the end of that direction.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BodyError>>;

    /// Sends the written bytes. Ready when more may be written; after [`Tunnel::end`], when all of them have been sent.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>>;

    /// Takes bytes from the client. To be called only when [`Tunnel::poll_ready`] was ready.
    fn write(&mut self, bytes: Bytes);

    /// The client has ended its direction: nothing more will be written.
    fn end(&mut self);

    /// Maximum time without bytes in either direction.
    fn idle_max(&self) -> Duration;
}

impl fmt::Debug for dyn Tunnel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Tunnel")
    }
}

/// nginx's phrase in log messages.
const PROXYING: &str = "proxying upgraded connection";

/// Reason for the end of a tunnel, for the error log.
pub(crate) enum End {
    /// Both directions have ended.
    Ended,
    Idle,
    Client(Gone),
    Broken(BodyError),
}

/// A tunnel whose response head has been sent.
pub struct Opened {
    /// The client's end.
    pub(crate) response: ResponseBody,
    pub(crate) other_end: Box<dyn Tunnel>,
}

/// Carries bytes both ways until both directions have ended, one end is lost, or the tunnel has been idle for too long.
/// It needs no request meanwhile.
pub(crate) fn carry(opened: Opened) -> impl Future<Output = End> {
    let Opened { response: client, other_end: tunnel } = opened;
    let idle = Timer::after(tunnel.idle_max());
    let mut carrier = Carrier { client, tunnel, idle, sent: 0, client_has_ended: false, other_has_ended: false };
    poll_fn(move |context| {
        let end = ready!(carrier.poll(context));
        if end.is_hidden_from_client() {
            carrier.client.abort();
        }
        Poll::Ready(end)
    })
}

impl End {
    /// `true` if only an abort shows the client the end.
    fn is_hidden_from_client(&self) -> bool {
        !matches!(self, End::Ended | End::Client(Gone::ByPeer))
    }

    /// Writes the reason to the error log.
    pub(crate) fn tell(self, request: &Request) {
        match self {
            End::Ended => {
                request.log(Level::Info, format_args!("both ends closed the connection while {PROXYING}"));
            }
            End::Client(Gone::ByPeer) => {
                request.log(Level::Info, format_args!("client prematurely closed connection while {PROXYING}"));
            }
            End::Client(gone) => {
                request.log(Level::Info, format_args!("client connection was lost ({gone:?}) while {PROXYING}"))
            }
            End::Idle => {
                request
                    .log(Level::Info, format_args!("upstream timed out (110: Connection timed out) while {PROXYING}"));
            }
            End::Broken(error) => request.log(Level::Error, format_args!("{error} while {PROXYING}")),
        }
    }
}

struct Carrier {
    client: ResponseBody,
    tunnel: Box<dyn Tunnel>,
    idle: Timer,
    /// Bytes sent to the client at the last check.
    sent: u64,
    client_has_ended: bool,
    other_has_ended: bool,
}

impl Carrier {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if let Err(end) = self.poll_both(context) {
            return Poll::Ready(end);
        }
        // Bytes that the client takes count as activity, even if no new ones have arrived.
        let sent = self.client.exchange().sent().bytes;
        if std::mem::replace(&mut self.sent, sent) != sent {
            self.idle.set_after(self.tunnel.idle_max());
        }
        self.idle.poll_expired(context).map(|()| End::Idle)
    }

    /// Carries the available bytes; the error is the end of the tunnel, with any reason.
    fn poll_both(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        loop {
            let takes_more = is_ready(self.tunnel.poll_ready(context).map_err(End::Broken))?;
            let from_client = takes_more && !self.client_has_ended && self.read_client(context)?;
            let client_takes_more = is_ready(self.client.poll_ready(LOW_WATER_BYTES, context).map_err(End::Client))?;
            let to_client = client_takes_more && !self.other_has_ended && self.read_other(context)?;
            if self.client_has_ended && self.other_has_ended {
                // Polled again: after `end`, ready means that all bytes have been sent.
                let other_has_all = is_ready(self.tunnel.poll_ready(context).map_err(End::Broken))?;
                let client_has_all = is_ready(self.client.poll_sent(context).map_err(End::Client))?;
                return if client_has_all && other_has_all { Err(End::Ended) } else { Ok(()) };
            }
            if !from_client && !to_client {
                return Ok(());
            }
            self.idle.set_after(self.tunnel.idle_max());
        }
    }

    /// Returns `true` if bytes, or the end, came from the client.
    fn read_client(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        match self.client.exchange().poll_body(context, &BodyLimits::NONE) {
            Poll::Pending => return Ok(false),
            Poll::Ready(Ok(Some(BodyItem::Bytes(bytes)))) => self.tunnel.write(bytes),
            Poll::Ready(Ok(Some(_))) => {}
            Poll::Ready(Ok(None)) => {
                self.client_has_ended = true;
                self.tunnel.end();
            }
            Poll::Ready(Err(RequestBodyError::PeerGone)) => return Err(End::Client(Gone::ByPeer)),
            Poll::Ready(Err(error)) => return Err(End::Broken(BodyError::Request(error))),
        }
        Ok(true)
    }

    /// Returns `true` if bytes, or the end, came from the other end.
    fn read_other(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        match self.tunnel.poll_read(context) {
            Poll::Pending => return Ok(false),
            Poll::Ready(Ok(Some(bytes))) => self.client.push(BodyItem::Bytes(bytes)),
            Poll::Ready(Ok(None)) => {
                self.other_has_ended = true;
                self.client.end();
            }
            Poll::Ready(Err(error)) => return Err(End::Broken(error)),
        }
        Ok(true)
    }
}

fn is_ready<E>(polled: Poll<Result<(), E>>) -> Result<bool, E> {
    match polled {
        Poll::Ready(result) => result.map(|()| true),
        Poll::Pending => Ok(false),
    }
}
