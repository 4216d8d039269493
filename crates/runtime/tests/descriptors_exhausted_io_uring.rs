//! `descriptors_exhausted.rs` on io_uring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "descriptors_exhausted.rs"]
mod descriptors_exhausted;
