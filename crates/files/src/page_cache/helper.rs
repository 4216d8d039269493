//! The page cache helper: a process that tells how much of a file is in memory.
//!
//! mincore(2) tells that to the owner of a file, to a process that may write the file, and to one with CAP_FOWNER; for
//! others it reports every page as resident. An unprivileged worker process is none of these for most files. So a
//! helper process with CAP_FOWNER and no other capability answers for descriptors that the worker process has opened
//! and sends. mincore reads nothing, waits for no device, and counts no page that is still being read. Pages that a
//! loop wants to send by `sendfile` are also held for a moment ([`super::held`]).
//!
//! The helper refuses everything else: after its start a seccomp filter leaves it the few system calls below, and no
//! path is ever opened. One thread answers in the order of the questions; a question takes 1 to 200 microseconds.
//!
//! A question is a packet of 40 bytes (number, offset, length, bytes of read-ahead, bytes to hold) with one
//! descriptor, an answer one of 24 (number, bytes in memory, bytes held).

use std::convert::Infallible;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use gale_runtime::available_memory;
use gale_runtime::seccomp::{self, Filter, With};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};

use super::held::{HOLD_TIME, HeldPages, last_window_end};

/// Longest range of a question: 1,024 pages of 4 KiB.
pub(super) const QUESTION_BYTES_MAX: u64 = 4 << 20;

/// Number of an answer without a question: the helper has started, and earlier questions are lost.
pub(super) const STARTED: u64 = 0;

/// The helper does not know.
const UNKNOWN: u64 = u64::MAX;

/// Bytes of a question and of an answer.
const QUESTION_SIZE: usize = 40;
pub(super) const ANSWER_SIZE: usize = 24;

/// Pages of one call of mincore(2).
const PAGES_AT_ONCE: usize = 16;

/// Distance of a page behind the end of a file to the end: no large folio of the page cache reaches so far.
const BEHIND_END: u64 = 64 << 20;

/// Number of cachestat(2), since Linux 6.5.
const CACHESTAT: libc::c_long = 451;

/// A question: how much of a range of a file is in memory?
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub number: u64,
    pub offset: u64,
    pub length: u64,
    /// Distance to a missing page within which a read may trigger read-ahead: such pages are not held.
    pub ahead: u64,
    /// Bytes to be held in memory from the offset on, at most.
    pub hold: u64,
}

/// The answer: the number of bytes in memory from the beginning of the range, `None` if the kernel does not tell, and
/// the number of bytes that are held there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub number: u64,
    pub bytes: Option<u64>,
    pub held: u64,
}

impl Question {
    pub fn to_bytes(self) -> [u8; QUESTION_SIZE] {
        let Question { number, offset, length, ahead, hold } = self;
        bytes([number, offset, length, ahead, hold])
    }

    fn from_bytes(bytes: &[u8]) -> Option<Question> {
        let [number, offset, length, ahead, hold] = words(bytes)?;
        Some(Question { number, offset, length, ahead, hold })
    }
}

impl Answer {
    fn to_bytes(self) -> [u8; ANSWER_SIZE] {
        bytes([self.number, self.bytes.unwrap_or(UNKNOWN), self.held])
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Answer> {
        let [number, count, held] = words(bytes)?;
        Some(Answer { number, bytes: (count != UNKNOWN).then_some(count), held })
    }
}

fn bytes<const N: usize, const BYTES: usize>(words: [u64; N]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_ne_bytes());
    bytes
}

fn words<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let (words, rest) = bytes.as_chunks::<8>();
    let words: &[[u8; 8]; N] = words.try_into().ok()?;
    rest.is_empty().then(|| words.map(u64::from_ne_bytes))
}

/// Answers questions over this socket (SOCK_SEQPACKET) until its other ends are closed, and then ends the process. For
/// a helper process with a single thread.
///
/// # Errors
/// seccomp(2)'s when the system calls cannot be restricted.
pub fn serve_page_cache_questions(socket: &OwnedFd) -> io::Result<Infallible> {
    // Read before the restriction.
    let page = rustix::param::page_size() as u64;
    let mut held = HeldPages::new(available_memory(), page);
    restrict_system_calls()?;
    let code = i32::from(answer(socket, page, &mut held).is_err());
    // SAFETY: ends the process. The seccomp filter forbids all other clean-up.
    unsafe { libc::_exit(code) }
}

