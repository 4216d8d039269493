//! The trace of a simulated world: a hash of all events, and the last ones as text.

use std::collections::VecDeque;
use std::fmt::Write;

/// Number of last events that are kept as text.
const KEPT_MAX: usize = 400;

const PRIME: u64 = 0x100_0000_01b3;

#[derive(Clone, Copy)]
struct Note {
    nanos: u64,
    what: &'static str,
    /// Number of the socket, listener, file or task.
    number: u64,
    amount: u64,
}

pub(super) struct Trace {
    hash: u64,
    count: u64,
    kept: VecDeque<Note>,
}

impl Trace {
    pub fn new() -> Self {
        Trace { hash: 0xcbf2_9ce4_8422_2325, count: 0, kept: VecDeque::new() }
    }

    pub fn note(&mut self, nanos: u64, what: &'static str, number: u64, amount: u64) {
        self.bytes(what.as_bytes());
        for word in [nanos, number, amount] {
            self.bytes(&word.to_le_bytes());
        }
        self.count += 1;
        if self.kept.len() == KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(Note { nanos, what, number, amount });
    }

    /// FNV-1a over words of eight bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
            self.hash = (self.hash ^ word).wrapping_mul(PRIME).rotate_left(23);
        }
        for &byte in words.remainder() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }

    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The last `count` events, a line each.
    pub fn tail(&self, count: usize) -> String {
        let mut text = String::new();
        for note in self.kept.iter().skip(self.kept.len().saturating_sub(count)) {
            let (seconds, nanos) = (note.nanos / 1_000_000_000, note.nanos % 1_000_000_000);
            let _ = writeln!(text, "{seconds:>6}.{nanos:09} {:<18} #{:<4} {}", note.what, note.number, note.amount);
        }
        let _ = writeln!(text, "{} events in all", self.count);
        text
    }
}
