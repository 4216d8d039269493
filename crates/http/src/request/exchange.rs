//! One request with its response, as everything above the codecs sees it.
//!
//! ```text
//!   Exchange: the client, its request's body, what was sent      ResponseStart ── head ──► ResponseBody
//! ```
//!
//! The interface is full duplex: the response may begin, and end, before the request's body has been read, and both
//! directions may be waited for at once. A request holds its [`Exchange`], which cannot write. A response is written
//! by [`ResponseStart`], which becomes a [`ResponseBody`] when the head has been given: a head is given once, and a
//! tunnel begins with it. Each version of HTTP implements [`ResponseWriter`], as does the mock beside this file, whose
//! tests check the order.
//!
//! No call blocks, and no queue is unbounded: `ResponseBody::push` queues, and `ResponseBody::poll_ready` is
//! awaited before more is pushed.

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

/// While more than so many bytes are queued for the client, the source of a body or of a tunnel is asked for no more.
pub const LOW_WATER_BYTES: u64 = 16 * 1024;

/// Why an exchange cannot go on. The connection is lost for it in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The client closed or reset the connection (or the stream).
    ByPeer,
    /// The client took nothing for `send_timeout`.
    SendTimedOut,
    /// The response could not be completed; the client will notice.
    Aborted,
}

/// Why a request's body cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestBodyError {
    /// The client closed or reset the connection before the end.
    PeerGone,
    /// Nothing came for `client_body_timeout`: 408.
    TimedOut,
    /// It came slower than `client_body_min_rate`: 408.
    TooSlow,
    /// Longer than `client_max_body_size`: 413.
    TooLarge,
    /// Not framed as its protocol demands: 400.
    Malformed,
    /// The worker's memory for buffers is exhausted: 503.
    NoMemory,
    /// We could not keep it: 500. An exchange never says this; whoever stores the
    /// body does.
    NotStored,
}

impl RequestBodyError {
    /// The status that answers it.
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

/// How much has been sent, for the logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Everything, the head and the framing included.
    pub bytes: u64,
    /// What counts as the head's. As in nginx, so do the headers of frames over HTTP/2; the framing of chunks does not.
    pub head_bytes: u64,
}

impl Sent {
    /// Counts bytes that are the head's.
    pub fn add_head(&mut self, bytes: u64) {
        self.head_bytes += bytes;
        self.bytes += bytes;
    }
}

/// How much has passed in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// Bytes of the request: its head and its body.
    pub received: u64,
    /// What was sent.
    pub sent: Sent,
}

/// How the end of a response is told to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyLength {
    /// No body may follow: HEAD, 204, 304. The head may still announce a length.
    NoBody,
    /// As many bytes as the head announces.
    Known(u64),
    /// Only the end will tell.
    UntilEnd,
}

/// Says that values of the head were changed ([`gale_protocol::http1::response::clean_value`]), whatever the version.
#[cold]
pub(crate) fn log_changed_values(request: &Request) {
    let message = "line ends in values of the response header are sent as spaces";
    request.log(Level::Warn, format_args!("{message}"));
}

/// How a response is sent, whatever the version: what the request and its location decide.
#[derive(Clone, Debug)]
pub struct ResponseOptions {
    /// How the body's end is told.
    pub length: BodyLength,
    /// How files are sent, and what is gathered before it is sent; none for a body that is given at once.
    pub files: Option<FileOptions>,
    /// `send_timeout`
    pub send_timeout: Duration,
}

/// What the location says about reading the request's body.
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
    /// None: for what is no body of a request, such as the bytes of a tunnel.
    pub const NONE: BodyLimits = BodyLimits { length_max: 0, silence_max: Duration::MAX, min_rate: None };
}

