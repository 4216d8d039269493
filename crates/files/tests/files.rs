//! Files: opening, inspecting and reading, errors, and calls that must not block.

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::cell::Cell;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;

#[test]
fn a_file_is_opened_looked_at_and_read() {
    let directory = Directory::new();
    let content = pattern(200_000);
    let path = directory.file("file", &content);
    run(async {
        let file = files::open(&path, OpenFlags::READ).await.unwrap();
        assert_eq!((file.metadata().size, file.metadata().kind), (200_000, FileKind::Regular));
        assert_eq!(files::stat(&path).await.unwrap(), *file.metadata());
        let mut read = Vec::new();
        loop {
            let piece = file.read_at(read.len() as u64, 65_536).await.unwrap();
            if piece.is_empty() {
                break;
            }
            read.extend_from_slice(&piece);
        }
        assert!(read == content);
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(file.metadata().modified(), modified);
    });
    run(async { assert_eq!(leased_bytes(), 0) });
}

#[test]
fn cached_paths_and_pages_do_not_go_to_the_pool() {
    use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
    if rustix::fs::openat2(CWD, c"/", OFlags::PATH, Mode::empty(), ResolveFlags::CACHED).is_err() {
        return skip("no openat2 with RESOLVE_CACHED here");
    }
    let directory = Directory::new();
    let path = directory.file_read_before("file", b"in the cache");
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let file = files::open_in(&pool, &path, OpenFlags::READ).await.unwrap();
        assert_eq!(&file.read_at_in(&pool, 3, 100).await.unwrap()[..], b"the cache");
        let metadata = files::stat_in(&pool, &path).await.unwrap();
        assert_eq!(pool.counters().threads, 0);
        assert_eq!(files::try_stat(&path).unwrap().unwrap(), metadata);
        assert_eq!(*files::try_open(&path, OpenFlags::READ).unwrap().unwrap().metadata(), metadata);
        let create = OpenFlags { create: Some(0o600), ..OpenFlags::READ };
        assert!(files::try_open(&path, create).is_none(), "creating may wait");
    });
}

/// True if some reads of this file update its access time, but not all (`relatime`).
fn is_relatime(path: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    let mount = rustix::fs::statvfs(path).unwrap();
    let lies_in_memory = rustix::fs::statfs(path).unwrap().f_type as u64 == TMPFS;
    let is = !lies_in_memory && mount.f_flag.contains(rustix::fs::StatVfsMountFlags::RELATIME);
    if !is {
        skip("reads write no times of access here, or all do");
    }
    is
}

#[test]
fn the_read_that_writes_the_time_of_access_is_the_pools_and_no_other() {
    use rustix::time::{ClockId, clock_gettime};
    let directory = Directory::new();
    let path = directory.file("file", b"in memory");
    if !is_relatime(&path) {
        return;
    }
    // Accessed at the epoch, and changed before the tick in which it will be read.
    let make_due = || {
        set_accessed(&path, SystemTime::UNIX_EPOCH);
        let changed =
            rustix::fs::stat(&path).map(|stat| (i128::from(stat.st_ctime), i128::from(stat.st_ctime_nsec))).unwrap();
        let tick = || clock_gettime(ClockId::RealtimeCoarse);
        while (i128::from(tick().tv_sec), i128::from(tick().tv_nsec)) <= changed {}
    };
    make_due();
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let read = async || {
            let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
            assert_eq!(&file.read_at_in(&pool, 0, 100).await.unwrap()[..], b"in memory");
            pool.counters().completed
        };
        assert_eq!((read().await, read().await), (1, 1), "the first writes");
        assert!(std::fs::metadata(&path).unwrap().accessed().unwrap() > SystemTime::UNIX_EPOCH);
        // Open files notice it too.
        make_due();
        let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
        assert!(file.try_read_at(0, 100).unwrap().is_none() && !file.is_resident(0, 9).unwrap());
        assert_eq!(&file.read_at_in(&pool, 0, 2).await.unwrap()[..], b"in");
        assert_eq!(&file.try_read_at(3, 6).unwrap().expect("written by then")[..], b"memory");
        assert_eq!(pool.counters().completed, 2);
        // A full pool is no reason to wait for the file system on the loop.
        make_due();
        let full = ThreadPool::new("full", 1, 0);
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let blocking = full.run(move || receiver.recv());
        let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
        let refused = file.read_at_in(&full, 0, 2).await.unwrap_err();
        assert_eq!(refused.to_string(), "thread pool \"full\" queue overflow: 0 tasks waiting");
        assert_eq!(full.counters().completed, 0);
        drop(sender);
        let _ = blocking.await.unwrap();
    });
}

