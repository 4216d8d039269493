//! What Gale's crates share: units, HTTP dates, prefix trees, networks, histograms, counters, checksums, packed values,
//! words for operating-system errors.
//!
//! No I/O, no clock, no `unsafe`: everything here is a function of its arguments. Nothing panics on hostile input.
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
