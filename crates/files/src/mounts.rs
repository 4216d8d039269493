//! Properties of file systems by device: in memory, on local disks, or such that an open, a stat or a read may wait for
//! another machine or process, even if the kernel has everything cached (FUSE, NFS and the like).
//!
//! The mount point of a path cannot be known without walking the path. While the mount table has no file system that
//! waits, the common case, that does not matter; otherwise a path is resolved first (from the kernel's cache) and its
//! device looked up here. The table is read again every few seconds, off the loop.
//!
//! For the fairness of pools a guess is enough: the device mounted where the path's text begins. If it is wrong (behind
//! a symbolic link, right after a mount) a task stands in another device's queue. [`note_directory`] corrects it for
//! directories where that matters.
//!
//! Device numbers are those of files (`st_dev`): btrfs gives each subvolume a number that is not in the table.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use gale_base::radix::PrefixTree;
use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::time::{ClockId, clock_gettime};

use super::FileMetadata;
use super::open::resolve_cached;

/// The storage of a file system, for which an operation may wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// None: there is no storage behind it.
    Memory,
    /// Storage of this machine. Also the default for types not in the table below.
    Local,
    /// As `Local`, and a ring reads from it without a kernel thread that waits (`FMODE_BUF_RASYNC`).
    Asynchronous,
    /// Another machine or a user process.
    Remote,
    /// That of its layers. They may lie on anything mounted here, so it counts as remote while something remote is
    /// mounted.
    Layered,
}

/// The reads that update a file's access time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AccessTimes {
    /// None, or not on a disk, or not at once.
    Never,
    /// The first after a change, and one a day (`relatime`).
    Relative,
    /// All (`strictatime`).
    Always,
}

/// File systems by type (proc(5), mountinfo) and magic number (statfs(2)); the number is for devices that are not in
/// the mount table. A type with a subtype, as `fuse.sshfs`, counts by the part before the dot. (autofs, which every
/// systemd mounts somewhere, holds no files; walking through it is not answered from the cache.)
const FILE_SYSTEMS: [(&str, u64, Kind); 28] = [
    ("tmpfs", 0x0102_1994, Kind::Memory),
    ("devtmpfs", 0x0102_1994, Kind::Memory),
    ("ramfs", 0x8584_58f6, Kind::Memory),
    ("hugetlbfs", 0x9584_58f6, Kind::Memory),
    ("ext4", 0xef53, Kind::Asynchronous),
    ("xfs", 0x5846_5342, Kind::Asynchronous),
    ("btrfs", 0x9123_683e, Kind::Asynchronous),
    ("overlay", 0x794c_7630, Kind::Layered),
    ("fuse", 0x6573_5546, Kind::Remote),
    ("fuseblk", 0x6573_5546, Kind::Remote),
    ("virtiofs", 0x6573_5546, Kind::Remote),
    ("nfs", 0x6969, Kind::Remote),
    ("nfs4", 0x6969, Kind::Remote),
    ("cifs", 0xff53_4d42, Kind::Remote),
    ("smb3", 0xfe53_4d42, Kind::Remote),
    ("smbfs", 0x517b, Kind::Remote),
    ("9p", 0x0102_1997, Kind::Remote),
    ("ceph", 0x00c3_6400, Kind::Remote),
    ("afs", 0x5346_414f, Kind::Remote),
    ("lustre", 0x0bd0_0bd0, Kind::Remote),
    ("ocfs2", 0x7461_636f, Kind::Remote),
    ("gfs2", 0x0116_1970, Kind::Remote),
    ("coda", 0x7375_7245, Kind::Remote),
    ("vboxsf", 0x786f_4256, Kind::Remote),
    // OrangeFS.
    ("pvfs2", 0x2003_0528, Kind::Remote),
    ("beegfs", 0x1983_0326, Kind::Remote),
    ("gpfs", 0x4750_4653, Kind::Remote),
    // The kernel's own AFS.
    ("afs", 0x6b41_4653, Kind::Remote),
];

