//! The protocol of the doorbell, checked in every order of events that the memory model allows.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p gale-runtime --test loom_doorbell --release --target-dir target/loom
//! ```
//!
//! Limited by the number of orders that loom can explore: two senders, three messages. Tests with wrong protocols show
//! that errors are found.
#![cfg(loom)]

#[path = "../src/inbox/doorbell.rs"]
#[allow(dead_code)]
mod doorbell;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread::{self, JoinHandle};

use doorbell::Doorbell;

/// A doorbell protocol, right or wrong.
trait Protocol: Send + Sync + 'static {
    fn new() -> Self;
    fn announce(&self) -> bool;
    fn may_sleep(&self) -> bool;
    fn awake(&self);
    fn answer(&self) -> bool;
}

impl Protocol for Doorbell {
    fn new() -> Self {
        Doorbell::new()
    }
    fn announce(&self) -> bool {
        self.announce()
    }
    fn may_sleep(&self) -> bool {
        self.may_sleep()
    }
    fn awake(&self) {
        self.awake();
    }
    fn answer(&self) -> bool {
        self.answer()
    }
}

/// An inbox: a queue, the protocol, and a stand-in for the eventfd.
struct Inbox<P> {
    queue: Mutex<Vec<u32>>,
    protocol: P,
    has_rung: Mutex<bool>,
}

impl<P: Protocol> Inbox<P> {
    fn send(&self, message: u32) {
        self.queue.lock().unwrap().push(message);
        if self.protocol.announce() {
            *self.has_rung.lock().unwrap() = true;
        }
    }

    /// Receives like a loop: takes the messages, then sleeps. A sleeping loop is modelled as one that comes back a
    /// little later; only when no sender is left does it matter whether the bell has rung.
    fn receive(&self, count: usize, mut senders: Vec<JoinHandle<()>>) -> Vec<u32> {
        let mut received = Vec::new();
        loop {
            if self.protocol.answer() {
                received.append(&mut self.queue.lock().unwrap());
            }
            if received.len() == count {
                senders.into_iter().for_each(|sender| sender.join().unwrap());
                return received;
            }
            if self.protocol.may_sleep() {
                if !*self.has_rung.lock().unwrap() {
                    senders.drain(..).for_each(|sender| sender.join().unwrap());
                    assert!(*self.has_rung.lock().unwrap(), "nobody wakes the loop");
                }
                *self.has_rung.lock().unwrap() = false;
                self.protocol.awake();
            }
        }
    }
}

/// Runs one sender for each list of messages. Without `turns_max` every order of events is tried; with it, those with
/// that many preemptions.
fn check<P: Protocol>(messages: &'static [&'static [u32]], turns_max: Option<usize>) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = turns_max;
    model.check(move || {
        let inbox = Arc::new(Inbox { queue: Mutex::new(Vec::new()), protocol: P::new(), has_rung: Mutex::new(false) });
        let senders = messages.iter().map(|&messages| {
            let inbox = Arc::clone(&inbox);
            thread::spawn(move || messages.iter().for_each(|&message| inbox.send(message)))
        });
        let mut sent = messages.concat();
        let mut received = inbox.receive(sent.len(), senders.collect());
        sent.sort_unstable();
        received.sort_unstable();
        assert_eq!(received, sent);
    });
}

#[test]
fn one_sender_is_never_forgotten() {
    check::<Doorbell>(&[&[1, 2]], None);
}

#[test]
fn nor_is_one_of_two() {
    check::<Doorbell>(&[&[1], &[2]], None);
}

#[test]
fn caller_that_comes_while_the_loop_wakes_for_another_is_not_lost() {
    check::<Doorbell>(&[&[1, 2], &[3]], Some(3));
}

/// Wrong: looks for messages before it sets `sleeping`, and not after.
struct LooksTooEarly(Doorbell);

impl Protocol for LooksTooEarly {
    fn new() -> Self {
        LooksTooEarly(Doorbell::new())
    }
    fn announce(&self) -> bool {
        self.0.announce()
    }
    fn may_sleep(&self) -> bool {
        let is_pending = self.0.is_pending();
        let _ = self.0.may_sleep();
        !is_pending
    }
    fn awake(&self) {
        self.0.awake();
    }
    fn answer(&self) -> bool {
        self.0.answer()
    }
}

#[test]
#[should_panic(expected = "nobody wakes the loop")]
fn a_loop_that_looks_too_early_is_found() {
    check::<LooksTooEarly>(&[&[1]], None);
}

/// Wrong: sets `sleeping` without reading its previous value.
struct OnlyStores {
    pending: AtomicBool,
    sleeping: AtomicBool,
}

impl Protocol for OnlyStores {
    fn new() -> Self {
        OnlyStores { pending: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }
    fn announce(&self) -> bool {
        self.pending.store(true, Ordering::Release);
        self.sleeping.swap(false, Ordering::AcqRel)
    }
    fn may_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::Release);
        if self.pending.load(Ordering::Acquire) {
            self.sleeping.store(false, Ordering::Release);
            return false;
        }
        true
    }
    fn awake(&self) {
        self.sleeping.store(false, Ordering::Release);
    }
    fn answer(&self) -> bool {
        self.pending.swap(false, Ordering::AcqRel)
    }
}

#[test]
#[should_panic(expected = "nobody wakes the loop")]
fn a_loop_that_only_stores_is_found() {
    check::<OnlyStores>(&[&[1]], None);
}

/// Wrong: wakes without reading the flag, and so without seeing a sender that did not ring because another one had.
struct WakesBlindly {
    pending: AtomicBool,
    sleeping: AtomicBool,
}

impl Protocol for WakesBlindly {
    fn new() -> Self {
        WakesBlindly { pending: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }
    fn announce(&self) -> bool {
        self.pending.store(true, Ordering::Release);
        self.sleeping.swap(false, Ordering::AcqRel)
    }
    fn may_sleep(&self) -> bool {
        self.sleeping.swap(true, Ordering::AcqRel);
        if self.pending.load(Ordering::Acquire) {
            self.sleeping.store(false, Ordering::Release);
            return false;
        }
        true
    }
    fn awake(&self) {
        self.sleeping.store(false, Ordering::Release);
    }
    fn answer(&self) -> bool {
        self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::AcqRel)
    }
}

#[test]
#[should_panic(expected = "nobody wakes the loop")]
fn a_loop_that_wakes_blindly_is_found() {
    check::<WakesBlindly>(&[&[1], &[2]], None);
}
