//! One request and its response, as all code above the codecs sees them.
//!
//! ```text
//!   Exchange: the client, its request's body, bytes sent      ResponseStart ── head ──► ResponseBody
//! ```
//!
//! The interface is full duplex: the response may begin, and end, before the request's body has been read, and a task
//! may wait for both directions at once. A request holds its [`Exchange`], which cannot write. [`ResponseStart`] writes
//! the response's head, and becomes a [`ResponseBody`] by that: there is only one head, and a tunnel begins with it.
//! Each version of HTTP implements [`ResponseWriter`], as does the mock in this folder, whose tests check the order of
//! calls.
//!
//! No call blocks, and every queue is bounded: `ResponseBody::push` queues an item, and callers await
//! `ResponseBody::poll_ready` before they push more.

#[cfg(test)]
pub(crate) mod mock;
#[cfg(test)]
mod streams;

use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_protocol::request::Scheme;
use gale_runtime::{Bytes, SocketAddress, TcpInfo};
use gale_tls::TlsStream;

use crate::files::delivery::FileOptions;
use crate::request::Request;
use crate::request::body::{BodyError, BodyItem};
use crate::request::configuration::settings::MinRate;
use crate::request::slow::ExchangeWaits;

/// Number of bytes queued for the client above which the source of a body or tunnel is not polled.
pub const LOW_WATER_BYTES: u64 = 16 * 1024;

/// Reason why an exchange cannot continue. In every case it can no longer use its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The client closed or reset the connection (or the stream).
    ByPeer,
    /// The client accepted no bytes for `send_timeout`.
    SendTimedOut,
    /// The response could not be completed, and was broken off in a way that the client notices.
    Aborted,
}

/// Reason why a request's body cannot be read, and the status of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestBodyError {
    /// The client closed or reset the connection before the end.
    PeerGone,
    /// No bytes arrived for `client_body_timeout`: 408.
    TimedOut,
    /// Slower than `client_body_min_rate`: 408.
    TooSlow,
    /// Longer than `client_max_body_size`: 413.
    TooLarge,
    /// Not framed as its protocol demands: 400.
    Malformed,
    /// The worker's memory for buffers is exhausted: 503.
    NoMemory,
    /// The body could not be stored: 500. Returned by the code that stores bodies, never by an exchange.
    NotStored,
}

impl RequestBodyError {
    /// Returns the status of the response.
    pub fn status(self) -> u16 {
        match self {
            RequestBodyError::PeerGone => 400,
            RequestBodyError::TimedOut | RequestBodyError::TooSlow => 408,
            RequestBodyError::TooLarge => 413,
            RequestBodyError::Malformed => 400,
            RequestBodyError::NoMemory => 503,
            RequestBodyError::NotStored => 500,
        }
    }
}

/// Numbers of bytes sent, for the logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// All bytes, including the head and the framing.
    pub bytes: u64,
    /// Bytes counted as the head. As in nginx, they include frame headers over HTTP/2, but not the framing of chunks.
    pub head_bytes: u64,
}

impl Sent {
    /// Counts bytes of the head.
    pub fn add_head(&mut self, bytes: u64) {
        self.head_bytes += bytes;
        self.bytes += bytes;
    }
}

/// Numbers of bytes transferred in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// Bytes of the request: its head and its body.
    pub received: u64,
    /// Bytes of the response.
    pub sent: Sent,
}

/// Length of a response's body, which determines how the client recognises its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLength {
    /// No body may follow: HEAD, 204, 304. The head may still announce a length.
    NoBody,
    /// The length in bytes, as announced in the head.
    Known(u64),
    /// Unknown before the end.
    UntilEnd,
}

/// Logs that values of the head were changed ([`gale_protocol::http1::response::clean_value`]). Shared by all versions
/// of HTTP.
#[cold]
pub(crate) fn log_changed_values(request: &Request) {
    let message = "line ends in values of the response header are sent as spaces";
    request.log(Level::Warn, format_args!("{message}"));
}

