//! Reads of pieces that are not in memory: shared by all that want them, cancelled with the last one, fair to the
//! others.

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

/// `reads_io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::task::Poll;

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;

/// Makes tests run one after the other: the reads of one test change the condition of the device for another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pool of one thread that is busy until the gate is dropped, so that tasks wait.
fn busy_pool() -> (ThreadPool, PoolTask<()>, mpsc::Sender<()>) {
    let pool = ThreadPool::new("test", 1, 10);
    let (gate, opened) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    let task = pool.run_for(Device::key(1), move || {
        begun.send(()).unwrap();
        let _ = opened.recv();
    });
    has_begun.recv().unwrap();
    (pool, task, gate)
}

fn open(directory: &Directory, name: &str, content: &[u8]) -> File {
    files::open_blocking(&directory.file(name, content), OpenFlags::READ).unwrap()
}

#[test]
fn hundred_readers_of_one_piece_cause_one_read() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(300_000);
    run(async {
        // As many open files as there are readers: it is the same file nevertheless.
        let path = directory.file("file", &content);
        let files: Vec<File> = (0..100).map(|_| files::open_blocking(&path, OpenFlags::READ).unwrap()).collect();
        let same = open(&directory, "same", &content);
        let (pool, task, gate) = busy_pool();
        let before = leased_bytes();
        let read = |file: &File| file.begin_read(&pool, 65_536, 100_000, ReadHow::default()).unwrap();
        let mut reads: Vec<_> = files.iter().map(read).collect();
        // Each of them is charged.
        assert_eq!(leased_bytes(), before + 100 * 256 * 1024);
        for read in &mut reads {
            assert!(poll_once(read).await.is_pending());
        }
        let mut other = read(&same);
        assert!(poll_once(&mut other).await.is_pending());
        assert_eq!(pool.counters().waiting, 2, "another file is another read");
        drop(gate);
        for read in reads {
            let piece = read.await.unwrap();
            assert!(piece[..] == content[65_536..165_536]);
        }
        assert_eq!(other.await.unwrap().len(), 100_000);
        task.await.unwrap();
        assert_eq!((pool.counters().completed, leased_bytes()), (3, before));
    });
}

#[test]
fn loops_share_reads_and_each_has_its_own_account() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(100_000);
    let file = open(&directory, "file", &content);
    let (pool, _task, gate) = busy_pool();
    let read_on_a_loop = |gate: Option<mpsc::Sender<()>>| {
        let (file, pool, content) = (file.clone(), pool.clone(), content.clone());
        let (joined, has_joined) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            run_real(async {
                let mut read = file.begin_read(&pool, 0, 65_536, ReadHow::default()).unwrap();
                assert!(poll_once(&mut read).await.is_pending());
                joined.send(()).unwrap();
                drop(gate);
                assert!(read.await.unwrap()[..] == content[..65_536]);
                assert_eq!(leased_bytes(), 0);
            });
        });
        has_joined.recv().unwrap();
        thread
    };
    let first = read_on_a_loop(None);
    let second = read_on_a_loop(Some(gate));
    first.join().unwrap();
    second.join().unwrap();
    // The task that kept the thread busy may not have been counted yet.
    assert!(pool.counters().completed <= 2);
}

#[test]
fn shared_read_goes_on_without_its_first_reader_and_ends_with_the_last() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(5000);
    run(async {
        let file = open(&directory, "file", &content);
        let (pool, task, gate) = busy_pool();
        let begin = || file.begin_read(&pool, 0, 5000, ReadHow::default()).unwrap();
        let (mut first, mut second) = (begin(), begin());
        assert!(poll_once(&mut first).await.is_pending() && poll_once(&mut second).await.is_pending());
        drop(first);
        assert_eq!(pool.counters().waiting, 1);
        drop(second);
        assert_eq!(pool.counters().waiting, 0);
        let (mut third, mut fourth) = (begin(), begin());
        assert!(poll_once(&mut third).await.is_pending() && poll_once(&mut fourth).await.is_pending());
        drop(third);
        drop(gate);
        assert!(fourth.await.unwrap()[..] == content[..]);
        task.await.unwrap();
    });
    run(async { assert_eq!(leased_bytes(), 0) });
}

