//! The stage `Beginning`: a header of the PROXY protocol, where the address wants one, and the bytes that tell the
//! version, with the time for the first byte. At an address with TLS this is the work of `tls.rs`.

use std::io::ErrorKind;
use std::task::{Context, Poll};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::http2::frame::PREFACE;
use gale_runtime::{Buffer, Timer};

use super::client::Client;
use super::{Begun, HttpConnection, Stage, http1};
use crate::request::Request;
use crate::request::advance::{self, Step};
use crate::request::begin::Refusal;

/// Longest wait for the first request of a connection although the worker is about to end or needs the room: the
/// request may be on its way. (nginx closes such a connection at once to make room.)
pub(super) const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// Size of the first read of a connection or of a request, before any settings are looked at.
pub(super) const FIRST_READ: usize = 1024;

/// State of the stage `Beginning`.
#[derive(Default)]
pub(super) struct FirstBytes {
    /// Deadline of the first head, from the moment on when the client has to be waited for.
    timer: Timer,
    /// Bytes that are too few to tell the version. In a box, since few connections ever have some.
    input: Option<Box<Buffer>>,
}

impl FirstBytes {
    /// Keeps what has come until more has.
    fn keep(&mut self, input: Buffer) {
        self.input = (!input.is_empty()).then(|| Box::new(input));
    }

    /// Returns `true` if nothing has come.
    pub(super) fn is_empty(&self) -> bool {
        self.input.is_none()
    }
}

/// How a connection began, as its address wanted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Beginning {
    /// With a header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// With a handshake, or with plain HTTP in its place.
    pub ssl: bool,
}

/// Other bytes stand in the place of the PROXY protocol's header.
pub(super) struct Untrusted;

/// Result of a look for the preface of HTTP/2 on a connection in the clear (RFC 9113, section 3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preface {
    /// The input begins otherwise, or HTTP/2 is off.
    Absent,
    /// The input is the beginning of a preface.
    Begun,
    /// The preface is whole.
    Whole,
}

impl HttpConnection {
    /// Receives the first bytes of a connection in the clear, until they tell the version.
    pub(super) fn poll_beginning(&self, context: &mut Context<'_>) -> Poll<Begun> {
        match &mut *self.stage.borrow_mut() {
            Stage::Beginning(first) => self.client.poll_first_bytes(first, context),
            _ => unreachable!("a connection begins once"),
        }
    }
}

