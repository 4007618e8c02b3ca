use super::Symbol;

/// Values of the symbols for one batch. Sizes and launches depend only on these values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Extents {
    /// Sum of the sequence lengths.
    pub tokens: u64,
    /// Number of sequences.
    pub batch: u64,
    /// Length of the longest sequence.
    pub longest: u64,
    /// Number of pairs of a token and a key of its sequence. Each pair has one attention score per head. Without cached keys, this is the
    /// sum of the squared sequence lengths.
    pub pairs: u64,
    /// Total number of keys: the tokens of the batch, and the cached tokens before them.
    pub slots: u64,
    /// Number of blocks in the pool of the KV cache; 0 without a KV cache.
    pub blocks: u64,
    /// Largest number of keys that a sequence or its source has, including the keys of this batch; 0 without a KV cache.
    pub cached_keys: u64,
    /// Total length of the sequences' source texts, whose keys another part of the model (the encoder) computed.
    pub source_slots: u64,
    /// Number of pairs of a query and a key in cross-attention: the tokens of a sequence times the tokens of its source text, summed over
    /// all sequences.
    pub source_pairs: u64,
    /// Index of the part of the model that the batch runs, such as the encoder or the decoder; 0 for a model of one graph.
    pub part: u32,
    /// Number of rows of the current launch: tokens, or sequences after pooling. Each step of a program sets it for its launch.
    pub rows: u64,
}

/// An error in the lengths of a batch.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LengthsError {
    #[error("the batch is empty; expected at least one sequence")]
    Empty,
    #[error("sequence {index} has no tokens; expected at least one token in every sequence")]
    ZeroLength { index: usize },
    #[error("the batch has {tokens} tokens; the maximum of one run is {limit}; split the batch")]
    TooManyTokens { tokens: u64, limit: u64 },
}

impl Extents {
    /// Maximum number of tokens. More would overflow the kernels' 32-bit counts.
    pub const MAX_TOKENS: u64 = 1 << 24;

    /// Returns the extents of a batch of sequences with these lengths. `rows` is initially
    /// `tokens`.
    ///
    /// # Errors
    /// Returns an error if the batch or a sequence is empty, or if there are more than [`MAX_TOKENS`](Self::MAX_TOKENS) tokens.
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

    /// Returns the extents of sequences that continue: sequence `i` has `cached[i]` earlier tokens
    /// in a pool of `blocks` blocks.
    ///
    /// # Errors
    /// Returns an error if [`of`](Self::of) returns one for `lens`.
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

    /// Returns the same batch with cross-attention to sources of the given lengths.
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

    /// Returns the maximum number of keys that a token attends to, in its sequence or in its source.
    pub fn max_keys(&self) -> u64 {
        self.cached_keys.max(self.longest)
    }

    /// Number of keys in a tile whose scores are reduced together.
    pub const KEY_TILE: u64 = 128;

    /// Returns the size of a tensor with one value for each token and each tile of keys that the token attends to:
    /// `⌊pairs / 128⌋ + tokens`, an upper bound on `Σ n · ⌈n / 128⌉` over the sequence lengths `n`.
    ///
    /// A kernel stores the values of a sequence at the index `⌊pairs / 128⌋ + tokens`, evaluated for the sequences before it. The values of
    /// two sequences do not overlap, because `⌊n² / 128⌋ + n` is at least `n · ⌈n / 128⌉`.
    pub fn key_tiles(&self) -> u64 {
        (self.pairs / Self::KEY_TILE).saturating_add(self.tokens)
    }

    /// Returns the value of one symbol.
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

    /// Returns the same batch for a launch over `rows` rows.
    pub fn with_rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }
}
