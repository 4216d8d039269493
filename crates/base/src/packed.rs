//! Numbers and texts in as few bytes as they need: for what is kept for long and is looked at once.
//!
//! A number takes seven bits of each byte, the lowest first, and the eighth bit says that more follow. A text comes
//! behind its length. Nothing says what a value is, so an [`Unpacker`] asks for the values in the order in which a
//! [`Packer`] was given them. It panics where another order runs out of bytes: the two are the same program's.

/// See the file's head.
#[derive(Debug)]
pub struct Packer<'o>(&'o mut Vec<u8>);

impl<'o> Packer<'o> {
    /// One that appends to `out`.
    pub fn new(out: &'o mut Vec<u8>) -> Packer<'o> {
        Packer(out)
    }

    /// Adds a number.
    pub fn number(&mut self, number: impl Into<u64>) {
        let mut left = number.into();
        while left >= 0x80 {
            self.0.push(left as u8 | 0x80);
            left >>= 7;
        }
        self.0.push(left as u8);
    }

    /// Adds a length or a place in memory.
    pub fn size(&mut self, size: usize) {
        self.number(size as u64);
    }

    /// Adds a number that may not be there.
    pub fn optional(&mut self, number: Option<impl Into<u64>>) {
        self.flags([number.is_some()]);
        if let Some(number) = number {
            self.number(number);
        }
    }

    /// Adds as many answers to questions as a number has room for.
    pub fn flags<const N: usize>(&mut self, flags: [bool; N]) {
        self.number(flags.into_iter().rev().fold(0_u64, |all, flag| all << 1 | u64::from(flag)));
    }

    /// Adds a text.
    pub fn text(&mut self, text: &[u8]) {
        self.size(text.len());
        self.0.extend_from_slice(text);
    }
}

/// See the file's head.
#[derive(Debug)]
pub struct Unpacker<'p>(&'p [u8]);

impl<'p> Unpacker<'p> {
    /// One that reads what was packed.
    pub fn new(packed: &'p [u8]) -> Unpacker<'p> {
        Unpacker(packed)
    }

    /// The next value, a number.
    pub fn number(&mut self) -> u64 {
        let length = 1 + self.0.iter().take_while(|&&byte| byte >= 0x80).count();
        let (number, rest) = self.0.split_at(length);
        self.0 = rest;
        number.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
    }

    /// The next value, a number of 32 bits.
    pub fn number32(&mut self) -> u32 {
        u32::try_from(self.number()).expect("a number of 32 bits was packed")
    }

    /// The next value, a number of 16 bits.
    pub fn number16(&mut self) -> u16 {
        u16::try_from(self.number()).expect("a number of 16 bits was packed")
    }

    /// The next value, a number of 8 bits.
    pub fn number8(&mut self) -> u8 {
        u8::try_from(self.number()).expect("a number of 8 bits was packed")
    }

    /// The next value, a length or a place in memory.
    pub fn size(&mut self) -> usize {
        usize::try_from(self.number()).expect("a length was packed")
    }

    /// The next value, a number that may not be there.
    pub fn optional(&mut self) -> Option<u64> {
        let [is_there] = self.flags();
        is_there.then(|| self.number())
    }

    /// The next value, a number of 16 bits that may not be there.
    pub fn optional16(&mut self) -> Option<u16> {
        let [is_there] = self.flags();
        is_there.then(|| self.number16())
    }

    /// The next value, answers to questions.
    pub fn flags<const N: usize>(&mut self) -> [bool; N] {
        let all = self.number();
        std::array::from_fn(|place| all >> place & 1 == 1)
    }

    /// The next value, a text.
    pub fn text(&mut self) -> &'p [u8] {
        let length = self.size();
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        text
    }

    /// Whether all has been read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_comes_back_in_its_order() {
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
