//! Threads that start and end, abandoned tasks, refusals.

use std::sync::mpsc;

use super::*;

/// Longer than any machine needs; only a failing test waits so long.
const DEADLINE: Duration = Duration::from_secs(60);

impl Shared {
    fn wait_until(&self, is_true: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        let mut state = self.state.lock();
        while !is_true(&state) {
            assert!(!self.ended.wait_until(&mut state, deadline).timed_out(), "waited in vain");
        }
    }
}

#[test]
fn idle_threads_end_and_new_ones_come() {
    let tuning = Tuning { idle_time: Duration::from_millis(1), ..Tuning::default() };
    let pool = ThreadPool::with_tuning("test", 3, 10, tuning);
    for _ in 0..3 {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..3 {
            let sender = sender.clone();
            pool.detach(Device::NONE, move || sender.send(()).unwrap()).unwrap();
        }
        drop(sender);
        assert_eq!(receiver.iter().count(), 3);
        pool.handle.shared.wait_until(|state| state.threads == 0);
        assert!(pool.handle.shared.state.lock().idle.is_empty());
    }
}

#[test]
fn the_thread_that_rested_last_is_woken_first() {
    let pool = ThreadPool::new("test", 8, 10);
    let (sender, receiver) = mpsc::channel();
    // Two at the same time, then one after the other.
    let both = Arc::new(std::sync::Barrier::new(2));
    for _ in 0..2 {
        let (sender, both) = (sender.clone(), Arc::clone(&both));
        pool.detach(Device::NONE, move || drop((both.wait(), sender.send(std::thread::current().id())))).unwrap();
    }
    let threads = [receiver.recv().unwrap(), receiver.recv().unwrap()];
    assert_ne!(threads[0], threads[1]);
    let shared = Arc::clone(&pool.handle.shared);
    let deadline = Instant::now() + DEADLINE;
    let mut used = Vec::new();
    for _ in 0..10 {
        while shared.state.lock().idle.len() < 2 {
            assert!(Instant::now() < deadline, "the threads do not come to rest");
            std::thread::yield_now();
        }
        let sender = sender.clone();
        pool.detach(Device::NONE, move || sender.send(std::thread::current().id()).unwrap()).unwrap();
        used.push(receiver.recv().unwrap());
    }
    assert_eq!(used, [used[0]; 10]);
}

/// No thread can have a stack of this size: the address space is too small.
const STACK_TOO_LARGE: usize = 1 << 60;

#[test]
fn without_a_single_thread_tasks_are_refused_until_there_is_one() {
    let pool = ThreadPool::new("test", 3, 10);
    let tuning = &pool.handle.shared.tuning;
    tuning.stack_bytes.store(STACK_TOO_LARGE, Relaxed);
    for failures in 1..3 {
        assert!(matches!(pool.detach(Device::NONE, || ()), Err(PoolError::NoThread(_))));
        let counters = pool.counters();
        assert_eq!((counters.threads, counters.waiting, counters.thread_failures), (0, 0, failures));
    }
    tuning.stack_bytes.store(0, Relaxed);
    let (sender, receiver) = mpsc::channel();
    pool.detach(Device::NONE, move || sender.send("done").unwrap()).unwrap();
    assert_eq!(receiver.recv(), Ok("done"));
}

#[test]
fn a_thread_that_cannot_be_started_is_no_failure_while_another_runs() {
    let pool = ThreadPool::new("test", 3, 10);
    let (sender, receiver) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let begun = sender.clone();
    pool.detach(Device::NONE, move || {
        begun.send(0).unwrap();
        let _ = released.recv();
    })
    .unwrap();
    assert_eq!(receiver.recv(), Ok(0));
    pool.handle.shared.tuning.stack_bytes.store(STACK_TOO_LARGE, Relaxed);
    for number in 1..4 {
        let sender = sender.clone();
        pool.detach(Device::NONE, move || sender.send(number).unwrap()).unwrap();
    }
    let counters = pool.counters();
    assert_eq!((counters.threads, counters.waiting, counters.thread_failures), (1, 3, 3));
    drop(release);
    assert_eq!(receiver.iter().take(3).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn a_smaller_pool_ends_the_threads_that_rest_and_a_larger_one_starts_some() {
    let pool = ThreadPool::new("test", 4, 100);
    let shared = Arc::clone(&pool.handle.shared);
    let occupy = |count: usize| {
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let (begun, has_begun) = mpsc::channel();
        for _ in 0..count {
            let (released, begun) = (Arc::clone(&released), begun.clone());
            let task = move || {
                begun.send(()).unwrap();
                let _ = released.lock().recv();
            };
            pool.detach(Device::NONE, task).unwrap();
        }
        (release, has_begun)
    };
    let (release, has_begun) = occupy(4);
    (0..4).for_each(|_| has_begun.recv().unwrap());
    pool.resize(2, 100);
    drop(release);
    shared.wait_until(|state| state.threads == 2);

    let (release, has_begun) = occupy(5);
    (0..2).for_each(|_| has_begun.recv().unwrap());
    assert_eq!(pool.counters().waiting, 3);
    pool.resize(5, 100);
    (0..3).for_each(|_| has_begun.recv().unwrap());
    assert_eq!((pool.counters().threads, pool.counters().waiting), (5, 0));
    drop(release);
}

#[test]
fn abandoned_tasks_stop_counting_up_to_a_bound() {
    let pool = ThreadPool::new("test", 1, usize::MAX);
    let (release, released) = mpsc::channel::<()>();
    let running = pool.run(move || released.recv());
    let waiting: Vec<_> = (0..ABANDONED_MAX + 2).map(|_| pool.run(|| ())).collect();
    assert!(pool.counters().running + pool.counters().waiting == waiting.len() + 1);
    drop(waiting);
    let shared = &pool.handle.shared;
    assert_eq!(shared.state.lock().abandoned, ABANDONED_MAX);
    assert_eq!(pool.counters().running + pool.counters().waiting, 3);
    drop(release);
    shared.begin_end();
    shared.wait_until(|state| state.threads == 0);
    drop(running);
    let counters = pool.counters();
    assert_eq!((counters.completed, counters.cancelled), (1, ABANDONED_MAX as u64 + 2));
    assert_eq!(shared.state.lock().abandoned, 0);
}