/// File systems that keep times in memory with `lazytime` (mount(8)). Not all do: btrfs accepts the option and begins a
/// transaction nevertheless.
const LAZY: [&str; 2] = ["ext4", "xfs"];

/// Age at which the mount table is read again.
const REFRESH_SECONDS: u64 = 5;

static ANY_WAITING: AtomicBool = AtomicBool::new(false);
static ANY_STRICT: AtomicBool = AtomicBool::new(false);
static READ_AT_SECONDS: AtomicU64 = AtomicU64::new(0);
static DEVICES: RwLock<Option<HashMap<u64, Kind>>> = RwLock::new(None);
/// By mount id: a device may have several mounts with different options.
static ACCESS_TIMES: RwLock<Option<HashMap<u64, AccessTimes>>> = RwLock::new(None);
/// Source and mount point by device.
static NAMES: RwLock<Option<HashMap<u64, Mounted>>> = RwLock::new(None);
/// Devices by mount point.
static POINTS: RwLock<Option<PrefixTree<u64>>> = RwLock::new(None);
/// Devices by noted directory.
static DIRECTORIES: Mutex<BTreeMap<Vec<u8>, u64>> = Mutex::new(BTreeMap::new());

/// True if a file system that waits for others is mounted.
pub(crate) fn any_waiting() -> bool {
    ANY_WAITING.load(Ordering::Relaxed)
}

/// True if files of this device may wait for others; `None` = unknown.
pub(crate) fn may_wait(device: u64) -> Option<bool> {
    kind(device).map(waits)
}

/// True if files of this device are known to exist only in memory.
pub(crate) fn lies_in_memory(device: u64) -> bool {
    kind(device) == Some(Kind::Memory)
}

/// The reads that update a file's access time where that may wait for a local disk: by the mount (`mnt_id` of
/// statx(2)), or else by the device. If both are unknown, `relatime`, as on most mounts.
pub(crate) fn access_times(mount: Option<u64>, device: u64) -> AccessTimes {
    let by_mount = |mount| ACCESS_TIMES.read().as_ref()?.get(&mount).copied();
    if let Some(known) = mount.and_then(by_mount) {
        return known;
    }
    let is_elsewhere = kind(device).is_some_and(|kind| !is_of_disk(kind, device));
    if is_elsewhere { AccessTimes::Never } else { AccessTimes::Relative }
}

/// True if it lies on a disk. Other file systems have an anonymous device, with major number 0; so has btrfs, which may
/// span several disks.
fn is_of_disk(kind: Kind, device: u64) -> bool {
    kind == Kind::Asynchronous || kind == Kind::Local && rustix::fs::major(device) != 0
}

/// True if a ring is known to read from this device without a kernel thread that waits.
pub(crate) fn reads_asynchronously(device: u64) -> bool {
    kind(device) == Some(Kind::Asynchronous)
}

/// True if a disk is mounted with `strictatime`.
pub(crate) fn any_strict() -> bool {
    ANY_STRICT.load(Ordering::Relaxed)
}

/// The device of a path, as far as its text tells.
pub(crate) fn device_of_path(path: &Path) -> Option<u64> {
    device_below(POINTS.read().as_ref()?, path.as_os_str().as_bytes())
}

fn device_below(points: &PrefixTree<u64>, path: &[u8]) -> Option<u64> {
    // `/mnt` is no parent of `/mnt2`; the root ends with its own slash.
    let is_parent = |length: usize| length == path.len() || path[length] == b'/' || path[..length].ends_with(b"/");
    points.prefixes(path).find(|&(_, length)| is_parent(length)).map(|(&device, _)| device)
}

