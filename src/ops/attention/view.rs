use serde::{Deserialize, Serialize};

use crate::tensor::{Shape, Size, Symbol};

/// Location of element `c` of head `h` of token `t` in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum HeadView {
    /// `[heads, tokens, head]`: `(h·tokens + t)·head + c`.
    HeadMajor,
    /// Columns of a `[tokens, stride]` tensor: `t·stride + offset + h·head + c`.
    TokenMajor { offset: u32, stride: u32 },
}

impl HeadView {
    /// Shape of the whole tensor.
    pub fn shape(self, heads: u32, head: u32) -> Shape {
        let tokens = Size::from(Symbol::Tokens);
        match self {
            HeadView::HeadMajor => Shape::new([
                Size::constant(heads.into()),
                tokens,
                Size::constant(head.into()),
            ]),
            HeadView::TokenMajor { stride, .. } => {
                Shape::new([tokens, Size::constant(stride.into())])
            }
        }
    }

    /// Index of the first element of the `nth` head of a token. The head's other elements follow it.
    pub fn index(self, tokens: usize, token: usize, nth: usize, head: u32) -> usize {
        let head = head as usize;
        match self {
            HeadView::HeadMajor => (nth * tokens + token) * head,
            HeadView::TokenMajor { offset, stride } => {
                token * stride as usize + offset as usize + nth * head
            }
        }
    }

    /// Distance in elements between the rows of one head for consecutive tokens.
    pub(crate) fn stride(self, head: u32) -> u32 {
        match self {
            HeadView::HeadMajor => head,
            HeadView::TokenMajor { stride, .. } => stride,
        }
    }

    /// First column of the first head in a token-major view; 0 in a head-major view.
    pub(crate) fn column(self) -> u32 {
        match self {
            HeadView::HeadMajor => 0,
            HeadView::TokenMajor { offset, .. } => offset,
        }
    }

    /// Returns whether the row of every head starts at a multiple of `elements` elements.
    pub(crate) fn is_aligned(self, head: u32, elements: u32) -> bool {
        match self {
            HeadView::HeadMajor => head.is_multiple_of(elements),
            HeadView::TokenMajor { offset, stride } => [head, offset, stride]
                .iter()
                .all(|n| n.is_multiple_of(elements)),
        }
    }
}

/// Selects a token of a (query, key) pair: the query or the key. The relative score of the pair is computed from the row of `x` for this
/// token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Side {
    Query,
    Key,
}

impl Side {
    /// Name in kernel symbols and in descriptions of models.
    pub const fn name(self) -> &'static str {
        match self {
            Side::Query => "query",
            Side::Key => "key",
        }
    }
}

/// Returns `1/√head`, the default scale of dot-product attention.
pub fn default_scale(head: u32) -> f32 {
    (1.0 / f64::from(head).sqrt()) as f32
}
