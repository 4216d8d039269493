//! Reads a server's response into a fill and a file, in a task that continues without the client that caused it.
//!
//! The server is read as fast as the disk writes. A disk that is behind slows it for at most [`DISK_PATIENCE`], and one
//! that does nothing for [`SILENCE_MAX`] if a client waits; then storing ends, and the server is read as fast as the
//! fastest client. Without clients the fetch then ends. While the response is stored, it continues without clients: to
//! its end if its length is known, otherwise for `proxy_read_timeout`, since it may have no end.
//!
//! Memory that all loops may read is charged to the process. When that account is full, the last piece stays on the
//! account of the loop, and the server is not read, as with a slow disk, until bytes that are in the file were dropped
//! or others have freed memory.

use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};
use std::task::Poll;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_files::{File, Writer, likely_device};
use gale_http::request::Request;
use gale_http::request::files::pool_of;
use gale_http::request::subrequest::{Copy, copy_in_background};
use gale_http_cache::CacheZone;
use gale_http_cache::fill::{Fill, Stage};
use gale_http_cache::format::{self, MAGIC, Meta};
use gale_http_cache::key::Id;
use gale_http_cache::store;
use gale_http_cache::sums::{Summing, Sums};
use gale_http_cache::zone::{UNSTORED_BYTES_MAX, total};
use gale_runtime::{Bytes, Device, Moment, ThreadPool, Timer, sleep, timeout};

use super::batches::detach_with_others;
use crate::answering::Answering;
use crate::failure::receive_failure;
use crate::receiving::{BodyRead, Malformed};
use crate::settings::UpstreamSettings;

/// Time for which the server waits for a disk that is behind but answers, or if no client waits.
const DISK_PATIENCE: Duration = Duration::from_secs(5);

/// Time for which a client waits for a disk that does nothing, unless `cache_disk_timeout` is longer. A response that
/// is not stored costs more than one that is read elsewhere, and the journals of file systems cause pauses.
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// A longer response is written while it arrives, a shorter one when it is complete.
const AT_ONCE_BYTES: u64 = 128 * 1024;

/// Time for which a complete response is kept in memory if its disk is too slow to write or to read it. Requests for it
/// need no server meanwhile.
const KEPT_FOR: Duration = Duration::from_secs(1);

/// Maximum size of a cache's responses that are kept in this way or wait to be stored, for another one to be kept.
const KEPT_BYTES_MAX: u64 = 16 << 20;

/// Minimum memory of a piece of a body, and overhead of a kept response besides head and body, in bytes.
const PIECE_MEMORY_MIN: usize = 4096;
const KEPT_BYTES_EACH: u64 = 1024;

/// Interval of attempts to charge the process: freed memory is not signalled.
const SHARE_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Maximum number of bytes of a body received at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Adds a piece that all loops may read. Returns false if the process's account has no room: the piece then counts for
/// this loop, which should wait for room before it adds more.
pub(super) fn append(fill: &Fill, piece: Bytes) -> bool {
    let is_shared = piece.share().is_ok();
    fill.append(piece);
    is_shared
}

/// Writes a complete response in a pool. The fill stays readable until that is done.
pub(super) fn store_whole(pool: ThreadPool, ending: Ending, meta: &Arc<Meta>) {
    let (zone, id) = (&ending.zone, ending.id);
    if ending.fill.stays_in_memory() || !zone.disk.may_try(gale_runtime::now()) {
        return keep_for_a_while(ending);
    }
    let Some(pieces) = ending.fill.whole_in_memory() else { return };
    let Some(reserved) = zone.reserve(total(&pieces), UNSTORED_BYTES_MAX) else { return };
    let path = zone.path_of(&id);
    let device = likely_device(&path).writes();
    let number = store::new_number();
    let now = gale_runtime::wall_seconds();
    let meta = Arc::clone(meta);
    let task = move || {
        let _reserved = reserved;
        let Ending { zone, fill, .. } = &ending;
        let stored = zone.disk.watch(|| {
            store::write(&path, &meta, &pieces, number).and_then(|file| zone.commit(fill, &id, &meta, file, now))
        });
        if let Err(error) = stored {
            zone.note_store_failure(&path, &error);
        }
    };
    // If the pool refuses, the task is dropped, and the fill ends.
    detach_with_others(pool, device, task);
}