#[test]
fn an_overflow_is_told_to_all_in_nginxs_words() {
    let _alone = alone();
    let directory = Directory::new();
    run(async {
        let file = open(&directory, "file", b"content");
        let pool = ThreadPool::new("test", 1, 0);
        let (gate, opened) = mpsc::channel::<()>();
        let task = pool.run(move || opened.recv().is_err());
        let begin = || file.begin_read(&pool, 0, 7, ReadHow::default()).unwrap();
        for read in [begin(), begin()] {
            let error = read.await.unwrap_err();
            assert_eq!(error.to_string(), "thread pool \"test\" queue overflow: 0 tasks waiting");
        }
        drop(gate);
        task.await.unwrap();
        assert_eq!(&begin().await.unwrap()[..], b"content");
    });
}

#[test]
fn a_piece_past_the_page_cache_is_the_same() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(300_001);
    run(async {
        let file = open(&directory, "file", &content);
        let pool = ThreadPool::new("test", 1, 10);
        let how = ReadHow { direct: Some(512), ..ReadHow::default() };
        for (offset, length) in [(0, 300_001), (1, 1), (4095, 2), (511, 200_000), (299_999, 2), (300_000, 500)] {
            let piece = file.begin_read(&pool, offset, length, how).unwrap().await.unwrap();
            let end = content.len().min(offset as usize + length);
            assert!(piece[..] == content[offset as usize..end], "{offset} {length}");
            assert!(file.read_in_place(offset, length, Some(512)).unwrap()[..] == piece[..]);
        }
        assert!(file.begin_read(&pool, 300_001, 10, how).unwrap().await.unwrap().is_empty());
        assert!(file.begin_read(&pool, 400_000, 10, how).unwrap().await.unwrap().is_empty());
    });
}

#[test]
fn pieces_that_the_ring_reads_are_the_same() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(300_001);
    run_real(async {
        let file = files::open(&directory.file("file", &content), OpenFlags::READ).await.unwrap();
        let pool = ThreadPool::new("test", 1, 10);
        for direct in [None, Some(512), None] {
            let how = ReadHow { direct, by_ring: true, ..ReadHow::default() };
            for (offset, length) in [(0, 300_001), (1, 1), (4095, 2), (299_999, 2), (300_001, 10), (400_000, 10)] {
                let piece = file.begin_read(&pool, offset, length, how).unwrap().await.unwrap();
                let (begin, end) = (content.len().min(offset as usize), content.len().min(offset as usize + length));
                assert!(piece[..] == content[begin..end], "{direct:?} {offset} {length}");
            }
        }
        // Cancelled while they are in flight; later reads are right nevertheless.
        for number in 0..50 {
            let mut read =
                file.begin_read(&pool, number * 4096, 4096, ReadHow { by_ring: true, ..ReadHow::default() }).unwrap();
            let _ = poll_once(&mut read).await;
        }
        yield_now().await;
        assert!(
            file.begin_read(&pool, 0, 4096, ReadHow { by_ring: true, ..ReadHow::default() }).unwrap().await.is_ok()
        );
        let is_ring = ring_counters().calls > 0;
        let ring = file_counters().pieces[Rung::ALL.iter().position(|&rung| rung == Rung::Ring).unwrap()];
        if !is_ring || ring == 0 {
            skip("a part: no ring, or a file system that it does not read from by itself");
        }
        assert!(is_ring || ring == 0);
    });
    run(async { assert_eq!(leased_bytes(), 0) });
}

