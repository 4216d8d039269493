//! CRC-32 as Ethernet, zip and memcached's clients have it (ISO-HDLC: reflected, polynomial 0x04C11DB7).
//!
//! For short keys: a table of 256 entries, byte by byte.

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

/// A sum under way: it may be copied, and each copy go on with other bytes.
#[derive(Clone, Copy, Debug)]
pub struct Crc32(u32);

impl Crc32 {
    /// Of no bytes yet.
    pub const fn new() -> Crc32 {
        Crc32(u32::MAX)
    }

    /// With these bytes, too.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Crc32 {
        let step = |sum: u32, byte: &u8| TABLE[usize::from(sum as u8 ^ byte)] ^ sum >> 8;
        Crc32(bytes.iter().fold(self.0, step))
    }

    /// The sum.
    pub fn finish(self) -> u32 {
        !self.0
    }
}

impl Default for Crc32 {
    fn default() -> Crc32 {
        Crc32::new()
    }
}

/// The sum of these bytes.
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
