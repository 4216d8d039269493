//! The queues of a simulated ring, as the driver sees them.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

use io_uring::squeue;
use io_uring::types::BufRingEntry;
use rustix::io::Errno;

use super::operation::{Operation, Target, What};
use super::{Buffers, SimulatedRing};
use crate::driver::io_uring::ring::{Completion, Queues};
use crate::simulation::fate::Event;

/// Limit of operations that a call continues, besides those that it accepts; Linux has such a limit since 6.13.
const OPERATIONS_PER_CALL: u64 = 20;

/// Capacity of the submission queue.
const ENTRIES_MAX: usize = 64;

/// Limit of calls without a doorbell: it is armed again when a turn ends, and a turn has several calls.
const CALLS_WITHOUT_DOORBELL_MAX: u32 = 64;

pub(crate) struct SimulatedQueues {
    ring: Rc<SimulatedRing>,
    /// Entries that were not submitted yet.
    entries: VecDeque<squeue::Entry>,
    /// Number of completions in their queue; later ones have overflowed.
    visible: usize,
    /// Number of lost completions that were reported.
    told_lost: u32,
    /// The previous call had no memory for all entries.
    is_memory_short: bool,
    /// The last call left due work.
    has_more: bool,
    calls_without_doorbell: u32,
}

impl SimulatedQueues {
    pub fn new(ring: Rc<SimulatedRing>) -> Self {
        SimulatedQueues {
            ring,
            entries: VecDeque::new(),
            visible: 0,
            told_lost: 0,
            is_memory_short: false,
            has_more: false,
            calls_without_doorbell: 0,
        }
    }

    /// Accepts the queued entries, as far as there is memory.
    fn submit(&mut self) -> io::Result<()> {
        let fate = &self.ring.world.fate;
        let queued = self.entries.len();
        let mut taken = queued;
        if queued > 0 && std::mem::take(&mut self.is_memory_short) {
            taken = 0;
        } else if queued > 0 && fate.strikes(|faults| faults.ring_memory) {
            taken = fate.random.below(queued as u64) as usize;
            self.is_memory_short = taken > 0;
        }
        if taken < queued {
            self.ring.count(|faults| &mut faults.refused);
        }
        for entry in self.entries.drain(..taken) {
            self.ring.submit(&entry);
        }
        if taken == 0 && queued > 0 { Err(Errno::AGAIN.into()) } else { Ok(()) }
    }

    /// Handles some of the due events.
    fn make_happen(&mut self) {
        let fate = &self.ring.world.fate;
        let before = fate.planned();
        let operations_max = 1 + fate.random.below(OPERATIONS_PER_CALL);
        let mut operations = 0;
        self.has_more = false;
        while let Some(event) = fate.take_due(before) {
            match self.ring.world.handle(event) {
                Some(Event::Operation(number)) => {
                    self.ring.come_to(number);
                    operations += 1;
                }
                Some(Event::Ready { slot, .. }) => {
                    self.ring.tell(Target::End(slot));
                    operations += 1;
                }
                Some(Event::ListenerReady { slot }) => self.ring.tell(Target::Listener(slot)),
                _ => {}
            }
            if operations == operations_max {
                self.has_more = fate.next_event().is_some_and(|nanos| nanos <= fate.now());
                break;
            }
        }
        if self.has_more {
            self.ring.count(|faults| &mut faults.calls_cut_short);
        }
    }

    /// Panics if the driver had the chance to arm its doorbell and did not.
    fn look_for_doorbell(&mut self) {
        let has_doorbell = self.ring.operations.borrow().values().any(|operation| operation.target == Target::Doorbell);
        let is_refused = self.ring.world.fate.faults().ring_memory > 0;
        // A loop that has failed receives no calls any more.
        let is_excused = is_refused || std::thread::panicking();
        self.calls_without_doorbell = if has_doorbell || is_excused { 0 } else { self.calls_without_doorbell + 1 };
        assert!(
            self.calls_without_doorbell <= CALLS_WITHOUT_DOORBELL_MAX,
            "no receive for calls of other threads is in flight"
        );
    }
}

