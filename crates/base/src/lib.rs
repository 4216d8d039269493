//! What every crate of Gale shares: units, HTTP dates, prefix trees, histograms, words for operating-system errors.
//!
//! No I/O, no clock, no `unsafe`: everything here is a function of its arguments. Nothing panics on hostile input.
#![forbid(unsafe_code)]

pub mod cidr;
pub mod histogram;
pub mod http_date;
pub mod os_error;
pub mod radix;
pub mod units;
