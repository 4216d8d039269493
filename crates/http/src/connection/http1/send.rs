//! The response side of an HTTP/1 connection: heads and items, framed (`framing.rs`), on their way into the output
//! queue (`connection/output/`).
//!
//! Small bodies share the head's buffer, so that a usual response is one system call.
//!
//! A short answer is *held* while the next request has come already, so that pipelined requests are answered with one
//! call. Held answers leave with the first one that no request follows, when they are [`HELD_BYTES`], and before every
//! wait.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_protocol::http1::response;
use gale_protocol::request::Version;
use gale_runtime::{Buffer, Bytes};
use gale_tls::Transport;

use super::framing::{End, Framed, Framing, write_head};
use crate::connection::output::{COPIED_MAX, Ending, OutputQueue};
use crate::connection::worker::HttpConnections;
use crate::request::body::{BodyError, BodyItem};
use crate::request::exchange::{Gone, ResponseOptions, Sent};
use crate::request::response::ResponseHead;

/// Answers are held until they have so many bytes together.
const HELD_BYTES: usize = 16 * 1024;

/// The response side of a connection.
#[derive(Default)]
pub(super) struct Sender {
    /// Whole answers of exchanges before this one, and perhaps of this one.
    held: Buffer,
    queue: OutputQueue,
    framing: Framing,
    version: Version,
    /// Fate of the connection after the response.
    ending: Ending,
    has_interim: bool,
    /// The head had line ends in values, which became spaces.
    has_changed_values: bool,
}

/// Fate of the connection after a response, as far as it is known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Another request, if the response itself allows it.
    MayKeep,
    /// The connection is read from for a while.
    Lingers,
    /// The connection is closed.
    Closes,
}

/// How a connection sends a response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conduct<'l> {
    pub after: After,
    /// A body of unknown length may go in chunks.
    pub may_be_chunked: bool,
    /// Timeout in the `Keep-Alive` field; `None` for no field.
    pub keep_alive_advertised: Option<Duration>,
    /// The `Server` field with its line end; empty leaves it out.
    pub server_line: &'l [u8],
}

impl Sender {
    /// A new exchange begins: with this the sender is as it was made, or as [`Sender::rest`] left it.
    pub(super) fn begin(&mut self, version: Version) {
        self.version = version;
    }

    /// Forgets the exchange that has ended, of which nothing is left to be sent.
    pub(super) fn rest(&mut self) {
        self.queue.rest();
        self.framing = Framing::NoBody;
        self.version = Version::default();
        self.ending = Ending::default();
    }

    /// Returns `true` if everything has left, to the last byte.
    pub(super) fn is_complete(&self) -> bool {
        self.queue.is_complete()
    }

    /// Returns `true` if only a reset tells the client that bytes are missing: the end of the connection is the end of
    /// the body.
    pub(super) fn is_cut_short(&self) -> bool {
        self.queue.gone() == Some(Gone::Aborted) && matches!(self.framing, Framing::UntilClose)
    }

    /// The error of a file because of which the response could not be completed.
    pub(super) fn take_failure(&mut self) -> Option<BodyError> {
        self.queue.take_failure()
    }

    /// The response cannot be completed: notes the error, to be asked for by [`Sender::take_refused`]; or gives it back
    /// when it is not such a one.
    pub(super) fn refuse(&mut self, error: BodyError) -> Result<(), BodyError> {
        self.queue.refuse(error)
    }

    /// Returns `true` if the response broke off because the server is too busy to read a file, and nothing of it has
    /// left.
    pub(super) fn is_refused(&self) -> bool {
        self.queue.is_refused()
    }

    /// Forgets such a response, so that another one may be started. Returns the error.
    pub(super) fn take_refused(&mut self) -> Option<BodyError> {
        let error = self.queue.take_refused()?;
        self.framing = Framing::NoBody;
        self.ending = Ending::default();
        self.has_interim = false;
        Some(error)
    }

    pub(super) fn is_started(&self) -> bool {
        self.queue.is_begun()
    }

    /// Returns `true` once if line ends in values of the head became spaces.
    pub(super) fn take_has_changed_values(&mut self) -> bool {
        std::mem::take(&mut self.has_changed_values)
    }

    pub(super) fn has_interim(&self) -> bool {
        self.has_interim
    }

    pub(super) fn keeps_alive(&self) -> bool {
        self.ending == Ending::Stays
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.queue.gone().is_some()
    }

