//! The event loop: executor, timers, drivers, sockets, memory for bytes, thread pools, and a simulated world for tests.
//!
//! One loop per worker thread; its tasks are `!Send` futures that never block. This crate is the home of system calls
//! and of nearly all `unsafe`; it knows no protocol and no configuration.
//!
//! ```
//! use gale_runtime::{AcceptOptions, Buffer, EventLoop, Listener, LoopOptions, Output, SocketAddress, Stream, spawn};
//!
//! async fn echo(stream: Stream) {
//!     let (mut input, mut output) = (Buffer::new(), Output::new());
//!     while let Ok(1..) = stream.recv(&mut input, 4096).await {
//!         output.push(input.take_lease().expect("something was received"));
//!         if stream.send_all(&mut output).await.is_err() {
//!             break;
//!         }
//!     }
//! }
//!
//! # fn main() -> std::io::Result<()> {
//! let mut event_loop = EventLoop::new(LoopOptions::default())?;
//! event_loop.run(async {
//!     let any: SocketAddress = "127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into();
//!     let listener = Listener::bind(&any, 16, AcceptOptions::default())?;
//!     let address = listener.local_address()?;
//!     spawn(async move {
//!         while let Ok((stream, _peer)) = listener.accept().await {
//!             spawn(echo(stream));
//!         }
//!     });
//!     let client = Stream::connect(&address).await?;
//!     let (mut input, mut output) = (Buffer::new(), Output::new());
//!     output.push(b"hello");
//!     client.send_all(&mut output).await?;
//!     client.recv(&mut input, 4096).await?;
//!     assert_eq!(input.readable(), b"hello");
//!     Ok(())
//! })
//! # }
//! ```

pub mod affinity;
mod driver;
mod environment;
mod event_loop;
mod executor;
mod inbox;
mod memory;
mod net;
mod pool;
pub mod seccomp;
pub mod simulation;
#[cfg(test)]
#[path = "../../../tests/shared/skips.rs"]
mod skips;
mod socket;
pub mod stall;
mod sync;
mod time;
pub mod watchdog;

pub use driver::file_read::{FileRead, FileReading, ReadSource, begin_file_read};
pub use driver::listening::look_for_connections;
pub use driver::shortage::{RingShortage, set_shortage_reporter};
pub use driver::{RingCounters, RingOptions};
pub use environment::{
    all_sent, note_call, now, random_u64, remote, ring_counters, secret_u64, task_count, try_now, turn, wall,
    wall_seconds, worker,
};
pub use event_loop::{DriverChoice, EventLoop, LoopOptions};
pub use executor::budget::{Effort, charge_begun, charge_units, poll_begin, poll_copy, poll_units};
pub use executor::panics::{Panic, catch_panic, catch_panic_of, panic_count, set_panic_reporter};
pub use executor::{TaskId, TurnEnd, abort, is_awake, spawn, yield_now};
pub use inbox::{Call, Remote, RemoteError};
pub use memory::limits::available as available_memory;
pub use memory::{
    Buffer, Bytes, Charge, LEASE_CLASSES, Lease, Output, ReadMemory, leased_bytes, leased_bytes_max, leases_exhausted,
    set_leased_bytes_max, set_shared_bytes_max, share_leases, shared_bytes, shared_bytes_max,
};
pub use net::{
    AcceptMutex, Connecting, Datagram, Detached, IdleOptions, IdleStreams, Listener, Splice, Stream, WeakIdleStreams,
};
pub use pool::{
    Device, PoolCounters, PoolDevice, PoolError, PoolStatus, PoolTask, ThreadPool, default_pool, named_pool,
    on_a_pool_thread, pools, stop_pools, take_pool_wait,
};
pub use socket::{
    AcceptOptions, BATCH_MAX, ConnectError, ConnectOptions, ConnectStep, DatagramOptions, Ecn, MULTI_ACCEPT_BATCH,
    ReceiveBatch, Received, SocketAddress, TcpInfo, Transmit,
};
pub use stall::usage::watch_waiting;
pub use sync::{Closed, Notified, Notify, mpsc, oneshot, waiters};
pub use time::{
    ClockChoice, Elapsed, Moment, Timer, now_anywhere, real_now_anywhere, sleep, sleep_until, system_now, timeout,
    wall_anywhere,
};
