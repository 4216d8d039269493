//! The kernel's queues: set-up with the features that the kernel has, and the system calls.
//!
//! Each flag that saves work came with its own kernel version. Set-up asks for all of them, and for fewer if the kernel
//! does not know one (EINVAL). It refuses kernels that drop completions when the queue is full (before 5.5), that
//! cannot wait with a timeout (before 5.11), or that have no multishot polls (before 5.13), and fails where the
//! administrator forbids io_uring.
//!
//! A filter of system calls does not see the operations of a ring. So before its first use a ring is restricted to the
//! driver's operations (`IORING_REGISTER_RESTRICTIONS`); all others fail with EACCES, for good.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::types::{BufRingEntry, CancelBuilder, Timespec};
use io_uring::{Builder, EnterFlags, IoUring, Parameters, cqueue, opcode, squeue};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::ring::{Completion, Queues};
use crate::driver::RingOptions;

/// Limit of kernel threads per class (bounded, unbounded). No operation here needs one; if some kernel disagrees, it
/// must not start many.
const KERNEL_WORKERS_MAX: [u32; 2] = [2, 2];

/// Cancellations do not wait for a kernel thread that is running an operation.
const NO_WAIT: Timespec = Timespec::new();

/// `IORING_REGISTER_RING_FDS` and `IORING_UNREGISTER_RING_FDS` of io_uring_register(2).
const REGISTER_RING_FDS: libc::c_uint = 20;
const UNREGISTER_RING_FDS: libc::c_uint = 21;

/// The operations of the driver.
const OPERATIONS: [u8; 7] = [
    opcode::AsyncCancel::CODE,
    opcode::Close::CODE,
    opcode::PollAdd::CODE,
    opcode::Read::CODE,
    opcode::Recv::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
];

/// Operations of io_uring_register(2): `IORING_REGISTER_IOWQ_MAX_WORKERS`, the ring's own descriptor,
/// `IORING_REGISTER_PBUF_RING`, `IORING_UNREGISTER_PBUF_RING` and `IORING_REGISTER_SYNC_CANCEL`.
const REGISTRATIONS: [u8; 6] = [19, REGISTER_RING_FDS as u8, UNREGISTER_RING_FDS as u8, 22, 23, 24];

pub(crate) struct LinuxQueues {
    ring: IoUring,
    tail: Tail,
    /// Index of the ring in this thread's table, which saves a look-up of its descriptor per call.
    registered: Option<u32>,
    enter_flags: EnterFlags,
    /// The kernel reports deferred work, which only a call of ours will do.
    tells_of_work: bool,
    /// The kernel can cancel everything and wait for the end.
    cancels_at_once: bool,
}

/// `struct io_uring_getevents_arg` of io_uring_enter(2).
#[repr(C)]
struct WaitArgument {
    signal_mask: u64,
    signal_mask_size: u32,
    min_wait_us: u32,
    timespec: u64,
}

/// `struct io_uring_rsrc_update` of io_uring_register(2).
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
}

/// One set of flags, and the kernel version that has it.
struct FlagSet {
    since: (u16, u16),
    flags: fn(&mut Builder) -> &mut Builder,
    /// With them the kernel reports deferred work, which only a call of ours will do.
    tells_of_work: bool,
}

/// The sets to try, best first.
const FLAG_SETS: &[FlagSet] = &[
    FlagSet { since: (6, 6), flags: |builder| deferred(builder).setup_no_sqarray(), tells_of_work: true },
    FlagSet { since: (6, 1), flags: deferred, tells_of_work: true },
    FlagSet {
        since: (5, 19),
        flags: |builder| builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag(),
        tells_of_work: true,
    },
    FlagSet { since: (5, 18), flags: |builder| builder.setup_submit_all(), tells_of_work: false },
    FlagSet { since: (5, 13), flags: |builder| builder, tells_of_work: false },
];

fn deferred(builder: &mut Builder) -> &mut Builder {
    builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all()
}

