//! Shared by the measurements: a serving loop on core 0, a client loop, and the CPU time of both.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::Duration;

use gale_runtime::*;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

pub const WARM_UP: Duration = Duration::from_millis(100);
pub const RUN: Duration = Duration::from_millis(700);

/// Runs a loop that serves every connection with `answer`, and meanwhile `ask` on another thread.
pub fn beside_server<T: Send + 'static, A: Future<Output = ()> + 'static>(
    options: LoopOptions,
    accepting: AcceptOptions,
    answer: fn(Stream) -> A,
    ask: impl FnOnce(SocketAddress, Remote) -> T + Send + 'static,
) -> T {
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let serving = Arc::clone(&stop);
    let server = std::thread::spawn(move || serve(options, accepting, answer, &serving, &sender));
    let (address, server_loop) = receiver.recv().expect("the server started");
    let client = std::thread::spawn(move || ask(address, server_loop));
    let result = client.join().expect("the client ended");
    stop.store(true, Relaxed);
    server.join().expect("the server ended");
    result
}

fn serve<A: Future<Output = ()> + 'static>(
    options: LoopOptions,
    accepting: AcceptOptions,
    answer: fn(Stream) -> A,
    stop: &AtomicBool,
    ready: &mpsc::Sender<(SocketAddress, Remote)>,
) {
    pin(0);
    let driver = options.driver;
    let mut event_loop = EventLoop::new(options).expect("a loop");
    assert!(driver != DriverChoice::IoUring || event_loop.driver_reason().is_none(), "io_uring is refused here");
    event_loop.run(async {
        let any: SocketAddress = "127.0.0.1:0".parse::<std::net::SocketAddr>().expect("an address").into();
        let listener = Listener::bind(&any, 4096, accepting).expect("a port");
        ready.send((listener.local_address().expect("an address"), remote())).expect("a socket listens");
        spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                spawn(answer(stream));
            }
        });
        while !stop.load(Relaxed) {
            sleep(Duration::from_millis(20)).await;
        }
    });
}

/// The result of `state`, called on the server's loop at the end of a turn.
pub async fn state_of<T: Send + 'static>(server: &Remote, state: fn() -> T) -> T {
    let (sender, receiver) = mpsc::channel();
    let tell = move || {
        let _ = sender.send(state());
    };
    server.run(Box::new(tell)).expect("the loop takes calls");
    loop {
        match receiver.try_recv() {
            Ok(state) => return state,
            Err(_) => yield_now().await,
        }
    }
}

/// CPU time used by the calling thread.
pub fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Binds the calling thread to a core, if there are several.
pub fn pin(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    let _ = sched_setaffinity(None, &set);
}

pub fn median_and_least<S>(samples: &[S], figure: fn(&S) -> f64) -> (f64, f64) {
    let mut column: Vec<f64> = samples.iter().map(figure).collect();
    column.sort_by(f64::total_cmp);
    (column[column.len() / 2], column[0])
}
