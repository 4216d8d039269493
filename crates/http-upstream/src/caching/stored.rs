//! The body of an entry in a file, with bounds on the time that a client waits for it.
//!
//! ```text
//!   in memory, and checked ──► a piece of the file, sent in the connection's best way
//!   otherwise ──► read here, in the location's pool if it is not in memory, and checked ──► bytes
//!                   └─ late, failed or damaged ──► the server is asked for the rest (resume.rs)
//! ```
//!
//! While the disk does not answer, data in constant use is served from memory, by reads that do not block.
//! A damaged entry is removed, so that the next request fetches it again.
//! A response that cannot be resumed waits longer ([`LAST_PATIENCE`]), and is then cut off.

use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::units;
use gale_files::File;
use gale_http::files::FilePiece;
use gale_http::files::delivery::{FileOptions, ReadWay};
use gale_http::files::reader::READ_PIECE;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http_cache::CacheZone;
use gale_http_cache::memory::{self, Hot};
use gale_protocol::request::KnownHeader;
use gale_runtime::{Device, Moment, PoolError, Timer, timeout};

use super::checked::{CheckedReader, ReadError};
use super::opening::Unread;
use super::resume::{Remainder, strong_tag};

/// Disk timeout if no server can be asked for the rest.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// Maximum part of a file given to the connection at once: data that is in memory now may not stay there.
const PIECE_MAX: u64 = 1 << 20;

/// The first piece of a body, read before the head is sent: a note of the request.
struct FirstPiece {
    /// Number of the entry, and offset of the piece in its file.
    number: u64,
    offset: u64,
    /// The reader that holds the piece.
    reader: CheckedReader,
}

/// Reads the first piece of a body, for at most `disk_timeout` since `began`: no part of the head has been sent yet, so
/// a server can still be asked for the whole response.
pub(super) async fn begin_to_read(
    request: &mut Request,
    zone: &Arc<CacheZone>,
    hot: &Hot,
    (file, body_at): (&File, u64),
    (began, disk_timeout): (Moment, Duration),
) -> Result<(), Unread> {
    if is_readable_now(request, zone, hot, (file, body_at)) {
        return Ok(());
    }
    if !is_whole(file, body_at + hot.length) {
        note_damage(request, zone, hot);
        return Err(Unread::Unusable);
    }
    let first = first_byte(request, hot.length);
    let (offset, length) = (body_at + first, hot.length - first);
    let piece = FilePiece { file: file.clone(), offset, length };
    let mut reader = CheckedReader::new(options(request), hot.blocks.clone());
    let may_try = match reads_in_place(request) {
        true => zone.disk.is_well(),
        false => reader.is_in_use(&piece) || zone.disk.may_try(gale_runtime::now()),
    };
    if !may_try {
        return Err(Unread::Late);
    }
    let patience = disk_timeout.saturating_sub(gale_runtime::now().since(began));
    match timeout(patience, poll_fn(|context| reader.poll_begin(&piece, context))).await {
        Ok(Ok(())) => {
            zone.disk.note_tried();
            request.notes.put(FirstPiece { number: hot.meta.number, offset, reader });
            Ok(())
        }
        Ok(Err(ReadError::Damaged)) => {
            note_damage(request, zone, hot);
            Err(Unread::Unusable)
        }
        // Memory or room may be available when the body is sent.
        Ok(Err(ReadError::Io(error))) if !is_of_disk(&error) => Ok(()),
        Ok(Err(ReadError::Io(error))) => {
            note_error(request, zone, &error.to_string());
            Err(Unread::Unusable)
        }
        Err(_) => {
            note_late(request, zone, file.device(), began);
            Err(Unread::Late)
        }
    }
}

/// True if the disk is at fault, and not a lack of memory or of room in a pool.
pub(super) fn is_of_disk(error: &io::Error) -> bool {
    let is_of_pool = error.get_ref().is_some_and(|error| error.is::<PoolError>());
    !is_of_pool && (error.kind() != io::ErrorKind::OutOfMemory || error.raw_os_error().is_some())
}

