//! Watches on paths: whether a path still leads to the same file, and whether that is unchanged.
//!
//! A [`PathWatch`] has an inotify watch on everything that its path passes through: each directory (for the name that
//! is looked up in it), each symbolic link's directory, and the file itself. Any event of these ends it for good: the
//! file is written to, truncated, replaced, renamed or unlinked, permissions change, a parent is renamed, a link is
//! switched.
//!
//! ```text
//!   /srv/current/index.html      current -> releases/7
//!     /            "srv"         is replaced, goes away, gets other permissions …
//!     /srv         "current", "releases"
//!     releases     "7"
//!     releases/7   "index.html"
//!     index.html   written to …
//! ```
//!
//! The kernel queues an event before the system call that caused it returns. So after [`nothing_unread`] has returned
//! true, an intact watch proves that nothing changed before. A thread of its own reads the events; loops never do, and
//! never take its lock.
//!
//! The kernel does not report writes through a mapping (only the end of the mapping), nor changes by other machines.
//! File systems where that is usual are not watched; see `TELLING`. The number of watches is bounded; beyond it there
//! is no [`PathWatch`], and the caller has to check the file itself.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gale_runtime::simulation::Simulation;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::mounts;

/// Limit of watched paths, lower where the kernel allows less: each pins its file's inode, about a kilobyte.
const PATHS_MAX: usize = 8192;

/// Components and links of a path; the kernel follows 40 links.
const STEPS_MAX: usize = 128;
const LINKS_MAX: usize = 40;

/// Interval of the sweep while there is work for it.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Events after which the thread checks mounts and the clock again, and releases its lock: some milliseconds of work.
const EVENTS_PER_TURN: usize = 1024;

/// File systems (magic numbers, statfs(2)) on which all changes pass through this kernel and are reported.
const TELLING: [i64; 13] = [
    0x0000_ef53, // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
    0x3153_464a, // JFS
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlayfs, unless a layer may lie on another machine
    0x7371_7368, // SquashFS
    0xe0f5_e1e2, // EROFS
    0x0000_9660, // ISO 9660
];

/// Events of the entries of a directory, and of the directory itself.
const OF_DIRECTORY: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

/// Events of a file. (Closing reports the end of a mapping.)
const OF_FILE: WatchFlags = WatchFlags::MODIFY
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

/// A watched path. Dropping it ends the watch.
#[derive(Debug)]
pub struct PathWatch {
    signal: Arc<Signal>,
    target: Option<Target>,
}

#[derive(Debug, Default)]
struct Signal {
    has_changed: AtomicBool,
}

/// The target of a path: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// As [`crate::FileMetadata::device`].
    pub device: u64,
    /// As [`crate::FileMetadata::inode`].
    pub inode: u64,
}

