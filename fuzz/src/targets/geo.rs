//! Rows of a `geo` block, with networks and with ranges: they are accepted or refused, and never cause a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

mod configuration_of;

fuzz_target!(|data: &[u8]| {
    configuration_of::build("geo $network { include data; } geo $arg_a $range { ranges; include data; }", data);
});
