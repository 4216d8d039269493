//! Files that are being written: what they contain, writers that wait or fail, and readers that follow.

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

/// `io_uring.rs` includes this file for the other driver.
#[allow(dead_code)]
const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::Epoll;

use std::future::poll_fn;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::task::Poll;

use common::*;
use gale_files::{self as files, *};
use gale_runtime::*;

const NEW: OpenFlags = OpenFlags { create: Some(0o600), exclusive: true, ..OpenFlags::READ };

fn lease(content: &[u8]) -> Bytes {
    Lease::copy_of(content).unwrap().freeze()
}

/// A pool with one thread, which is blocked until the sender is dropped.
fn held_pool(queue_max: usize) -> (ThreadPool, Sender<()>) {
    let pool = ThreadPool::new("held", 1, queue_max);
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    pool.detach(Device::NONE, move || _ = receiver.recv()).unwrap();
    (pool, sender)
}

/// True if the writer accepts a piece now.
async fn is_ready(writer: &mut Writer) -> bool {
    poll_fn(|cx| Poll::Ready(writer.poll_ready(cx).is_ready())).await
}

/// Everything that a reader gets, in pieces of at most this length, and the end of the file.
async fn read_all(mut reader: GrowingReader, length: usize) -> (Vec<u8>, GrowingEnd) {
    let mut content = Vec::new();
    loop {
        match reader.read(length).await.unwrap() {
            Grown::Piece(piece) => {
                assert!((1..=length).contains(&piece.len()));
                content.extend_from_slice(&piece);
            }
            Grown::Ended(end) => return (content, end),
        }
    }
}

#[test]
fn pieces_arrive_in_order_and_the_file_knows_its_size() {
    let directory = Directory::new();
    let (path, content) = (directory.path("file"), pattern(1_000_000));
    run(async {
        let mut writer = Writer::open(&path, NEW).await.unwrap().with_queued_bytes_max(50_000);
        for (number, piece) in content.chunks(7001).enumerate() {
            writer.append(if number % 2 == 0 { lease(piece) } else { piece.to_vec().into() }).await.unwrap();
        }
        let file = writer.finish().await.unwrap();
        assert_eq!((file.metadata().size, file.metadata().mode & 0o777), (1_000_000, 0o600));
        assert!(std::fs::read(&path).unwrap() == content);
        assert_eq!(&file.read_at(7000, 10).await.unwrap()[..], &content[7000..7010]);
        assert_eq!(leased_bytes(), 0);
        let exists = Writer::open(&path, NEW).await.unwrap_err();
        assert_eq!(exists.to_string(), format!("open() \"{}\" failed (17: File exists)", path.display()));
    });
}

#[test]
fn writer_that_restarts_empties_the_file_and_begins_again() {
    let directory = Directory::new();
    let path = directory.path("file");
    run(async {
        let mut writer = Writer::open(&path, NEW).await.unwrap();
        writer.append(lease(b"what was before")).await.unwrap();
        writer.restart().await.unwrap();
        assert_eq!((writer.written(), std::fs::read(&path).unwrap().len()), (0, 0));
        writer.append(lease(b"anew")).await.unwrap();
        assert_eq!(writer.finish().await.unwrap().metadata().size, 4);
        assert_eq!(std::fs::read(&path).unwrap(), b"anew");
    });
}

#[test]
fn more_than_its_bound_does_not_wait_in_a_writer() {
    let directory = Directory::new();
    run(async {
        let (pool, held) = held_pool(10);
        let path = directory.path("bytes");
        let mut writer = Writer::open(&path, NEW).await.unwrap().in_pool(&pool).with_queued_bytes_max(1000);
        for _ in 0..2 {
            assert!(is_ready(&mut writer).await);
            writer.push(lease(&[b'x'; 600]));
        }
        assert!(!is_ready(&mut writer).await);
        let mut small = Writer::open(&directory.path("pieces"), NEW).await.unwrap().in_pool(&pool);
        let mut count = 0;
        while is_ready(&mut small).await {
            small.push("x".into());
            count += 1;
        }
        assert_eq!(count, 256);
        // The thread may not have taken the task that blocks it yet.
        let counters = pool.counters();
        assert_eq!(counters.waiting + counters.running, 3, "a write of each file stands in the line behind that task");
        drop(held);
        poll_fn(|cx| writer.poll_ready(cx)).await.unwrap();
        let file = writer.finish().await.unwrap();
        assert_eq!((file.metadata().size, small.finish().await.unwrap().metadata().size), (1200, 256));
    });
}

