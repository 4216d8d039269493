//! Spools: data that readers get during the writing, effects of a slow, full or refusing disk on both ends, and
//! cleanup.

/// `spool_io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: DriverChoice = DriverChoice::Epoll;

#[path = "../../../tests/shared/scratch.rs"]
mod scratch;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::task::Poll;
use std::time::Duration;

use gale_runtime::simulation::{Faults, Random, Simulation, each_seed};
use gale_runtime::{
    Bytes, Device, DriverChoice, EventLoop, Lease, LoopOptions, Notify, ThreadPool, leased_bytes, set_leased_bytes_max,
    sleep, spawn, yield_now,
};
use gale_spool::{Spool, SpoolError, SpoolOptions, SpoolPath, SpoolReader, Spooled, TempPath};
use scratch::Scratch;

/// Most bytes waiting to be in the file.
const QUEUED_BYTES_MAX: usize = 128 * 1024;

/// Default number of seeds.
const SEEDS: u64 = 60;

/// Runs `main` on a loop in virtual time.
fn run<T>(main: impl Future<Output = T>) -> T {
    let options = LoopOptions { driver: crate::DRIVER, ..LoopOptions::simulated_time() };
    EventLoop::new(options).unwrap().run(main)
}

/// Runs `main` in this simulation.
fn run_simulated<T>(simulation: &Simulation, main: impl Future<Output = T>) -> T {
    EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(main)
}

fn in_directory(directory: &Scratch) -> TempPath {
    TempPath { path: directory.path().into(), levels: [1, 2].as_slice().into() }
}

/// Options with this much memory, and the rest in a file without a name.
fn options(directory: &Scratch, memory_max: usize) -> SpoolOptions {
    let place = SpoolPath::Unnamed(in_directory(directory));
    SpoolOptions { memory_max, length_max: None, place, pool: None }
}

fn named(directory: &Scratch, memory_max: usize) -> SpoolOptions {
    SpoolOptions { place: SpoolPath::Named(in_directory(directory)), ..options(directory, memory_max) }
}

/// All files in or below a directory.
fn files_below(directory: &Scratch) -> Vec<PathBuf> {
    let (mut files, mut directories) = (Vec::new(), vec![directory.path().to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { directories.push(path) } else { files.push(path) }
        }
    }
    files
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn lease(content: &[u8]) -> Bytes {
    Lease::copy_of(content).unwrap().freeze()
}

/// A pool whose only thread is blocked until the sender is dropped.
fn held_pool() -> (ThreadPool, Sender<()>) {
    let pool = ThreadPool::new("held", 1, 10);
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
    (pool, sender)
}

async fn is_ready(spool: &mut Spool) -> bool {
    poll_fn(|cx| Poll::Ready(spool.poll_ready(cx).is_ready())).await
}

/// Appends all bytes when there is room, alternately without and with copying.
async fn write(spool: &mut Spool, content: &[u8], piece_bytes: usize) -> Result<(), SpoolError> {
    for (number, piece) in content.chunks(piece_bytes).enumerate() {
        spool.ready().await?;
        if number % 2 == 0 {
            spool.append(lease(piece))?
        } else {
            spool.append_copy(piece)?
        }
        yield_now().await;
    }
    Ok(())
}

/// Reads everything in pieces of at most this length. Returns the error that ended it, if any.
async fn read_all(mut reader: SpoolReader, length: usize) -> (Vec<u8>, Option<SpoolError>) {
    let mut content = Vec::new();
    loop {
        match reader.read(length).await {
            Ok(Some(piece)) => {
                assert!((1..=length).contains(&piece.len()));
                content.extend_from_slice(&piece);
            }
            Ok(None) => return (content, None),
            Err(error) => return (content, Some(error)),
        }
    }
}

/// Spawns a task and returns a future of its result.
fn spawn_with_result<T: 'static>(work: impl Future<Output = T> + 'static) -> impl Future<Output = T> {
    let shared = Rc::new((RefCell::new(None), Notify::new()));
    let own = Rc::clone(&shared);
    spawn(async move {
        let result = work.await;
        *own.0.borrow_mut() = Some(result);
        own.1.notify_one();
    });
    async move {
        shared.1.notified().await;
        shared.0.take().expect("it was put there first")
    }
}

