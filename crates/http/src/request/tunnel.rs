//! Tunnels: connections that carry plain bytes both ways after a 101, or a 2xx to CONNECT. (RFC 9110 §7.8 and §9.3.6)
//!
//! The directions are independent: each goes on when the other one waits or has ended, so that two ends that both write
//! before they read never wait for each other here. What is held of each is bounded.

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

    /// Sends on what was written. Ready when more may be written; after [`Tunnel::end`] when all of it has left.
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BodyError>>;

    /// Takes bytes from the client. Only when [`Tunnel::poll_ready`] has said so.
    fn write(&mut self, bytes: Bytes);

    /// The client has ended its direction: nothing more will be written.
    fn end(&mut self);

    /// How long nothing may pass in either direction.
    fn idle_max(&self) -> Duration;
}

impl fmt::Debug for dyn Tunnel {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Tunnel")
    }
}

/// What is being done, in nginx's words.
const PROXYING: &str = "proxying upgraded connection";

/// Why a tunnel ended. The error log knows.
pub(crate) enum End {
    /// Both directions have ended.
    Ended,
    Idle,
    Client(Gone),
    Broken(BodyError),
}

/// A tunnel whose head the client has been given.
pub struct Opened {
    /// The client's end.
    pub(crate) response: ResponseBody,
    pub(crate) other_end: Box<dyn Tunnel>,
}

/// Carries bytes both ways until both directions have ended, one end is lost, or nothing has passed for too long. It
/// needs no request meanwhile.
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
    /// Returns `true` if the client cannot see the end otherwise.
    fn is_hidden_from_client(&self) -> bool {
        !matches!(self, End::Ended | End::Client(Gone::ByPeer))
    }

    /// Tells the error log.
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
    /// How much the client had taken when this was looked at last.
    sent: u64,
    client_has_ended: bool,
    other_has_ended: bool,
}

impl Carrier {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if let Err(end) = self.poll_both(context) {
            return Poll::Ready(end);
        }
        // What the client takes passes, too, although nothing new has come.
        let sent = self.client.exchange().sent().bytes;
        if std::mem::replace(&mut self.sent, sent) != sent {
            self.idle.set_after(self.tunnel.idle_max());
        }
        self.idle.poll_expired(context).map(|()| End::Idle)
    }

    /// Carries what there is; an error is the end, whichever.
    fn poll_both(&mut self, context: &mut Context<'_>) -> Result<(), End> {
        loop {
            let takes_more = is_ready(self.tunnel.poll_ready(context).map_err(End::Broken))?;
            let from_client = takes_more && !self.client_has_ended && self.read_client(context)?;
            let client_takes_more = is_ready(self.client.poll_ready(LOW_WATER_BYTES, context).map_err(End::Client))?;
            let to_client = client_takes_more && !self.other_has_ended && self.read_other(context)?;
            if self.client_has_ended && self.other_has_ended {
                // Asked anew: before its end was told, it was only whether more is taken.
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

    /// Whether something came from the client, its end included.
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

    /// Whether something came from the other end, its end included.
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