/// Notes the device of the files in a directory, taken from an open file there: the text of a path does not tell if it
/// leads through a symbolic link or into a subvolume. It is valid until it is noted again.
///
/// # Errors
/// fstat(2)'s.
pub fn note_directory(path: &Path, file: impl AsFd) -> io::Result<()> {
    let device = FileMetadata::from_kernel(&rustix::fs::fstat(file)?).device;
    let path = path.as_os_str().as_bytes();
    let mut directories = DIRECTORIES.lock();
    directories.insert(path.to_owned(), device);
    if let Some(points) = &mut *POINTS.write() {
        points.insert(path, device);
    }
    Ok(())
}

/// Source and first mount point of a device in the mount table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mounted {
    /// Its source: `/dev/sda1`.
    pub source: Arc<str>,
    /// Its first mount point.
    pub point: Arc<str>,
}

/// The mount table's entry of a device.
pub(crate) fn name_of(device: u64) -> Option<Mounted> {
    NAMES.read().as_ref()?.get(&device).cloned()
}

/// Asks the file system whether its files may wait for others, which may block, and remembers the answer.
pub(crate) fn classify(device: u64, file: BorrowedFd<'_>) -> bool {
    if let Some(known) = may_wait(device) {
        return known;
    }
    // If the answer is refused, waiting is assumed.
    let kind = rustix::fs::fstatfs(file).map_or(Kind::Remote, |fs| kind_by_magic(fs.f_type as u64 & 0xffff_ffff));
    DEVICES.write().get_or_insert_default().insert(device, kind);
    if kind == Kind::Remote {
        // Mounted since the table was read: from now on every path is checked before it is opened on a loop.
        ANY_WAITING.store(true, Ordering::Relaxed);
    }
    waits(kind)
}

fn kind(device: u64) -> Option<Kind> {
    DEVICES.read().as_ref()?.get(&device).copied()
}

fn waits(kind: Kind) -> bool {
    kind == Kind::Remote || (kind == Kind::Layered && any_waiting())
}

