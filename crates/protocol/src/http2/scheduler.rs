//! Scheduling of streams for sending: RFC 9218 §10.
//!
//! Contains only streams that have data ready and an open window, so no stream blocks others while it waits for a disk
//! or a peer. The most urgent streams are sent first. Among equally urgent ones, incremental streams take turns and the
//! others are sent one after the other, oldest first. If there are both kinds they alternate, so that neither starves.
//! Invariant: a stream is scheduled at most once.

use std::collections::VecDeque;

use super::frame::StreamId;
use super::priority::{Priority, URGENCY_MAX};

const LEVELS: usize = URGENCY_MAX as usize + 1;

/// The streams that can send now.
#[derive(Clone, Debug, Default)]
pub struct Scheduler {
    /// Bit set of the levels that have streams.
    occupied: u8,
    /// Allocated when the first stream is added.
    levels: Option<Box<[Level; LEVELS]>>,
}

#[derive(Clone, Debug, Default)]
struct Level {
    /// Sorted by age.
    sequential: VecDeque<StreamId>,
    /// In the order of their turns.
    incremental: VecDeque<StreamId>,
    /// `true` if it is the turn of the incremental streams when there are both kinds.
    is_turn_of_incremental: bool,
}

impl Scheduler {
    /// Creates a scheduler without streams.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if no stream can send.
    pub fn is_empty(&self) -> bool {
        self.occupied == 0
    }

    /// Adds a stream that is not scheduled yet: it has data now, or more data after its turn.
    pub fn push(&mut self, stream: StreamId, priority: Priority) {
        let urgency = priority.urgency.min(URGENCY_MAX);
        let level = &mut self.levels.get_or_insert_default()[urgency as usize];
        debug_assert!(!level.sequential.contains(&stream) && !level.incremental.contains(&stream));
        if priority.incremental {
            level.incremental.push_back(stream);
        } else {
            let place = level.sequential.partition_point(|&other| other < stream);
            level.sequential.insert(place, stream);
        }
        self.occupied |= 1 << urgency;
    }

    /// Removes and returns the stream whose turn it is. If it has more data, the caller adds it again with
    /// [`Scheduler::push`].
    pub fn pop(&mut self) -> Option<StreamId> {
        let urgency = self.occupied.trailing_zeros() as usize;
        let level = self.levels.as_mut()?.get_mut(urgency)?;
        let from_incremental = match (level.sequential.is_empty(), level.incremental.is_empty()) {
            (false, false) => {
                level.is_turn_of_incremental ^= true;
                !level.is_turn_of_incremental
            }
            (is_sequential_empty, _) => is_sequential_empty,
        };
        let queue = if from_incremental { &mut level.incremental } else { &mut level.sequential };
        let stream = queue.pop_front();
        self.note(urgency);
        stream
    }

    /// Removes a stream, if it is scheduled: it was reset, or its window closed.
    pub fn remove(&mut self, stream: StreamId) {
        let Some(levels) = &mut self.levels else { return };
        for urgency in 0..LEVELS {
            if self.occupied >> urgency & 1 == 0 {
                continue;
            }
            let Level { sequential, incremental, .. } = &mut levels[urgency];
            if let Ok(place) = sequential.binary_search(&stream) {
                sequential.remove(place);
            } else if let Some(place) = incremental.iter().position(|&other| other == stream) {
                incremental.remove(place);
            } else {
                continue;
            }
            return self.note(urgency);
        }
    }

    /// Changes the priority of a stream, if it is scheduled.
    pub fn reprioritize(&mut self, stream: StreamId, priority: Priority) {
        let is_in = |level: &Level| level.sequential.contains(&stream) || level.incremental.contains(&stream);
        if self.levels.as_ref().is_some_and(|levels| levels.iter().any(is_in)) {
            self.remove(stream);
            self.push(stream, priority);
        }
    }

    fn note(&mut self, urgency: usize) {
        if let Some(levels) = &self.levels
            && levels[urgency].sequential.is_empty()
            && levels[urgency].incremental.is_empty()
        {
            self.occupied &= !(1 << urgency);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn priority(urgency: u8, incremental: bool) -> Priority {
        Priority { urgency, incremental }
    }

    /// The next turns, if each stream has more data after its turn.
    fn turns(scheduler: &mut Scheduler, priorities: &[(StreamId, Priority)], count: usize) -> Vec<StreamId> {
        let turn = |_| {
            let stream = scheduler.pop().unwrap();
            scheduler.push(stream, priorities.iter().find(|other| other.0 == stream).unwrap().1);
            stream
        };
        (0..count).map(turn).collect()
    }

    fn filled(priorities: &[(StreamId, Priority)]) -> Scheduler {
        let mut scheduler = Scheduler::new();
        priorities.iter().for_each(|&(stream, priority)| scheduler.push(stream, priority));
        scheduler
    }

    #[test]
    fn urgent_streams_go_first() {
        let mut scheduler = filled(&[(1, priority(3, false)), (3, priority(0, true)), (5, priority(7, false))]);
        assert_eq!(
            [scheduler.pop(), scheduler.pop(), scheduler.pop(), scheduler.pop()],
            [Some(3), Some(1), Some(5), None]
        );
        assert!(scheduler.is_empty());
    }

    #[test]
    fn sequential_streams_are_sent_one_after_the_other() {
        let streams = [(5, priority(3, false)), (1, priority(3, false)), (3, priority(3, false))];
        let mut scheduler = filled(&streams);
        assert_eq!(turns(&mut scheduler, &streams, 3), [1, 1, 1]);
        scheduler.remove(1);
        assert_eq!(turns(&mut scheduler, &streams, 2), [3, 3]);
    }

    #[test]
    fn incremental_streams_take_turns() {
        let streams = [(5, priority(3, true)), (1, priority(3, true)), (3, priority(3, true))];
        assert_eq!(turns(&mut filled(&streams), &streams, 6), [5, 1, 3, 5, 1, 3]);
    }

    #[test]
    fn both_kinds_alternate() {
        let streams =
            [(1, priority(3, false)), (3, priority(3, true)), (5, priority(3, true)), (7, priority(3, false))];
        assert_eq!(turns(&mut filled(&streams), &streams, 6), [1, 3, 1, 5, 1, 3]);
    }

    #[test]
    fn a_changed_priority_moves_a_stream_that_is_here() {
        let mut scheduler = filled(&[(1, priority(3, false)), (3, priority(3, true))]);
        scheduler.reprioritize(3, priority(1, true));
        scheduler.reprioritize(9, priority(0, true));
        assert_eq!([scheduler.pop(), scheduler.pop(), scheduler.pop()], [Some(3), Some(1), None]);
        scheduler.remove(1);
    }
}
