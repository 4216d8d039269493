//! A single value, a bounded queue and a signal, between tasks and from other threads.

mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use common::*;
use gale_runtime::mpsc::TrySendError;
use gale_runtime::*;

#[test]
fn oneshot_value_arrives_from_another_thread() {
    run_real(async {
        for number in 0..100 {
            let (sender, receiver) = oneshot::channel();
            let thread = std::thread::spawn(move || sender.send(number));
            assert_eq!(receiver.await, Ok(number));
            thread.join().unwrap().unwrap();
        }
    });
}

#[test]
fn oneshot_ends_are_told_that_the_other_has_gone() {
    run(async {
        let (sender, mut receiver) = oneshot::channel::<u32>();
        assert_eq!(receiver.try_recv(), Ok(None));
        assert!(poll_once(&mut receiver).await.is_pending());
        drop(sender);
        assert_eq!((receiver.try_recv(), receiver.await), (Err(Closed), Err(Closed)));

        let (mut sender, receiver) = oneshot::channel::<u32>();
        assert!(poll_fn(|cx| Poll::Ready(sender.poll_closed(cx).is_pending())).await);
        spawn(async move { drop(receiver) });
        poll_fn(|cx| sender.poll_closed(cx)).await;
        assert!(sender.is_closed());
        assert_eq!(sender.send(1), Err(1));
    });
}

#[test]
fn untaken_oneshot_value_is_dropped_with_the_receiver() {
    run(async {
        let value = std::sync::Arc::new(());
        let (sender, receiver) = oneshot::channel();
        sender.send(std::sync::Arc::clone(&value)).unwrap();
        drop(receiver);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    });
}

#[test]
fn mpsc_values_of_many_threads_arrive_each_in_order() {
    const THREADS: usize = 4;
    const EACH: usize = 500;
    run_real(async {
        let (sender, mut receiver) = mpsc::channel(3);
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    event_loop(options()).run(async move {
                        for number in 0..EACH {
                            sender.send((thread, number)).await.unwrap();
                        }
                    });
                })
            })
            .collect();
        drop(sender);
        let mut next = [0; THREADS];
        while let Some((thread, number)) = receiver.recv().await {
            assert_eq!(number, next[thread]);
            next[thread] += 1;
        }
        assert_eq!(next, [EACH; THREADS]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn mpsc_senders_that_wait_are_served_in_the_order_of_their_coming() {
    run(async {
        let (sender, mut receiver) = mpsc::channel(1);
        sender.try_send(0).unwrap();
        for number in 1..5 {
            let sender = sender.clone();
            spawn(async move { sender.send(number).await.unwrap() });
            turns(1).await;
        }
        assert_eq!(sender.try_send(9), Err(TrySendError::Full(9)));
        assert_eq!(receiver.recv().await, Some(0));
        assert_eq!(sender.try_send(9), Err(TrySendError::Full(9)), "the room is for who waited");
        for number in 1..5 {
            assert_eq!(receiver.recv().await, Some(number));
        }
        sender.try_send(9).unwrap();
        drop(sender);
        assert_eq!((receiver.try_recv(), receiver.try_recv()), (Ok(Some(9)), Err(Closed)));
        assert_eq!(receiver.recv().await, None);
    });
}

#[test]
fn mpsc_sender_dropped_after_it_was_given_room_leaves_it_to_the_next() {
    run(async {
        let (sender, mut receiver) = mpsc::channel(1);
        sender.try_send(0).unwrap();
        let (mut first, mut second) = (sender.send(1), sender.send(2));
        assert!(poll_once(&mut first).await.is_pending());
        assert!(poll_once(&mut second).await.is_pending());
        assert_eq!(receiver.recv().await, Some(0));
        drop(first);
        assert_eq!(poll_once(&mut second).await, Poll::Ready(Ok(())));
        assert_eq!(receiver.recv().await, Some(2));
        // A sender that gives up before it was granted room gives none back.
        sender.try_send(3).unwrap();
        let mut third = sender.send(4);
        assert!(poll_once(&mut third).await.is_pending());
        drop(third);
        assert_eq!(receiver.recv().await, Some(3));
        sender.try_send(5).unwrap();
        assert_eq!(sender.try_send(6), Err(TrySendError::Full(6)));
    });
}

#[test]
fn mpsc_senders_are_told_that_the_receiver_has_gone() {
    run(async {
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(1).unwrap();
        let mut waiting = sender.send(2);
        assert!(poll_once(&mut waiting).await.is_pending());
        drop(receiver);
        assert_eq!(waiting.await, Err(2));
        assert!(sender.is_closed());
        assert_eq!(sender.try_send(3), Err(TrySendError::Closed(3)));
        assert_eq!(sender.send(4).await, Err(4));
    });
}

#[test]
fn notify_wakes_in_order_and_keeps_one_wake_for_the_next_waiter() {
    run(async {
        let notify = Rc::new(Notify::new());
        let woken = Rc::new(RefCell::new(Vec::new()));
        for number in 0..4 {
            let (notify, woken) = (Rc::clone(&notify), Rc::clone(&woken));
            spawn(async move {
                notify.notified().await;
                woken.borrow_mut().push(number);
            });
            turns(1).await;
        }
        notify.notify_one();
        notify.notify_one();
        turns(2).await;
        assert_eq!(*woken.borrow(), [0, 1]);
        notify.notify_all();
        turns(2).await;
        assert_eq!(*woken.borrow(), [0, 1, 2, 3]);

        notify.notify_all();
        assert!(poll_once(&mut notify.notified()).await.is_pending(), "nothing is kept of that");
        notify.notify_one();
        notify.notify_one();
        notify.notified().await;
        assert!(poll_once(&mut notify.notified()).await.is_pending(), "one is kept at most");
    });
}

#[test]
fn notify_for_a_dropped_waiter_goes_to_the_next() {
    run(async {
        let notify = Notify::new();
        let (mut first, mut second) = (notify.notified(), notify.notified());
        assert!(poll_once(&mut first).await.is_pending());
        assert!(poll_once(&mut second).await.is_pending());
        notify.notify_one();
        drop(first);
        assert!(poll_once(&mut second).await.is_ready());
        let mut third = notify.notified();
        assert!(poll_once(&mut third).await.is_pending());
        notify.notify_all();
        drop(third);
        assert!(poll_once(&mut notify.notified()).await.is_pending(), "all were told: nothing is left");
    });
}
