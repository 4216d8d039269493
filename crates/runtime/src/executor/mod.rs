//! The executor of one loop: tasks, wakers, the run queue. Knows no sockets and no clock.
//!
//! A task is one allocation (its boxed future); its table entry is 24 bytes. A waker is one word, loop + slot +
//! generation: copied, never counted. Waking on the loop's own thread pushes on a queue without atomics; waking from
//! another thread goes through that loop's inbox. A waker that outlives its task or its loop does nothing.
//!
//! Fairness: a turn polls at most [`POLLS_PER_TURN`] times, and a task that wakes itself waits for the next turn. Tasks
//! with much work wait in a line of their own (`budget.rs`).

pub(crate) mod budget;
pub(crate) mod panics;
pub(crate) mod parked;
pub(crate) mod slots;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::num::NonZeroU64;
use std::pin::Pin;
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};

use crate::environment::Environment;
use crate::executor::panics::{Panic, boundary};
use crate::executor::slots::{GENERATION_BITS, Key, Slots};
use crate::inbox::{self, LOOP_BITS, LOOPS_MAX};
use crate::stall::{Name, Turns};

/// Bounds a turn to a few hundred microseconds at a microsecond per poll.
pub(crate) const POLLS_PER_TURN: usize = 512;

const INDEX_BITS: u32 = 64 - LOOP_BITS - GENERATION_BITS;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
/// The loop number that no loop has, in the word of a foreign waker.
pub(crate) const FOREIGN: u64 = (LOOPS_MAX as u64) << (64 - LOOP_BITS);

/// The identity of a task: loop, slot and generation, the word of its waker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskId(
    /// Complement of the word: 0 is a valid word and all ones is not, so `Option<TaskId>` is no larger.
    NonZeroU64,
);

impl TaskId {
    fn of(word: u64) -> TaskId {
        TaskId(NonZeroU64::new(!word).expect("the last loop does not exist"))
    }

    fn word(self) -> u64 {
        !self.0.get()
    }
}

/// Starts `future` as a new task on the current loop.
///
/// A panic in it ends only this task: it is reported (see [`crate::set_panic_reporter`]) and counted. Panics when
/// called outside of a loop.
pub fn spawn(future: impl Future<Output = ()> + 'static) -> TaskId {
    Environment::with(|environment| environment.executor.spawn(Box::pin(future)))
}

/// Ends a task of the current loop: its future is dropped now, or when its current poll returns. Does nothing if the
/// task has ended, if it belongs to another loop, or outside of a loop.
pub fn abort(task: TaskId) {
    let _ = Environment::try_with(|environment| environment.executor.abort(task));
}

/// True if this task of the current loop was woken and will run soon.
pub fn is_awake(task: TaskId) -> bool {
    Environment::with(|environment| environment.executor.is_awake(task))
}

/// Lets the other tasks run and goes on in the next turn.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A task's future with its type's name, which the watchdog reports.
trait Job: Future<Output = ()> {
    fn name(&self) -> Name;
}

impl<F: Future<Output = ()>> Job for F {
    fn name(&self) -> Name {
        std::any::type_name::<F>
    }
}

/// Ready once at the end of a turn: before the loop waits, when all other tasks that could run have run or used their
/// share. It causes no turn by itself. Polled again, it waits for the end of the next turn.
#[derive(Default, Debug)]
pub struct TurnEnd {
    /// Number of the turn whose end is awaited.
    turn: Option<u64>,
}

impl TurnEnd {
    /// Ready when a turn has ended since it was last ready or first polled.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        Environment::with(|environment| {
            let executor = &environment.executor;
            let ended = executor.turns_ended.get();
            if self.turn.is_some_and(|turn| turn < ended) {
                self.turn = None;
                return Poll::Ready(());
            }
            self.turn = Some(ended);
            let mut waiting = executor.waiting_for_turn_end.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }
}

type BoxedFuture = Pin<Box<dyn Job>>;

struct Task {
    /// `None` while it is polled, so that nothing is borrowed while its code runs, and always for the main future.
    future: Option<BoxedFuture>,
    queued: bool,
    /// True if it waits in line for bulk.
    in_line: bool,
}

/// The next thing to poll.
pub(crate) enum Runnable {
    /// The future given to `run`, which lives on its stack.
    Main(Key),
    Task(Key),
}

pub(crate) struct Executor {
    loop_index: usize,
    tasks: RefCell<Slots<Task>>,
    ready: RefCell<VecDeque<Key>>,
    /// Tasks that woke themselves while they were polled.
    next_turn: RefCell<VecDeque<Key>>,
    running: Cell<Option<Key>>,
    main: Cell<Option<Key>>,
    closed: Cell<bool>,
    turns_ended: Cell<u64>,
    survives_panics: bool,
    /// Few: tasks that accept.
    waiting_for_turn_end: RefCell<Vec<Waker>>,
}