/// One exchange, seen from above. All methods belong to the worker that owns the connection.
pub trait Exchange {
    /// The connection that carries it.
    fn connection(&self) -> &ConnectionInfo;
    /// Our address on it; looked up when first asked for.
    fn local_address(&self) -> Option<&SocketAddress>;
    /// The scheme that the connection stands for.
    fn scheme(&self) -> Scheme {
        Scheme::Http
    }
    /// The TLS session of the connection, if it has one.
    fn tls(&self) -> Option<&TlsStream> {
        None
    }
    /// What the kernel knows of the TCP connection, if it is one.
    fn tcp_info(&self) -> Option<TcpInfo> {
        None
    }
    /// The way to write the response; only [`ResponseStart`] can ask for it.
    fn writer(self: Rc<Self>, permit: Permit) -> Rc<dyn ResponseWriter>;
    /// Sends an interim response (100, 103). After the final head it is dropped.
    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]);
    /// Returns `true` if fields may stand behind the body of this request's response.
    fn carries_trailers(&self, _request: &Request) -> bool {
        false
    }
    /// Returns `true` if the connection may carry another request after this one, as far as the client, the request
    /// and its location decide.
    fn keeps_connection(&self, _request: &Request) -> bool {
        false
    }
    /// The next piece of the request's body, behind the last one its trailers, if it has some; `None` at its end.
    /// The first call sends `100 Continue` if the client waits for it.
    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>>;
    /// Returns `true` if the body has been read to its end, or there is none.
    fn body_is_read(&self) -> bool;
    /// Number of bytes of the body that have been read.
    fn received(&self) -> u64;
    /// Number of bytes of the head as it came, where that is not its text.
    fn head_bytes(&self) -> Option<u64> {
        None
    }
    /// Ready when the client has left, without reading anything from it.
    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()>;
    /// Returns `true` if the client can get nothing any more, as far as its connection shows. A client that has only
    /// ended its own direction has gone for [`Exchange::poll_gone`], but still can.
    fn is_broken(&self) -> bool;
    /// Returns `true` while the client allows nothing to be sent, so that each byte pushed stays in memory.
    fn window_is_closed(&self) -> bool {
        false
    }
    /// Returns `true` if the client has ended its direction or left, as the kernel knows it, whatever it has sent
    /// before that.
    fn has_left(&self) -> bool {
        self.is_broken()
    }
    /// Returns `true` if the whole response has left.
    fn is_complete(&self) -> bool;
    /// Number of bytes sent so far.
    fn sent(&self) -> Sent;
    /// Both directions at once.
    fn transferred(&self, head_text_bytes: u64) -> Transferred {
        let head_bytes = self.head_bytes().unwrap_or(head_text_bytes);
        Transferred { received: head_bytes + self.received(), sent: self.sent() }
    }
    /// Time that it has waited so far, by cause.
    fn waits(&self) -> ExchangeWaits {
        ExchangeWaits::default()
    }
}

/// Permission to write a response, which [`ResponseStart`] alone has.
pub struct Permit(());

/// How a version of HTTP writes a response. Above it, [`ResponseStart`] and [`ResponseBody`] keep the order of calls.
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

/// A response whose head has not been given. Giving the head consumes it.
pub struct ResponseStart(Rc<dyn ResponseWriter>);

impl ResponseStart {
    /// The response to a client's request.
    pub(crate) fn of(request: &Request) -> ResponseStart {
        ResponseStart(request.exchange_handle().writer(Permit(())))
    }

    /// Gives the final head, which is the request's. It may leave together with the first item.
    pub(crate) fn start(self, request: &Request, options: &ResponseOptions) -> ResponseBody {
        let ResponseStart(writer) = self;
        writer.start(request, options);
        ResponseBody(writer)
    }

    /// Gives the final head, after which bytes pass unframed in both directions: a 101, or a 2xx to CONNECT.
    pub(crate) fn start_tunnel(self, request: &Request, options: &ResponseOptions) -> ResponseBody {
        self.0.become_tunnel();
        self.start(request, options)
    }

    /// Gives the final head and the whole body, which is bytes or nothing.
    pub(crate) fn respond(self, request: &Request, options: &ResponseOptions, body: Bytes) {
        self.0.respond(request, options, body);
    }
}

/// A response whose head has been given: items of the body follow, then its end.
pub struct ResponseBody(Rc<dyn ResponseWriter>);

impl ResponseBody {
    /// The exchange that carries it.
    pub(crate) fn exchange(&self) -> &dyn Exchange {
        &*self.0
    }

    /// Queues an item of the body.
    pub(crate) fn push(&self, item: BodyItem) {
        self.0.push(item);
    }

    /// Nothing more will be pushed.
    pub(crate) fn end(&self) {
        self.0.end();
    }

    /// Breaks the response off. The client sees that it is not whole.
    pub(crate) fn abort(&self) {
        self.0.abort();
    }

    /// The response cannot go on because of this error. If nothing of it has left and the server is only too busy, the
    /// exchange will have another answer in its place, and nothing more is to be given.
    ///
    /// # Errors
    /// The error, if the response has to break off.
    pub(crate) fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        self.0.take_back(error)
    }

    /// Sends what is queued. Ready when all of it has left, or the client has.
    pub(crate) fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.0.poll_sent(context)
    }

    /// Sends what is queued. Ready when no more than `low_water` bytes of it are left, so that more may be pushed, or
    /// the client has left. Bytes that may wait for the next item (`postpone_output`) are not sent for that.
    pub(crate) fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.0.poll_ready(low_water, context)
    }
}
