//! Tasks, wakers, timers and calls from other threads.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::*;
use gale_runtime::*;

struct OnDrop(Rc<Cell<u32>>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn virtual_time_passes_at_once_and_in_order() {
    let started = Instant::now();
    run(async {
        let order = Rc::new(RefCell::new(Vec::new()));
        let begin = now();
        let wall_begin = wall_seconds();
        for seconds in [3600, 5, 86_400, 1] {
            let order = Rc::clone(&order);
            spawn(async move {
                sleep(Duration::from_secs(seconds)).await;
                order.borrow_mut().push((seconds, now().since(begin).as_secs()));
            });
        }
        sleep(Duration::from_secs(100_000)).await;
        assert_eq!(*order.borrow(), [(1, 1), (5, 5), (3600, 3600), (86_400, 86_400)]);
        assert_eq!(wall_seconds() - wall_begin, 100_000);
    });
    assert!(started.elapsed() < Duration::from_secs(1000));
}

#[test]
fn twenty_thousand_timers_fire_each_at_its_time() {
    run(async {
        let begin = now();
        let fired = Rc::new(Cell::new(0));
        for number in 0..20_000u64 {
            let fired = Rc::clone(&fired);
            // Spread over 3 hours, out of order.
            let delay = Duration::from_millis(number.wrapping_mul(7919) % 10_800_000);
            spawn(async move {
                sleep(delay).await;
                assert_eq!(now().since(begin), delay);
                fired.set(fired.get() + 1);
            });
        }
        sleep(Duration::from_secs(10_801)).await;
        assert_eq!((fired.get(), task_count()), (20_000, 0));
    });
}

#[test]
fn a_timer_moves_later_earlier_and_away() {
    run(async {
        let begin = now();
        let mut timer = Timer::after(Duration::from_secs(10));
        assert!(poll_fn(|cx| Poll::Ready(timer.poll_expired(cx))).await.is_pending());
        timer.set_after(Duration::from_secs(20));
        timer.expired().await;
        assert_eq!(now().since(begin), Duration::from_secs(20));
        timer.expired().await;
        timer.set_after(Duration::from_secs(50));
        assert!(poll_fn(|cx| Poll::Ready(timer.poll_expired(cx))).await.is_pending());
        timer.set_after(Duration::from_secs(5));
        timer.expired().await;
        assert_eq!(now().since(begin), Duration::from_secs(25));
        timer.clear();
        let cleared = timeout(Duration::from_secs(1000), timer.expired()).await;
        assert_eq!(cleared, Err(Elapsed));
    });
}

#[test]
fn real_time_wakes_a_sleeper_not_too_early() {
    run_real(async {
        let started = Instant::now();
        sleep(Duration::from_millis(3)).await;
        assert!(started.elapsed() >= Duration::from_millis(3));
    });
}

#[test]
fn timeout_gives_the_result_or_drops_the_future() {
    run(async {
        assert_eq!(timeout(Duration::from_secs(1), async { 7 }).await, Ok(7));
        let dropped = Rc::new(Cell::new(0));
        let guard = OnDrop(Rc::clone(&dropped));
        let endless = async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        };
        assert_eq!(timeout(Duration::from_secs(1), endless).await, Err(Elapsed));
        assert_eq!(dropped.get(), 1);
    });
}

#[test]
fn an_aborted_task_is_dropped_and_its_name_finds_nothing_afterwards() {
    run(async {
        let dropped = Rc::new(Cell::new(0));
        let guard = OnDrop(Rc::clone(&dropped));
        let task = spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        yield_now().await;
        assert_eq!((dropped.get(), task_count()), (0, 1));
        abort(task);
        assert_eq!((dropped.get(), task_count()), (1, 0));
        let successor_ran = Rc::new(Cell::new(false));
        let ran = Rc::clone(&successor_ran);
        spawn(async move { ran.set(true) });
        abort(task);
        yield_now().await;
        assert!(successor_ran.get());
    });
}

#[test]
fn the_name_of_another_loops_task_finds_nothing() {
    let mut elsewhere = EventLoop::new(LoopOptions::simulated_time()).unwrap();
    let foreign = elsewhere.run(async { spawn(std::future::pending()) });
    run(async {
        let own = spawn(std::future::pending());
        assert_ne!(own, foreign);
        abort(foreign);
        assert_eq!(task_count(), 1);
        abort(own);
        assert_eq!(task_count(), 0);
    });
    elsewhere.run(async { assert_eq!(task_count(), 1) });
}

