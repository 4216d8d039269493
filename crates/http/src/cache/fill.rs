//! A response on its way into the cache, which all who ask for it read while it comes.
//!
//! ```text
//!   asking ──► coming: the head is known ──► whole ──► stored: the index has it, and the fill goes
//!      └──► nothing: not to be stored        └──► broken: nobody gets it as whole
//!
//!   window    [ shared bytes in memory, bounded ]       readers inside of it read memory
//!   file      [ all from the beginning ]                readers behind it follow the file as it grows
//! ```
//!
//! A fill belongs to the cache: whoever made it may leave. Readers are on any loop and keep their own pace; none delays
//! another. What feeds it decides how far it runs ahead ([`Fill::poll_wanted`]).

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

use gale_runtime::files::GrowingFile;
use gale_runtime::{Bytes, Moment};
use parking_lot::Mutex;

use super::format::Meta;
use super::key::Id;

/// Most bytes that wait in memory for readers.
pub const WINDOW_BYTES: u64 = 1 << 20;

/// See the file's head.
pub struct Fill {
    /// The sum of the key. A variant's entry has another name.
    pub primary: Id,
    /// When the server was asked.
    pub began: Moment,
    /// See `Meta::number`.
    pub number: u64,
    purged: AtomicBool,
    in_memory: AtomicBool,
    kept: AtomicBool,
    /// In which way its request uses the cache.
    way: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stage: Stage,
    window: VecDeque<Bytes>,
    /// Where the window begins in the body.
    window_start: u64,
    received: u64,
    file: Option<(GrowingFile, u64)>,
    /// When something came last.
    progress: Option<Moment>,
    /// The furthest that anybody has read.
    fastest: u64,
    /// By ticket: thousands may wait for one piece.
    waiting: HashMap<u64, Waker>,
    feeder: Option<Waker>,
    next_reader: u64,
    readers: usize,
}

/// How far a fill is.
#[derive(Clone, Default)]
pub enum Stage {
    /// The server was asked.
    #[default]
    Asking,
    /// The head has come, and with it perhaps the length of the body.
    Coming(Arc<Meta>, Option<u64>),
    /// All of it has come.
    Whole(Arc<Meta>),
    /// It broke off: what was read of it is all there is.
    Broken,
    /// There is nothing to read here: it is not to be stored, or nobody asks any more.
    Nothing,
}

/// What a reader finds.
pub enum Found {
    /// Bytes that follow what it has read.
    Bytes(Bytes),
    /// They are in the file only: it, and where the body begins there.
    File(GrowingFile, u64),
    /// All of it was read.
    End,
    /// They have come, and are nowhere any more: the fill is not stored, and others are further.
    Behind,
    /// There is no more, although it is not all.
    Broken,
}

impl Fill {
    /// One for which a server is about to be asked.
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

    /// In which way the request uses the cache that has it fetched: of [`super::zone::WAYS`].
    pub fn way(&self) -> usize {
        self.way.load(Relaxed)
    }

    /// In which way the request uses the cache that has it fetched.
    pub fn set_way(&self, way: usize) {
        self.way.store(way, Relaxed);
    }

    /// Whether somebody has purged what is being fetched: it is not stored then.
    pub fn is_purged(&self) -> bool {
        self.purged.load(Relaxed)
    }

    /// What is being fetched was purged. False if it was before.
    pub fn purge(&self) -> bool {
        !self.purged.swap(true, Relaxed)
    }

    /// It gets no file: there is one already, whose disk takes too long.
    pub fn keep_in_memory(&self) {
        self.in_memory.store(true, Relaxed);
    }

    /// Whether it gets no file.
    pub fn stays_in_memory(&self) -> bool {
        self.in_memory.load(Relaxed)
    }

    /// It is whole, and only kept for a while: nobody fetches or stores it any more.
    pub fn keep(&self) {
        self.kept.store(true, Relaxed);
    }