#[test]
fn futures_that_are_given_up_lose_nothing_that_was_taken() {
    let directory = Directory::new();
    let path = directory.path("file");
    run(async {
        let (pool, held) = held_pool(10);
        let mut writer = Writer::open(&path, NEW).await.unwrap().in_pool(&pool).with_queued_bytes_max(5);
        writer.append("first".into()).await.unwrap();
        assert!(poll_once(&mut Box::pin(writer.append("never taken".into()))).await.is_pending());
        assert!(poll_once(&mut Box::pin(writer.flush())).await.is_pending());
        drop(held);
        writer.append(" second".into()).await.unwrap();
        let file = writer.finish().await.unwrap();
        assert_eq!(file.metadata().size, 12);
        assert_eq!(std::fs::read(&path).unwrap(), b"first second");
    });
}

#[test]
fn writer_that_is_dropped_writes_nothing_more() {
    let directory = Directory::new();
    let path = directory.path("file");
    run(async {
        let (pool, held) = held_pool(10);
        let mut writer = Writer::open(&path, NEW).await.unwrap().in_pool(&pool);
        let reader = writer.follow().read_from(0);
        writer.push(lease(b"not wanted"));
        drop(writer);
        assert_eq!(leased_bytes(), 0);
        drop(held);
        assert!(matches!(read_all(reader, 100).await, (content, GrowingEnd::Failed) if content.is_empty()));
        pool.run(|| ()).await.unwrap();
    });
    assert_eq!(std::fs::read(&path).unwrap(), b"");
}

#[test]
fn full_disk_is_told_to_the_writer_and_to_readers_and_is_told_again() {
    run(async {
        let full = Path::new("/dev/full");
        let mut writer = Writer::open(full, OpenFlags::READ).await.unwrap();
        let reader = writer.follow().read_from(0);
        writer.push(lease(&[b'x'; 10_000]));
        let error = writer.flush().await.unwrap_err();
        assert_eq!(error.to_string(), "pwrite() \"/dev/full\" failed (28: No space left on device)");
        assert!(error.is_out_of_space() && error.error().kind() == ErrorKind::StorageFull && error.path() == full);
        writer.push("dropped".into());
        assert!(writer.append("refused".into()).await.unwrap_err().is_out_of_space());
        assert_eq!((writer.written(), leased_bytes()), (0, 0));
        let (content, end) = read_all(reader, 100).await;
        assert!(content.is_empty());
        assert!(matches!(end, GrowingEnd::NoLongerStored(Some(error)) if error.is_out_of_space()));
        assert!(writer.finish().await.unwrap_err().is_out_of_space());
    });
}

#[test]
fn pool_that_has_no_room_for_seconds_is_an_error_of_the_writer() {
    let directory = Directory::new();
    // Virtual time would stand still while a pool thread has a task.
    run_real(async {
        let (pool, held) = held_pool(0);
        let mut writer = Writer::open(&directory.path("refused"), NEW).await.unwrap().in_pool(&pool);
        writer.push("x".into());
        let error = writer.flush().await.unwrap_err().to_string();
        assert!(error.ends_with("failed (thread pool \"held\" queue overflow: 0 tasks waiting)"), "{error}");
        drop(held);
    });
}

#[test]
fn reads_through_a_writer_leave_the_time_of_access_alone() {
    let directory = Directory::new();
    let path = directory.file("file", b"before");
    set_accessed(&path, std::time::SystemTime::UNIX_EPOCH);
    run(async {
        let mut writer = Writer::open(&path, OpenFlags::READ).await.unwrap();
        writer.append("after".into()).await.unwrap();
        let file = writer.finish().await.unwrap();
        assert_eq!(&file.try_read_at(0, 100).unwrap().expect("nothing to be written for it")[..], b"aftere");
        let again = OpenFlags { no_access_time: true, ..OpenFlags::READ };
        let again = files::open(&path, again).await.unwrap();
        assert_eq!(&again.read_at(0, 100).await.unwrap()[..], b"aftere");
    });
    assert_eq!(std::fs::metadata(&path).unwrap().atime(), 0);
}

#[test]
fn readers_of_a_growing_file_get_all_of_it_wherever_they_begin() {
    let directory = Directory::new();
    let content = pattern(300_000);
    run(async {
        let mut writer = Writer::open(&directory.path("file"), NEW).await.unwrap();
        let growing = writer.follow();
        let done: Vec<_> = [(0, 1000), (0, 100_000), (150_000, 777), (299_999, 10), (300_000, 10)]
            .into_iter()
            .map(|(offset, length)| {
                let (sender, receiver) = oneshot::channel();
                let reader = growing.read_from(offset);
                spawn(async move { drop(sender.send((offset, read_all(reader, length).await))) });
                receiver
            })
            .collect();
        for piece in content.chunks(10_007) {
            writer.append(lease(piece)).await.unwrap();
            yield_now().await;
        }
        let mut late = growing.read_from(0);
        let file = writer.finish().await.unwrap();
        assert_eq!((file.metadata().size, growing.written()), (300_000, 300_000));
        assert!(matches!(growing.end(), Some(GrowingEnd::Complete)));
        for reader in done {
            let (offset, (read, end)) = reader.await.unwrap();
            assert!(matches!(end, GrowingEnd::Complete));
            assert!(read == content[offset as usize..], "from {offset}");
        }
        assert!(matches!(late.read(5).await.unwrap(), Grown::Piece(piece) if piece == content[..5]));
        assert_eq!(late.offset(), 5);
        drop(growing);
    });
}