/// Keeps a response without a file for a while, if all of it is in memory and there is room.
fn keep_for_a_while(ending: Ending) {
    let (Some(pieces), Stage::Whole(meta)) = (ending.fill.whole_in_memory(), ending.fill.stage()) else { return };
    // A small piece keeps its whole receive buffer.
    let body: usize = pieces.iter().map(|piece| piece.len().max(PIECE_MEMORY_MIN)).sum();
    let bytes = body as u64 + u64::from(format::header_length(&meta)) + KEPT_BYTES_EACH;
    let Some(reserved) = ending.zone.reserve(bytes, KEPT_BYTES_MAX) else { return };
    ending.fill.keep();
    gale_runtime::spawn(async move {
        let _kept = (ending, reserved);
        sleep(KEPT_FOR).await;
    });
}

/// Ends the fill when it is dropped, however storing ends.
pub(super) struct Ending {
    pub zone: Arc<CacheZone>,
    pub fill: Arc<Fill>,
    pub id: Id,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.zone.end(&self.fill, &self.id);
    }
}

/// Begins to read the rest of a response; `next` is the result of the last read.
#[expect(clippy::too_many_arguments, reason = "it takes over all that a response and its entry consist of")]
pub(super) fn start(
    request: &mut Request,
    settings: &UpstreamSettings,
    answering: Box<Answering>,
    zone: Arc<CacheZone>,
    fill: Arc<Fill>,
    id: Id,
    meta: Arc<Meta>,
    next: Result<BodyRead, Malformed>,
) {
    let pool = pool_of(request);
    let ending = Ending { zone, fill, id };
    let silence_max = *settings.exchange.read_timeout.get();
    let disk_timeout = *settings.cache.disk_timeout.get();
    let rate = settings.response_body.limit_rate.get().evaluate(request);
    let guard = GiveUp(Arc::clone(&ending.fill));
    let fill_beginning = ending.fill.whole_in_memory().unwrap_or_default();
    let started = copy_in_background(request, move |copy| async move {
        let _guard = guard;
        let header_length = format::header_length(&meta);
        let mut summing = Summing::new(header_length);
        // The pieces that arrived with the head.
        fill_beginning.iter().for_each(|piece| summing.update(piece));
        let silence = Timer::after(silence_max);
        let feed = Feed {
            answering: Some(answering),
            has_length: matches!(ending.fill.stage(), Stage::Coming(_, Some(_))),
            unread_since: None,
            was_read: false,
            ending,
            meta,
            pool,
            silence,
            silence_max,
            disk_timeout,
            rate,
            header_length,
            summing,
        };
        if let Some(whole) = feed.run(&copy, next).await {
            whole.store().await;
        }
    });
    // A refusal is logged, and the fill was given up with its task.
    let _ = started;
}

