//! Runs a test with many seeds, and prints how to repeat a failed one.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::{Faults, Simulation};

/// Number of seeds that run twice: running all of them twice proves no more.
const REPEATED: u64 = 5;

/// Runs `test` in a world of each of `count` seeds, without faults until it sets some. `GALE_SEEDS` in the environment
/// replaces the count; `GALE_SEED` runs that seed alone. Some seeds run twice, and both runs must be the same.
///
/// For a seed that fails, the last events of its world and the command to repeat it are printed, and the panic
/// continues.
pub fn each_seed(count: u64, test: impl Fn(&Simulation)) {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text}")));
    let seeds = match number("GALE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("GALE_SEEDS").unwrap_or(count),
    };
    let first = seeds.start;
    for seed in seeds {
        let hash = run(seed, &test);
        if seed - first < REPEATED {
            assert_eq!(run(seed, &test), hash, "seed {seed} does not determine the run");
        }
    }
}

fn run(seed: u64, test: impl Fn(&Simulation)) -> u64 {
    let simulation = Simulation::new(seed, Faults::NONE);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(&simulation))) {
        let name = std::thread::current().name().unwrap_or("main").to_owned();
        eprintln!("{}", simulation.trace_tail());
        eprintln!("{:?}", simulation.faults());
        eprintln!("seed {seed} failed; to run it again: GALE_SEED={seed} cargo test {name}");
        resume_unwind(panic);
    }
    simulation.trace_hash()
}
