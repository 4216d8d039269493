//! The watchdog's view of a loop, besides its turns: its thread, by procfs and the processor's clock, and its listening
//! sockets.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::time::{ClockId, clock_gettime};

use crate::socket::SocketAddress;
use crate::stall::{Sample, ThreadState};

/// A loop as the watchdog sees it, besides its turns.
pub(crate) struct Watched {
    pub worker: usize,
    thread_id: i32,
    processor_clock: Option<libc::clockid_t>,
    /// One for each address of the configuration, and adopted sockets.
    listeners: Mutex<Vec<WatchedListener>>,
}

/// A listening socket that a loop accepts from.
#[derive(Clone)]
pub(crate) struct WatchedListener {
    pub socket: Arc<OwnedFd>,
    /// The local address, if only this loop accepts from it; others may have sockets of their own there.
    pub own_address: Option<SocketAddress>,
}

impl Watched {
    /// For a loop on the calling thread.
    pub fn new(worker: usize) -> Watched {
        Watched {
            worker,
            thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
            processor_clock: processor_clock(),
            listeners: Mutex::new(Vec::new()),
        }
    }

    /// Notes that the loop accepts from a socket, perhaps with new options.
    pub fn note_listener(&self, socket: &Arc<OwnedFd>, own_address: Option<SocketAddress>) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|known| !Arc::ptr_eq(&known.socket, socket));
        listeners.push(WatchedListener { socket: Arc::clone(socket), own_address });
    }

    /// Notes that the loop does not accept from a socket any more.
    pub fn forget_listener(&self, socket: &Arc<OwnedFd>) {
        self.listeners.lock().retain(|known| !Arc::ptr_eq(&known.socket, socket));
    }

    /// The sockets that the loop accepts from.
    pub fn listeners(&self) -> Vec<WatchedListener> {
        self.listeners.lock().clone()
    }

    /// True if the loop has a socket of its own at this address.
    pub fn listens_alone_on(&self, address: &SocketAddress) -> bool {
        self.listeners.lock().iter().any(|known| known.own_address.as_ref() == Some(address))
    }

    /// A sample of its thread; `None` if procfs is not readable.
    pub fn sample(&self) -> Option<Sample> {
        let directory = format!("/proc/self/task/{}", self.thread_id);
        let read = |name: &str| fs::read_to_string(format!("{directory}/{name}")).ok();
        let state = thread_state(&read("stat")?)?;
        let state = match state {
            ThreadState::Asleep { .. } => {
                let system_call = read("syscall").filter(|text| !text.is_empty());
                let in_futex = match system_call {
                    Some(text) => is_futex(&text),
                    None => read("wchan").is_some_and(|function| function.contains("futex")),
                };
                ThreadState::Asleep { in_futex }
            }
            other => other,
        };
        let schedstat = read("schedstat");
        let mut figures = schedstat.iter().flat_map(|text| text.split_ascii_whitespace()).map(str::parse);
        let (run, delay) = (figures.next()?.ok()?, figures.next()?.ok()?);
        // The clock includes the current time slice, which the file may not.
        let run = self.processor_clock.and_then(read_clock).unwrap_or(run);
        let sleeps = read("status").as_deref().and_then(voluntary_switches).unwrap_or(0);
        Some(Sample { at: monotonic_nanos(), state, run, delay, sleeps })
    }
}

/// From `/proc/PID/task/TID/stat`: `TID (name) STATE …`, where the name may contain anything.
fn thread_state(stat: &str) -> Option<ThreadState> {
    let (_, rest) = stat.rsplit_once(')')?;
    match rest.trim_start().as_bytes().first()? {
        b'R' => Some(ThreadState::Runnable),
        b'S' | b'D' | b'I' => Some(ThreadState::Asleep { in_futex: false }),
        b'T' | b't' => Some(ThreadState::Stopped),
        _ => None,
    }
}

/// From `/proc/PID/task/TID/syscall`: the number of the current system call, then arguments.
fn is_futex(system_call: &str) -> bool {
    let number = system_call.split_ascii_whitespace().next().and_then(|number| number.parse::<libc::c_long>().ok());
    // futex_wait and futex_waitv have the same numbers on all architectures.
    number.is_some_and(|number| [libc::SYS_futex, 449, 455].contains(&number))
}

/// From `/proc/PID/task/TID/status`.
fn voluntary_switches(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

fn processor_clock() -> Option<libc::clockid_t> {
    let mut clock = MaybeUninit::uninit();
    // SAFETY: the calling thread exists, and the clock is initialized if the function returns 0.
    unsafe { (libc::pthread_getcpuclockid(libc::pthread_self(), clock.as_mut_ptr()) == 0).then(|| clock.assume_init()) }
}

/// `None` when the thread has ended.
fn read_clock(clock: libc::clockid_t) -> Option<u64> {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the function accepts any clock, and the time is initialized if it returns 0.
    let time = unsafe { (libc::clock_gettime(clock, time.as_mut_ptr()) == 0).then(|| time.assume_init())? };
    Some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// The clock of samples and turns.
pub(crate) fn monotonic_nanos() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// True if a connection is pending on a listening socket.
pub(crate) fn has_connection(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    matches!(rustix::event::poll(&mut polled, Some(&Timespec::default())), Ok(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_thread_is_found_behind_any_name() {
        assert_eq!(thread_state("12 (worker 0) R 1 12"), Some(ThreadState::Runnable));
        let asleep = Some(ThreadState::Asleep { in_futex: false });
        assert_eq!(thread_state("12 (a) R (b) D 1 12"), asleep);
        assert_eq!(thread_state("12 (x) T 1"), Some(ThreadState::Stopped));
        assert_eq!(thread_state("12 (x) Z 1"), None);
        assert_eq!(thread_state("12 (x)"), None);
        assert_eq!(thread_state(""), None);
    }

    #[test]
    fn a_futex_is_known_by_its_number() {
        assert!(is_futex(&format!("{} 0x7f 0x80 0x0", libc::SYS_futex)));
        assert!(!is_futex(&format!("{} 0x7f", libc::SYS_read)));
        assert!(!is_futex("running"));
        assert!(!is_futex("-1 0x7ffd 0x7f"));
    }

    #[test]
    fn the_own_thread_is_seen_running() {
        let watched = Watched::new(3);
        let first = watched.sample().expect("procfs is there");
        assert_eq!(first.state, ThreadState::Runnable);
        let mut last = first;
        while last.run < first.run + 2_000_000 {
            last = watched.sample().expect("procfs is there");
        }
        assert!(last.at > first.at);
    }

    #[test]
    fn status_tells_how_often_a_thread_went_to_sleep() {
        assert_eq!(voluntary_switches("Name:\tx\nvoluntary_ctxt_switches:\t42\n"), Some(42));
        assert_eq!(voluntary_switches("nonvoluntary_ctxt_switches:\t42\n"), None);
    }
}