    /// Returns `true` if nothing is left of any exchange.
    pub(super) fn is_at_rest(&self) -> bool {
        self.queue.is_at_rest()
    }

    pub(super) fn sent(&self) -> Sent {
        self.queue.sent()
    }

    /// Total wait for a disk with nothing else to send.
    pub(super) fn disk_waited(&self) -> Duration {
        self.queue.disk_waited()
    }

    pub(super) fn become_tunnel(&mut self) {
        self.framing = Framing::Tunnel { is_shut_down: false };
        self.queue.be_thrifty();
    }

    /// An interim response goes before everything else; HTTP/1.0 knows none.
    pub(super) fn interim(&mut self, text: &[u8]) {
        if self.version == Version::Http11 && !self.is_started() {
            self.queue_held();
            self.queue.append(text);
            self.has_interim = true;
        }
    }

    /// Queues the head.
    pub(super) fn start(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions,
        conduct: &Conduct<'_>,
        connections: &HttpConnections,
        stream: &Transport,
    ) {
        // It may take its time, and may be refused as long as nothing of it has left.
        self.send_held(stream, false);
        // Nothing is gathered for a tunnel.
        if let Some(files) = options.files.as_ref().filter(|_| !self.framing.is_tunnel()) {
            self.queue.set_files(files, stream);
        }
        let scratch = &mut *connections.scratch.borrow_mut();
        self.begin_response(head, options, conduct, connections, scratch);
        self.queue.append(scratch);
    }

    /// Sends a whole response, or queues what the socket does not take. A short one is put together in the worker's
    /// scratch and needs no memory of the connection's. `is_followed`: the next request has come, as far as can be
    /// told.
    #[expect(clippy::too_many_arguments, reason = "one call")]
    pub(super) fn respond(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions,
        conduct: &Conduct<'_>,
        is_followed: bool,
        connections: &HttpConnections,
        stream: &Transport,
        body: Bytes,
    ) {
        let scratch = &mut *connections.scratch.borrow_mut();
        self.begin_response(head, options, conduct, connections, scratch);
        let is_first = self.queue.is_empty() && self.queue.gone().is_none();
        let fits = match self.framing {
            Framing::NoBody => true,
            Framing::Length(length) => length == body.len() as u64 && body.len() <= COPIED_MAX,
            Framing::Chunked { .. } | Framing::UntilClose | Framing::Tunnel { .. } => false,
        };
        // Before we end our side it has to be certain that all has left.
        if !is_first || !fits || self.ending == Ending::Waits {
            self.queue_held();
            self.queue.append(scratch);
            if !body.is_empty() {
                self.push(BodyItem::Bytes(body));
            }
            return self.end();
        }
        if let Framing::Length(left) = &mut self.framing {
            *left = 0;
            scratch.extend_from_slice(&body);
        }
        self.queue.end(self.ending);
        let is_held = is_followed && self.keeps_alive();
        if is_held || !self.held.is_empty() {
            return self.respond_held(scratch, is_held, stream);
        }
        self.send_whole(scratch, stream);
    }

    /// Sends a whole response, before which nothing is queued, without memory of the connection's unless the socket
    /// takes less.
    fn send_whole(&mut self, response: &[u8], stream: &Transport) {
        match stream.try_send_copy(response, self.ending == Ending::Closes) {
            Ok(sent) => {
                self.queue.note_past(sent);
                if sent < response.len() {
                    self.queue.append(&response[sent..]);
                }
            }
            Err(_) => self.queue.fail(),
        }
    }

    /// Puts a whole response behind those that are held, and sends them all unless it is held, too.
    fn respond_held(&mut self, response: &[u8], is_held: bool, stream: &Transport) {
        if self.held.append(response).is_err() {
            // No memory for more of them: this one goes as one that is alone does.
            self.send_held(stream, false);
            if self.queue.is_empty() {
                self.send_whole(response, stream)
            } else {
                self.queue.append(response)
            }
            return;
        }
        // As with bytes that are given to the socket: their arrival is never confirmed.
        self.queue.note_past(response.len());
        if !is_held || self.held.len() >= HELD_BYTES {
            self.send_held(stream, self.ending == Ending::Closes);
        }
    }

