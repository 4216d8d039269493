//! Writing an HTTP/1 response: the head, the framing of the body, and the ways
//! in which pieces of files reach the socket.
//!
//! The queue holds what was pushed; [`Sender::poll_sent`] empties it. Small
//! bodies share the head's buffer, so that a usual response is one system call.
//! How a piece of a file gets here is the ladder's choice (`delivery.rs`).
//!
//! A short answer is *held* while the next request has come already, so that pipelined requests are answered with one
//! call. What is held leaves with the first answer behind which none has come, when it is [`HELD_BYTES`], and before
//! anything is waited for.

use std::collections::VecDeque;
use std::io;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_protocol::http1::response;
use gale_protocol::request::Version;
use gale_protocol::response::ResponseField;
use gale_runtime::{Buffer, Bytes, Output, Timer, poll_copy};

use crate::connection::worker::HttpConnections;
use crate::files::delivery::{Delivery, FileError, FileOptions, Next};
use crate::request::body::{BodyError, BodyItem};
use crate::request::exchange::{BodyLength, Gone, ResponseOptions, Sent};
use crate::request::response::ResponseHead;
use gale_engine::transport::Transport;

/// A body up to this size is copied behind the head.
const COPIED_MAX: usize = 4 * 1024;

/// Bytes in memory are moved to the output until so many are there.
const OUTPUT_BYTES: usize = 64 * 1024;

/// Answers are held until they have so many bytes together.
const HELD_BYTES: usize = 16 * 1024;

/// From so much of a file on, packets leave only when they are full (`TCP_CORK`) until all of it is sent: otherwise
/// each acknowledgement that comes meanwhile sends off what there is. On loopback that costs a tenth; below, less than
/// the two calls.
const CORKED_FROM: u64 = 128 * 1024;

/// The response side of a connection.
#[derive(Default)]
pub(super) struct Sender {
    /// Whole answers of exchanges before this one, and perhaps of this one.
    held: Buffer,
    output: Output,
    /// So many bytes at the beginning of `output` were held.
    held_bytes: usize,
    /// What stands behind `output`; begins with a piece of a file.
    queue: VecDeque<BodyItem>,
    /// How the pieces of files are delivered.
    delivery: Delivery,
    /// So much of the piece at the head of the queue goes by `sendfile` when the output is empty, as was found in this
    /// poll.
    sendfile_bytes: u64,
    is_corked: bool,
    /// What is queued must not wait for more.
    flushes: bool,
    coding: Coding,
    version: Version,
    keep_alive: bool,
    /// The connection is closed as soon as everything has left.
    closes_at_once: bool,
    is_started: bool,
    has_interim: bool,
    /// Some of what was queued since the exchange began, or since the last interim response, was given to the socket.
    has_left: bool,
    gone: Option<Gone>,
    sent: Sent,
    timer: Timer,
    is_waiting: bool,
    send_timeout: Duration,
    /// Why the response could not be completed.
    failure: Option<BodyError>,
    /// The fields that follow a chunked body.
    trailers: Vec<u8>,
    is_ended: bool,
    /// Our direction of a tunnel has ended, and the client was told.
    is_shut_down: bool,
}

/// What comes after a response, as far as it is known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Another request, if the response itself allows it.
    MayKeep,
    /// The connection is read from for a while.
    Lingers,
    /// The connection is closed.
    Closes,
}

/// How the body's end is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Coding {
    #[default]
    NoBody,
    /// This many bytes are still to be pushed.
    Length(u64),
    Chunked,
    UntilClose,
    Raw,
}

impl Sender {
    /// A new exchange begins: with this the sender is as it was made, or as [`Sender::rest`] left it.
    pub(super) fn begin(&mut self, version: Version) {
        self.version = version;
    }