impl PathWatch {
    /// Begins to watch an absolute path, following links. `None` if that is impossible: then nothing is watched.
    /// Changes after the return end the watch, so read the file's properties after this call. May block.
    pub fn begin(path: &Path) -> Option<PathWatch> {
        if Simulation::current().is_some() || !path.is_absolute() {
            return None;
        }
        let watcher = Watcher::started()?;
        if watcher.paths.fetch_add(1, Ordering::Relaxed) >= watcher.paths_max {
            watcher.paths.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let mut watch = PathWatch { signal: Arc::default(), target: None };
        watch.target = Walk { watcher, signal: &watch.signal }.along(path).ok()?;
        Some(watch)
    }

    /// The target of the path; `None` = it did not exist, and still does not if the watch is intact.
    pub fn target(&self) -> Option<Target> {
        self.target
    }

    /// True if no event of a change was read. For unread ones, call [`nothing_unread`] before.
    #[inline]
    pub fn is_intact(&self) -> bool {
        !self.signal.has_changed.load(Ordering::Acquire)
    }
}

impl Drop for PathWatch {
    fn drop(&mut self) {
        if let Some(Some(watcher)) = WATCHER.get() {
            watcher.paths.fetch_sub(1, Ordering::Relaxed);
            watcher.dropped.fetch_add(1, Ordering::Relaxed);
            watcher.rouse();
        }
    }
}

/// True if all events queued by the kernel were handled. A system call of about 0.1 µs; never blocks.
#[inline]
pub fn nothing_unread() -> bool {
    let Some(Some(watcher)) = WATCHER.get() else { return false };
    // In this order: the thread sets the flag before it takes events off the queue, and clears it after it has handled
    // them.
    matches!(rustix::io::ioctl_fionread(&watcher.inotify), Ok(0)) && !watcher.is_at_work.load(Ordering::SeqCst)
}

/// True if watches are possible: not in simulated worlds, nor if the kernel has refused.
pub fn is_possible() -> bool {
    Simulation::current().is_none() && Watcher::started().is_some()
}

/// Calls `sweep` every second on the thread of the watches, until it returns false: then it has no work. To be called
/// when there is work for it, with the same function each time. False if there is no such thread.
pub fn run_every_second(sweep: fn() -> bool) -> bool {
    if Simulation::current().is_some() {
        return false;
    }
    let Some(watcher) = Watcher::started() else { return false };
    watcher.sweep.get_or_init(|| sweep);
    watcher.rouse();
    true
}

static WATCHER: OnceLock<Option<Watcher>> = OnceLock::new();

struct Watcher {
    inotify: OwnedFd,
    /// The thread is handling events.
    is_at_work: AtomicBool,
    dependents: Mutex<Dependents>,
    paths: AtomicUsize,
    paths_max: usize,
    /// Number of dropped watches that are still in the lists.
    dropped: AtomicUsize,
    sweep: OnceLock<fn() -> bool>,
    /// The thread runs the sweep every second.
    is_awake: AtomicBool,
    bell: OwnedFd,
    has_ended: AtomicBool,
}

/// Dependents by the kernel's number of the watch, then by the name that is looked up in the directory (empty for a
/// file, or a directory that is itself the target).
#[derive(Default)]
struct Dependents {
    by_number: HashMap<i32, Names>,
}

type Names = HashMap<Box<[u8]>, Vec<Weak<Signal>>>;

impl Watcher {
    /// The watcher of this process, with its thread.
    fn started() -> Option<&'static Watcher> {
        let watcher = WATCHER.get_or_init(|| Watcher::new().ok()).as_ref()?;
        static THREAD: OnceLock<bool> = OnceLock::new();
        let run = || {
            gale_runtime::affinity::leave_processors();
            watcher.run();
        };
        let has_thread = *THREAD.get_or_init(|| thread::Builder::new().name("file watch".into()).spawn(run).is_ok());
        (has_thread && !watcher.has_ended.load(Ordering::Relaxed)).then_some(watcher)
    }

    fn new() -> rustix::io::Result<Watcher> {
        // Other processes of the user need some too.
        let allowed = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches").ok();
        let allowed = allowed.and_then(|number| number.trim_end().parse::<usize>().ok());
        Ok(Watcher {
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            is_at_work: AtomicBool::new(false),
            dependents: Mutex::default(),
            paths: AtomicUsize::new(0),
            paths_max: allowed.map_or(PATHS_MAX, |allowed| (allowed / 2).min(PATHS_MAX)),
            dropped: AtomicUsize::new(0),
            sweep: OnceLock::new(),
            is_awake: AtomicBool::new(false),
            bell: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            has_ended: AtomicBool::new(false),
        })
    }