    /// Sends the held answers. Bytes that the socket does not take go before everything else.
    pub(super) fn send_held(&mut self, stream: &Transport, is_last: bool) {
        if self.held.is_empty() {
            return;
        }
        match stream.try_send_copy(self.held.readable(), is_last) {
            Ok(sent) => self.held.consume(sent),
            Err(_) => {
                self.held.clear();
                self.queue.fail();
            }
        }
        self.queue_held();
    }

    /// Queues the held answers before everything else. The queue is empty until then.
    fn queue_held(&mut self) {
        if let Some(held) = std::mem::take(&mut self.held).into_lease() {
            self.queue.push_earlier(held);
        }
    }

    /// Sends the held answers before any other wait. Ready when all of them have left.
    pub(super) fn poll_held(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.send_held(stream, false);
        self.poll_sent(stream, context)
    }

    /// Returns `true` if answers of exchanges before this one have not left.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty() || self.queue.has_earlier()
    }

    /// Settles the framing of the body, and writes the head to `scratch`.
    fn begin_response(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions,
        conduct: &Conduct<'_>,
        connections: &HttpConnections,
        scratch: &mut Vec<u8>,
    ) {
        scratch.clear();
        self.queue.begin(options.send_timeout);
        if !self.framing.is_tunnel() {
            self.framing = Framing::of(options.length, conduct.may_be_chunked);
        }
        self.ending = match (conduct.after, &self.framing) {
            (After::MayKeep, _) if self.version == Version::Http09 => Ending::Waits,
            (After::MayKeep, Framing::UntilClose) | (After::Closes, Framing::Tunnel { .. }) => Ending::Waits,
            (After::MayKeep, _) => Ending::Stays,
            (After::Closes, _) => Ending::Closes,
            (After::Lingers, _) => Ending::Waits,
        };
        if self.version == Version::Http09 {
            return;
        }
        self.has_changed_values = write_head(head, &self.framing, self.keeps_alive(), conduct, connections, scratch);
        self.queue.note_head(scratch.len());
    }

    /// Queues an item of the body, framed.
    pub(super) fn push(&mut self, item: BodyItem) {
        match &item {
            BodyItem::Flush => self.queue.flush(),
            BodyItem::Trailers(fields) => self.framing.add_trailers(fields),
            BodyItem::Bytes(_) | BodyItem::File(_) | BodyItem::Subrequest(_) => {}
        }
        match self.framing.frame(item.length()) {
            Framed::Dropped => {}
            Framed::Plain => self.queue.push(item),
            Framed::Chunk(header) => {
                self.queue.append(header.as_bytes());
                self.queue.push(item);
                self.queue.append(response::CHUNK_END);
            }
            Framed::TooLong => self.queue.abort(),
        }
    }

    /// Nothing more will be pushed.
    pub(super) fn end(&mut self) {
        let end = self.framing.end();
        self.queue.end(self.ending);
        match end {
            End::Nothing => {}
            End::LastChunk => self.queue.append(response::LAST_CHUNK),
            End::Trailers(text) => self.queue.append(&text),
            End::TooShort => self.queue.abort(),
        }
    }

    /// The response is broken off.
    pub(super) fn abort(&mut self) {
        self.queue.abort();
    }

    /// As [`Sender::poll_sent`], until no more than `low_water` bytes are left.
    pub(super) fn poll_ready(
        &mut self,
        low_water: u64,
        stream: &Transport,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Gone>> {
        let ready = ready!(self.queue.poll_ready(low_water, stream, context));
        self.note_sent_off(stream);
        Poll::Ready(ready)
    }

    /// Sends the queue. Ready when all of it has left.
    pub(super) fn poll_sent(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        let sent = ready!(self.queue.poll_sent(stream, context));
        self.note_sent_off(stream);
        Poll::Ready(sent)
    }

    /// Does the work that is due when all has left.
    #[inline]
    fn note_sent_off(&mut self, stream: &Transport) {
        if self.has_interim || self.framing.is_tunnel() {
            self.note_interim_or_tunnel_sent(stream);
        }
    }

    #[cold]
    fn note_interim_or_tunnel_sent(&mut self, stream: &Transport) {
        if !self.queue.is_empty() || self.queue.gone().is_some() {
            return;
        }
        self.has_interim = false;
        if let Framing::Tunnel { is_shut_down } = &mut self.framing
            && self.queue.is_ended()
            && !std::mem::replace(is_shut_down, true)
        {
            // The other direction of a tunnel goes on. A failure shows there.
            let _ = stream.shutdown_write();
        }
    }
}
