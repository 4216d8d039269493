//! A response on its way into the cache; all requests for it read it while it arrives.
//!
//! ```text
//!   Asking ──► Coming: the head is known ──► Whole ──► stored: the index has it, and the fill goes
//!      └──► Nothing: not to be stored          └──► Broken: no client gets it as complete
//!
//!   window    [ shared bytes in memory, bounded ]       readers inside of it read memory
//!   file      [ the body from its beginning ]           readers behind it follow the file as it grows
//! ```
//!
//! A fill belongs to the cache and outlives the request that created it. Readers run on any loop at their own pace;
//! none delays another. The feeder decides how far it runs ahead ([`Fill::poll_wanted`]).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

use gale_files::GrowingFile;
use gale_runtime::{Bytes, Moment};
use parking_lot::Mutex;

use super::format::Meta;
use super::key::Id;

/// Maximum number of bytes in memory that wait for readers.
pub const WINDOW_BYTES: u64 = 1 << 20;

/// A response on its way into the cache, see the head of the file.
pub struct Fill {
    /// The sum of the key. The entry of a variant has another id.
    pub primary: Id,
    /// Time at which the server was asked.
    pub began: Moment,
    /// See `Meta::number`.
    pub number: u64,
    purged: AtomicBool,
    in_memory: AtomicBool,
    kept: AtomicBool,
    /// Cache status of the request that fetches it.
    way: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stage: Stage,
    window: VecDeque<Bytes>,
    /// Offset of the window in the body.
    window_start: u64,
    received: u64,
    file: Option<(GrowingFile, u64)>,
    /// Time at which the last bytes arrived.
    progress: Option<Moment>,
    /// The furthest offset that any reader has reached.
    fastest: u64,
    /// Wakers by ticket: thousands of readers may wait for one piece.
    waiting: HashMap<u64, Waker>,
    feeder: Option<Waker>,
    next_reader: u64,
    readers: usize,
}

/// Progress of a fill.
#[derive(Clone, Default)]
pub enum Stage {
    /// The server was asked and has not answered.
    #[default]
    Asking,
    /// The head has arrived; with the length of the body, if it is known.
    Coming(Arc<Meta>, Option<u64>),
    /// The whole response has arrived.
    Whole(Arc<Meta>),
    /// The response broke off: no more can be read.
    Broken,
    /// There is nothing to read: the response is not to be stored, or its request was given up.
    Nothing,
}

/// Result of a read.
pub enum Found {
    /// The bytes at the reader's offset.
    Bytes(Bytes),
    /// The bytes are only in the file; with the offset of the body in it.
    File(GrowingFile, u64),
    /// End of the body.
    End,
    /// The bytes are lost: the fill is not stored, and other readers are further.
    Behind,
    /// The body broke off here.
    Broken,
}

impl Fill {
    /// Creates a fill before its server is asked.
    pub fn new(primary: Id, number: u64, now: Moment) -> Fill {
        Fill {
            primary,
            began: now,
            number,
            purged: AtomicBool::new(false),
            in_memory: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            way: AtomicUsize::new(0),
            state: Mutex::default(),
        }
    }

    /// Cache status of the request that fetches it: an index below [`super::zone::WAYS`].
    pub fn way(&self) -> usize {
        self.way.load(Relaxed)
    }

    /// Sets the cache status of the request that fetches it.
    pub fn set_way(&self, way: usize) {
        self.way.store(way, Relaxed);
    }

    /// True if the response was purged while it is fetched: then it is not stored.
    pub fn is_purged(&self) -> bool {
        self.purged.load(Relaxed)
    }

    /// Marks the response as purged. False if it was before.
    pub fn purge(&self) -> bool {
        !self.purged.swap(true, Relaxed)
    }

    /// Keeps the response in memory alone: an entry with a file exists, but its disk is too slow.
    pub fn keep_in_memory(&self) {
        self.in_memory.store(true, Relaxed);
    }

