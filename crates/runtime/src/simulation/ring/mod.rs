//! The kernel's side of an io_uring in a simulated world: it accepts the driver's entries, uses the memory that they
//! name when it carries them out, and completes them like a kernel: late, in another order, in part, or not at all if
//! there are no buffers or no memory.
//!
//! It keeps the kernel's promises: completions of a multishot operation come in order; an operation holds its socket,
//! so a closed connection ends with the last of them; sends that must not wait are carried out when they are accepted;
//! a call does a bounded part of the due work and reports that there is more.
//!
//! It panics if the driver breaks its rules: names a descriptor that is not open, or waits without a doorbell for calls
//! from other threads.

mod operation;
mod queues;
mod sockets;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use io_uring::types::BufRingEntry;
use io_uring::{opcode, squeue};
use rustix::io::Errno;

use self::operation::{Bytes, Entry, Operation, Step, Target, What};
use self::queues::SimulatedQueues;
use self::sockets::SimulatedSockets;
use crate::driver::io_uring::Kernel;
use crate::driver::io_uring::ring::Completion;
use crate::executor::slots::Key;
use crate::simulation::World;
use crate::simulation::fate::Event;
use crate::simulation::network::Named;

/// Limit of failed cancellations of an operation.
const MISSES_MAX: u8 = 3;

// Flags of operations (io_uring_enter(2)) and completions.
const BUFFER_SELECT: u8 = 1 << 5;
const SKIP_SUCCESS: u8 = 1 << 6;
const POLL_MULTI: u32 = 1;
const RECEIVE_MULTI: u16 = 2;
const HAS_BUFFER: u32 = 1;
const MORE: u32 = 1 << 1;
const SOCKET_NOT_EMPTY: u32 = 1 << 2;

pub(crate) struct SimulatedKernel;

impl Kernel for SimulatedKernel {
    type Queues = SimulatedQueues;
    type Sockets = SimulatedSockets;
}

impl SimulatedKernel {
    /// A ring that shows at most `completions_max` completions at once, and the socket calls beside it.
    pub fn ring(world: &Rc<World>, completions_max: u32) -> (SimulatedQueues, SimulatedSockets) {
        let ring = Rc::new(SimulatedRing {
            world: Rc::clone(world),
            operations: RefCell::default(),
            begun: Cell::new(0),
            completions: RefCell::default(),
            completions_max: completions_max as usize,
            lost: Cell::new(0),
            held: RefCell::default(),
            buffers: Cell::new(None),
        });
        (SimulatedQueues::new(Rc::clone(&ring)), SimulatedSockets::new(ring))
    }
}

/// Counters of the faults of a simulated ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingFaults {
    /// Calls that have refused all or some entries because there was no memory (EAGAIN).
    pub refused: u64,
    /// Direct sends that failed because there was no memory (ENOBUFS, ENOMEM).
    pub sends_refused: u64,
    /// Receives that found no buffer (ENOBUFS), by chance or because all were in use.
    pub buffers_missed: u64,
    /// Multishot receives that ended with data.
    pub receives_ended: u64,
    /// Doorbells that ended.
    pub doorbells_ended: u64,
    /// Cancellations that did not find their operation (ENOENT).
    pub cancellations_missed: u64,
    /// Operations that were cancelled (ECANCELED).
    pub cancelled: u64,
    /// Sends that ended short.
    pub sends_shortened: u64,
    /// Fire-and-forget sends that a full socket did not take, or only in part.
    pub fire_and_forget_sends_failed: u64,
    /// Operations that were carried out late.
    pub late: u64,
    /// Polls that reported an event that was not there.
    pub polls_in_vain: u64,
    /// Calls that left due work.
    pub calls_cut_short: u64,
    /// Calls with more completions than their queue holds.
    pub overflows: u64,
    /// Completions that were not kept.
    pub lost: u64,
    /// Sockets that were closed while operations held them.
    pub closed_in_use: u64,
}

/// State shared by the queues and the socket calls of a world.
pub(crate) struct SimulatedRing {
    pub world: Rc<World>,
    /// Operations in flight, by number.
    operations: RefCell<BTreeMap<u64, Operation>>,
    begun: Cell<u64>,
    completions: RefCell<VecDeque<Completion>>,
    /// Number of completions that fit their queue.
    completions_max: usize,
    /// Number of completions that did not fit and were lost.
    lost: Cell<u32>,
    /// Ends whose descriptor was closed while operations hold them. (The open file keeps the inode from being reused.)
    held: RefCell<Vec<(Key, OwnedFd)>>,
    buffers: Cell<Option<Buffers>>,
}

