//! The Huffman code of strings: RFC 7541 §5.2 and appendix B.
//!
//! The code is canonical: codes of one length follow each other in the order of their symbols, so that the lengths
//! alone define it. The decoder is a state machine that takes half a byte at a time; a state is an inner node of the
//! code's tree. No code is shorter than five bits, so half a byte completes one symbol at most.

use super::HpackFault;

/// Length of each symbol's code in bits; the last entry is EOS, which is never written.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28,
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5,
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25,
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
    30,
];

const SYMBOLS: usize = 257;
const END_OF_STRING: usize = 256;
const LENGTH_MAX: u32 = 30;

/// The codes, right-aligned.
static CODES: [u32; SYMBOLS] = codes();

const fn codes() -> [u32; SYMBOLS] {
    let mut codes = [0; SYMBOLS];
    let (mut code, mut length) = (0u32, 1);
    while length <= LENGTH_MAX {
        let mut symbol = 0;
        while symbol < SYMBOLS {
            if LENGTHS[symbol] as u32 == length {
                codes[symbol] = code;
                code += 1;
            }
            symbol += 1;
        }
        code <<= 1;
        length += 1;
    }
    codes
}

/// Returns the length of the encoded text in bytes.
#[inline]
pub(super) fn encoded_length(text: &[u8]) -> usize {
    let bits: u64 = text.iter().map(|&byte| u64::from(LENGTHS[byte as usize])).sum();
    bits.div_ceil(8) as usize
}

/// Appends the encoded text.
pub(super) fn encode(text: &[u8], out: &mut Vec<u8>) {
    // The lowest `pending` bits of `bits` are not written yet: fewer than 32 before each symbol.
    let (mut bits, mut pending) = (0u64, 0u32);
    for &byte in text {
        let length = u32::from(LENGTHS[byte as usize]);
        bits = bits << length | u64::from(CODES[byte as usize]);
        pending += length;
        if pending >= 32 {
            pending -= 32;
            out.extend_from_slice(&((bits >> pending) as u32).to_be_bytes());
        }
    }
    // Padding is the first bits of EOS, which are ones.
    let padding = pending.wrapping_neg() % 8;
    bits = bits << padding | ((1 << padding) - 1);
    pending += padding;
    while pending > 0 {
        pending -= 8;
        out.push((bits >> pending) as u8);
    }
}

/// Appends the decoded text: at most eight fifths of the input's length.
pub(super) fn decode(input: &[u8], out: &mut Vec<u8>) -> Result<(), HpackFault> {
    out.reserve(input.len() * 8 / 5);
    let mut state = 0usize;
    for &byte in input {
        for half in [byte >> 4, byte & 0xf] {
            let step = MACHINE[state][half as usize];
            match step.outcome {
                Outcome::Pending => {}
                Outcome::Symbol => out.push(step.symbol),
                Outcome::Refused => return Err(HpackFault::InvalidHuffman),
            }
            state = step.next as usize;
        }
    }
    if MAY_END[state] { Ok(()) } else { Err(HpackFault::InvalidHuffman) }
}

#[derive(Clone, Copy)]
struct Step {
    next: u8,
    symbol: u8,
    outcome: Outcome,
}

#[derive(Clone, Copy)]
enum Outcome {
    /// No symbol is complete.
    Pending,
    /// A symbol is complete.
    Symbol,
    /// EOS, which must not occur in a string.
    Refused,
}

/// A tree with 257 leaves has 256 inner nodes.
const STATES: usize = 256;

/// Children of every inner node: the index of another node, or `STATES` plus a symbol.
const TREE: [[u16; 2]; STATES] = {
    let codes = codes();
    let mut tree = [[u16::MAX; 2]; STATES];
    let (mut nodes, mut symbol) = (1, 0);
    while symbol < SYMBOLS {
        let (mut node, mut bit) = (0, LENGTHS[symbol] as u32);
        while bit > 1 {
            bit -= 1;
            let side = (codes[symbol] >> bit & 1) as usize;
            if tree[node][side] == u16::MAX {
                tree[node][side] = nodes;
                nodes += 1;
            }
            node = tree[node][side] as usize;
        }
        tree[node][(codes[symbol] & 1) as usize] = (STATES + symbol) as u16;
        symbol += 1;
    }
    assert!(nodes as usize == STATES);
    tree
};

static MACHINE: [[Step; 16]; STATES] = {
    let mut machine = [[Step { next: 0, symbol: 0, outcome: Outcome::Pending }; 16]; STATES];
    let mut state = 0;
    while state < STATES {
        let mut half = 0;
        while half < 16 {
            let mut step = Step { next: 0, symbol: 0, outcome: Outcome::Pending };
            let (mut node, mut bit) = (state, 4);
            while bit > 0 {
                bit -= 1;
                let child = TREE[node][half >> bit & 1] as usize;
                if child < STATES {
                    node = child;
                    continue;
                }
                node = 0;
                if child - STATES == END_OF_STRING {
                    step.outcome = Outcome::Refused;
                    break;
                }
                step.outcome = Outcome::Symbol;
                step.symbol = (child - STATES) as u8;
            }
            step.next = node as u8;
            machine[state][half] = step;
            half += 1;
        }
        state += 1;
    }
    machine
};

/// States in which a string may end: fewer than eight bits after the last symbol, all of them ones.
static MAY_END: [bool; STATES] = {
    let mut may_end = [false; STATES];
    let (mut node, mut depth) = (0, 0);
    while depth < 8 {
        may_end[node] = true;
        node = TREE[node][1] as usize;
        depth += 1;
    }
    may_end
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_codes_are_those_of_the_rfc() {
        for (symbol, code) in
            [(b'0' as usize, 0), (b'a' as usize, 3), (0, 0x1ff8), (255, 0x3ff_ffee), (256, 0x3fff_ffff)]
        {
            assert_eq!(CODES[symbol], code, "{symbol}");
        }
    }

    #[test]
    fn every_symbol_is_read_back_at_every_place_in_a_byte() {
        for symbol in 0..=255u8 {
            for before in 0..8 {
                let mut text = vec![b'&'; before]; // eight bits
                text.extend(std::iter::repeat_n(b'0', before)); // five bits
                text.push(symbol);
                let (mut encoded, mut decoded) = (Vec::new(), Vec::new());
                encode(&text, &mut encoded);
                assert_eq!(encoded.len(), encoded_length(&text));
                decode(&encoded, &mut decoded).unwrap();
                assert_eq!(decoded, text);
            }
        }
    }

    #[test]
    fn wrong_ends_are_refused() {
        for (input, why) in [
            (&b"\xff"[..], "eight bits of padding"),
            (b"\x07\xff", "eleven bits of padding"),
            (b"\x00", "padding of zeros"),
            (b"\xff\xff\xff\xff", "the end of the string"),
            (b"\xff\xff\xff\xfc", "the end of the string, padded"),
            (b"\xfe", "half a symbol"),
        ] {
            assert_eq!(decode(input, &mut Vec::new()), Err(HpackFault::InvalidHuffman), "{why}");
        }
        assert_eq!(decode(b"\x07", &mut Vec::new()), Ok(()));
        assert_eq!(decode(b"", &mut Vec::new()), Ok(()));
    }
}
