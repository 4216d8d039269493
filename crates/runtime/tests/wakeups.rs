//! No wake-up is lost, with real threads and in real time: calls, wakers and results of thread pools, one at a time
//! (the loop sleeps before each) and many at once. `loom_doorbell.rs` checks all orders of events; this checks the
//! rest, down to the eventfd and the driver.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::*;
use gale_runtime::*;

/// Repetitions in each test: some tenths of a second.
const TIMES: usize = 20_000;
const THREADS: usize = 4;

/// Only a loop that was not woken waits so long.
const DEADLINE: Duration = Duration::from_secs(60);

/// Counts arrivals, and wakes the task that waits for all of them.
#[derive(Default)]
struct Arrivals {
    count: AtomicUsize,
    waker: Mutex<Option<Waker>>,
}

impl Arrivals {
    fn note(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if let Some(waker) = &*self.waker.lock().unwrap() {
            waker.wake_by_ref();
        }
    }

    fn poll(&self, cx: &mut Context<'_>, all: usize) -> Poll<()> {
        *self.waker.lock().unwrap() = Some(cx.waker().clone());
        if self.count.load(Ordering::SeqCst) == all { Poll::Ready(()) } else { Poll::Pending }
    }

    async fn wait(&self, all: usize) {
        in_time(poll_fn(|cx| self.poll(cx, all))).await;
    }
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(DEADLINE, future).await.expect("a wake-up was lost")
}

#[test]
fn each_of_many_calls_wakes_the_loop() {
    let mut event_loop = event_loop(options());
    let remote = event_loop.remote();
    let arrivals = Arc::new(Arrivals::default());
    let calls = Arc::clone(&arrivals);
    let caller = std::thread::spawn(move || {
        for number in 0..TIMES {
            let (sender, receiver) = mpsc::channel();
            let calls = Arc::clone(&calls);
            let call = move || {
                calls.note();
                sender.send(number).unwrap();
            };
            remote.run(Box::new(call)).unwrap();
            // After the answer the loop goes to sleep again, unless the next call comes first.
            assert_eq!(receiver.recv_timeout(2 * DEADLINE), Ok(number));
        }
    });
    event_loop.run(arrivals.wait(TIMES));
    caller.join().unwrap();
}

#[test]
fn calls_from_many_threads_are_all_executed() {
    let mut event_loop = event_loop(options());
    let arrivals = Arc::new(Arrivals::default());
    let callers: Vec<_> = (0..THREADS)
        .map(|_| {
            let (remote, arrivals) = (event_loop.remote(), Arc::clone(&arrivals));
            std::thread::spawn(move || {
                let call = || {
                    let arrivals = Arc::clone(&arrivals);
                    Box::new(move || arrivals.note())
                };
                for _ in 0..TIMES {
                    // The inbox is bounded.
                    while remote.run(call()) == Err(RemoteError::Full) {
                        std::thread::yield_now();
                    }
                }
            })
        })
        .collect();
    event_loop.run(arrivals.wait(THREADS * TIMES));
    callers.into_iter().for_each(|caller| caller.join().unwrap());
}

#[test]
fn wakers_used_by_many_threads_are_all_heard() {
    let mut event_loop = event_loop(options());
    let arrivals = Arc::new(Arrivals::default());
    let wakers: Vec<_> = (0..THREADS)
        .map(|_| {
            let arrivals = Arc::clone(&arrivals);
            std::thread::spawn(move || (0..TIMES).for_each(|_| arrivals.note()))
        })
        .collect();
    event_loop.run(arrivals.wait(THREADS * TIMES));
    wakers.into_iter().for_each(|waker| waker.join().unwrap());
}

#[test]
fn every_result_of_a_pool_wakes_its_waiter() {
    run_real(async {
        let pool = ThreadPool::new("test", THREADS, usize::MAX);
        in_time(async {
            for number in 0..TIMES {
                assert_eq!(pool.run(move || number).await, Ok(number));
            }
        })
        .await;
        // Many at once, for several devices.
        let finished = Rc::new(Cell::new(0));
        let arrivals = Arc::new(Arrivals::default());
        for task in 0..100 {
            let (pool, finished, arrivals) = (pool.clone(), Rc::clone(&finished), Arc::clone(&arrivals));
            spawn(async move {
                for number in 0..TIMES / 100 {
                    let result = pool.run_for(Device::key(task % 3), move || number).await;
                    assert_eq!(result, Ok(number));
                }
                finished.set(finished.get() + 1);
                arrivals.note();
            });
        }
        arrivals.wait(100).await;
        assert_eq!(finished.get(), 100);
        let counters = pool.counters();
        assert_eq!((counters.completed, counters.running, counters.waiting), (2 * TIMES as u64, 0, 0));
    });
}
