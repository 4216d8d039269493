//! The ring itself: set-up with what the kernel has, submission, waiting, and taking completions. Knows no sockets.
//!
//! Each flag that saves work came with its own kernel version; set-up asks for all of them and, when the kernel does not
//! know one (EINVAL), for fewer. What this refuses: kernels that drop completions when the queue is full (before 5.5), that
//! cannot wait with a timeout (before 5.11), have no
//! multishot polls (before 5.13), and, with the set-up, everything that an administrator forbids.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::types::{CancelBuilder, Timespec};
use io_uring::{Builder, EnterFlags, IoUring, cqueue, squeue};

use crate::driver::{RingCounters, RingOptions};

/// Kernel threads per class (bounded, unbounded) that requests may be pushed to. Nothing that is submitted here needs
/// one; should some kernel think otherwise, it must not start a crowd.
const KERNEL_WORKERS_MAX: [u32; 2] = [2, 2];

/// How long the cancellation of everything may take when a ring is closed; operations on sockets end at once.
const CANCEL_ALL_TIMEOUT: Timespec = Timespec::new().sec(1);

/// Calls until cancelled operations have ended: each ends a score of them, and a loop has some thousands at most.
const CANCEL_CALLS_MAX: u32 = 100_000;

/// Calls until everything queued is submitted: one, or a few where an entry in error ends a batch or memory is short.
const SUBMIT_CALLS_MAX: u32 = 10_000;

/// How long the kernel is left to find memory for what is submitted. Nothing else can go on meanwhile, but if it finds none
/// in [`SUBMIT_CALLS_MAX`] times, some ten seconds, the whole process has to end.
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// `IORING_REGISTER_RING_FDS` and `IORING_UNREGISTER_RING_FDS` of io_uring_register(2).
const REGISTER_RING_FDS: libc::c_uint = 20;
const UNREGISTER_RING_FDS: libc::c_uint = 21;

/// What became of one submitted operation.
pub(super) struct Completion {
    pub user_data: u64,
    pub result: i32,
    pub flags: u32,
}

impl From<cqueue::Entry> for Completion {
    fn from(entry: cqueue::Entry) -> Self {
        Completion { user_data: entry.user_data(), result: entry.result(), flags: entry.flags() }
    }
}

pub(super) struct Ring {
    ring: IoUring,
    /// Completions that had to make room.
    stash: Vec<Completion>,
    /// The ring's number in this thread's table, which spares a look-up of its descriptor per call.
    registered: Option<u32>,
    enter_flags: EnterFlags,
    /// The kernel says when it has work that only a call of ours will do.
    tells_of_work: bool,
    /// The kernel can cancel everything and wait for that.
    cancels_at_once: bool,
    pub counters: RingCounters,
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

/// One set of flags, and the kernel that it came with.
struct FlagSet {
    since: (u16, u16),
    flags: fn(&mut Builder) -> &mut Builder,
    /// With them the kernel says when it has work that only a call of ours will do.
    tells_of_work: bool,
}

/// What is tried, best first.
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

impl Ring {
    /// Sets a ring up for the calling thread. Errors: the kernel's; `Unsupported` when it is too old.
    pub fn new(options: &RingOptions) -> io::Result<Ring> {
        let (ring, tells_of_work) = build(options)?;
        let parameters = ring.params();
        // Resource tags came with multishot polls (5.13), of which a kernel does not tell otherwise.
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
            // Without it nothing is worse than a default that nothing uses.
            let _ = ring.submitter().register_iowq_max_workers(&mut KERNEL_WORKERS_MAX.clone());
        }
        let cancels_at_once = options.allows(6, 0);
        let counters = RingCounters::default();
        let stash = Vec::new();
        let mut ring = Ring { ring, stash, registered: None, enter_flags, tells_of_work, cancels_at_once, counters };
        if options.allows(5, 18) {
            ring.registered = ring.register_descriptor();
        }
        Ok(ring)
    }

    /// `None` before 5.18, or when the thread has 16 rings already.
    fn register_descriptor(&self) -> Option<u32> {
        let mut update = Update { offset: u32::MAX, reserved: 0, data: self.ring.as_raw_fd() as u64 };
        // SAFETY: the argument is one valid `io_uring_rsrc_update`, as the operation demands, and outlives the call.
        let registered = unsafe {
            libc::syscall(libc::SYS_io_uring_register, self.ring.as_raw_fd(), REGISTER_RING_FDS, &raw mut update, 1)
        };
        (registered == 1).then_some(update.offset)
    }

    /// Whether the kernel does its part in calls of ours alone (6.1): asked for together with the single issuer.
    pub fn is_deferred(&self) -> bool {
        self.ring.params().is_setup_single_issuer()
    }

    /// Whether the kernel can keep silent about what went well (5.17).
    pub fn can_skip_success(&self) -> bool {
        self.ring.params().is_feature_skip_cqe_on_success()
    }