impl Executor {
    pub fn new(loop_index: usize, survives_panics: bool) -> Self {
        assert!(loop_index < LOOPS_MAX);
        Executor {
            loop_index,
            tasks: RefCell::new(Slots::new()),
            ready: RefCell::new(VecDeque::new()),
            next_turn: RefCell::new(VecDeque::new()),
            running: Cell::new(None),
            main: Cell::new(None),
            closed: Cell::new(false),
            turns_ended: Cell::new(0),
            survives_panics,
            waiting_for_turn_end: RefCell::default(),
        }
    }

    /// The loop's number in its wakers.
    pub fn loop_index(&self) -> usize {
        self.loop_index
    }

    fn spawn(&self, future: BoxedFuture) -> TaskId {
        if self.closed.get() {
            // The loop is being torn down: the future is dropped, and the returned identity matches no task.
            return TaskId::of(self.word(Key { index: INDEX_MASK, generation: 0 }));
        }
        let key = self.insert(Some(future));
        self.wake(key);
        TaskId::of(self.word(key))
    }

    fn insert(&self, future: Option<BoxedFuture>) -> Key {
        let key = self.tasks.borrow_mut().insert(Task { future, queued: false, in_line: false });
        assert!(key.index < INDEX_MASK, "more tasks than a waker can name");
        key
    }

    pub fn abort(&self, task: TaskId) {
        if loop_of(task.word()) == self.loop_index {
            self.remove(key_of(task.word()));
        }
    }

    fn is_awake(&self, task: TaskId) -> bool {
        loop_of(task.word()) == self.loop_index && self.is_queued(key_of(task.word()))
    }

    fn remove(&self, key: Key) {
        // A running task's future is not in the table: it is dropped when its poll returns and the entry is gone.
        let task = self.tasks.borrow_mut().remove(key);
        drop_guarded(task);
    }

    /// Adds an entry for the main future, which `run` polls itself.
    pub fn begin_main(&self) -> Waker {
        let key = self.insert(None);
        self.main.set(Some(key));
        self.wake(key);
        self.waker(key)
    }

    pub fn end_main(&self) {
        if let Some(key) = self.main.take() {
            self.tasks.borrow_mut().remove(key);
        }
    }

    /// Puts a task on the run queue, once. On the loop's own thread only.
    #[inline]
    pub fn wake(&self, key: Key) {
        {
            let mut tasks = self.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(key) else {
                return;
            };
            if std::mem::replace(&mut task.queued, true) {
                return;
            }
        }
        let queue = if self.running.get() == Some(key) { &self.next_turn } else { &self.ready };
        queue.borrow_mut().push_back(key);
    }

    /// As [`Executor::wake`], but ahead of all other tasks; not for the running task.
    pub fn wake_first(&self, key: Key) {
        let mut tasks = self.tasks.borrow_mut();
        if let Some(task) = tasks.get_mut(key)
            && !std::mem::replace(&mut task.queued, true)
        {
            self.ready.borrow_mut().push_front(key);
        }
    }

    /// True if a task is on a run queue.
    pub fn is_queued(&self, key: Key) -> bool {
        self.tasks.borrow_mut().get_mut(key).is_some_and(|task| task.queued)
    }

    /// Makes the tasks runnable that woke themselves in the last turn.
    pub fn begin_turn(&self) {
        let mut next_turn = self.next_turn.borrow_mut();
        if !next_turn.is_empty() {
            self.ready.borrow_mut().append(&mut next_turn);
        }
    }

    /// Wakes the tasks that wait for the end of the turn; false if there are none.
    pub fn end_turn(&self) -> bool {
        let waiting = self.waiting_for_turn_end.take();
        if waiting.is_empty() {
            return false;
        }
        self.turns_ended.set(self.turns_ended.get() + 1);
        waiting.into_iter().for_each(Waker::wake);
        true
    }

    /// True if something can run without waiting for an event.
    pub fn has_work(&self) -> bool {
        !self.ready.borrow().is_empty() || !self.next_turn.borrow().is_empty()
    }

    /// True if a task can run in this turn.
    pub fn has_ready(&self) -> bool {
        !self.ready.borrow().is_empty()
    }

    /// Puts the running task in line; returns its key and whether it was not in line before. `None` when no task runs.
    pub fn enter_line(&self) -> Option<(Key, bool)> {
        let key = self.running.get()?;
        let mut tasks = self.tasks.borrow_mut();
        // The table keeps the entry of a running task unless it has aborted itself: then it does not return.
        let is_new = tasks.get_mut(key).is_some_and(|task| !std::mem::replace(&mut task.in_line, true));
        Some((key, is_new))
    }

