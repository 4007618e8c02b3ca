use serde::{Deserialize, Serialize};

use super::{HeadView, PositionBias};

/// Attention of packed sequences to themselves or to a source, as fused kernels compute it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionProblem {
    /// Number of query heads, and of heads of the result.
    pub heads: u32,
    /// Number of key and value heads, a divisor of `heads`. Each serves `heads / kv_heads` consecutive query heads (grouped-query
    /// attention, Ainslie et al. 2023).
    pub kv_heads: u32,
    /// Elements per head.
    pub head: u32,
    /// Factor applied to scores.
    pub scale: f32,
    /// Whether a token attends only to itself and earlier tokens.
    pub causal: bool,
    /// Further changes to the scores: a soft cap, a window and a bias by the distance between query and key, and sinks.
    pub by: PositionBias,
    pub q: HeadView,
    pub k: HeadView,
    pub v: HeadView,
}

impl AttentionProblem {
    /// Creates attention of every token to every token, with a key head for each query head.
    pub fn full(heads: u32, head: u32, scale: f32, [q, k, v]: [HeadView; 3]) -> Self {
        Self {
            heads,
            kv_heads: heads,
            head,
            scale,
            causal: false,
            by: PositionBias::default(),
            q,
            k,
            v,
        }
    }

    /// Returns whether every token attends to every token without a cap or a bias, and every query head has its own key head. There may be
    /// sinks.
    pub fn is_full(&self) -> bool {
        !self.causal && self.by.keeps_scores() && self.kv_heads == self.heads
    }

    /// Name, view and number of heads of each operand.
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
