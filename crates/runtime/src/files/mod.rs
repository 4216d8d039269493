//! Files: opened, looked at and read without blocking the loop.
//!
//! Everything is tried where it cannot wait and else done in a thread pool, which returns the result itself:
//!
//! | | first | else |
//! |---|---|---|
//! | open, stat | `openat2(RESOLVE_CACHED)`: answers from the kernel's cache of names | EAGAIN: pool |
//! | read | `preadv2(RWF_NOWAIT)`: answers from the page cache | EAGAIN: pool; EOPNOTSUPP: plain read on tmpfs and the like, else pool |
//! | file systems that wait for others (FUSE, NFS …) | pool | |
//! | last close of a file that was unlinked or written | pool | |
//! | write, change of a name or directory | pool | |
//!
//! Even a read that is refused may wait, when the device is busy (`page_cache/device.rs`): then the kernel is asked
//! first what is in memory, if need be by a process of its own (`page_cache/helper.rs`). Reads that write the file's
//! time of access are the pool's: with `relatime` the first after a change, and one a day (`access_time.rs`). A piece
//! that several clients want is read once for all of them (`shared_reads.rs`).
//!
//! Opens are `O_NONBLOCK`: a FIFO or a device never holds anybody up. (Only a thread of the pool waits for a regular
//! file that is leased out.) Where `openat2` is missing (old kernels, seccomp) the pool does it all. What goes to a
//! pool says which device it will wait for, so that one that hangs does not take the pool from the others.
//!
//! A file is written by its [`Writer`], and read meanwhile as a [`GrowingFile`].

mod access_time;
pub(crate) mod counters;
mod device_status;
mod file;
mod file_error;
pub(crate) mod file_read;
mod file_system;
mod growing;
mod links;
mod metadata;
pub(crate) mod mounts;
mod names;
pub(crate) mod open;
pub(crate) mod page_cache;
mod read;
mod shared_reads;
mod single_flight;
mod writer;

pub use counters::{FileCounters, Rung, count_piece, file_counters};
pub use device_status::{DeviceStatus, devices};
pub use file::File;
pub use file_error::FileError;
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
pub use writer::Writer;
