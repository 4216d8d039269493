//! Spill queues: data passed through memory and through the file, waits of the writer, and the effects of a full,
//! hanging or refusing disk on both ends.

#[path = "../../../tests/shared/scratch.rs"]
mod scratch;

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use gale_runtime::simulation::{Faults, Random, Simulation, each_seed};
use gale_runtime::{Bytes, Device, EventLoop, Lease, LoopOptions, ThreadPool, leased_bytes, sleep, spawn, yield_now};
use gale_spool::{SpillItem, SpillOptions, SpillQueue, SpillReader, SpoolError, SpoolPath, TempPath};
use scratch::Scratch;

/// Most bytes waiting to be in the file.
const QUEUED_BYTES_MAX: usize = 128 * 1024;

/// Default number of seeds.
const SEEDS: u64 = 100;

const MEMORY_MAX: usize = 64 * 1024;
const PIECE: usize = 8 * 1024;

/// Runs `main` in a simulation with these faults.
fn run<T>(simulation: &Simulation, main: impl Future<Output = T>) -> T {
    EventLoop::simulated(simulation, LoopOptions::default()).unwrap().run(main)
}

/// Runs `main` in a simulation without faults.
fn run_without_faults<T>(main: impl Future<Output = T>) -> T {
    run(&Simulation::new(1, Faults::NONE), main)
}

fn options(directory: &Scratch, file_max: u64) -> SpillOptions {
    let place = SpoolPath::Named(TempPath { path: directory.path().into(), levels: [].as_slice().into() });
    SpillOptions { memory_max: MEMORY_MAX, file_max, place, pool: None }
}

/// The bytes from this offset on; each depends on its offset.
fn content(offset: usize, length: usize) -> Vec<u8> {
    (offset as u32..(offset + length) as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn lease(content: &[u8]) -> Bytes {
    Lease::copy_of(content).unwrap().freeze()
}

fn file_length(queue: &SpillQueue) -> u64 {
    queue.path().map_or(0, |path| path.metadata().unwrap().len())
}

async fn is_ready(queue: &mut SpillQueue) -> bool {
    poll_fn(|cx| Poll::Ready(queue.poll_ready(cx).is_ready())).await
}

/// Gives the disk time to finish.
async fn settle() {
    for _ in 0..50 {
        sleep(Duration::from_millis(1)).await;
    }
}

/// Appends until there is no room in memory or file. Returns the total length appended.
async fn fill(queue: &mut SpillQueue, mut length: usize) -> usize {
    loop {
        while is_ready(queue).await {
            queue.append(lease(&content(length, PIECE)));
            length += PIECE;
        }
        settle().await;
        if !is_ready(queue).await {
            return length;
        }
    }
}

/// The bytes of an item.
async fn bytes_of(item: SpillItem) -> Vec<u8> {
    let (file, mut offset, length) = match item {
        SpillItem::Bytes(bytes) => return bytes.to_vec(),
        SpillItem::File { file, offset, length } => (file, offset, length),
    };
    let (mut content, end) = (Vec::new(), offset + length);
    while offset < end {
        match file.read_at(offset, (end - offset) as usize).await {
            Ok(bytes) => {
                assert!(!bytes.is_empty(), "the file is shorter than that");
                offset += bytes.len() as u64;
                content.extend_from_slice(&bytes);
            }
            // A pool occasionally refuses.
            Err(_) => sleep(Duration::from_millis(1)).await,
        }
    }
    content
}

/// Reads an item and checks it. Returns the offset of the next one.
async fn read_one(reader: &mut SpillReader, offset: usize) -> usize {
    let item = reader.next().await.unwrap().expect("there is more");
    let bytes = bytes_of(item).await;
    assert!(!bytes.is_empty() && bytes == content(offset, bytes.len()), "at {offset}");
    offset + bytes.len()
}

/// Reads to the end. Returns its offset, and the error that ended it, if any.
async fn read_rest(mut reader: SpillReader, mut offset: usize) -> (usize, Option<SpoolError>) {
    loop {
        match reader.next().await {
            Ok(Some(item)) => {
                let bytes = bytes_of(item).await;
                assert!(!bytes.is_empty() && bytes == content(offset, bytes.len()), "at {offset}");
                offset += bytes.len();
            }
            Ok(None) => return (offset, None),
            Err(error) => return (offset, Some(error)),
        }
    }
}

#[test]
fn queue_without_a_file_holds_no_more_than_memory_may_and_waits() {
    let directory = Scratch::new();
    run_without_faults(async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, 0));
        let (mut written, mut read) = (0, 0);
        for _ in 0..20 {
            written = fill(&mut queue, written).await;
            assert_eq!((written - read, queue.memory_bytes(), queue.file_bytes()), (MEMORY_MAX, MEMORY_MAX, 0));
            assert!(leased_bytes() <= 2 * MEMORY_MAX);
            for _ in 0..3 {
                read = read_one(&mut reader, read).await;
            }
        }
        queue.finish();
        assert_eq!(read_rest(reader, read).await.0, written);
        assert_eq!(leased_bytes(), 0);
    });
    assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none());
}

