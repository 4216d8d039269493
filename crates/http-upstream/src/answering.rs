//! A request in flight to a server and its response, on an exclusive connection or a stream of a shared one.

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use gale_http::request::Request;
use gale_http::request::response::FieldList;
use gale_protocol::request::KnownHeader;
use gale_protocol::response::ResponseField;
use gale_runtime::{Bytes, Moment};
use gale_upstream::{Chosen, Learning, Timing, Upstream};

use crate::beside_head::pass_trailers;
use crate::exclusive::{Connection, Exclusive, may_bind};
use crate::failure::End;
use crate::heading::{Heading, tell_messages};
use crate::http2::Shared;
use crate::passing::Passing;
use crate::receiving::{BodyRead, Malformed, UpstreamHead};
use crate::record::Records;
use crate::sending::{RequestBody, SendError};
use crate::settings::{HiddenFields, UpstreamSettings};

/// A request in flight, see the head of the file.
pub(super) struct Answering {
    carrier: Carrier,
    /// The server, once it has answered.
    pub chosen: Option<Chosen>,
    upstream: Option<Arc<Upstream<Request>>>,
    pub records: Rc<Records>,
    pub started: Moment,
    /// True if the connection is authenticated as the client's user (NTLM, Negotiate), so that no other client may use
    /// it.
    pub is_authenticated: bool,
    /// Fields that are removed from trailers, too; `None` if trailers are not passed on.
    pub hidden_in_trailers: Option<Arc<HiddenFields>>,
    /// True once a tunnel has taken over, whose record ends the attempt.
    is_over: bool,
}

/// The carrier of a request and its response.
#[expect(clippy::large_enum_variant, reason = "the common one is in place; what has it is on the heap already")]
pub(super) enum Carrier {
    /// A connection of its own.
    Exclusive(Exclusive),
    /// A stream of a shared connection.
    Shared(Box<Shared>),
}

impl Answering {
    /// Creates the state for a request that is being sent.
    #[inline]
    pub fn begin(
        request: &Request,
        passing: &Passing<'_>,
        records: &Rc<Records>,
        carrier: impl FnOnce() -> Carrier,
    ) -> Box<Answering> {
        // A reused connection has no connect time yet.
        records.note(|attempt, now| {
            attempt.connect_time.get_or_insert(now.since(attempt.started));
        });
        let started = records.last().started;
        Box::new(Answering {
            carrier: carrier(),
            chosen: None,
            upstream: passing.upstream.clone(),
            records: Rc::clone(records),
            started,
            is_authenticated: request.header(KnownHeader::Authorization).is_some_and(authenticates_connection),
            hidden_in_trailers: None,
            is_over: false,
        })
    }

