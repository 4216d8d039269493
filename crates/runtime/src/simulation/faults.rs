//! Faults of a simulated world and their frequency.
//!
//! Every fault is permitted behaviour of a correct kernel, network or disk. Chances are per mille.

use std::time::Duration;

use super::random::Random;

/// The faults of one world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// A receive returns less than has arrived.
    pub short_reads: u16,
    /// A send takes less than there is room for, or a write to a file does.
    pub short_writes: u16,
    /// An operation that could succeed returns EAGAIN; a wake-up follows.
    pub would_block: u16,
    /// A waiting task is woken without an event.
    pub spurious_wakes: u16,
    /// Events and completions are late, and so in another order.
    pub late_events: u16,
    /// Maximum delay of late events.
    pub late_max: Duration,
    /// Receives and sends are submitted to the kernel and complete later, as with io_uring, instead of being tried when
    /// the socket is ready, as with epoll.
    pub completions: u16,
    /// The network breaks a connection at some time: both ends are reset.
    pub cuts: u16,
    /// Maximum time from the connection's start to its break.
    pub cut_within: Duration,
    /// Connecting fails: refused, unreachable or timed out.
    pub connect_failures: u16,
    /// Accepting fails because there are no descriptors left (EMFILE, ENFILE).
    pub accept_failures: u16,
    /// A connection is aborted before it is accepted (ECONNABORTED).
    pub accept_aborts: u16,
    /// Maximum delay of sent data.
    pub latency_max: Duration,
    /// Sent data arrives in several pieces.
    pub segments: u16,
    /// Connections have a small window: from a few hundred bytes to some KiB.
    pub small_windows: u16,
    /// A datagram is lost.
    pub datagram_losses: u16,
    /// A datagram arrives twice.
    pub datagram_copies: u16,
    /// A file operation does not find its data in memory, so that a pool has to do it.
    pub cold_files: u16,
    /// A check of a file in memory, or a `sendfile`, waits for the disk after all.
    pub slow_calls: u16,
    /// A write to a file fails because the disk is full (ENOSPC).
    pub disk_full: u16,
    /// Maximum time of a pool task.
    pub task_max: Duration,
    /// A pool refuses a task as if its queue was full.
    pub pool_refusals: u16,
    /// A receive on a ring finds no buffer (ENOBUFS).
    pub ring_buffers: u16,
    /// A multishot operation of a ring ends with a completion.
    pub ring_ends: u16,
    /// A cancellation does not find its operation (ENOENT), which is between two attempts.
    pub ring_misses: u16,
    /// The kernel has no memory for some of the entries submitted to a ring (EAGAIN).
    pub ring_memory: u16,
    /// The kernel has no memory to keep a completion that does not fit its queue.
    pub ring_losses: u16,
    /// A kernel thread is running a receive or a send when all operations of a ring are cancelled.
    pub ring_workers: u16,
    /// The kernel has no memory for a direct send beside a ring (ENOBUFS, ENOMEM).
    pub ring_direct_sends: u16,
}

impl Faults {
    /// Nothing goes wrong: everything takes a short, constant time.
    pub const NONE: Faults = Faults {
        short_reads: 0,
        short_writes: 0,
        would_block: 0,
        spurious_wakes: 0,
        late_events: 0,
        late_max: Duration::ZERO,
        completions: 0,
        cuts: 0,
        cut_within: Duration::ZERO,
        connect_failures: 0,
        accept_failures: 0,
        accept_aborts: 0,
        latency_max: Duration::ZERO,
        segments: 0,
        small_windows: 0,
        datagram_losses: 0,
        datagram_copies: 0,
        cold_files: 0,
        slow_calls: 0,
        disk_full: 0,
        task_max: Duration::ZERO,
        pool_refusals: 0,
        ring_buffers: 0,
        ring_ends: 0,
        ring_misses: 0,
        ring_memory: 0,
        ring_losses: 0,
        ring_workers: 0,
        ring_direct_sends: 0,
    };

    /// For each kind of fault the seed chooses whether it is off, rare or frequent: most bugs need one that is
    /// frequent, and others that do not hide it. These do not occur unless a test sets them: broken connections, lost
    /// or duplicated datagrams, refusals of pools, full disks, and rings without memory.
    pub fn swarm(random: &Random) -> Faults {
        let chance = || *random.pick(&[0, 0, 20, 200, 600]);
        // A separate sequence, so that the choices for rings do not change worlds without a ring.
        let ring = Random::new(!random.clone().next());
        let ring_chance = || *ring.pick(&[0, 0, 20, 200, 600]);
        let time = |choices: &[u64]| Duration::from_micros(*random.pick(choices));
        Faults {
            short_reads: chance(),
            short_writes: chance(),
            would_block: chance(),
            spurious_wakes: chance(),
            late_events: chance(),
            late_max: time(&[10, 1_000, 50_000]),
            completions: *random.pick(&[0, 500, 1000]),
            connect_failures: 0,
            accept_failures: chance() / 4,
            accept_aborts: 0,
            latency_max: time(&[0, 100, 5_000, 80_000]),
            segments: chance(),
            small_windows: chance(),
            cold_files: chance(),
            slow_calls: chance(),
            task_max: time(&[10, 2_000, 300_000]),
            ring_buffers: ring_chance(),
            ring_ends: ring_chance(),
            ring_misses: ring_chance(),
            ..Faults::NONE
        }
    }
}
