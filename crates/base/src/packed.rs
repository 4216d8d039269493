//! A compact encoding of numbers and byte strings, for values that are kept for long and rarely read.
//!
//! Each byte of a number carries seven bits, lowest first; the eighth bit says that more bytes follow. A byte string is
//! preceded by its length. The types of the values are not stored, so an [`Unpacker`] must read them in the order in
//! which the [`Packer`] wrote them. It panics when it runs out of bytes: only this program writes what it reads.

/// Writes packed values.
#[derive(Debug)]
pub struct Packer<'o>(&'o mut Vec<u8>);

impl<'o> Packer<'o> {
    /// Returns a packer that appends to `out`.
    pub fn new(out: &'o mut Vec<u8>) -> Packer<'o> {
        Packer(out)
    }

    /// Writes a number.
    pub fn number(&mut self, number: impl Into<u64>) {
        let mut left = number.into();
        while left >= 0x80 {
            self.0.push(left as u8 | 0x80);
            left >>= 7;
        }
        self.0.push(left as u8);
    }

    /// Writes a length or an index.
    pub fn size(&mut self, size: usize) {
        self.number(size as u64);
    }

    /// Writes an optional number.
    pub fn optional(&mut self, number: Option<impl Into<u64>>) {
        self.flags([number.is_some()]);
        if let Some(number) = number {
            self.number(number);
        }
    }

    /// Writes flags, packed into one number: at most 64.
    pub fn flags<const N: usize>(&mut self, flags: [bool; N]) {
        self.number(flags.into_iter().rev().fold(0_u64, |all, flag| all << 1 | u64::from(flag)));
    }

    /// Writes a byte string.
    pub fn text(&mut self, text: &[u8]) {
        self.size(text.len());
        self.0.extend_from_slice(text);
    }
}

/// Reads packed values.
#[derive(Debug)]
pub struct Unpacker<'p>(&'p [u8]);

impl<'p> Unpacker<'p> {
    /// Returns an unpacker that reads `packed` from its beginning.
    pub fn new(packed: &'p [u8]) -> Unpacker<'p> {
        Unpacker(packed)
    }

    /// Reads a number.
    pub fn number(&mut self) -> u64 {
        let length = 1 + self.0.iter().take_while(|&&byte| byte >= 0x80).count();
        let (number, rest) = self.0.split_at(length);
        self.0 = rest;
        number.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
    }

    /// Reads a number of 32 bits.
    pub fn number32(&mut self) -> u32 {
        u32::try_from(self.number()).expect("a number of 32 bits was packed")
    }

    /// Reads a number of 16 bits.
    pub fn number16(&mut self) -> u16 {
        u16::try_from(self.number()).expect("a number of 16 bits was packed")
    }

    /// Reads a number of 8 bits.
    pub fn number8(&mut self) -> u8 {
        u8::try_from(self.number()).expect("a number of 8 bits was packed")
    }

    /// Reads a length or an index.
    pub fn size(&mut self) -> usize {
        usize::try_from(self.number()).expect("a length was packed")
    }

    /// Reads an optional number.
    pub fn optional(&mut self) -> Option<u64> {
        let [is_there] = self.flags();
        is_there.then(|| self.number())
    }

    /// Reads an optional number of 16 bits.
    pub fn optional16(&mut self) -> Option<u16> {
        let [is_there] = self.flags();
        is_there.then(|| self.number16())
    }

    /// Reads flags.
    pub fn flags<const N: usize>(&mut self) -> [bool; N] {
        let all = self.number();
        std::array::from_fn(|place| all >> place & 1 == 1)
    }

    /// Reads a byte string.
    pub fn text(&mut self) -> &'p [u8] {
        let length = self.size();
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        text
    }

    /// Returns `true` if everything has been read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_values_are_unpacked_in_order() {
        const NUMBERS: [u64; 9] = [0, 1, 127, 128, 16_383, 16_384, u32::MAX as u64, u64::MAX - 1, u64::MAX];
        let mut bytes = Vec::new();
        let mut packer = Packer::new(&mut bytes);
        for number in NUMBERS {
            packer.number(number);
            packer.optional(Some(number));
            packer.text(&vec![b'x'; (number % 300) as usize]);
        }
        packer.optional(None::<u64>);
        packer.flags([true, false, false, true]);
        packer.number(7_u16);
        let mut unpacker = Unpacker::new(&bytes);
        for number in NUMBERS {
            assert_eq!((unpacker.number(), unpacker.optional()), (number, Some(number)));
            assert_eq!(unpacker.text(), vec![b'x'; (number % 300) as usize]);
        }
        assert_eq!((unpacker.optional(), unpacker.flags()), (None, [true, false, false, true]));
        assert!(!unpacker.is_empty());
        assert_eq!((unpacker.number16(), unpacker.is_empty()), (7, true));
    }
}
