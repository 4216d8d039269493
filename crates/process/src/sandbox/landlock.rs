//! Landlock: restricts the files and TCP ports that a thread and its children can reach, whatever privileges they have.
//! (<https://docs.kernel.org/userspace-api/landlock.html>)
//!
//! A domain handles some kinds of access, and denies them except where a rule allows them. Descriptors that were open
//! before are not affected: log files and listening sockets come from the master.
//!
//! The three system calls are made directly, because a rule needs only a descriptor. The crate landlock queries the
//! type of each descriptor (fstat), which blocks on a file system that hangs.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use gale_runtime::RingOptions;

use super::places::OpenPlace;

/// First version that supports moving files between directories (Linux 5.19).
const VERSION_MIN: i32 = 2;

/// First version that can forbid truncating (Linux 6.2).
const VERSION_WITH_TRUNCATE: i32 = 3;

/// First version that supports TCP ports (Linux 6.7).
const VERSION_WITH_PORTS: i32 = 4;

/// Versions by the first kernel that supports them.
const KERNELS: [((u16, u16), i32); 7] =
    [((5, 13), 1), ((5, 19), 2), ((6, 2), 3), ((6, 7), 4), ((6, 10), 5), ((6, 12), 6), ((6, 15), 7)];

// Accesses to files and directories: `LANDLOCK_ACCESS_FS_…`.
const EXECUTE: u64 = 1 << 0;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const REMOVE_DIR: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_DIR: u64 = 1 << 7;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
const MAKE_FIFO: u64 = 1 << 10;
const MAKE_BLOCK: u64 = 1 << 11;
const MAKE_SYM: u64 = 1 << 12;
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;

/// `LANDLOCK_ACCESS_NET_CONNECT_TCP`
const CONNECT_TCP: u64 = 1 << 1;

const READING: u64 = READ_FILE | READ_DIR;

/// Access of workers to their places: all but making devices. DAV moves links, sockets and pipes.
const WRITING_HERE: u64 =
    WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE;

const WRITING: u64 = WRITING_HERE | MAKE_CHAR | MAKE_BLOCK;

/// Kinds of access that apply to a file that is not a directory.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE;

/// `struct landlock_ruleset_attr`, as far as it is used.
#[repr(C)]
struct RulesetAttribute {
    handled_files: u64,
    handled_ports: u64,
}

/// `struct landlock_path_beneath_attr`
#[repr(C, packed)]
struct PathAttribute {
    allowed: u64,
    descriptor: i32,
}

/// `struct landlock_net_port_attr`
#[repr(C)]
struct PortAttribute {
    allowed: u64,
    port: u64,
}

const PATH_BENEATH: libc::c_int = 1;
const NET_PORT: libc::c_int = 2;

/// Access that a worker process keeps.
pub(super) struct Rules {
    /// Places where it may write and read; `None` = anywhere.
    pub writable: Option<Vec<OpenPlace>>,
    /// Further places where it may read; `None` = anywhere.
    pub readable: Option<Vec<OpenPlace>>,
    /// TCP ports to which it may connect; `None` = any.
    pub ports: Option<Vec<u16>>,
}

