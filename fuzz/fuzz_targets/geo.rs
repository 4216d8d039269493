//! The rows of a `geo`, of networks and of ranges: what is understood or refused, never a panic, however they are put.
#![no_main]

use libfuzzer_sys::fuzz_target;

mod configuration_of;

fuzz_target!(|data: &[u8]| {
    configuration_of::build("geo $network { include data; } geo $arg_a $range { ranges; include data; }", data);
});