    /// Takes a task out of the line; false if it has ended.
    pub fn leave_line(&self, key: Key) -> bool {
        let mut tasks = self.tasks.borrow_mut();
        tasks.get_mut(key).map(|task| task.in_line = false).is_some()
    }

    /// True if this waker is the task's own.
    pub fn is_waker_of(&self, key: Key, waker: &Waker) -> bool {
        word_of(waker) == Some(self.word(key))
    }

    pub fn pop(&self) -> Option<Runnable> {
        let key = self.ready.borrow_mut().pop_front()?;
        if self.main.get() == Some(key) {
            if let Some(task) = self.tasks.borrow_mut().get_mut(key) {
                task.queued = false;
            }
            return Some(Runnable::Main(key));
        }
        Some(Runnable::Task(key))
    }

    /// Notes whether the main future is being polled: meanwhile its own wakes wait for the next turn.
    pub fn set_main_running(&self, running: bool) {
        self.running.set(if running { self.main.get() } else { None });
    }

    pub fn poll_task(&self, key: Key, turns: &Turns) {
        let taken = self.tasks.borrow_mut().get_mut(key).and_then(|task| {
            task.queued = false;
            task.future.take()
        });
        let Some(mut future) = taken else { return };
        let waker = self.waker(key);
        // The name of the boxed future; the box itself is a future too.
        turns.note(future.as_ref().get_ref().name());
        self.running.set(Some(key));
        let outcome = boundary("task", || future.as_mut().poll(&mut Context::from_waker(&waker)));
        self.running.set(None);
        if let Ok(Poll::Pending) = &outcome {
            if let Some(task) = self.tasks.borrow_mut().get_mut(key) {
                task.future = Some(future);
                return;
            }
        } else {
            self.tasks.borrow_mut().remove(key);
        }
        drop_guarded(future);
        self.judge(outcome.err());
    }

    /// Ends the loop by a panic caught in a task or a call, unless the loop survives panics.
    #[inline]
    pub fn judge(&self, panic: Option<Panic>) {
        if let Some(panic) = panic.filter(|_| !self.survives_panics) {
            panic!("{panic}");
        }
    }

    /// Number of tasks without the main future.
    pub fn task_count(&self) -> usize {
        self.tasks.borrow().len() - usize::from(self.main.get().is_some())
    }

    /// Drops all tasks; their destructors may still use the loop, but new tasks are refused.
    pub fn close(&self) {
        self.closed.set(true);
        let mut next = 0;
        loop {
            let key = self.tasks.borrow().first_from(next);
            let Some(key) = key else { break };
            self.remove(key);
            next = key.index + 1;
        }
    }

    fn word(&self, key: Key) -> u64 {
        (self.loop_index as u64) << (64 - LOOP_BITS)
            | u64::from(key.index) << GENERATION_BITS
            | u64::from(key.generation)
    }

    fn waker(&self, key: Key) -> Waker {
        waker_of(self.word(key))
    }
}

#[inline]
pub(crate) fn waker_of(word: u64) -> Waker {
    // SAFETY: the functions of VTABLE treat the data as a number and never as a pointer, own nothing, and may be called
    // on any thread, so the whole contract of RawWaker holds for every word.
    unsafe { Waker::from_raw(raw_waker(word as usize)) }
}

/// The word of a waker, if it is one of ours.
#[inline]
pub(crate) fn word_of(waker: &Waker) -> Option<u64> {
    std::ptr::eq(waker.vtable(), &raw const VTABLE).then(|| waker.data().addr() as u64)
}

fn drop_guarded<T>(value: T) {
    // A panic in a destructor counts as one in a task.
    let _ = boundary("task", || drop(value));
}

const _: () = assert!(usize::BITS == 64, "a waker's word holds loop, slot and generation");

static VTABLE: RawWakerVTable = RawWakerVTable::new(
    |data| raw_waker(data.addr()),
    |data| wake_word(data.addr() as u64),
    |data| wake_word(data.addr() as u64),
    |_| (),
);

fn raw_waker(word: usize) -> RawWaker {
    RawWaker::new(std::ptr::without_provenance(word), &VTABLE)
}

/// The key in a waker's word.
pub(crate) fn key_of(word: u64) -> Key {
    Key { index: (word >> GENERATION_BITS) as u32 & INDEX_MASK, generation: word as u32 & ((1 << GENERATION_BITS) - 1) }
}

fn loop_of(word: u64) -> usize {
    (word >> (64 - LOOP_BITS)) as usize
}

fn wake_word(word: u64) {
    let loop_index = loop_of(word);
    let local = Environment::try_with(|environment| {
        let own = environment.executor.loop_index == loop_index;
        if own {
            environment.executor.wake(key_of(word));
        }
        own
    });
    if local != Some(true) {
        inbox::wake_remote(loop_index, word);
    }
}
