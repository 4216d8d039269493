//! Files whose paths may contain no symbolic links, or only links with the same owner as their target.
//!
//! No name is resolved twice: the file that was checked is the one that is opened, even if names are exchanged
//! meanwhile. If no link is allowed, the kernel checks that itself (`RESOLVE_NO_SYMLINKS`). If owners decide, a pool
//! walks the path part by part: it opens each link itself, reads the target from that descriptor, and compares the
//! link's owner with that of the file it has opened.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gale_runtime::default_pool;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::file_system::file_system;
use super::open::check_nothing_waits;
use super::{File, FileMetadata, OpenFlags, likely_device};

/// Symbolic links that are refused (ELOOP).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RefusedLinks {
    /// All of them.
    All,
    /// Those whose owner is not the owner of their target.
    Foreign,
}

/// Options of a link check on a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkCheck {
    /// The links to refuse.
    pub refused: RefusedLinks,
    /// Length of the prefix that is not checked; it ends before a slash.
    pub from: usize,
}

/// Opens a file if the kernel can do it from memory; `None` = not without waiting.
pub fn try_open_checked(path: &Path, flags: OpenFlags, check: LinkCheck) -> Option<io::Result<File>> {
    let opened = try_open_without_links(path, flags.without_privilege().kernel(), check)?;
    Some(opened.map_err(io::Error::from).and_then(|descriptor| File::inspect_local(descriptor, false)))
}

/// Opens a path without links if the kernel can do it from memory; `None` = not without waiting.
fn try_open_without_links(path: &Path, flags: OFlags, check: LinkCheck) -> Option<Result<OwnedFd, Errno>> {
    if !file_system(|file_system| file_system.can_check_links()) {
        return None;
    }
    check_nothing_waits(path, false).ok()?;
    match open_without_links(path, flags, check, ResolveFlags::CACHED) {
        // There is a link: a pool finds out its owner.
        Err(Errno::LOOP) if check.refused == RefusedLinks::Foreign => None,
        Err(Errno::AGAIN | Errno::INTR) => None,
        opened => Some(opened),
    }
}

/// Opens a file, in the pool `default` if that cannot be done at once. Errors: open(2)'s, ELOOP for a refused link, and
/// the pool's.
pub async fn open_checked(path: &Path, flags: OpenFlags, check: LinkCheck) -> io::Result<File> {
    if let Some(opened) = try_open_checked(path, flags, check) {
        return opened;
    }
    let own = PathBuf::from(path);
    default_pool().run_for(likely_device(path), move || open_checked_blocking(&own, flags, check)).await?
}

/// As [`open_checked`], where the caller may block.
pub fn open_checked_blocking(path: &Path, flags: OpenFlags, check: LinkCheck) -> io::Result<File> {
    let descriptor = walk(path, flags.without_privilege().kernel(), check)?;
    file_system(|file_system| file_system.adopt(descriptor))
}

/// As [`stat_checked`], if the kernel can do it from memory; `None` = not without waiting.
pub fn try_stat_checked(path: &Path, check: LinkCheck) -> Option<io::Result<FileMetadata>> {
    let opened = try_open_without_links(path, OFlags::PATH | OFlags::CLOEXEC, check)?;
    Some(opened.map_err(io::Error::from).and_then(|descriptor| stat_of(&descriptor)))
}

/// Metadata of a path. Errors: as [`open_checked`].
pub async fn stat_checked(path: &Path, check: LinkCheck) -> io::Result<FileMetadata> {
    if let Some(found) = try_stat_checked(path, check) {
        return found;
    }
    let own = PathBuf::from(path);
    let stat = move || stat_of(&walk(&own, OFlags::PATH | OFlags::CLOEXEC, check)?);
    default_pool().run_for(likely_device(path), stat).await?
}

fn stat_of(descriptor: &OwnedFd) -> io::Result<FileMetadata> {
    Ok(FileMetadata::from_kernel(&rustix::fs::fstat(descriptor)?))
}

/// Opens a path without links; LOOP if it contains one.
fn open_without_links(path: &Path, flags: OFlags, check: LinkCheck, more: ResolveFlags) -> Result<OwnedFd, Errno> {
    let (trusted, rest) = split(path, check.from);
    let resolve = ResolveFlags::NO_SYMLINKS | more;
    if trusted.as_os_str().is_empty() {
        return rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
    }
    let start = rustix::fs::openat2(CWD, trusted, DIRECTORY, Mode::empty(), more)?;
    rustix::fs::openat2(start, rest, flags, Mode::empty(), resolve)
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Splits a path into the prefix that is not checked and the rest relative to it.
fn split(path: &Path, from: usize) -> (&Path, &Path) {
    let (trusted, rest) = path.as_os_str().as_bytes().split_at_checked(from).unwrap_or((b"", b""));
    let slashes = rest.iter().take_while(|&&byte| byte == b'/').count();
    let rest = if slashes == rest.len() { b"." } else { &rest[slashes..] };
    (Path::new(OsStr::from_bytes(trusted)), Path::new(OsStr::from_bytes(rest)))
}

/// Opens a path part by part; blocks.
fn walk(path: &Path, flags: OFlags, check: LinkCheck) -> io::Result<OwnedFd> {
    let bytes = path.as_os_str().as_bytes();
    let (mut directory, rest) = if check.from > 0 {
        let (trusted, rest) = split(path, check.from);
        (rustix::fs::openat(CWD, trusted, DIRECTORY, Mode::empty())?, rest.as_os_str().as_bytes())
    } else if bytes.starts_with(b"/") {
        (rustix::fs::openat(CWD, "/", DIRECTORY, Mode::empty())?, bytes)
    } else {
        (rustix::fs::openat(CWD, ".", DIRECTORY, Mode::empty())?, bytes)
    };
    let wants_directory = bytes.ends_with(b"/");
    let mut parts = rest.split(|&byte| byte == b'/').filter(|part| !part.is_empty()).peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            let flags = if wants_directory { flags | OFlags::DIRECTORY } else { flags };
            return step(&directory, part, flags, check.refused);
        }
        directory = step(&directory, part, OFlags::PATH | OFlags::CLOEXEC, check.refused)?;
    }
    Ok(rustix::fs::openat(directory, ".", flags, Mode::empty())?)
}

