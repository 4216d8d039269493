//! Thread pools: limits, results, devices, panics, cancellation, stopping.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;

/// A task that runs until the sender is dropped; returns when it has begun.
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

/// The signals that the calling thread has blocked: a new thread inherits those of the thread that started it.
fn blocked_signals() -> libc::sigset_t {
    // SAFETY: a signal set consists of numbers, for which zeros are valid.
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the call only writes to the set.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut signals) };
    signals
}

fn is_urgent_data_blocked() -> bool {
    // SAFETY: the set was filled just now.
    unsafe { libc::sigismember(&blocked_signals(), libc::SIGURG) == 1 }
}

fn block_urgent_data() {
    let mut signals = blocked_signals();
    // SAFETY: the set is valid, and the tests do not use this signal.
    unsafe {
        libc::sigaddset(&raw mut signals, libc::SIGURG);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const signals, std::ptr::null_mut());
    }
}

#[test]
fn a_loop_starts_no_thread_beside_others() {
    run(async {
        let pool = ThreadPool::new("test", 2, 10);
        let (running, release) = block(&pool);
        // Blocked on this thread alone.
        block_urgent_data();
        assert!(is_urgent_data_blocked());
        assert_eq!(pool.run(is_urgent_data_blocked).await, Ok(false), "started by this thread");
        drop(release);
        running.await.unwrap();
    });
}

#[test]
fn abandoned_task_does_not_begin_and_leaves_the_count_at_once() {
    run(async {
        let pool = ThreadPool::new("test", 1, 3);
        let (running, release) = block(&pool);
        let (ran, has_run) = mpsc::channel();
        let (given_up, detached) = (ran.clone(), ran);
        let wanted = pool.run(|| "wanted");
        let unwanted = pool.run(move || given_up.send("given up"));
        pool.detach(Device::NONE, move || detached.send("detached").unwrap()).unwrap();
        assert_eq!(pool.counters().waiting, 3);
        drop(unwanted);
        assert_eq!(pool.counters().waiting, 2);
        let in_its_place = pool.run(|| "in its place");
        drop(release);
        running.await.unwrap();
        assert_eq!(wanted.await, Ok("wanted"));
        assert_eq!(in_its_place.await, Ok("in its place"));
        assert_eq!(has_run.iter().collect::<Vec<_>>(), ["detached"]);
        let counters = pool.counters();
        assert_eq!((counters.completed, counters.cancelled, counters.refused), (4, 1, 0));
    });
}

/// Reports the thread on which it is dropped.
struct Tells(mpsc::Sender<std::thread::ThreadId>);

impl Drop for Tells {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().id());
    }
}

#[test]
fn abandoned_values_are_dropped_by_a_thread_of_the_pool() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (sender, dropped) = mpsc::channel();
        let tells = || Tells(sender.clone());
        let thread = pool.run(|| std::thread::current().id()).await.unwrap();
        // Values captured by a task that never begins.
        let (running, release) = block(&pool);
        let captured = tells();
        drop(pool.run(move || drop(captured)));
        assert!(dropped.try_recv().is_err());
        drop(release);
        running.await.unwrap();
        assert_eq!(dropped.recv(), Ok(thread));
        // A result that is ready too late.
        let (begun, has_begun) = mpsc::channel();
        let (late, result) = (mpsc::channel::<()>(), tells());
        let task = pool.run(move || {
            begun.send(()).unwrap();
            let _ = late.1.recv();
            result
        });
        has_begun.recv().unwrap();
        drop(task);
        drop(late.0);
        assert_eq!(dropped.recv(), Ok(thread));
        // A result that is ready and was not taken.
        let result = tells();
        let task = pool.run(move || result);
        pool.run(|| ()).await.unwrap();
        drop(task);
        assert_eq!(dropped.recv(), Ok(thread));
        // Also in a pool that is ending, as long as it has a thread.
        let ending = ThreadPool::new("ending", 2, 10);
        let (running, release) = block(&ending);
        let result = tells();
        let task = ending.run(move || result);
        ending.run(|| ()).await.unwrap();
        drop(ending);
        drop(task);
        drop(release);
        running.await.unwrap();
        assert_ne!(dropped.recv(), Ok(std::thread::current().id()));
        // And values to dispose of, even in a full pool.
        let pool = ThreadPool::new("full", 1, 0);
        let (running, release) = block(&pool);
        assert!(pool.run(|| ()).await.is_err());
        pool.dispose(Device::NONE, tells());
        assert!(dropped.try_recv().is_err());
        drop(release);
        running.await.unwrap();
        assert_ne!(dropped.recv(), Ok(std::thread::current().id()));
    });
}

/// Like the last handle of a large unlinked file, which the kernel deletes on close.
struct SlowToDrop {
    dropping: mpsc::Sender<()>,
    gate: mpsc::Receiver<()>,
}

