//! One request with its response, as everything above the codecs sees it.
//!
//! The interface is full duplex: the answer may begin, and end, before the
//! request's body has been read, and both directions may be waited for at once.
//! HTTP/1, HTTP/2 and HTTP/3 each implement it; so does the mock beside this
//! file, whose tests are what keeps it honest.
//!
//! Nothing here blocks or buffers without bound: [`Exchange::push`] queues, and
//! whoever pushes waits in [`Exchange::poll_ready`] before pushing more.

#[cfg(test)]
pub(crate) mod mock;
#[cfg(test)]
mod streams;

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

/// One exchange, seen from above. All methods belong to the worker that owns the
/// connection.
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
    /// Sends an interim response (100, 103) before the final one.
    fn interim(&self, status: u16, fields: &[(Bytes, Bytes)]);
    /// Gives the final head, which is the request's. Nothing need be written before the first item, so
    /// that head and body can leave together.
    fn start(&self, request: &Request, options: &ResponseOptions);
    /// Gives the final head and the whole body, which is bytes or nothing.
    fn respond(&self, request: &Request, options: &ResponseOptions, body: Bytes) {
        self.start(request, options);
        if !body.is_empty() {
            self.push(BodyItem::Bytes(body));
        }
        self.end();
    }
    /// Whether fields may stand behind the body of this request's response.
    fn carries_trailers(&self, _request: &Request) -> bool {
        false
    }
    /// Whether the connection may carry another request after this one, as far as the client, the request and its
    /// location decide.
    fn keeps_connection(&self, _request: &Request) -> bool {
        false
    }
    /// Queues an item of the body.
    fn push(&self, item: BodyItem);
    /// Nothing more will be pushed.
    fn end(&self);
    /// The response breaks off here and the client has to see that it is not whole.
    fn abort(&self);
    /// The response cannot go on because of this error. If nothing of it has left and the server is only too busy, the
    /// exchange will have another answer in its place, and nothing more is to be given; else the error comes back.
    fn take_back(&self, error: BodyError) -> Result<(), BodyError> {
        Err(error)
    }
    /// Sends what is queued. Ready when all of it has left, or the client has.
    fn poll_sent(&self, context: &mut Context<'_>) -> Poll<Result<(), Gone>>;
    /// Sends what is queued. Ready when no more than `low_water` bytes are left of it, so that more may be pushed, or
    /// the client has left. What may wait for the next item (`postpone_output`) is not sent for that.
    fn poll_ready(&self, low_water: u64, context: &mut Context<'_>) -> Poll<Result<(), Gone>>;
    /// How many bytes are queued.
    fn queued_bytes(&self) -> u64;
    /// True while the client allows nothing to be sent, so that each byte pushed stays in memory.
    fn window_is_closed(&self) -> bool {
        false
    }
    /// The next piece of the request's body, behind the last one its trailers, if it has some; `None` at its end.
    /// Asking for the first piece sends `100 Continue` when the client waits for it.
    fn poll_body(
        &self,
        context: &mut Context<'_>,
        limits: &BodyLimits,
    ) -> Poll<Result<Option<BodyItem>, RequestBodyError>>;
    /// Whether the body has been read to its end (or there is none).
    fn body_is_read(&self) -> bool;
    /// How many bytes of the body have been read.
    fn received(&self) -> u64;
    /// How many bytes the head had as it came, where that is not its text.
    fn head_bytes(&self) -> Option<u64> {
        None
    }
    /// From now on bytes pass unframed in both directions: after 101, or 2xx to
    /// CONNECT. Call it before [`Exchange::start`].
    fn become_tunnel(&self);
    /// Ready when the client has left, without reading anything from it.
    fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()>;
    /// Whether the client can get nothing any more, as far as its connection shows. One that has only ended its own
    /// direction has gone for [`Exchange::poll_gone`], but still can.
    fn is_broken(&self) -> bool;
    /// Whether the client has ended its direction or left, as the kernel knows it, whatever it has sent before that.
    fn has_left(&self) -> bool {
        self.is_broken()
    }
    /// Whether the whole response has left.
    fn is_complete(&self) -> bool;
    /// How much has been sent so far.
    fn sent(&self) -> Sent;
    /// All three at once.
    fn transferred(&self, head_text_bytes: u64) -> Transferred {
        let head_bytes = self.head_bytes().unwrap_or(head_text_bytes);
        Transferred { received: head_bytes + self.received(), sent: self.sent() }
    }
    /// What it has waited for so far.
    fn waits(&self) -> ExchangeWaits {
        ExchangeWaits::default()
    }
}