#[test]
fn abort_outside_of_a_loop_finds_nothing() {
    let mut event_loop = EventLoop::new(LoopOptions::simulated_time()).unwrap();
    let task = event_loop.run(async { spawn(std::future::pending()) });
    abort(task);
    event_loop.run(async { assert_eq!(task_count(), 1) });
}

#[test]
fn a_task_may_abort_itself() {
    run(async {
        let dropped = Rc::new(Cell::new(0));
        let guard = OnDrop(Rc::clone(&dropped));
        let id = Rc::new(Cell::new(None));
        let own = Rc::clone(&id);
        id.set(Some(spawn(async move {
            let _guard = guard;
            abort(own.get().unwrap());
            std::future::pending::<()>().await;
        })));
        yield_now().await;
        assert_eq!((dropped.get(), task_count()), (1, 0));
    });
}

#[test]
fn a_panic_ends_its_task_only_and_is_reported_with_its_place() {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&reports);
    set_panic_reporter(move |panic| into.lock().unwrap().push(panic.to_string()));
    let before = panic_count();
    run_with_panics(async {
        struct Worse;
        impl Drop for Worse {
            fn drop(&mut self) {
                panic!("and its destructor too");
            }
        }
        spawn(async { panic!("number {}", 7) });
        let task = spawn(async {
            let _worse = Worse;
            std::future::pending::<()>().await;
        });
        let survived = Rc::new(Cell::new(false));
        let flag = Rc::clone(&survived);
        spawn(async move { flag.set(true) });
        yield_now().await;
        abort(task);
        assert!(survived.get());
        assert_eq!(task_count(), 0);
    });
    // Other tests of this program panic as well, at the same time.
    assert!(panic_count() - before >= 2);
    let reports = reports.lock().unwrap();
    let own = reports.iter().find(|report| report.ends_with(": number 7")).expect("the panic was reported");
    assert!(own.starts_with("task panicked at ") && own.contains("executor.rs:"), "{own}");
    assert!(reports.iter().any(|report| report.ends_with(": and its destructor too")));
}

#[test]
fn tasks_that_wake_themselves_do_not_hold_up_the_others() {
    run(async {
        for _ in 0..3 {
            spawn(async {
                loop {
                    yield_now().await;
                }
            });
        }
        let (a, b) = unix_pair();
        spawn(async move { send(&a, b"through").await });
        assert_eq!(receive(&b, 7).await, b"through");
        assert_eq!(timeout(Duration::from_millis(1), async { 1 }).await, Ok(1));
    });
}

#[test]
fn a_wake_from_another_thread_reaches_the_sleeping_loop() {
    run_real(async {
        let shared: Arc<(Mutex<Option<Waker>>, AtomicBool)> = Arc::default();
        let (sender, receiver) = mpsc::channel::<()>();
        let there = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            receiver.recv().unwrap();
            there.1.store(true, Ordering::SeqCst);
            let waker = there.0.lock().unwrap().take().unwrap();
            waker.wake();
        });
        poll_fn(|cx| {
            if shared.1.load(Ordering::SeqCst) {
                return Poll::Ready(());
            }
            *shared.0.lock().unwrap() = Some(cx.waker().clone());
            sender.send(()).ok();
            Poll::Pending
        })
        .await;
        thread.join().unwrap();
    });
}

