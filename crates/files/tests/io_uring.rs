//! Repeats the tests of the other programs on io_uring.
#![allow(clippy::duplicate_mod, reason = "each of the files brings what the tests share")]

use gale_runtime::DriverChoice;

const DRIVER: DriverChoice = DriverChoice::IoUring;

#[path = "files.rs"]
mod files;
#[path = "written_files.rs"]
mod written_files;