#[test]
fn read_and_loop_dropped_in_any_state_disturb_no_others() {
    let _alone = alone();
    let directory = Directory::new();
    let content = pattern(300_000);
    let path = directory.file("file", &content);
    let pool = ThreadPool::new("test", 2, 100);
    for direct in [None, Some(512)] {
        for turn in 0..4 {
            run_real(async {
                let file = files::open(&path, OpenFlags::READ).await.unwrap();
                let how = ReadHow { direct, by_ring: true, ..ReadHow::default() };
                let begin = |number: u64, length| file.begin_read(&pool, number * 8192, length, how).unwrap();
                let mut kept = begin(1, 100_000);
                let polled = poll_once(&mut kept).await;
                for number in 2..20 {
                    let mut read = begin(number, 100_000);
                    let _ = poll_once(&mut read).await;
                    turns(turn).await;
                    drop(read);
                }
                // The loop, which ends, drops these: tasks that wait at most some turns.
                for number in 0..20 {
                    let read = begin(number, 50_000);
                    spawn(async move { assert!(read.await.is_ok()) });
                }
                let kept = match polled {
                    Poll::Ready(read) => read,
                    Poll::Pending => kept.await,
                };
                let (kept, first) = (kept.unwrap(), begin(0, 300_000).await.unwrap());
                assert!(kept[..] == content[8192..108_192] && first[..] == content[..]);
                turns(turn).await;
            });
        }
    }
    run(async { assert_eq!(leased_bytes(), 0) });
}

#[test]
fn facts_about_memory_are_shared_by_all_handles_of_a_file() {
    let _alone = alone();
    let directory = Directory::new();
    run(async {
        // Until the device does not count as busy because of other tests any more; their clock may be the machine's.
        sleep(std::time::Duration::from_secs(300_000_000)).await;
        let path = directory.file_read_before("file", &pattern(1 << 20));
        let file = files::open_blocking(&path, OpenFlags::READ).unwrap();
        // Not every file system lets a page that was just written be read without waiting.
        let CachedRead::Found(found) = file.look(0, 65_536).unwrap() else {
            return skip("reads cannot be tried here");
        };
        assert!(!found.is_empty());
        assert!(file.is_resident(0, 1 << 20).unwrap());
        let before = file_counters();
        let again = files::open_blocking(&directory.path("file"), OpenFlags::READ).unwrap();
        assert!(again.is_resident(0, 1 << 20).unwrap());
        assert_eq!(file_counters().probe_hits, before.probe_hits);
        assert!(!again.is_resident(1 << 20, 1).unwrap(), "there is nothing behind the end");
    });
}

async fn waiting_reads(file: &File, pool: &ThreadPool) -> Vec<PieceRead> {
    let mut reads = Vec::new();
    for number in 0..4 {
        let mut read = file.begin_read(pool, number * 1000, 1000, ReadHow::default()).unwrap();
        assert!(poll_once(&mut read).await.is_pending());
        reads.push(read);
    }
    reads
}

#[test]
fn file_of_this_user_is_read_on_the_loop_while_its_device_is_busy() {
    let _alone = alone();
    let directory = Directory::new();
    run(async {
        let (known, unknown) = (open(&directory, "known", &pattern(9000)), open(&directory, "unknown", &pattern(9000)));
        if !matches!(known.look(0, 9000).unwrap(), CachedRead::Found(_)) {
            return skip("reads cannot be tried here");
        }
        let (pool, task, gate) = busy_pool();
        let waiting = waiting_reads(&open(&directory, "cold", &pattern(9000)), &pool).await;
        assert!(matches!(known.look(0, 9000).unwrap(), CachedRead::Found(_)));
        // Since Linux 6.5 the kernel tells a file's owner what is in memory. Before, a thread reads.
        match unknown.look(0, 9000).unwrap() {
            CachedRead::Found(found) => assert_eq!(found.len(), 9000),
            CachedRead::NotInMemory => panic!("it has just been written"),
            missed => {
                let other = ThreadPool::new("other", 1, 10);
                let piece = unknown.begin_read(&other, 0, 9000, missed.how()).unwrap().await.unwrap();
                assert_eq!(piece.len(), 9000);
                assert!(matches!(unknown.look(0, 9000).unwrap(), CachedRead::Found(_)));
            }
        }
        drop(waiting);
        drop(gate);
        task.await.unwrap();
    });
}
