//! Memory that carries bytes: a lease is writable and on loan from the worker ([`Buffer`], [`Lease`]), [`Bytes`] are
//! what was read or made and is only read, an [`Output`] is a list of them that is to be sent. All are made of blocks
//! of a few sizes, which count for the loop that took them or for the process. What threads read of files is in blocks
//! of their own (`read_memory.rs`).

pub(crate) mod blocks;
pub(crate) mod buffer;
pub(crate) mod bytes;
pub(crate) mod limits;
pub(crate) mod output;
pub(crate) mod read_memory;

pub use blocks::{
    LEASE_CLASSES, leased_bytes, leased_bytes_max, leases_exhausted, set_leased_bytes_max, set_shared_bytes_max,
    share_leases, shared_bytes, shared_bytes_max,
};
pub use buffer::{Buffer, Lease};
pub use bytes::Bytes;
pub use output::Output;
