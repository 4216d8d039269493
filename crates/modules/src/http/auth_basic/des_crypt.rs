//! The DES form of crypt(3): two characters of salt and eleven of hash, over eight characters of seven bits.
//!
//! Supported for old files only: such a hash is cracked within hours. No maintained library implements it. Tables: FIPS
//! 46-3.

/// Digits of crypt(3), for six bits each.
pub(super) const CRYPT_DIGITS: &[u8; 64] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Returns the stored form of a password with this salt, or `None` if the salt is invalid.
pub(super) fn des_crypt(password: &[u8], salt: [u8; 2]) -> Option<[u8; 13]> {
    let value = |digit: u8| CRYPT_DIGITS.iter().position(|&known| known == digit);
    let swaps = value(salt[0])? | value(salt[1])? << 6;
    let keys = round_keys(password);
    let mut block = [false; 64];
    for _ in 0..25 {
        encrypt(&mut block, &keys, swaps);
    }
    let mut stored = [0; 13];
    stored[..2].copy_from_slice(&salt);
    for (place, bits) in stored[2..].iter_mut().zip(block.chunks(6)) {
        // The last two of the 66 bits are padding.
        let digit = (0..6).fold(0, |digit, bit| digit << 1 | usize::from(bits.get(bit) == Some(&true)));
        *place = CRYPT_DIGITS[digit];
    }
    Some(stored)
}

type RoundKey = [bool; 48];

fn round_keys(password: &[u8]) -> [RoundKey; 16] {
    let mut key = [false; 64];
    for (bits, byte) in key.chunks_mut(8).zip(password) {
        // The eighth bit would be the parity bit.
        (0..7).for_each(|bit| bits[bit] = byte >> (6 - bit) & 1 == 1);
    }
    let mut halves: [bool; 56] = PERMUTED_CHOICE_1.map(|bit| key[bit - 1]);
    ROTATIONS.map(|count| {
        let (left, right) = halves.split_at_mut(28);
        left.rotate_left(count);
        right.rotate_left(count);
        PERMUTED_CHOICE_2.map(|bit| halves[bit - 1])
    })
}

fn encrypt(block: &mut [bool; 64], keys: &[RoundKey; 16], swaps: usize) {
    let permuted = INITIAL_PERMUTATION.map(|bit| block[bit - 1]);
    let (mut left, mut right) = ([false; 32], [false; 32]);
    left.copy_from_slice(&permuted[..32]);
    right.copy_from_slice(&permuted[32..]);
    for key in keys {
        let next = cipher(&right, key, swaps);
        let next: [bool; 32] = std::array::from_fn(|bit| left[bit] ^ next[bit]);
        (left, right) = (right, next);
    }
    let mut swapped = [false; 64];
    swapped[..32].copy_from_slice(&right);
    swapped[32..].copy_from_slice(&left);
    // The inverse of the initial permutation.
    for (place, bit) in INITIAL_PERMUTATION.into_iter().enumerate() {
        block[bit - 1] = swapped[place];
    }
}

/// DES's function f; the salt swaps bits between the two halves of its expansion.
fn cipher(half: &[bool; 32], key: &RoundKey, swaps: usize) -> [bool; 32] {
    // Six bits for each of the eight boxes: four of its own, and one of each neighbour.
    let mut expanded: RoundKey = std::array::from_fn(|bit| half[(bit / 6 * 4 + bit % 6 + 31) % 32]);
    for bit in (0..12).filter(|bit| swaps >> bit & 1 == 1) {
        expanded.swap(bit, bit + 24);
    }
    let mut output = [false; 32];
    for (number, table) in BOXES.iter().enumerate() {
        let bit = |index: usize| usize::from(expanded[number * 6 + index] ^ key[number * 6 + index]);
        let row = bit(0) << 1 | bit(5);
        let column = bit(1) << 3 | bit(2) << 2 | bit(3) << 1 | bit(4);
        let value = table[row * 16 + column];
        (0..4).for_each(|index| output[number * 4 + index] = value >> (3 - index) & 1 == 1);
    }
    PERMUTATION.map(|bit| output[bit - 1])
}

#[rustfmt::skip]
const INITIAL_PERMUTATION: [usize; 64] = [
    58, 50, 42, 34, 26, 18, 10, 2, 60, 52, 44, 36, 28, 20, 12, 4,
    62, 54, 46, 38, 30, 22, 14, 6, 64, 56, 48, 40, 32, 24, 16, 8,
    57, 49, 41, 33, 25, 17,  9, 1, 59, 51, 43, 35, 27, 19, 11, 3,
    61, 53, 45, 37, 29, 21, 13, 5, 63, 55, 47, 39, 31, 23, 15, 7,
];

#[rustfmt::skip]
const PERMUTED_CHOICE_1: [usize; 56] = [
    57, 49, 41, 33, 25, 17,  9,  1, 58, 50, 42, 34, 26, 18,
    10,  2, 59, 51, 43, 35, 27, 19, 11,  3, 60, 52, 44, 36,
    63, 55, 47, 39, 31, 23, 15,  7, 62, 54, 46, 38, 30, 22,
    14,  6, 61, 53, 45, 37, 29, 21, 13,  5, 28, 20, 12,  4,
];

#[rustfmt::skip]
const PERMUTED_CHOICE_2: [usize; 48] = [
    14, 17, 11, 24,  1,  5,  3, 28, 15,  6, 21, 10,
    23, 19, 12,  4, 26,  8, 16,  7, 27, 20, 13,  2,
    41, 52, 31, 37, 47, 55, 30, 40, 51, 45, 33, 48,
    44, 49, 39, 56, 34, 53, 46, 42, 50, 36, 29, 32,
];

