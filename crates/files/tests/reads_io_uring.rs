//! `reads.rs` on io_uring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "reads.rs"]
mod reads;
