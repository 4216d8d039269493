//! A path, the file found there, and the means to know that it has not changed.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};

use gale_engine::budget::{Budget, BudgetShare};
use gale_files::watch::{PathWatch, Target};
use gale_files::{File, FileMetadata};
use gale_runtime::Bytes;
use rustix::process::{Resource, getrlimit};

use super::table::Keyed;

/// Largest body kept in memory: below the size from which `sendfile` is used. Head and body leave in one call; above
/// this size the cost of a copy outweighs the call that it saves.
pub(super) const BODY_MAX: u64 = 64 * 1024 - 1;

/// Budget for the bodies in memory, of all caches of the process: two thousand pages of 16 KiB, little compared with
/// the memory of a machine that serves them.
pub(super) static BODIES: Budget = Budget::new(BODIES_MAX);

pub(super) const BODIES_MAX: usize = 32 << 20;

/// Descriptors held without a configured cache, at most: only few files of more than [`BODY_MAX`] are requested several
/// times a second.
const HELD_MAX: u64 = 256;

/// Divisor of the process's descriptor limit for that number: the others are for connections.
const HELD_SHARE: u64 = 16;

/// Budget for these descriptors.
pub(super) static DESCRIPTORS: LazyLock<Budget> = LazyLock::new(|| {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    Budget::new((limit / HELD_SHARE).min(HELD_MAX) as usize)
});

/// Resolution of the time of the last use, in milliseconds.
pub(super) const TOUCHED_AT_MOST_EVERY: u64 = 250;

/// The file or error found under a path. It is immutable: a change leads to a new entry.
pub(super) struct Entry {
    path: Box<[u8]>,
    hash: u64,
    pub found: Found,
    /// Time at which it was last known to be current, in milliseconds.
    checked: AtomicU64,
    used: AtomicU64,
    /// Counted only as far as a decision needs, because all workers read this memory.
    uses: AtomicU32,
    /// True if a thread is attending to the entry, or has done so.
    is_attended: AtomicBool,
    kept: OnceLock<Kept>,
}

pub(super) enum Found {
    /// A regular file, open unless its body alone is kept.
    File { file: Option<File>, metadata: FileMetadata },
    /// A directory.
    Directory(FileMetadata),
    /// A file that has not been requested often enough to be kept.
    Seen,
    /// An error of the kernel.
    Error(i32),
}

/// The data that makes an entry cheaper than a system call.
pub(super) struct Kept {
    /// Reports changes.
    pub watch: Option<PathWatch>,
    /// The whole content of the file.
    pub body: OnceLock<Body>,
    /// True if the body is not kept only because there was no room.
    pub lacks_room: bool,
    /// Share of the budget for descriptors held without a configured cache.
    pub _held: Option<BudgetShare>,
}

/// A file's content, counted against the budget of all bodies.
pub(super) struct Body(Bytes);

impl Entry {
    pub fn new(path: &[u8], hash: u64, found: Found, uses: u32, now: u64) -> Entry {
        Entry {
            path: path.into(),
            hash,
            found,
            checked: AtomicU64::new(now),
            used: AtomicU64::new(now),
            uses: AtomicU32::new(uses),
            is_attended: AtomicBool::new(false),
            kept: OnceLock::new(),
        }
    }

    /// Notes a use, unless one was noted within [`TOUCHED_AT_MOST_EVERY`]: all workers read this memory.
    #[inline]
    pub fn touch(&self, now: u64) {
        if now.saturating_sub(self.used.load(Ordering::Relaxed)) >= TOUCHED_AT_MOST_EVERY {
            self.used.store(now, Ordering::Relaxed);
        }
    }

    /// Counts a use, up to `most`; true when this use reaches it.
    #[inline]
    pub fn count_use(&self, most: u32) -> bool {
        self.uses.load(Ordering::Relaxed) < most && self.uses.fetch_add(1, Ordering::Relaxed) + 1 == most
    }

    pub fn uses(&self) -> u32 {
        self.uses.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn checked(&self) -> u64 {
        self.checked.load(Ordering::Relaxed)
    }

    pub fn set_checked(&self, now: u64) {
        self.checked.store(now, Ordering::Relaxed);
    }

    #[inline]
    pub fn kept(&self) -> Option<&Kept> {
        self.kept.get()
    }

    pub fn keep(&self, kept: Kept) {
        // Only the thread that claimed the entry sets it.
        let _ = self.kept.set(kept);
    }

    /// Room for the body, if there was none before and there is now.
    pub fn room_at_last(&self) -> Option<BudgetShare> {
        let Found::File { metadata, .. } = &self.found else { return None };
        let kept = self.kept()?;
        if kept.lacks_room && kept.body.get().is_none() { Body::room(metadata) } else { None }
    }

    /// True if the caller is now the one to attend to the entry.
    pub fn claim(&self) -> bool {
        !self.is_attended.load(Ordering::Relaxed) && !self.is_attended.swap(true, Ordering::Relaxed)
    }

    /// Allows other threads to attend to the entry.
    pub fn unclaim(&self) {
        self.is_attended.store(false, Ordering::Relaxed);
    }
}

impl Keyed for Entry {
    fn path(&self) -> &[u8] {
        &self.path
    }