    /// True if the response gets no file.
    pub fn stays_in_memory(&self) -> bool {
        self.in_memory.load(Relaxed)
    }

    /// Marks a whole response as only kept for a while: it is no longer fetched or stored.
    pub fn keep(&self) {
        self.kept.store(true, Relaxed);
    }

    /// True if the response is only kept.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Relaxed)
    }

    /// Progress of the fill.
    pub fn stage(&self) -> Stage {
        self.state.lock().stage.clone()
    }

    /// True if the head is known and the body can be read from its beginning.
    pub fn can_be_read(&self) -> bool {
        let state = self.state.lock();
        let has_beginning = state.window_start == 0 || state.file.is_some();
        has_beginning && matches!(state.stage, Stage::Coming(..) | Stage::Whole(_))
    }

    /// True if nothing has arrived for longer than `patience`.
    pub fn is_stalled(&self, now: Moment, patience: std::time::Duration) -> bool {
        let state = self.state.lock();
        matches!(state.stage, Stage::Coming(..)) && now.since(state.progress.unwrap_or(self.began)) > patience
    }

    /// Ready once the stage is no longer [`Stage::Asking`].
    pub fn poll_head(&self, ticket: u64, context: &mut Context<'_>) -> Poll<Stage> {
        let mut state = self.state.lock();
        if let Stage::Asking = state.stage {
            state.wait(ticket, context);
            return Poll::Pending;
        }
        Poll::Ready(state.stage.clone())
    }

    /// A number for a waiting reader.
    pub fn ticket(&self) -> u64 {
        let mut state = self.state.lock();
        state.next_reader += 1;
        state.next_reader
    }

    /// Removes a waiting reader.
    pub fn leave(&self, ticket: u64) {
        let mut state = self.state.lock();
        let waker = state.waiting.remove(&ticket);
        drop(state);
        drop(waker);
    }

    /// Notes that the head has arrived.
    pub fn begin(&self, meta: Arc<Meta>, length: Option<u64>) {
        self.change(|state| state.stage = Stage::Coming(meta, length));
    }

    /// Appends a piece of the body.
    pub fn append(&self, piece: Bytes) {
        self.change(|state| {
            state.received += piece.len() as u64;
            state.progress = gale_runtime::try_now();
            state.window.push_back(piece);
        });
    }

    /// Notes that the whole response has arrived.
    pub fn finish(&self) {
        self.change(|state| {
            if let Stage::Coming(meta, _) = &state.stage {
                state.stage = Stage::Whole(Arc::clone(meta));
            }
        });
    }

    /// Notes that the response broke off, or will not be stored.
    pub fn give_up(&self) {
        self.change(|state| match state.stage {
            Stage::Asking => state.stage = Stage::Nothing,
            Stage::Coming(..) => state.stage = Stage::Broken,
            _ => {}
        });
    }

    /// Sets the file that also receives the body, from offset `body_at` on.
    pub fn set_file(&self, file: GrowingFile, body_at: u64) {
        self.state.lock().file = Some((file, body_at));
    }

    /// Notes that the file is no longer written. Readers that have it open may read on.
    pub fn forget_file(&self) {
        self.change(|state| state.file = None);
    }

    /// Drops bytes that are in the file and beyond the bound of the window.
    pub fn trim(&self) {
        self.trim_to(WINDOW_BYTES / 2);
    }

    /// Drops bytes that are in the file.
    pub fn forget_written(&self) {
        self.trim_to(0);
    }

    /// True if no bytes are in memory.
    pub fn is_window_empty(&self) -> bool {
        self.state.lock().window.is_empty()
    }

    fn trim_to(&self, kept_min: u64) {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        let Some((file, body_at)) = &state.file else { return };
        let written = file.written().saturating_sub(*body_at);
        while let Some(first) = state.window.front() {
            let end = state.window_start + first.len() as u64;
            if end > written || state.received - end < kept_min {
                break;
            }
            gone.extend(state.window.pop_front());
            state.window_start = end;
        }
        drop(state);
        drop(gone);
    }

    /// Drops bytes that the fastest reader has read. The response is no longer stored, and slower readers have to ask
    /// the server.
    pub fn drop_read(&self) {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        while let Some(first) = state.window.front() {
            let end = state.window_start + first.len() as u64;
            if end > state.fastest || state.received - state.window_start <= WINDOW_BYTES {
                break;
            }
            gone.extend(state.window.pop_front());
            state.window_start = end;
        }
        let wakers: Vec<Waker> = state.waiting.drain().map(|(_, waker)| waker).collect();
        drop(state);
        drop(gone);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// For a response that is not stored: ready with true when the window has room, and with false when it has no
    /// reader.
    pub fn poll_wanted(&self, context: &mut Context<'_>) -> Poll<bool> {
        let mut state = self.state.lock();
        if state.readers == 0 {
            return Poll::Ready(false);
        }
        if state.received - state.window_start <= WINDOW_BYTES {
            return Poll::Ready(true);
        }
        // Set under the lock, so that a reader that leaves now sees it.
        let displaced = state.feeder.replace(context.waker().clone());
        drop(state);
        drop(displaced);
        Poll::Pending
    }

    /// The whole body, if it is in memory.
    pub fn whole_in_memory(&self) -> Option<Vec<Bytes>> {
        let state = self.state.lock();
        (state.window_start == 0).then(|| state.window.iter().cloned().collect())
    }

    /// Number of bytes of the body that have arrived.
    pub fn received(&self) -> u64 {
        self.state.lock().received
    }

    /// Number of readers, including those that have found the fill and may read it.
    pub fn readers(&self) -> usize {
        self.state.lock().readers
    }

    /// Adds a reader.
    pub fn join(&self) {
        self.state.lock().readers += 1;
    }

    /// Removes a reader.
    pub fn part(&self) {
        let mut state = self.state.lock();
        state.readers -= 1;
        let feeder = state.feeder.take();
        drop(state);
        feeder.into_iter().for_each(Waker::wake);
    }

    /// Returns up to `most` bytes at an offset of the body.
    pub fn poll_at(&self, ticket: u64, offset: u64, most: usize, context: &mut Context<'_>) -> Poll<Found> {
        let mut state = self.state.lock();
        if offset < state.window_start {
            return Poll::Ready(match &state.file {
                Some((file, body_at)) => Found::File(file.clone(), *body_at),
                None => Found::Behind,
            });
        }
        let mut start = state.window_start;
        for piece in &state.window {
            let end = start + piece.len() as u64;
            if offset < end {
                let from = (offset - start) as usize;
                let found = piece.slice(from..piece.len().min(from.saturating_add(most)));
                let read = offset + found.len() as u64;
                let feeder = if read > state.fastest {
                    state.fastest = read;
                    state.feeder.take()
                } else {
                    None
                };
                drop(state);
                feeder.into_iter().for_each(Waker::wake);
                return Poll::Ready(Found::Bytes(found));
            }
            start = end;
        }
        match state.stage {
            Stage::Whole(_) => Poll::Ready(Found::End),
            Stage::Broken | Stage::Nothing => Poll::Ready(Found::Broken),
            Stage::Asking | Stage::Coming(..) => {
                state.wait(ticket, context);
                Poll::Pending
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        let feeder = state.feeder.take();
        let wakers: Vec<Waker> = state.waiting.drain().map(|(_, waker)| waker).chain(feeder).collect();
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn wait(&mut self, ticket: u64, context: &Context<'_>) {
        match self.waiting.entry(ticket) {
            Entry::Occupied(mut waiting) => waiting.get_mut().clone_from(context.waker()),
            Entry::Vacant(place) => _ = place.insert(context.waker().clone()),
        }
    }
}
