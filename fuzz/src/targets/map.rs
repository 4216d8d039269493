//! Rows of a `map` block: they are accepted or refused, and never cause a panic.

use crate::configuration_of::build;

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    build("map $args $value { include data; } map $host $name { hostnames; include data; }", data);
}
