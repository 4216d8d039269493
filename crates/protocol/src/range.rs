//! A range of offsets into a buffer owned by the caller.
//!
//! Invariant: `start <= end`. A range takes eight bytes, is `Copy`, and stays valid while the buffer's content keeps
//! its offsets.

use std::ops::Range;

/// Half-open range of byte offsets into the caller's input.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Range32 {
    start: u32,
    end: u32,
}

impl Range32 {
    /// Creates a range from two offsets, which must not exceed `u32::MAX`: heads are limited to far less.
    pub fn new(start: usize, end: usize) -> Self {
        debug_assert!(start <= end && end <= u32::MAX as usize);
        Self { start: start as u32, end: end as u32 }
    }

    /// Offset of the first byte.
    pub fn start(self) -> usize {
        self.start as usize
    }

    /// Offset after the last byte.
    pub fn end(self) -> usize {
        self.end as usize
    }

    /// Number of bytes.
    pub fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    /// Returns `true` if the range is empty.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Returns the bytes of `input` in this range. `input` must be the buffer for which the range was created;
    /// otherwise the function panics or returns unrelated bytes.
    pub fn of(self, input: &[u8]) -> &[u8] {
        &input[self.start as usize..self.end as usize]
    }

    /// As [`Range32::of`], but returns an empty slice instead of panicking if `input` is too short: for log messages.
    pub fn of_lenient(self, input: &[u8]) -> &[u8] {
        input.get(self.start as usize..self.end as usize).unwrap_or_default()
    }

    /// Converts to a range of `usize`.
    pub fn as_range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

impl std::fmt::Debug for Range32 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}
