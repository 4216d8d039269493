//! Pools in a simulated world: the same queues and counters, but threads are only events. Chance decides when a thread
//! comes and how long it takes, and so in which order tasks end; tasks run on the loop's own thread.
//!
//! A world has its own queue for every pool that its loop uses, so that no other thread can influence the run.

use std::cell::RefCell;
use std::sync::Arc;

use super::queue::Taken;
use super::task::Job;
use super::{Shared, Tuning};

/// The pools used by a world's loop.
#[derive(Default)]
pub(crate) struct SimulatedPools {
    /// Real pools with their stand-ins.
    known: RefCell<Vec<(Arc<Shared>, Arc<Shared>)>>,
}

impl SimulatedPools {
    /// The stand-in for this pool, with the same limits.
    pub(super) fn stand_in(&self, real: &Arc<Shared>) -> Arc<Shared> {
        let limits = {
            let state = real.state.lock();
            (state.queue.threads_max(), state.queue.queue_max())
        };
        let mut known = self.known.borrow_mut();
        if let Some((_, stand_in)) = known.iter().find(|(own, _)| Arc::ptr_eq(own, real)) {
            stand_in.state.lock().queue.resize(limits.0, limits.1);
            return Arc::clone(stand_in);
        }
        let tuning = Tuning { is_simulated: true, ..Tuning::default() };
        let stand_in = Shared::new(Arc::clone(&real.name), limits.0, limits.1, tuning);
        known.push((Arc::clone(real), Arc::clone(&stand_in)));
        stand_in
    }

    /// Number of waiting and running tasks.
    pub fn tasks(&self) -> usize {
        let count = |pool: &Shared| {
            let state = pool.state.lock();
            state.queue.jobs() + state.queue.running()
        };
        self.known.borrow().iter().map(|(_, pool)| count(pool)).sum()
    }
}

impl Drop for SimulatedPools {
    /// Breaks the cycle: tasks refer to their pool, and the pool to waiting tasks.
    fn drop(&mut self) {
        for (_, pool) in self.known.take() {
            pool.begin_end();
            pool.end(std::time::Instant::now());
        }
    }
}

/// A thread of a stand-in, between two steps.
pub(crate) struct SimulatedThread {
    pool: Arc<Shared>,
    state: State,
}

enum State {
    /// It was started and has not looked for a task yet.
    Comes,
    Has(Taken<Arc<dyn Job>>),
}

impl SimulatedThread {
    pub(super) fn new(pool: &Arc<Shared>) -> Self {
        SimulatedThread { pool: Arc::clone(pool), state: State::Comes }
    }

    pub fn has_task(&self) -> bool {
        matches!(self.state, State::Has(_))
    }

    /// Runs its task and takes the next one, which it runs after a while; `None` if there is none: the thread ends.
    pub fn step(self) -> Option<SimulatedThread> {
        let SimulatedThread { pool, state } = self;
        match state {
            State::Comes => pool.state.lock().coming -= 1,
            State::Has(taken) => pool.execute(&taken),
        }
        let mut state = pool.state.lock();
        let Some(taken) = state.take() else {
            state.threads -= 1;
            return None;
        };
        let call = state.call_thread();
        drop(state);
        // Starting a thread never fails here.
        let _ = pool.answer(call);
        Some(SimulatedThread { pool, state: State::Has(taken) })
    }
}