    pub fn submitter(&self) -> io_uring::Submitter<'_> {
        self.ring.submitter()
    }

    /// Queues an operation for the next `enter`; a full queue is submitted first.
    ///
    /// # Safety
    ///
    /// The descriptor and the memory that `entry` names must be what is meant until it is submitted, and memory that the
    /// kernel reads or writes later must stay in place until its completion.
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        self.counters.operations += 1;
        // SAFETY: the caller's promise.
        if unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(Some(Duration::ZERO)).unwrap_or_else(|error| panic!("the kernel takes no submissions: {error}"));
            // SAFETY: the caller's promise.
            unsafe { self.ring.submission().push(entry) }.expect("the queue is empty");
        }
    }

    /// Whether a call is needed although nobody wants to wait.
    pub fn has_work(&mut self) -> bool {
        let submission = self.ring.submission();
        !submission.is_empty() || !self.tells_of_work || submission.taskrun() || submission.cq_overflow()
    }

    /// Whether the kernel says that it has more to do when it is called again.
    pub fn has_deferred_work(&mut self) -> bool {
        self.ring.submission().taskrun()
    }

    /// Whether there are completions that did not fit their queue: the next call brings them.
    pub fn has_overflow(&mut self) -> bool {
        self.ring.submission().cq_overflow()
    }

    /// Whether completions can be taken without a call.
    pub fn has_completions(&mut self) -> bool {
        !self.stash.is_empty() || !self.ring.completion().is_empty()
    }

    /// Submits what is queued, lets the kernel do its deferred work, and waits for one completion until `timeout`.
    ///
    /// Errors: the kernel's, also when it does not take all that is queued: a descriptor that an entry names may mean
    /// another socket later, so nothing is left in the queue.
    pub fn enter(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        for _ in 0..SUBMIT_CALLS_MAX {
            // With completions at hand there is nothing to wait for.
            let has_memory = self.call(if self.stash.is_empty() { timeout } else { Some(Duration::ZERO) })?;
            if self.ring.submission().is_empty() {
                return Ok(());
            }
            if !has_memory {
                std::thread::sleep(MEMORY_PAUSE);
            }
            // Some kernels take nothing while completions do not fit their queue.
            let stash = &mut self.stash;
            stash.extend(self.ring.completion().map(Completion::from));
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }

    /// False when the kernel has no memory for what is submitted.
    fn call(&mut self, timeout: Option<Duration>) -> io::Result<bool> {
        let submission = self.ring.submission();
        let to_submit = submission.len();
        self.counters.calls += 1;
        self.counters.overflows += u64::from(submission.cq_overflow());
        drop(submission);
        let is_wait = timeout != Some(Duration::ZERO);
        let timespec = timeout.map(|timeout| {
            // A century is as good as for ever, and fits the kernel's nanoseconds.
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
        // SAFETY: the argument and its timespec have the kernel's layout and outlive the call; what is submitted is valid
        // by the promise of `push`.
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
        if result >= 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // The time is over, a signal, or completions that have to be taken before more is submitted.
            Some(libc::ETIME | libc::EINTR | libc::EBUSY) => Ok(true),
            Some(libc::EAGAIN) => Ok(false),
            _ => Err(error),
        }
    }

    /// Moves at most `max` completions to `into`.
    pub fn take(&mut self, into: &mut Vec<Completion>, max: usize) {
        let stashed = self.stash.len().min(max);
        into.extend(self.stash.drain(..stashed));
        into.extend(self.ring.completion().take(max - stashed).map(Completion::from));
    }

    /// Leaves what came beyond `max` for a later [`Ring::take`], in its order, but for what `is_done` says was seen to.
    pub fn put_back(&mut self, taken: &mut Vec<Completion>, max: usize, is_done: impl Fn(&Completion) -> bool) {
        if taken.len() > max {
            let rest = taken.drain(max..).filter(|completion| !is_done(completion));
            self.stash.splice(..0, rest);
        }
    }

    /// Cancels all operations and waits until the kernel has let go of their memory; false where it cannot tell (before 6.0).
    /// Gives `handle` what completes meanwhile. True says nothing of reads of files: one that a disk is at is neither found
    /// nor waited for, and over when `handle` has had its completion, which may come later.
    pub fn cancel_all(&mut self, handle: impl Fn(&Completion)) -> bool {
        if !self.cancels_at_once {
            return false;
        }
        match self.ring.submitter().register_sync_cancel(Some(CANCEL_ALL_TIMEOUT), CancelBuilder::any()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(_) => return false,
        }
        // Cancelling only announces it: the operations end when the kernel does its deferred work.
        let mut completions = Vec::new();
        for _ in 0..CANCEL_CALLS_MAX {
            let _ = self.enter(Some(Duration::ZERO));
            self.take(&mut completions, usize::MAX);
            completions.drain(..).for_each(|completion| handle(&completion));
            if !self.has_deferred_work() {
                break;
            }
        }
        true
    }
}

impl Drop for Ring {
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

/// The best ring that the kernel gives, and whether it tells of deferred work.
fn build(options: &RingOptions) -> io::Result<(IoUring, bool)> {
    if let Some(errno) = options.refusal {
        return Err(io::Error::from_raw_os_error(errno));
    }
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for set in FLAG_SETS.iter().filter(|set| options.allows(set.since.0, set.since.1)) {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(options.completions);
        match (set.flags)(&mut builder).build(options.submissions) {
            Ok(ring) => return Ok((ring, set.tells_of_work)),
            // A flag that this kernel does not know.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}
