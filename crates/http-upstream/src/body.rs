//! The body of a response on its way from a server to the client.
//!
//! Received data is passed on at once. While the client is slow, a buffered body (`proxy_buffering on`) is read ahead:
//! into memory up to `proxy_buffers`, then into a temporary file up to `proxy_max_temp_file_size`, so that the server's
//! connection becomes free early. An unbuffered body is not read ahead. A disk failure only stops the reading ahead.
//! When the server pauses, an unbuffered body or a `text/event-stream` is flushed, so that filters that collect data
//! pass it on.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_http::files::delivery::FileOptions;
use gale_http::request::Request;
use gale_http::request::body::{BodyError, BodyItem, BodyStream, FilePiece};
use gale_http::request::departure::HANDLER_PATIENCE;
use gale_runtime::{Bytes, Moment, Timer};
use gale_spool::{SpillItem, SpillOptions, SpillQueue, SpillReader, SpoolPath};
use gale_upstream::connecting::log_timeout;

use crate::answering::Answering;
use crate::failure::receive_failure;
use crate::passing::Passing;
use crate::receiving::{BodyRead, Malformed};
use crate::sending::SendError;
use crate::store::{Rest, Storing};

/// Maximum number of bytes received at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Minimum number of bytes requested at once, however little room there is.
const PIECE_BYTES_MIN: usize = 4096;

/// The answer to HEAD: no body, with the length of the body that a GET would have.
pub(super) struct NoBody(pub Option<u64>);

impl BodyStream for NoBody {
    fn poll_next(&mut self, _: &Request, _: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        Poll::Ready(None)
    }

    fn is_at_end(&self) -> bool {
        true
    }

    fn length(&self) -> Option<u64> {
        self.0
    }

    fn can_be_cut(&self) -> bool {
        self.0.is_some()
    }

    fn cut_to(&mut self, range: &Range<u64>) -> bool {
        self.0 = Some(range.end - range.start);
        true
    }
}

/// The body of a response, see the head of the file.
pub(super) struct UpstreamBody {
    /// `None` once the response has ended.
    answering: Option<Box<Answering>>,
    /// Bytes that arrived with the head.
    first: VecDeque<Bytes>,
    /// Bytes read ahead of the client.
    ahead: Ahead,
    /// The error of an incomplete response, reported behind the bytes that are ahead.
    broken: Option<BodyError>,
    /// Length of the whole body.
    length: Option<u64>,
    silence: Timer,
    silence_max: Duration,
    /// Time at which the whole body must have arrived.
    deadline: Option<Moment>,
    rate: Option<Rate>,
    /// True once the name of the temporary file was logged.
    file_is_logged: bool,
    /// Timeout for a client that has ended its own direction.
    patience: Duration,
    /// True if a piece was given to the client's side since the server was last read.
    client_took: bool,
    flushing: Flushing,
    /// The file that the body is stored in: `proxy_store`.
    storing: Option<Box<Storing>>,
}

/// State of flushes, which make filters pass on collected data when the server pauses.
pub(super) enum Flushing {
    Never,
    /// No data since the last flush.
    Done,
    /// Data since the last flush.
    Due,
}

impl Flushing {
    /// The initial state for a response with this head.
    pub fn of(request: &Request, is_buffered: bool) -> Flushing {
        match is_buffered && !is_event_stream(&request.response.content_type) {
            true => Flushing::Never,
            false => Flushing::Done,
        }
    }

    /// Notes that data was passed on.
    pub fn note_item(&mut self) {
        if let Flushing::Done = self {
            *self = Flushing::Due;
        }
    }

    /// Takes the flush that is due before the next item is awaited.
    pub fn take(&mut self) -> Option<BodyItem> {
        let is_due = matches!(self, Flushing::Due);
        is_due.then(|| {
            *self = Flushing::Done;
            BodyItem::Flush
        })
    }
}

/// True for server-sent events, each of which must reach the client at once.
/// (<https://html.spec.whatwg.org/multipage/server-sent-events.html>)
fn is_event_stream(content_type: &[u8]) -> bool {
    let end = content_type.iter().position(|&byte| byte == b';').unwrap_or(content_type.len());
    content_type[..end].trim_ascii_end().eq_ignore_ascii_case(b"text/event-stream")
}

