//! CRC-32 as used by Ethernet, zip and memcached clients (ISO-HDLC: reflected, polynomial 0x04C11DB7).
//!
//! Meant for short keys: one byte at a time, with a table of 256 entries.

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut value = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xEDB8_8320 } else { value >> 1 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
};

/// A checksum in progress. It may be copied, and each copy continued with different bytes.
#[derive(Clone, Copy, Debug)]
pub struct Crc32(u32);

impl Crc32 {
    /// The checksum of no bytes.
    pub const fn new() -> Crc32 {
        Crc32(u32::MAX)
    }

    /// Returns the checksum continued with `bytes`.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Crc32 {
        let step = |sum: u32, byte: &u8| TABLE[usize::from(sum as u8 ^ byte)] ^ sum >> 8;
        Crc32(bytes.iter().fold(self.0, step))
    }

    /// Returns the final checksum.
    pub fn finish(self) -> u32 {
        !self.0
    }
}

impl Default for Crc32 {
    fn default() -> Crc32 {
        Crc32::new()
    }
}

/// Returns the CRC-32 of `bytes`.
pub fn crc32(bytes: &[u8]) -> u32 {
    Crc32::new().update(bytes).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_known_ones() {
        assert_eq!(crc32(b""), 0);
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(Crc32::new().update(b"12345").update(b"6789").finish(), 0xCBF4_3926);
    }
}
