//! libFuzzer above the target that `GALE_FUZZ_TARGET` names: `cargo xtask fuzz` starts it.

#![no_main]

use std::sync::LazyLock;

use gale_fuzz::Target;
use libfuzzer_sys::fuzz_target;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("GALE_FUZZ_TARGET").expect("the name of a target in GALE_FUZZ_TARGET");
    gale_fuzz::find(&name).unwrap_or_else(|| panic!("there is no target {name}"))
});

fuzz_target!(|data: &[u8]| (TARGET.run)(data));
