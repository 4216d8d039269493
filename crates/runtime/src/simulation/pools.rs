//! The thread pools of a simulated world: no threads. A task begins when one of the pool's threads would be free and ends
//! some time later, both on the loop's own thread, so that chance alone decides in which order tasks end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::fate::{Event, Fate};
use crate::pool::{Job, PoolError};

struct Task {
    pool: Arc<str>,
    job: Box<dyn Job>,
}

#[derive(Default)]
struct Pool {
    running: usize,
    waiting: VecDeque<u64>,
}

pub(crate) struct Pools {
    tasks: BTreeMap<u64, Task>,
    pools: BTreeMap<Arc<str>, Pool>,
    begun: u64,
}

impl Pools {
    pub fn new() -> Self {
        Pools { tasks: BTreeMap::new(), pools: BTreeMap::new(), begun: 0 }
    }

    /// Takes a task, or gives it back with the reason why not.
    pub fn submit(
        &mut self,
        fate: &Fate,
        name: &Arc<str>,
        (threads_max, queue_max): (usize, usize),
        job: Box<dyn Job>,
    ) -> Result<(), (PoolError, Box<dyn Job>)> {
        let pool = self.pools.entry(Arc::clone(name)).or_default();
        let is_full = pool.running + pool.waiting.len() >= threads_max.saturating_add(queue_max);
        if is_full || fate.strikes(|faults| faults.pool_refusals) {
            fate.note("task refused", self.begun, pool.waiting.len());
            return Err((PoolError::Overflow { pool: Arc::clone(name), waiting: pool.waiting.len() }, job));
        }
        let task = self.begun;
        self.begun += 1;
        self.tasks.insert(task, Task { pool: Arc::clone(name), job });
        if pool.running < threads_max {
            pool.running += 1;
            fate.plan(time(fate), Event::TaskBegins { task });
        } else {
            pool.waiting.push_back(task);
        }
        Ok(())
    }

    /// The job of a task that begins: to be run and given back by `begun`.
    pub fn begin(&mut self, fate: &Fate, task: u64) -> Option<Box<dyn Job>> {
        fate.note("task begins", task, 0);
        let Task { pool, job } = self.tasks.remove(&task)?;
        // Its place is kept: the pool is told when it ends.
        self.tasks.insert(task, Task { pool, job: Box::new(Gone) });
        Some(job)
    }

    pub fn begun(&mut self, fate: &Fate, task: u64, job: Box<dyn Job>) {
        if let Some(place) = self.tasks.get_mut(&task) {
            place.job = job;
            fate.plan(time(fate), Event::TaskEnds { task });
        }
    }

    /// The job of a task that has ended, to be delivered; the thread takes the next one.
    pub fn end(&mut self, fate: &Fate, task: u64) -> Option<Box<dyn Job>> {
        fate.note("task ends", task, 0);
        let Task { pool, job } = self.tasks.remove(&task)?;
        let pool = self.pools.get_mut(&pool).expect("a task's pool stays");
        match pool.waiting.pop_front() {
            Some(task) => fate.plan(Duration::ZERO, Event::TaskBegins { task }),
            None => pool.running -= 1,
        }
        Some(job)
    }

    /// How many tasks there are.
    pub fn count(&self) -> usize {
        self.tasks.len()
    }
}

fn time(fate: &Fate) -> Duration {
    fate.within(fate.faults().task_max)
}

/// Stands where a job was while it runs.
struct Gone;

impl Job for Gone {
    fn run(&mut self) {}

    fn deliver(self: Box<Self>) {}
}