impl Queues for SimulatedQueues {
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        let has_room = self.entries.len() < ENTRIES_MAX;
        if has_room {
            self.entries.push_back(entry.clone());
        }
        has_room
    }

    fn queued(&mut self) -> usize {
        self.entries.len()
    }

    fn withdraw(&mut self) {
        self.entries.clear();
    }

    fn call(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let has_queued = !self.entries.is_empty();
        let submitted = self.submit();
        self.look_for_doorbell();
        self.ring.world.fate.begin_turn();
        if submitted.is_ok() && self.entries.is_empty() {
            self.make_happen();
        }
        self.ring.world.ring_buffers_taken.set(self.ring.buffers_taken());
        let length = self.ring.completions.borrow().len();
        // The entries just submitted may have planned events.
        let can_go_on = length > 0 || submitted.is_err() || self.ring.world.fate.next_event().is_some();
        assert!(
            timeout.is_some() || can_go_on,
            "the simulated world stands still: tasks wait, and nothing will ever happen"
        );
        self.visible = length.min(self.ring.completions_max);
        if self.visible < length {
            self.ring.count(|faults| &mut faults.overflows);
        }
        // A later call reports lost completions if entries were submitted or the caller does not wait.
        if !has_queued && timeout != Some(Duration::ZERO) && self.told_lost != self.ring.lost.get() {
            self.told_lost = self.ring.lost.get();
            return Err(Errno::BADR.into());
        }
        submitted
    }

    fn take(&mut self, into: &mut Vec<Completion>, max: usize) {
        let count = self.visible.min(max);
        self.visible -= count;
        into.extend(self.ring.completions.borrow_mut().drain(..count));
    }

    fn has_completions(&mut self) -> bool {
        self.visible > 0
    }

    fn needs_call(&mut self) -> bool {
        true
    }

    fn has_deferred_work(&mut self) -> bool {
        self.has_more
    }

    fn has_overflow(&mut self) -> bool {
        self.ring.completions.borrow().len() > self.visible
    }

    fn lost(&mut self) -> u32 {
        self.ring.lost.get()
    }

    fn cancel_all(&mut self) -> io::Result<()> {
        let operations = std::mem::take(&mut *self.ring.operations.borrow_mut());
        // A file read that has reached the disk is not found.
        let stays = |operation: &Operation| match operation.what {
            What::Read { .. } => true,
            What::Receive { .. } | What::Send { .. } => self.ring.world.fate.strikes(|faults| faults.ring_workers),
            What::Poll { .. } => false,
        };
        let (staying, found): (BTreeMap<_, _>, BTreeMap<_, _>) =
            operations.into_iter().partition(|(_, operation)| stays(operation));
        *self.ring.operations.borrow_mut() = staying;
        for operation in found.into_values() {
            self.ring.complete(operation.cancelled());
            self.ring.let_go(operation.target);
        }
        Ok(())
    }

    fn has_operation(&mut self, user_data: u64) -> bool {
        self.ring.operations.borrow().values().any(|operation| operation.user_data == user_data)
    }

    unsafe fn register_buffers(&mut self, entries: NonNull<BufRingEntry>, count: u16, _group: u16) -> io::Result<()> {
        self.ring.buffers.set(Some(Buffers { entries, count, head: 0 }));
        Ok(())
    }

    fn unregister_buffers(&mut self, _group: u16) -> io::Result<()> {
        self.ring.buffers.set(None);
        Ok(())
    }

    fn next_event(&self) -> Option<u64> {
        self.ring.world.fate.next_event()
    }
}

impl Drop for SimulatedQueues {
    fn drop(&mut self) {
        // The memory is freed with the driver.
        self.ring.buffers.set(None);
        self.ring.operations.borrow_mut().clear();
    }
}
