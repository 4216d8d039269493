//! A broken file system in user space: the kernel's protocol (fuse(4)), as much of it as a server of static files
//! needs.
//!
//! All files are in its root, claim a size of 200,000 bytes, and behave by the first letter of their names: `g` is
//! good, `e` fails with EIO from the middle on, `s` is shorter than its size, reads of `h` hang. A test may add files
//! of its own, whose reads from an offset on fail, or hang until the test lets them continue.
//!
//! [`disk::Disk`] is a writable file system.

pub mod disk;

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::support::{DEADLINE, Directory, NO_MOUNTS, skip};

pub const SIZE: usize = 200_000;

/// Offset at which the failing file fails and the short one ends.
pub const MIDDLE: usize = 100_000;

/// Operations with an implementation; others get ENOSYS.
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// Operations without an answer.
const FORGOTTEN: [u32; 3] = [FORGET, BATCH_FORGET, INTERRUPT];

/// Every read reaches this process.
const FOPEN_DIRECT_IO: u32 = 1;

pub fn content() -> Vec<u8> {
    (0..SIZE as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A mounted file system; unmounted when dropped.
pub struct FileSystem {
    directory: Directory,
    /// Kept open, so that hanging operations do not end with the thread.
    connection: File,
    thread: Option<JoinHandle<()>>,
    /// Receives a message for each read that will not be answered.
    hanging: Receiver<()>,
    /// No operation is answered.
    is_hung: Arc<AtomicBool>,
    own: Arc<Mutex<Own>>,
}

/// Files added by a test.
#[derive(Default)]
struct Own {
    files: HashMap<Vec<u8>, Vec<u8>>,
    fault: Option<(Fault, usize)>,
    /// Complete answers that are held back.
    waiting: Vec<Vec<u8>>,
}

/// Fault of reads beyond an offset in a test's own files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads hang.
    Hangs,
    /// Reads fail with EIO.
    Fails,
}

impl FileSystem {
    /// Mounts it; skips and returns `None` where that is impossible, as in a container that forbids it.
    pub fn mount() -> Option<FileSystem> {
        let directory = Directory::new();
        let connection = connect(&directory.path().join("fuse"))?;
        let own = connection.try_clone().expect("a descriptor");
        let (tell, hanging) = std::sync::mpsc::channel();
        let is_hung = Arc::new(AtomicBool::new(false));
        let hung = Arc::clone(&is_hung);
        let files = Arc::<Mutex<Own>>::default();
        let shared = Arc::clone(&files);
        let thread = std::thread::spawn(move || serve(own, &tell, &hung, &shared));
        Some(FileSystem { directory, connection, thread: Some(thread), hanging, is_hung, own: files })
    }

    /// Adds a file.
    pub fn put(&self, name: &str, content: Vec<u8>) {
        self.own.lock().unwrap().files.insert(name.into(), content);
    }

    /// Sets the fault of reads that go beyond this offset in an added file. `None` removes the fault, and hanging reads
    /// continue.
    pub fn set_fault(&self, fault: Option<(Fault, usize)>) {
        let mut own = self.own.lock().unwrap();
        own.fault = fault;
        for answer in own.waiting.drain(..) {
            // Interrupted requests no longer exist.
            let _ = (&self.connection).write(&answer);
        }
    }

    /// Stops or resumes answering. Operations that hang already hang for ever.
    pub fn set_hung(&self, is_hung: bool) {
        self.is_hung.store(is_hung, Ordering::SeqCst);
    }

    /// Waits until a read was received that will not be answered.
    #[track_caller]
    pub fn wait_hanging(&self) {
        self.hanging.recv_timeout(DEADLINE).expect("a read of a file that hangs");
    }

    pub fn point(&self) -> PathBuf {
        self.directory.path().join("fuse")
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // Waiting processes get an error, and the thread ends.
        disconnect(&self.point());
        let _ = self.connection.flush();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Mounts a file system at `point`; skips and returns `None` where that is impossible.
fn connect(point: &Path) -> Option<File> {
    let connection = try_connect(point);
    if connection.is_none() {
        skip(NO_MOUNTS);
    }
    connection
}

fn try_connect(point: &Path) -> Option<File> {
    let connection = File::options().read(true).write(true).open("/dev/fuse").ok()?;
    std::fs::create_dir(point).expect("ours");
    let options =
        format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other,max_read=131072", connection.as_raw_fd());
    let options = std::ffi::CString::new(options).expect("without NUL");
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("gale-test", point, "fuse", flags, Some(&*options)).ok()?;
    Some(connection)
}

/// Aborts the connection, also for waiting processes.
fn disconnect(point: &Path) {
    let _ = rustix::mount::unmount(point, UnmountFlags::FORCE | UnmountFlags::DETACH);
}

/// `struct fuse_init_out`
fn init() -> Vec<u8> {
    fields(&[7, 31, 128 * 1024, 0, 16 << 16 | 12, 128 * 1024, 1, 32, 0, 0, 0, 0, 0, 0, 0, 0])
}

/// `struct fuse_out_header` followed by the answer.
fn reply(unique: u64, answer: Result<Vec<u8>, Errno>) -> Vec<u8> {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(error) => (-error.raw_os_error(), Vec::new()),
    };
    let head = [fields(&[16 + body.len() as u32, error as u32]), unique.to_ne_bytes().to_vec()].concat();
    [head, body].concat()
}

fn serve(mut connection: File, hanging: &Sender<()>, is_hung: &AtomicBool, own: &Mutex<Own>) {
    // Files by node number: the root is 1.
    let mut names: Vec<Vec<u8>> = vec![Vec::new(), Vec::new()];
    let mut request = vec![0; 256 * 1024];
    while let Ok(length) = connection.read(&mut request) {
        let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
        let (operation, unique, node) = (number(4), long(8), long(16) as usize);
        if is_hung.load(Ordering::SeqCst) {
            let _ = hanging.send(());
            continue;
        }
        let mut own = own.lock().unwrap();
        let content_of = |name: &Vec<u8>| own.files.get(name).cloned();
        let put = names.get(node).and_then(content_of);
        let size = put.as_ref().map_or(SIZE, Vec::len);
        let first = names.get(node).and_then(|name| name.first()).copied();
        let mut must_wait = false;
        let answer = match operation {
            INIT => Ok(init()),
            operation if FORGOTTEN.contains(&operation) => continue,
            LOOKUP => {
                let name = request[40..length].strip_suffix(b"\0").unwrap_or_default().to_vec();
                let size = content_of(&name).map(|content| content.len());
                if size.is_some() || matches!(name.first(), Some(b'g' | b'e' | b's' | b'h')) {
                    let known = names.iter().position(|known| *known == name);
                    let node = known.unwrap_or_else(|| {
                        names.push(name);
                        names.len() - 1
                    });
                    let times = [node as u32, 0, 1, 0, 60, 0, 60, 0, 0, 0];
                    Ok([fields(&times), attributes(node, size.unwrap_or(SIZE))].concat())
                } else {
                    Err(Errno::NOENT)
                }
            }
            GETATTR | SETATTR => Ok([fields(&[60, 0, 0, 0]), attributes(node, size)].concat()),
            OPEN => Ok(fields(&[0, 0, FOPEN_DIRECT_IO, 0])),
            READ => {
                let (offset, size) = (long(48) as usize, number(56) as usize);
                let fault =
                    own.fault.filter(|(_, from)| put.is_some() && offset + size > *from).map(|(fault, _)| fault);
                must_wait = fault == Some(Fault::Hangs);
                let end = if matches!(first, Some(b's' | b'e')) { MIDDLE } else { SIZE };
                match first {
                    _ if fault == Some(Fault::Fails) => Err(Errno::IO),
                    _ if put.is_some() => {
                        let content = put.unwrap_or_default();
                        Ok(content[offset.min(content.len())..(offset + size).min(content.len())].to_vec())
                    }
                    Some(b'h') => {
                        // Not every test receives it.
                        let _ = hanging.send(());
                        continue;
                    }
                    Some(b'e') if offset >= MIDDLE => Err(Errno::IO),
                    _ => Ok(content()[offset.min(end)..(offset + size).min(end)].to_vec()),
                }
            }
            RELEASE | FLUSH => Ok(Vec::new()),
            _ => Err(Errno::NOSYS),
        };
        let answer = reply(unique, answer);
        if must_wait {
            own.waiting.push(answer);
            let _ = hanging.send(());
            continue;
        }
        // Interrupted requests no longer exist.
        let _ = connection.write(&answer);
    }
}

/// `struct fuse_attr`.
fn attributes(node: usize, size: usize) -> Vec<u8> {
    let (mode, size) = if node == 1 { (0o040_755, 0) } else { (0o100_644, size as u32) };
    let mut words = vec![node as u32, 0, size, 0, size.div_ceil(512), 0];
    words.extend([1_000_000_000, 0].repeat(3));
    words.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
    fields(&words)
}

fn fields(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