/// The part of a body that arrived with its head.
pub(super) struct Came {
    /// Its beginning.
    pub first: Option<Bytes>,
    /// The result of the read after that.
    pub next: Result<BodyRead, Malformed>,
}

/// Place of the bytes that wait for the client.
enum Ahead {
    /// On the server: nothing is read ahead.
    Unbuffered,
    /// Empty: the client has been fast enough so far.
    Buffered(Box<SpillOptions>),
    /// In memory, and then in a temporary file. The queue is `None` once the response has ended.
    Queue(Option<SpillQueue>, SpillReader),
}

/// `proxy_limit_rate`
struct Rate {
    per_second: u64,
    pause: Timer,
}

impl UpstreamBody {
    /// Creates the stream for the rest of a body.
    pub fn new(
        request: &Request,
        passing: &Passing<'_>,
        answering: Box<Answering>,
        length: Option<u64>,
        is_buffered: bool,
        came: Came,
        storing: Option<Box<Storing>>,
    ) -> UpstreamBody {
        let settings = passing.settings;
        let silence_max = *settings.exchange.read_timeout.get();
        let rate = settings.response_body.limit_rate.get().evaluate(request);
        let spill_options = || SpillOptions {
            memory_max: usize::try_from(settings.buffers_bytes()).unwrap_or(usize::MAX),
            file_max: *settings.response_body.max_temp_file_size.get(),
            place: SpoolPath::Unnamed(settings.response_body.temp_path.get().clone()),
            pool: FileOptions::of(request, &request.scope().core).and_then(|options| options.pool),
        };
        let deadline = answering.records.deadline();
        let mut body = UpstreamBody {
            answering: Some(answering),
            first: VecDeque::new(),
            storing,
            ahead: if is_buffered { Ahead::Buffered(Box::new(spill_options())) } else { Ahead::Unbuffered },
            broken: None,
            length,
            silence: Timer::after(silence_max),
            silence_max,
            deadline,
            rate: (rate > 0 && is_buffered).then(|| Rate { per_second: rate, pause: Timer::new() }),
            file_is_logged: false,
            client_took: true,
            flushing: Flushing::of(request, is_buffered),
            patience: if *settings.request_body.ignore_client_abort.get() { HANDLER_PATIENCE } else { Duration::ZERO },
        };
        if let Some(piece) = came.first {
            body.store(request, &piece);
            body.first.push_back(piece);
        }
        match came.next {
            Ok(BodyRead::Piece(piece)) => {
                body.store(request, &piece);
                body.first.push_back(piece);
            }
            Ok(BodyRead::Partial) => {}
            Ok(BodyRead::End) => body.finish(request),
            Err(malformed) => body.break_off(request, malformed),
        }
        body
    }

    /// The queue of waiting bytes, which is created on first use; `None` if nothing may be added.
    fn queue(&mut self) -> Option<&mut SpillQueue> {
        if let Ahead::Buffered(options) = &self.ahead {
            let (queue, reader) = SpillQueue::new((**options).clone());
            self.ahead = Ahead::Queue(Some(queue), reader);
        }
        match &mut self.ahead {
            Ahead::Queue(queue, _) => queue.as_mut(),
            Ahead::Unbuffered | Ahead::Buffered(_) => None,
        }
    }

    /// Takes the next waiting bytes; `None` if there are none.
    fn poll_take(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let Some(piece) = self.first.pop_front() {
            return Poll::Ready(Some(Ok(BodyItem::Bytes(piece))));
        }
        let Ahead::Queue(_, reader) = &mut self.ahead else { return Poll::Ready(None) };
        if reader.queued_bytes() == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(match ready!(reader.poll_next(context)) {
            Ok(Some(SpillItem::Bytes(bytes))) => Some(Ok(BodyItem::Bytes(bytes))),
            Ok(Some(SpillItem::File { file, offset, length })) => {
                Some(Ok(BodyItem::File(FilePiece { file, offset, length })))
            }
            Ok(None) => None,
            Err(error) => Some(Err(BodyError::Other(error.to_string()))),
        })
    }

    /// Logs the temporary file, or the reason why it is no longer used.
    fn log_file(&mut self, request: &Request) {
        let Ahead::Queue(Some(queue), _) = &mut self.ahead else { return };
        if let Some(error) = queue.take_failure() {
            request.log(Level::Crit, format_args!("{error} while reading upstream"));
        }
        if !self.file_is_logged
            && let Some(path) = queue.path()
        {
            self.file_is_logged = true;
            let path = path.display();
            let message = "an upstream response is buffered to a temporary file";
            request.log(Level::Warn, format_args!("{message} {path} while reading upstream"));
        }
    }

