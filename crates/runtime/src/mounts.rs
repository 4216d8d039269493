//! Which file systems can make an open, a stat or a read wait for another machine or process, whatever the kernel has
//! cached: FUSE, NFS and the like. Known by device.
//!
//! Mount points cannot be told from paths without walking them, so: while the mount table names no such file system,
//! which is the common case, nothing needs to be asked; otherwise a path is resolved first (from the kernel's cache) and
//! its device looked up here. The table is read again, off the loop, when a few seconds have passed.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use rustix::time::{ClockId, clock_gettime};

/// Types of file systems (proc(5), mountinfo) behind which another machine or a user process stands. A type with a
/// subtype, as `fuse.sshfs`, counts by what precedes the dot. (autofs, which every systemd mounts somewhere, holds no
/// files; walking through it is not answered from the cache.)
const WAITING_TYPES: [&str; 14] = [
    "fuse", "fuseblk", "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs", "lustre", "virtiofs", "ocfs2", "gfs2",
    "coda",
];

/// Their magic numbers (statfs(2)), for devices that the mount table does not name.
const WAITING_MAGICS: [u64; 12] = [
    0x6573_5546, // FUSE
    0x6969,      // NFS
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB2
    0x517b,      // SMB
    0x0102_1997, // 9P
    0x00c3_6400, // Ceph
    0x5346_414f, // AFS
    0x0bd0_0bd0, // Lustre
    0x7461_636f, // OCFS2
    0x0116_1970, // GFS2
    0x7375_7245, // Coda
];

/// How old the picture of the mount table may get.
const REFRESH_SECONDS: u64 = 5;

static ANY_WAITING: AtomicBool = AtomicBool::new(false);
static READ_AT_SECONDS: AtomicU64 = AtomicU64::new(0);
/// Device to "may wait".
static DEVICES: RwLock<Option<HashMap<u64, bool>>> = RwLock::new(None);

/// Whether any such file system is mounted.
pub(crate) fn any_waiting() -> bool {
    ANY_WAITING.load(Ordering::Relaxed)
}

/// Whether the files of this device may wait; `None` = not known yet.
pub(crate) fn may_wait(device: u64) -> Option<bool> {
    DEVICES.read().as_ref()?.get(&device).copied()
}

/// Asks the file system itself, which may block, and remembers the answer.
pub(crate) fn classify(device: u64, file: BorrowedFd<'_>) -> bool {
    if let Some(known) = may_wait(device) {
        return known;
    }
    // Where the answer is refused, waiting is assumed.
    let waiting =
        rustix::fs::fstatfs(file).map_or(true, |fs| WAITING_MAGICS.contains(&(fs.f_type as u64 & 0xffff_ffff)));
    DEVICES.write().get_or_insert_default().insert(device, waiting);
    waiting
}

/// Whether it is time to `refresh`; true for one caller.
pub(crate) fn refresh_due() -> bool {
    // 0 stands for "never".
    let now = clock_gettime(ClockId::MonotonicCoarse).tv_sec.max(1) as u64;
    let read_at = READ_AT_SECONDS.load(Ordering::Relaxed);
    (read_at == 0 || now >= read_at + REFRESH_SECONDS)
        && READ_AT_SECONDS.compare_exchange(read_at, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Reads the mount table.
pub(crate) fn refresh() {
    // Without /proc every device is asked by `classify` when something is opened in the pool.
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok();
    let devices: HashMap<u64, bool> = table.iter().flat_map(|table| table.lines().filter_map(device_of)).collect();
    ANY_WAITING.store(table.is_none() || devices.values().any(|&waiting| waiting), Ordering::Relaxed);
    *DEVICES.write() = Some(devices);
}

/// One line of mountinfo: `36 35 98:0 /root /mount options [optional fields] - type source options`.
fn device_of(line: &str) -> Option<(u64, bool)> {
    let (major, minor) = line.split(' ').nth(2)?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    let kind = line.split_once(" - ")?.1.split(' ').next()?;
    let base = kind.split('.').next()?;
    Some((device, WAITING_TYPES.contains(&base)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_tells_device_and_kind() {
        let local = "26 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw";
        assert_eq!(device_of(local), Some((rustix::fs::makedev(8, 1), false)));
        let remote = "40 26 0:45 / /home/a\\040b rw master:2 - fuse.sshfs host:/ rw,user_id=0";
        assert_eq!(device_of(remote), Some((rustix::fs::makedev(0, 45), true)));
        assert_eq!(device_of("nonsense"), None);
    }
}
