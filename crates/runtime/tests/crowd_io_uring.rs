//! `crowd.rs` on io_uring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "crowd.rs"]
mod crowd;