/// Polls a read once.
async fn read_now(reader: &mut SpoolReader, length: usize) -> Poll<Result<Option<Bytes>, SpoolError>> {
    poll_fn(|cx| Poll::Ready(reader.poll_read(cx, length))).await
}

#[test]
fn spool_that_memory_has_room_for_needs_no_file() {
    let directory = Scratch::new();
    let content = pattern(50_000);
    run(async {
        let mut spool = Spool::new(options(&directory, 50_000));
        let mut reader = spool.read(..);
        assert!(read_now(&mut reader, 10).await.is_pending());
        content.chunks(7).for_each(|piece| spool.append_copy(piece).unwrap());
        assert!(leased_bytes() <= 4 * 16 * 1024, "many short pieces take no more than their bytes");
        assert_eq!(read_all(reader.again(..50_000), 999).await.0, content, "the end of the range needs no end");
        let spooled = spool.finish().await.unwrap();
        assert_eq!((spooled.length(), spooled.file_length(), spooled.memory().len()), (50_000, 0, 4));
        assert!(spooled.file().is_none() && spooled.path().is_none());
        spooled.join_memory().unwrap();
        assert!(spooled.memory().len() == 1 && spooled.memory()[0] == content);
        assert_eq!(read_all(reader, 20_000).await.0, content);
        drop(spooled);
        assert_eq!(leased_bytes(), 0);
    });
    assert!(files_below(&directory).is_empty());
}

#[test]
fn readers_at_different_offsets_get_all_of_it_while_it_is_written() {
    let content = pattern(700_000);
    for memory_max in [0, 100_000] {
        let directory = Scratch::new();
        run(async {
            let mut spool = Spool::new(options(&directory, memory_max));
            let offsets = [(0, 1000), (0, 100_000), (99_990, 777), (350_000, 20_000), (699_999, 10), (700_000, 10)];
            let readers: Vec<_> = offsets
                .into_iter()
                .map(|(offset, length)| (offset, spawn_with_result(read_all(spool.read(offset..), length))))
                .collect();
            let part = spawn_with_result(read_all(spool.read(90_000..110_000), 5000));
            write(&mut spool, &content, 9001).await.unwrap();
            let spooled = spool.finish().await.unwrap();
            for (offset, reader) in readers {
                let (read, error) = reader.await;
                assert!(error.is_none() && read == content[offset as usize..], "from {offset}");
            }
            assert!(part.await.0 == content[90_000..110_000]);
            let kept: usize = spooled.memory().iter().map(|piece| piece.len()).sum();
            assert_eq!((kept, spooled.file_length()), (memory_max, 700_000 - memory_max as u64));
            let file = spooled.file().unwrap();
            assert_eq!((file.metadata().size, file.metadata().mode & 0o777), (spooled.file_length(), 0o600));
            assert_eq!(file.metadata().links, 0);
            assert!(read_all(spooled.read(..), 50_000).await.0 == content, "again");
            drop((spooled, file));
            assert_eq!(leased_bytes(), 0);
        });
        assert!(files_below(&directory).is_empty(), "the file has no name");
    }
}

#[test]
fn reader_begins_again_after_the_file_has_begun() {
    let directory = Scratch::new();
    let content = pattern(300_000);
    run(async {
        let mut spool = Spool::new(options(&directory, 10_000));
        let mut reader = spool.read(..);
        let mut read = 0;
        write(&mut spool, &content[..200_000], 10_000).await.unwrap();
        while read < 150_000 {
            read += reader.read(40_000).await.unwrap().expect("there is more").len();
        }
        assert!(spool.path().is_some() && spool.queued_bytes() < QUEUED_BYTES_MAX + 10_000);
        let again = spawn_with_result(read_all(reader.again(..), 30_000));
        drop(reader);
        write(&mut spool, &content[200_000..], 10_000).await.unwrap();
        let spooled = spool.finish().await.unwrap();
        let (read, error) = again.await;
        assert!(error.is_none() && read == content);
        drop(spooled);
    });
}