/// True if the first piece is in memory and checked, so that it can be read without blocking.
pub(super) fn is_readable_now(request: &Request, zone: &CacheZone, hot: &Hot, (file, body_at): (&File, u64)) -> bool {
    let (offset, end) = (body_at + first_byte(request, hot.length), body_at + hot.length);
    let is_checked = hot.blocks.as_ref().is_none_or(|blocks| blocks.checked_length(offset, 1) > 0);
    is_checked
        && is_whole(file, end)
        && match zone.disk.is_well() {
            true => is_in_memory(file, offset, end) || reads_in_place(request),
            false => !reads_in_place(request) && is_in_use(hot, file, offset..end),
        }
}

/// True if the file still reaches to `end`. A user or a failing disk may have truncated it since it was opened, which
/// its cached pages do not show. A file system that may block is not asked on a loop; reads find it there.
fn is_whole(file: &File, end: u64) -> bool {
    file.waits_for_others() || file.look_again().is_ok_and(|now| now.size >= end)
}

/// True if the first block of the range is in constant use.
fn is_in_use(hot: &Hot, file: &File, range: Range<u64>) -> bool {
    let piece = FilePiece { file: file.clone(), offset: range.start, length: range.end - range.start };
    CheckedReader::new(FileOptions::default(), hot.blocks.clone()).is_in_use(&piece)
}

fn is_in_memory(file: &File, offset: u64, end: u64) -> bool {
    // The read will find the error again.
    file.sendfile_length(offset, (end - offset).min(READ_PIECE)).is_ok_and(|length| length > 0)
}

/// True for `aio off`: files are read on the loop, which may block.
fn reads_in_place(request: &Request) -> bool {
    options(request).way == ReadWay::Blocking
}

fn options(request: &Request) -> FileOptions {
    FileOptions::of(request, &request.scope().core).unwrap_or_default()
}

/// First byte of the client's range; 0 without a valid range. A guess: conditions are evaluated later.
fn first_byte(request: &Request, length: u64) -> u64 {
    let digits = request.header(KnownHeader::Range).and_then(|range| {
        let range = range.strip_prefix(b"bytes=")?;
        let end = range.iter().position(|byte| !byte.is_ascii_digit())?;
        units::parse_number(&range[..end])
    });
    digits.filter(|&first| first < length).unwrap_or(0)
}

/// Notes that a request has waited for the disk since `since` in vain. A disk that has answered others meanwhile is
/// saturated, and stays in use.
pub(super) fn note_late(request: &Request, zone: &CacheZone, device: Device, since: Moment) {
    zone.counters.disk_timeouts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    if zone.disk.has_answered_since(device, since) {
        let message = format_args!("the disk of cache \"{}\" is slow, a request is passed to the upstream", zone.name);
        request.log(Level::Info, message);
    } else if zone.disk.note_silent(device, gale_runtime::now()) {
        let message = format_args!("cache \"{}\" does not respond, requests are passed to the upstream", zone.name);
        request.log(Level::Error, message);
    }
}

/// Notes that a disk could not read a response.
pub(super) fn note_error(request: &Request, zone: &CacheZone, error: &str) {
    zone.counters.disk_errors.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    request.log(Level::Crit, format_args!("cache \"{}\": reading a response failed: {error}", zone.name));
}

/// Removes a damaged entry and its file.
fn note_damage(request: &Request, zone: &Arc<CacheZone>, hot: &Hot) {
    memory::forget(zone.identity(), &hot.id);
    // Concurrent readers find it damaged too: only one logs it.
    if zone.discard_damaged(&hot.id, hot.meta.number) {
        let path = zone.path_of(&hot.id);
        request.log(Level::Crit, format_args!("cache file \"{}\" is damaged", path.display()));
    }
}

/// Disk timeout of a body.
pub(super) struct Patience {
    /// Runs while a read is in progress.
    timer: Option<Timer>,
    /// Beginning of the last read that had to wait.
    since: Moment,
    limit: Duration,
}