#[test]
fn surplus_goes_to_the_file_up_to_its_size_and_then_the_writer_waits() {
    let directory = Scratch::new();
    let simulation = Simulation::new(1, Faults::NONE);
    for file_max in [1, 5000, 100_000, 1_000_000, 4_000_000] {
        run(&simulation, async {
            let (mut queue, mut reader) = SpillQueue::new(options(&directory, file_max));
            let written = fill(&mut queue, 0).await;
            assert_eq!((queue.file_bytes(), file_length(&queue)), (file_max, file_max));
            assert_eq!(queue.memory_bytes() as u64 + file_max, written as u64);
            assert!(queue.memory_bytes() < MEMORY_MAX + PIECE, "{}", queue.memory_bytes());
            let mut read = 0;
            while read < written {
                read = read_one(&mut reader, read).await;
            }
            assert!(is_ready(&mut queue).await && !reader.is_at_end());
            queue.finish();
            assert!(reader.is_at_end() && reader.next().await.unwrap().is_none());
            drop(reader);
            settle().await;
        });
        assert_eq!(leased_bytes(), 0);
    }
    assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none());
}

#[test]
fn memory_is_bounded_while_the_disk_hangs_and_a_fast_reader_does_not_wait_for_it() {
    let directory = Scratch::new();
    let (pool, held) = {
        let pool = ThreadPool::new("held", 1, 10);
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
        (pool, sender)
    };
    EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
        let options = SpillOptions { pool: Some(pool), ..options(&directory, u64::MAX) };
        let (mut queue, mut reader) = SpillQueue::new(options);
        let (mut written, mut read) = (0, 0);
        for _ in 0..10 {
            while is_ready(&mut queue).await {
                queue.append(lease(&content(written, PIECE)));
                written += PIECE;
                yield_now().await;
            }
            assert_eq!(queue.memory_bytes(), MEMORY_MAX + QUEUED_BYTES_MAX);
            assert!(queue.path().is_none(), "nothing was even opened");
            while read < written {
                read = read_one(&mut reader, read).await;
            }
        }
        drop(held);
        queue.finish();
        assert_eq!(read_rest(reader, read).await.0, written);
    });
}

#[test]
fn file_is_used_again_from_its_start_when_the_reader_has_all_of_it() {
    let directory = Scratch::new();
    let file_max = 300_000;
    run_without_faults(async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, file_max));
        let (mut written, mut read) = (0, 0);
        for _ in 0..20 {
            written = fill(&mut queue, written).await;
            assert_eq!(file_length(&queue), file_max, "all of it is used, and no more");
            assert!(written - read > file_max as usize + MEMORY_MAX - PIECE);
            while read < written {
                read = read_one(&mut reader, read).await;
            }
        }
        assert!(written > 20 * file_max as usize);
    });
}

