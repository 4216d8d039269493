//! The cost of a piece in a plain tunnel: received and sent, or spliced.
//!
//! ```text
//! cargo run --release -p gale-runtime --example splice_cost [epoll | io_uring]
//! ```
//!
//! Over loopback TCP, from a thread that sends a piece to one that reads all of it and then asks for the next. The
//! kernel shifts work between sender and receiver, so the processor time of the whole process counts; the loop's own is
//! printed too. Ways take turns in every round; medians of the rounds are printed.

use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use gale_runtime::*;
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 9;
const PIECES: [usize; 7] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20];

/// Bytes that each way moves in a round, and maximum of pieces.
const BYTES_PER_ROUND: usize = 32 << 20;
const PIECES_PER_ROUND_MAX: usize = 1000;

#[derive(Clone, Copy, Debug)]
enum Way {
    Copy16,
    Copy64,
    Copy256,
    Splice,
    Auto,
}

const WAYS: [Way; 5] = [Way::Copy16, Way::Copy64, Way::Copy256, Way::Splice, Way::Auto];

fn main() -> io::Result<()> {
    let driver = match std::env::args().nth(1).as_deref() {
        Some("io_uring") => DriverChoice::IoUring,
        _ => DriverChoice::Epoll,
    };
    println!("{driver:?}: processor time of the process, and of the loop, in µs for a piece");
    print!("{:>8}", "piece");
    WAYS.iter().for_each(|way| print!("  {:>18}", format!("{way:?}")));
    println!();
    for piece in PIECES {
        let mut samples = WAYS.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (way, samples) in WAYS.into_iter().zip(&mut samples) {
                samples.push(round(driver, way, piece)?);
            }
        }
        print!("{:>7}K", piece >> 10);
        for samples in &mut samples {
            let mut median = |figure: fn(&(f64, f64)) -> f64| {
                samples.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
                figure(&samples[samples.len() / 2])
            };
            print!("  {:>9.1} {:>8.1}", median(|sample| sample.0), median(|sample| sample.1));
        }
        println!();
    }
    Ok(())
}

/// Processor time per piece, of the process and of the loop, in microseconds.
fn round(driver: DriverChoice, way: Way, piece: usize) -> io::Result<(f64, f64)> {
    let count = (BYTES_PER_ROUND / piece).min(PIECES_PER_ROUND_MAX);
    let ((mut source, entry), (exit, mut sink)) = (pair()?, pair()?);
    let (ask, asked) = mpsc::channel();
    let sender = std::thread::spawn(move || {
        let bytes = vec![7; piece];
        while asked.recv().is_ok() {
            source.write_all(&bytes).expect("the tunnel takes it");
        }
    });
    let receiver = std::thread::spawn(move || {
        let mut bytes = vec![0; piece];
        for _ in 0..count {
            ask.send(()).expect("the sender waits");
            sink.read_exact(&mut bytes).expect("the tunnel passes it on");
        }
    });
    let before = time(ClockId::ProcessCPUTime);
    let own = EventLoop::new(LoopOptions { driver, ..LoopOptions::default() })?.run(async move {
        let (entry, exit) = (Stream::from_fd(entry.into())?, Stream::from_fd(exit.into())?);
        let before = time(ClockId::ThreadCPUTime);
        match way {
            Way::Copy16 => copy(&entry, &exit, 16 << 10).await?,
            Way::Copy64 => copy(&entry, &exit, 64 << 10).await?,
            Way::Copy256 => copy(&entry, &exit, 256 << 10).await?,
            Way::Splice => splice(Splice::eager(), &entry, &exit).await?,
            Way::Auto => splice(Splice::new(), &entry, &exit).await?,
        }
        io::Result::Ok(time(ClockId::ThreadCPUTime) - before)
    })?;
    let all = time(ClockId::ProcessCPUTime) - before;
    sender.join().expect("the sender ended");
    receiver.join().expect("the receiver ended");
    let each = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
    Ok((each(all), each(own)))
}

async fn copy(from: &Stream, to: &Stream, max: usize) -> io::Result<()> {
    let (mut input, mut output) = (Buffer::new(), Output::new());
    while from.recv(&mut input, max).await? > 0 {
        output.push(input.take_lease().expect("something was received"));
        to.send_all(&mut output).await?;
    }
    Ok(())
}

async fn splice(mut splice: Splice, from: &Stream, to: &Stream) -> io::Result<()> {
    while poll_fn(|cx| splice.poll_transfer(cx, from, to)).await? > 0 {}
    Ok(())
}

fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    Ok((near, far))
}

fn time(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