    /// Whether it is only kept.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Relaxed)
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        self.state.lock().stage.clone()
    }

    /// Whether its head is known, and its body can be had from the beginning.
    pub fn can_be_read(&self) -> bool {
        let state = self.state.lock();
        let has_beginning = state.window_start == 0 || state.file.is_some();
        has_beginning && matches!(state.stage, Stage::Coming(..) | Stage::Whole(_))
    }

    /// Whether nothing has come for so long.
    pub fn is_stalled(&self, now: Moment, patience: std::time::Duration) -> bool {
        let state = self.state.lock();
        matches!(state.stage, Stage::Coming(..)) && now.since(state.progress.unwrap_or(self.began)) > patience
    }

    /// Ready when it is no longer known only that the server was asked.
    pub fn poll_head(&self, ticket: u64, context: &mut Context<'_>) -> Poll<Stage> {
        let mut state = self.state.lock();
        if let Stage::Asking = state.stage {
            state.wait(ticket, context);
            return Poll::Pending;
        }
        Poll::Ready(state.stage.clone())
    }

    /// A number for somebody who waits.
    pub fn ticket(&self) -> u64 {
        let mut state = self.state.lock();
        state.next_reader += 1;
        state.next_reader
    }

    /// Somebody waits no longer.
    pub fn leave(&self, ticket: u64) {
        let mut state = self.state.lock();
        let waker = state.waiting.remove(&ticket);
        drop(state);
        drop(waker);
    }

    /// The head has come.
    pub fn begin(&self, meta: Arc<Meta>, length: Option<u64>) {
        self.change(|state| state.stage = Stage::Coming(meta, length));
    }

    /// More of the body has come.
    pub fn append(&self, piece: Bytes) {
        self.change(|state| {
            state.received += piece.len() as u64;
            state.progress = gale_runtime::try_now();
            state.window.push_back(piece);
        });
    }

    /// All of it has come.
    pub fn finish(&self) {
        self.change(|state| {
            if let Stage::Coming(meta, _) = &state.stage {
                state.stage = Stage::Whole(Arc::clone(meta));
            }
        });
    }

    /// It broke off, or nothing comes of it.
    pub fn give_up(&self) {
        self.change(|state| match state.stage {
            Stage::Asking => state.stage = Stage::Nothing,
            Stage::Coming(..) => state.stage = Stage::Broken,
            _ => {}
        });
    }

    /// What comes is in a file, too, whose body begins there.
    pub fn set_file(&self, file: GrowingFile, body_at: u64) {
        self.state.lock().file = Some((file, body_at));
    }

    /// The file is not written any more: what it has can be read as long as somebody has it open.
    pub fn forget_file(&self) {
        self.change(|state| state.file = None);
    }

    /// Forgets what is in the file and behind the window's bound.
    pub fn trim(&self) {
        self.trim_to(WINDOW_BYTES / 2);
    }

    /// Forgets what is in the file.
    pub fn forget_written(&self) {
        self.trim_to(0);
    }

    /// Whether no bytes are in memory.
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

    /// Forgets what the fastest reader has read: nobody stores it any more, and who is behind has to ask the server.
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

    /// For what nobody stores: ready when the window has room, or nobody reads it any more (`false`).
    pub fn poll_wanted(&self, context: &mut Context<'_>) -> Poll<bool> {
        let mut state = self.state.lock();
        if state.readers == 0 {
            return Poll::Ready(false);
        }
        if state.received - state.window_start <= WINDOW_BYTES {
            return Poll::Ready(true);
        }
        // Under the lock: whoever leaves now sees it.
        let displaced = state.feeder.replace(context.waker().clone());
        drop(state);
        drop(displaced);
        Poll::Pending
    }

    /// All of the body, if it is in memory.
    pub fn whole_in_memory(&self) -> Option<Vec<Bytes>> {
        let state = self.state.lock();
        (state.window_start == 0).then(|| state.window.iter().cloned().collect())
    }

    /// How much of the body has come.
    pub fn received(&self) -> u64 {
        self.state.lock().received
    }

    /// How many read it, or have found it and may.
    pub fn readers(&self) -> usize {
        self.state.lock().readers
    }

    /// Somebody begins to read it.
    pub fn join(&self) {
        self.state.lock().readers += 1;
    }

    /// Somebody has read it, or has left.
    pub fn part(&self) {
        let mut state = self.state.lock();
        state.readers -= 1;
        let feeder = state.feeder.take();
        drop(state);
        feeder.into_iter().for_each(Waker::wake);
    }

    /// What there is at an offset of the body; at most so many bytes.
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
