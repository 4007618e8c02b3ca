/// Philox4x32-10 (Salmon et al. 2011), a counter-based random number generator. The random number of a token depends only on the seed, the
/// sequence's number and the token's position, not on other requests or on the device.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: [u32; 2],
}

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

impl Philox {
    pub fn new(seed: u64) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
        }
    }

    /// Returns the four random 32-bit numbers for a counter.
    pub fn numbers(&self, counter: [u32; 4]) -> [u32; 4] {
        let (mut key, mut x) = (self.key, counter);
        for _ in 0..ROUNDS {
            let product = |i: usize| u64::from(MULTIPLIERS[i]) * u64::from(x[2 * i]);
            let (p0, p1) = (product(0), product(1));
            x = [
                (p1 >> 32) as u32 ^ x[1] ^ key[0],
                p1 as u32,
                (p0 >> 32) as u32 ^ x[3] ^ key[1],
                p0 as u32,
            ];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        x
    }

    /// Returns a number in [0, 1) for the token at a position of a sequence.
    pub fn uniform(&self, position: u64, sequence: u64) -> f64 {
        let counter = [
            position as u32,
            (position >> 32) as u32,
            sequence as u32,
            (sequence >> 32) as u32,
        ];
        let [high, low, ..] = self.numbers(counter);
        let bits = u64::from(high) << 21 ^ u64::from(low) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }
}