/// True if it is time to `refresh`; true for one caller.
pub(crate) fn refresh_due() -> bool {
    // 0 stands for "never".
    let now = clock_gettime(ClockId::MonotonicCoarse).tv_sec.max(1) as u64;
    let read_at = READ_AT_SECONDS.load(Ordering::Relaxed);
    (read_at == 0 || now >= read_at + REFRESH_SECONDS)
        && READ_AT_SECONDS.compare_exchange(read_at, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Reads the mount table.
pub(crate) fn refresh() {
    let table = std::fs::read_to_string("/proc/self/mountinfo");
    if table.is_err() && POINTS.read().is_some() {
        // A temporary failure, such as no free descriptor: the known state remains.
        return;
    }
    // Without /proc, `classify` asks for every device when a pool opens a file.
    let table = table.ok();
    let mut mounts: Vec<Mount> = table.iter().flat_map(|table| table.lines().filter_map(mount_of)).collect();
    for mount in &mut mounts {
        mount.device = device_of_files(mount).unwrap_or(mount.device);
    }
    let mut points = PrefixTree::new();
    for mount in &mounts {
        // Of several mounts at one place the last one hides the others.
        points.insert(&mount.point, mount.device);
    }
    {
        // Under one lock: a directory may be noted meanwhile.
        let directories = DIRECTORIES.lock();
        directories.iter().for_each(|(path, &device)| _ = points.insert(path, device));
        *POINTS.write() = Some(points);
    }
    // Of several mounts of one device the first.
    let text = |bytes: &[u8]| Arc::from(&*String::from_utf8_lossy(bytes));
    let names = mounts
        .iter()
        .rev()
        .map(|mount| (mount.device, Mounted { source: text(&mount.source), point: text(&mount.point) }));
    *NAMES.write() = Some(names.collect());
    let devices: HashMap<u64, Kind> = mounts.iter().map(|mount| (mount.device, mount.kind)).collect();
    let any_strict = mounts.iter().any(|mount| mount.access_times == AccessTimes::Always);
    *ACCESS_TIMES.write() = Some(mounts.iter().map(|mount| (mount.id, mount.access_times)).collect());
    ANY_STRICT.store(any_strict, Ordering::Relaxed);
    let any_waiting = table.is_none() || devices.values().any(|&kind| kind == Kind::Remote);
    ANY_WAITING.store(any_waiting, Ordering::Relaxed);
    *DEVICES.write() = Some(devices);
}

struct Mount {
    id: u64,
    device: u64,
    source: Vec<u8>,
    point: Vec<u8>,
    kind: Kind,
    access_times: AccessTimes,
}

/// The device number of files at a mount point, where it may differ from the table's. `None` if that is unknown without
/// waiting, or another mount hides this one.
fn device_of_files(mount: &Mount) -> Option<u64> {
    if rustix::fs::major(mount.device) != 0 || !matches!(mount.kind, Kind::Asynchronous | Kind::Layered) {
        return None;
    }
    let point = Path::new(OsStr::from_bytes(&mount.point));
    let mount_point = resolve_cached(point, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC)?.ok()?;
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&mount_point, c"", flags, StatxFlags::MNT_ID).ok()?;
    (stat.stx_mnt_id == mount.id).then(|| rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// One line of mountinfo: `36 35 98:0 /root /mount options [optional fields] - type source options`.
fn mount_of(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    let id = fields.next()?.parse().ok()?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    let point = unescape(fields.nth(1)?.as_bytes());
    let mut options = fields.next()?.split(',');
    let mut source = line.split_once(" - ")?.1.split(' ');
    let name = source.next()?;
    let kind = kind_by_name(name.split('.').next()?);
    let source_name = unescape(source.next()?.as_bytes());
    let is_lazy = LAZY.contains(&name) && source.next()?.split(',').any(|option| option == "lazytime");
    let access_times = match options.find(|option| matches!(*option, "relatime" | "noatime" | "ro")) {
        _ if is_lazy || !is_of_disk(kind, device) => AccessTimes::Never,
        None => AccessTimes::Always,
        Some("relatime") => AccessTimes::Relative,
        Some(_) => AccessTimes::Never,
    };
    Some(Mount { id, device, source: source_name, point, kind, access_times })
}

/// Decodes escapes: blanks and the like are `\040` in the mount table (proc(5)).
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let octal = |digits: &[u8]| {
            digits.iter().try_fold(0u8, |value, &digit| match digit {
                b'0'..=b'7' => value.checked_mul(8)?.checked_add(digit - b'0'),
                _ => None,
            })
        };
        let escaped = after.get(..3).filter(|_| first == b'\\').and_then(octal);
        rest = if escaped.is_some() { &after[3..] } else { after };
        plain.push(escaped.unwrap_or(first));
    }
    plain
}

fn kind_by_name(name: &str) -> Kind {
    FILE_SYSTEMS.iter().find(|row| row.0 == name).map_or(Kind::Local, |row| row.2)
}

fn kind_by_magic(magic: u64) -> Kind {
    FILE_SYSTEMS.iter().find(|row| row.1 == magic).map_or(Kind::Local, |row| row.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_tells_device_and_kind_and_place() {
        let tells =
            |line| mount_of(line).map(|mount| (mount.device, mount.kind, String::from_utf8(mount.point).unwrap()));
        let device = rustix::fs::makedev;
        let local = "26 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw";
        assert_eq!(tells(local), Some((device(8, 1), Kind::Asynchronous, "/".into())));
        let remote = "40 26 0:45 / /home/a\\040b rw master:2 - fuse.sshfs host:/ rw,user_id=0";
        assert_eq!(tells(remote), Some((device(0, 45), Kind::Remote, "/home/a b".into())));
        let layered = "41 26 0:46 / /merged rw - overlay overlay rw,lowerdir=/a:/b";
        assert_eq!(tells(layered), Some((device(0, 46), Kind::Layered, "/merged".into())));
        let memory = "42 26 0:47 / /dev/shm rw - tmpfs tmpfs rw";
        assert_eq!(tells(memory), Some((device(0, 47), Kind::Memory, "/dev/shm".into())));
        assert_eq!(tells("nonsense"), None);
        assert_eq!(mount_of(local).unwrap().source, b"/dev/sda1");
    }

    #[test]
    fn times_of_access_are_written_as_the_mount_says_and_wait_only_for_disks() {
        let times = |options: &str, device: &str, kind: &str| {
            let line = format!("26 1 {device} / /mnt {options} shared:1 - {kind} /dev/sda1 rw");
            let mount = mount_of(&line).expect("a mount");
            assert_eq!(mount.id, 26);
            mount.access_times
        };
        for (device, kind) in [("8:1", "ext4"), ("0:31", "btrfs"), ("8:2", "f2fs")] {
            assert_eq!(times("rw,nosuid", device, kind), AccessTimes::Always, "{kind}");
            assert_eq!(times("rw,nosuid,relatime", device, kind), AccessTimes::Relative, "{kind}");
            assert_eq!(times("rw,noatime", device, kind), AccessTimes::Never, "{kind}");
            assert_eq!(times("ro,relatime", device, kind), AccessTimes::Never, "{kind}");
        }
        let lazy = |kind: &str| {
            let line = format!("26 1 8:1 / /mnt rw - {kind} /dev/sda1 rw,lazytime,discard");
            mount_of(&line).expect("a mount").access_times
        };
        assert_eq!(["ext4", "xfs", "btrfs"].map(lazy), [AccessTimes::Never, AccessTimes::Never, AccessTimes::Always]);
        for (device, kind) in [("0:5", "tmpfs"), ("0:6", "devpts"), ("0:7", "nfs"), ("0:8", "overlay")] {
            assert_eq!(times("rw", device, kind), AccessTimes::Never, "{kind}");
        }
    }

    #[test]
    fn escapes_of_the_mount_table_are_undone_and_everything_else_is_kept() {
        let plain = |text: &str| String::from_utf8(unescape(text.as_bytes())).unwrap();
        assert_eq!(plain(r"/a\040b\011\134"), "/a b\t\\");
        assert_eq!(plain(r"/a\04"), r"/a\04");
        assert_eq!(plain(r"/a\999\777\"), r"/a\999\777\");
    }

    #[test]
    fn a_directory_that_was_looked_at_lies_where_its_files_do() {
        // As in a subvolume: the path is below a mount point with another number.
        let directory = std::env::temp_dir().join(format!("gale-noted-{}", std::process::id()));
        let elsewhere = std::fs::File::open("/proc/self/stat").unwrap();
        let there = FileMetadata::from_kernel(&rustix::fs::fstat(&elsewhere).unwrap()).device;
        refresh();
        assert_ne!(device_of_path(&directory), Some(there));
        note_directory(&directory, &elsewhere).unwrap();
        for _ in 0..2 {
            assert_eq!(device_of_path(&directory.join("a/b")), Some(there));
            assert_ne!(device_of_path(&std::env::temp_dir().join("other")), Some(there));
            refresh();
        }
    }

    #[test]
    fn a_path_belongs_to_the_nearest_mount_point_above_it() {
        let mut points = PrefixTree::new();
        for (device, point) in (1..).zip(["/", "/mnt", "/mnt/disk"]) {
            points.insert(point.as_bytes(), device);
        }
        let device = |path: &str| device_below(&points, path.as_bytes());
        assert_eq!([device("/"), device("/etc"), device("/mnt2/x")], [Some(1); 3]);
        assert_eq!([device("/mnt"), device("/mnt/x"), device("/mnt/disk2")], [Some(2); 3]);
        assert_eq!([device("/mnt/disk"), device("/mnt/disk/a/b")], [Some(3); 2]);
        assert_eq!([device("relative/path"), device("")], [None; 2]);
    }
}
