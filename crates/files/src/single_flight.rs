//! One computation for all tasks that want the same result at the same time, on any loop.
//!
//! ```text
//!   Resting ──► Polled ──► Done          by one of the waiters, without a lock
//!      ▲          │
//!      └──────────┘                      it is pending; the first waiter that is woken polls it again
//! ```
//!
//! The first one to join begins the computation, and all others wait for the same one. It belongs to all waiters: it
//! goes on when the first one leaves, and is dropped with the last. The result is kept for as long as there are
//! waiters; this is no cache.
//!
//! No lock is held while the computation is polled or dropped, nor while tasks are woken. One is held while it is
//! created, which only assembles the future.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::hash::{BuildHasher, Hash, RandomState};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Number of tables of computations.
const SHARDS: usize = 16;

pub(super) type Computation<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The computations in flight by key.
pub(super) struct SingleFlight<K, T> {
    shards: [Mutex<Shard<K, T>>; SHARDS],
    hasher: RandomState,
}

type Shard<K, T> = HashMap<K, Arc<InFlight<K, T>>>;

struct InFlight<K, T> {
    key: K,
    state: Mutex<State<T>>,
}

struct State<T> {
    stage: Stage<T>,
    /// Wakers of the waiters, by number.
    waiting: BTreeMap<u64, Waker>,
    /// Number of the next waiter.
    next: u64,
    /// Number of waiters that have not left.
    interested: usize,
}

enum Stage<T> {
    Resting(Computation<T>),
    /// `again`: it was woken while it was polled.
    Polled {
        again: bool,
    },
    Done(T),
    /// The last waiter has left.
    Abandoned,
}

/// A share in a computation. Dropping it leaves.
pub(super) struct Joined<K: Eq + Hash, T> {
    single_flight: Arc<SingleFlight<K, T>>,
    in_flight: Arc<InFlight<K, T>>,
    number: u64,
}

impl<K: Eq + Hash + Clone, T> SingleFlight<K, T> {
    pub fn new() -> Arc<Self> {
        Arc::new(SingleFlight { shards: std::array::from_fn(|_| Mutex::default()), hasher: RandomState::new() })
    }

    /// Joins the computation of this key: one in flight, or the one that `begin` creates. Also returns whether it was
    /// in flight.
    pub fn join(self: &Arc<Self>, key: K, begin: impl FnOnce() -> Computation<T>) -> (Joined<K, T>, bool) {
        let mut shard = self.shard(&key).lock();
        let in_flight = shard.entry(key).or_insert_with_key(|key| {
            let stage = Stage::Resting(begin());
            let state = State { stage, waiting: BTreeMap::new(), next: 0, interested: 0 };
            Arc::new(InFlight { key: key.clone(), state: Mutex::new(state) })
        });
        let in_flight = Arc::clone(in_flight);
        let mut state = in_flight.state.lock();
        let was_in_flight = state.interested > 0;
        state.interested += 1;
        let number = state.next;
        state.next += 1;
        drop((state, shard));
        (Joined { single_flight: Arc::clone(self), in_flight, number }, was_in_flight)
    }
}

impl<K: Eq + Hash, T> SingleFlight<K, T> {
    fn shard(&self, key: &K) -> &Mutex<Shard<K, T>> {
        &self.shards[self.hasher.hash_one(key) as usize % SHARDS]
    }

    /// Removes a computation without waiters.
    fn forget(&self, in_flight: &Arc<InFlight<K, T>>) {
        let mut shard = self.shard(&in_flight.key).lock();
        let is_current = shard.get(&in_flight.key).is_some_and(|current| Arc::ptr_eq(current, in_flight));
        let removed = is_current.then(|| shard.remove_entry(&in_flight.key));
        drop(shard);
        drop(removed);
    }
}

impl<K: Send + Sync, T: Send> Wake for InFlight<K, T> {
    /// The computation can go on: wakes all waiters, and the first one polls it.
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock();
        if let Stage::Polled { again } = &mut state.stage {
            *again = true;
            return;
        }
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(Waker::wake);
    }
}

impl<K: Eq + Hash + Send + Sync + 'static, T: Clone + Send + 'static> Future for Joined<K, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut state = self.in_flight.state.lock();
        if let Stage::Done(result) = &state.stage {
            return Poll::Ready(result.clone());
        }
        let is_registered = state.waiting.get(&self.number).is_some_and(|waiting| waiting.will_wake(cx.waker()));
        let displaced = if is_registered { None } else { state.waiting.insert(self.number, cx.waker().clone()) };
        let computation = match mem::replace(&mut state.stage, Stage::Polled { again: false }) {
            Stage::Resting(computation) => Some(computation),
            polled => {
                // The task that polls it wakes all others when it is done.
                state.stage = polled;
                None
            }
        };
        drop(state);
        drop(displaced);
        computation.map_or(Poll::Pending, |computation| self.drive(computation))
    }
}

