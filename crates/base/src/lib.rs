//! Code shared by Gale's crates: units, HTTP dates, prefix trees, networks, histograms, counters, checksums, packed
//! values, texts of operating-system errors.
//!
//! No I/O, no clock, no `unsafe`. Hostile input never causes a panic.
#![forbid(unsafe_code)]

pub mod cidr;
pub mod crc32;
pub mod histogram;
pub mod http_date;
pub mod log_level;
pub mod os_error;
pub mod packed;
pub mod radix;
pub mod tally;
pub mod units;
