//! A site is the problem of one node of a graph (an operation and its sizes), independent of kernels. A chain is a list of sites, each of
//! which feeds the next.

use crate::kernels::{
    e4m3::ToE4m3,
    elementwise::{Combine, Gate},
    gemm::GemmProblem,
    layernorm::{BiasResidualLayerNorm, LayerNorm},
    prepare_attention::PrepareAttention,
    rms_norm::RmsNorm,
};

/// The problem of one node: an operation and its sizes, without a choice of kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum Site {
    /// A linear layer, without a gate and with a result that is not in E4M3.
    Linear(GemmProblem),
    /// Conversion to E4M3.
    ToE4m3(ToE4m3),
    /// RMSNorm of whole rows, created by [`RmsNorm::of_rows`].
    RmsNorm(RmsNorm),
    /// The sum of the previous site's result (a norm) and a residual. `residual` is the name of the operand that is the residual.
    NormSum {
        kernel: Combine,
        residual: &'static str,
    },
    /// LayerNorm, created by [`LayerNorm::new`].
    LayerNorm(LayerNorm),
    /// A gate, which combines the two halves of each row of a linear layer's result.
    Gate(Gate),
    /// LayerNorm of a sum, created by [`BiasResidualLayerNorm::new`].
    SumLayerNorm(BiasResidualLayerNorm),
    /// Preparation of attention's operands from a linear layer's rows. The site has two values: queries and keys, or queries and a cache.
    Prepare {
        kernel: PrepareAttention,
        /// Whether only this launch reads the columns that it prepares, so that they need not be stored.
        is_alone: bool,
    },
}

/// A site of a chain. The next site reads this site's value as its first operand, and as no other operand.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    pub site: Site,
    /// Whether only the next site reads the value, so that it need not be stored.
    pub is_private: bool,
}

/// Sites in launch order, each of which feeds the next.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub links: Vec<Link>,
    /// Whether each site must be computed in one launch for any number of rows. This concerns linear layers with a packed weight. If their
    /// rows are the tokens of the batch, they may have an additional launch for many rows, which converts an operand. If their rows are the
    /// sequences of the batch, for example, they cannot have such a launch, because whether a step is launched may depend only on the
    /// number of tokens.
    pub in_one_launch: bool,
}

impl Chain {
    /// Creates a chain of one site.
    pub fn of(site: Site) -> Self {
        Self {
            links: vec![Link {
                site,
                is_private: false,
            }],
            in_one_launch: false,
        }
    }
}
