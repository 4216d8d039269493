//! Hands what is to be stored to thread pools, all of one turn of the loop together.
//!
//! A response that is whole takes a thread some 30 µs. To call a thread costs as much again, in system calls and in
//! changes of threads, so it is called once for several. Nobody waits for what is handed over, and what has come is
//! read from memory until it is stored.

use std::cell::RefCell;

use gale_runtime::{Device, ThreadPool, spawn};

/// Most tasks that one thread does one after the other: where each takes long, others do the rest.
const TASKS_MAX: usize = 8;

type Task = Box<dyn FnOnce() + Send>;

struct Batch {
    pool: ThreadPool,
    device: Device,
    tasks: Vec<Task>,
}

thread_local! {
    /// What the present turn has brought so far.
    static BATCHES: RefCell<Vec<Batch>> = const { RefCell::new(Vec::new()) };
}

/// Has a pool do this, for a device, when enough has come for a thread, or the tasks of the loop that can run now have
/// run. Refused, the task is dropped. A panic ends the tasks that were handed over with it, too.
pub(super) fn detach_with_others(pool: ThreadPool, device: Device, task: impl FnOnce() + Send + 'static) {
    let task = Box::new(task);
    let (is_first, full) = BATCHES.with_borrow_mut(|batches| {
        let is_it = |batch: &Batch| batch.device == device && batch.pool.name() == pool.name();
        let Some(index) = batches.iter().position(is_it) else {
            batches.push(Batch { pool, device, tasks: vec![task] });
            return (batches.len() == 1, None);
        };
        batches[index].tasks.push(task);
        let is_full = batches[index].tasks.len() >= TASKS_MAX;
        (false, is_full.then(|| batches.swap_remove(index)))
    });
    full.into_iter().for_each(Batch::hand_over);
    if is_first {
        let hand_over = HandOver;
        spawn(async move { drop(hand_over) });
    }
}

impl Batch {
    fn hand_over(self) {
        let Batch { pool, device, tasks } = self;
        // Refused, they go, as one that was refused alone.
        let _ = pool.detach(device, move || tasks.into_iter().for_each(|task| task()));
    }
}

/// Hands everything over when it goes, which happens with the loop at the latest.
struct HandOver;

impl Drop for HandOver {
    fn drop(&mut self) {
        BATCHES.take().into_iter().for_each(Batch::hand_over);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use gale_runtime::{EventLoop, LoopOptions, PoolCounters};

    use super::*;

    #[test]
    fn what_a_turn_brings_is_handed_over_in_few_tasks_and_in_order() {
        let pool = ThreadPool::new("test", 1, 100);
        let (sender, receiver) = mpsc::channel();
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            for turn in 0..2 {
                for number in 0..2 * TASKS_MAX + 1 {
                    let sender = sender.clone();
                    let send = move || sender.send((turn, number)).unwrap();
                    detach_with_others(pool.clone(), Device::number(1), send);
                }
                let sender = sender.clone();
                detach_with_others(pool.clone(), Device::number(2), move || sender.send((turn, 100)).unwrap());
                let PoolCounters { waiting, running, completed, .. } = pool.counters();
                let handed_over = waiting as u64 + running as u64 + completed;
                assert_eq!(handed_over, 4 * u64::from(turn) + 2, "the turn goes on");
                gale_runtime::yield_now().await;
            }
        });
        drop(sender);
        let mut done: Vec<(u32, usize)> = receiver.iter().collect();
        assert!(pool.stop(std::time::Duration::from_secs(60)));
        assert_eq!(pool.counters().completed, 2 * 4);
        done.retain(|&(_, number)| number != 100);
        assert!(done.is_sorted(), "{done:?}");
        assert_eq!(done.len(), 2 * (2 * TASKS_MAX + 1));
    }

    #[test]
    fn what_waits_when_the_loop_ends_is_handed_over() {
        let pool = ThreadPool::new("test", 1, 100);
        let (sender, receiver) = mpsc::channel();
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            detach_with_others(pool.clone(), Device::NONE, move || sender.send(()).unwrap());
        });
        receiver.recv().expect("it was done");
    }
}
