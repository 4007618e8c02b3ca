//! Table lookups, alone and summed with the LayerNorm that follows.

use serde::{Deserialize, Serialize};

use super::Meta;
use crate::tensor::DType;

/// One table `[rows, width]`, and which ids of the batch pick its rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Table {
    /// [`Meta::TokenIds`], [`Meta::TypeIds`] or [`Meta::Positions`].
    pub ids: Meta,
    /// Added to every id: some models count positions from `padding index + 1`.
    pub offset: u32,
    pub rows: u32,
}

/// `ids [tokens]`, `table [table.rows, width]` → `out [tokens, width]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Embedding {
    pub table: Table,
    pub width: u32,
    pub dtype: DType,
}

/// One `ids [tokens]` per table, then one `[rows, width]` per table, then `gamma`, `beta [width]`
/// → `out [tokens, width]`: LayerNorm of the sum of the rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingLayerNorm {
    pub tables: Vec<Table>,
    pub width: u32,
    pub eps: f32,
    pub dtype: DType,
}