/// Opens one name in a directory, or the target of a link if that is allowed.
fn step(directory: &impl AsFd, name: &[u8], flags: OFlags, refused: RefusedLinks) -> io::Result<OwnedFd> {
    let seen = rustix::fs::openat(directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&seen)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        if flags.contains(OFlags::PATH) && !flags.contains(OFlags::DIRECTORY) {
            return Ok(seen);
        }
        // If it was exchanged for a link meanwhile, the kernel refuses it.
        return Ok(rustix::fs::openat(directory, name, flags | OFlags::NOFOLLOW, Mode::empty())?);
    }
    if refused == RefusedLinks::All {
        return Err(Errno::LOOP.into());
    }
    let text = rustix::fs::readlinkat(&seen, "", Vec::new())?;
    let target = rustix::fs::openat(directory, text, flags, Mode::empty())?;
    if rustix::fs::fstat(&target)?.st_uid == stat.st_uid { Ok(target) } else { Err(Errno::LOOP.into()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::Scratch;
    use gale_runtime::{EventLoop, LoopOptions};

    struct Directory(Scratch);

    impl Directory {
        /// `real/file`, a link `link` to `real`, and a link `real/alias` to `file`.
        fn new() -> Directory {
            let scratch = Scratch::new();
            let path = scratch.path();
            std::fs::create_dir_all(path.join("real/deep")).unwrap();
            std::fs::write(path.join("real/file"), "contents").unwrap();
            symlink("real", path.join("link")).unwrap();
            symlink("file", path.join("real/alias")).unwrap();
            Directory(scratch)
        }

        /// The size that `open` and `stat` find, or the error number; all ways must agree.
        fn look(&self, name: &str, refused: RefusedLinks, from: usize) -> Result<u64, i32> {
            let (path, check) = (self.0.path().join(name), LinkCheck { refused, from });
            let size = |found: io::Result<File>| found.map(|file| file.metadata().size);
            let of = |found: io::Result<u64>| found.map_err(|error| error.raw_os_error().unwrap_or(0));
            let blocking = of(size(open_checked_blocking(&path, OpenFlags::READ, check)));
            let found = EventLoop::new(LoopOptions::default()).unwrap().run(async {
                let opened = of(size(open_checked(&path, OpenFlags::READ, check).await));
                let seen = of(stat_checked(&path, check).await.map(|metadata| metadata.size));
                assert_eq!(opened, seen, "{name}");
                opened
            });
            assert_eq!(found, blocking, "{name}");
            found
        }
    }

    #[test]
    fn no_link_is_passed_where_none_may_be() {
        let directory = Directory::new();
        let all = |name| directory.look(name, RefusedLinks::All, 0);
        assert_eq!(all("real/file"), Ok(8));
        assert_eq!(all("real//deep/.././file"), Ok(8));
        for name in ["link/file", "real/alias", "link"] {
            assert_eq!(all(name), Err(libc::ELOOP), "{name}");
        }
        assert_eq!(all("real/missing"), Err(libc::ENOENT));
        assert_eq!(all("real/file/"), Err(libc::ENOTDIR));
        assert_eq!(all("real/file/more"), Err(libc::ENOTDIR));
    }

    #[test]
    fn links_before_the_checked_part_are_passed() {
        let directory = Directory::new();
        let from = directory.0.path().join("link").as_os_str().len();
        assert_eq!(directory.look("link/file", RefusedLinks::All, from), Ok(8));
        assert_eq!(directory.look("link/alias", RefusedLinks::All, from), Err(libc::ELOOP));
        assert_eq!(directory.look("link/alias", RefusedLinks::Foreign, from), Ok(8));
    }

    #[test]
    fn links_to_files_of_their_owner_are_followed() {
        let directory = Directory::new();
        symlink("/etc/passwd", directory.0.path().join("foreign")).unwrap();
        symlink("nowhere", directory.0.path().join("dangling")).unwrap();
        let foreign = |name| directory.look(name, RefusedLinks::Foreign, 0);
        assert_eq!(foreign("link/file"), Ok(8));
        assert_eq!(foreign("link/alias"), Ok(8));
        assert_eq!(foreign("dangling"), Err(libc::ENOENT));
        if rustix::process::geteuid().is_root() {
            // Make the link another user's.
            let other = rustix::fs::Uid::from_raw(65534);
            let path = directory.0.path().join("foreign");
            rustix::fs::chownat(CWD, path, Some(other), None, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
        }
        assert_eq!(foreign("foreign"), Err(libc::ELOOP));
    }
}
