//! Pages that are held in memory for a moment: spliced into a pipe, whose references keep the kernel from evicting
//! them.
//!
//! splice(2) copies no byte, needs no privilege, and charges no memory twice. It waits for the disk if a page has been
//! evicted since mincore(2) reported it, so only the page cache helper ([`super::helper`]) calls it, and no event loop.
//! Holds are few, short and bounded by memory: a piece that is not held is read, and not sent by `sendfile`.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::Stat;
use rustix::pipe::{PipeFlags, SpliceFlags};

/// Time for which pages are held after a question: its answer is valid for 24 ms, the rest is for a loop that is late.
pub(super) const HOLD_TIME: Duration = Duration::from_millis(64);

/// Pages of one hold lie within a window of this size: the capacity of a pipe without privileges.
const WINDOW: u64 = 1 << 20;

/// Pages held for one question, at most: more than a client of 15 MB/s takes while they are held.
pub(super) const HELD_FOR_QUESTION_MAX: u64 = 2 * WINDOW;

/// End of the last window before `end`: holds of all clients of a file end there, so that they can share them.
pub(super) fn last_window_end(end: u64) -> u64 {
    end / WINDOW * WINDOW
}

/// Limit of the capacity of all pipes. The kernel gives the pipes of an account 64 MiB, which tunnels use too.
const HELD_BYTES_MAX: u64 = 24 << 20;

/// Limit of holds.
const HOLDS_MAX: usize = 64;

/// The limit of bytes as a share of the memory that the process may use.
const SHARE_OF_MEMORY: u64 = 16;

pub(super) struct HeldPages {
    holds: Vec<Hold>,
    capacity: u64,
    page: u64,
}

struct Hold {
    content: Content,
    range: Range<u64>,
    until: Instant,
    /// Capacity of the pipe in bytes.
    capacity: u64,
    /// Both ends: the pages are released with the last one.
    _pipe: (OwnedFd, OwnedFd),
}

/// Identity of a file with its present content.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Content {
    device: u64,
    inode: u64,
    size: i64,
    modified: (i64, u64),
    changed: (i64, u64),
}

impl HeldPages {
    /// For a process that may use this much memory. Nothing is allocated later, as the helper may not.
    pub fn new(memory: u64, page: u64) -> HeldPages {
        HeldPages { holds: Vec::with_capacity(HOLDS_MAX), capacity: HELD_BYTES_MAX.min(memory / SHARE_OF_MEMORY), page }
    }

    pub fn is_empty(&self) -> bool {
        self.holds.is_empty()
    }

    /// Releases the pages whose time is over.
    pub fn release(&mut self, now: Instant) {
        self.holds.retain(|hold| hold.until > now);
    }

    /// Holds pages that are in memory. Returns the number of bytes held from the beginning of the range on.
    pub fn hold(&mut self, file: BorrowedFd<'_>, stat: &Stat, range: Range<u64>, now: Instant) -> u64 {
        let content = Content::of(stat);
        let mut at = range.start;
        while at < range.end {
            let end = ((at / WINDOW + 1) * WINDOW).min(range.end);
            if !self.hold_in_window(file, content, at..end, now) {
                break;
            }
            at = end;
        }
        at - range.start
    }

    fn hold_in_window(&mut self, file: BorrowedFd<'_>, content: Content, range: Range<u64>, now: Instant) -> bool {
        let covers = |held: &Range<u64>| held.start <= range.start && range.end <= held.end;
        let is_known = |hold: &&mut Hold| hold.content == content && covers(&hold.range) && hold.until > now;
        if let Some(hold) = self.holds.iter_mut().find(is_known) {
            hold.until = now + HOLD_TIME;
            return true;
        }
        self.release(now);
        let begin = range.start / self.page * self.page;
        let capacity = (range.end - begin).div_ceil(self.page).next_power_of_two() * self.page;
        let used: u64 = self.holds.iter().map(|hold| hold.capacity).sum();
        if used + capacity > self.capacity || self.holds.len() == HOLDS_MAX {
            return false;
        }
        let Some(pipe) = fill_pipe(file, begin..range.end, capacity) else { return false };
        self.holds.push(Hold { content, range, until: now + HOLD_TIME, capacity, _pipe: pipe });
        true
    }
}

