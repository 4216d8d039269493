//! Pools in a simulated world: the same queues and the same counting, but threads that are only events. When one comes,
//! how long it takes and so in which order tasks end is chance; tasks run on the loop's own thread.
//!
//! A world has its own queue for every pool that its loop uses, so that nothing outside of it can change the run.

use std::cell::RefCell;
use std::sync::Arc;

use super::queue::Taken;
use super::task::Job;
use super::{Shared, Tuning};

/// The pools that a world's loop has used.
#[derive(Default)]
pub(crate) struct SimulatedPools {
    /// The real one and its stand-in.
    known: RefCell<Vec<(Arc<Shared>, Arc<Shared>)>>,
}

impl SimulatedPools {
    /// What stands for this pool in the world, with the same limits.
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

    /// How many tasks wait or run.
    pub fn tasks(&self) -> usize {
        let count = |pool: &Shared| {
            let state = pool.state.lock();
            state.queue.jobs() + state.queue.running()
        };
        self.known.borrow().iter().map(|(_, pool)| count(pool)).sum()
    }
}

impl Drop for SimulatedPools {
    /// Tasks know their pool, and the pool knows the tasks that wait.
    fn drop(&mut self) {
        for (_, pool) in self.known.take() {
            pool.begin_end();
            pool.end(std::time::Instant::now());
        }
    }
}

/// A thread of a stand-in, between two steps of its life.
pub(crate) struct SimulatedThread {
    pool: Arc<Shared>,
    state: State,
}

enum State {
    /// It has been started and has not looked yet.
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

    /// Does what it has and takes the next task, for which it needs a while; `None` when there is none: it ends.
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
        // None is ever refused here.
        let _ = pool.answer(call);
        Some(SimulatedThread { pool, state: State::Has(taken) })
    }
}
