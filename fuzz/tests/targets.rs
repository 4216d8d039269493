//! Every target on its committed inputs and on some mutations of them. The seeds are fixed; `cargo xtask fuzz` runs
//! other ones, and for longer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use gale_fuzz::{Mutator, TARGETS, Target, corpus};

/// Mutated inputs of each target.
const MUTATIONS: usize = 200;

fn check(target: &Target) {
    let committed = corpus(target.name);
    assert!(!committed.is_empty(), "{} has no corpus", target.name);
    let mut mutator = Mutator::new(1, committed.clone());
    let mutations = std::iter::repeat_with(|| mutator.next_input()).take(MUTATIONS);
    for input in committed.into_iter().chain(mutations) {
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
            panic!("{} fails on b\"{}\"", target.name, input.escape_ascii());
        }
    }
}

#[test]
fn every_target_survives_its_corpus_and_mutations() {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(target) = TARGETS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(target);
                }
            });
        }
    });
}

#[test]
fn targets_are_in_order_and_have_names_of_their_own() {
    assert!(TARGETS.is_sorted_by(|one, next| one.name < next.name));
}