impl Client {
    fn poll_first_bytes(&self, first: &mut FirstBytes, context: &mut Context<'_>) -> Poll<Begun> {
        // Another process has read the beginning.
        if self.info.requests.get() > 0 {
            return Poll::Ready(Begun::Http1(http1::State::default()));
        }
        loop {
            // A connection that waits holds no memory to receive with.
            let mut input = first.input.take().map(|input| *input).unwrap_or_default();
            match self.stream.poll_recv(context, &mut input, FIRST_READ) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Begun::Closed),
                Poll::Ready(Ok(_)) => match self.tell_version(&mut input) {
                    Some(Preface::Absent) => {
                        let timer = std::mem::take(&mut first.timer);
                        return Poll::Ready(Begun::Http1(http1::State::begin(timer, input, &self.connections)));
                    }
                    Some(Preface::Whole) => return Poll::Ready(Begun::Http2(input)),
                    Some(Preface::Begun) => first.keep(input),
                    None => return Poll::Ready(Begun::Closed),
                },
                Poll::Ready(Err(error)) => {
                    if error.kind() == ErrorKind::OutOfMemory {
                        self.log_no_memory();
                    }
                    return Poll::Ready(Begun::Closed);
                }
                Poll::Pending => {
                    first.keep(input);
                    let polled = if self.is_idle() {
                        self.note_still_idle();
                        first.timer.poll_expired(context)
                    } else {
                        let Some(wait) = self.first_wait() else { return Poll::Ready(Begun::Closed) };
                        self.note_idle();
                        first.timer.poll_after(wait, context)
                    };
                    return polled.map(|()| Begun::Closed);
                }
            }
        }
    }

    /// Tells the version by the first bytes; [`Preface::Begun`] if more of them are needed. `None` when the PROXY
    /// protocol's header is missing: an answer might go to the wrong client then.
    fn tell_version(&self, input: &mut Buffer) -> Option<Preface> {
        if self.began.get().is_none() && !self.take_beginning(input) {
            return None;
        }
        let needs_more = self.began.get().is_none() || input.is_empty();
        Some(if needs_more { Preface::Begun } else { self.look_for_preface(input.readable()) })
    }

    /// Logs that the worker's memory for buffers is exhausted.
    #[cold]
    pub(super) fn log_no_memory(&self) {
        let message = "the worker's memory for buffers is exhausted, a connection is closed";
        self.worker().configuration().error_log().write(Level::Alert, Some(self.info.number), &message);
    }

    /// Looks for the preface of HTTP/2 in `input`, the first bytes behind the header of the PROXY protocol.
    pub(super) fn look_for_preface(&self, input: &[u8]) -> Preface {
        let length = input.len().min(PREFACE.len());
        if length == 0 || self.info.requests.get() > 0 || input[..length] != PREFACE[..length] {
            return Preface::Absent;
        }
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return Preface::Absent };
        let listening = &http.addresses[place.index()].listening;
        let is_spoken = listening.http2 || http.server(place.default_server(http)).http2;
        match length == PREFACE.len() {
            _ if listening.ssl || !is_spoken => Preface::Absent,
            true => Preface::Whole,
            false => Preface::Begun,
        }
    }

    /// Goes through the phases as far as that needs no waiting, unless the request is refused before.
    pub(super) fn enter_phases(&self, request: &mut Request, prepared: Result<(), Refusal>) -> Step {
        match prepared {
            Ok(()) => match self.refusal(request) {
                None => advance::advance(request),
                Some(status) => advance::fail(request, status),
            },
            Err(refusal) => refusal.answer(request),
        }
    }

    /// Takes the PROXY protocol's header at the connection's beginning, where the address wants one. Returns `false` if
    /// other bytes are there.
    fn take_beginning(&self, input: &mut Buffer) -> bool {
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return false };
        let listening = &http.addresses[place.index()].listening;
        // A connection that was accepted in the clear, before a reload.
        if listening.ssl {
            return false;
        }
        if !listening.proxy_protocol {
            self.began.set(Some(Beginning { proxy_protocol: false, ssl: false }));
            return true;
        }
        match self.take_proxy_header(input) {
            Ok(is_there) => {
                self.began.set(is_there.then_some(Beginning { proxy_protocol: true, ssl: false }));
                true
            }
            Err(Untrusted) => false,
        }
    }

    /// Takes the PROXY protocol's header if it is whole. Returns `true` if it was.
    pub(super) fn take_proxy_header(&self, input: &mut Buffer) -> Result<bool, Untrusted> {
        self.info.take_proxy_header(input).map_err(|offence| {
            self.log_connection(Level::Error, format_args!("{offence} while reading PROXY protocol"));
            Untrusted
        })
    }

    /// Longest wait for the first byte: `client_header_timeout` on a new connection, `keepalive_timeout` between
    /// requests. `None` closes.
    pub(super) fn first_wait(&self) -> Option<Duration> {
        if self.info.requests.get() > 0 {
            return Some(Duration::from_millis(self.idle_max_ms.get().into()));
        }
        // Accepted in the turn in which the worker began to end: no later look closes it.
        if self.worker().is_draining() {
            return Some(FIRST_REQUEST_GRACE);
        }
        let configuration = self.next_configuration();
        let core = self.place(configuration.http())?.core(configuration.http());
        Some(*core.client_header_timeout.get())
    }
}
