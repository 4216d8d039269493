//! Checksums of a body's blocks: computed while it is written, and checked while it is read.
//!
//! ```text
//!   file    0           64 KiB       128 KiB      …                              end of the body
//!           [ header | body … | body …     | body … | …           | body ]│ table: a CRC-32 for each block
//! ```
//!
//! Blocks are those of the file, because files are read by these; the header in the first one is not part of its sum. A
//! body of up to [`WHOLE_MAX`] has a single sum in the header and no table; else the header has the sum of the table
//! (`format.rs`). The reason for the block size is in `docs/decisions/0029-cache-storage.md`.

use std::cell::Cell;
use std::ops::Range;

use crc32fast::Hasher;

/// Length of a block, in bytes: the size of a read, so that a check delays no reader.
pub const BLOCK: u64 = 64 * 1024;

/// Bodies up to this length are read and checked as a whole when they are opened; longer ones would delay the first
/// client.
pub const WHOLE_MAX: u64 = 256 * 1024;

/// The kind of checksum in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodySum {
    /// Sum of the whole body.
    Whole(u32),
    /// Sum of the table behind the body, which has the sum of each block.
    Table(u32),
}

/// Length of the table behind a body, in bytes, in a file that has one.
pub fn table_length(header_length: u32, body_length: u64) -> u64 {
    blocks_of(header_length.into(), body_length) * size_of::<u32>() as u64
}

fn blocks_of(body_at: u64, body_length: u64) -> u64 {
    match body_length {
        0 => 0,
        length => (body_at + length - 1) / BLOCK - body_at / BLOCK + 1,
    }
}

/// Computes the sums of a body that is written behind a header.
pub struct Summing {
    /// Offset of the next byte in the file.
    at: u64,
    length: u64,
    whole: Hasher,
    block: Hasher,
    table: Vec<u8>,
}

/// The sums of a body.
pub struct Sums {
    whole: u32,
    table: Vec<u8>,
}

impl Summing {
    /// For a body behind a header of this length.
    pub fn new(header_length: u32) -> Summing {
        let (whole, block) = (Hasher::new(), Hasher::new());
        Summing { at: header_length.into(), length: 0, whole, block, table: Vec::new() }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.length += bytes.len() as u64;
        while !bytes.is_empty() {
            let left = BLOCK - self.at % BLOCK;
            let (own, rest) = bytes.split_at(bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
            self.block.update(own);
            self.at += own.len() as u64;
            if self.at.is_multiple_of(BLOCK) {
                self.end_block();
            }
            bytes = rest;
        }
    }

    fn end_block(&mut self) {
        let block = std::mem::take(&mut self.block);
        self.whole.combine(&block);
        self.table.extend_from_slice(&block.finalize().to_le_bytes());
    }

    /// Ends the body.
    pub fn finish(mut self) -> Sums {
        if self.length > 0 && !self.at.is_multiple_of(BLOCK) {
            self.end_block();
        }
        if self.length <= WHOLE_MAX {
            self.table.clear();
        }
        Sums { whole: self.whole.finalize(), table: self.table }
    }
}

impl Sums {
    /// The sum for the header.
    pub fn in_header(&self) -> BodySum {
        match self.table.is_empty() {
            true => BodySum::Whole(self.whole),
            false => BodySum::Table(crc32fast::hash(&self.table)),
        }
    }

    /// The table to write behind the body.
    pub fn table(&self) -> &[u8] {
        &self.table
    }

    /// True if these sums are those in a header.
    pub fn fit(&self, told: BodySum) -> bool {
        match told {
            BodySum::Whole(sum) => self.whole == sum,
            table => self.in_header() == table,
        }
    }
}

/// The table of an open file, and the blocks that a worker has already checked.
pub struct Blocks {
    /// Position of the body in the file.
    body: Range<u64>,
    sums: Box<[u32]>,
    /// A bit for each block.
    checked: Box<[Cell<u64>]>,
    unchecked: Cell<usize>,
}

impl Blocks {
    /// For a body with a table of length [`table_length`]. No block is checked yet.
    pub fn new(header_length: u32, body_length: u64, table: &[u8]) -> Blocks {
        debug_assert_eq!(table.len() as u64, table_length(header_length, body_length));
        let body_at = u64::from(header_length);
        let (numbers, _) = table.as_chunks::<4>();
        let sums: Box<[u32]> = numbers.iter().map(|&number| u32::from_le_bytes(number)).collect();
        let checked = (0..sums.len().div_ceil(64)).map(|_| Cell::new(0)).collect();
        let unchecked = Cell::new(sums.len());
        Blocks { body: body_at..body_at + body_length, sums, checked, unchecked }
    }