    /// Forgets the exchange that has ended, of which nothing is left to be sent.
    pub(super) fn rest(&mut self) {
        self.version = Version::default();
        self.coding = Coding::NoBody;
        self.keep_alive = false;
        self.closes_at_once = false;
        self.is_started = false;
        self.has_left = false;
        self.sent = Sent::default();
        self.is_waiting = false;
        self.forget_files();
        self.flushes = false;
        self.failure = None;
        self.trailers.clear();
        self.is_ended = false;
        self.is_shut_down = false;
    }

    /// Whether everything has left, to the last byte.
    pub(super) fn is_complete(&self) -> bool {
        self.is_ended && self.gone.is_none() && self.output.is_empty() && self.queue.is_empty()
    }

    /// Whether only a reset tells the client that something is missing: the end of
    /// the connection is the end of the body.
    pub(super) fn is_cut_short(&self) -> bool {
        self.gone == Some(Gone::Aborted) && matches!(self.coding, Coding::UntilClose)
    }

    /// Why the response could not be completed, if a file was the reason.
    pub(super) fn take_failure(&mut self) -> Option<BodyError> {
        self.failure.take()
    }

    /// The response cannot be completed: notes the error, to be asked for by [`Sender::take_refused`]; or gives it back
    /// when it is not such a one.
    pub(super) fn refuse(&mut self, error: BodyError) -> Result<(), BodyError> {
        if self.has_left || !matches!(error, BodyError::Overloaded(_)) {
            return Err(error);
        }
        self.failure = Some(error);
        self.abort();
        Ok(())
    }