/// Options of a response that the request and its location determine, independent of the version of HTTP.
#[derive(Clone, Debug)]
pub struct ResponseOptions {
    /// Length of the body.
    pub length: BodyLength,
    /// Options for sending files and for gathering output. `None` for a body that is passed as a whole.
    pub files: Option<FileOptions>,
    /// `send_timeout`
    pub send_timeout: Duration,
}

/// Limits of a location on reading the request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyLimits {
    /// `client_max_body_size` in bytes, 0 for none.
    pub length_max: u64,
    /// `client_body_timeout`
    pub silence_max: Duration,
    /// `client_body_min_rate`
    pub min_rate: Option<MinRate>,
}

impl BodyLimits {
    /// No limits, for bytes that are no request's body, such as those of a tunnel.
    pub const NONE: BodyLimits = BodyLimits { length_max: 0, silence_max: Duration::MAX, min_rate: None };
}

/// One request and its response, as seen from above the codecs. Only the worker that owns the connection calls these
/// methods.
pub trait Exchange {
    /// Returns the connection that carries the exchange.
    fn connection(&self) -> &ConnectionInfo;
    /// Returns the local address of the connection, which the first call looks up.
    fn local_address(&self) -> Option<&SocketAddress>;
    /// Returns the scheme of requests on the connection.
    fn scheme(&self) -> Scheme {
        Scheme::Http
    }
    /// Returns the TLS session of the connection, if it has one.
    fn tls(&self) -> Option<&TlsStream> {
        None
    }
    /// Returns the kernel's state of the connection, if it is a TCP connection.
    fn tcp_info(&self) -> Option<TcpInfo> {
        None
    }
    /// Returns the writer of the response. Only [`ResponseStart`] has the permit for it.
    fn writer(self: Rc<Self>, permit: Permit) -> Rc<dyn ResponseWriter>;
    /// Sends an interim response (100, 103). Has no effect after the final head.
    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]);
    /// Returns `true` if trailers may follow the body of this request's response.
    fn carries_trailers(&self, _request: &Request) -> bool {
        false
    }
    /// Returns `true` if the client, the request and its location allow the connection to carry another request after
    /// this one.
    fn keeps_connection(&self, _request: &Request) -> bool {
        false
    }
    /// Returns the next piece of the request's body, then its trailers, if it has any, and `None` at the end. The first
    /// call sends `100 Continue` if the client waits for it.
    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>>;
    /// Returns `true` if the request's body has been read to its end, or there is none.
    fn body_is_read(&self) -> bool;
    /// Returns the number of bytes of the request's body that have been read.
    fn received(&self) -> u64;
    /// Returns the number of bytes of the request's head on the wire, or `None` if that is the length of its text.
    fn head_bytes(&self) -> Option<u64> {
        None
    }
    /// Ready when the client has left or half-closed its connection. Reads no bytes.
    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()>;
    /// Returns `true` if the connection shows that no bytes can reach the client any more. A client that has only
    /// half-closed its connection has gone for [`Exchange::poll_gone`], but can still receive.
    fn is_broken(&self) -> bool;
    /// Returns `true` while the client's flow control window is empty, so that each byte pushed stays in memory.
    fn window_is_closed(&self) -> bool {
        false
    }
    /// Returns `true` if the kernel knows that the client has half-closed its connection or left, even if bytes that it
    /// sent before are unread.
    fn has_left(&self) -> bool {
        self.is_broken()
    }
    /// Returns `true` if the whole response has been sent.
    fn is_complete(&self) -> bool;
    /// Returns the numbers of bytes sent so far.
    fn sent(&self) -> Sent;
    /// Returns the numbers of bytes transferred so far. `head_text_bytes` is the length of the request head's text.
    fn transferred(&self, head_text_bytes: u64) -> Transferred {
        let head_bytes = self.head_bytes().unwrap_or(head_text_bytes);
        Transferred { received: head_bytes + self.received(), sent: self.sent() }
    }
    /// Returns the waiting times so far, by cause.
    fn waits(&self) -> ExchangeWaits {
        ExchangeWaits::default()
    }
}