#[test]
fn a_file_that_changes_while_it_is_open_is_left_to_the_pool() {
    let directory = Directory::new();
    let path = directory.file_read_before("log", b"one line");
    if !is_relatime(&path) {
        return;
    }
    run(async {
        let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
        let is_read_here = || matches!(file.look(0, 100).unwrap(), CachedRead::Found(_));
        for _ in 0..3 {
            assert!(is_read_here());
            sleep(Duration::from_secs(1)).await;
        }
        let mut log = std::fs::File::options().append(true).open(&path).unwrap();
        for _ in 0..3 {
            log.write_all(b"another line").unwrap();
            sleep(Duration::from_secs(1)).await;
            assert!(!is_read_here() && !file.is_resident(0, 8).unwrap());
        }
        let pool = ThreadPool::new("test", 1, 10);
        assert_eq!(&file.read_at_in(&pool, 0, 8).await.unwrap()[..], b"one line");
        assert!(!is_read_here(), "it may grow on");
    });
}

#[test]
fn without_rwf_nowait_only_files_in_memory_are_read_on_the_loop() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        // A file of procfs is not read from the page cache, so, like one of overlayfs, a read of it cannot be tried.
        let file = files::open_blocking(Path::new("/proc/self/stat"), OpenFlags::READ).unwrap();
        assert!(file.try_read_at(0, 100).unwrap().is_none());
        assert!(!file.read_at_in(&pool, 0, 100).await.unwrap().is_empty());
        assert_eq!(pool.counters().threads, 1);

        let name = format!("/dev/shm/gale-runtime-{}", std::process::id());
        if std::fs::write(&name, b"in memory").is_err() {
            return skip("a part: nothing can be written in /dev/shm");
        }
        let file = files::open_blocking(Path::new(&name), OpenFlags::READ).unwrap();
        std::fs::remove_file(&name).unwrap();
        assert_eq!(&file.try_read_at(0, 100).unwrap().expect("nothing to wait for")[..], b"in memory");
    });
}

#[test]
fn a_read_that_waits_for_a_thread_is_charged_until_it_is_given_up() {
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let blocking = pool.run(move || receiver.recv());
        // Reads of procfs cannot be tried and go to the pool.
        let file = files::open_blocking(Path::new("/proc/self/stat"), OpenFlags::READ).unwrap();
        let before = leased_bytes();
        let mut read = Box::pin(file.read_at_in(&pool, 0, 4096));
        assert!(poll_once(&mut read).await.is_pending());
        assert_eq!(leased_bytes(), before + 4096);
        drop(read);
        assert_eq!(leased_bytes(), before);
        drop(sender);
        let _ = blocking.await.unwrap();
    });
}

#[test]
fn a_large_file_is_read_and_closed_by_the_pool_when_it_goes_there() {
    let directory = Directory::new();
    let content = pattern(3 << 20);
    let path = directory.file("large", &content);
    run(async {
        let pool = ThreadPool::new("test", 1, 10);
        let file = files::open_in(&pool, &path, OpenFlags::READ).await.unwrap();
        let clone = file.clone();
        drop(file);
        let tail = clone.read_at_in(&pool, (3 << 20) - 10, 100).await.unwrap();
        assert_eq!(&tail[..], &content[content.len() - 10..]);
        assert!(clone.read_at(1 << 40, 100).await.unwrap().is_empty());
    });
}

#[test]
fn errors_are_those_of_the_kernel_wherever_they_come_from() {
    let directory = Directory::new();
    let path = directory.file("file", b"x");
    symlink(&path, directory.path("link")).unwrap();
    symlink("loop", directory.path("loop")).unwrap();
    run(async {
        let missing = files::open(&directory.path("missing"), OpenFlags::READ).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        // Once more, now that the kernel has cached that the file is missing.
        let missing = files::stat(&directory.path("missing")).await.unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let below = files::stat(&path.join("below")).await.unwrap_err();
        assert_eq!(below.kind(), ErrorKind::NotADirectory);
        let endless = files::stat(&directory.path("loop")).await.unwrap_err();
        assert_eq!(endless.raw_os_error(), Some(libc::ELOOP));
        let no_follow = OpenFlags { no_follow: true, ..OpenFlags::READ };
        let refused = files::open(&directory.path("link"), no_follow).await.unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        files::open(&directory.path("link"), OpenFlags::READ).await.unwrap();
        let nul = files::open(Path::new("a\0b"), OpenFlags::READ).await.unwrap_err();
        assert_eq!(nul.kind(), ErrorKind::InvalidInput);
    });
}

#[test]
fn a_directory_can_be_opened_but_not_read() {
    let directory = Directory::new();
    std::fs::create_dir(directory.path("inner")).unwrap();
    run(async {
        let inner = files::open(&directory.path("inner"), OpenFlags::READ).await.unwrap();
        assert!(inner.metadata().is_directory());
        assert_eq!(inner.read_at(0, 100).await.unwrap_err().kind(), ErrorKind::IsADirectory);
    });
}

#[test]
fn opening_a_fifo_without_writer_does_not_block() {
    let directory = Directory::new();
    let path = directory.path("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    run(async {
        let fifo = files::open(&path, OpenFlags::READ).await.unwrap();
        assert_eq!(fifo.metadata().kind, FileKind::Other);
        let write = OpenFlags { read: false, write: true, ..OpenFlags::READ };
        drop(fifo);
        let nobody_reads = files::open(&path, write).await.unwrap_err();
        assert_eq!(nobody_reads.raw_os_error(), Some(libc::ENXIO));
    });
}

