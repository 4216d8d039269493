//! The reporter of panics is the caller's code: it may panic, or set another reporter while it runs. There is one per
//! process, so this test is a program of its own.

mod common;

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use gale_runtime::*;

#[test]
fn a_reporter_may_panic_and_may_name_its_successor() {
    let told = Arc::new(AtomicUsize::new(0));
    let by_successor = Arc::clone(&told);
    set_panic_reporter(move |_| {
        let told = Arc::clone(&by_successor);
        set_panic_reporter(move |_| {
            told.fetch_add(1, Ordering::Relaxed);
        });
        panic!("the reporter's own");
    });
    run_with_panics(async {
        for _ in 0..3 {
            spawn(async { panic!("the task's") });
        }
        yield_now().await;
        assert_eq!(task_count(), 0);
    });
    assert_eq!((told.load(Ordering::Relaxed), panic_count()), (2, 3));
}
