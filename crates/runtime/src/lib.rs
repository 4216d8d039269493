//! The event loop: executor, timers, drivers, sockets, files, thread pools.
//!
//! One loop per worker thread; its tasks are `!Send` futures that never block. This crate is the home of system calls and
//! of nearly all `unsafe`; it knows no protocol and no configuration.
//!
//! ```
//! use gale_runtime::{AcceptOptions, Buffer, EventLoop, Listener, LoopOptions, Output, SocketAddress, Stream, spawn};
//!
//! async fn echo(stream: Stream) {
//!     let (mut input, mut output) = (Buffer::new(), Output::new());
//!     while let Ok(1..) = stream.recv(&mut input, 4096).await {
//!         output.push_lease(input.take_lease().expect("something was received"));
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
//!     output.push_static(b"hello");
//!     client.send_all(&mut output).await?;
//!     client.recv(&mut input, 4096).await?;
//!     assert_eq!(input.readable(), b"hello");
//!     Ok(())
//! })
//! # }
//! ```

mod accept_mutex;
mod address;
pub mod affinity;
mod buffer;
mod clock;
mod datagram;
mod devices;
mod driver;
mod environment;
mod event_loop;
mod executor;
mod file_counters;
pub mod files;
mod inbox;
mod listener;
mod memory;
mod mounts;
mod output;
mod panics;
mod parked;
mod pool;
mod reads;
mod residency;
#[cfg(test)]
#[path = "../../../tests/support/scratch.rs"]
mod scratch;
pub mod simulation;
mod slots;
pub mod stall;
mod stream;
mod timer;
mod turn_share;
pub mod watch;
mod watchdog;

pub use accept_mutex::AcceptMutex;
pub use address::SocketAddress;
pub use buffer::{
    Buffer, LEASE_CLASSES, Lease, leased_bytes, leased_bytes_max, leases_exhausted, set_leased_bytes_max,
};
pub use clock::{ClockChoice, Moment};
pub use datagram::Datagram;
pub use driver::{RingCounters, RingOptions, TcpInfo};
pub use environment::{
    all_sent, now, random_u64, remote, ring_counters, secret_u64, task_count, turn, wall, wall_seconds, worker,
};
pub use event_loop::{DriverChoice, EventLoop, LoopOptions};
pub use executor::{TaskId, TurnEnd, abort, is_awake, spawn, yield_now};
pub use file_counters::{FileCounters, Rung, count_piece, file_counters};
pub use files::{File, FileKind, FileMetadata, Look, OpenFlags};
pub use inbox::{Call, Remote, RemoteError};
pub use listener::{AcceptOptions, Listener, MULTI_ACCEPT_BATCH, look_for_connections};
pub use memory::share_leases;
pub use output::Output;
pub use panics::{Panic, catch_panic, panic_count, set_panic_reporter};
pub use pool::{
    Device, PoolCounters, PoolError, PoolStatus, PoolTask, ThreadPool, default_pool, named_pool, pools, stop_pools,
};
pub use reads::{PieceRead, ReadHow};
pub use stream::{Detached, Stream};
pub use timer::{Elapsed, Timer, sleep, sleep_until, timeout};
pub use turn_share::{Effort, TurnShare};