#[test]
fn file_is_not_written_over_while_a_piece_of_it_is_held() {
    let directory = Scratch::new();
    run_without_faults(async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, 300_000));
        let mut written = fill(&mut queue, 0).await;
        let (mut read, mut piece) = (0, None);
        while piece.is_none() {
            match reader.next().await.unwrap().unwrap() {
                item @ SpillItem::File { .. } => piece = Some((read, item)),
                SpillItem::Bytes(bytes) => read += bytes.len(),
            }
        }
        let (begin, piece) = piece.unwrap();
        let length = piece.length() as usize;
        assert_eq!(length, 300_000);
        read += length;
        for _ in 0..5 {
            written = fill(&mut queue, written).await;
            assert_eq!((queue.file_bytes(), file_length(&queue)), (0, 300_000), "memory alone is used");
            read = read_one(&mut reader, read).await;
        }
        assert!(bytes_of(piece).await == content(begin, length));
        written = fill(&mut queue, written).await;
        assert_eq!((queue.file_bytes(), file_length(&queue)), (300_000, 300_000));
        queue.finish();
        assert_eq!(read_rest(reader, read).await.0, written);
    });
}

#[test]
fn pages_taken_by_sendfile_arrive_although_the_file_is_rewritten() {
    let directory = Scratch::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut receiver = listener.accept().unwrap().0;
    run_without_faults(async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, 32 * 1024));
        let mut written = fill(&mut queue, 0).await;
        let mut read = 0;
        let begin = loop {
            match reader.next().await.unwrap().unwrap() {
                SpillItem::Bytes(bytes) => read += bytes.len(),
                SpillItem::File { file, mut offset, length } => {
                    let count = rustix::fs::sendfile(&sender, &file, Some(&mut offset), length as usize).unwrap();
                    assert_eq!((count, length), (32 * 1024, 32 * 1024));
                    read += count;
                    break read - count;
                }
            }
        };
        while read < written {
            read = read_one(&mut reader, read).await;
        }
        written = fill(&mut queue, written).await;
        assert_eq!((queue.file_bytes(), file_length(&queue)), (32 * 1024, 32 * 1024), "it was written again");
        let mut received = vec![0; 32 * 1024];
        receiver.read_exact(&mut received).unwrap();
        assert!(received == content(begin, received.len()));
        queue.finish();
        assert_eq!(read_rest(reader, read).await.0, written);
    });
}

#[test]
fn full_disk_loses_nothing_is_told_once_and_leaves_memory_alone() {
    let directory = Scratch::new();
    let simulation = Simulation::new(1, Faults::NONE);
    run(&simulation, async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, u64::MAX));
        let mut written = 0;
        while queue.file_bytes() < 300_000 {
            while is_ready(&mut queue).await {
                queue.append(lease(&content(written, PIECE)));
                written += PIECE;
            }
            settle().await;
        }
        assert!(queue.take_failure().is_none());
        simulation.set_faults(Faults { disk_full: 1000, ..Faults::NONE });
        written = fill(&mut queue, written).await;
        let path = queue.path().unwrap();
        let failure = queue.take_failure().unwrap();
        assert!(failure.is_out_of_space());
        let expected = format!("pwrite() \"{}\" failed (28: No space left on device)", path.display());
        assert_eq!(failure.to_string(), expected);
        assert!(queue.take_failure().is_none());
        let stored = queue.file_bytes();
        assert!(stored >= 300_000 && queue.memory_bytes() <= MEMORY_MAX + QUEUED_BYTES_MAX);
        // The file stays unused, even when the disk has room again.
        simulation.set_faults(Faults::NONE);
        let mut read = 0;
        for _ in 0..100 {
            read = read_one(&mut reader, read).await;
            written = fill(&mut queue, written).await;
        }
        assert_eq!((queue.file_bytes(), queue.memory_bytes()), (0, MEMORY_MAX), "no more than memory may hold");
        queue.finish();
        assert_eq!(read_rest(reader, read).await.0, written);
        assert_eq!(leased_bytes(), 0);
    });
}

#[test]
fn directory_that_cannot_be_made_leaves_memory_alone() {
    let directory = Scratch::new();
    std::fs::write(directory.path().join("file"), "").unwrap();
    run_without_faults(async {
        let path = directory.path().join("file/below").into();
        let place = SpoolPath::Unnamed(TempPath { path, levels: [].as_slice().into() });
        let (mut queue, reader) = SpillQueue::new(SpillOptions { place, ..options(&directory, u64::MAX) });
        let written = fill(&mut queue, 0).await;
        let failure = queue.take_failure().unwrap().to_string();
        assert!(failure.starts_with("open() ") && failure.ends_with("failed (20: Not a directory)"), "{failure}");
        assert!(queue.path().is_none() && queue.memory_bytes() == written);
        queue.finish();
        assert_eq!(read_rest(reader, 0).await.0, written);
    });
}