    /// Ends a complete response.
    fn finish(&mut self, request: &Request) {
        if let Some(mut answering) = self.answering.take() {
            answering.pass_trailers(request);
            answering.finish(request);
            if let Some(storing) = self.storing.take() {
                storing.finish();
            }
        }
    }

    /// Stores a piece, if the response is being stored.
    fn store(&mut self, request: &Request, piece: &Bytes) {
        if let Some(storing) = &mut self.storing
            && !storing.append(request, piece)
        {
            self.storing = None;
        }
    }

    /// Restarts the read timeout.
    fn expect_more(&mut self) {
        let until = gale_runtime::now() + self.silence_max;
        self.silence.set(self.deadline.map_or(until, |deadline| deadline.min(until)));
    }

    fn is_overdue(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= gale_runtime::now())
    }

    fn time_out(&mut self, request: &Request) {
        log_timeout(request, "reading upstream");
        if let Some(answering) = &self.answering {
            answering.note_silence();
        }
        self.fail(BodyError::TimedOut);
    }

    /// Ends a malformed response.
    fn break_off(&mut self, request: &Request, malformed: Malformed) {
        if let Some(answering) = &mut self.answering {
            answering.tell_messages(request);
        }
        request.log(Level::Error, format_args!("{malformed} while reading upstream"));
        self.fail(BodyError::Short(malformed.0));
    }

    fn fail(&mut self, error: BodyError) {
        if let Some(answering) = self.answering.take() {
            answering.give_up();
        }
        self.storing = None;
        self.broken = Some(error);
    }

    /// Receives the next piece, of at most `most` bytes unless more has already arrived. `None` once the response has
    /// ended in any way.
    fn poll_receive(&mut self, request: &Request, most: usize, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if let Some(storing) = &mut self.storing {
                match storing.poll_room(request, context) {
                    Poll::Ready(true) => {}
                    Poll::Ready(false) => self.storing = None,
                    Poll::Pending => {
                        // The server waits for the disk, so its timeout does not run.
                        self.expect_more();
                        return Poll::Pending;
                    }
                }
            }
            let Some(answering) = &mut self.answering else { return Poll::Ready(None) };
            match answering.read_body() {
                Ok(BodyRead::Piece(piece)) => {
                    self.store(request, &piece);
                    return Poll::Ready(Some(piece));
                }
                Ok(BodyRead::Partial) => {}
                Ok(BodyRead::End) => {
                    self.finish(request);
                    return Poll::Ready(None);
                }
                Err(malformed) => {
                    self.break_off(request, malformed);
                    return Poll::Ready(None);
                }
            }
            answering.tell_messages(request);
            // A server that has begun to answer need not read the rest of the request.
            if let Poll::Ready(Err(SendError::Client(error))) = answering.poll_send(request, context) {
                self.fail(BodyError::Request(error));
                return Poll::Ready(None);
            }
            let mut max = most;
            if let Some(rate) = &mut self.rate {
                match rate.poll_allows(answering, context) {
                    Poll::Ready(allowed) => max = max.min(allowed),
                    Poll::Pending => {
                        // The server is not read during the pause, so its timeout does not run.
                        self.expect_more();
                        return Poll::Pending;
                    }
                }
            }
            match answering.poll_receive(max, context) {
                Poll::Ready(Ok(_)) if self.is_overdue() => {
                    self.time_out(request);
                    return Poll::Ready(None);
                }
                Poll::Ready(Ok(_)) => self.expect_more(),
                Poll::Ready(Err(error)) => {
                    let failure = receive_failure(&error);
                    request.log(Level::Error, format_args!("{failure} while reading upstream"));
                    self.fail(match error.kind() {
                        std::io::ErrorKind::OutOfMemory => BodyError::NoMemory,
                        _ => BodyError::Reset,
                    });
                    return Poll::Ready(None);
                }
                Poll::Pending if self.silence.poll_expired(context).is_ready() => {
                    self.time_out(request);
                    return Poll::Ready(None);
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

impl Rest for UpstreamBody {
    fn poll_piece(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.poll_receive(request, PIECE_BYTES, context)
    }
}

/// A response being stored is read to its end without the client.
impl Drop for UpstreamBody {
    fn drop(&mut self) {
        let (Some(answering), Some(storing)) = (self.answering.take(), self.storing.take()) else { return };
        let (rate, silence_max, deadline) = (self.rate.take(), self.silence_max, self.deadline);
        let length = self.length;
        storing.read_on(|storing| UpstreamBody {
            answering: Some(answering),
            storing: Some(storing),
            first: VecDeque::new(),
            ahead: Ahead::Unbuffered,
            broken: None,
            length,
            silence: Timer::after(silence_max),
            silence_max,
            deadline,
            rate,
            file_is_logged: true,
            patience: Duration::ZERO,
            client_took: false,
            flushing: Flushing::Never,
        });
    }
}

impl BodyStream for UpstreamBody {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let Some(item) = ready!(self.poll_take(context)) {
            self.flushing.note_item();
            return Poll::Ready(Some(item));
        }
        if std::mem::take(&mut self.client_took) {
            // The server was not read while the client was busy, so its timeout did not run.
            self.expect_more();
        }
        // A client that takes nothing is given little to hold.
        let most = if request.exchange().window_is_closed() { PIECE_BYTES_MIN } else { PIECE_BYTES };
        match self.poll_receive(request, most, context) {
            Poll::Ready(Some(piece)) => {
                self.client_took = true;
                self.flushing.note_item();
                Poll::Ready(Some(Ok(BodyItem::Bytes(piece))))
            }
            Poll::Ready(None) => Poll::Ready(self.broken.take().map(Err)),
            Poll::Pending => match self.flushing.take() {
                Some(flush) => Poll::Ready(Some(Ok(flush))),
                None => Poll::Pending,
            },
        }
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        // The server may need the rest of the request before it continues.
        if let Some(answering) = &mut self.answering
            && let Poll::Ready(Err(SendError::Client(error))) = answering.poll_send(request, context)
        {
            self.fail(BodyError::Request(error));
        }
        while self.answering.is_some() {
            self.log_file(request);
            let Some(queue) = self.queue() else { return };
            if queue.poll_ready(context).is_pending() {
                // The queue is full: the server's timeout does not run.
                self.expect_more();
                return;
            }
            // With little room left, a whole piece could double the memory in use.
            let most = queue.room_bytes().clamp(PIECE_BYTES_MIN, PIECE_BYTES);
            match self.poll_receive(request, most, context) {
                Poll::Ready(Some(piece)) => {
                    if let Some(queue) = self.queue() {
                        queue.append(piece);
                    }
                }
                Poll::Ready(None) => {
                    if let Ahead::Queue(queue, _) = &mut self.ahead
                        && let Some(queue) = queue.take()
                    {
                        queue.finish();
                    }
                }
                Poll::Pending => return,
            }
        }
    }

    fn is_at_end(&self) -> bool {
        let nothing_waits = match &self.ahead {
            Ahead::Queue(_, reader) => reader.queued_bytes() == 0,
            Ahead::Unbuffered | Ahead::Buffered(_) => true,
        };
        self.answering.is_none() && self.first.is_empty() && nothing_waits && self.broken.is_none()
    }

    fn patience(&self, _: Duration) -> Duration {
        self.patience
    }

    fn length(&self) -> Option<u64> {
        self.length
    }

    fn can_leave_out(&self) -> bool {
        self.length.is_some()
    }
}

impl Rate {
    /// Number of bytes that may be received now; pending until there are some.
    fn poll_allows(&mut self, answering: &Answering, context: &mut Context<'_>) -> Poll<usize> {
        loop {
            let now = gale_runtime::now();
            let elapsed = now.since(answering.started);
            let allowed = u128::from(self.per_second) * (elapsed.as_millis() + 1000) / 1000;
            let received = u128::from(answering.records.last().bytes_received);
            if allowed > received {
                return Poll::Ready(usize::try_from(allowed - received).unwrap_or(usize::MAX));
            }
            let excess_ms = (received - allowed) * 1000 / u128::from(self.per_second) + 1;
            let pause = Duration::from_millis(u64::try_from(excess_ms).unwrap_or(u64::MAX));
            self.pause.set(now + pause);
            if self.pause.poll_expired(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}