#[test]
fn reader_that_has_read_all_is_woken_by_more_and_by_the_end() {
    let directory = Scratch::new();
    run(async {
        let mut spool = Spool::new(options(&directory, 3));
        let (mut reader, mut leaves) = (spool.read(..), spool.read(..));
        assert!(read_now(&mut leaves, 10).await.is_pending());
        for text in [&b"one"[..], b"two", b"three"] {
            let next = spawn_with_result(async move {
                let piece = reader.read(10).await.unwrap().unwrap();
                (reader, piece)
            });
            yield_now().await;
            spool.append_copy(text).unwrap();
            let piece;
            (reader, piece) = next.await;
            assert_eq!(piece, text);
        }
        drop(leaves);
        let end = spawn_with_result(async move { reader.read(10).await });
        yield_now().await;
        let spooled = spool.finish().await.unwrap();
        assert!(end.await.unwrap().is_none());
        assert_eq!((spooled.memory(), spooled.file_length()), (vec![Bytes::from("one")], 8));
    });
}

#[test]
fn slow_disk_holds_up_the_writer_and_no_reader() {
    let directory = Scratch::new();
    let content = pattern(1_000_000);
    run(async {
        let (pool, held) = held_pool();
        let mut spool = Spool::new(SpoolOptions { pool: Some(pool), ..options(&directory, 20_000) });
        let mut written = 0;
        while is_ready(&mut spool).await {
            spool.append_copy(&content[written..written + 10_000]).unwrap();
            written += 10_000;
            yield_now().await;
        }
        assert_eq!(spool.queued_bytes(), written - 20_000);
        assert!((QUEUED_BYTES_MAX..QUEUED_BYTES_MAX + 10_000).contains(&spool.queued_bytes()));
        // 20,000 bytes are copied in two chunks.
        assert!(leased_bytes() <= 2 * 16 * 1024 + QUEUED_BYTES_MAX + 16 * 1024, "{}", leased_bytes());
        assert!(spool.path().is_none(), "nothing was even opened");
        assert!(read_all(spool.read(..written as u64), 7000).await.0 == content[..written], "it is in memory");
        drop(held);
        spool.ready().await.unwrap();
        write(&mut spool, &content[written..], 10_000).await.unwrap();
        let spooled = spool.finish().await.unwrap();
        assert!(read_all(spooled.read(..), 100_000).await.0 == content);
    });
}

