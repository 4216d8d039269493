//! `simulation.rs` with the io_uring driver over a simulated ring.

const DRIVER: gale_runtime::DriverChoice = gale_runtime::DriverChoice::IoUring;

#[path = "simulation.rs"]
mod simulation;
