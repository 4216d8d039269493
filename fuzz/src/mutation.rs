//! Mutations of inputs, decided by a seed. They know nothing of a target; its corpus lends the words of its language.

use gale_runtime::simulation::Random;

/// Longest input.
const BYTES_MAX: usize = 4096;

/// Most changes of one mutation.
const CHANGES_MAX: usize = 6;

/// Values at the ends of ranges.
const EDGES: [u64; 10] = [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];

/// Bytes that mean something in most of the languages.
const MARKS: &[u8] = b"\0\r\n\t \"'\\/{}[]();:,.=%&?#$-+*~<>@\xc0\xff";

/// Makes inputs out of those of a corpus.
pub struct Mutator {
    random: Random,
    corpus: Vec<Vec<u8>>,
}

impl Mutator {
    /// The same seed and corpus give the same inputs.
    pub fn new(seed: u64, mut corpus: Vec<Vec<u8>>) -> Mutator {
        corpus.push(Vec::new());
        Mutator { random: Random::new(seed), corpus }
    }

    /// Returns the next input.
    pub fn next_input(&mut self) -> Vec<u8> {
        let random = &self.random;
        let mut input = random.pick(&self.corpus).clone();
        for _ in 0..random.up_to(CHANGES_MAX) {
            self.change(&mut input);
        }
        input.truncate(BYTES_MAX);
        input
    }

    fn change(&self, input: &mut Vec<u8>) {
        let random = &self.random;
        let at = at_most(random, input.len());
        let end = (at + random.up_to(*random.pick(&[1, 4, 16, 64]))).min(input.len());
        match random.below(10) {
            0 if at < input.len() => input[at] ^= 1 << random.below(8),
            1 if at < input.len() => input[at] = random.next() as u8,
            2 if at < input.len() => input[at] = *random.pick(MARKS),
            3 => drop(input.drain(at..end)),
            4 => {
                let piece = input[at..end].repeat(random.up_to(8));
                insert(input, at, &piece);
            }
            5 => input.truncate(at),
            6 => insert(input, at, &[*random.pick(MARKS)]),
            7 => {
                let bytes = random.pick(&EDGES).to_be_bytes();
                let width = *random.pick(&[1, 2, 4, 8]);
                overwrite(input, at, &bytes[8 - width..]);
            }
            8 => insert(input, at, random.pick(&EDGES).to_string().as_bytes()),
            _ => {
                let other = random.pick(&self.corpus);
                let from = at_most(random, other.len());
                let length = at_most(random, (other.len() - from).min(*random.pick(&[8, 64, 1024])));
                insert(input, at, &other[from..from + length]);
            }
        }
    }
}

/// Returns a number from 0 on.
fn at_most(random: &Random, max: usize) -> usize {
    random.below(max as u64 + 1) as usize
}

fn insert(input: &mut Vec<u8>, at: usize, piece: &[u8]) {
    input.splice(at..at, piece.iter().copied());
}

fn overwrite(input: &mut Vec<u8>, at: usize, piece: &[u8]) {
    let end = (at + piece.len()).min(input.len());
    input.splice(at..end, piece.iter().copied());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_makes_same_inputs_of_bounded_length() {
        let corpus = vec![b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![7; 3 * BYTES_MAX]];
        let [mut one, mut other] = [Mutator::new(5, corpus.clone()), Mutator::new(5, corpus.clone())];
        let mut different = Mutator::new(6, corpus);
        let inputs: Vec<_> = (0..500).map(|_| one.next_input()).collect();
        assert!(inputs.iter().all(|input| input.len() <= BYTES_MAX && *input == other.next_input()));
        assert!(inputs.iter().any(|input| *input != different.next_input()));
    }
}
