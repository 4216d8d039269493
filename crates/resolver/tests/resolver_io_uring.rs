//! `resolver.rs` on io_uring.

use gale_runtime::DriverChoice;

const DRIVER: DriverChoice = DriverChoice::IoUring;

#[path = "resolver.rs"]
mod resolver;
