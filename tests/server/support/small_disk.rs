//! A small file system in memory for tests of full disks.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

use super::{NO_MOUNTS, skip};

/// Unmounted when dropped.
pub struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts a file system of this many KiB; skips and returns `None` where mounting is not allowed, as in most
    /// containers.
    pub fn mount(path: &Path, kib: u32) -> Option<SmallDisk> {
        fs::create_dir_all(path).expect("a directory of the test's own");
        let options = std::ffi::CString::new(format!("size={kib}k,mode=777")).expect("text");
        match rustix::mount::mount("gale-test", path, "tmpfs", MountFlags::empty(), Some(&*options)) {
            Ok(()) => Some(SmallDisk { path: path.to_owned() }),
            Err(error) => {
                eprintln!("mount() of a tmpfs: {error}");
                skip(NO_MOUNTS);
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes all free space.
    pub fn fill(&self) {
        let size = rustix::fs::statvfs(&self.path).expect("it is mounted");
        let more_than_all = vec![0; (size.f_blocks * size.f_frsize) as usize + 1];
        assert!(fs::write(self.filler(), more_than_all).is_err(), "it is full now");
    }

    /// Frees that space.
    pub fn make_room(&self) {
        fs::remove_file(self.filler()).expect("ours");
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A lazy unmount works while the server has files open.
        let _ = rustix::mount::unmount(&self.path, UnmountFlags::DETACH);
    }
}