#[derive(Clone, Copy)]
struct Buffers {
    entries: NonNull<BufRingEntry>,
    count: u16,
    head: u16,
}

impl Buffers {
    fn tail(self) -> u16 {
        // SAFETY: the entries exist, by the contract of `register_buffers`.
        let tail = unsafe { BufRingEntry::tail(self.entries.as_ptr()) };
        // SAFETY: it is shared with the driver, which writes it atomically.
        unsafe { AtomicU16::from_ptr(tail.cast_mut()) }.load(Ordering::Acquire)
    }
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

struct Buffer {
    number: u16,
    address: u64,
    length: usize,
}

/// Memory that the driver has lent to the kernel.
///
/// # Safety
///
/// It exists, and there are no other references to it, for as long as the result is in use.
unsafe fn slice_at<'m>(address: u64, length: usize) -> &'m mut [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) }
}

impl SimulatedRing {
    fn count(&self, counter: impl FnOnce(&mut RingFaults) -> &mut u64) {
        let mut faults = self.world.ring_faults.get();
        *counter(&mut faults) += 1;
        self.world.ring_faults.set(faults);
    }

    fn complete(&self, completion: Completion) {
        // User data contains numbers of descriptors and slots, so the seed determines those too.
        self.world.fate.note("completes", completion.user_data, completion.result.unsigned_abs() as usize);
        // A completion after which the operation goes on is never lost.
        let is_last = completion.flags & MORE == 0;
        let does_not_fit = self.completions.borrow().len() >= self.completions_max;
        if is_last && does_not_fit && self.world.fate.strikes(|faults| faults.ring_losses) {
            self.lost.set(self.lost.get() + 1);
            return self.count(|faults| &mut faults.lost);
        }
        self.completions.borrow_mut().push_back(completion);
    }

    /// Accepts an entry, as the kernel does when it is submitted.
    fn submit(&self, entry: &squeue::Entry) {
        let entry = Entry::parse(entry);
        match entry.opcode {
            opcode::AsyncCancel::CODE => self.cancel(&entry),
            opcode::Close::CODE => {
                self.target(entry.descriptor);
                // SAFETY: the entry gives the descriptor to the kernel, which is simulated here.
                self.close(unsafe { OwnedFd::from_raw_fd(entry.descriptor) });
            }
            _ => self.begin(&entry),
        }
    }

    /// The current meaning of a descriptor.
    fn target(&self, descriptor: RawFd) -> Target {
        // SAFETY: it is not closed during this call; the next line checks that it is open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        assert!(rustix::io::fcntl_getfd(descriptor).is_ok(), "an entry names a descriptor that is not open");
        match self.world.find_named(descriptor) {
            Some(Named::End(end)) => Target::End(end),
            Some(Named::Listener(listener)) => Target::Listener(listener),
            None => Target::Doorbell,
        }
    }