impl Patience {
    /// `disk_timeout` if a server can be asked for the rest, otherwise at least [`LAST_PATIENCE`].
    pub fn new(disk_timeout: Duration, can_resume: bool) -> Patience {
        let limit = if can_resume { disk_timeout } else { disk_timeout.max(LAST_PATIENCE) };
        Patience { timer: None, since: gale_runtime::now(), limit }
    }

    /// Beginning of the read that takes too long.
    pub fn since(&self) -> Moment {
        self.since
    }

    /// The result of a read; `None` if it takes too long.
    pub fn poll<T>(&mut self, read: Poll<T>, context: &mut Context<'_>) -> Poll<Option<T>> {
        match read {
            Poll::Ready(done) => {
                self.timer = None;
                Poll::Ready(Some(done))
            }
            Poll::Pending => {
                let timer = self.timer.get_or_insert_with(|| {
                    self.since = gale_runtime::now();
                    Timer::after(self.limit)
                });
                timer.poll_expired(context).map(|()| {
                    self.timer = None;
                    None
                })
            }
        }
    }
}

/// The body of an entry, which begins at `body_at` in the file.
pub(super) fn body_of_file(
    request: &mut Request,
    zone: &Arc<CacheZone>,
    hot: &Rc<Hot>,
    (file, body_at): (&File, u64),
    disk_timeout: Duration,
) -> Body {
    let piece = FilePiece { file: file.clone(), offset: body_at, length: hot.length };
    let first = request.notes.take::<FirstPiece>().filter(|first| first.number == hot.meta.number);
    let options = options(request);
    if options.way == ReadWay::Blocking && hot.blocks.as_ref().is_none_or(|blocks| blocks.are_checked()) {
        return Body::File(piece);
    }
    let (zone, hot) = (Arc::clone(zone), Rc::clone(hot));
    let mut body = StoredBody::new(zone, hot, options, piece, body_at, disk_timeout);
    body.first = first;
    Body::Stream(Box::new(body))
}

struct StoredBody {
    zone: Arc<CacheZone>,
    hot: Rc<Hot>,
    reader: CheckedReader,
    options: FileOptions,
    /// The part that was not sent yet.
    piece: FilePiece,
    /// Offset of the body in the file.
    body_at: u64,
    first: Option<FirstPiece>,
    disk_timeout: Duration,
    patience: Patience,
    /// Turn of the loop in which the file's length was last checked.
    looked: Moment,
    /// Entity tag for asking the server for the rest.
    tag: Option<Rc<[u8]>>,
    /// The rest, from the server.
    remainder: Option<Remainder>,
}

impl StoredBody {
    /// Creates the stream for a piece of an entry's file.
    fn new(
        zone: Arc<CacheZone>,
        hot: Rc<Hot>,
        options: FileOptions,
        piece: FilePiece,
        body_at: u64,
        disk_timeout: Duration,
    ) -> StoredBody {
        let tag = strong_tag(&hot.meta);
        let patience = Patience::new(disk_timeout, tag.is_some());
        let reader = CheckedReader::new(options.clone(), hot.blocks.clone());
        StoredBody {
            zone,
            hot,
            reader,
            options,
            piece,
            body_at,
            first: None,
            disk_timeout,
            patience,
            // It was checked before the head was made.
            looked: gale_runtime::now(),
            tag,
            remainder: None,
        }
    }

    /// Takes bytes that were already read, or a piece that is in memory and checked.
    fn take_at_once(&mut self) -> Option<BodyItem> {
        let piece = &mut self.piece;
        if let Some(first) = self.first.take()
            && first.offset == piece.offset
        {
            self.reader = first.reader;
        }
        if let Some(bytes) = self.reader.take_ready(piece) {
            return Some(BodyItem::Bytes(bytes));
        }
        if self.reader.is_reading() || !self.zone.disk.is_well() {
            return None;
        }
        let most = self.reader.checked_length(piece, PIECE_MAX);
        if most == 0 {
            return None;
        }
        // The read will find an error, or a truncated file, again.
        let length = piece.file.sendfile_length(piece.offset, most).unwrap_or(0);
        let now = gale_runtime::now();
        if now != std::mem::replace(&mut self.looked, now) && !is_whole(&piece.file, piece.offset + length) {
            return None;
        }
        let found = FilePiece { file: piece.file.clone(), offset: piece.offset, length };
        (length > 0 && piece.advance(length).is_ok()).then_some(BodyItem::File(found))
    }

