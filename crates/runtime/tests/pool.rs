//! Thread pools: bounds, results, panics, stopping.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::sync::mpsc;
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// A task that runs until the sender is dropped, and tells when it has begun.
fn block(pool: &ThreadPool) -> (PoolTask<()>, mpsc::Sender<()>) {
    let (sender, receiver) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let task = pool.run(move || {
        begun.send(()).unwrap();
        let _ = receiver.recv();
    });
    has_begun.recv().unwrap();
    (task, sender)
}

#[test]
fn a_result_comes_back_to_the_loop() {
    run(async {
        let pool = ThreadPool::new("test", 2, 10);
        let loop_thread = std::thread::current().id();
        let (result, thread) = pool.run(|| (6 * 7, std::thread::current().id())).await.unwrap();
        assert_eq!(result, 42);
        assert_ne!(thread, loop_thread);
        assert_eq!(pool.counters().completed, 1);
    });
}

#[test]
fn a_task_that_nobody_wants_any_more_is_dropped_if_it_was_worth_only_its_result() {
    run(async {
        let pool = ThreadPool::new("test", 1, usize::MAX);
        let (running, release) = block(&pool);
        let (ran, has_run) = mpsc::channel();
        let (for_result, for_effect) = (ran.clone(), ran);
        let wanted = pool.run_while_wanted(|| "wanted");
        drop(pool.run_while_wanted(move || for_result.send("for its result")));
        drop(pool.run(move || for_effect.send("for its effect")));
        drop(release);
        running.await.unwrap();
        assert_eq!(wanted.await, Ok("wanted"));
        pool.run(|| ()).await.unwrap();
        assert_eq!(has_run.iter().collect::<Vec<_>>(), ["for its effect"]);
    });
}

#[test]
fn threads_start_on_demand_and_are_used_again() {
    run(async {
        let pool = ThreadPool::new("test", 8, 10);
        assert_eq!(pool.counters().threads, 0);
        let (task, release) = block(&pool);
        assert_eq!(pool.counters().threads, 1);
        let (second_task, second_release) = block(&pool);
        assert_eq!((pool.counters().threads, pool.counters().running), (2, 2));
        drop((release, second_release));
        task.await.unwrap();
        second_task.await.unwrap();
    });
}

#[test]
fn a_full_queue_refuses_in_nginxs_words() {
    run(async {
        let pool = ThreadPool::new("disk", 1, 2);
        let (running, release) = block(&pool);
        let waiting = [pool.run(|| 1), pool.run(|| 2)];
        let error = pool.run(|| 3).await.unwrap_err();
        assert_eq!(error.to_string(), "thread pool \"disk\" queue overflow: 2 tasks waiting");
        let counters = pool.counters();
        assert_eq!((counters.running, counters.waiting, counters.refused), (1, 2, 1));
        drop(release);
        running.await.unwrap();
        let [first, second] = waiting;
        assert_eq!((first.await, second.await), (Ok(1), Ok(2)));
        assert_eq!(pool.run(|| 4).await, Ok(4));
    });
}

#[test]
fn without_a_queue_as_many_run_as_there_are_threads() {
    run(async {
        let pool = ThreadPool::new("none", 2, 0);
        let (first, first_release) = block(&pool);
        let (second, second_release) = block(&pool);
        let error = pool.run(|| ()).await.unwrap_err();
        assert_eq!(error.to_string(), "thread pool \"none\" queue overflow: 0 tasks waiting");
        drop(first_release);
        first.await.unwrap();
        // Who has the result finds the thread free.
        for number in 0..100 {
            assert_eq!(pool.run(move || number).await, Ok(number));
        }
        drop(second_release);
        second.await.unwrap();
    });
}

#[test]
fn a_panic_is_a_result() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let before = panic_count();
        assert_eq!(pool.run(|| panic!("in the pool")).await, Err::<(), _>(PoolError::Panicked));
        assert!(panic_count() > before);
        assert_eq!(pool.run(|| "alive").await, Ok("alive"));
    });
}

#[test]
fn a_dropped_future_detaches_the_task() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (running, release) = block(&pool);
        let (sender, receiver) = mpsc::channel();
        drop(pool.run(move || sender.send("done").unwrap()));
        drop(running);
        drop(release);
        assert_eq!(receiver.recv(), Ok("done"));
    });
}

#[test]
fn stopping_drops_what_waits_and_is_bounded() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (running, release) = block(&pool);
        let waiting = pool.run(|| ());
        assert!(!pool.stop(Duration::ZERO), "a task still runs");
        assert_eq!(waiting.await, Err(PoolError::Stopped));
        assert_eq!(pool.run(|| ()).await, Err(PoolError::Stopped));
        drop(release);
        assert!(pool.stop(Duration::from_secs(3600)));
        assert_eq!(running.await, Ok(()));
    });
}

#[test]
fn what_waits_when_the_pool_is_dropped_is_still_done() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (running, release) = block(&pool);
        let waiting = pool.run(|| 5);
        drop(pool);
        drop(release);
        running.await.unwrap();
        assert_eq!(waiting.await, Ok(5));
    });
}

#[test]
fn virtual_time_stands_still_while_a_pool_works() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let begin = now();
        for _ in 0..100 {
            let result = timeout(Duration::from_millis(1), pool.run(std::thread::yield_now)).await;
            assert_eq!(result, Ok(Ok(())));
        }
        assert_eq!(now(), begin);
        // And goes on although nobody waits for the result.
        let (task, release) = block(&pool);
        drop(task);
        drop(release);
        sleep(Duration::from_secs(1)).await;
    });
}
