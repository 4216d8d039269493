//! Hands storing tasks to thread pools in batches, one batch for each turn of the loop.
//!
//! Storing a complete response takes a thread some 30 µs. Waking a thread costs as much again, in system calls and
//! context switches, so it is woken once for several tasks. No request waits for such a task: a response is read from
//! memory until it is stored.

use std::cell::RefCell;

use gale_runtime::{Device, ThreadPool, spawn};

/// Maximum number of tasks for one thread: if each takes long, other threads do the rest.
const TASKS_MAX: usize = 8;

type Task = Box<dyn FnOnce() + Send>;

struct Batch {
    pool: ThreadPool,
    device: Device,
    tasks: Vec<Task>,
}

thread_local! {
    /// The batches of the current turn.
    static BATCHES: RefCell<Vec<Batch>> = const { RefCell::new(Vec::new()) };
}

/// Adds a task for a device to a batch, which is handed to the pool when it is full, or when the loop's runnable tasks
/// have run. If the pool refuses, the task is dropped. A panic also ends the later tasks of its batch.
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
        // If the pool refuses, the whole batch is dropped, like a single task.
        let _ = pool.detach(device, move || tasks.into_iter().for_each(|task| task()));
    }
}

/// Hands over all batches when it is dropped, with the loop at the latest.
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
    fn calls_of_a_turn_are_handed_over_in_few_tasks_and_in_order() {
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
    fn waiting_calls_are_handed_over_when_the_loop_ends() {
        let pool = ThreadPool::new("test", 1, 100);
        let (sender, receiver) = mpsc::channel();
        EventLoop::new(LoopOptions::default()).unwrap().run(async {
            detach_with_others(pool.clone(), Device::NONE, move || sender.send(()).unwrap());
        });
        receiver.recv().expect("it was done");
    }
}