#[test]
fn reader_is_woken_by_each_growth_and_may_leave() {
    let directory = Directory::new();
    run(async {
        let mut writer = Writer::open(&directory.path("file"), NEW).await.unwrap();
        let (mut reader, mut leaves) = (writer.follow().read_from(0), writer.follow().read_from(0));
        assert!(poll_once(&mut Box::pin(leaves.read(10))).await.is_pending());
        for text in [&b"one"[..], b"two"] {
            assert!(poll_once(&mut Box::pin(reader.read(10))).await.is_pending());
            writer.append(Bytes::copy_from_slice(text)).await.unwrap();
            assert!(matches!(reader.read(10).await.unwrap(), Grown::Piece(piece) if piece == *text));
        }
        assert!(poll_once(&mut Box::pin(reader.read(10))).await.is_pending());
        drop(leaves);
        writer.stop_storing();
        assert!(matches!(reader.read(10).await.unwrap(), Grown::Ended(GrowingEnd::NoLongerStored(None))));
    });
}

#[test]
fn newly_written_file_is_read_without_a_pool() {
    let directory = Directory::new();
    let content = pattern(100_000);
    run(async {
        let path = directory.path("file");
        let pool = ThreadPool::new("test", 4, 10);
        let mut writer = Writer::open(&path, NEW).await.unwrap().in_pool(&pool);
        let mut reader = writer.follow().read_from(0);
        let mut read = Vec::new();
        for (number, piece) in (1..).zip(content.chunks(10_000)) {
            writer.append(piece.to_vec().into()).await.unwrap();
            writer.flush().await.unwrap();
            while let Poll::Ready(grown) = poll_once(&mut Box::pin(reader.read(4096))).await {
                let Grown::Piece(piece) = grown.unwrap() else { panic!("it has not ended") };
                read.extend_from_slice(&piece);
            }
            assert_eq!(read.len(), number * 10_000);
        }
        assert!(read == content);
        // The last task may not have been counted yet.
        assert!(pool.counters().completed <= 10, "writes only");
    });
}

#[test]
fn readers_on_other_loops_follow_to_the_end() {
    fn assert_send<T: Send>(value: T) -> T {
        value
    }
    let directory = Directory::new();
    let content = pattern(500_000);
    run_real(async {
        let mut writer = assert_send(Writer::open(&directory.path("file"), NEW).await.unwrap());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let reader = assert_send(writer.follow().read_from(0));
                std::thread::spawn(move || run_real(read_all(reader, 30_000)))
            })
            .collect();
        for piece in content.chunks(20_000) {
            writer.append(lease(piece)).await.unwrap();
        }
        writer.finish().await.unwrap();
        for thread in threads {
            let (read, end) = thread.join().unwrap();
            assert!(read == content && matches!(end, GrowingEnd::Complete));
        }
    });
}

#[test]
fn file_that_was_cut_off_is_an_error_of_its_reader() {
    let directory = Directory::new();
    let path = directory.path("file");
    run(async {
        let mut writer = Writer::open(&path, NEW).await.unwrap();
        writer.append("some text".into()).await.unwrap();
        writer.flush().await.unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(4).unwrap();
        let mut reader = writer.follow().read_from(0);
        assert!(matches!(reader.read(10).await.unwrap(), Grown::Piece(piece) if piece == "some"));
        assert_eq!(reader.read(10).await.unwrap_err().error().kind(), ErrorKind::UnexpectedEof);
        assert_eq!(reader.offset(), 4);
    });
}

#[test]
fn names_are_given_and_changed() {
    let directory = Directory::new();
    run(async {
        let deep = directory.path("a/b/c");
        files::create_directories_blocking(&deep, 0o700).unwrap();
        files::create_directories_blocking(&deep, 0o755).unwrap();
        for made in ["a", "a/b", "a/b/c"] {
            assert_eq!(std::fs::metadata(directory.path(made)).unwrap().permissions().mode() & 0o777, 0o700);
        }
        let (from, to) = (directory.file("from", b"new"), directory.file("a/b/c/to", b"old"));
        files::rename(&from, &to).await.unwrap();
        assert_eq!((std::fs::read(&to).unwrap(), from.exists()), (b"new".to_vec(), false));
        let missing = files::rename(&from, &to).await.unwrap_err().to_string();
        let (from, to) = (from.display(), &to);
        let expected = format!("rename() \"{from}\" to \"{}\" failed (2: No such file or directory)", to.display());
        assert_eq!(missing, expected);
        let below_a_file = directory.path("file/below");
        directory.file("file", b"");
        let error = files::create_directories_blocking(&below_a_file, 0o700).unwrap_err();
        assert!(error.to_string().starts_with("mkdir() "), "{error}");
    });
}
