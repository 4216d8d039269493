//! Rows of a `map` block: they are accepted or refused, and never cause a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

mod configuration_of;

fuzz_target!(|data: &[u8]| {
    configuration_of::build("map $args $value { include data; } map $host $name { hostnames; include data; }", data);
});
