//! The environment of a loop: clock, entropy, executor, timers and driver behind one handle.
//!
//! Everything above reaches the outside world through it, so that a simulated world can take its place. One per loop,
//! found through a thread-local while the loop runs; sockets and timers keep a reference to theirs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use crate::clock::{Clock, Moment};
use crate::driver::{Driver, RingCounters};
use crate::executor::Executor;
use crate::inbox::{Inbox, Remote};
use crate::timer::Wheel;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Environment>>> = const { RefCell::new(None) };
}

pub(crate) struct Environment {
    pub worker: usize,
    pub clock: Clock,
    pub executor: Executor,
    pub wheel: RefCell<Wheel>,
    pub driver: Box<dyn Driver>,
    pub inbox: Arc<Inbox>,
    pub random: Cell<u64>,
}

impl Environment {
    /// The environment of the running loop. Panics outside of one.
    pub fn current() -> Rc<Environment> {
        CURRENT.with(|current| current.borrow().clone()).expect("called on a thread without a running event loop")
    }

    pub fn with<T>(f: impl FnOnce(&Environment) -> T) -> T {
        Self::try_with(f).expect("called on a thread without a running event loop")
    }

    /// `None` outside of a loop.
    #[inline]
    pub fn try_with<T>(f: impl FnOnce(&Environment) -> T) -> Option<T> {
        CURRENT.try_with(|current| current.borrow().as_deref().map(f)).ok().flatten()
    }

    /// Makes this the current environment until the guard is dropped.
    pub fn enter(self: &Rc<Self>) -> Entered {
        let previous = CURRENT.with(|current| current.replace(Some(Rc::clone(self))));
        Entered { previous }
    }
}

pub(crate) struct Entered {
    previous: Option<Rc<Environment>>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let own = CURRENT.with(|current| current.replace(self.previous.take()));
        drop(own);
    }
}

/// The monotonic time of this turn.
#[inline]
pub fn now() -> Moment {
    Environment::with(|environment| environment.clock.now())
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

/// What the io_uring of the current loop has done; zeros for other drivers.
pub fn ring_counters() -> RingCounters {
    Environment::with(|environment| environment.driver.ring_counters())
}

/// A handle to the current loop for other threads.
pub fn remote() -> Remote {
    Environment::with(|environment| Remote::new(Arc::clone(&environment.inbox)))
}

/// How many tasks the current loop has.
pub fn task_count() -> usize {
    Environment::with(|environment| environment.executor.task_count())
}

/// A random number, for spreading and naming; not for secrets. (splitmix64 over a seed from the kernel or the test)
pub fn random_u64() -> u64 {
    Environment::with(|environment| {
        let state = environment.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        environment.random.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}
