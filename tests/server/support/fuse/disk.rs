//! A writable file system in user space that a test makes slow, full, read-only, failing or hung, and then well again.
//! Its contents are in the test's memory.
//!
//! The kernel caches neither names nor attributes nor pages: every operation reaches the file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;

use super::{FORGOTTEN, connect, disconnect, fields, init, reply};
use crate::support::Directory;

const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const MKDIR: u32 = 9;
const UNLINK: u32 = 10;
const RMDIR: u32 = 11;
const RENAME: u32 = 12;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const RELEASEDIR: u32 = 29;
const CREATE: u32 = 35;
const RENAME2: u32 = 45;

/// Offset of an operation's arguments: after `struct fuse_in_header`.
const ARGUMENTS: usize = 40;

/// Condition of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    Well,
    /// Each operation takes this long, one after the other.
    Slow(Duration),
    /// No space is left.
    Full,
    /// All changes are refused.
    ReadOnly,
    /// Every operation fails with EIO.
    Failing,
    /// No operation is answered. Waiting operations continue when the condition changes.
    Hung,
}

/// Point at which storing a cache entry is held up. (The entry's file is first written beside its final place, under
/// the same name with a number appended.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before the file is created.
    Create,
    /// In the middle of the write that contains this byte of the file; the bytes before it are written.
    Write(usize),
    /// In the middle of the write of the header, after all the rest was written.
    Header,
    /// Before the file is renamed to its final name.
    Rename,
    /// After the rename, before it is answered.
    Renamed,
}

/// Length of entries' names: a hash of 16 bytes.
const NAME_LENGTH: usize = 32;

/// A mounted disk; unmounted when dropped.
pub struct Disk {
    directory: Directory,
    connection: File,
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    condition: Condition,
    /// A single failing operation: number of fallible operations before it, and its error.
    failing_call: Option<(u32, Errno)>,
    hangs_at: Option<Point>,
    /// Operations not answered yet.
    waiting: Vec<Vec<u8>>,
    nodes: Vec<Node>,
}

/// A directory or a file. Its index is the node number; removed nodes stay because a process may have them open.
enum Node {
    /// Takes the place of a number that is not used.
    None,
    Directory(BTreeMap<Vec<u8>, u64>),
    File {
        content: Vec<u8>,
        modified_seconds: u64,
    },
}

impl Disk {
    /// Returns `None` where the disk cannot be mounted.
    pub fn mount() -> Option<Disk> {
        let directory = Directory::new();
        let connection = connect(&directory.path().join("disk"))?;
        let nodes = vec![Node::None, Node::Directory(BTreeMap::new())];
        let shared = Arc::new(Mutex::new(Shared {
            condition: Condition::Well,
            failing_call: None,
            hangs_at: None,
            waiting: Vec::new(),
            nodes,
        }));
        let (own, state) = (connection.try_clone().expect("a descriptor"), Arc::clone(&shared));
        let thread = std::thread::spawn(move || serve(own, &state));
        Some(Disk { directory, connection, shared, thread: Some(thread) })
    }

    pub fn point(&self) -> PathBuf {
        self.directory.path().join("disk")
    }

    /// Sets the condition of the disk.
    pub fn set(&self, condition: Condition) {
        let mut shared = self.shared.lock().unwrap();
        shared.condition = condition;
        for request in std::mem::take(&mut shared.waiting) {
            shared.take(&self.connection, request);
        }
    }

    /// Makes the operation of this number fail, counted from 1 from now on: for ENOSPC among the operations that need
    /// space, else among all. `None` makes none fail.
    pub fn fail_call(&self, number: Option<u32>, errno: Errno) {
        self.shared.lock().unwrap().failing_call = number.map(|number| (number.saturating_sub(1), errno));
    }

    /// Makes the disk hang as soon as storing an entry reaches this point.
    pub fn hang_at(&self, point: Point) {
        self.shared.lock().unwrap().hangs_at = Some(point);
    }

