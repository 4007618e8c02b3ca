use std::fmt;

use serde::{Deserialize, Serialize};

/// A quantity that depends on the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Symbol {
    /// Sum of the sequence lengths.
    Tokens,
    /// Number of sequences.
    Batch,
    /// Length of the longest sequence.
    Longest,
    /// Number of pairs of a token and a key of its sequence: the sum of the squared sequence lengths if no keys are cached.
    Pairs,
    /// Size of a tensor with one value for each row of scores and each tile of keys. See [`Extents::key_tiles`](super::Extents::key_tiles).
    KeyTiles,
    /// Total number of keys: the tokens of the batch, and the cached tokens before them.
    Slots,
    /// Number of blocks in the pool of the KV cache; 0 without a KV cache.
    Blocks,
    /// Total length of the sequences' source texts, whose keys another part of the model (the encoder) computed.
    SourceSlots,
    /// Number of pairs of a query and a key in cross-attention: the tokens of a sequence times the tokens of its source text, summed over
    /// all sequences.
    SourcePairs,
    /// Rows of one launch. Only kernels use this symbol; a program binds it to another size.
    Rows,
}

impl Symbol {
    pub const ALL: [Symbol; 10] = [
        Symbol::Tokens,
        Symbol::Batch,
        Symbol::Longest,
        Symbol::Pairs,
        Symbol::KeyTiles,
        Symbol::Slots,
        Symbol::Blocks,
        Symbol::SourceSlots,
        Symbol::SourcePairs,
        Symbol::Rows,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Symbol::Tokens => "tokens",
            Symbol::Batch => "batch",
            Symbol::Longest => "longest",
            Symbol::Pairs => "pairs",
            Symbol::KeyTiles => "key_tiles",
            Symbol::Slots => "slots",
            Symbol::Blocks => "blocks",
            Symbol::SourceSlots => "source_slots",
            Symbol::SourcePairs => "source_pairs",
            Symbol::Rows => "rows",
        }
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
