//! `simulation.rs` with the driver of io_uring over a simulated ring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "simulation.rs"]
mod simulation;
