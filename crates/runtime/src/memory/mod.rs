//! Memory for bytes. A lease is writable and on loan from the worker ([`Buffer`], [`Lease`]); [`Bytes`] are immutable;
//! an [`Output`] is a list of them to send. All consist of blocks of a few sizes, which are charged to the loop that
//! took them or to the process. Files are read by other threads into blocks of their own (`read_memory.rs`).

pub(crate) mod blocks;
pub(crate) mod buffer;
pub(crate) mod bytes;
pub(crate) mod limits;
pub(crate) mod output;
pub(crate) mod read_memory;

pub use blocks::{
    Charge, LEASE_CLASSES, leased_bytes, leased_bytes_max, leases_exhausted, set_leased_bytes_max,
    set_shared_bytes_max, share_leases, shared_bytes, shared_bytes_max,
};
pub use buffer::{Buffer, Lease};
pub use bytes::Bytes;
pub use output::Output;
pub use read_memory::ReadMemory;