    fn begin(&self, entry: &Entry) {
        let fate = &self.world.fate;
        let mut target = self.target(entry.descriptor);
        let is_whole = entry.operation_flags & libc::MSG_WAITALL as u32 != 0;
        // SAFETY: the bytes that the entry names exist, by the contract of `push`.
        let send = |bytes: Bytes| What::Send { bytes, hash: hash(&unsafe { bytes.gather() }), sent: 0, is_whole };
        let what = match entry.opcode {
            opcode::PollAdd::CODE => {
                let is_doorbell = target == Target::Doorbell;
                assert_eq!(
                    is_doorbell,
                    entry.length & POLL_MULTI != 0,
                    "only the doorbell is polled for more than once"
                );
                What::Poll { events: entry.operation_flags }
            }
            opcode::Recv::CODE => {
                assert_ne!(entry.flags & BUFFER_SELECT, 0, "a receive takes provided buffers");
                let is_multi = entry.priority & RECEIVE_MULTI != 0;
                let limit = if entry.optional_length == 0 { usize::MAX } else { entry.optional_length as usize };
                let length = if entry.length == 0 { usize::MAX } else { entry.length as usize };
                What::Receive { length, left: is_multi.then_some(limit) }
            }
            opcode::Send::CODE => send(Bytes::Slice(entry.address, entry.length as usize)),
            opcode::SendMsg::CODE => send(Bytes::Message(entry.address)),
            opcode::Read::CODE => {
                target = Target::File(entry.descriptor);
                What::Read { memory: (entry.address, entry.length as usize), offset: entry.offset }
            }
            other => panic!("the driver has no operation {other}"),
        };
        let mut operation = Operation { user_data: entry.user_data, target, what, misses: 0 };
        if entry.operation_flags & libc::MSG_DONTWAIT as u32 != 0 && matches!(what, What::Send { .. }) {
            return self.send_at_once(&mut operation, entry.flags & SKIP_SUCCESS != 0);
        }
        assert_eq!(entry.flags & SKIP_SUCCESS, 0, "only operations that cannot wait skip their completion");
        let number = self.begun.replace(self.begun.get() + 1);
        match target {
            Target::End(end) => self.world.network.borrow_mut().attach(end, end),
            Target::Listener(listener) => self.world.network.borrow_mut().attach_listener(listener, listener),
            Target::Doorbell | Target::File(_) => {}
        }
        self.operations.borrow_mut().insert(number, operation);
        // In most cases a send leaves with the call that submits it.
        if matches!(what, What::Send { .. }) && !fate.strikes(|faults| faults.late_events) {
            return self.come_to(number);
        }
        if target != Target::Doorbell {
            self.plan(number);
        } else if fate.strikes(|faults| faults.ring_ends) {
            fate.plan(fate.within(fate.faults().late_max), Event::Operation(number));
        }
    }

    /// Plans the next step of an operation, sooner or later.
    fn plan(&self, number: u64) {
        let fate = &self.world.fate;
        let lateness = fate.lateness();
        if lateness > Duration::ZERO {
            self.count(|faults| &mut faults.late);
        }
        fate.plan(lateness, Event::Operation(number));
    }

    fn send_at_once(&self, operation: &mut Operation, is_silent: bool) {
        let step = self.step_of_send(operation);
        match step {
            Step::Ends(completion) => {
                let What::Send { bytes, sent, .. } = operation.what else { unreachable!("only sends come here") };
                if !is_silent || completion.result < 0 || sent < bytes.length() {
                    self.complete(completion);
                }
            }
            Step::Waits => {
                self.count(|faults| &mut faults.fire_and_forget_sends_failed);
                let What::Send { sent, .. } = operation.what else { unreachable!("only sends come here") };
                let result = if sent > 0 { sent as i32 } else { -libc::EAGAIN };
                self.complete(Completion { user_data: operation.user_data, result, flags: 0 });
            }
            Step::Tells(_) => unreachable!("a send tells once"),
        }
    }

    /// Continues an operation, if it is still in flight.
    fn come_to(&self, number: u64) {
        let Some(mut operation) = self.operations.borrow_mut().remove(&number) else { return };
        let step = match operation.what {
            What::Poll { events } => self.step_of_poll(&operation, events),
            What::Receive { .. } => self.step_of_receive(&mut operation),
            What::Send { .. } => self.step_of_send(&mut operation),
            What::Read { memory, offset } => self.step_of_read(&operation, memory, offset),
        };
        let target = operation.target;
        match step {
            Step::Waits => {
                self.operations.borrow_mut().insert(number, operation);
            }
            Step::Tells(completion) => {
                self.complete(completion);
                self.operations.borrow_mut().insert(number, operation);
                self.plan(number);
            }
            Step::Ends(completion) => {
                self.complete(completion);
                self.let_go(target);
            }
        }
    }

    /// Releases the target of an operation that has ended.
    fn let_go(&self, target: Target) {
        let mut network = self.world.network.borrow_mut();
        match target {
            Target::Listener(listener) => network.detach_listener(listener, listener),
            Target::End(end) if !self.is_in_use(end) => {
                let position = self.held.borrow().iter().position(|(held, _)| *held == end);
                if let Some(position) = position {
                    network.close(&self.world.fate, end);
                    self.held.borrow_mut().swap_remove(position);
                }
            }
            _ => {}
        }
    }

    fn is_in_use(&self, end: Key) -> bool {
        self.operations.borrow().values().any(|operation| operation.target == Target::End(end))
    }

    /// Closes a socket. The connection ends when no operation holds it any more.
    pub fn close(&self, socket: OwnedFd) {
        let Named::End(end) = self.world.named(&socket) else { return };
        if self.is_in_use(end) {
            self.count(|faults| &mut faults.closed_in_use);
            let kept = socket.try_clone().expect("a descriptor");
            self.held.borrow_mut().push((end, kept));
        } else {
            self.world.network.borrow_mut().close(&self.world.fate, end);
        }
    }

