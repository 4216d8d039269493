//! Spans of one event loop that wait to be sent, in batches. The queue is bounded in batches, spans and bytes; spans
//! beyond that are dropped and counted.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use gale_base::tally::Tally;
use gale_runtime::Notify;
use gale_worker::Worker;

/// Maximum size of a batch's spans, in bytes. Collectors usually accept messages of 4 MiB; one of this size is encoded
/// in a fraction of a millisecond.
const BATCH_BYTES_MAX: usize = 1 << 20;

/// Numbers of exported and dropped spans, for all workers of the process.
pub(crate) static SPANS: Tally<2> = Tally::new();

/// Indices in [`SPANS`].
pub(super) const EXPORTED: usize = 0;
pub(super) const DROPPED: usize = 1;

/// Bounds of the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Spans per batch.
    pub batch_size: usize,
    /// Batches, including the one in flight.
    pub batch_count: usize,
}

#[derive(Debug, Default)]
pub(super) struct Batch {
    pub spans: Vec<Vec<u8>>,
    bytes: usize,
}

/// The queue of one event loop.
#[derive(Default)]
pub(super) struct Queue {
    /// Only the last one may have room.
    batches: RefCell<VecDeque<Batch>>,
    is_sending: Cell<bool>,
    has_filled: Notify,
    dropped: Cell<u64>,
}

impl Queue {
    /// Returns the queue of this event loop.
    pub fn of(worker: &Worker) -> Rc<Queue> {
        worker.with_note(|queue: &mut Rc<Queue>| Rc::clone(queue))
    }

    /// Adds a span, or drops it if there is no room.
    pub fn add(&self, span: Vec<u8>, limits: Limits) {
        let mut batches = self.batches.borrow_mut();
        if !batches.back().is_some_and(|batch| batch.has_room_for(&span, limits)) {
            let count = batches.len() + usize::from(self.is_sending.get());
            if count >= limits.batch_count || span.len() > BATCH_BYTES_MAX {
                return self.count_dropped(1);
            }
            batches.push_back(Batch::default());
        }
        let Some(batch) = batches.back_mut() else { unreachable!("a batch was pushed above") };
        batch.bytes += span.len();
        batch.spans.push(span);
        if batches.len() > 1 || batches.front().is_some_and(|batch| batch.is_full(limits)) {
            self.has_filled.notify_one();
        }
    }

    /// Returns `true` if there is a full batch.
    pub fn has_full(&self, limits: Limits) -> bool {
        let batches = self.batches.borrow();
        batches.len() > 1 || batches.front().is_some_and(|batch| batch.is_full(limits))
    }

    /// Waits for a full batch.
    pub async fn filled(&self, limits: Limits) {
        while !self.has_full(limits) {
            self.has_filled.notified().await;
        }
    }

    /// Takes the oldest batch, full or not. It counts as waiting until [`Queue::sent`].
    pub fn take(&self) -> Option<Batch> {
        let batch = self.batches.borrow_mut().pop_front()?;
        self.is_sending.set(true);
        Some(batch)
    }

    /// Ends the count of the batch that was taken last, whether it was sent or lost.
    pub fn sent(&self) {
        self.is_sending.set(false);
    }

    pub fn clear(&self) {
        let left = std::mem::take(&mut *self.batches.borrow_mut());
        self.count_dropped(left.iter().map(|batch| batch.spans.len()).sum());
    }

    /// Counts spans as dropped.
    pub fn count_dropped(&self, count: usize) {
        self.dropped.set(self.dropped.get() + count as u64);
        SPANS.own().add(DROPPED, count as u64);
    }

    /// Returns the number of dropped spans on this loop.
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }
}

impl Batch {
    fn is_full(&self, limits: Limits) -> bool {
        self.spans.len() >= limits.batch_size
    }

    fn has_room_for(&self, span: &[u8], limits: Limits) -> bool {
        !self.is_full(limits) && self.bytes + span.len() <= BATCH_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { batch_size: 2, batch_count: 2 };

    fn sizes(queue: &Queue, takes_all: bool) -> Vec<usize> {
        let next = || if takes_all || queue.has_full(LIMITS) { queue.take() } else { None };
        std::iter::from_fn(next).map(|batch| batch.spans.len()).collect()
    }

    #[test]
    fn full_batches_go_first_and_the_last_one_when_it_is_time() {
        let queue = Queue::default();
        queue.add(vec![1], LIMITS);
        assert!(sizes(&queue, false).is_empty());
        queue.add(vec![2], LIMITS);
        queue.add(vec![3], LIMITS);
        assert_eq!(sizes(&queue, false), [2]);
        assert_eq!(sizes(&queue, true), [1]);
        assert_eq!(queue.dropped(), 0);
    }

    #[test]
    fn spans_without_room_are_dropped_and_a_batch_in_flight_takes_room() {
        let queue = Queue::default();
        (0..5).for_each(|_| queue.add(vec![1], LIMITS));
        assert_eq!(queue.dropped(), 1);
        assert_eq!(queue.take().unwrap().spans.len(), 2);
        queue.add(vec![1], LIMITS);
        assert_eq!(queue.dropped(), 2);
        queue.sent();
        queue.add(vec![1], LIMITS);
        assert_eq!(queue.dropped(), 2);
        queue.clear();
        assert_eq!(queue.dropped(), 5);
        assert!(sizes(&queue, true).is_empty());
    }

    #[test]
    fn batches_are_bounded_in_bytes() {
        let queue = Queue::default();
        let limits = Limits { batch_size: 10, batch_count: 2 };
        queue.add(vec![0; BATCH_BYTES_MAX + 1], limits);
        assert_eq!(queue.dropped(), 1);
        queue.add(vec![0; BATCH_BYTES_MAX / 2 + 1], limits);
        queue.add(vec![0; BATCH_BYTES_MAX / 2], limits);
        assert!(queue.has_full(limits));
        assert_eq!(queue.take().unwrap().spans.len(), 1);
        assert!(!queue.has_full(limits));
    }
}