    fn rouse(&self) {
        if !self.is_awake.load(Ordering::Relaxed) && !self.is_awake.swap(true, Ordering::SeqCst) {
            // A full counter wakes the thread too.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// The body of the thread: events, mounts, and the sweep.
    fn run(&self) {
        let _end = EndsAll(self);
        // Readable for `poll` when something was mounted or unmounted, which no watch reports.
        let mounts = std::fs::File::open("/proc/self/mountinfo").ok();
        let mut next_sweep = Instant::now() + SWEEP_EVERY;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        loop {
            let mut sources = vec![PollFd::new(&self.inotify, PollFlags::IN), PollFd::new(&self.bell, PollFlags::IN)];
            sources.extend(mounts.as_ref().map(|mounts| PollFd::new(mounts, PollFlags::PRI)));
            let rest = next_sweep.saturating_duration_since(Instant::now());
            let rest = Timespec::try_from(rest).expect("a second at most");
            let timeout = self.is_awake.load(Ordering::SeqCst).then_some(&rest);
            if !matches!(rustix::event::poll(&mut sources, timeout), Ok(_) | Err(Errno::INTR)) {
                return;
            }
            let has = |source: Option<&PollFd<'_>>| source.is_some_and(|source| !source.revents().is_empty());
            if has(sources.get(1)) {
                // Only the ring matters, not the value.
                let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            }
            let is_mounted = has(sources.get(2));
            drop(sources);
            self.handle_events(&mut buffer);
            if is_mounted {
                // The mount table first: the code that is notified will use it.
                mounts::refresh();
                self.dependents.lock().signal_all();
            }
            if next_sweep <= Instant::now() {
                next_sweep = Instant::now() + SWEEP_EVERY;
                self.run_sweep();
            }
        }
    }

    fn run_sweep(&self) {
        // Cleared before the work: new work that comes later rings the bell.
        self.is_awake.store(false, Ordering::SeqCst);
        let has_more = self.sweep.get().is_some_and(|sweep| sweep());
        if self.dropped.swap(0, Ordering::Relaxed) > 0 {
            self.dependents.lock().forget_dropped(&self.inotify);
        }
        if has_more {
            self.is_awake.store(true, Ordering::SeqCst);
        }
    }

    fn handle_events(&self, buffer: &mut [MaybeUninit<u8>]) {
        let mut dependents = self.dependents.lock();
        self.is_at_work.store(true, Ordering::SeqCst);
        let mut events = Reader::new(&self.inotify, buffer);
        let mut handled = 0;
        // Events taken off the queue must be handled; `nothing_unread` sees those still on it.
        while handled < EVENTS_PER_TURN || !events.is_buffer_empty() {
            handled += 1;
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => dependents.signal_all(),
                Ok(event) => {
                    let name = event.file_name().map_or(&b""[..], std::ffi::CStr::to_bytes);
                    dependents.signal(event.wd(), name);
                    if event.events().contains(ReadFlags::IGNORED) {
                        dependents.by_number.remove(&event.wd());
                    }
                }
                Err(Errno::INTR) => {}
                // All events were read; any other error would be a bug here, and no watch could be trusted.
                Err(Errno::AGAIN) => break,
                Err(_) => {
                    dependents.signal_all();
                    break;
                }
            }
        }
        self.is_at_work.store(false, Ordering::SeqCst);
    }
}

/// Without its thread no watch can be trusted.
struct EndsAll<'w>(&'w Watcher);

impl Drop for EndsAll<'_> {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::SeqCst);
        self.0.is_at_work.store(true, Ordering::SeqCst);
        self.0.dependents.lock().signal_all();
    }
}

impl Dependents {
    /// Ends the watches that look up this name there; without a name, all that pass through.
    fn signal(&mut self, number: i32, name: &[u8]) {
        let Some(names) = self.by_number.get(&number) else { return };
        if name.is_empty() {
            return names.values().for_each(signal);
        }
        if let Some(dependents) = names.get(name) {
            signal(dependents);
        }
    }

    fn signal_all(&mut self) {
        self.by_number.values().flat_map(HashMap::values).for_each(signal);
    }

    /// Forgets watches that were dropped or have ended, and the kernel's watches without dependents.
    fn forget_dropped(&mut self, inotify: &OwnedFd) {
        let is_of_use =
            |signal: &Weak<Signal>| signal.upgrade().is_some_and(|signal| !signal.has_changed.load(Ordering::Relaxed));
        self.by_number.retain(|&number, names| {
            names.retain(|_, dependents| {
                dependents.retain(is_of_use);
                !dependents.is_empty()
            });
            if names.is_empty() {
                // It may have gone with its file.
                let _ = inotify::remove_watch(inotify, number);
            }
            !names.is_empty()
        });
        self.by_number.shrink_to_fit();
    }
}