    /// Frames the end of an empty body, if the protocol does so.
    ///
    /// # Errors
    /// No memory for buffers.
    pub fn frame_end(&mut self, body: &RequestBody) -> io::Result<()> {
        match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.sending.frame_end(body),
            Carrier::Shared(_) => Ok(()),
        }
    }

    /// Continues sending, and reads until the head is complete.
    pub fn poll_head(
        &mut self,
        request: &Request,
        settings: &UpstreamSettings,
        heading: &mut Heading,
        context: &mut Context<'_>,
    ) -> Poll<Result<Box<UpstreamHead>, End>> {
        match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.poll_head(request, settings, &self.records, heading, context),
            Carrier::Shared(shared) => shared.poll_head(request, settings, &self.records, heading, context),
        }
    }

    /// Notes whether the head asks for authentication of the connection.
    pub fn note_authentication(&mut self, fields: &FieldList) {
        self.is_authenticated |= fields.has(ResponseField::WwwAuthenticate)
            && fields.iter().any(|field| {
                field.name.known() == Some(ResponseField::WwwAuthenticate) && authenticates_connection(&field.value)
            });
    }

    /// True if the connection carried another request before.
    pub fn is_reused(&self) -> bool {
        match &self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.is_reused(),
            Carrier::Shared(shared) => shared.is_reused,
        }
    }

    /// True if the connection is authenticated as the client's user (`ntlm`): the response must not be given to other
    /// clients, even if the request has no credentials.
    pub fn is_of_user(&self, request: &Request) -> bool {
        let Carrier::Exclusive(exclusive) = &self.carrier else { return false };
        let pool = self.chosen.as_ref().and_then(Chosen::connections);
        exclusive.is_of_user() || self.is_authenticated && pool.is_some_and(|pool| may_bind(request, pool))
    }

    /// Number of bytes sent.
    pub fn sent(&self) -> u64 {
        match &self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.sending.sent,
            Carrier::Shared(shared) => shared.sent(),
        }
    }

    /// True if a part of the client's body was consumed and is not kept, so that it cannot be sent again.
    pub fn has_taken_body(&self) -> bool {
        match &self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.sending.has_taken_body(),
            Carrier::Shared(shared) => shared.has_taken_body(),
        }
    }

    /// The shared connection, if it is one.
    pub fn shared(&self) -> Option<&Shared> {
        match &self.carrier {
            Carrier::Exclusive(_) => None,
            Carrier::Shared(shared) => Some(shared),
        }
    }

    /// Notes a read timeout.
    pub fn note_silence(&self) {
        if let Carrier::Shared(shared) = &self.carrier {
            shared.note_silence();
        }
    }

    /// True if no response is read, because the client asked for a tunnel (CONNECT).
    pub fn is_tunnel(&self) -> bool {
        match &self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.reader.is_tunnel(),
            Carrier::Shared(_) => false,
        }
    }

    /// Ends a complete response; the connection may be reused.
    pub fn finish(mut self: Box<Self>, request: &Request) {
        self.tell_messages(request);
        let Some(mut chosen) = self.chosen.take() else { return };
        if let Some(upstream) = &self.upstream {
            upstream.learn_session(request, &chosen, Learning::Finished);
        }
        let now = gale_runtime::now();
        let header_time = {
            let mut record = self.records.last();
            record.end(now);
            record.bytes_sent = self.sent();
            chosen.note_served(&record.served());
            record.header_time
        };
        chosen.succeed(Timing { header: header_time, response: now.since(self.started) });
        match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.park(request, &chosen, self.is_authenticated),
            Carrier::Shared(_) => {}
        }
    }

    /// Learns the client's session with this server, once the head is there. Returns the cookie that identifies it.
    pub fn learn_session(&self, request: &Request) -> Option<Vec<u8>> {
        let (upstream, chosen) = (self.upstream.as_ref()?, self.chosen.as_ref()?);
        upstream.learn_session(request, chosen, Learning::HeaderReceived);
        upstream.session_cookie(request, chosen)
    }

    /// Ends the response early. The connection is closed, unless the rest has already arrived.
    pub fn end_early(mut self: Box<Self>, request: &Request) {
        loop {
            match self.read_body() {
                Ok(BodyRead::Piece(_)) => {}
                Ok(BodyRead::End) => return self.finish(request),
                Ok(BodyRead::Partial) | Err(_) => return self.give_up(),
            }
        }
    }

    /// Ends a response that is replaced, by another server's for example. The connection is closed, unless the rest has
    /// already arrived.
    #[cold]
    pub fn end_replaced(mut self: Box<Self>, request: &Request, chosen: &Chosen) {
        let Carrier::Exclusive(exclusive) = &mut self.carrier else { return };
        loop {
            match exclusive.read_body() {
                Ok(BodyRead::Piece(_)) => {}
                Ok(BodyRead::End) => break exclusive.park(request, chosen, self.is_authenticated),
                Ok(BodyRead::Partial) | Err(_) => break,
            }
        }
    }

    /// Ends the response early and closes the connection.
    pub fn give_up(self: Box<Self>) {
        drop(self);
    }

    /// Reads the next part of the body from the received bytes.
    pub fn read_body(&mut self) -> Result<BodyRead, Malformed> {
        let read = match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.read_body(),
            Carrier::Shared(shared) => shared.read_body(),
        };
        if let Ok(BodyRead::Piece(piece)) = &read {
            self.records.last().response_length += piece.len() as u64;
        }
        read
    }

    /// Receives at most `max` bytes; 0 means the end of the connection.
    pub fn poll_receive(&mut self, max: usize, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let received = ready!(match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.poll_receive(max, context),
            Carrier::Shared(shared) => shared.poll_receive(max, context),
        })?;
        self.records.last().bytes_received += received as u64;
        Poll::Ready(Ok(received))
    }

    /// Sends the rest of the request.
    pub fn poll_send(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.poll_send(request, context),
            Carrier::Shared(shared) => shared.poll_send(request, context),
        }
    }

    /// Keeps the connection and the record for a tunnel that the server has accepted.
    pub fn into_tunnel(mut self: Box<Self>) -> (Connection, TunnelRecord) {
        let sent = self.sent();
        let connection = match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.take_connection(),
            Carrier::Shared(_) => unreachable!("HTTP/2 has no 101, and its codec says so"),
        };
        self.is_over = true;
        self.records.pack();
        (connection, TunnelRecord { chosen: self.chosen.take(), records: Rc::clone(&self.records), sent })
    }

    /// True if the response was complete, once its body has ended.
    pub fn is_whole(&self) -> bool {
        match &self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.reader.is_whole(),
            Carrier::Shared(_) => true,
        }
    }

    /// Takes the trailers.
    pub fn take_trailers(&mut self) -> Vec<(Bytes, Bytes)> {
        let trailers = match &mut self.carrier {
            Carrier::Exclusive(exclusive) => exclusive.reader.take_trailers(),
            Carrier::Shared(shared) => shared.take_trailers(),
        };
        if !trailers.is_empty() {
            self.records.set_trailers(trailers.clone());
        }
        trailers
    }

    /// Passes trailers to the client, if the response announces any.
    pub fn pass_trailers(&mut self, request: &Request) {
        let trailers = self.take_trailers();
        if let Some(hidden) = self.hidden_in_trailers.as_deref().filter(|_| request.response.has_trailers) {
            pass_trailers(request, hidden, trailers);
        }
    }

    /// Logs messages that the server sent besides its response.
    pub fn tell_messages(&mut self, request: &Request) {
        match &mut self.carrier {
            Carrier::Exclusive(exclusive) => tell_messages(&mut *exclusive.reader, request, "reading upstream"),
            Carrier::Shared(_) => {}
        }
    }
}