    fn cancel(&self, entry: &Entry) {
        let ends = |result| Completion { user_data: entry.user_data, result, flags: 0 };
        let fate = &self.world.fate;
        let found = {
            let operations = self.operations.borrow();
            operations.iter().find(|(_, operation)| operation.user_data == entry.address).map(|(number, _)| *number)
        };
        let Some(number) = found else { return self.complete(ends(-libc::ENOENT)) };
        if let Some(operation) = self.operations.borrow_mut().get_mut(&number)
            && operation.misses < MISSES_MAX
            && fate.strikes(|faults| faults.ring_misses)
        {
            operation.misses += 1;
            self.count(|faults| &mut faults.cancellations_missed);
            return self.complete(ends(-libc::ENOENT));
        }
        let operation = self.operations.borrow_mut().remove(&number).expect("just found");
        self.count(|faults| &mut faults.cancelled);
        let mut both = [operation.cancelled(), ends(0)];
        if fate.random.chance(500) {
            both.reverse();
        }
        both.into_iter().for_each(|completion| self.complete(completion));
        self.let_go(operation.target);
    }

    /// The pending events of a socket among these (poll(2)), and those that are reported unasked.
    pub fn events(&self, end: Key, events: u32) -> u32 {
        let mut network = self.world.network.borrow_mut();
        let mut there = 0;
        let mut add = |is_there: bool, event: i32| there |= if is_there { event as u32 } else { 0 };
        add(network.is_readable(end), libc::POLLIN.into());
        add(network.is_hung_up(end), libc::EPOLLRDHUP);
        add(network.is_writable(end), libc::POLLOUT.into());
        add(network.is_broken(end), libc::POLLHUP.into());
        add(network.was_reset(end), libc::POLLERR.into());
        there & (events | libc::POLLHUP as u32 | libc::POLLERR as u32)
    }

    fn step_of_poll(&self, operation: &Operation, events: u32) -> Step {
        let ends =
            |there: u32| Step::Ends(Completion { user_data: operation.user_data, result: there as i32, flags: 0 });
        match operation.target {
            Target::Doorbell => {
                // There are no rings of the bell in a simulation, so this step means that the poll ends.
                self.count(|faults| &mut faults.doorbells_ended);
                ends(libc::POLLIN as u32)
            }
            Target::Listener(listener) => match self.world.network.borrow_mut().has_queued(listener) {
                true => ends(libc::POLLIN as u32),
                false => Step::Waits,
            },
            Target::End(end) => match self.events(end, events) {
                0 if events & libc::POLLIN as u32 != 0 && self.world.fate.strikes(|faults| faults.spurious_wakes) => {
                    self.count(|faults| &mut faults.polls_in_vain);
                    ends(libc::POLLIN as u32)
                }
                0 => Step::Waits,
                there => ends(there),
            },
            Target::File(_) => unreachable!("files are not polled"),
        }
    }

    fn step_of_receive(&self, operation: &mut Operation) -> Step {
        let (Target::End(end), What::Receive { length, left }) = (operation.target, &mut operation.what) else {
            unreachable!("sockets receive")
        };
        let user_data = operation.user_data;
        let ends = |result| Step::Ends(Completion { user_data, result, flags: 0 });
        let World { fate, network, .. } = &*self.world;
        if !network.borrow_mut().is_readable(end) {
            return Step::Waits;
        }
        let buffer = if fate.strikes(|faults| faults.ring_buffers) { None } else { self.first_buffer() };
        let Some(buffer) = buffer else {
            self.count(|faults| &mut faults.buffers_missed);
            return ends(-libc::ENOBUFS);
        };
        // SAFETY: the memory exists, and belongs to the kernel until the buffer is returned.
        let memory = unsafe { slice_at(buffer.address, buffer.length.min(*length)) };
        let received = network.borrow_mut().receive(fate, end, memory);
        let count = match received {
            Ok(0) => return ends(0),
            Ok(count) => count,
            Err(errno) => return ends(-errno.raw_os_error()),
        };
        self.take_buffer();
        let mut completion =
            Completion { user_data, result: count as i32, flags: HAS_BUFFER | u32::from(buffer.number) << 16 };
        if network.borrow_mut().is_readable(end) {
            completion.flags |= SOCKET_NOT_EMPTY;
        }
        let Some(left) = left else { return Step::Ends(completion) };
        *left = left.saturating_sub(count);
        if *left == 0 || fate.strikes(|faults| faults.ring_ends) {
            self.count(|faults| &mut faults.receives_ended);
            return Step::Ends(completion);
        }
        completion.flags |= MORE;
        Step::Tells(completion)
    }