#[expect(clippy::ptr_arg, reason = "called for each value of a map")]
fn signal(dependents: &Vec<Weak<Signal>>) {
    for signal in dependents.iter().filter_map(Weak::upgrade) {
        signal.has_changed.store(true, Ordering::Release);
    }
}

/// Walks a path as the kernel does, and watches each directory before a name is looked up in it, so later changes of
/// that name are reported.
struct Walk<'w> {
    watcher: &'static Watcher,
    signal: &'w Arc<Signal>,
}

impl Walk<'_> {
    /// The target of the path.
    fn along(&self, path: &Path) -> rustix::io::Result<Option<Target>> {
        let mut rest = components(path.as_os_str().as_bytes());
        let mut directory = open(CWD, b"/")?;
        let (mut steps, mut links) = (0, 0);
        while let Some(name) = rest.pop() {
            steps += 1;
            if steps > STEPS_MAX {
                return Err(Errno::NAMETOOLONG);
            }
            self.depend(&directory, OF_DIRECTORY, &name)?;
            let found = match open(&directory, &name) {
                Err(Errno::NOENT) => return Ok(None),
                found => found?,
            };
            let stat = rustix::fs::fstat(&found)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => directory = found,
                FileType::Symlink => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(Errno::LOOP);
                    }
                    let text = rustix::fs::readlinkat(&found, c"", Vec::new())?;
                    if text.to_bytes().starts_with(b"/") {
                        directory = open(CWD, b"/")?;
                    }
                    rest.extend(components(text.to_bytes()));
                }
                _ if !rest.is_empty() => return Err(Errno::NOTDIR),
                _ => {
                    self.depend(&found, OF_FILE, b"")?;
                    return Ok(Some(target(&stat)));
                }
            }
        }
        self.depend(&directory, OF_DIRECTORY, b"")?;
        Ok(Some(target(&rustix::fs::fstat(&directory)?)))
    }

    /// Watches an open file or directory because of this name in it.
    fn depend(&self, opened: &OwnedFd, events: WatchFlags, name: &[u8]) -> rustix::io::Result<()> {
        let kind = rustix::fs::fstatfs(opened)?.f_type as i64 & 0xffff_ffff;
        if !TELLING.contains(&kind) || mounts::classify(device(&rustix::fs::fstat(opened)?), opened.as_fd()) {
            return Err(Errno::OPNOTSUPP);
        }
        // Named by its descriptor, so that it cannot be exchanged in between.
        let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        // Under one lock: the thread may be about to forget this number.
        let mut dependents = self.watcher.dependents.lock();
        let number = inotify::add_watch(&self.watcher.inotify, path, events)?;
        let names = dependents.by_number.entry(number).or_default();
        names.entry(name.into()).or_default().push(Arc::downgrade(self.signal));
        Ok(())
    }
}

/// In reverse order.
fn components(path: &[u8]) -> Vec<Box<[u8]>> {
    let names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty() && *name != b".");
    names.rev().map(Into::into).collect()
}

