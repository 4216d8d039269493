//! `many_connections.rs` on io_uring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "many_connections.rs"]
mod many_connections;