    /// The next buffer to use.
    fn first_buffer(&self) -> Option<Buffer> {
        let buffers = self.buffers.get()?;
        if buffers.head == buffers.tail() {
            return None;
        }
        let index = usize::from(buffers.head & (buffers.count - 1));
        // SAFETY: within the ring, by the mask; the driver does not touch entries between head and tail.
        let entry = unsafe { &*buffers.entries.as_ptr().add(index) };
        Some(Buffer { number: entry.bid(), address: entry.addr(), length: entry.len() as usize })
    }

    /// Number of buffers that the driver has not returned.
    pub fn buffers_taken(&self) -> usize {
        let Some(buffers) = self.buffers.get() else { return 0 };
        usize::from(buffers.count - buffers.tail().wrapping_sub(buffers.head))
    }

    fn take_buffer(&self) {
        let buffers = self.buffers.get().map(|buffers| Buffers { head: buffers.head.wrapping_add(1), ..buffers });
        self.buffers.set(buffers);
    }

    fn step_of_send(&self, operation: &mut Operation) -> Step {
        let (Target::End(end), What::Send { bytes, hash: submitted, sent, is_whole }) =
            (operation.target, &mut operation.what)
        else {
            unreachable!("sockets send")
        };
        let user_data = operation.user_data;
        let ends = |result| Step::Ends(Completion { user_data, result, flags: 0 });
        let length = bytes.length();
        // SAFETY: the driver keeps the bytes until the completion, by the contract of `push`.
        let all = unsafe { bytes.gather() };
        assert_eq!(hash(&all), *submitted, "bytes have changed while they were being sent");
        loop {
            match self.send(end, std::iter::once(&all[*sent..]), usize::MAX) {
                Err(Errno::AGAIN) => return Step::Waits,
                Err(_) if *sent > 0 => return ends(*sent as i32),
                Err(errno) => return ends(-errno.raw_os_error()),
                Ok(count) => *sent += count,
            }
            if *sent == length {
                return ends(length as i32);
            }
            if !*is_whole {
                self.count(|faults| &mut faults.sends_shortened);
                return ends(*sent as i32);
            }
        }
    }

    /// Sends at most `max` of these bytes and returns their number.
    pub fn send<'b>(&self, end: Key, chunks: impl Iterator<Item = &'b [u8]>, max: usize) -> Result<usize, Errno> {
        let World { fate, network, .. } = &*self.world;
        let mut network = network.borrow_mut();
        let room = network.room(end)?.min(max);
        let mut bytes: Vec<u8> = chunks.flatten().copied().take(room).collect();
        if fate.strikes(|faults| faults.short_writes) {
            bytes.truncate(fate.random.up_to(bytes.len()));
        }
        network.send(fate, end, &bytes);
        Ok(bytes.len())
    }

    fn step_of_read(&self, operation: &Operation, (address, length): (u64, usize), offset: u64) -> Step {
        let Target::File(file) = operation.target else { unreachable!("files are read") };
        // SAFETY: the driver keeps the file open until the completion, by the contract of `push`.
        let file = unsafe { BorrowedFd::borrow_raw(file) };
        let result = match self.world.read_to_send(file, offset, length) {
            Ok(bytes) => {
                // SAFETY: the driver keeps the memory in place until the completion, by the contract of `push`.
                let into = unsafe { slice_at(address, length) };
                into[..bytes.len()].copy_from_slice(&bytes);
                bytes.len() as i32
            }
            Err(errno) => -errno.raw_os_error(),
        };
        Step::Ends(Completion { user_data: operation.user_data, result, flags: 0 })
    }

    /// Continues the operations that wait for an end or a listener.
    fn tell(&self, target: Target) {
        let operations = self.operations.borrow();
        let waiting: Vec<u64> =
            operations.iter().filter(|(_, operation)| operation.target == target).map(|(number, _)| *number).collect();
        drop(operations);
        waiting.into_iter().for_each(|number| self.come_to(number));
    }
}