#[test]
fn short_pieces_take_no_more_memory_than_their_bytes_and_one_that_is_waited_for_comes_as_it_is() {
    let directory = Scratch::new();
    run_without_faults(async {
        let (mut queue, mut reader) = SpillQueue::new(options(&directory, 0));
        for (number, byte) in content(0, 50_000).into_iter().enumerate() {
            assert!(is_ready(&mut queue).await, "{number}");
            queue.append(lease(&[byte]));
        }
        assert!(leased_bytes() <= 4 * 16 * 1024, "{}", leased_bytes());
        let mut read = 0;
        while read < 50_000 {
            read = read_one(&mut reader, read).await;
        }
        let waits = poll_fn(|cx| Poll::Ready(reader.poll_next(cx).is_pending())).await;
        assert!(waits);
        let piece = lease(b"an event");
        let address = piece.as_ptr();
        queue.append(piece);
        match reader.next().await.unwrap().unwrap() {
            SpillItem::Bytes(bytes) => assert!(bytes == b"an event"[..] && bytes.as_ptr() == address),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn reader_is_woken_by_bytes_end_and_failure_of_the_writer() {
    let directory = Scratch::new();
    run_without_faults(async {
        for end in ["finish", "fail", "drop"] {
            let (mut queue, reader) = SpillQueue::new(options(&directory, 0));
            let result = Rc::new(Cell::new(None));
            let own = Rc::clone(&result);
            spawn(async move { own.set(Some(read_rest(reader, 0).await)) });
            yield_now().await;
            queue.append(lease(&content(0, 10_000)));
            yield_now().await;
            queue.append(lease(&content(10_000, 10)));
            yield_now().await;
            match end {
                "finish" => queue.finish(),
                "fail" => queue.fail(io::ErrorKind::ConnectionReset.into()),
                _ => drop(queue),
            }
            while leased_bytes() > 0 {
                yield_now().await;
            }
            yield_now().await;
            let (read, error) = result.take().expect("it has ended");
            assert_eq!(read, 10_010);
            match (end, error) {
                ("finish", None) => {}
                ("fail", Some(SpoolError::BrokenOff(cause))) => {
                    assert_eq!(cause.kind(), io::ErrorKind::ConnectionReset);
                }
                ("drop", Some(SpoolError::BrokenOff(cause))) => assert_eq!(cause.kind(), io::ErrorKind::UnexpectedEof),
                (_, error) => panic!("{error:?}"),
            }
        }
    });
}

#[test]
fn bytes_after_the_reader_has_gone_are_dropped() {
    let directory = Scratch::new();
    run_without_faults(async {
        for file_max in [0, 100_000, u64::MAX] {
            let (mut queue, reader) = SpillQueue::new(options(&directory, file_max));
            let mut written = 0;
            while written < MEMORY_MAX + 50_000 && is_ready(&mut queue).await {
                queue.append(lease(&content(written, PIECE)));
                written += PIECE;
            }
            drop(reader);
            for _ in 0..100 {
                assert!(is_ready(&mut queue).await);
                queue.append(lease(&content(0, PIECE)));
            }
            assert_eq!((queue.memory_bytes(), queue.file_bytes()), (0, 0));
            queue.finish();
            settle().await;
        }
        assert_eq!(leased_bytes(), 0);
    });
    assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none());
}

#[test]
fn reader_gets_all_appended_bytes_despite_faults() {
    let (spilled, failed, rewritten) = (Cell::new(0), Cell::new(0), Cell::new(0));
    each_seed(SEEDS, |simulation| {
        let directory = Scratch::new();
        let random = Random::new(simulation.seed());
        let mut faults = Faults::swarm(&random);
        faults.disk_full = *random.pick(&[0, 0, 0, 50]);
        faults.pool_refusals = *random.pick(&[0, 0, 20]);
        simulation.set_faults(faults);
        run(simulation, async {
            let memory_max = *random.pick(&[0, 10_000, 100_000]);
            let file_max = *random.pick(&[0, 1000, 70_000, 300_000, u64::MAX]);
            let options = SpillOptions { memory_max, ..options(&directory, file_max) };
            let (mut queue, mut reader) = SpillQueue::new(options);
            let length = random.up_to(1_500_000);
            let result = Rc::new(Cell::new(None));
            let (own, reads) = (Rc::clone(&result), random.fork());
            spawn(async move {
                let mut offset = 0;
                let mut pending: Vec<(usize, SpillItem)> = Vec::new();
                loop {
                    let item = reader.next().await;
                    // Others read their items later.
                    match item {
                        Ok(Some(item)) => {
                            let begin = offset;
                            offset += item.length() as usize;
                            pending.push((begin, item));
                        }
                        Ok(None) => break,
                        Err(error) => panic!("{error}"),
                    }
                    if reads.chance(300) {
                        sleep(Duration::from_micros(reads.below(5000))).await;
                    }
                    while pending.len() > 3 || !pending.is_empty() && reads.chance(600) {
                        let (begin, item) = pending.remove(0);
                        let length = item.length() as usize;
                        assert!(bytes_of(item).await == content(begin, length), "at {begin}");
                    }
                }
                for (begin, item) in pending {
                    let length = item.length() as usize;
                    assert!(bytes_of(item).await == content(begin, length), "at {begin}");
                }
                own.set(Some(offset));
            });
            let mut written = 0;
            while written < length {
                queue.ready().await;
                let piece = random.up_to(20_000).min(length - written);
                queue.append(lease(&content(written, piece)));
                written += piece;
                let file_end = file_length(&queue);
                assert!(queue.memory_bytes() < memory_max.max(1) + QUEUED_BYTES_MAX + 20_000);
                assert!(file_end <= file_max);
                spilled.set(spilled.get() + u64::from(queue.file_bytes() > 0));
                rewritten.set(rewritten.get() + u64::from(file_max < u64::MAX && written as u64 > 3 * file_max));
                if random.chance(100) {
                    sleep(Duration::from_micros(random.below(2000))).await;
                }
            }
            failed.set(failed.get() + u64::from(queue.take_failure().is_some()));
            queue.finish();
            let read = loop {
                match result.take() {
                    Some(read) => break read,
                    None => sleep(Duration::from_millis(1)).await,
                }
            };
            assert_eq!(read, length);
            while simulation.pool_tasks() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        });
        assert_eq!(leased_bytes(), 0);
    });
    let is_a_sample = std::env::var_os("GALE_SEED").is_some() || std::env::var_os("GALE_SEEDS").is_some();
    let counts = (spilled.get(), failed.get(), rewritten.get());
    assert!(is_a_sample || counts.0 > 0 && counts.1 > 0 && counts.2 > 0, "{counts:?}");
}

/// Limit of the loop's leases; half of it may wait for files.
const LEASED_MAX: usize = 4 << 20;

fn run_with_little_memory<T>(main: impl Future<Output = T>) -> T {
    let options = LoopOptions { leased_bytes_max: Some(LEASED_MAX), ..LoopOptions::default() };
    EventLoop::simulated(&Simulation::new(1, Faults::NONE), options).unwrap().run(main)
}

#[test]
fn queues_of_a_loop_hold_a_bounded_backlog_for_a_disk_that_hangs() {
    let directory = Scratch::new();
    let pool = ThreadPool::new("hanging", 1, 1000);
    let (held, receiver) = std::sync::mpsc::channel::<()>();
    pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
    let loop_options = LoopOptions { leased_bytes_max: Some(LEASED_MAX), ..LoopOptions::default() };
    EventLoop::new(loop_options).unwrap().run(async {
        let options = SpillOptions { memory_max: 4096, pool: Some(pool), ..options(&directory, u64::MAX) };
        let mut queues: Vec<_> = (0..100).map(|_| SpillQueue::new(options.clone())).collect();
        let mut lengths = vec![0; queues.len()];
        for ((queue, _), length) in queues.iter_mut().zip(&mut lengths) {
            while is_ready(queue).await {
                queue.append(Bytes::from(content(*length, PIECE)));
                *length += PIECE;
            }
        }
        assert!(queues.iter().all(|(queue, _)| queue.room_bytes() == 0));
        let waiting: usize = queues.iter().map(|(queue, _)| queue.memory_bytes()).sum();
        let own = queues.len() * (4096 + PIECE);
        assert!(waiting <= LEASED_MAX / 2 + own && waiting >= LEASED_MAX / 2, "{waiting}");
        // Each has its own memory, although the first ones have used up the backlog.
        assert!(lengths.iter().all(|&length| length >= 4096), "{lengths:?}");
        // When the disk continues, all of them do.
        drop(held);
        for ((queue, _), length) in queues.iter_mut().zip(&mut lengths) {
            for _ in 0..20 {
                queue.ready().await;
                queue.append(Bytes::from(content(*length, PIECE)));
                *length += PIECE;
            }
        }
        for ((queue, reader), length) in queues.into_iter().zip(lengths) {
            queue.finish();
            assert_eq!(read_rest(reader, 0).await.0, length);
        }
    });
}

#[test]
fn many_queues_have_a_smaller_share_each() {
    const QUEUES: usize = 600;
    const SHARE_MIN: usize = 16 * 1024;
    let directory = Scratch::new();
    let pool = ThreadPool::new("hanging", 1, 1000);
    let (held, receiver) = std::sync::mpsc::channel::<()>();
    pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
    let loop_options = LoopOptions { leased_bytes_max: Some(256 << 20), ..LoopOptions::default() };
    EventLoop::new(loop_options).unwrap().run(async {
        let options = SpillOptions { memory_max: 4096, pool: Some(pool), ..options(&directory, u64::MAX) };
        let mut queues: Vec<_> = (0..QUEUES).map(|_| (SpillQueue::new(options.clone()), 0)).collect();
        let mut has_room = true;
        while std::mem::take(&mut has_room) {
            for ((queue, _), length) in &mut queues {
                if is_ready(queue).await {
                    queue.append(Bytes::from(content(*length, PIECE)));
                    *length += PIECE;
                    has_room = true;
                }
            }
        }
        for ((queue, _), _) in &queues {
            let bytes = queue.memory_bytes();
            assert!((4096 + SHARE_MIN..4096 + SHARE_MIN + PIECE).contains(&bytes), "{bytes}");
        }
        // Those that stay have larger shares, and go on when the disk does.
        queues.truncate(10);
        assert_eq!(queues[0].0.0.room_bytes(), 4096 + QUEUED_BYTES_MAX - queues[0].0.0.memory_bytes());
        drop(held);
        for ((mut queue, reader), mut length) in queues {
            for _ in 0..50 {
                queue.ready().await;
                queue.append(Bytes::from(content(length, PIECE)));
                length += PIECE;
            }
            queue.finish();
            assert_eq!(read_rest(reader, 0).await.0, length);
        }
    });
}

#[test]
fn small_surplus_of_many_queues_is_written_when_the_backlog_is_full() {
    let directory = Scratch::new();
    run_with_little_memory(async {
        let options = SpillOptions { memory_max: 4096, ..options(&directory, u64::MAX) };
        // Each has too few waiting bytes for a write.
        let mut queues: Vec<_> = (0..300).map(|_| SpillQueue::new(options.clone())).collect();
        for (queue, _) in &mut queues {
            for at in 0..2 {
                queue.ready().await;
                queue.append(Bytes::from(content(at * PIECE, PIECE)));
            }
        }
        // Another queue gets room, although no queue is read.
        let (mut other, reader) = SpillQueue::new(options);
        for at in 0..100 {
            other.ready().await;
            other.append(Bytes::from(content(at * PIECE, PIECE)));
        }
        other.finish();
        assert_eq!(read_rest(reader, 0).await.0, 100 * PIECE);
        assert!(queues.iter().any(|(queue, _)| queue.file_bytes() > 0));
    });
}
