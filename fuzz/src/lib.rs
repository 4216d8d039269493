//! Bodies of the fuzz targets: functions of some bytes that panic if a promise does not hold.
//!
//! ```text
//!   tests/targets.rs       the committed corpus and some mutations of it, with every `cargo test`
//!   examples/mutate.rs     mutations for minutes, without coverage: `cargo xtask fuzz` where libFuzzer is missing
//!   libfuzzer              libFuzzer with AddressSanitizer: `cargo xtask fuzz`
//! ```
//!
//! A target is a file in `targets`, a row in the table below, and inputs in `corpus`. It has no effect outside of the
//! process: configurations may name safe directives only (`world.rs`).

mod configuration_of;
mod corpus;
mod mutation;
mod targets;
mod world;

pub use self::corpus::corpus;
pub use self::mutation::Mutator;

/// A fuzz target.
pub struct Target {
    /// Name of its file and its corpus.
    pub name: &'static str,
    /// Runs it on one input; a panic is a finding.
    pub run: fn(&[u8]),
}

/// All targets, by name.
pub const TARGETS: &[Target] = targets::ALL;

/// Returns the target of this name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
