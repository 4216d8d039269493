//! The cost of an empty task in a thread pool, from submission to result.
//!
//! ```text
//! cargo run --release -p gale-runtime --example pool_cost [epoll|io_uring]
//! ```
//!
//! No verdict: figures depend on the machine and its other load. Medians of several rounds are printed.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Barrier;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use gale_runtime::{Device, DriverChoice, EventLoop, LoopOptions, PoolError, ThreadPool, spawn};

const ROUNDS: usize = 7;
const TASKS: usize = 50_000;

fn main() -> std::io::Result<()> {
    let driver = match std::env::args().nth(1).as_deref() {
        None | Some("epoll") => DriverChoice::Epoll,
        Some("io_uring") => DriverChoice::IoUring,
        Some(other) => return Err(std::io::Error::other(format!("epoll or io_uring, not {other}"))),
    };
    let mut event_loop = EventLoop::new(LoopOptions { driver, ..LoopOptions::default() })?;
    println!("{}, medians of {ROUNDS} rounds of {TASKS} tasks", event_loop.driver_name());
    event_loop.run(measure()).map_err(std::io::Error::from)?;
    drop(event_loop);
    let pool = |name| ThreadPool::new(name, 2, usize::MAX);
    let shared = pool("shared");
    println!("two loops, 64 at once each, one pool of 2 threads: {}", two_loops(driver, [shared.clone(), shared]));
    println!("two loops, 64 at once each, a pool of 2 threads each: {}", two_loops(driver, [pool("one"), pool("two")]));
    Ok(())
}

async fn measure() -> Result<(), PoolError> {
    let pool = ThreadPool::new("cost", 1, usize::MAX);
    // One after the other: submission, wake-up of a thread, and delivery of the result.
    let (mut latencies, mut processor) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let used = processor_time();
        for _ in 0..TASKS / 10 {
            let begin = Instant::now();
            pool.run(|| ()).await?;
            latencies.push(begin.elapsed());
        }
        processor.push((processor_time() - used) / (TASKS as u32 / 10));
    }
    latencies.sort_unstable();
    let share = |share: f64| latencies[(latencies.len() as f64 * share) as usize];
    println!(
        "one at a time: latency p50 {:?}, p99 {:?}; processor time {:?}",
        share(0.5),
        share(0.99),
        median(processor)
    );

    // The loop's own part: queueing a task, and taking its result later.
    let submitting = (0..ROUNDS).map(|_| {
        let begin = Instant::now();
        let tasks: Vec<_> = (0..TASKS).map(|_| pool.run(|| ())).collect();
        let each = begin.elapsed() / TASKS as u32;
        drop(tasks);
        each
    });
    println!("submitting alone, results not wanted: {:?} of the loop", median(submitting.collect()));

    for (name, devices) in [("one device", 1), ("four devices", 4), ("a device for each task", u64::MAX)] {
        println!("64 at once, {name}: {}", told(rounds(&pool, devices).await));
    }
    let status = pool.status();
    println!(
        "as the pool itself saw it: waited p50 {:?}, ran p50 {:?}",
        status.wait_times.quantile(0.5),
        status.run_times.quantile(0.5)
    );
    Ok(())
}

/// Time and processor time of a task in each round.
async fn rounds(pool: &ThreadPool, devices: u64) -> Vec<(Duration, Duration)> {
    let mut figures = Vec::new();
    for _ in 0..ROUNDS {
        let (begin, used) = (Instant::now(), processor_time());
        together(pool, devices).await;
        figures.push((begin.elapsed() / TASKS as u32, (processor_time() - used) / TASKS as u32));
    }
    figures
}

fn told(figures: Vec<(Duration, Duration)>) -> String {
    let (elapsed, processor) = figures.into_iter().unzip();
    format!("{:?} each, processor time {:?}", median(elapsed), median(processor))
}

/// Two loops that submit tasks at the same time, to one pool or each to its own.
fn two_loops(driver: DriverChoice, pools: [ThreadPool; 2]) -> String {
    let barrier = Barrier::new(2);
    let mut figures = std::thread::scope(|scope| {
        let loops = pools.map(|pool| {
            let barrier = &barrier;
            scope.spawn(move || {
                let mut event_loop = EventLoop::new(LoopOptions { driver, ..LoopOptions::default() }).expect("a loop");
                event_loop.run(async {
                    let mut figures = Vec::new();
                    for _ in 0..ROUNDS {
                        barrier.wait();
                        let (begin, used) = (Instant::now(), processor_time());
                        together(&pool, 1).await;
                        barrier.wait();
                        // Both have submitted this many.
                        let tasks = 2 * TASKS as u32;
                        figures.push((begin.elapsed() / tasks, (processor_time() - used) / tasks));
                    }
                    figures
                })
            })
        });
        loops.map(|each| each.join().expect("it does not panic"))
    });
    told(std::mem::take(&mut figures[0]))
}

/// 64 connections that each submit one task after the other.
async fn together(pool: &ThreadPool, devices: u64) {
    const CONNECTIONS: u64 = 64;
    let (left, waker) = (Rc::new(Cell::new(CONNECTIONS)), Rc::new(RefCell::new(None::<Waker>)));
    for connection in 0..CONNECTIONS {
        let (pool, left, waker) = (pool.clone(), Rc::clone(&left), Rc::clone(&waker));
        spawn(async move {
            for number in 0..TASKS as u64 / CONNECTIONS {
                let device = Device::key((connection + number * CONNECTIONS) % devices);
                pool.run_for(device, || ()).await.expect("there is room");
            }
            left.set(left.get() - 1);
            waker.take().into_iter().for_each(Waker::wake);
        });
    }
    poll_fn(|context| {
        *waker.borrow_mut() = Some(context.waker().clone());
        if left.get() == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
