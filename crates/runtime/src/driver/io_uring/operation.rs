//! Operations on sockets, and the user data that identifies them.
//!
//! User data is operation + generation + slot: a completion whose slot was freed is ignored.

use io_uring::opcode;

use super::ring::{Queues, Ring};
use crate::driver::direct::Direction;
use crate::executor::slots::Key;

/// An operation of a connection. At most one of each is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Op {
    /// A poll for something to read.
    Readable = 0,
    /// A receive into provided buffers: one, or with multishot one after another. Never together with `Readable`.
    Recv = 1,
    /// A poll for room to write.
    Writable = 2,
    Send = 3,
    /// A poll for the peer's hang-up.
    HungUp = 4,
    /// The cancellation of `Recv`. It can be wanted, but is never in flight.
    EndRecv = 5,
}

impl Op {
    pub(super) fn direction(self) -> Direction {
        if matches!(self, Op::Readable | Op::Recv) { Direction::Read } else { Direction::Write }
    }

    /// In the order of submission.
    pub(super) const ALL: [Op; 6] = [Op::Readable, Op::Recv, Op::Writable, Op::Send, Op::HungUp, Op::EndRecv];
}

/// User data: slot in the upper half, then 4 bits of kind, then the generation.
const KIND_SHIFT: u32 = crate::executor::slots::GENERATION_BITS;
pub(super) const KIND_LISTENER: u64 = 8;
pub(super) const KIND_INBOX: u64 = 9;
/// The cancellation of an operation that is no [`Op`].
pub(super) const KIND_CANCEL: u64 = 10;
/// The cancellation of a connection's [`Op`].
pub(super) const KIND_CANCEL_OP: u64 = 11;
pub(super) const KIND_FIRE_AND_FORGET_SEND: u64 = 12;
pub(super) const KIND_CLOSE: u64 = 13;
pub(super) const KIND_FILE_READ: u64 = 14;
const _: () = assert!(KIND_SHIFT <= 28 && KIND_FILE_READ < 16);

pub(super) fn user_data(kind: u64, key: Key) -> u64 {
    key.pack() | kind << KIND_SHIFT
}

pub(super) fn kind_and_key(user_data: u64) -> (u64, Key) {
    (user_data >> KIND_SHIFT & 15, Key::unpack(user_data & !(15 << KIND_SHIFT)))
}

/// A set of [`Op`]s.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Ops(u8);

impl Ops {
    pub(super) fn has(self, op: Op) -> bool {
        self.0 & 1 << op as u8 != 0
    }

    pub(super) fn add(&mut self, op: Op) {
        self.0 |= 1 << op as u8;
    }

    pub(super) fn remove(&mut self, op: Op) {
        self.0 &= !(1 << op as u8);
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Queues the cancellation of the operation with this user data.
pub(super) fn push_cancel(ring: &mut Ring<impl Queues>, operation: u64) {
    let (kind, key) = kind_and_key(operation);
    let kind = if kind < Op::ALL.len() as u64 { KIND_CANCEL_OP } else { KIND_CANCEL };
    let cancel = opcode::AsyncCancel::new(operation).build().user_data(user_data(kind, key));
    // SAFETY: a cancellation names neither a descriptor nor memory.
    unsafe { ring.push(&cancel) };
}