impl Drop for SlowToDrop {
    fn drop(&mut self) {
        self.dropping.send(()).unwrap();
        let _ = self.gate.recv();
    }
}

#[test]
fn a_thread_that_drops_a_result_is_busy_for_so_long() {
    run(async {
        let pool = ThreadPool::new("test", 2, 10);
        let (open_gate, gate) = mpsc::channel();
        let (dropping, is_dropping) = mpsc::channel();
        let (begun, has_begun) = mpsc::channel();
        let (finish, may_finish) = mpsc::channel::<()>();
        let task = pool.run(move || {
            begun.send(()).unwrap();
            let _ = may_finish.recv();
            SlowToDrop { dropping, gate }
        });
        has_begun.recv().unwrap();
        drop(task);
        drop(finish);
        is_dropping.recv().unwrap();
        assert_eq!((pool.counters().running, pool.counters().completed), (1, 0));
        drop::<mpsc::Sender<()>>(open_gate);
        while pool.counters().running > 0 {
            std::thread::yield_now();
        }
        assert_eq!(pool.counters().completed, 1);
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
        // A task with its result finds the thread free.
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
        // This panic has no waiter.
        pool.detach(Device::NONE, || panic!("unseen")).unwrap();
        assert_eq!(pool.run(|| "alive").await, Ok("alive"));
        let counters = pool.counters();
        assert_eq!((counters.completed, counters.panicked, counters.threads), (4, 2, 1));
    });
}

/// Tasks that hang on a device until the sender is dropped; returns when all of them have begun.
fn hang(pool: &ThreadPool, device: Device, count: usize) -> (Vec<PoolTask<()>>, mpsc::Sender<()>) {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Arc::new(std::sync::Mutex::new(released));
    let (begun, has_begun) = mpsc::channel();
    let tasks = (0..count).map(|_| {
        let (begun, released) = (begun.clone(), std::sync::Arc::clone(&released));
        pool.run_for(device, move || {
            begun.send(()).unwrap();
            let _ = released.lock().unwrap().recv();
        })
    });
    let tasks = tasks.collect();
    (0..count).for_each(|_| has_begun.recv().unwrap());
    (tasks, release)
}

const HANGS: Device = Device::number(7);
const WORKS: Device = Device::number(8);

#[test]
fn a_device_that_hangs_with_every_thread_does_not_hold_up_the_others() {
    run(async {
        let pool = ThreadPool::new("test", 4, 100);
        let (tasks, release) = hang(&pool, HANGS, 4);
        let more = pool.run_for(HANGS, || "more");
        for number in 0..100 {
            assert_eq!(pool.run_for(WORKS, move || number).await, Ok(number));
            assert_eq!(pool.run(move || number).await, Ok(number));
        }
        // Two at a time: the half that belongs to the other devices.
        let (others, others_release) = hang(&pool, WORKS, 2);
        let third = pool.run(|| "third");
        assert_eq!((pool.counters().threads, pool.counters().running, pool.counters().waiting), (6, 6, 2));
        drop(others_release);
        for task in others {
            task.await.unwrap();
        }
        assert_eq!(third.await, Ok("third"));
        drop(release);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(more.await, Ok("more"));
    });
}

#[test]
fn a_device_that_has_filled_the_queue_leaves_half_to_the_others() {
    run(async {
        let pool = ThreadPool::new("test", 2, 4);
        let (_tasks, release) = hang(&pool, HANGS, 2);
        let waiting: Vec<_> = (0..4).map(|_| pool.run_for(HANGS, || ())).collect();
        let error = pool.run_for(HANGS, || ()).await.unwrap_err();
        assert_eq!(error.to_string(), "thread pool \"test\" queue overflow: 4 tasks waiting");
        for number in 0..10 {
            assert_eq!(pool.run_for(WORKS, move || number).await, Ok(number));
        }
        let counters = pool.counters();
        assert_eq!((counters.waiting, counters.refused), (4, 1));
        drop(release);
        for task in waiting {
            task.await.unwrap();
        }
    });
}

#[test]
fn waiting_file_tasks_are_counted_by_device() {
    run(async {
        // Neither of the two can be read from the page cache, so both go to the pool.
        let (stuck, free) = ("/proc/self/stat", "/sys/kernel/notes");
        let open = |path: &str| files::open_blocking(path.as_ref(), OpenFlags::READ);
        let (Ok(stuck_file), Ok(free_file)) = (open(stuck), open(free)) else {
            return skip("no /sys here");
        };
        assert_ne!(stuck_file.device(), free_file.device());
        let pool = ThreadPool::new("test", 2, 10);
        let (tasks, release) = hang(&pool, stuck_file.device(), 2);
        let mut read = Box::pin(stuck_file.read_at_in(&pool, 0, 100));
        let create = OpenFlags { create: Some(0), ..OpenFlags::READ };
        let mut opened = Box::pin(files::open_in(&pool, stuck.as_ref(), create));
        assert!(poll_once(&mut read).await.is_pending() && poll_once(&mut opened).await.is_pending());
        free_file.read_at_in(&pool, 0, 100).await.unwrap();
        assert_eq!(pool.counters().waiting, 2);
        drop(release);
        for task in tasks {
            task.await.unwrap();
        }
        assert!(!read.await.unwrap().is_empty());
        opened.await.unwrap();
    });
}

