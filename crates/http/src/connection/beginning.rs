//! How a connection begins: a header of the PROXY protocol, where the address wants one, and the time for its first
//! byte. The handshake that may follow is in `tls.rs`.

use std::time::Duration;

use gale_base::log_level::Level;
use gale_protocol::http2::frame::PREFACE;
use gale_runtime::Buffer;

use super::HttpConnection;
use crate::request::Request;
use crate::request::advance::{self, Step};
use crate::request::begin::Refusal;

/// How long the first request of a connection is waited for although the worker is on its way out or needs the room: it
/// may be on its way. (nginx closes such a connection at once to make room.)
pub(super) const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// How a connection began, as its address wanted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Beginning {
    /// With a header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// With a handshake, or instead of it with plain HTTP.
    pub ssl: bool,
}

/// Something else stands in the place of the PROXY protocol's header.
pub(super) struct Untrusted;

/// Whether a connection in the clear begins with the preface of HTTP/2 (RFC 9113, section 3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preface {
    /// It does not, or nobody would understand it.
    Absent,
    /// What has come is the beginning of it.
    Begun,
    /// It is there.
    Whole,
}

impl HttpConnection {
    /// Whether `input`, the first that has come but for the header of the PROXY protocol, is HTTP/2.
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

    /// Looks for the PROXY protocol's header at the connection's beginning, where the address wants one. `false` when
    /// there is something else: nobody can be trusted to get an answer then.
    pub(super) fn take_beginning(&self, input: &mut Buffer) -> bool {
        let configuration = self.next_configuration();
        let http = configuration.http();
        let Some(place) = self.place(http) else { return false };
        let listening = &http.addresses[place.index()].listening;
        // One that was accepted in the clear, before a reload.
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

    /// Takes the PROXY protocol's header, if it is whole, and says so.
    pub(super) fn take_proxy_header(&self, input: &mut Buffer) -> Result<bool, Untrusted> {
        self.info.take_proxy_header(input).map_err(|offence| {
            self.log_connection(Level::Error, format_args!("{offence} while reading PROXY protocol"));
            Untrusted
        })
    }

    /// How long to wait for the first byte: `client_header_timeout` on a new
    /// connection, `keepalive_timeout` between requests. `None` closes.
    pub(super) fn first_wait(&self) -> Option<Duration> {
        if self.info.requests.get() > 0 {
            return Some(Duration::from_millis(self.idle_max_ms.get().into()));
        }
        // Accepted in the turn in which the worker began to end: nobody will close it later.
        if self.worker().is_draining() {
            return Some(FIRST_REQUEST_GRACE);
        }
        let configuration = self.next_configuration();
        let core = self.place(configuration.http())?.core(configuration.http());
        Some(*core.client_header_timeout.get())
    }
}
