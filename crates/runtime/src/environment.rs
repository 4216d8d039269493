//! The environment of a loop: clock, entropy, executor, timers and driver behind one handle.
//!
//! All layers above reach the outside world through it, so that a simulated world can take its place. Each loop has
//! one, in a thread-local while the loop runs; sockets and timers keep a reference to theirs.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use crate::driver::{Driver, RingCounters};
use crate::executor::Executor;
use crate::executor::budget::Budget;
use crate::inbox::{Inbox, Remote};
use crate::simulation::World;
use crate::stall::calls::{LoopCalls, Waited};
use crate::time::{Clock, Moment, Wheel};

thread_local! {
    /// A plain pointer, because a request reads the clock several times: no count, no flag, no destructor.
    static CURRENT: Cell<*const Environment> = const { Cell::new(ptr::null()) };
}

pub(crate) struct Environment {
    pub worker: usize,
    pub clock: Clock,
    pub executor: Executor,
    pub wheel: RefCell<Wheel>,
    pub driver: Box<dyn Driver>,
    pub inbox: Arc<Inbox>,
    pub random: Cell<u64>,
    /// Budget of the turn, and the tasks that wait for it.
    pub budget: Budget,
    /// Calls of this turn that should not wait.
    pub calls: LoopCalls,
    /// The world behind a simulated `driver`; files and pools use it too.
    pub simulation: Option<Rc<World>>,
}

impl Environment {
    /// True if a task can run without waiting for an event.
    pub fn has_work(&self) -> bool {
        self.executor.has_work() || self.budget.is_awaited()
    }

    /// The environment of the running loop. Panics outside of one.
    pub fn current() -> Rc<Environment> {
        let current = CURRENT.get();
        assert!(!current.is_null(), "called on a thread without a running event loop");
        // SAFETY: the pointer came from an `Rc` that `Entered` keeps until it has replaced the pointer; the count is
        // incremented before the new `Rc` exists.
        unsafe {
            Rc::increment_strong_count(current);
            Rc::from_raw(current)
        }
    }

    #[inline]
    pub fn with<T>(f: impl FnOnce(&Environment) -> T) -> T {
        Self::try_with(f).expect("called on a thread without a running event loop")
    }

    /// `None` outside of a loop.
    #[inline]
    pub fn try_with<T>(f: impl FnOnce(&Environment) -> T) -> Option<T> {
        // SAFETY: null, or kept alive by the `Entered` of a caller further up this thread's stack, which cannot be
        // dropped while `f` runs.
        let current = unsafe { CURRENT.get().as_ref() };
        current.map(f)
    }

    /// Makes this the current environment until the guard is dropped.
    pub fn enter(self: &Rc<Self>) -> Entered {
        let own = Rc::clone(self);
        let previous = CURRENT.replace(Rc::as_ptr(&own));
        Entered { own, previous }
    }
}

/// Guard: while it lives, `own` is the current environment. It lives on the stack of the call that entered; guards
/// nest.
pub(crate) struct Entered {
    own: Rc<Environment>,
    previous: *const Environment,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let ended = CURRENT.replace(self.previous);
        debug_assert!(ptr::eq(ended, Rc::as_ptr(&self.own)), "guards end in the reverse order");
    }
}

/// The monotonic time of this turn.
#[inline]
pub fn now() -> Moment {
    Environment::with(|environment| environment.clock.now())
}

/// The monotonic time of this turn; `None` outside of a loop, as in destructors that run after it.
pub fn try_now() -> Option<Moment> {
    Environment::try_with(|environment| environment.clock.now())
}

/// Notes a call of this turn that should not wait, with a mark below [`MARKS`](crate::stall::MARKS). If the turn
/// becomes a stall in which the thread slept, `waited` is told the marks of the turn, a bit each. It must be the same
/// for all calls of the process. Does nothing outside of a loop.
#[inline]
pub fn note_call(mark: usize, waited: Waited) {
    _ = Environment::try_with(|environment| environment.calls.note(mark, waited));
}

/// The number of this turn of the loop, for limits per turn.
pub fn turn() -> u64 {
    Environment::with(|environment| environment.clock.turn())
}

/// The wall clock of this turn.
pub fn wall() -> SystemTime {
    Environment::with(|environment| environment.clock.wall_time())
}

/// The wall clock of this turn in whole seconds since the epoch.
pub fn wall_seconds() -> u64 {
    Environment::with(|environment| environment.clock.wall().as_secs())
}

/// The number of the current worker, as given in `LoopOptions`.
pub fn worker() -> usize {
    Environment::with(|environment| environment.worker)
}

/// Counters of the current loop's io_uring; zeros for other drivers.
pub fn ring_counters() -> RingCounters {
    Environment::with(|environment| environment.driver.ring_counters())
}

/// A handle to the current loop for other threads.
pub fn remote() -> Remote {
    Environment::with(|environment| Remote::new(Arc::clone(&environment.inbox)))
}

/// Number of tasks of the current loop.
pub fn task_count() -> usize {
    Environment::with(|environment| environment.executor.task_count())
}

/// A random number that cannot be predicted, even from others of the process; a system call.
pub fn secret_u64() -> u64 {
    if Environment::with(|environment| environment.simulation.is_some()) {
        return random_u64();
    }
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // The kernel returns so few bytes in whole. A system call filter may forbid the call.
        _ => random_u64(),
    }
}

/// Waits until the closed connections of the current loop have sent all their data. With io_uring the rest of a short
/// response that a full socket did not take is sent later (see [`crate::Stream::try_send`]), and would be lost with the
/// loop. Only over TCP does a peer that reads nothing end the wait, after a minute, so the caller sets a time limit.
pub async fn all_sent() {
    poll_fn(|cx| Environment::with(|environment| environment.driver.poll_all_sent(cx))).await;
}

/// A random number, for spreading load and making names, not for secrets (splitmix64; the seed comes from the kernel or
/// the test).
pub fn random_u64() -> u64 {
    Environment::with(|environment| {
        let state = environment.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        environment.random.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}