/// A response that is dropped early still has to be recorded as ended.
impl Drop for Answering {
    fn drop(&mut self) {
        if !self.is_over {
            note_end(&self.records, self.chosen.as_ref(), self.sent());
        }
    }
}

fn note_end(records: &Records, chosen: Option<&Chosen>, sent: u64) {
    let mut record = records.last();
    record.bytes_sent = sent;
    record.end(gale_runtime::now());
    if let Some(chosen) = chosen {
        chosen.note_served(&record.served());
    }
}

/// Records of a tunnel, completed when it ends.
pub(super) struct TunnelRecord {
    chosen: Option<Chosen>,
    records: Rc<Records>,
    /// Number of bytes sent, including the request.
    sent: u64,
}

impl TunnelRecord {
    pub fn note_received(&self, count: usize) {
        let mut record = self.records.last();
        record.bytes_received += count as u64;
        record.response_length += count as u64;
    }

    pub fn note_sent(&mut self, count: usize) {
        self.sent += count as u64;
    }
}

impl Drop for TunnelRecord {
    fn drop(&mut self) {
        note_end(&self.records, self.chosen.as_ref(), self.sent);
    }
}

/// True if the scheme of credentials or of a challenge authenticates the connection and not the request. (RFC 4559 §6,
/// and Microsoft's NTLM over HTTP)
fn authenticates_connection(value: &[u8]) -> bool {
    let scheme = value.split(|byte| *byte == b' ' || *byte == b',').next().unwrap_or_default();
    [&b"NTLM"[..], b"Negotiate"].iter().any(|name| scheme.eq_ignore_ascii_case(name))
}