    /// Makes the disk well again and fails the waiting operations, whose processes were killed.
    pub fn interrupt_waiting(&self) {
        let mut shared = self.shared.lock().unwrap();
        shared.condition = Condition::Well;
        for request in std::mem::take(&mut shared.waiting) {
            let _ = (&self.connection).write(&reply(Request(&request).long(8), Err(Errno::INTR)));
        }
    }

    /// Number of operations that wait on a hung disk.
    pub fn waiting(&self) -> usize {
        self.shared.lock().unwrap().waiting.len()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        disconnect(&self.point());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn serve(mut connection: File, shared: &Mutex<Shared>) {
    let mut request = vec![0; 256 * 1024];
    while let Ok(length) = connection.read(&mut request) {
        let condition = shared.lock().unwrap().condition;
        if let Condition::Slow(time) = condition {
            // The delay is a property of the disk; the test does not wait for it.
            std::thread::sleep(time);
        }
        shared.lock().unwrap().take(&connection, request[..length].to_vec());
    }
}

impl Shared {
    fn take(&mut self, mut connection: &File, bytes: Vec<u8>) {
        let request = Request(&bytes);
        if FORGOTTEN.contains(&request.operation()) {
            return;
        }
        if self.hangs_at.is_some_and(|point| self.reaches(&request, point)) {
            let point = self.hangs_at.take().expect("it was reached");
            self.carry_out_up_to(&request, point);
            self.condition = Condition::Hung;
        }
        if self.condition == Condition::Hung {
            self.waiting.push(bytes);
            return;
        }
        let answer = match self.fault(&request).or_else(|| self.take_failing_call(&request)) {
            Some(errno) => Err(errno),
            None => self.answer(&request),
        };
        // The process that asked may have been killed.
        let _ = connection.write(&reply(request.long(8), answer));
    }

    /// `true` if the disk is to hang at this operation.
    fn reaches(&self, request: &Request, point: Point) -> bool {
        let (operation, node) = (request.operation(), request.long(16));
        let is_temporary = |name: &[u8]| name.len() > NAME_LENGTH && name[NAME_LENGTH] == b'.';
        let has_temporary_name = || {
            let directories = self.nodes.iter().filter_map(|node| match node {
                Node::Directory(entries) => Some(entries),
                _ => None,
            });
            directories.flatten().any(|(name, number)| *number == node && is_temporary(name))
        };
        let place = || (request.long(ARGUMENTS + 8) as usize, request.number(ARGUMENTS + 16) as usize);
        match point {
            Point::Create => operation == CREATE && is_temporary(request.name(ARGUMENTS + 16)),
            Point::Write(_) | Point::Header if operation != WRITE => false,
            Point::Write(at) => {
                let (offset, size) = place();
                (offset..offset + size).contains(&at) && has_temporary_name()
            }
            Point::Header => {
                let (offset, size) = place();
                let is_longer =
                    matches!(&self.nodes[node as usize], Node::File { content, .. } if content.len() > size);
                offset == 0 && is_longer && has_temporary_name()
            }
            Point::Rename | Point::Renamed => {
                let names = match operation {
                    RENAME => ARGUMENTS + 8,
                    RENAME2 => ARGUMENTS + 16,
                    _ => return false,
                };
                is_temporary(request.name(names))
            }
        }
    }

    /// Carries out the part of an operation that precedes the point at which the disk hangs.
    fn carry_out_up_to(&mut self, request: &Request, point: Point) {
        let done = match point {
            Point::Create | Point::Rename => return,
            Point::Renamed => self.answer(request).map(drop),
            Point::Write(_) | Point::Header => {
                let (offset, size) = (request.long(ARGUMENTS + 8) as usize, request.number(ARGUMENTS + 16) as usize);
                let done = match point {
                    Point::Write(at) => at - offset,
                    _ => size / 2,
                };
                let data = &request.0[ARGUMENTS + 40..][..done];
                self.write(request.long(16), offset, data)
            }
        };
        done.expect("the disk is well");
    }

    /// Error that the disk's condition gives for an operation.
    fn fault(&self, request: &Request) -> Option<Errno> {
        let operation = request.operation();
        let ends = matches!(operation, INIT | RELEASE | RELEASEDIR);
        let adds = matches!(operation, MKDIR | CREATE | WRITE);
        let opens_to_write = operation == OPEN && request.number(ARGUMENTS) & libc::O_ACCMODE as u32 != 0;
        let changes = adds || opens_to_write || matches!(operation, SETATTR | UNLINK | RMDIR | RENAME | RENAME2);
        match self.condition {
            Condition::Full if adds => Some(Errno::NOSPC),
            Condition::ReadOnly if changes => Some(Errno::ROFS),
            Condition::Failing if !ends => Some(Errno::IO),
            _ => None,
        }
    }

    /// Error of this operation, if it is the single failing one.
    fn take_failing_call(&mut self, request: &Request) -> Option<Errno> {
        let (before, errno) = self.failing_call?;
        let can_fail = match errno {
            Errno::NOSPC => matches!(request.operation(), MKDIR | CREATE | WRITE),
            _ => !matches!(request.operation(), INIT | RELEASE | RELEASEDIR),
        };
        if !can_fail {
            return None;
        }
        self.failing_call = before.checked_sub(1).map(|before| (before, errno));
        (before == 0).then_some(errno)
    }

    fn answer(&mut self, request: &Request) -> Result<Vec<u8>, Errno> {
        let node = request.long(16);
        match request.operation() {
            INIT => Ok(init()),
            LOOKUP => {
                let found = *self.directory(node)?.get(request.name(ARGUMENTS)).ok_or(Errno::NOENT)?;
                Ok(self.entry(found))
            }
            GETATTR => Ok([fields(&[0; 4]), self.attributes(node)].concat()),
            SETATTR => {
                const SIZE: u32 = 1 << 3;
                if request.number(ARGUMENTS) & SIZE != 0 {
                    let size = request.long(ARGUMENTS + 16) as usize;
                    self.change(node, |content| content.resize(size, 0))?;
                }
                Ok([fields(&[0; 4]), self.attributes(node)].concat())
            }
            MKDIR => self.add(node, request.name(ARGUMENTS + 8), Node::Directory(BTreeMap::new())),
            CREATE => {
                let file = Node::File { content: Vec::new(), modified_seconds: now_seconds() };
                Ok([self.add(node, request.name(ARGUMENTS + 16), file)?, opened()].concat())
            }
            UNLINK | RMDIR => {
                let name = request.name(ARGUMENTS);
                let found = *self.directory(node)?.get(name).ok_or(Errno::NOENT)?;
                if matches!(&self.nodes[found as usize], Node::Directory(entries) if !entries.is_empty()) {
                    return Err(Errno::NOTEMPTY);
                }
                self.directory(node)?.remove(name);
                Ok(Vec::new())
            }
            RENAME => self.rename(node, request, ARGUMENTS + 8, 0),
            RENAME2 => self.rename(node, request, ARGUMENTS + 16, request.number(ARGUMENTS + 8)),
            OPEN | OPENDIR => Ok(opened()),
            READ => {
                let (offset, size) = (request.long(ARGUMENTS + 8) as usize, request.number(ARGUMENTS + 16) as usize);
                let Some(Node::File { content, .. }) = self.nodes.get(node as usize) else { return Err(Errno::ISDIR) };
                Ok(content[offset.min(content.len())..(offset + size).min(content.len())].to_vec())
            }
            WRITE => {
                let (offset, size) = (request.long(ARGUMENTS + 8) as usize, request.number(ARGUMENTS + 16));
                let data = &request.0[ARGUMENTS + 40..][..size as usize];
                self.write(node, offset, data)?;
                Ok(fields(&[size, 0]))
            }
            STATFS => {
                let mut words = [1 << 20, 0].repeat(5);
                words.extend([4096, 255, 4096, 0]);
                words.extend([0; 6]);
                Ok(fields(&words))
            }
            READDIR => self.list(node, request.long(ARGUMENTS + 8) as usize, request.number(ARGUMENTS + 16) as usize),
            RELEASE | RELEASEDIR | FLUSH | FSYNC => Ok(Vec::new()),
            _ => Err(Errno::NOSYS),
        }
    }

    fn directory(&mut self, node: u64) -> Result<&mut BTreeMap<Vec<u8>, u64>, Errno> {
        match self.nodes.get_mut(node as usize) {
            Some(Node::Directory(entries)) => Ok(entries),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn change(&mut self, node: u64, change: impl FnOnce(&mut Vec<u8>)) -> Result<(), Errno> {
        let Some(Node::File { content, modified_seconds }) = self.nodes.get_mut(node as usize) else {
            return Err(Errno::ISDIR);
        };
        *modified_seconds = now_seconds();
        change(content);
        Ok(())
    }

    fn write(&mut self, node: u64, offset: usize, data: &[u8]) -> Result<(), Errno> {
        self.change(node, |content| {
            content.resize(content.len().max(offset + data.len()), 0);
            content[offset..offset + data.len()].copy_from_slice(data);
        })
    }

    fn add(&mut self, parent: u64, name: &[u8], node: Node) -> Result<Vec<u8>, Errno> {
        let number = self.nodes.len() as u64;
        let entries = self.directory(parent)?;
        if entries.contains_key(name) {
            return Err(Errno::EXIST);
        }
        entries.insert(name.to_owned(), number);
        self.nodes.push(node);
        Ok(self.entry(number))
    }

    fn rename(&mut self, from: u64, request: &Request, names: usize, flags: u32) -> Result<Vec<u8>, Errno> {
        let to = request.long(ARGUMENTS);
        let (old, new) = (request.name(names), request.name(names + request.name(names).len() + 1));
        let moved = *self.directory(from)?.get(old).ok_or(Errno::NOENT)?;
        if flags & libc::RENAME_NOREPLACE != 0 && self.directory(to)?.contains_key(new) {
            return Err(Errno::EXIST);
        }
        self.directory(from)?.remove(old);
        self.directory(to)?.insert(new.to_owned(), moved);
        Ok(Vec::new())
    }

    /// `struct fuse_dirent` of each entry from this position on.
    fn list(&mut self, node: u64, from: usize, most: usize) -> Result<Vec<u8>, Errno> {
        let entries: Vec<(Vec<u8>, u64)> = self.directory(node)?.clone().into_iter().collect();
        let mut listed = Vec::new();
        for (place, (name, number)) in entries.into_iter().enumerate().skip(from) {
            let kind =
                if matches!(self.nodes[number as usize], Node::Directory(_)) { libc::DT_DIR } else { libc::DT_REG };
            let mut entry = fields(&[number as u32, 0, place as u32 + 1, 0, name.len() as u32, kind.into()]);
            entry.extend(name);
            entry.resize(entry.len().next_multiple_of(8), 0);
            if listed.len() + entry.len() > most {
                break;
            }
            listed.extend(entry);
        }
        Ok(listed)
    }

    /// `struct fuse_entry_out`
    fn entry(&self, node: u64) -> Vec<u8> {
        [fields(&[node as u32, 0, 0, 0, 0, 0, 0, 0, 0, 0]), self.attributes(node)].concat()
    }

    /// `struct fuse_attr`
    fn attributes(&self, node: u64) -> Vec<u8> {
        let (mode, size, seconds) = match &self.nodes[node as usize] {
            Node::File { content, modified_seconds } => (0o100_644, content.len() as u32, *modified_seconds as u32),
            _ => (0o040_777, 0, 0),
        };
        let mut words = vec![node as u32, 0, size, 0, size.div_ceil(512), 0];
        words.extend([seconds, 0].repeat(3));
        words.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
        fields(&words)
    }
}

fn now_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time").as_secs()
}

/// `struct fuse_open_out` for direct I/O: all reads and writes reach the disk.
fn opened() -> Vec<u8> {
    fields(&[0, 0, super::FOPEN_DIRECT_IO, 0])
}

/// An operation as received from the kernel.
struct Request<'a>(&'a [u8]);

impl<'a> Request<'a> {
    fn operation(&self) -> u32 {
        self.number(4)
    }

    fn number(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    /// The bytes up to the NUL.
    fn name(&self, at: usize) -> &'a [u8] {
        self.0[at..].split(|&byte| byte == 0).next().unwrap_or_default()
    }
}