impl LinuxQueues {
    /// Sets up a ring for the calling thread. Errors: the kernel's; `Unsupported` when it is too old.
    pub fn new(options: &RingOptions) -> io::Result<LinuxQueues> {
        let (ring, tells_of_work) = build(options)?;
        let parameters = ring.params();
        // Resource tags came with multishot polls (5.13), which have no feature flag of their own.
        if !parameters.is_feature_ext_arg()
            || !parameters.is_feature_nodrop()
            || !parameters.is_feature_resource_tagging()
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"));
        }
        let mut enter_flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        if parameters.is_feature_no_iowait() && options.allows(6, 15) {
            // Waiting for a client is idle time, not waiting for a disk.
            enter_flags |= EnterFlags::NO_IOWAIT;
        }
        if options.allows(5, 15) {
            // Failure does no harm: the default limit stays, and nothing needs these threads.
            let _ = ring.submitter().register_iowq_max_workers(&mut KERNEL_WORKERS_MAX.clone());
        }
        let cancels_at_once = options.allows(6, 0);
        let tail = Tail::map(&ring)?;
        let mut queues = LinuxQueues { ring, tail, registered: None, enter_flags, tells_of_work, cancels_at_once };
        if options.allows(5, 18) {
            queues.registered = queues.register_descriptor();
        }
        Ok(queues)
    }

    /// Registers the ring's descriptor. `None` before 5.18, or when the thread has 16 rings already.
    fn register_descriptor(&self) -> Option<u32> {
        let mut update = Update { offset: u32::MAX, reserved: 0, data: self.ring.as_raw_fd() as u64 };
        // SAFETY: the argument is one valid `io_uring_rsrc_update`, as the operation demands, and outlives the call.
        let registered = unsafe {
            libc::syscall(libc::SYS_io_uring_register, self.ring.as_raw_fd(), REGISTER_RING_FDS, &raw mut update, 1)
        };
        (registered == 1).then_some(update.offset)
    }

    /// True if the kernel works only within our calls (6.1): requested together with the single issuer.
    pub fn is_deferred(&self) -> bool {
        self.ring.params().is_setup_single_issuer()
    }

    /// True if successful operations can complete silently (5.17).
    pub fn can_skip_success(&self) -> bool {
        self.ring.params().is_feature_skip_cqe_on_success()
    }
}

impl Queues for LinuxQueues {
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    fn queued(&mut self) -> usize {
        self.ring.submission().len()
    }

    fn withdraw(&mut self) {
        let queued = self.queued();
        self.tail.move_back(queued);
    }

    fn needs_call(&mut self) -> bool {
        let submission = self.ring.submission();
        !submission.is_empty() || !self.tells_of_work || submission.taskrun() || submission.cq_overflow()
    }

    fn has_deferred_work(&mut self) -> bool {
        self.ring.submission().taskrun()
    }

    fn has_overflow(&mut self) -> bool {
        self.ring.submission().cq_overflow()
    }

    fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn call(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let to_submit = self.queued();
        let is_wait = timeout != Some(Duration::ZERO);
        let timespec = timeout.map(|timeout| {
            // A century is as good as no timeout, and fits the kernel's nanoseconds.
            let timeout = timeout.min(Duration::from_secs(100 * 365 * 86_400));
            Timespec::from(timeout)
        });
        let argument = WaitArgument {
            signal_mask: 0,
            signal_mask_size: 0,
            min_wait_us: 0,
            timespec: timespec.as_ref().map_or(0, |timespec| std::ptr::from_ref(timespec) as u64),
        };
        let (descriptor, flags) = match self.registered {
            Some(index) => (index as i32, self.enter_flags | EnterFlags::REGISTERED_RING),
            None => (self.ring.as_raw_fd(), self.enter_flags),
        };
        // SAFETY: the argument and its timespec have the kernel's layout and outlive the call; the submitted entries
        // are valid by the contract of `push`.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                descriptor,
                to_submit as libc::c_uint,
                libc::c_uint::from(is_wait),
                flags.bits(),
                &raw const argument,
                size_of::<WaitArgument>(),
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn take(&mut self, into: &mut Vec<Completion>, max: usize) {
        into.extend(self.ring.completion().take(max).map(Completion::from));
    }

    fn lost(&mut self) -> u32 {
        self.ring.completion().overflow()
    }

    fn cancel_all(&mut self) -> io::Result<()> {
        if !self.cancels_at_once {
            return Err(io::ErrorKind::Unsupported.into());
        }
        match self.ring.submitter().register_sync_cancel(Some(NO_WAIT), CancelBuilder::any()) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    fn has_operation(&mut self, user_data: u64) -> bool {
        let cancelled = self.ring.submitter().register_sync_cancel(Some(NO_WAIT), CancelBuilder::user_data(user_data));
        !cancelled.is_err_and(|error| error.raw_os_error() == Some(libc::ENOENT))
    }

    unsafe fn register_buffers(&mut self, entries: NonNull<BufRingEntry>, count: u16, group: u16) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.ring.submitter().register_buf_ring_with_flags(entries.as_ptr() as u64, count, group, 0) }
    }

    fn unregister_buffers(&mut self, group: u16) -> io::Result<()> {
        self.ring.submitter().unregister_buf_ring(group)
    }
}

impl From<cqueue::Entry> for Completion {
    fn from(entry: cqueue::Entry) -> Self {
        Completion { user_data: entry.user_data(), result: entry.result(), flags: entry.flags() }
    }
}

impl Drop for LinuxQueues {
    fn drop(&mut self) {
        // The thread's table would keep the ring alive after its descriptor is closed.
        if let Some(index) = self.registered {
            let mut update = Update { offset: index, reserved: 0, data: 0 };
            // SAFETY: the argument is one valid `io_uring_rsrc_update` and outlives the call.
            unsafe {
                libc::syscall(
                    libc::SYS_io_uring_register,
                    self.ring.as_raw_fd(),
                    UNREGISTER_RING_FDS,
                    &raw mut update,
                    1,
                )
            };
        }
    }
}