const ROTATIONS: [usize; 16] = [1, 1, 2, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 1];

#[rustfmt::skip]
const PERMUTATION: [usize; 32] = [
    16,  7, 20, 21, 29, 12, 28, 17,  1, 15, 23, 26,  5, 18, 31, 10,
     2,  8, 24, 14, 32, 27,  3,  9, 19, 13, 30,  6, 22, 11,  4, 25,
];

#[rustfmt::skip]
const BOXES: [[u8; 64]; 8] = [
    [
        14,  4, 13,  1,  2, 15, 11,  8,  3, 10,  6, 12,  5,  9,  0,  7,
         0, 15,  7,  4, 14,  2, 13,  1, 10,  6, 12, 11,  9,  5,  3,  8,
         4,  1, 14,  8, 13,  6,  2, 11, 15, 12,  9,  7,  3, 10,  5,  0,
        15, 12,  8,  2,  4,  9,  1,  7,  5, 11,  3, 14, 10,  0,  6, 13,
    ],
    [
        15,  1,  8, 14,  6, 11,  3,  4,  9,  7,  2, 13, 12,  0,  5, 10,
         3, 13,  4,  7, 15,  2,  8, 14, 12,  0,  1, 10,  6,  9, 11,  5,
         0, 14,  7, 11, 10,  4, 13,  1,  5,  8, 12,  6,  9,  3,  2, 15,
        13,  8, 10,  1,  3, 15,  4,  2, 11,  6,  7, 12,  0,  5, 14,  9,
    ],
    [
        10,  0,  9, 14,  6,  3, 15,  5,  1, 13, 12,  7, 11,  4,  2,  8,
        13,  7,  0,  9,  3,  4,  6, 10,  2,  8,  5, 14, 12, 11, 15,  1,
        13,  6,  4,  9,  8, 15,  3,  0, 11,  1,  2, 12,  5, 10, 14,  7,
         1, 10, 13,  0,  6,  9,  8,  7,  4, 15, 14,  3, 11,  5,  2, 12,
    ],
    [
         7, 13, 14,  3,  0,  6,  9, 10,  1,  2,  8,  5, 11, 12,  4, 15,
        13,  8, 11,  5,  6, 15,  0,  3,  4,  7,  2, 12,  1, 10, 14,  9,
        10,  6,  9,  0, 12, 11,  7, 13, 15,  1,  3, 14,  5,  2,  8,  4,
         3, 15,  0,  6, 10,  1, 13,  8,  9,  4,  5, 11, 12,  7,  2, 14,
    ],
    [
         2, 12,  4,  1,  7, 10, 11,  6,  8,  5,  3, 15, 13,  0, 14,  9,
        14, 11,  2, 12,  4,  7, 13,  1,  5,  0, 15, 10,  3,  9,  8,  6,
         4,  2,  1, 11, 10, 13,  7,  8, 15,  9, 12,  5,  6,  3,  0, 14,
        11,  8, 12,  7,  1, 14,  2, 13,  6, 15,  0,  9, 10,  4,  5,  3,
    ],
    [
        12,  1, 10, 15,  9,  2,  6,  8,  0, 13,  3,  4, 14,  7,  5, 11,
        10, 15,  4,  2,  7, 12,  9,  5,  6,  1, 13, 14,  0, 11,  3,  8,
         9, 14, 15,  5,  2,  8, 12,  3,  7,  0,  4, 10,  1, 13, 11,  6,
         4,  3,  2, 12,  9,  5, 15, 10, 11, 14,  1,  7,  6,  0,  8, 13,
    ],
    [
         4, 11,  2, 14, 15,  0,  8, 13,  3, 12,  9,  7,  5, 10,  6,  1,
        13,  0, 11,  7,  4,  9,  1, 10, 14,  3,  5, 12,  2, 15,  8,  6,
         1,  4, 11, 13, 12,  3,  7, 14, 10, 15,  6,  8,  0,  5,  9,  2,
         6, 11, 13,  8,  1,  4, 10,  7,  9,  5,  0, 15, 14,  2,  3, 12,
    ],
    [
        13,  2,  8,  4,  6, 15, 11,  1, 10,  9,  3, 14,  5,  0, 12,  7,
         1, 15, 13,  8, 10,  3,  7,  4, 12,  5,  6, 11,  0, 14,  9,  2,
         7, 11,  4,  1,  9, 12, 14,  2,  0,  6, 10, 13, 15,  3,  5,  8,
         2,  1, 14,  7,  4, 10,  8, 13, 15, 12,  9,  0,  3,  5,  6, 11,
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_crypt_3() {
        // Generated by the C library.
        let known: &[(&[u8], &[u8; 13])] = &[
            (b"password", b"sa3tHJ3/KuYvI"),
            (b"", b"./Una9Fi.seRo"),
            (b"abc", b"zzsT4g5y.2SNE"),
            (b"longer than eight", b"AbATzd89uxftc"),
            (b"\xff\x80\xe9", b"9.aYleIbEisNY"),
        ];
        for (password, stored) in known {
            assert_eq!(des_crypt(password, [stored[0], stored[1]]).as_ref(), Some(*stored), "{password:?}");
        }
        assert_eq!(des_crypt(b"password", *b"a*"), None);
    }
}