fn open(directory: impl AsFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

fn target(stat: &rustix::fs::Stat) -> Target {
    Target { device: device(stat), inode: inode(stat) }
}

#[allow(clippy::unnecessary_cast)] // The types of these fields differ between architectures.
fn device(stat: &rustix::fs::Stat) -> u64 {
    stat.st_dev as u64
}

#[allow(clippy::unnecessary_cast)] // As above.
fn inode(stat: &rustix::fs::Stat) -> u64 {
    stat.st_ino as u64
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A tree `site/releases/7/page` with `site/current -> releases/7`.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let path = std::env::temp_dir().join(format!("gale-watch-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            let tree = Tree(path);
            for release in ["7", "8"] {
                fs::create_dir_all(tree.path(&format!("site/releases/{release}"))).unwrap();
                fs::write(tree.path(&format!("site/releases/{release}/page")), release).unwrap();
            }
            symlink("releases/7", tree.path("site/current")).unwrap();
            tree
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Waits until the thread has handled all events.
    fn hear_everything() {
        while is_possible() && !nothing_unread() {
            thread::yield_now();
        }
    }

    /// True if a watch on `path` holds after `change`; the events may be with the thread, or still unread.
    fn holds(tree: &Tree, path: &str, change: impl FnOnce(&Tree)) -> Option<bool> {
        // If other tests use the watcher, events of the tree's creation may still be unread, and would end the watch.
        hear_everything();
        let watch = PathWatch::begin(&tree.path(path))?;
        change(tree);
        // Reported changes are queued when the system call returns; then the thread may take its time.
        hear_everything();
        Some(watch.is_intact())
    }

    #[test]
    fn any_change_on_the_path_ends_a_watch() {
        type Change = (&'static str, fn(&Tree));
        let changes: [Change; 9] = [
            ("written", |tree| fs::write(tree.path("site/releases/7/page"), "x").unwrap()),
            ("unlinked", |tree| fs::remove_file(tree.path("site/releases/7/page")).unwrap()),
            ("replaced", |tree| {
                fs::rename(tree.path("site/releases/8/page"), tree.path("site/releases/7/page")).unwrap();
            }),
            ("permissions", |tree| {
                fs::set_permissions(tree.path("site/releases/7/page"), PermissionsExt::from_mode(0o600)).unwrap();
            }),
            ("a parent's permissions", |tree| {
                fs::set_permissions(tree.path("site/releases"), PermissionsExt::from_mode(0o700)).unwrap();
            }),
            ("a parent renamed", |tree| fs::rename(tree.path("site"), tree.path("elsewhere")).unwrap()),
            ("the link switched", |tree| {
                symlink("releases/8", tree.path("site/new")).unwrap();
                fs::rename(tree.path("site/new"), tree.path("site/current")).unwrap();
            }),
            ("written by another name", |tree| {
                fs::hard_link(tree.path("site/releases/7/page"), tree.path("other")).unwrap();
                fs::write(tree.path("other"), "x").unwrap();
            }),
            ("truncated", |tree| {
                fs::OpenOptions::new().write(true).open(tree.path("site/releases/7/page")).unwrap().set_len(0).unwrap();
            }),
        ];
        for (number, (what, change)) in changes.into_iter().enumerate() {
            let tree = Tree::new(&format!("changes-{number}"));
            let Some(holds) = holds(&tree, "site/current/page", change) else { return };
            assert!(!holds, "{what}");
        }
    }

    #[test]
    fn changes_beside_the_path_do_not_end_a_watch() {
        let tree = Tree::new("beside");
        let Some(holds) = holds(&tree, "site/current/page", |tree| {
            fs::write(tree.path("site/releases/7/other"), "x").unwrap();
            fs::write(tree.path("site/releases/8/page"), "x").unwrap();
            fs::read(tree.path("site/releases/7/page")).unwrap();
        }) else {
            return;
        };
        assert!(holds);
    }

    #[test]
    fn missing_file_is_watched_until_it_appears() {
        let tree = Tree::new("missing");
        let Some(watch) = PathWatch::begin(&tree.path("site/missing/page")) else { return };
        assert_eq!(watch.target(), None);
        drop(watch);
        assert_eq!(holds(&tree, "site/missing/page", |_| {}), Some(true));
        assert_eq!(
            holds(&tree, "site/missing/page", |tree| fs::create_dir(tree.path("site/missing")).unwrap()),
            Some(false)
        );
    }

    #[test]
    fn watch_names_the_target_of_the_path() {
        let tree = Tree::new("target");
        let Some(watch) = PathWatch::begin(&tree.path("site/./current/../7//page")) else { return };
        let stat = rustix::fs::stat(tree.path("site/releases/7/page")).unwrap();
        assert_eq!(watch.target(), Some(target(&stat)));
        assert!(PathWatch::begin(&tree.path("site/current/page/below")).is_none());
        assert!(PathWatch::begin(Path::new("/proc/self/status")).is_none(), "nothing is told there");
    }
}