/// The tail of the submission queue, mapped a second time: the library can only move it forward.
///
/// The kernel reads it only in our calls (there is no polling thread), so until the next call it can be moved back over
/// entries that were not accepted.
struct Tail {
    page: NonNull<libc::c_void>,
    tail: NonNull<AtomicU32>,
}

/// The queue's heads and tails lie in the first bytes of the mapping.
const TAIL_PAGE: usize = 4096;

/// `IORING_OFF_SQ_RING`.
const QUEUES_OFFSET: u64 = 0;

/// Index, in 32-bit words, of `sq_off.tail` in `struct io_uring_params`: the offset of the tail.
const TAIL_OFFSET_WORD: usize = 11;

impl Tail {
    fn map(ring: &IoUring) -> io::Result<Tail> {
        // SAFETY: `Parameters` is a transparent `struct io_uring_params`, which has 30 words for which every value is
        // valid.
        let words = unsafe { &*ptr::from_ref::<Parameters>(ring.params()).cast::<[u32; 30]>() };
        let offset = words[TAIL_OFFSET_WORD] as usize;
        if offset + size_of::<AtomicU32>() > TAIL_PAGE {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the submission queue's tail is not where it was"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the ring's descriptor is open for the call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let page =
            unsafe { mmap(ptr::null_mut(), TAIL_PAGE, protection, MapFlags::SHARED, descriptor, QUEUES_OFFSET) }?;
        let page = NonNull::new(page).expect("a mapping is never at the null address");
        // SAFETY: the offset is within the page, by the check above.
        Ok(Tail { page, tail: unsafe { page.byte_add(offset) }.cast() })
    }

    fn move_back(&self, entries: usize) {
        // SAFETY: the word is within the mapping, which lives as long as `self`, and is aligned, as the kernel placed
        // it.
        let tail = unsafe { self.tail.as_ref() };
        tail.store(tail.load(Ordering::Relaxed).wrapping_sub(entries as u32), Ordering::Release);
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; there are no references to it.
        let _ = unsafe { munmap(self.page.as_ptr(), TAIL_PAGE) };
    }
}

/// Sets up the best ring that the kernel offers; also returns whether it reports deferred work.
fn build(options: &RingOptions) -> io::Result<(IoUring, bool)> {
    if let Some(errno) = options.refusal {
        return Err(io::Error::from_raw_os_error(errno));
    }
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for set in FLAG_SETS.iter().filter(|set| options.allows(set.since.0, set.since.1)) {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(options.completions);
        if options.is_restricted {
            builder.setup_r_disabled();
        }
        match (set.flags)(&mut builder).build(options.submissions) {
            Ok(ring) if options.is_restricted => return restrict(ring).map(|ring| (ring, set.tells_of_work)),
            Ok(ring) => return Ok((ring, set.tells_of_work)),
            // This kernel does not know one of the flags.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Restricts a new, disabled ring to the driver's operations, and enables it for the calling thread.
fn restrict(ring: IoUring) -> io::Result<IoUring> {
    let operations = OPERATIONS.iter().map(|&operation| Restriction::sqe_op(operation));
    let registrations = REGISTRATIONS.iter().map(|&operation| Restriction::register_op(operation));
    let flags = squeue::Flags::BUFFER_SELECT | squeue::Flags::SKIP_SUCCESS;
    let mut all: Vec<Restriction> =
        operations.chain(registrations).chain([Restriction::sqe_flags_allowed(flags.bits())]).collect();
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of this operation on a ring with these options.
    fn result_of(options: &RingOptions, entry: &squeue::Entry) -> io::Result<i32> {
        let mut queues = LinuxQueues::new(options)?;
        // SAFETY: the entry names no memory and no descriptor.
        assert!(unsafe { queues.push(entry) });
        queues.call(Some(Duration::from_secs(60)))?;
        let mut completions = Vec::new();
        queues.take(&mut completions, 1);
        Ok(completions[0].result)
    }

    #[test]
    fn restricted_ring_refuses_operations_outside_of_the_driver() {
        let (restricted, free) = (RingOptions::default(), RingOptions { is_restricted: false, ..Default::default() });
        let other = opcode::Nop::new().build();
        match result_of(&restricted, &other) {
            Ok(result) => assert_eq!(result, -libc::EACCES),
            Err(error) => return eprintln!("skipped: no io_uring here: {error}"),
        }
        assert_eq!(result_of(&free, &other).expect("as the other one"), 0);
        let foreign_flag = opcode::AsyncCancel::new(1).build().flags(squeue::Flags::IO_DRAIN);
        assert_eq!(result_of(&restricted, &foreign_flag).expect("a ring"), -libc::EACCES);
        let own = opcode::AsyncCancel::new(1).build();
        assert_eq!(result_of(&restricted, &own).expect("a ring"), -libc::ENOENT);
    }

    #[test]
    fn restricted_ring_refuses_other_registrations() {
        let Ok(queues) = LinuxQueues::new(&RingOptions::default()) else {
            return eprintln!("skipped: no io_uring here");
        };
        let refused = queues.ring.submitter().register_files(&[0]).expect_err("it is not the driver's");
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    }
}
