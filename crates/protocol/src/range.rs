//! A range of offsets into a buffer that somebody else owns.
//!
//! Invariant: `start <= end`. Eight bytes, `Copy`, and valid for as long as the buffer's contents
//! stay where they are relative to its beginning.

use std::ops::Range;

/// Half-open range of byte offsets into the caller's input.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Range32 {
    start: u32,
    end: u32,
}

impl Range32 {
    /// A range from two offsets. Offsets beyond `u32::MAX` cannot occur: heads are bounded far
    /// below.
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

    /// True if the range holds no bytes.
    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// The bytes of `input` in this range; `input` must be the buffer that the range was made for,
    /// otherwise this panics or gives other bytes.
    pub fn of(self, input: &[u8]) -> &[u8] {
        &input[self.start as usize..self.end as usize]
    }

    /// Like [`Range32::of`], but empty instead of a panic when `input` is shorter: for log
    /// messages.
    pub fn of_lenient(self, input: &[u8]) -> &[u8] {
        input.get(self.start as usize..self.end as usize).unwrap_or_default()
    }

    /// As a range of `usize`.
    pub fn as_range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }
}

impl std::fmt::Debug for Range32 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}
