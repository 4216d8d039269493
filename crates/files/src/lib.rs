//! Files: opened, inspected, read, written and watched without blocking the event loop.
//!
//! Every operation is tried where it cannot wait; otherwise a thread pool does it and returns the result:
//!
//! | | first | else |
//! |---|---|---|
//! | open, stat | `openat2(RESOLVE_CACHED)`: answers from the kernel's cache of names | EAGAIN: pool |
//! | read | `preadv2(RWF_NOWAIT)`: answers from the page cache | EAGAIN: pool; EOPNOTSUPP: tmpfs plainly, else pool |
//! | file systems that wait for others (FUSE, NFS …) | pool | |
//! | last close of a file that was unlinked or written | pool | |
//! | write, change of a name or directory | pool | |
//!
//! Even a read that is refused may wait when the device is busy (`page_cache/device.rs`): then the kernel is first
//! asked which pages are in memory, if necessary by a helper process (`page_cache/helper.rs`). Reads that update the
//! file's access time go to a pool: with `relatime` the first after a change, and one a day (`access_time.rs`). A piece
//! that several clients want is read once for all of them (`shared_reads.rs`).
//!
//! Opens are `O_NONBLOCK`, so a FIFO or a device never blocks. (Only a pool thread waits for a regular file with a
//! lease.) Without `openat2` (old kernels, seccomp) the pool does everything. Each pool task names the device that it
//! will wait for, so one that hangs does not keep the pool from the others.
//!
//! A [`Writer`] writes a file, which may meanwhile be read as a [`GrowingFile`].

mod access_time;
mod counters;
mod device_status;
mod file;
mod file_error;
mod file_system;
mod growing;
mod links;
mod metadata;
mod mounts;
mod names;
mod open;
mod page_cache;
mod read;
#[cfg(test)]
#[path = "../../../tests/shared/scratch.rs"]
mod scratch;
mod shared_reads;
mod simulated;
mod single_flight;
#[cfg(test)]
#[path = "../../../tests/shared/skips.rs"]
mod skips;
pub mod watch;
mod writer;

pub use counters::{FileCounters, Rung, count_piece, file_counters};
pub use device_status::{DeviceStatus, devices};
pub use file::File;
pub use file_error::FileError;
pub use file_system::prepare;
pub use growing::{GrowingEnd, GrowingFile, GrowingReader, Grown};
pub use links::{
    LinkCheck, RefusedLinks, open_checked, open_checked_blocking, stat_checked, try_open_checked, try_stat_checked,
};
pub use metadata::{FileKind, FileMetadata};
pub use mounts::{Mounted, note_directory};
pub use names::{create_directories_blocking, rename};
pub use open::{
    OpenFlags, likely_device, open, open_blocking, open_in, real_path, stat, stat_in, try_open, try_real_path, try_stat,
};
pub use page_cache::{
    CachedRead, has_device_answered_since, is_device_reading, serve_page_cache_questions, use_page_cache_helper,
};
pub use shared_reads::{PieceRead, ReadHow};
pub use simulated::SimulatedFiles;
pub use writer::Writer;