    /// Whether the response broke off because the server is too busy to read a file, and nothing of it has left.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.failure, Some(BodyError::Overloaded(_))) && self.gone == Some(Gone::Aborted) && !self.has_left
    }

    /// Then it is forgotten, so that another may be started; and the error told.
    pub(super) fn take_refused(&mut self) -> Option<BodyError> {
        if !self.is_refused() {
            return None;
        }
        let error = self.failure.take()?;
        let (version, sent) = (self.version, self.sent);
        self.clear();
        self.timer.clear();
        self.gone = None;
        self.has_interim = false;
        self.rest();
        (self.version, self.sent) = (version, sent);
        Some(error)
    }

    pub(super) fn is_started(&self) -> bool {
        self.is_started
    }

    pub(super) fn has_interim(&self) -> bool {
        self.has_interim
    }

    pub(super) fn keeps_alive(&self) -> bool {
        self.keep_alive
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.gone.is_some()
    }

    /// Whether nothing is left of any exchange.
    pub(super) fn is_at_rest(&self) -> bool {
        self.gone.is_none() && self.output.is_empty() && self.queue.is_empty() && !self.delivery.is_reading()
    }

    /// Lets go of what belongs to the configuration.
    fn forget_files(&mut self) {
        self.delivery = Delivery::default();
        self.sendfile_bytes = 0;
    }

    /// How many bytes are queued.
    pub(super) fn queued_bytes(&self) -> u64 {
        self.output.len_bytes() as u64 + self.queue.iter().map(BodyItem::length).sum::<u64>()
    }

    /// As [`Sender::poll_sent`], until no more than `low_water` bytes are left.
    pub(super) fn poll_ready(
        &mut self,
        low_water: u64,
        stream: &Transport,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Gone>> {
        if self.may_gather() {
            return Poll::Ready(Ok(()));
        }
        match self.poll_sent(stream, context) {
            Poll::Pending if self.queued_bytes() <= low_water => Poll::Ready(Ok(())),
            sent => sent,
        }
    }

    /// Whether so little is queued that it may wait for the next item.
    fn may_gather(&self) -> bool {
        let postponed_bytes = self.delivery.options().postponed_bytes;
        self.gone.is_none()
            && self.coding != Coding::Raw
            && !self.flushes
            && self.queue.is_empty()
            && (self.output.len_bytes() as u64) < postponed_bytes
    }

    pub(super) fn sent(&self) -> Sent {
        self.sent
    }

    pub(super) fn become_tunnel(&mut self) {
        self.coding = Coding::Raw;
    }

    /// An interim response goes before everything else; HTTP/1.0 knows none.
    pub(super) fn interim(&mut self, text: &[u8]) {
        if self.version == Version::Http11 && !self.is_started {
            self.queue_held();
            self.append(text);
            self.has_interim = true;
        }
    }

    /// Queues the head.
    pub(super) fn start(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions<'_>,
        after: After,
        connections: &HttpConnections,
        stream: &Transport,
    ) {
        // It may take its time, and may be refused as long as nothing of `output` has left.
        self.send_held(stream, false);
        if let Some(files) = &options.files {
            self.delivery =
                Delivery::new(FileOptions { sendfile: files.sendfile && stream.can_sendfile(), ..files.clone() });
        }
        let scratch = &mut *connections.scratch.borrow_mut();
        self.begin_response(head, options, after, connections, scratch);
        self.append(scratch);
    }

    /// Sends a whole response, or queues what the socket does not take. A short one is put together in the worker's
    /// scratch and needs no memory of the connection's. `is_followed`: the next request has come, as far as can be
    /// told.
    #[expect(clippy::too_many_arguments, reason = "one call")]
    pub(super) fn respond(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions<'_>,
        after: After,
        is_followed: bool,
        connections: &HttpConnections,
        stream: &Transport,
        body: Bytes,
    ) {
        let scratch = &mut *connections.scratch.borrow_mut();
        self.begin_response(head, options, after, connections, scratch);
        let is_first = self.output.is_empty() && self.queue.is_empty() && self.gone.is_none();
        // Before we end our side it has to be certain that all has left.
        let may_be_out_of_sight = self.keep_alive || self.closes_at_once;
        let fits = match self.coding {
            Coding::NoBody => true,
            Coding::Length(length) => length == body.len() as u64 && body.len() <= COPIED_MAX,
            Coding::Chunked | Coding::UntilClose | Coding::Raw => false,
        };
        if !is_first || !fits || !may_be_out_of_sight {
            self.queue_held();
            self.append(scratch);
            if !body.is_empty() {
                self.push(BodyItem::Bytes(body));
            }
            return self.end();
        }
        if let Coding::Length(left) = &mut self.coding {
            *left = 0;
            scratch.extend_from_slice(&body);
        }
        self.is_ended = true;
        self.has_left = true;
        let is_held = is_followed && self.keep_alive;
        if is_held || !self.held.is_empty() {
            return self.respond_held(scratch, is_held, stream);
        }
        self.send_whole(scratch, stream);
    }

    /// Sends a whole response, before which nothing is queued, without memory of the connection's unless the socket
    /// takes less.
    fn send_whole(&mut self, response: &[u8], stream: &Transport) {
        match stream.try_send_copy(response, self.closes_at_once) {
            Ok(sent) => {
                self.sent.bytes += sent as u64;
                if sent < response.len() {
                    self.append(&response[sent..]);
                }
            }
            Err(_) => self.fail(),
        }
    }

    /// Puts a whole response behind those that are held, and sends them all unless it is held, too.
    fn respond_held(&mut self, response: &[u8], is_held: bool, stream: &Transport) {
        if self.held.append(response).is_err() {
            // No memory for more of them: this one goes as one that is alone does.
            self.send_held(stream, false);
            if self.output.is_empty() {
                self.send_whole(response, stream)
            } else {
                self.append(response)
            }
            return;
        }
        // As with what is given to the socket: nobody is told whether it arrives.
        self.sent.bytes += response.len() as u64;
        if !is_held || self.held.len() >= HELD_BYTES {
            self.send_held(stream, self.closes_at_once);
        }
    }

    /// Sends what is held; what the socket does not take goes before everything else.
    pub(super) fn send_held(&mut self, stream: &Transport, is_last: bool) {
        if self.held.is_empty() {
            return;
        }
        match stream.try_send_copy(self.held.readable(), is_last) {
            Ok(sent) => self.held.consume(sent),
            Err(_) => {
                self.held.clear();
                self.fail();
            }
        }
        self.queue_held();
    }

    /// What is held goes before everything else, of which there is nothing yet.
    fn queue_held(&mut self) {
        if let Some(held) = std::mem::take(&mut self.held).into_lease() {
            debug_assert!(self.output.is_empty() && self.queue.is_empty());
            self.held_bytes = held.len();
            self.output.push(held.freeze());
            self.has_left = true;
        }
    }

    /// Sends what is held, before anything else is waited for; ready when all of it has left.
    pub(super) fn poll_held(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.send_held(stream, false);
        self.poll_sent(stream, context)
    }

    /// Whether answers of exchanges before this one have not left.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty() || self.held_bytes > 0
    }

    /// Settles how the body is framed, and writes the head to `scratch`.
    fn begin_response(
        &mut self,
        head: &ResponseHead,
        options: &ResponseOptions<'_>,
        after: After,
        connections: &HttpConnections,
        scratch: &mut Vec<u8>,
    ) {
        scratch.clear();
        self.is_started = true;
        self.send_timeout = options.send_timeout;
        if self.coding != Coding::Raw {
            self.coding = match options.length {
                BodyLength::NoBody => Coding::NoBody,
                BodyLength::Known(length) => Coding::Length(length),
                BodyLength::UntilEnd if options.chunked && self.version == Version::Http11 => Coding::Chunked,
                BodyLength::UntilEnd => Coding::UntilClose,
            };
        }
        self.keep_alive = after == After::MayKeep && self.coding != Coding::UntilClose;
        self.closes_at_once = after == After::Closes && self.coding != Coding::Raw;
        if self.version == Version::Http09 {
            self.keep_alive = false;
            return;
        }
        self.write_head(head, options, connections, scratch);
        self.sent.head_bytes = scratch.len() as u64;
    }

    /// The fields in nginx's order.
    fn write_head(
        &self,
        head: &ResponseHead,
        options: &ResponseOptions<'_>,
        connections: &HttpConnections,
        out: &mut Vec<u8>,
    ) {
        match head.reason() {
            None => response::write_status_line(out, head.status),
            Some(phrase) => response::write_status_line_with(out, head.status, phrase),
        }
        if !head.has(ResponseField::Server) {
            out.extend_from_slice(options.server_line);
        }
        if !head.has(ResponseField::Date) {
            connections.append_date_line(out);
        }
        if !head.content_type.is_empty() {
            response::write_header(out, b"Content-Type", &head.content_type);
        }
        if let Some(length) = head.content_length {
            response::write_header_number(out, b"Content-Length", length);
        }
        if let Some(time) = head.last_modified_text() {
            response::write_own_header(out, b"Last-Modified", &time);
        }
        if !head.location.is_empty() {
            response::write_header(out, b"Location", &head.location);
        }
        if self.coding == Coding::Chunked {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
        }
        match (self.coding, self.keep_alive) {
            (Coding::Raw, _) => out.extend_from_slice(tunnel_line(head.status)),
            (_, true) => {
                out.extend_from_slice(b"Connection: keep-alive\r\n");
                if let Some(time) = options.keep_alive_advertised {
                    let value = format!("timeout={}", time.as_secs());
                    response::write_header(out, b"Keep-Alive", value.as_bytes());
                }
            }
            (_, false) => out.extend_from_slice(b"Connection: close\r\n"),
        }
        if !head.etag.is_empty() {
            response::write_header(out, b"ETag", &head.etag);
        }
        if head.allows_ranges {
            out.extend_from_slice(b"Accept-Ranges: bytes\r\n");
        }
        for field in head.fields.iter() {
            response::write_header(out, &field.name, &field.value);
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Queues an item of the body, framed.
    pub(super) fn push(&mut self, item: BodyItem) {
        let length = item.length();
        self.flushes |= matches!(item, BodyItem::Flush);
        if let BodyItem::Trailers(fields) = &item {
            for (name, value) in fields {
                response::write_header(&mut self.trailers, name, value);
            }
        }
        match &mut self.coding {
            Coding::NoBody => return,
            Coding::Length(left) if length > *left => {
                // More than the head announced would be taken for the next response.
                return self.abort();
            }
            Coding::Length(left) => *left -= length,
            Coding::Chunked if length > 0 => {
                self.append(response::ChunkHeader::new(length).as_bytes());
                self.queue_item(item);
                self.append(response::CHUNK_END);
                return;
            }
            Coding::Chunked | Coding::UntilClose | Coding::Raw => {}
        }
        if length > 0 {
            self.queue_item(item);
        }
    }

    /// Nothing more will be pushed.
    pub(super) fn end(&mut self) {
        self.is_ended = true;
        match self.coding {
            Coding::Chunked if self.trailers.is_empty() => self.append(response::LAST_CHUNK),
            Coding::Chunked => {
                let trailers = std::mem::take(&mut self.trailers);
                self.append(&[b"0\r\n", &trailers[..], b"\r\n"].concat());
            }
            // Fewer bytes than announced: the client must see that some are missing.
            Coding::Length(1..) => self.abort(),
            _ => {}
        }
    }

    /// The response is broken off.
    pub(super) fn abort(&mut self) {
        self.keep_alive = false;
        self.gone.get_or_insert(Gone::Aborted);
    }

    fn append(&mut self, text: &[u8]) {
        if !self.queue.is_empty() {
            self.queue.push_back(BodyItem::Bytes(Bytes::copy_from_slice(text)));
        } else if self.output.append(text).is_err() {
            // No memory within the worker's bound: the response cannot be completed.
            self.abort();
        }
    }

    fn queue_item(&mut self, item: BodyItem) {
        if !self.queue.is_empty() {
            return self.queue.push_back(item);
        }
        match item {
            BodyItem::Bytes(bytes) if bytes.len() <= COPIED_MAX => self.append(&bytes),
            BodyItem::Bytes(bytes) => self.output.push(bytes),
            item @ BodyItem::File(_) => self.queue.push_back(item),
            BodyItem::Flush | BodyItem::Trailers(_) => {}
            BodyItem::Subrequest(_) => unreachable!("`postpone` takes them out"),
        }
    }

    /// Sends what is queued; ready when all of it has left.
    pub(super) fn poll_sent(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.sendfile_bytes = 0;
        loop {
            // The answers before are good, whatever becomes of this one.
            let is_held = self.held_bytes > 0;
            if let Some(gone) = self.gone
                && !(is_held && gone == Gone::Aborted)
            {
                self.clear();
                return Poll::Ready(Err(gone));
            }
            if !is_held {
                ready!(self.poll_budget(context));
                if let Err(error) = self.fill() {
                    self.fail_with_file(error);
                    continue;
                }
            }
            if !is_held
                && self.delivery.is_reading()
                && let Poll::Ready(result) = self.poll_reading(context)
            {
                self.is_waiting = false;
                if let Err(error) = result {
                    self.fail_with_file(error);
                }
                continue;
            }
            if self.output.is_empty() && self.queue.is_empty() {
                self.uncork(stream);
                if self.coding == Coding::Raw && self.is_ended && !std::mem::replace(&mut self.is_shut_down, true) {
                    // The other direction of a tunnel goes on. A failure shows there.
                    let _ = stream.shutdown_write();
                }
                self.has_interim = false;
                self.has_left &= self.is_started;
                self.flushes = false;
                self.timer.clear();
                return Poll::Ready(Ok(()));
            }
            if self.output.is_empty() && self.delivery.is_reading() {
                self.uncork(stream);
                ready!(self.poll_gone_meanwhile(stream, context));
                self.fail();
                continue;
            }
            self.has_left = true;
            let polled = if self.output.is_empty() {
                self.poll_sendfile(stream, context)
            } else {
                let more_follows = match self.queue.is_empty() {
                    // Closing follows, and sends the end in the same packet.
                    true => self.is_ended && self.closes_at_once,
                    // The head leaves with the file that follows at once; `tcp_nopush`: it waits for one that is being
                    // read.
                    false => {
                        let options = self.delivery.options();
                        self.sendfile_bytes > 0 || (options.sendfile && options.nopush)
                    }
                };
                if self.may_be_out_of_sight() {
                    match stream.try_send(&mut self.output, self.closes_at_once) {
                        Ok(0) => {}
                        Ok(count) => {
                            self.note_sent(count);
                            self.is_waiting = false;
                            continue;
                        }
                        Err(_) => {
                            self.fail();
                            continue;
                        }
                    }
                }
                self.output.set_more_follows(more_follows);
                stream.poll_send(context, &mut self.output).map_err(|_| FileError::OfSocket)
            };
            match polled {
                Poll::Ready(Ok(count)) => self.note_sent(count),
                Poll::Ready(Err(FileError::OfFile(error))) => self.fail_with_file(error),
                Poll::Ready(Err(FileError::OfSocket)) => self.fail(),
                Poll::Pending => return self.poll_patience(context),
            }
            self.is_waiting = false;
        }
    }

    /// Counts what has left, but for what was counted when it was held.
    fn note_sent(&mut self, count: usize) {
        let held = count.min(self.held_bytes);
        self.held_bytes -= held;
        self.sent.bytes += (count - held) as u64;
        if held > 0 && held == count && self.held_bytes == 0 {
            // Nothing of this response has gone with them.
            self.has_left = false;
        }
    }

    /// Ready when what is sent next of a file may be read: much of it has to wait for a share of the turn, as sending
    /// it would, and the client's time does not run meanwhile.
    fn poll_budget(&self, context: &mut Context<'_>) -> Poll<()> {
        let is_sent_first = self.output.len_bytes() as u64 > self.delivery.low_water();
        match self.queue.front() {
            Some(BodyItem::File(piece)) if !is_sent_first && !self.delivery.is_reading() => {
                poll_copy(context, usize::try_from(piece.length).unwrap_or(usize::MAX))
            }
            _ => Poll::Ready(()),
        }
    }

    /// Whether what is queued is the end of a response, and nobody has to know when that has left: before we end our
    /// side it has to be certain.
    fn may_be_out_of_sight(&self) -> bool {
        self.is_ended && self.queue.is_empty() && (self.keep_alive || self.closes_at_once)
    }

    /// `send_timeout` runs while the client takes nothing.
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        // An interim response has no timeout of its own: none is known before the head, and who waits for the client's
        // body or for the handler has one. What was held has that of the last response.
        if !self.is_started && self.held_bytes == 0 {
            return Poll::Pending;
        }
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.timer.set_after(self.send_timeout);
        }
        ready!(self.timer.poll_expired(context));
        self.keep_alive = false;
        self.gone = Some(Gone::SendTimedOut);
        self.clear();
        Poll::Ready(Err(Gone::SendTimedOut))
    }

    /// The client is not at fault for a slow disk. But when it takes longer than `send_timeout`, one that has closed
    /// its side is not waited for any more: the disk may never answer. Before, it may be one that only sends no more.
    fn poll_gone_meanwhile(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<()> {
        if !self.is_started {
            return Poll::Pending;
        }
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.timer.set_after(self.send_timeout);
        }
        ready!(self.timer.poll_expired(context));
        stream.poll_peer_closed(context)
    }

    /// The client has gone; what the kernel says about it is of no further use.
    fn fail(&mut self) {
        self.keep_alive = false;
        self.gone.get_or_insert(Gone::ByPeer);
    }

    /// The server is at fault, not the client: a disk, or a file that has changed.
    fn fail_with_file(&mut self, error: io::Error) {
        let name = match self.queue.front() {
            Some(BodyItem::File(piece)) => piece.name(),
            _ => "a file".to_owned(),
        };
        self.failure = Some(BodyError::of_file(name, error));
        self.abort();
    }

    fn clear(&mut self) {
        self.output.clear();
        self.held_bytes = 0;
        self.queue.clear();
        self.forget_files();
    }

    /// Moves what can be sent from memory from the queue to the output, and begins to read what is not in memory.
    fn fill(&mut self) -> io::Result<()> {
        while !self.delivery.is_reading() && self.sendfile_bytes == 0 {
            let queued = self.output.len_bytes();
            match self.queue.front_mut() {
                None => return Ok(()),
                Some(BodyItem::File(piece)) => {
                    if queued as u64 > self.delivery.low_water() {
                        return Ok(());
                    }
                    let next = match self.delivery.next(piece) {
                        // Again when that has left.
                        Err(error) if error.kind() == io::ErrorKind::OutOfMemory && queued > 0 => return Ok(()),
                        next => next?,
                    };
                    match next {
                        Next::Bytes(bytes) => self.output.push(bytes),
                        Next::Sendfile(length) => {
                            self.sendfile_bytes = length;
                            return Ok(());
                        }
                        Next::Reading => {}
                    }
                    self.leave_finished_file();
                }
                Some(_) if queued >= OUTPUT_BYTES => return Ok(()),
                Some(_) => {
                    if let Some(BodyItem::Bytes(bytes)) = self.queue.pop_front() {
                        self.output.push(bytes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes what has been read of the file at the head of the queue.
    fn poll_reading(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(BodyItem::File(piece)) = self.queue.front_mut() else {
            unreachable!("what is being read stands at the head of the queue")
        };
        let bytes = ready!(self.delivery.poll_read(piece, self.output.is_empty(), context))?;
        self.output.push(bytes);
        self.leave_finished_file();
        Poll::Ready(Ok(()))
    }

    /// Sends on from the file at the head of the queue.
    fn poll_sendfile(&mut self, stream: &Transport, context: &mut Context<'_>) -> Poll<Result<usize, FileError>> {
        let Some(BodyItem::File(piece)) = self.queue.front_mut() else {
            unreachable!("only a file is not moved to the output")
        };
        if !self.is_corked && piece.length >= CORKED_FROM {
            // Without (a Unix socket has none), it is as right and less quick.
            let _ = stream.set_cork(true);
            self.is_corked = true;
        }
        let sent = ready!(self.delivery.sendfile(piece, self.sendfile_bytes, |file, offset, length| {
            stream.poll_sendfile(context, file, offset, length)
        }));
        self.sendfile_bytes = 0;
        self.leave_finished_file();
        Poll::Ready(sent)
    }

    /// What is left of a packet need not wait any more.
    fn uncork(&mut self, stream: &Transport) {
        if std::mem::take(&mut self.is_corked) {
            // Only a connection that has failed refuses, and has nothing left to send.
            let _ = stream.set_cork(false);
        }
    }

    /// Goes on to what stands behind a piece of a file of which nothing is left.
    fn leave_finished_file(&mut self) {
        if matches!(self.queue.front(), Some(BodyItem::File(piece)) if piece.length == 0) {
            self.queue.pop_front();
        }
    }
}

/// What the head says of a connection that becomes a tunnel. Only a 101 changes the protocol (RFC 9110, section 7.8); a
/// 2xx to CONNECT says nothing (section 9.3.6).
fn tunnel_line(status: u16) -> &'static [u8] {
    if status == 101 { b"Connection: upgrade\r\n" } else { b"" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_101_says_that_the_connection_is_upgraded() {
        assert_eq!(tunnel_line(101), b"Connection: upgrade\r\n");
        assert_eq!(tunnel_line(200), b"");
    }
}