#[test]
fn no_call_from_many_threads_is_lost() {
    const THREADS: usize = 4;
    const CALLS: usize = 2000;
    let mut event_loop = event_loop(options());
    let remote = event_loop.remote();
    let done = Arc::new(AtomicUsize::new(0));
    let finished: Arc<Mutex<Option<Waker>>> = Arc::default();
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (remote, done, finished) = (remote.clone(), Arc::clone(&done), Arc::clone(&finished));
            std::thread::spawn(move || {
                for _ in 0..CALLS {
                    let (done, finished) = (Arc::clone(&done), Arc::clone(&finished));
                    let mut call: Call = Box::new(move || {
                        if done.fetch_add(1, Ordering::SeqCst) + 1 == THREADS * CALLS {
                            finished.lock().unwrap().take().unwrap().wake();
                        }
                    });
                    // A full inbox is an error: try again with the same call.
                    loop {
                        let again = Arc::new(Mutex::new(Some(call)));
                        let work = Arc::clone(&again);
                        let run = Box::new(move || (work.lock().unwrap().take().unwrap())());
                        match remote.run(run) {
                            Ok(()) => break,
                            Err(RemoteError::Full) => call = again.lock().unwrap().take().unwrap(),
                            Err(RemoteError::Closed) => panic!("the loop has gone"),
                        }
                        std::thread::yield_now();
                    }
                }
            })
        })
        .collect();
    // The waker is stored before the first call can run, because calls run between turns.
    event_loop.run(poll_fn(|cx| {
        if done.load(Ordering::SeqCst) == THREADS * CALLS {
            return Poll::Ready(());
        }
        *finished.lock().unwrap() = Some(cx.waker().clone());
        Poll::Pending
    }));
    for thread in threads {
        thread.join().unwrap();
    }
    drop(event_loop);
    assert_eq!(remote.run(Box::new(|| ())), Err(RemoteError::Closed));
}

#[test]
fn calls_may_spawn_tasks_and_panic() {
    let mut event_loop = event_loop(LoopOptions { survives_panics: true, ..simulated_time() });
    let remote = event_loop.remote();
    remote.run(Box::new(|| panic!("in a call"))).unwrap();
    let (sender, receiver) = mpsc::channel();
    let send = sender.clone();
    remote.run(Box::new(move || _ = spawn(async move { send.send(worker()).unwrap() }))).unwrap();
    event_loop.run(async {
        yield_now().await;
        yield_now().await;
    });
    assert_eq!(receiver.try_recv(), Ok(0));
}

#[test]
fn a_panic_of_a_task_or_a_call_ends_a_loop_that_does_not_survive_it() {
    let of_task = std::panic::catch_unwind(|| {
        run(async {
            spawn(async { panic!("in a task") });
            std::future::pending::<()>().await;
        });
    });
    let of_call = std::panic::catch_unwind(|| {
        let mut event_loop = event_loop(simulated_time());
        event_loop.remote().run(Box::new(|| panic!("in a call"))).unwrap();
        event_loop.run(std::future::pending::<()>());
    });
    for (ended, message) in [(of_task, "in a task"), (of_call, "in a call")] {
        let payload = ended.expect_err("the loop ends");
        assert!(payload.downcast_ref::<String>().is_some_and(|text| text.ends_with(message)), "{payload:?}");
    }
}

#[test]
fn wakers_outlive_tasks_and_loops() {
    let wakers = run(async {
        let wakers = Rc::new(RefCell::new(Vec::new()));
        let into = Rc::clone(&wakers);
        spawn(poll_fn(move |cx| {
            into.borrow_mut().push(cx.waker().clone());
            Poll::Ready(())
        }));
        yield_now().await;
        wakers.borrow()[0].wake_by_ref();
        wakers.take()
    });
    wakers.into_iter().for_each(Waker::wake);
}

#[test]
fn tasks_left_are_dropped_with_the_loop_and_may_use_it_meanwhile() {
    struct Spawner(Rc<Cell<u32>>);
    impl Drop for Spawner {
        fn drop(&mut self) {
            let _ = now();
            spawn(async { unreachable!("the loop has ended") });
            self.0.set(self.0.get() + 1);
        }
    }
    let dropped = Rc::new(Cell::new(0));
    run(async {
        for _ in 0..3 {
            let spawner = Spawner(Rc::clone(&dropped));
            spawn(async move {
                let _spawner = spawner;
                sleep(Duration::from_secs(1)).await;
            });
        }
        yield_now().await;
    });
    assert_eq!(dropped.get(), 3);
}

#[test]
fn a_turn_over_ten_milliseconds_is_counted_as_a_stall() {
    let mut event_loop = event_loop(options());
    let remote = event_loop.remote();
    event_loop.run(async {
        yield_now().await;
        let started = Instant::now();
        while started.elapsed() <= stall::STALL_THRESHOLD {
            std::hint::spin_loop();
        }
        yield_now().await;
    });
    assert!(remote.turns().stalls() >= 1);
    assert!(remote.turns().longest() > stall::STALL_THRESHOLD);
}

#[test]
fn random_numbers_repeat_with_the_seed_only() {
    let draw = |seed| {
        let options = LoopOptions { seed, ..options() };
        event_loop(options).run(async { [random_u64(), random_u64()] })
    };
    assert_eq!(draw(Some(1)), draw(Some(1)));
    assert_ne!(draw(None), draw(None));
}

