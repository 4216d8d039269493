//! The cost of sending a piece of a file that is in memory, by each way, and of checking that it is.
//!
//! ```text
//! cargo run --release -p gale-files --example delivery_cost [DIRECTORY]
//! ```
//!
//! Over loopback TCP, to a thread that discards what it reads. The processor time of both threads counts, because the
//! kernel shifts work between sender and receiver. Ways take turns in every round; medians of the rounds are printed.

use std::fs::FileTimes;
use std::io::{IoSliceMut, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use gale_files::{self as files, CachedRead, File, OpenFlags, ReadHow, file_counters};
use gale_runtime::{EventLoop, LoopOptions, Output, Stream, ThreadPool};
use rustix::io::ReadWriteFlags;

const ROUNDS: usize = 9;

/// Bytes sent by each way in each round.
const BYTES_PER_ROUND: usize = 64 << 20;

const PIECES: [usize; 8] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];

const FILE_BYTES: usize = 4 << 20;

const LOOKS: u32 = 20_000;

fn main() -> std::io::Result<()> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = directory.join(format!("gale-delivery-cost-{}", std::process::id()));
    std::fs::write(&path, vec![7; FILE_BYTES])?;
    // So that no read updates the access time, which would need a thread.
    let read_at = SystemTime::now() + Duration::from_secs(3600);
    std::fs::File::open(&path)?.set_times(FileTimes::new().set_accessed(read_at))?;
    let measured = EventLoop::new(LoopOptions::default()).and_then(|mut event_loop| event_loop.run(measure(&path)));
    std::fs::remove_file(&path)?;
    measured
}

async fn measure(path: &std::path::Path) -> std::io::Result<()> {
    let file = files::open(path, OpenFlags::READ).await?;
    looks(&file).await?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let socket = TcpStream::connect(listener.local_addr()?)?;
    let (mut peer, _) = listener.accept()?;
    std::thread::spawn(move || {
        let mut memory = vec![0; 256 << 10];
        while peer.read(&mut memory).is_ok_and(|count| count > 0) {}
    });
    let stream = Stream::from_fd(OwnedFd::from(socket))?;
    println!("{:>8}  {:>16}  {:>16}   processor time of both ends for 1 MiB", "piece", "read and send", "sendfile");
    for piece in PIECES {
        let (mut read, mut sent) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            read.push(timed(read_and_send(&stream, &file, piece)).await?);
            sent.push(timed(sendfile(&stream, &file, piece)).await?);
        }
        println!("{piece:>8}  {:>16?}  {:>16?}", median(read), median(sent));
    }
    Ok(())
}

/// Processor time per MiB.
async fn timed(work: impl Future<Output = std::io::Result<()>>) -> std::io::Result<Duration> {
    let begun = processor_time();
    work.await?;
    Ok((processor_time() - begun) / (BYTES_PER_ROUND >> 20) as u32)
}

async fn read_and_send(stream: &Stream, file: &File, piece: usize) -> std::io::Result<()> {
    let mut output = Output::new();
    for number in 0..BYTES_PER_ROUND / piece {
        let offset = (number * piece % FILE_BYTES) as u64;
        match file.look(offset, piece)? {
            CachedRead::Found(lease) => output.push(lease),
            other => return Err(std::io::Error::other(format!("{other:?}"))),
        }
        stream.send_all(&mut output).await?;
    }
    Ok(())
}

async fn sendfile(stream: &Stream, file: &File, piece: usize) -> std::io::Result<()> {
    for number in 0..BYTES_PER_ROUND / piece {
        let mut offset = (number * piece % FILE_BYTES) as u64;
        let end = offset + piece as u64;
        // False for a while after other processes have delayed this thread.
        file.is_resident(offset, piece as u64)?;
        while offset < end {
            let begin = offset;
            let count = stream.sendfile(file, &mut offset, (end - begin) as usize).await?;
            file.note_sent(begin, count);
        }
    }
    Ok(())
}

async fn looks(file: &File) -> std::io::Result<()> {
    let one = |what: &str, mut look: Box<dyn FnMut(u32) + '_>| {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            (0..LOOKS).for_each(&mut look);
            rounds.push(begun.elapsed() / LOOKS);
        }
        println!("{what}: {:?}", median(rounds));
    };
    for length in [1024, 10_240, 65_536] {
        one(&format!("a read of {length} bytes, as the ladder does it"), Box::new(|_| drop(file.look(0, length))));
        let mut memory = vec![0; length];
        one(
            &format!("preadv2 of {length} bytes alone"),
            Box::new(move |_| {
                let slices = &mut [IoSliceMut::new(&mut memory)];
                let _ = rustix::io::preadv2(file.as_fd(), slices, 0, ReadWriteFlags::NOWAIT);
            }),
        );
    }
    one(
        "a probe of one byte",
        Box::new(|number| {
            let offset = u64::from(number % 64) * 65_536;
            let _ = rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut [0])], offset, ReadWriteFlags::NOWAIT);
        }),
    );
    one("512 KiB that are known to be in memory", Box::new(|_| drop(file.is_resident(0, 512 << 10))));
    let pool = ThreadPool::new("cost", 1, 1000);
    for length in [65_536, 262_144] {
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let begun = processor_time();
            for _ in 0..2000 {
                drop(file.begin_read(&pool, 0, length, ReadHow::default())?.await?);
            }
            rounds.push((processor_time() - begun) / 2000);
        }
        println!("a read of {length} bytes by a pool, of both threads: {:?}", median(rounds));
    }
    assert_eq!(file_counters().probe_misses, 0);
    Ok(())
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn median(mut rounds: Vec<Duration>) -> Duration {
    rounds.sort_unstable();
    rounds[rounds.len() / 2]
}