#[test]
fn flood_of_a_pool_delays_others_only_by_its_queued_tasks() {
    run(async {
        let pool = ThreadPool::new("test", 1, usize::MAX);
        let (running, release) = block(&pool);
        let (order, in_order) = mpsc::channel();
        let submit = |name: &'static str| {
            let order = order.clone();
            pool.detach(Device::NONE, move || order.send(name).unwrap()).unwrap();
        };
        (0..100).for_each(|_| submit("flood"));
        submit("quiet");
        (0..100).for_each(|_| submit("flood"));
        drop(release);
        running.await.unwrap();
        pool.run(|| ()).await.unwrap();
        assert_eq!(in_order.iter().position(|name| name == "quiet"), Some(100));
    });
}

#[test]
fn a_pool_tells_how_long_tasks_have_waited_and_run() {
    run(async {
        let pool = ThreadPool::new("told", 1, 10);
        let (running, release) = block(&pool);
        let waiting = pool.run(|| ());
        let submitted = Instant::now();
        let shown = |is_this: &dyn Fn(&PoolStatus) -> bool| pools().into_iter().find(|pool| is_this(pool)).unwrap();
        let status = shown(&|status| &*status.name == "told" && status.counters.running == 1);
        assert_eq!((status.threads_max, status.queue_max, status.is_ending), (1, 10, false));
        assert_eq!((status.counters.threads, status.counters.waiting, status.counters.completed), (1, 1, 0));
        assert_eq!((status.wait_times.count(), status.run_times.count()), (0, 0));
        let has_waited = submitted.elapsed();
        drop(release);
        running.await.unwrap();
        waiting.await.unwrap();
        let status = pool.status();
        assert_eq!((status.wait_times.count(), status.run_times.count()), (2, 2));
        assert!(status.wait_times.max() >= has_waited);
        assert!(status.run_times.max() >= has_waited && status.run_times.quantile(1.0) >= has_waited);
    });
}

#[test]
fn pool_is_found_by_its_name_while_a_handle_is_held() {
    let pool = named_pool("by name", 3, 30);
    let found = named_pool("by name", 4, 40);
    let limits = |pool: &ThreadPool| (pool.status().threads_max, pool.status().queue_max);
    assert_eq!(limits(&found), (3, 30));
    found.resize(5, 50);
    assert_eq!(limits(&pool), (5, 50));
    // An old pool held by a task that hangs does not stand in the way of its successor.
    let (begun, has_begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let task = move || {
        begun.send(()).unwrap();
        let _ = released.recv();
    };
    pool.detach(Device::NONE, task).unwrap();
    has_begun.recv().unwrap();
    drop((pool, found));
    let successor = named_pool("by name", 6, 60);
    assert_eq!(limits(&successor), (6, 60));
    let shown = || pools().into_iter().filter(|pool| &*pool.name == "by name").map(|pool| pool.is_ending);
    assert_eq!(shown().collect::<Vec<_>>(), [true, false]);
    drop(release);
    let default = named_pool("default", 1, 1);
    assert_eq!((default.name(), limits(&default)), ("default", (32, 65536)));
}

#[test]
fn stopping_finishes_tasks_within_a_bounded_time() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (running, release) = block(&pool);
        let waiting = pool.run(|| ());
        assert!(!pool.stop(Duration::ZERO), "a task still runs");
        assert_eq!(waiting.await, Err(PoolError::Stopped));
        assert_eq!(pool.run(|| ()).await, Err(PoolError::Stopped));
        assert_eq!(pool.detach(Device::NONE, || ()), Err(PoolError::Stopped));
        drop(release);
        assert!(pool.stop(Duration::from_secs(3600)));
        assert_eq!(running.await, Ok(()));

        let pool = ThreadPool::new("test", 1, 10);
        let (running, release) = block(&pool);
        let (sender, receiver) = mpsc::channel();
        pool.detach(Device::NONE, move || sender.send("done").unwrap()).unwrap();
        drop(release);
        assert!(pool.stop(Duration::from_secs(3600)));
        assert_eq!((running.await, receiver.try_recv()), (Ok(()), Ok("done")));
    });
}

#[test]
fn waiting_task_is_done_although_the_pool_is_dropped() {
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
        // And it goes on although the result was dropped.
        let (task, release) = block(&pool);
        drop(task);
        drop(release);
        sleep(Duration::from_secs(1)).await;
    });
}
