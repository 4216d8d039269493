//! The rows of a `map`: what is understood or refused, never a panic, however they are put.
#![no_main]

use libfuzzer_sys::fuzz_target;

mod configuration_of;

fuzz_target!(|data: &[u8]| {
    configuration_of::build("map $args $value { include data; } map $host $name { hostnames; include data; }", data);
});
