//! Keys with a Zipf distribution, for benchmarks and tests of cache eviction.

/// Generates keys with a Zipf distribution: a key's number is its rank, and a few keys make most of the requests.
pub struct Zipf {
    sums: Vec<f64>,
    state: u64,
}

impl Zipf {
    pub fn new(keys: usize, exponent: f64) -> Zipf {
        let mut sum = 0.0;
        let weights = (1..=keys).map(|rank| (rank as f64).powf(-exponent));
        let sums = weights.map(|weight| {
            sum += weight;
            sum
        });
        Zipf { sums: sums.collect(), state: 42 }
    }

    /// A deterministic sequence of random numbers (xorshift64*).
    pub fn random(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn next(&mut self) -> u64 {
        let at = (self.random() >> 11) as f64 / (1u64 << 53) as f64 * self.sums.last().expect("a key");
        self.sums.partition_point(|&sum| sum < at) as u64
    }
}