/// Permit to write a response. Only [`ResponseStart`] can make one.
pub struct Permit(());

/// Writes responses in one version of HTTP. [`ResponseStart`] and [`ResponseBody`] ensure the order of calls.
pub trait ResponseWriter: Exchange {
    /// See `ResponseStart::start_tunnel`.
    fn become_tunnel(&self);
    /// See `ResponseStart::start`.
    fn start(&self, request: &Request, options: &ResponseOptions);
    /// See `ResponseStart::respond`.
    fn respond(&self, request: &Request, options: &ResponseOptions, body: Bytes) {
        self.start(request, options);
        if !body.is_empty() {
            self.push(BodyItem::Bytes(body));
        }
        self.end();
    }
    /// See `ResponseBody::push`.
    fn push(&self, item: BodyItem);
    /// See `ResponseBody::end`.
    fn end(&self);
    /// See `ResponseBody::abort`.
    fn abort(&self);
    /// See `ResponseBody::take_back`.
    fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        Err(error)
    }
    /// See `ResponseBody::poll_sent`.
    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>>;
    /// See `ResponseBody::poll_ready`.
    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>>;
}

/// A response whose head has not been written. Writing the head consumes it.
pub struct ResponseStart(Rc<dyn ResponseWriter>);

impl ResponseStart {
    /// Returns the response to a request.
    pub(crate) fn of(request: &Request) -> ResponseStart {
        ResponseStart(request.exchange_handle().writer(Permit(())))
    }

    /// Writes the final head, which is part of the request. It may be sent together with the first item.
    pub(crate) fn start(self, request: &Request, options: &ResponseOptions) -> ResponseBody {
        let ResponseStart(writer) = self;
        writer.start(request, options);
        ResponseBody(writer)
    }

    /// Writes the final head, a 101, or a 2xx to CONNECT. After it, bytes pass unframed in both directions.
    pub(crate) fn start_tunnel(self, request: &Request, options: &ResponseOptions) -> ResponseBody {
        self.0.become_tunnel();
        self.start(request, options)
    }

    /// Writes the final head and the whole body, which may be empty.
    pub(crate) fn respond(self, request: &Request, options: &ResponseOptions, body: Bytes) {
        self.0.respond(request, options, body);
    }
}

/// A response whose head has been written. The items of the body follow, then its end.
pub struct ResponseBody(Rc<dyn ResponseWriter>);

impl ResponseBody {
    /// Returns the exchange of this response.
    pub(crate) fn exchange(&self) -> &dyn Exchange {
        &*self.0
    }

    /// Queues an item of the body.
    pub(crate) fn push(&self, item: BodyItem) {
        self.0.push(item);
    }

    /// Ends the body. No more items may be pushed.
    pub(crate) fn end(&self) {
        self.0.end();
    }

    /// Breaks the response off, so that the client sees that it is incomplete.
    pub(crate) fn abort(&self) {
        self.0.abort();
    }

    /// Takes the response back because `error` ended the body, if nothing of it has been sent and the server is only
    /// overloaded. The exchange then sends another response in its place, and no more calls may follow.
    ///
    /// # Errors
    /// `error`, if the response has to be broken off.
    pub(crate) fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        self.0.take_back(error)
    }

    /// Sends queued bytes. Ready when all of them have been sent, or the client has left.
    pub(crate) fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.0.poll_sent(context)
    }

    /// Sends queued bytes. Ready when at most `low_water` bytes are left, so that more may be pushed, or the client has
    /// left. Bytes that may wait for the next item (`postpone_output`) are not sent.
    pub(crate) fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.0.poll_ready(low_water, context)
    }
}
