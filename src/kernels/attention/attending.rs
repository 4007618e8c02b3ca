use serde::{Deserialize, Serialize};

use super::{ByDistance, HeadView};

/// Attention of the tokens of packed sequences to their own sequence: what a fused kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attending {
    /// Heads of the queries, and of the result.
    pub heads: u32,
    /// Heads of keys and values, which divide `heads`: each serves as many neighbouring query heads (grouped-query
    /// attention, Ainslie et al. 2023).
    pub kv_heads: u32,
    /// Elements of a head.
    pub head: u32,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether a token attends to itself and the tokens before it only.
    pub causal: bool,
    /// What distances between queries and keys do.
    pub by: ByDistance,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
}

impl Attending {
    /// Every token attends to every token, and every query head has a key head of its own.
    pub fn full(heads: u32, head: u32, scale: f32, [q, k, v]: [HeadView; 3]) -> Self {
        Self {
            heads,
            kv_heads: heads,
            head,
            scale,
            causal: false,
            by: ByDistance::default(),
            q,
            k,
            v,
        }
    }

    /// Whether every token attends to every token, whatever their distance, and every query head has a key head of its own.
    pub fn is_full(&self) -> bool {
        !self.causal && self.by.is_none() && self.kv_heads == self.heads
    }

    /// The operands' names, views and heads.
    pub fn operands(&self) -> [(&'static str, HeadView, u32); 3] {
        [
            ("q", self.q, self.heads),
            ("k", self.k, self.kv_heads),
            ("v", self.v, self.kv_heads),
        ]
    }

    /// Columns of the result.
    pub fn width(&self) -> u32 {
        self.heads * self.head
    }
}