/// Answers until the other end is closed.
fn answer(socket: &OwnedFd, page: u64, held: &mut HeldPages) -> io::Result<()> {
    send(socket, Answer { number: STARTED, bytes: None, held: 0 })?;
    loop {
        release_in_time(socket, held)?;
        let mut bytes = [0; QUESTION_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes)];
        let count = match rustix::net::recvmsg(socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received.bytes,
            Err(Errno::INTR) => continue,
            // The peer has closed without reading all answers.
            Err(Errno::CONNRESET) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        if count == 0 {
            return Ok(());
        }
        let Some(question) = Question::from_bytes(&bytes[..count]) else { continue };
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let (known, held) = file.as_ref().map_or((None, 0), |file| examine(file.as_fd(), question, page, held));
        // Closed before the answer: the worker process keeps its own descriptor until then, so this is not the last
        // close.
        drop(file);
        match send(socket, Answer { number: question.number, bytes: known, held }) {
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            sent => sent?,
        }
    }
}

/// Waits for a question while pages are held, and releases them in time.
fn release_in_time(socket: &OwnedFd, held: &mut HeldPages) -> io::Result<()> {
    let timeout = Timespec { tv_sec: 0, tv_nsec: HOLD_TIME.as_nanos() as i64 };
    loop {
        held.release(Instant::now());
        if held.is_empty() {
            return Ok(());
        }
        match rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The bytes of a range that are in memory, from its beginning on, and those that are held there now.
fn examine(file: BorrowedFd<'_>, question: Question, page: u64, held: &mut HeldPages) -> (Option<u64>, u64) {
    let stat = rustix::fs::fstat(file).ok().filter(|stat| FileType::from_raw_mode(stat.st_mode).is_file());
    let Some(stat) = stat else { return (None, 0) };
    let size = stat.st_size as u64;
    let Some(resident) = resident_bytes(file, size, question, page) else { return (None, 0) };
    // Nothing is read ahead at the end of a file.
    let end = (question.offset + resident).min(size);
    let safe_end = if end < size { end.saturating_sub(question.ahead) } else { end };
    let hold_end = safe_end.min(last_window_end(question.offset.saturating_add(question.hold)));
    let range = question.offset..hold_end.max(question.offset);
    (Some(resident), held.hold(file, &stat, range, Instant::now()))
}

/// Sends an answer; retries while the kernel has no memory, because a request waits.
fn send(socket: &OwnedFd, answer: Answer) -> Result<(), Errno> {
    loop {
        match rustix::net::send(socket, &answer.to_bytes(), SendFlags::NOSIGNAL) {
            Err(Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Bytes in memory from the beginning of the range on.
fn resident_bytes(file: BorrowedFd<'_>, size: u64, question: Question, page: u64) -> Option<u64> {
    let begin = question.offset / page * page;
    let end = question.offset.checked_add(question.length.min(QUESTION_BYTES_MAX))?;
    let length = end - begin;
    // Before Linux 6.5, or if the call is forbidden, only mincore is left.
    if cached_pages(file, begin, length) == Ok(0) {
        return Some(0);
    }
    if !tells_the_truth(file, size, page)? {
        return None;
    }
    let mapped = Mapped::new(file, begin, length)?;
    let mut resident = 0;
    let mut pages = [0; PAGES_AT_ONCE];
    while resident < length {
        let rest = (length - resident).min(page * PAGES_AT_ONCE as u64);
        let count = rest.div_ceil(page) as usize;
        mapped.mincore(resident, rest, &mut pages)?;
        let found = pages[..count].iter().take_while(|&&flags| flags & 1 != 0).count();
        resident += rest.min(found as u64 * page);
        if found < count {
            break;
        }
    }
    Some(resident.saturating_sub(question.offset - begin))
}

/// True if mincore(2) is truthful: it reports a page far behind the end of the file as resident, like every page, if
/// this process may not know (no CAP_FOWNER, an owner that is not mapped into the user namespace).
fn tells_the_truth(file: BorrowedFd<'_>, size: u64, page: u64) -> Option<bool> {
    let mut pages = [0; PAGES_AT_ONCE];
    let behind_end = size.checked_add(BEHIND_END)? / page * page;
    Mapped::new(file, behind_end, page)?.mincore(0, page, &mut pages)?;
    Some(pages[0] & 1 == 0)
}

/// Pages of a range in the page cache, including those that are still being read. Errors: EPERM if the kernel does not
/// tell, ENOSYS before Linux 6.5.
pub(super) fn cached_pages(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<u64, Errno> {
    let (range, mut counts) = ([offset, length], [0_u64; 5]);
    // SAFETY: cachestat(2) reads `struct cachestat_range`, two numbers, and fills `struct cachestat`, five.
    let code = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &range, &mut counts, 0) };
    if code == 0 { Ok(counts[0]) } else { Err(last_errno()) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// A mapping of a file that serves only mincore(2): no byte of it is accessible.
struct Mapped {
    memory: *mut libc::c_void,
    length: usize,
}

impl Mapped {
    fn new(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<Mapped> {
        let (offset, length) = (libc::off_t::try_from(offset).ok()?, usize::try_from(length).ok()?);
        // SAFETY: the kernel chooses an address that is free, and nothing accesses the memory.
        let memory = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd(), offset)
        };
        (memory != libc::MAP_FAILED).then_some(Mapped { memory, length })
    }

    /// Asks about `length` bytes from `offset` on, which is at a page boundary.
    fn mincore(&self, offset: u64, length: u64, pages: &mut [u8; PAGES_AT_ONCE]) -> Option<()> {
        assert!(offset + length <= self.length as u64);
        // SAFETY: the range is within the mapping, and `pages` has room for a byte per page: no caller asks about more
        // pages.
        let code = unsafe { libc::mincore(self.memory.byte_add(offset as usize), length as usize, pages.as_mut_ptr()) };
        (code == 0).then_some(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe { libc::munmap(self.memory, self.length) };
    }
}

/// The system calls of [`serve_page_cache_questions`] (fcntl: the size of a pipe; a debug build uses it to close
/// descriptors), and those that end the process or continue after a stop.
const ALLOWED: [libc::c_long; 17] = [
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_close,
    libc::SYS_fcntl,
    CACHESTAT,
    libc::SYS_mmap,
    libc::SYS_mincore,
    libc::SYS_munmap,
    libc::SYS_pipe2,
    libc::SYS_splice,
    libc::SYS_ppoll,
    // Where the clock is no vDSO's.
    libc::SYS_clock_gettime,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_exit_group,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
];

/// Restricts the process to these calls; any other one kills it.
fn restrict_system_calls() -> io::Result<()> {
    let allowed = ALLOWED.map(|call| (call, With::Anything));
    Filter::new(allowed, seccomp::Answer::Allow, seccomp::Answer::End)?.enter()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn questions_and_answers_survive_their_way() {
        let question = Question { number: 7, offset: 1 << 40, length: 12, ahead: 5, hold: 9 };
        assert_eq!(Question::from_bytes(&question.to_bytes()), Some(question));
        assert_eq!(Question::from_bytes(&question.to_bytes()[..39]), None);
        for bytes in [None, Some(0), Some(4096)] {
            let answer = Answer { number: 8, bytes, held: 3 };
            assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
        }
    }

    /// A file of ten pages of which the fifth and the sixth are not in memory; `None` if the kernel has its own view.
    fn file_with_a_hole() -> Option<std::fs::File> {
        let path = std::env::temp_dir().join(format!("gale-hole-{}", std::process::id()));
        std::fs::write(&path, vec![b'x'; 10 * PAGE as usize]).expect("room");
        let file = std::fs::File::open(&path).expect("it was written");
        std::fs::remove_file(&path).expect("it is there");
        file.sync_all().expect("room");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a file");
        // Page by page, so that the kernel has no reason to read more.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).expect("a file");
        for page in [0, 1, 2, 3, 6, 7, 8, 9] {
            file.read_exact_at(&mut [0; PAGE as usize], page * PAGE).expect("so long a file");
        }
        (cached_pages(file.as_fd(), 0, 10 * PAGE) == Ok(8)).then_some(file)
    }

    #[test]
    fn bytes_before_a_hole_are_told() {
        let Some(file) = file_with_a_hole() else {
            return crate::skips::skip("the kernel has more or less in memory than it was asked for");
        };
        let told = |offset, length| {
            let question = Question { number: 1, offset, length, ahead: 0, hold: 0 };
            resident_bytes(file.as_fd(), 10 * PAGE, question, PAGE)
        };
        assert_eq!(told(0, 10 * PAGE), Some(4 * PAGE));
        assert_eq!(told(PAGE + 100, 2 * PAGE), Some(2 * PAGE));
        assert_eq!(told(3 * PAGE + 100, 2 * PAGE), Some(PAGE - 100));
        assert_eq!(told(4 * PAGE + 100, PAGE), Some(0));
        assert_eq!(told(6 * PAGE, 100 * PAGE), Some(4 * PAGE), "nothing is behind the end");
        assert_eq!(told(u64::MAX - 10, 100), None);
    }
}