/// A pipe with references to the pages of this range; `None` if there is no pipe of that capacity, or the file has
/// become shorter.
fn fill_pipe(file: BorrowedFd<'_>, range: Range<u64>, capacity: u64) -> Option<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
    rustix::pipe::fcntl_setpipe_size(&writer, usize::try_from(capacity).ok()?).ok()?;
    let mut at = range.start;
    while at < range.end {
        let rest = usize::try_from(range.end - at).ok()?;
        match rustix::pipe::splice(file, Some(&mut at), &writer, None, rest, SpliceFlags::NONBLOCK) {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
    Some((reader, writer))
}

impl Content {
    #[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
    fn of(stat: &Stat) -> Content {
        Content {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            size: stat.st_size as i64,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            changed: (stat.st_ctime as i64, stat.st_ctime_nsec as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::page_cache::helper::cached_pages;

    const PAGE: u64 = 4096;
    const LENGTH: u64 = 3 * WINDOW + 5 * PAGE + 7;

    /// A file in memory; `None` if the kernel cannot be made to evict its pages.
    fn file() -> Option<std::fs::File> {
        let path =
            std::env::temp_dir().join(format!("gale-held-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::write(&path, vec![b'x'; LENGTH as usize]).expect("room");
        let file = std::fs::File::open(&path).expect("it was written");
        std::fs::remove_file(&path).expect("it is there");
        file.sync_all().expect("room");
        evict(&file);
        let was_evicted = cached(&file) == Some(0);
        let read = std::io::copy(&mut &file, &mut std::io::sink()).expect("it can be read");
        (was_evicted && read == LENGTH && cached(&file) == Some(LENGTH.div_ceil(PAGE))).then_some(file)
    }

    fn evict(file: &std::fs::File) {
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).expect("a file");
    }

    fn cached(file: &std::fs::File) -> Option<u64> {
        cached_pages(file.as_fd(), 0, LENGTH).ok()
    }

    fn is_cached(file: &std::fs::File, range: Range<u64>) -> bool {
        let length = range.end - range.start;
        cached_pages(file.as_fd(), range.start, length) == Ok(length.div_ceil(PAGE))
    }

    fn hold(held: &mut HeldPages, file: &std::fs::File, range: Range<u64>, now: Instant) -> u64 {
        held.hold(file.as_fd(), &rustix::fs::fstat(file).expect("a file"), range, now)
    }

    fn without_eviction() {
        crate::skips::skip("the kernel keeps pages in memory that it was advised to evict");
    }

    #[test]
    fn held_pages_are_not_evicted_until_they_are_released() {
        let Some(file) = file() else { return without_eviction() };
        let (mut held, now) = (HeldPages::new(u64::MAX, PAGE), Instant::now());
        assert_eq!(hold(&mut held, &file, WINDOW + 100..LENGTH, now), LENGTH - WINDOW - 100);
        evict(&file);
        assert!(is_cached(&file, WINDOW..LENGTH));
        held.release(now + HOLD_TIME / 2);
        evict(&file);
        assert!(is_cached(&file, WINDOW..LENGTH));
        held.release(now + HOLD_TIME);
        assert!(held.is_empty());
        evict(&file);
        assert_eq!(cached(&file), Some(0));
    }

    #[test]
    fn pages_that_are_held_are_held_for_longer_and_take_no_second_pipe() {
        let Some(file) = file() else { return without_eviction() };
        let (mut held, now) = (HeldPages::new(u64::MAX, PAGE), Instant::now());
        assert_eq!(hold(&mut held, &file, 0..WINDOW, now), WINDOW);
        assert_eq!(hold(&mut held, &file, PAGE..WINDOW / 2, now + HOLD_TIME / 2), WINDOW / 2 - PAGE);
        assert_eq!(held.holds.len(), 1);
        held.release(now + HOLD_TIME);
        assert!(!held.is_empty());
        held.release(now + HOLD_TIME * 3 / 2);
        assert!(held.is_empty());
    }

    #[test]
    fn room_is_bounded_and_that_of_old_holds_is_used_again() {
        let Some(file) = file() else { return without_eviction() };
        let (mut held, now) = (HeldPages::new(2 * WINDOW * SHARE_OF_MEMORY, PAGE), Instant::now());
        assert_eq!(hold(&mut held, &file, 0..3 * WINDOW, now), 2 * WINDOW);
        assert_eq!(hold(&mut held, &file, 2 * WINDOW..3 * WINDOW, now), 0);
        assert_eq!(hold(&mut held, &file, 2 * WINDOW..3 * WINDOW, now + HOLD_TIME), WINDOW);
        assert_eq!(held.holds.len(), 1);
    }

    #[test]
    fn replaced_content_is_not_held() {
        let Some(file) = file() else { return without_eviction() };
        let (mut held, now) = (HeldPages::new(u64::MAX, PAGE), Instant::now());
        let stat = rustix::fs::fstat(&file).expect("a file");
        assert_eq!(held.hold(file.as_fd(), &stat, 0..PAGE, now), PAGE);
        let mut other = stat;
        other.st_size += 1;
        assert_eq!(held.hold(file.as_fd(), &other, 0..PAGE, now), PAGE);
        assert_eq!(held.holds.len(), 2);
        assert_eq!(held.hold(file.as_fd(), &stat, 2 * LENGTH..2 * LENGTH + PAGE, now), 0, "nothing is behind the end");
    }
}