/// Version of the kernel's Landlock, or `None` without it. Tests pretend to have an older kernel.
pub(super) fn version() -> Option<i32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION`
    const VERSION: libc::c_ulong = 1;
    // SAFETY: with this flag the call takes no ruleset and returns a number.
    let code = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0, VERSION) };
    let of_kernel = i32::try_from(code).ok().filter(|&version| version > 0)?;
    let Some(kernel) = RingOptions::default().kernel_max else { return Some(of_kernel) };
    let known = KERNELS.iter().rev().find(|(since, _)| *since <= kernel)?;
    Some(of_kernel.min(known.1))
}

/// Restricts the calling thread, which can gain no more privileges (`no_new_privs`), and those that it starts. Returns
/// whether the kernel supports ports.
///
/// # Errors
/// The reason for the failure.
pub(super) fn restrict(rules: &Rules) -> Result<bool, String> {
    let version = version().ok_or("the kernel has no Landlock, or it is switched off")?;
    if version < VERSION_MIN {
        return Err(format!("the kernel's Landlock {version} is too old, {VERSION_MIN} is needed (Linux 5.19)"));
    }
    enter(rules, version).map_err(|error| format!("Landlock failed: {error}"))?;
    Ok(version >= VERSION_WITH_PORTS)
}

fn enter(rules: &Rules, version: i32) -> io::Result<()> {
    let of_version = if version < VERSION_WITH_TRUNCATE { !TRUNCATE } else { u64::MAX };
    let writing = if rules.writable.is_some() { WRITING } else { 0 };
    let reading = if rules.readable.is_some() { READING } else { 0 };
    let handled = (EXECUTE | writing | reading) & of_version;
    let ports = rules.ports.as_ref().filter(|_| version >= VERSION_WITH_PORTS);
    let attribute =
        RulesetAttribute { handled_files: handled, handled_ports: if ports.is_some() { CONNECT_TCP } else { 0 } };
    // SAFETY: the call reads the attribute.
    let ruleset = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attribute, size_of::<RulesetAttribute>(), 0)
    };
    // SAFETY: a new descriptor.
    let ruleset = unsafe { OwnedFd::from_raw_fd(checked(ruleset)?) };
    for place in rules.writable.iter().flatten() {
        allow_place(&ruleset, place, (WRITING_HERE | READING) & handled)?;
    }
    for place in rules.readable.iter().flatten() {
        allow_place(&ruleset, place, READING & handled)?;
    }
    for &port in ports.into_iter().flatten() {
        let attribute = PortAttribute { allowed: CONNECT_TCP, port: port.into() };
        add_rule(&ruleset, NET_PORT, &attribute)?;
    }
    // SAFETY: the call takes a descriptor and no flags.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) }).map(drop)
}

fn allow_place(ruleset: &OwnedFd, place: &OpenPlace, access: u64) -> io::Result<()> {
    let allowed = if place.is_directory { access } else { access & OF_FILES };
    add_rule(ruleset, PATH_BENEATH, &PathAttribute { allowed, descriptor: place.descriptor.as_raw_fd() })
}

fn add_rule<A>(ruleset: &OwnedFd, kind: libc::c_int, attribute: &A) -> io::Result<()> {
    // SAFETY: the call reads the attribute, whose type matches `kind`.
    let code = unsafe {
        libc::syscall(libc::SYS_landlock_add_rule, ruleset.as_raw_fd(), kind, std::ptr::from_ref(attribute), 0)
    };
    checked(code).map(drop)
}

/// Returns the result of a system call that returns a small number.
fn checked(code: libc::c_long) -> io::Result<i32> {
    match i32::try_from(code) {
        Ok(code) if code >= 0 => Ok(code),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::thread;

    use super::*;

    fn open(path: &Path) -> OpenPlace {
        OpenPlace::open(path).expect("it is there")
    }

    /// Runs `test` in a restricted thread.
    fn under(rules: Rules, test: impl FnOnce() + Send + 'static) {
        let Some(VERSION_MIN..) = version() else { return eprintln!("skipped: no Landlock here") };
        let tested = thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).expect("a prctl");
            restrict(&rules).expect("the kernel has it");
            test();
        });
        tested.join().expect("as the rules say");
    }

    #[test]
    fn writing_is_left_in_its_places_and_reading_everywhere() {
        let directory = std::env::temp_dir().join(format!("gale-landlock-{}", std::process::id()));
        let (own, foreign) = (directory.join("own"), directory.join("foreign"));
        for path in [&own, &foreign] {
            fs::create_dir_all(path).expect("room");
        }
        fs::write(foreign.join("file"), "x").expect("room");
        // A directory that was opened before does not bypass the rules: they depend on the file's location.
        let kept = rustix::fs::open(&foreign, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).expect("there");
        let rules = Rules { writable: Some(vec![open(&own)]), readable: None, ports: None };
        under(rules, {
            let (own, foreign) = (own.clone(), foreign.clone());
            move || {
                fs::write(own.join("new"), "x").expect("its place");
                fs::create_dir(own.join("deeper")).expect("its place");
                fs::rename(own.join("new"), own.join("deeper/new")).expect("from one directory to another");
                assert!(fs::write(foreign.join("new"), "x").is_err());
                assert!(fs::write(foreign.join("file"), "x").is_err());
                assert!(fs::rename(own.join("deeper/new"), foreign.join("new")).is_err());
                assert!(fs::remove_file(foreign.join("file")).is_err());
                let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE;
                let refused = rustix::fs::openat(&kept, "file", flags, 0o600.into()).expect_err("a known directory");
                assert_eq!(refused, rustix::io::Errno::ACCESS);
                assert_eq!(fs::read(foreign.join("file")).expect("reading is free"), b"x");
            }
        });
        fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn reading_is_left_in_all_places() {
        let directory = std::env::temp_dir().join(format!("gale-landlock-read-{}", std::process::id()));
        fs::create_dir_all(directory.join("written")).expect("room");
        for name in ["read", "written/file", "foreign"] {
            fs::write(directory.join(name), "x").expect("room");
        }
        let rules = Rules {
            writable: Some(vec![open(&directory.join("written"))]),
            readable: Some(vec![open(&directory.join("read"))]),
            ports: None,
        };
        under(rules, {
            let directory = directory.clone();
            move || {
                assert_eq!(fs::read(directory.join("read")).expect("a file may be a place"), b"x");
                assert_eq!(fs::read(directory.join("written/file")).expect("whoever writes reads"), b"x");
                assert!(fs::read(directory.join("foreign")).is_err());
                assert!(fs::read_dir(&directory).is_err());
                assert!(fs::read_dir(directory.join("written")).is_ok());
            }
        });
        fs::remove_dir_all(directory).expect("ours");
    }
}