#[test]
fn the_end_of_a_turn_comes_after_everything_that_runs_in_it() {
    run(async {
        let order = Rc::new(RefCell::new(Vec::new()));
        let note = |text: &'static str| {
            let order = Rc::clone(&order);
            move || order.borrow_mut().push(text)
        };
        let (at_end, first, second) = (note("end"), note("first"), note("second"));
        spawn(async move {
            let mut end = TurnEnd::default();
            poll_fn(|cx| end.poll(cx)).await;
            at_end();
        });
        spawn(async move {
            first();
            spawn(async move { second() });
        });
        yield_now().await;
        assert_eq!(*order.borrow(), ["first", "second", "end"]);
    });
}

#[test]
fn waiting_for_the_end_of_a_turn_makes_no_turn() {
    let mut event_loop = event_loop(simulated_time());
    let remote = event_loop.remote();
    event_loop.run(async move {
        let ends = Rc::new(Cell::new(0));
        let seen = Rc::clone(&ends);
        spawn(async move {
            let mut end = TurnEnd::default();
            loop {
                poll_fn(|cx| end.poll(cx)).await;
                seen.set(seen.get() + 1);
            }
        });
        yield_now().await;
        assert_eq!(ends.get(), 1);
        let before = remote.turns().count();
        sleep(Duration::from_secs(60)).await;
        let turns = remote.turns().count() - before;
        assert!(turns < 10 && ends.get() <= turns + 1, "{turns} turns, {} ends", ends.get());
    });
}

#[test]
fn one_loop_at_a_time_has_the_accept_mutex() {
    let mutex = AcceptMutex::new();
    let (mut first, mut second) = (event_loop(simulated_time()), event_loop(simulated_time()));
    assert!(first.run(async { mutex.try_take() && mutex.try_take() && mutex.is_held() }));
    assert!(second.run(async { !mutex.try_take() && !mutex.is_held() && !mutex.release() }));
    assert!(first.run(async { mutex.release() && !mutex.is_held() }));
    assert!(second.run(async { mutex.try_take() }));
    assert!(first.run(async { !mutex.try_take() }));
    // A loop that has ended does not keep it.
    drop(second);
    assert!(first.run(async { mutex.try_take() }));
}

#[test]
fn a_loop_that_stalls_does_not_keep_the_accept_mutex() {
    static MUTEX: AcceptMutex = AcceptMutex::new();
    let (taken, is_taken) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let stalling = std::thread::spawn(move || {
        run_real(async move {
            assert!(MUTEX.try_take());
            taken.send(()).unwrap();
            let _ = released.recv();
            assert!(!MUTEX.is_held());
        });
    });
    is_taken.recv().unwrap();
    run(async { while !MUTEX.try_take() {} });
    drop(release);
    stalling.join().unwrap();
}

fn count_turns() -> (TaskId, Rc<Cell<u32>>) {
    let turn = Rc::new(Cell::new(0));
    let counted = Rc::clone(&turn);
    let counter = spawn(async move {
        loop {
            counted.set(counted.get() + 1);
            yield_now().await;
        }
    });
    (counter, turn)
}

const MICROSECOND: Effort = Effort { usual_nanos: 1000, worst_nanos: 1000 };

async fn compute(units: usize) {
    poll_fn(|context| poll_units(context, MICROSECOND, units)).await;
    charge_units(MICROSECOND, units);
}

#[test]
fn tasks_that_compute_much_take_turns_within_a_bounded_share() {
    run(async {
        let (counter, turn) = count_turns();
        let pieces = Rc::new(RefCell::new(Vec::new()));
        let computing: Vec<_> = (0..5)
            .map(|number| {
                let (pieces, turn) = (Rc::clone(&pieces), Rc::clone(&turn));
                spawn(async move {
                    for _ in 0..4 {
                        compute(400).await;
                        pieces.borrow_mut().push((turn.get(), number));
                    }
                })
            })
            .collect();
        // A task that leaves the line delays no other.
        yield_now().await;
        abort(computing[4]);
        while task_count() > 1 {
            yield_now().await;
        }
        abort(counter);
        let pieces = pieces.borrow();
        let order: Vec<_> = pieces.iter().map(|(_, number)| *number).filter(|number| *number != 4).collect();
        assert_eq!(order, [0, 1, 2, 3].repeat(4), "{pieces:?}");
        for turn in 0..=turn.get() {
            let count = pieces.iter().filter(|(of, _)| *of == turn).count();
            assert!(count <= 2, "the second piece of 400 microseconds exceeds the share: {pieces:?}");
        }
    });
}