impl<K: Eq + Hash + Send + Sync + 'static, T: Clone + Send + 'static> Joined<K, T> {
    /// Polls the computation until it is done or pending.
    fn drive(&self, mut computation: Computation<T>) -> Poll<T> {
        let relay = Waker::from(Arc::clone(&self.in_flight));
        loop {
            let polled = computation.as_mut().poll(&mut Context::from_waker(&relay));
            let mut state = self.in_flight.state.lock();
            match polled {
                Poll::Ready(result) => {
                    state.stage = Stage::Done(result.clone());
                    let waiting = mem::take(&mut state.waiting);
                    drop(state);
                    self.single_flight.forget(&self.in_flight);
                    let others = waiting.into_iter().filter(|&(number, _)| number != self.number);
                    others.for_each(|(_, waker)| waker.wake());
                    return Poll::Ready(result);
                }
                Poll::Pending if matches!(state.stage, Stage::Polled { again: true }) => {
                    state.stage = Stage::Polled { again: false };
                }
                Poll::Pending => {
                    state.stage = Stage::Resting(computation);
                    return Poll::Pending;
                }
            }
        }
    }
}

impl<K: Eq + Hash, T> Drop for Joined<K, T> {
    fn drop(&mut self) {
        // In the same order as everywhere, against deadlocks.
        let mut shard = self.single_flight.shard(&self.in_flight.key).lock();
        let mut state = self.in_flight.state.lock();
        let own = state.waiting.remove(&self.number);
        state.interested -= 1;
        if state.interested > 0 {
            // This waiter may have been woken instead of the others.
            let is_resting = matches!(state.stage, Stage::Resting(_));
            let others = if is_resting { mem::take(&mut state.waiting) } else { BTreeMap::new() };
            drop((state, shard, own));
            return others.into_values().for_each(Waker::wake);
        }
        let stage = mem::replace(&mut state.stage, Stage::Abandoned);
        let is_current = shard.get(&self.in_flight.key).is_some_and(|current| Arc::ptr_eq(current, &self.in_flight));
        let removed = is_current.then(|| shard.remove_entry(&self.in_flight.key));
        drop((state, shard));
        drop((own, stage, removed));
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    type Numbers = Arc<SingleFlight<u32, u32>>;

    fn poll(joined: &mut Joined<u32, u32>) -> Poll<u32> {
        Pin::new(joined).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn all_waiters_get_the_result_of_one_computation() {
        let single_flight: Numbers = SingleFlight::new();
        let begun = AtomicU32::new(0);
        let join = || {
            let begin = || -> Computation<u32> {
                begun.fetch_add(1, Relaxed);
                Box::pin(async { 7 })
            };
            single_flight.join(1, begin)
        };
        let ((mut first, was_in_flight), (mut second, joined_another)) = (join(), join());
        assert!(!was_in_flight && joined_another);
        assert_eq!((poll(&mut second), poll(&mut first)), (Poll::Ready(7), Poll::Ready(7)));
        drop((first, second));
        assert_eq!((poll(&mut join().0), begun.load(Relaxed)), (Poll::Ready(7), 2), "no cache");
        assert!(single_flight.shards.iter().all(|shard| shard.lock().is_empty()));
    }

    #[test]
    fn no_lock_is_held_while_it_is_polled_and_no_wake_up_is_lost() {
        let single_flight: Numbers = SingleFlight::new();
        let other: Arc<Mutex<Option<Joined<u32, u32>>>> = Arc::default();
        let slot = Arc::clone(&other);
        let own = Arc::clone(&single_flight);
        let (mut first, _) = single_flight.join(1, || {
            let mut polls = 0;
            Box::pin(poll_fn(move |cx| {
                polls += 1;
                // Another loop joins, polls and leaves meanwhile, and the awaited event happens.
                let (mut third, _) = own.join(1, || unreachable!("it is in flight"));
                assert!(poll(&mut third).is_pending());
                drop((slot.lock().take(), third));
                cx.waker().wake_by_ref();
                if polls == 3 { Poll::Ready(polls) } else { Poll::Pending }
            }))
        });
        *other.lock() = Some(single_flight.join(1, || unreachable!("it is in flight")).0);
        assert_eq!(poll(&mut first), Poll::Ready(3));
    }

    #[test]
    fn last_waiter_that_leaves_drops_the_computation() {
        let single_flight: Numbers = SingleFlight::new();
        let held = Arc::new(());
        let join = || {
            let held = Arc::clone(&held);
            let begin = || -> Computation<u32> {
                Box::pin(async move {
                    std::future::pending::<()>().await;
                    drop(held);
                    1
                })
            };
            single_flight.join(1, begin).0
        };
        let (mut first, mut second) = (join(), join());
        assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
        drop(first);
        assert_eq!(Arc::strong_count(&held), 2);
        drop(second);
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(single_flight.shards.iter().all(|shard| shard.lock().is_empty()));
    }
}