    fn hash(&self) -> u64 {
        self.hash
    }

    fn last_use(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

impl Body {
    /// Room for the whole file, if available.
    pub fn room(metadata: &FileMetadata) -> Option<BudgetShare> {
        let size = usize::try_from(metadata.size).ok().filter(|_| metadata.size <= BODY_MAX)?;
        BODIES.take(size)
    }

    /// Reads the whole file into the room taken for it; `None` if the file changes meanwhile. May block.
    pub fn read(file: &File, metadata: &FileMetadata, room: BudgetShare) -> io::Result<Option<Body>> {
        Ok(read_whole(file, metadata, metadata.size as usize)?.map(|bytes| Body(room.hold(bytes))))
    }

    /// True if the file has this content and does not change during the read. May block. Takes no room: only a few
    /// threads check one file each.
    pub fn is_content_of(&self, file: &File, metadata: &FileMetadata) -> io::Result<bool> {
        let is_as_long = metadata.size == self.0.len() as u64;
        Ok(is_as_long && read_whole(file, metadata, self.0.len())?.is_some_and(|bytes| bytes == *self.0))
    }

    #[inline]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// Reads `size` bytes; `None` if that is not the whole file, or the file changes meanwhile.
fn read_whole(file: &File, metadata: &FileMetadata, size: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; size];
    let is_whole = file.read_blocking(0, &mut bytes)? == bytes.len();
    let is_unchanged = file.look_again()? == *metadata;
    Ok((is_whole && is_unchanged).then_some(bytes))
}

/// The target of a path that leads to this file.
pub(super) fn target_of(metadata: &FileMetadata) -> Option<Target> {
    Some(Target { device: metadata.device, inode: metadata.inode })
}

/// Serialises the tests that check the size of all bodies.
#[cfg(test)]
pub(super) static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn body_takes_room_until_its_last_slice_is_dropped() {
        let _alone = ALONE.lock();
        let path = std::env::temp_dir().join(format!("gale-body-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().write_all(&[b'a'; 1000]).unwrap();
        let file = File::from_std(std::fs::File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let metadata = file.look_again().unwrap();
        let room = Body::room(&metadata).expect("there is room");
        let body = Body::read(&file, &metadata, room).unwrap().expect("it stays as it is");
        let sent = body.bytes().clone();
        drop(body);
        assert_eq!((sent.len(), BODIES.taken()), (1000, 1000));
        drop(sent);
        assert_eq!(BODIES.taken(), 0);
    }
    #[test]
    fn all_bodies_together_have_their_bound_and_one_that_is_not_kept_takes_nothing() {
        let _alone = ALONE.lock();
        let path = std::env::temp_dir().join(format!("gale-bodies-{}", std::process::id()));
        let size = 60_000;
        std::fs::write(&path, vec![b'a'; size]).unwrap();
        let file = File::from_std(std::fs::File::open(&path).unwrap()).unwrap();
        let metadata = file.look_again().unwrap();
        let read = || Body::read(&file, &metadata, Body::room(&metadata)?).unwrap();
        let mut bodies: Vec<Body> = std::iter::from_fn(read).take(2 * BODIES_MAX / size).collect();
        let fitting = BODIES_MAX / size;
        assert_eq!(
            (bodies.len(), BODIES.taken()),
            (fitting, fitting * size),
            "and no byte for the one that was refused"
        );
        bodies.pop();
        bodies.extend(read());
        assert_eq!(bodies.len(), fitting);
        assert!(bodies[0].is_content_of(&file, &metadata).unwrap(), "which takes no room");
        bodies.truncate(1);
        // The file is replaced, grows or shrinks between the check and the read.
        for other in [size - 1, size + 1, size] {
            std::fs::write(&path, vec![b'b'; other]).unwrap();
            assert!(read().is_none() && !bodies[0].is_content_of(&file, &metadata).unwrap());
            assert_eq!(BODIES.taken(), size);
        }
        std::fs::remove_file(&path).unwrap();
        let large = FileMetadata { size: BODY_MAX + 1, ..metadata };
        assert!(Body::room(&large).is_none());
        drop(bodies);
        assert_eq!(BODIES.taken(), 0);
    }
}