#[test]
fn a_file_that_another_process_leases_is_opened_when_the_lease_is_returned() {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicI32, Ordering};
    static LEASED: AtomicI32 = AtomicI32::new(-1);
    extern "C" fn return_lease(_signal: libc::c_int) {
        // SAFETY: fcntl is async-signal-safe and the descriptor stays open for the whole test.
        unsafe { libc::fcntl(LEASED.load(Ordering::Relaxed), libc::F_SETLEASE, libc::F_UNLCK) };
    }
    let directory = Directory::new();
    let path = directory.file("file", b"leased");
    let holder = std::fs::File::options().write(true).open(&path).unwrap();
    LEASED.store(holder.as_raw_fd(), Ordering::Relaxed);
    // SAFETY: the handler calls only async-signal-safe functions, and the descriptor is open.
    let leased = unsafe {
        libc::signal(libc::SIGIO, return_lease as *const () as libc::sighandler_t);
        libc::fcntl(holder.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0
    };
    if !leased {
        return skip("no leases on this file system");
    }
    // As in the pool. (On the loop the first attempt is refused and makes the kernel request the lease.)
    let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
    let mut content = [0; 6];
    file.read_blocking(0, &mut content).unwrap();
    assert_eq!(&content, b"leased");
}

#[test]
fn a_file_is_created_exclusively_in_the_pool() {
    let directory = Directory::new();
    run(async {
        let flags = OpenFlags { write: true, create: Some(0o600), exclusive: true, ..OpenFlags::READ };
        let file = files::open(&directory.path("new"), flags).await.unwrap();
        assert_eq!(file.metadata().mode & 0o7777, 0o600);
        let again = files::open(&directory.path("new"), flags).await.unwrap_err();
        assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    });
}

#[test]
fn files_in_memory_are_read_inline() {
    run(async {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&memory, b"in memory").unwrap();
        let file = File::from_std(memory.into()).unwrap();
        let read = file.try_read_at(3, 100).unwrap().expect("needs no waiting");
        assert_eq!(&read[..], b"memory");
    });
}

#[test]
fn sendfile_delivers_a_file_to_a_slow_reader() {
    let directory = Directory::new();
    let content = pattern(5 << 20);
    let path = directory.file("file", &content);
    run(async {
        let (server, client) = tcp_pair().await;
        let file = files::open(&path, OpenFlags::READ).await.unwrap();
        spawn(async move {
            let mut offset = 0;
            loop {
                let before = offset;
                let sent = server.sendfile(&file, &mut offset, 1 << 20).await.unwrap();
                assert_eq!(offset, before + sent as u64);
                if sent == 0 {
                    break;
                }
            }
        });
        let mut received = Vec::new();
        let mut input = Buffer::new();
        while client.recv(&mut input, 50_000).await.unwrap() > 0 {
            received.extend_from_slice(input.readable());
            input.clear();
            yield_now().await;
        }
        assert!(received == content);
    });
}

#[test]
fn a_short_sendfile_leaves_the_socket_known_to_be_full() {
    const ASKED: usize = 400_000;
    let directory = Directory::new();
    let path = directory.file("file", &pattern(32 << 20));
    run(async {
        let (server, _client) = tcp_pair().await;
        let file = files::open(&path, OpenFlags::READ).await.unwrap();
        let mut offset = 0;
        // Nothing is received. A call that only asks for room would end this without a result.
        loop {
            let sent = poll_once(&mut pin!(server.sendfile(&file, &mut offset, ASKED))).await;
            let Poll::Ready(sent) = sent else { panic!("a send that found no room came first") };
            if sent.unwrap() < ASKED && server.is_full() {
                break;
            }
            yield_now().await;
        }
    });
}

#[test]
fn sendfile_of_a_file_that_was_cut_off_comes_to_its_end() {
    let directory = Directory::new();
    let content = pattern(4 << 20);
    let path = directory.file("file", &content);
    run(async {
        let (server, client) = tcp_pair().await;
        let file = files::open(&path, OpenFlags::READ).await.unwrap();
        let length = Rc::new(Cell::new(content.len()));
        spawn({
            let (length, path) = (Rc::clone(&length), path.clone());
            async move {
                let mut offset = 0;
                // The socket has been full, so the kernel reports room only after it is full again.
                while offset < 3 << 20 {
                    server.sendfile(&file, &mut offset, 100_000).await.unwrap();
                }
                std::fs::File::options().write(true).open(&path).unwrap().set_len(offset + 5000).unwrap();
                length.set(offset as usize + 5000);
                while server.sendfile(&file, &mut offset, 100_000).await.unwrap() > 0 {}
            }
        });
        let mut received = Vec::new();
        let mut input = Buffer::new();
        while client.recv(&mut input, 50_000).await.unwrap() > 0 {
            received.extend_from_slice(input.readable());
            input.clear();
            yield_now().await;
        }
        assert!(received == content[..length.get()]);
    });
}
