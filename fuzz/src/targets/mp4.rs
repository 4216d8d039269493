//! Cuts an MP4 file by its index: the part lies within the file, and the new head is not much longer than the file, for
//! any atoms.
//!
//! The first bytes are the start and length in thousandths of a second, and whether to start at a key frame.

use std::io;

use gale_modules::http::mp4::movie::{Cut, Source, cut};

struct File<'f>(&'f [u8]);

impl Source for File<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..)).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }
}

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    let Some(([first, second, third, fourth, choice], file)) = data.split_first_chunk() else { return };
    let (start, length) = (u16::from_le_bytes([*first, *second]), u16::from_le_bytes([*third, *fourth]));
    let begins_with_key_frame = choice & 1 == 1;
    let wanted = Cut {
        start_ms: start.into(),
        length_ms: Some(u64::from(length)).filter(|&length| length > 0),
        begins_with_key_frame,
        index_bytes_max: 1 << 20,
    };
    if let Ok(Some(part)) = cut(&File(file), file.len() as u64, &wanted, "film") {
        assert!(part.data.start < part.data.end && part.data.end <= file.len() as u64);
        // Each track may get missing headers and an edit list.
        assert!(part.head.len() <= 4 * file.len() + 64);
    }
}
