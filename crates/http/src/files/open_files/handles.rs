//! Per-loop handles on the bodies that a loop sends, so that a response writes to no memory that other workers write
//! to.
//!
//! ```text
//!   an entry's body, of all workers ◄── a handle of each loop that sends it ◄── the loop's responses
//!              counts handles                      counts responses
//! ```
//!
//! A handle that is unused for a second is dropped. So the memory of a body is free at most two seconds after its entry
//! is gone, unless a response is still sending it. The shared counter is used if the slot holds another body that is in
//! use, and outside of loops.

use std::cell::RefCell;
use std::time::Duration;

use gale_runtime::Bytes;

/// Bodies for which a loop has handles: those that it sends most often at the same time, at some 100 bytes each.
const SLOTS: usize = 256;

const SWEPT_EVERY: Duration = Duration::from_secs(1);

thread_local! {
    /// Empty while no sweep task runs.
    static SLOTS_OF_LOOP: RefCell<Vec<Slot>> = const { RefCell::new(Vec::new()) };
}

#[derive(Default)]
struct Slot {
    /// Handle on the body, which keeps its memory alive.
    handle: Option<Bytes>,
    /// True if used since the last sweep.
    is_used: bool,
}

/// The same bytes, counted on this loop. `hash` is the hash of the path.
#[inline]
pub(super) fn counted_here(body: &Bytes, hash: u64) -> Bytes {
    SLOTS_OF_LOOP.with_borrow_mut(|slots| {
        if slots.is_empty() && !begin(slots) {
            return body.clone();
        }
        let slot = &mut slots[hash as usize % SLOTS];
        match &slot.handle {
            Some(handle) if handle.as_ptr() == body.as_ptr() => {
                slot.is_used = true;
                handle.clone()
            }
            Some(_) if slot.is_used => body.clone(),
            _ => {
                slot.is_used = true;
                slot.handle.insert(Bytes::from_owner(body.clone())).clone()
            }
        }
    })
}

/// Creates the slots and the task that sweeps them. False outside of a loop.
#[cold]
fn begin(slots: &mut Vec<Slot>) -> bool {
    if gale_runtime::try_now().is_none() {
        return false;
    }
    slots.resize_with(SLOTS, Slot::default);
    let sweeping = Sweeping;
    gale_runtime::spawn(async move {
        let _sweeping = sweeping;
        loop {
            gale_runtime::sleep(SWEPT_EVERY).await;
            if !SLOTS_OF_LOOP.with_borrow_mut(|slots| sweep(slots)) {
                break;
            }
        }
    });
    true
}

/// Drops handles unused since the last sweep. False if none is left.
fn sweep(slots: &mut [Slot]) -> bool {
    for slot in slots.iter_mut() {
        if !std::mem::take(&mut slot.is_used) {
            slot.handle = None;
        }
    }
    slots.iter().any(|slot| slot.handle.is_some())
}

/// Guard of the sweep task: drops the handles when the loop ends.
struct Sweeping;

impl Drop for Sweeping {
    fn drop(&mut self) {
        // The thread may be ending, and its locals with it.
        let _ = SLOTS_OF_LOOP.try_with(RefCell::take);
    }
}

#[cfg(test)]
mod tests {
    use gale_runtime::{EventLoop, LoopOptions};

    use super::super::entry::ALONE;
    use super::*;
    use gale_engine::budget::Budget;

    static BUDGET: Budget = Budget::new(100);

    #[test]
    fn body_that_is_sent_again_and_again_counts_on_the_loop_and_is_free_two_seconds_after_the_last() {
        let _alone = ALONE.lock();
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let body = BUDGET.take(10).unwrap().hold(*b"0123456789");
            let (first, second) = (counted_here(&body, 7), counted_here(&body, 7));
            assert_eq!((&first[..], first.as_ptr(), second.as_ptr()), (&body[..], body.as_ptr(), body.as_ptr()));
            // Another body of the same slot does not receive the wrong bytes.
            let other = Bytes::from(vec![1; 100]);
            assert_eq!(counted_here(&other, 7 + SLOTS as u64), other);
            drop((first, second, body));
            assert_eq!(BUDGET.taken(), 10, "the loop has its handle");
            gale_runtime::sleep(2 * SWEPT_EVERY + SWEPT_EVERY / 2).await;
            assert_eq!((BUDGET.taken(), gale_runtime::task_count()), (0, 0), "no handle and no task is left");
            // A loop that ends leaves no handle.
            let body = BUDGET.take(10).unwrap().hold(*b"0123456789");
            counted_here(&body, 7);
        });
        assert_eq!(BUDGET.taken(), 0);
    }

    #[test]
    fn outside_of_a_loop_nothing_is_kept() {
        let body = Bytes::from(vec![1; 100]);
        assert_eq!(counted_here(&body, 1), body);
        assert!(SLOTS_OF_LOOP.with_borrow(Vec::is_empty));
    }
}
