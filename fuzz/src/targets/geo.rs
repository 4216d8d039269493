//! Rows of a `geo` block, with networks and with ranges: they are accepted or refused, and never cause a panic.

use crate::configuration_of::build;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    build("geo $network { include data; } geo $arg_a $range { ranges; include data; }", data);
}
