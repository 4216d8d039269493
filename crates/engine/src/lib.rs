//! What all modules share: processes, HTTP, logs.

pub mod process;