    /// True if every block was checked and is undamaged.
    pub fn are_checked(&self) -> bool {
        self.unchecked.get() == 0
    }

    /// Number of bytes from this offset of the file on that are in checked blocks; at most `most`.
    pub fn checked_length(&self, offset: u64, most: u64) -> u64 {
        if self.are_checked() {
            return most;
        }
        let mut end = offset;
        while end < offset + most && self.is_checked(self.number_of(end)) {
            end = self.block_at(end).end;
        }
        (end - offset).min(most)
    }

    /// The part of the body in the block at this offset of the file.
    pub fn block_at(&self, offset: u64) -> Range<u64> {
        let start = offset - offset % BLOCK;
        start.max(self.body.start)..(start + BLOCK).min(self.body.end)
    }

    /// True if `sum` is right for the block at this offset of the file. The block is then marked as checked.
    pub fn check(&self, offset: u64, sum: u32) -> bool {
        let number = self.number_of(offset);
        let is_right = self.sums.get(number) == Some(&sum);
        if is_right && !self.is_checked(number) {
            let bits = &self.checked[number / 64];
            bits.set(bits.get() | 1 << (number % 64));
            self.unchecked.set(self.unchecked.get() - 1);
        }
        is_right
    }

    fn is_checked(&self, number: usize) -> bool {
        self.checked.get(number / 64).is_some_and(|bits| bits.get() & 1 << (number % 64) != 0)
    }

    /// Index of a block in the table.
    fn number_of(&self, offset: u64) -> usize {
        usize::try_from(offset / BLOCK - self.body.start / BLOCK).unwrap_or(usize::MAX)
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.sums) + size_of_val(&*self.checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums of a body that is added in pieces of this length.
    fn sums_of(body: &[u8], header_length: u32, piece: usize) -> Sums {
        let mut summing = Summing::new(header_length);
        body.chunks(piece).for_each(|piece| summing.update(piece));
        summing.finish()
    }

    fn body(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at / 3) as u8).collect()
    }

    #[test]
    fn a_body_has_a_sum_for_every_block_that_has_some_of_it() {
        let block = BLOCK as usize;
        for header_length in [128, 384, BLOCK as u32 - 128, BLOCK as u32, BLOCK as u32 + 128] {
            for length in [4 * block + 1, 5 * block - 128, 5 * block, 6 * block - 384, 6 * block + 77] {
                let body = body(length);
                let sums = sums_of(&body, header_length, 1000);
                assert_eq!(sums.table(), sums_of(&body, header_length, length).table());
                assert_eq!(sums.table().len() as u64, table_length(header_length, length as u64));
                assert!(sums.fit(BodySum::Whole(crc32fast::hash(&body))) && sums.fit(sums.in_header()));
                let blocks = Blocks::new(header_length, length as u64, sums.table());
                let (start, end) = (u64::from(header_length), u64::from(header_length) + length as u64);
                let mut at = start;
                while at < end {
                    let own = blocks.block_at(at);
                    assert_eq!((own.start, own.end), (at, end.min((at / BLOCK + 1) * BLOCK)));
                    assert_eq!(blocks.checked_length(at, 10), 0);
                    let bytes = &body[(own.start - start) as usize..(own.end - start) as usize];
                    assert!(!blocks.check(at, !crc32fast::hash(bytes)) && blocks.check(at, crc32fast::hash(bytes)));
                    assert_eq!(blocks.checked_length(start, end - start), own.end - start);
                    at = own.end;
                }
                assert!(blocks.are_checked());
            }
        }
    }

    #[test]
    fn a_body_that_is_checked_whole_has_no_table() {
        for length in [0, 1, BLOCK as usize, WHOLE_MAX as usize] {
            let sums = sums_of(&body(length), 384, 4096);
            assert_eq!(sums.in_header(), BodySum::Whole(crc32fast::hash(&body(length))));
            assert!(sums.table().is_empty());
        }
        assert!(matches!(sums_of(&body(WHOLE_MAX as usize + 1), 384, 4096).in_header(), BodySum::Table(_)));
    }
}