/// Gives the fill up if the task ends early.
struct GiveUp(Arc<Fill>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// Factor for the timeout of a fill in the background: it has no reader from its beginning, and the stale response is
/// used until it is complete.
const BACKGROUND_PATIENCE: u32 = 10;

struct Feed {
    answering: Option<Box<Answering>>,
    /// True if the length of the body is known.
    has_length: bool,
    /// Time since which it has no reader.
    unread_since: Option<Moment>,
    /// True if it had a reader.
    was_read: bool,
    ending: Ending,
    meta: Arc<Meta>,
    pool: ThreadPool,
    silence: Timer,
    silence_max: Duration,
    disk_timeout: Duration,
    rate: u64,
    header_length: u32,
    summing: Summing,
}

/// Place of a response while it is received.
enum Keeping {
    /// In memory: it is short so far.
    InMemory,
    /// In memory and in a file.
    InFile(Box<Storing>),
    /// In memory for its clients alone; other requests still find it.
    Unstored,
    /// In memory for its clients alone, after its file was given up; other requests no longer find it.
    Hidden,
}

impl Keeping {
    fn is_stored(&self) -> bool {
        matches!(self, Keeping::InMemory | Keeping::InFile(_))
    }
}

/// A file being written.
struct Storing {
    writer: Writer,
    temporary: PathBuf,
    path: PathBuf,
}

/// A complete response that is to be stored.
enum Whole {
    AtOnce(ThreadPool, Ending, Arc<Meta>),
    Streamed {
        storing: Box<Storing>,
        ending: Ending,
        meta: Arc<Meta>,
        header_length: u32,
        sums: Sums,
        pool: ThreadPool,
    },
}

impl Feed {
    /// Reads to the end. Returns the response if it is to be stored.
    async fn run(mut self, request: &Copy, next: Result<BodyRead, Malformed>) -> Option<Whole> {
        let fill = Arc::clone(&self.ending.fill);
        let mut next = Some(next);
        let mut keeping = Keeping::InMemory;
        let mut unshared: Option<Bytes> = None;
        loop {
            keeping = self.advance(request, keeping, unshared.take()).await;
            let is_read = keeping.is_stored() || wait_for_readers(&fill).await;
            if !is_read && self.ending.zone.end_unread(&fill, &self.ending.id) {
                return None;
            }
            match self.receive(request, next.take()).await {
                Received::Piece(piece) => {
                    self.summing.update(&piece);
                    if let Keeping::InFile(storing) = &mut keeping {
                        storing.writer.push(piece.clone());
                    }
                    if !append(&fill, piece.clone()) {
                        unshared = Some(piece);
                    }
                }
                Received::End => return self.end(request, keeping),
                Received::Broken => {
                    self.give_up(keeping);
                    fill.give_up();
                    return None;
                }
            }
        }
    }

    /// Moves to the phase for the bytes received so far, and waits until disk and shared memory have room for another
    /// piece.
    async fn advance(&mut self, request: &Copy, keeping: Keeping, unshared: Option<Bytes>) -> Keeping {
        let fill = Arc::clone(&self.ending.fill);
        if !keeping.is_stored() || self.is_unwanted(request, &fill) {
            return self.give_up(keeping);
        }
        let mut keeping = match keeping {
            Keeping::InMemory if fill.received() > AT_ONCE_BYTES || unshared.is_some() => {
                match self.begin_file(request).await {
                    Some(storing) => Keeping::InFile(storing),
                    None => return Keeping::Unstored,
                }
            }
            keeping => keeping,
        };
        if let Keeping::InFile(storing) = &mut keeping
            && !self.wait_for_disk(request, storing).await
        {
            return self.give_up(keeping);
        }
        if let Some(piece) = unshared
            && !wait_to_share(&fill, &piece).await
        {
            let message = "the memory shared by workers is full, a response is not stored";
            request.log(Level::Warn, format_args!("{message}"));
            return self.give_up(keeping);
        }
        keeping
    }

    /// True if the response is no longer to be stored: it was purged, is too large, or may have no end.
    fn is_unwanted(&mut self, request: &Copy, fill: &Fill) -> bool {
        if fill.is_purged() || fill.received() > self.ending.zone.options().max_size {
            return true;
        }
        let is_left = self.is_left_for_good(fill);
        if is_left {
            let message = "no client reads a response of unknown length any longer, it is not stored";
            request.log(Level::Info, format_args!("{message}"));
        }
        is_left
    }

    /// Ends storing.
    fn give_up(&self, keeping: Keeping) -> Keeping {
        match keeping {
            Keeping::InMemory | Keeping::Unstored => Keeping::Unstored,
            Keeping::InFile(storing) => {
                self.stop_storing(*storing);
                Keeping::Hidden
            }
            Keeping::Hidden => Keeping::Hidden,
        }
    }

    /// Ends the response after its last piece.
    fn end(mut self, request: &Copy, keeping: Keeping) -> Option<Whole> {
        let answering = self.answering.take().expect("it has not ended");
        let is_whole = answering.is_whole();
        answering.finish(request);
        let fill = Arc::clone(&self.ending.fill);
        fill.finish();
        if !is_whole {
            if let Keeping::InMemory = keeping {
                self.ending.zone.end(&fill, &self.ending.id);
            }
            self.give_up(keeping);
            return None;
        }
        let (meta, pool) = (self.meta, self.pool);
        match keeping {
            Keeping::InMemory => Some(Whole::AtOnce(pool, self.ending, meta)),
            Keeping::InFile(storing) => {
                let (header_length, sums) = (self.header_length, self.summing.finish());
                Some(Whole::Streamed { storing, ending: self.ending, meta, header_length, sums, pool })
            }
            // It is not stored because of the disk, and not because it is unwanted or memory is full.
            Keeping::Unstored if fill.stays_in_memory() || !self.ending.zone.disk.is_well() => {
                keep_for_a_while(self.ending);
                None
            }
            Keeping::Unstored | Keeping::Hidden => None,
        }
    }

    /// True if the response has had no reader for so long that it is given up: it may have no end.
    fn is_left_for_good(&mut self, fill: &Fill) -> bool {
        let is_read = fill.readers() > 0;
        self.was_read |= is_read;
        if self.has_length || is_read {
            self.unread_since = None;
            return false;
        }
        let now = gale_runtime::now();
        let patience = if self.was_read { 1 } else { BACKGROUND_PATIENCE };
        now.since(*self.unread_since.get_or_insert(now)) > self.silence_max * patience
    }

    /// Creates the file and writes the bytes received so far.
    async fn begin_file(&self, request: &Copy) -> Option<Box<Storing>> {
        let zone = &self.ending.zone;
        let pieces = self.ending.fill.whole_in_memory()?;
        if self.ending.fill.stays_in_memory() || !zone.disk.may_try(gale_runtime::now()) {
            return None;
        }
        let path = zone.path_of(&self.ending.id);
        let (device, number) = (likely_device(&path).writes(), store::new_number());
        // The creating thread and the waiting task both set this; the second one removes the file.
        let is_over = Arc::new(AtomicBool::new(false));
        let task = {
            let (path, zone, is_over) = (path.clone(), Arc::clone(zone), Arc::clone(&is_over));
            self.pool.run_for(device, move || {
                let (file, temporary) = zone.disk.watch(|| store::create(&path, number))?;
                if is_over.swap(true, AcqRel) {
                    store::remove_temporary(&temporary);
                    return Err(std::io::ErrorKind::TimedOut.into());
                }
                store::keep_access_time(&file);
                Ok((File::from_std(file)?, temporary))
            })
        };
        let created = match self.wait_while_disk_answers(device, task).await {
            Some(Ok(created)) => created,
            Some(Err(refused)) => Err(refused.into()),
            None => {
                if is_over.swap(true, AcqRel) {
                    let temporary = store::temporary(&path, number);
                    store::remove_temporary_in(&self.pool, temporary);
                }
                Err(std::io::ErrorKind::TimedOut.into())
            }
        };
        let (file, temporary) = match created {
            Ok(created) => created,
            Err(error) => {
                zone.note_store_failure(&path, &error);
                request.log(Level::Crit, format_args!("open() \"{}\" failed {}", path.display(), OsErrorText(&error)));
                return None;
            }
        };
        let header_length = self.header_length;
        let mut writer = Writer::new(file, temporary.clone()).in_pool(&self.pool);
        let mut header = MAGIC.to_vec();
        header.resize(header_length as usize, 0);
        // Not more than may be in memory anyway.
        writer.push_all(std::iter::once(Bytes::from(header)).chain(pieces));
        self.ending.fill.set_file(writer.follow(), header_length.into());
        Some(Box::new(Storing { writer, temporary, path }))
    }

    /// Waits until the disk has room for another piece. False if it fails, or takes too long.
    async fn wait_for_disk(&self, request: &Copy, storing: &mut Storing) -> bool {
        let device = likely_device(&storing.path).writes();
        let ready = poll_fn(|context| storing.writer.poll_ready(context));
        let ready = self.wait_while_disk_answers(device, ready).await;
        self.ending.fill.trim();
        match ready {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                self.ending.zone.note_store_failure(&storing.path, error.error());
                request.log(Level::Crit, format_args!("{error} while storing a response"));
                false
            }
            None => {
                request.log(Level::Warn, format_args!("the cache's disk is too slow, a response is not stored"));
                false
            }
        }
    }

    /// Waits for the disk, for at most [`DISK_PATIENCE`]; while the response has a reader, only as long as the disk
    /// does anything. `None` if it takes longer.
    async fn wait_while_disk_answers<T>(&self, device: Device, wait: impl Future<Output = T>) -> Option<T> {
        let disk = &self.ending.zone.disk;
        let silence_max = self.disk_timeout.clamp(SILENCE_MAX, DISK_PATIENCE);
        let began = gale_runtime::now();
        let (mut since, mut has_waited) = (began, false);
        let mut wait = pin!(wait);
        loop {
            let done = poll_fn(|context| {
                let done = wait.as_mut().poll(context);
                has_waited |= done.is_pending();
                done
            });
            if let Ok(done) = timeout(silence_max, done).await {
                if has_waited {
                    disk.note_written(gale_runtime::now());
                }
                return Some(done);
            }
            let now = gale_runtime::now();
            let is_over = now.since(began) >= DISK_PATIENCE;
            let is_silent = !disk.has_answered_since(device, since) && !disk.has_written_since(since);
            if is_silent && (is_over || self.ending.fill.readers() > 0) {
                disk.note_silent(device, now);
                return None;
            }
            if is_over {
                return None;
            }
            since = now;
        }
    }

    fn stop_storing(&self, storing: Storing) {
        let Storing { writer, temporary, .. } = storing;
        writer.stop_storing();
        self.ending.fill.forget_file();
        self.ending.zone.end(&self.ending.fill, &self.ending.id);
        store::remove_temporary_in(&self.pool, temporary);
    }

    /// Receives the next part of the response.
    async fn receive(&mut self, request: &Copy, mut next: Option<Result<BodyRead, Malformed>>) -> Received {
        let answering = self.answering.as_mut().expect("it has not ended");
        let (silence, silence_max, rate) = (&mut self.silence, self.silence_max, self.rate);
        let deadline = answering.records.deadline();
        let next_silence = move || {
            let until = gale_runtime::now() + silence_max;
            deadline.map_or(until, |deadline| deadline.min(until))
        };
        silence.set(next_silence());
        poll_fn(|context| {
            loop {
                match next.take().unwrap_or_else(|| answering.read_body()) {
                    Ok(BodyRead::Piece(piece)) => return Poll::Ready(Received::Piece(piece)),
                    Ok(BodyRead::End) => return Poll::Ready(Received::End),
                    Ok(BodyRead::Partial) => {}
                    Err(malformed) => {
                        request.log(Level::Error, format_args!("{malformed} while reading upstream"));
                        return Poll::Ready(Received::Broken);
                    }
                }
                answering.tell_messages(request);
                // A server that has begun to answer need not read the rest of the request.
                let _ = answering.poll_send(request, context);
                let most = if rate > 0 { PIECE_BYTES.min(rate as usize).max(1) } else { PIECE_BYTES };
                match answering.poll_receive(most, context) {
                    Poll::Ready(Ok(_)) => silence.set(next_silence()),
                    Poll::Ready(Err(error)) => {
                        let failure = receive_failure(&error);
                        request.log(Level::Error, format_args!("{failure} while reading upstream"));
                        return Poll::Ready(Received::Broken);
                    }
                    Poll::Pending if silence.poll_expired(context).is_ready() => {
                        let message = "upstream timed out (110: Connection timed out) while reading upstream";
                        request.log(Level::Error, format_args!("{message}"));
                        return Poll::Ready(Received::Broken);
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }
}

enum Received {
    Piece(Bytes),
    End,
    Broken,
}

/// Waits until the process's account has room for a piece, or the window is empty because all is in the file. False if
/// that takes too long.
async fn wait_to_share(fill: &Fill, piece: &Bytes) -> bool {
    let shared = async {
        loop {
            fill.forget_written();
            if fill.is_window_empty() || piece.share().is_ok() {
                return;
            }
            sleep(SHARE_AGAIN_AFTER).await;
        }
    };
    timeout(DISK_PATIENCE, shared).await.is_ok()
}

/// Waits until the fastest reader has read some bytes. False if there is no reader.
async fn wait_for_readers(fill: &Arc<Fill>) -> bool {
    poll_fn(|context| {
        fill.drop_read();
        fill.poll_wanted(context)
    })
    .await
}

impl Whole {
    async fn store(self) {
        let (storing, ending, meta, header_length, sums, pool) = match self {
            Whole::AtOnce(pool, ending, meta) => {
                store_whole(pool, ending, &meta);
                return;
            }
            Whole::Streamed { storing, ending, meta, header_length, sums, pool } => {
                (storing, ending, meta, header_length, sums, pool)
            }
        };
        let Storing { writer, temporary, path } = *storing;
        let file = match timeout(DISK_PATIENCE, writer.finish()).await {
            Ok(Ok(file)) => file,
            failed => {
                if let Ok(Err(error)) = failed {
                    ending.zone.note_store_failure(&path, error.error());
                }
                store::remove_temporary_in(&pool, temporary);
                return;
            }
        };
        let length = ending.fill.received();
        let now = gale_runtime::wall_seconds();
        let device = likely_device(&path).writes();
        let task = move || {
            let stored = ending.zone.disk.watch(|| {
                let file = store::complete(&file, temporary, &meta, header_length, length, &sums)?;
                ending.zone.commit(&ending.fill, &ending.id, &meta, file, now)
            });
            if let Err(error) = stored {
                ending.zone.note_store_failure(&path, &error);
            }
        };
        let _ = pool.detach(device, task);
    }
}