#[test]
fn full_disk_is_reported_to_both_ends_and_bytes_in_memory_are_read() {
    let directory = Scratch::new();
    let content = pattern(400_000);
    let simulation = Simulation::new(1, Faults::NONE);
    run_simulated(&simulation, async {
        let mut spool = Spool::new(named(&directory, 30_000));
        write(&mut spool, &content[..150_000], 10_000).await.unwrap();
        while spool.queued_bytes() >= QUEUED_BYTES_MAX / 2 {
            sleep(Duration::from_millis(1)).await;
        }
        let reader = spawn_with_result(read_all(spool.read(..), 50_000));
        simulation.set_faults(Faults { disk_full: 1000, ..Faults::NONE });
        let error = loop {
            let length = spool.length() as usize;
            match write(&mut spool, &content[length..length + 5000], 5000).await {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        let path = spool.path().unwrap();
        let expected = format!("pwrite() \"{}\" failed (28: No space left on device)", path.display());
        assert_eq!(error.to_string(), expected);
        assert!(matches!(&error, SpoolError::File(error) if error.is_out_of_space()));
        assert_eq!(spool.append_copy(b"more").unwrap_err().to_string(), expected);
        let length = spool.length() as usize;
        assert!(length > 150_000 && spool.queued_bytes() > 0, "{length}");
        for reader in [read_all(spool.read(..), 1000).await, reader.await] {
            assert!(reader.0 == content[..length]);
            assert_eq!(reader.1.unwrap().to_string(), expected);
        }
        assert_eq!(spool.finish().await.unwrap_err().to_string(), expected);
        assert_eq!(leased_bytes(), 0);
        while simulation.pool_tasks() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(files_below(&directory).is_empty());
}

#[test]
fn disk_that_fails_when_all_has_come_keeps_no_reader_from_the_end() {
    let directory = Scratch::new();
    let simulation = Simulation::new(1, Faults { disk_full: 1000, ..Faults::NONE });
    run_simulated(&simulation, async {
        let mut spool = Spool::new(options(&directory, 5));
        spool.append_copy(b"kept, and in the queue").unwrap();
        let reader = spool.read(..);
        assert!(matches!(spool.finish().await, Err(SpoolError::File(_))));
        let (read, error) = read_all(reader, 10).await;
        assert!(error.is_none() && read == b"kept, and in the queue");
    });
}

#[test]
fn directory_that_cannot_be_made_is_told() {
    let directory = Scratch::new();
    std::fs::write(directory.path().join("file"), "").unwrap();
    run(async {
        let path = directory.path().join("file/below").into();
        let place = SpoolPath::Named(TempPath { path, levels: [].as_slice().into() });
        let mut spool = Spool::new(SpoolOptions { place, ..options(&directory, 0) });
        spool.append_copy(b"something").unwrap();
        let error = spool.finish().await.unwrap_err().to_string();
        assert!(error.starts_with("open() ") && error.ends_with("failed (20: Not a directory)"), "{error}");
    });
}

#[test]
fn pool_that_has_no_room_for_seconds_is_told() {
    let directory = Scratch::new();
    // In real time: virtual time stands still while a thread has work.
    let options_of_loop = LoopOptions { driver: crate::DRIVER, ..LoopOptions::default() };
    EventLoop::new(options_of_loop).unwrap().run(async {
        let pool = ThreadPool::new("busy", 1, 0);
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
        let mut spool = Spool::new(SpoolOptions { pool: Some(pool), ..options(&directory, 0) });
        spool.append_copy(b"something").unwrap();
        let error = spool.finish().await.unwrap_err().to_string();
        assert!(error.ends_with("failed (thread pool \"busy\" queue overflow: 0 tasks waiting)"), "{error}");
        drop(sender);
    });
}

/// A piece that panics on drop.
struct Panics(Vec<u8>);

impl AsRef<[u8]> for Panics {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        panic!("a test wanted it");
    }
}

#[test]
fn panic_while_it_is_stored_is_told() {
    let directory = Scratch::new();
    let options_of_loop = LoopOptions { driver: crate::DRIVER, survives_panics: true, ..LoopOptions::simulated_time() };
    EventLoop::new(options_of_loop).unwrap().run(async {
        let mut spool = Spool::new(options(&directory, 0));
        spool.append(Bytes::from_owner(Panics(pattern(40_000)))).unwrap();
        let error = spool.finish().await.unwrap_err().to_string();
        assert!(error.ends_with("failed (a task in a thread pool panicked)"), "{error}");
    });
}

#[test]
fn spool_takes_no_more_than_its_limit_and_readers_get_all_of_it() {
    let directory = Scratch::new();
    run(async {
        let mut spool = Spool::new(SpoolOptions { length_max: Some(10_000), ..options(&directory, 6000) });
        spool.append_copy(&pattern(5000)).unwrap();
        spool.append(lease(&pattern(5000))).unwrap();
        let reader = spawn_with_result(read_all(spool.read(..), 10_000));
        yield_now().await;
        assert!(matches!(spool.append_copy(b"x"), Err(SpoolError::TooLong)));
        assert!(matches!(spool.append(lease(b"x")), Err(SpoolError::TooLong)));
        assert!(matches!(spool.ready().await, Err(SpoolError::TooLong)));
        let (read, error) = reader.await;
        assert!(read == [pattern(5000), pattern(5000)].concat() && matches!(error, Some(SpoolError::TooLong)));
        assert!(matches!(spool.finish().await, Err(SpoolError::TooLong)));
    });
}

#[test]
fn spool_that_gets_no_memory_ends_and_leaves_none() {
    let directory = Scratch::new();
    run(async {
        // The hard limit is a quarter higher: 60 KiB, reached before the queue is full.
        set_leased_bytes_max(48 * 1024);
        let mut spool = Spool::new(options(&directory, 10_000));
        assert!(matches!(spool.append_copy(&pattern(100_000)), Err(SpoolError::NoMemory)));
        assert!(matches!(spool.ready().await, Err(SpoolError::NoMemory)));
        let mut reader = spool.read(..);
        assert_eq!(reader.read(100).await.unwrap().unwrap(), pattern(100));
        drop((spool, reader));
        assert_eq!(leased_bytes(), 0);
    });
}

#[test]
fn failure_of_the_writer_reaches_readers_after_the_existing_bytes() {
    let directory = Scratch::new();
    let content = pattern(100_000);
    let pool = ThreadPool::new("test", 2, 100);
    run(async {
        for is_dropped in [false, true] {
            let mut spool = Spool::new(SpoolOptions { pool: Some(pool.clone()), ..options(&directory, 1000) });
            let reader = spawn_with_result(read_all(spool.read(..), 8000));
            write(&mut spool, &content, 10_000).await.unwrap();
            let late = spool.read(50_000..);
            if is_dropped {
                drop(spool)
            } else {
                spool.fail(io::ErrorKind::ConnectionReset.into())
            }
            let kind = if is_dropped { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::ConnectionReset };
            for (begin, (read, error)) in [(0, reader.await), (50_000, read_all(late, 8000).await)] {
                assert!(read == content[begin..], "from {begin}");
                assert!(matches!(error, Some(SpoolError::BrokenOff(cause)) if cause.kind() == kind));
            }
        }
    });
    assert!(pool.stop(Duration::from_secs(60)), "all tasks are done");
    // A write in flight held its pieces until it was done.
    assert_eq!(leased_bytes(), 0);
}

#[test]
fn spool_that_goes_in_the_middle_leaves_neither_memory_nor_file() {
    let directory = Scratch::new();
    let pool = ThreadPool::new("test", 2, 100);
    run(async {
        for length in [1, 40_000, 100_000, 500_000] {
            for turns in [0, 1, 5] {
                let mut spool = Spool::new(SpoolOptions { pool: Some(pool.clone()), ..named(&directory, 1000) });
                write(&mut spool, &pattern(length), 10_000).await.unwrap();
                let mut reader = spool.read(..);
                reader.read(10_000).await.unwrap();
                // The file is being created, or a write is in flight, or neither.
                for _ in 0..turns {
                    yield_now().await;
                }
                let mut finish = pin!(spool.finish());
                let _ = poll_fn(|cx| Poll::Ready(finish.as_mut().poll(cx))).await;
            }
        }
    });
    assert!(pool.stop(Duration::from_secs(60)), "all tasks are done");
    assert!(files_below(&directory).is_empty());
    // A write in flight held its pieces until it was done.
    assert_eq!(leased_bytes(), 0);
}

#[test]
fn spool_with_readers_alone_goes_on_being_stored() {
    let directory = Scratch::new();
    let (pool, held) = held_pool();
    run(async {
        let mut spool = Spool::new(SpoolOptions { pool: Some(pool), ..options(&directory, 0) });
        spool.append_copy(&pattern(60_000)).unwrap();
        let mut reader = spool.read(..);
        let mut finish = Box::pin(spool.finish());
        assert!(poll_fn(|cx| Poll::Ready(finish.as_mut().poll(cx))).await.is_pending());
        drop(finish);
        drop(held);
        while leased_bytes() > 0 {
            yield_now().await;
        }
        assert_eq!(reader.read(10_000).await.unwrap().unwrap(), pattern(60_000)[..10_000]);
    });
}

#[test]
fn named_file_is_removed_kept_or_renamed() {
    let directory = Scratch::new();
    let pool = ThreadPool::new("test", 2, 100);
    let content = pattern(80_000);
    let (kept, renamed) = run(async {
        let stored = async |options: SpoolOptions| -> Spooled {
            let mut spool = Spool::new(SpoolOptions { pool: Some(pool.clone()), ..options });
            write(&mut spool, &content, 10_000).await.unwrap();
            spool.finish().await.unwrap()
        };
        let removed = stored(named(&directory, 0)).await;
        assert!(std::fs::read(removed.path().unwrap()).unwrap() == content);
        let kept = stored(named(&directory, 0)).await;
        kept.keep();
        let target = directory.path().join("entry");
        let place = SpoolPath::Beside(target.clone());
        let renamed = stored(SpoolOptions { place, ..options(&directory, 0) }).await;
        let path = renamed.path().unwrap();
        assert!(path.to_str().unwrap().starts_with(&format!("{}.", target.display())), "{path:?}");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        renamed.rename(&target).await.unwrap();
        assert_eq!(*renamed.path().unwrap(), *target);
        assert!(read_all(renamed.read(..), 10_000).await.0 == content);
        let nowhere = stored(named(&directory, 0)).await;
        let error = nowhere.rename(&directory.path().join("no/such")).await.unwrap_err().to_string();
        assert!(error.starts_with("rename() "), "{error}");
        (kept.path().unwrap(), target)
    });
    assert!(pool.stop(Duration::from_secs(60)), "all tasks are done");
    let mut expected = [kept.to_path_buf(), renamed];
    let mut files = files_below(&directory);
    expected.sort();
    files.sort();
    assert_eq!(files, expected);
    assert!(files.iter().all(|file| std::fs::read(file).unwrap() == content));
}

#[test]
fn file_that_is_asked_for_is_there_even_for_nothing() {
    let directory = Scratch::new();
    run(async {
        let mut spool = Spool::new(options(&directory, 1000));
        spool.append_copy(b"memory").unwrap();
        spool.begin_file();
        spool.append_copy(b"file").unwrap();
        let spooled = spool.finish().await.unwrap();
        assert_eq!((spooled.memory(), spooled.file_length()), (vec![Bytes::from("memory")], 4));
        assert_eq!(read_all(spooled.read(..), 100).await.0, b"memoryfile");
        let mut empty = Spool::new(options(&directory, 1000));
        empty.begin_file();
        let empty = empty.finish().await.unwrap();
        assert_eq!((empty.length(), empty.file().unwrap().metadata().size), (0, 0));
    });
}

/// Reads everything in a simulation with faults; refused reads are retried.
async fn follow(reader: SpoolReader, random: Random) -> (u64, Vec<u8>, Option<SpoolError>) {
    let (mut reader, mut read) = (reader, Vec::new());
    let mut begin = reader.offset();
    loop {
        if random.chance(20) {
            begin = random.below(reader.offset() + 1);
            (reader, read) = (reader.again(begin..), Vec::new());
        }
        match reader.read(random.up_to(30_000)).await {
            Ok(Some(piece)) => read.extend_from_slice(&piece),
            Ok(None) => return (begin, read, None),
            Err(error) if error.to_string().starts_with("pread() ") => sleep(Duration::from_millis(1)).await,
            Err(error) => return (begin, read, Some(error)),
        }
    }
}

#[test]
fn readers_get_all_appended_bytes_despite_faults() {
    let (whole, failed) = (Cell::new(0), Cell::new(0));
    each_seed(SEEDS, |simulation| {
        let directory = Scratch::new();
        let random = Random::new(simulation.seed());
        let mut faults = Faults::swarm(&random);
        faults.disk_full = *random.pick(&[0, 0, 0, 50]);
        faults.pool_refusals = *random.pick(&[0, 0, 20]);
        simulation.set_faults(faults);
        run_simulated(simulation, async {
            let content = pattern(random.up_to(400_000));
            let mut spool = Spool::new(named(&directory, *random.pick(&[0, 10_000, 300_000])));
            let readers: Vec<_> =
                (0..3).map(|_| spawn_with_result(follow(spool.read(random.below(1000)..), random.fork()))).collect();
            let breaks_off_at = if random.chance(200) { random.up_to(content.len()) } else { usize::MAX };
            let mut result = Ok(());
            while result.is_ok() && spool.length() < content.len() as u64 {
                let at = spool.length() as usize;
                if at > breaks_off_at {
                    break;
                }
                let length = random.up_to(40_000).min(content.len() - at);
                result = write(&mut spool, &content[at..at + length], 20_000).await;
                assert!(spool.queued_bytes() < QUEUED_BYTES_MAX + 20_000, "{}", spool.queued_bytes());
                if random.chance(300) {
                    sleep(Duration::from_micros(random.below(3000))).await;
                }
            }
            let appended = spool.length() as usize;
            // The disk may have failed since.
            let is_open = !matches!(poll_fn(|cx| Poll::Ready(spool.poll_ready(cx))).await, Poll::Ready(Err(_)));
            let is_whole = is_open && appended == content.len();
            if is_whole {
                // Unstored bytes can still be read to the end.
                result = spool.finish().await.map(drop);
            } else {
                drop(spool);
            }
            let counted = if result.is_ok() { &whole } else { &failed };
            counted.set(counted.get() + 1);
            for reader in readers {
                let (begin, read, error) = reader.await;
                assert_eq!(error.is_none(), is_whole, "{error:?}");
                assert!(read == content[(begin as usize).min(appended)..appended], "from {begin}");
            }
            while simulation.pool_tasks() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        });
        assert_eq!(leased_bytes(), 0);
        assert!(faults.pool_refusals > 0 || files_below(&directory).is_empty());
    });
    let is_a_sample = std::env::var_os("GALE_SEED").is_some() || std::env::var_os("GALE_SEEDS").is_some();
    assert!(is_a_sample || whole.get() > 0 && failed.get() > 0, "{} and {}", whole.get(), failed.get());
}
