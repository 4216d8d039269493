//! Seeded random numbers: the only source of randomness in a simulated world, also for tests.

use std::cell::Cell;

/// A sequence of numbers determined by its seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(Cell<u64>);

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Random(Cell::new(seed))
    }

    /// The next number.
    pub fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&self, end: u64) -> u64 {
        // The bias of the remainder is below 2^-32 for every bound in use.
        if end == 0 { 0 } else { self.next() % end }
    }

    /// A random length from 1 to `max`, which must not be 0.
    pub fn up_to(&self, max: usize) -> usize {
        1 + self.below(max as u64) as usize
    }

    /// True `per_mille` times in a thousand. 0 takes no number from the sequence.
    pub fn chance(&self, per_mille: u16) -> bool {
        per_mille > 0 && self.below(1000) < u64::from(per_mille)
    }

    /// A random element.
    pub fn pick<'a, T>(&self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// A separate sequence determined by this one.
    pub fn fork(&self) -> Random {
        Random::new(self.next())
    }
}