#[test]
fn a_task_that_wants_little_goes_before_those_in_line() {
    run(async {
        let order = Rc::new(RefCell::new(Vec::new()));
        for number in 0..3 {
            let order = Rc::clone(&order);
            spawn(async move {
                compute(200).await;
                order.borrow_mut().push(number);
            });
        }
        let quiet = Rc::clone(&order);
        spawn(async move {
            compute(40).await;
            quiet.borrow_mut().push(100);
            // Together with the earlier work in this poll, it is not small any more.
            compute(40).await;
            quiet.borrow_mut().push(101);
        });
        while task_count() > 0 {
            yield_now().await;
        }
        assert_eq!(*order.borrow(), [100, 0, 1, 2, 101]);
    });
}

#[test]
fn tasks_that_begin_much_take_turns() {
    run(async {
        const EACH: usize = 10;
        let order = Rc::new(RefCell::new(Vec::new()));
        for number in 0..2 {
            let order = Rc::clone(&order);
            spawn(async move {
                for _ in 0..EACH {
                    poll_fn(poll_begin).await;
                    charge_begun(MICROSECOND, 100);
                    order.borrow_mut().push(number);
                }
            });
        }
        while task_count() > 0 {
            yield_now().await;
        }
        let order = order.borrow();
        assert_eq!((order.len(), &order[..2]), (2 * EACH, &[0, 1][..]), "each begins one thing at once");
        // A quantum is 125 µs: at most two in a row, as long as the other task has work too.
        let is_over =
            |end: usize| (0..2).any(|number| order[..end].iter().filter(|&&own| own == number).count() == EACH);
        let both = (0..=order.len()).find(|&end| is_over(end)).expect("both have ended");
        assert!(order[..both].windows(3).all(|three| three != [three[0]; 3]), "{order:?}");
    });
}

#[test]
fn a_piece_that_is_larger_than_the_share_has_a_turn_for_itself() {
    run(async {
        const ENDLESS: Effort = Effort { usual_nanos: u64::MAX, worst_nanos: 1 };
        assert_eq!(ENDLESS.units_at_once(), 1);
        let (_counter, turn) = count_turns();
        let mut turns = Vec::new();
        for _ in 0..3 {
            poll_fn(|context| poll_units(context, ENDLESS, 1)).await;
            charge_units(ENDLESS, 1);
            turns.push(turn.get());
        }
        assert!(turns.is_sorted_by(|one, next| one < next), "{turns:?}");
    });
}

#[test]
fn tasks_that_always_want_little_do_not_starve_those_in_line() {
    run(async {
        let is_over = Rc::new(Cell::new(false));
        for _ in 0..1000 {
            let is_over = Rc::clone(&is_over);
            spawn(async move {
                while !is_over.get() {
                    yield_now().await;
                }
            });
        }
        for _ in 0..20 {
            compute(400).await;
        }
        is_over.set(true);
    });
}

#[test]
fn in_line_the_waker_of_a_future_within_the_task_is_woken() {
    /// Polls its future only when the waker that it passes to the future was woken.
    struct Inner<F>(Pin<Box<F>>, Arc<Flag>);

    #[derive(Default)]
    struct Flag(AtomicBool, Mutex<Option<Waker>>);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
            self.1.lock().unwrap().take().unwrap().wake();
        }
    }

    impl<F: Future> Future for Inner<F> {
        type Output = F::Output;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
            *self.1.1.lock().unwrap() = Some(context.waker().clone());
            if !self.1.0.swap(false, Ordering::Relaxed) {
                return Poll::Pending;
            }
            let waker = Waker::from(Arc::clone(&self.1));
            self.0.as_mut().poll(&mut Context::from_waker(&waker))
        }
    }

    run(async {
        let flag = Arc::new(Flag::default());
        flag.0.store(true, Ordering::Relaxed);
        let work = async {
            for _ in 0..5 {
                compute(1000).await;
            }
        };
        Inner(Box::pin(work), flag).await;
    });
}
