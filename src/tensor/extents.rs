use super::Symbol;

/// What a batch at hand gives the symbols: all that a size or a launch can depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Extents {
    /// Sum of the sequence lengths.
    pub tokens: u64,
    /// Number of sequences.
    pub batch: u64,
    /// The longest sequence.
    pub longest: u64,
    /// Pairs of a token and a key of its sequence, one attention score per head each: the sum of the squares of the lengths,
    /// if nothing is cached.
    pub pairs: u64,
    /// Sum of the numbers of keys: tokens, and those in a cache before.
    pub slots: u64,
    /// Blocks of the pool that a cache lies in; 0 without one.
    pub blocks: u64,
    /// The most keys that a sequence has in a cache, those of this batch included, or that its source has; 0 without a cache.
    pub cached_keys: u64,
    /// Sum of the tokens of the sequences' sources, which another part of the model left keys of.
    pub source_slots: u64,
    /// Pairs of a token and a key of its sequence's source.
    pub source_pairs: u64,
    /// The part of the model that the batch is for; 0 where it is one graph.
    pub part: u32,
    /// Rows of the launch at hand: tokens, or sequences after pooling. Set per step.
    pub rows: u64,
}

/// Lengths that describe no batch.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthsError {
    #[error("the batch is empty; expected at least one sequence")]
    Empty,
    #[error("sequence {index} has no tokens; expected at least one token in every sequence")]
    ZeroLength { index: usize },
    #[error("the batch has {tokens} tokens; at most {limit} fit one run, split the batch")]
    TooManyTokens { tokens: u64, limit: u64 },
}

impl Extents {
    /// More tokens than this would overflow the 32-bit counts of the kernels.
    pub const MAX_TOKENS: u64 = 1 << 24;

    /// The extents of a batch of sequences with these lengths. `rows` starts as `tokens`.
    pub fn of(lens: &[u32]) -> Result<Self, LengthsError> {
        if lens.is_empty() {
            return Err(LengthsError::Empty);
        }
        if let Some(index) = lens.iter().position(|&n| n == 0) {
            return Err(LengthsError::ZeroLength { index });
        }
        let tokens: u64 = lens.iter().map(|&n| u64::from(n)).sum();
        if tokens > Self::MAX_TOKENS {
            return Err(LengthsError::TooManyTokens {
                tokens,
                limit: Self::MAX_TOKENS,
            });
        }
        Ok(Self {
            tokens,
            batch: lens.len() as u64,
            longest: u64::from(*lens.iter().max().unwrap_or(&0)),
            pairs: lens.iter().map(|&n| u64::from(n) * u64::from(n)).sum(),
            slots: tokens,
            blocks: 0,
            cached_keys: 0,
            source_slots: 0,
            source_pairs: 0,
            part: 0,
            rows: tokens,
        })
    }

    /// The extents of sequences that go on: each has so many tokens in a pool of `blocks` blocks before those of this batch.
    pub fn continuing(lens: &[u32], cached: &[u32], blocks: u64) -> Result<Self, LengthsError> {
        let fresh = Self::of(lens)?;
        let keys = || {
            let each = lens.iter().zip(cached);
            each.map(|(&n, &before)| u64::from(n) + u64::from(before))
        };
        let pairs = lens
            .iter()
            .zip(keys())
            .map(|(&n, keys)| u64::from(n) * keys);
        Ok(Self {
            pairs: pairs.sum(),
            slots: keys().sum(),
            blocks,
            cached_keys: keys().max().unwrap_or(0),
            ..fresh
        })
    }

    /// The same batch, whose sequences attend to sources of these lengths, too.
    pub fn with_sources(self, lens: &[u32], sources: &[u32]) -> Self {
        let pairs = lens.iter().zip(sources);
        let longest = sources.iter().map(|&n| u64::from(n)).max();
        Self {
            cached_keys: self.cached_keys.max(longest.unwrap_or(0)),
            source_slots: sources.iter().map(|&n| u64::from(n)).sum(),
            source_pairs: pairs
                .map(|(&n, &source)| u64::from(n) * u64::from(source))
                .sum(),
            ..self
        }
    }

    /// The most keys that a token may attend to: its sequence's, or its source's.
    pub fn most_keys(&self) -> u64 {
        self.cached_keys.max(self.longest)
    }

    /// Keys of a tile whose scores are reduced together.
    pub const KEY_TILE: u64 = 128;

    /// `⌊pairs / 128⌋ + tokens`. As a running sum over the sequences it says where each one's rows
    /// of ⌈length / 128⌉ values start: with n = length, n² / 128 + n exceeds n · ⌈n / 128⌉ by more
    /// than the rounding down, so that no two overlap and no quotients need to be summed.
    pub fn key_tiles(&self) -> u64 {
        (self.pairs / Self::KEY_TILE).saturating_add(self.tokens)
    }

    /// The value of one symbol.
    pub fn get(&self, symbol: Symbol) -> u64 {
        match symbol {
            Symbol::Tokens => self.tokens,
            Symbol::Batch => self.batch,
            Symbol::Longest => self.longest,
            Symbol::Pairs => self.pairs,
            Symbol::KeyTiles => self.key_tiles(),
            Symbol::Slots => self.slots,
            Symbol::Blocks => self.blocks,
            Symbol::SourceSlots => self.source_slots,
            Symbol::SourcePairs => self.source_pairs,
            Symbol::Rows => self.rows,
        }
    }

    /// The same batch, for a launch over `rows` rows.
    pub fn with_rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }
}