    /// Asks the server for the rest.
    fn resume(&mut self, request: &Request) -> Result<(), BodyError> {
        self.reader = CheckedReader::new(FileOptions::default(), None);
        let offset = self.piece.offset - self.body_at;
        let end = offset + self.piece.length;
        self.remainder = Remainder::ask(request, self.tag.as_ref(), offset, Some(end), Some(self.hot.length));
        match self.remainder {
            Some(_) => Ok(()),
            None => Err(BodyError::Other("a cached response could not be read to the end".to_owned())),
        }
    }
}

impl BodyStream for StoredBody {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        if let Some(remainder) = &mut self.remainder {
            return remainder.poll_next(request, context);
        }
        if self.piece.length == 0 {
            return Poll::Ready(None);
        }
        if let Some(item) = self.take_at_once() {
            return Poll::Ready(Some(Ok(item)));
        }
        let was_reading = self.reader.is_reading();
        // A disk that is known to be silent is not waited for.
        let must_wait = !was_reading && !self.zone.disk.is_well() && !self.reader.is_in_use(&self.piece);
        if must_wait && self.tag.is_some() && self.resume(request).is_ok() {
            return self.poll_next(request, context);
        }
        let read = self.reader.poll_begin(&self.piece, context);
        match ready!(self.patience.poll(read, context)) {
            Some(Ok(())) => return self.poll_next(request, context),
            Some(Err(ReadError::Damaged)) => note_damage(request, &self.zone, &self.hot),
            Some(Err(ReadError::Io(error))) if !is_of_disk(&error) => return Poll::Ready(Some(Err(error.into()))),
            Some(Err(ReadError::Io(error))) => note_error(request, &self.zone, &error.to_string()),
            None => note_late(request, &self.zone, self.piece.file.device(), self.patience.since()),
        }
        if let Err(error) = self.resume(request) {
            return Poll::Ready(Some(Err(error)));
        }
        self.poll_next(request, context)
    }

    fn length(&self) -> Option<u64> {
        Some(self.piece.length)
    }

    fn can_be_cut(&self) -> bool {
        true
    }

    fn part(&self, range: &Range<u64>) -> Option<Body> {
        let (offset, length) = (self.body_at + range.start, range.end - range.start);
        let piece = FilePiece { file: self.piece.file.clone(), offset, length };
        let (zone, hot, options) = (Arc::clone(&self.zone), Rc::clone(&self.hot), self.options.clone());
        let part = StoredBody::new(zone, hot, options, piece, self.body_at, self.disk_timeout);
        Some(Body::Stream(Box::new(part)))
    }

    fn cut_to(&mut self, range: &Range<u64>) -> bool {
        self.piece.offset = self.body_at + range.start;
        self.piece.length = range.end - range.start;
        true
    }
}

#[cfg(test)]
mod tests {
    use gale_runtime::{ClockChoice, EventLoop, LoopOptions};

    use super::*;

    #[test]
    fn every_client_waits_a_bounded_time_for_a_disk() {
        let options = LoopOptions { clock: ClockChoice::Virtual, ..LoopOptions::default() };
        EventLoop::new(options).expect("a loop").run(async {
            let disk_timeout = Duration::from_millis(250);
            for (can_resume, limit) in [(true, disk_timeout), (false, LAST_PATIENCE)] {
                let began = gale_runtime::now();
                let mut patience = Patience::new(disk_timeout, can_resume);
                let came: Option<()> = poll_fn(|context| patience.poll(Poll::Pending, context)).await;
                assert_eq!((came, patience.since()), (None, began));
                let waited = gale_runtime::now().since(began);
                assert!(waited >= limit && waited < limit + Duration::from_millis(10), "{waited:?}");
            }
        });
    }
}
