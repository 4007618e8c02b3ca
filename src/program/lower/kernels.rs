//! Kernels of operators that do not belong to a chain (a series of nodes whose launches `select` chooses together).

use super::{Lowering, constant, width};
use crate::{
    graph::{NodeId, Op},
    kernels::{
        KernelSpec, attention::*, draw::Draw, elementwise::*, embedding::*,
        log_probability::LogProbability, pooling::*, rms_norm::RmsNorm, rotary::Rotary,
        weighted_pool::WeightedPool,
    },
    ops::PositionBias,
    program::Padding,
    select::Dispatch,
    tensor::Symbol,
};

impl Lowering<'_> {
    /// Returns the kernels of an operator that does not belong to a chain.
    pub(super) fn kernels(&self, id: NodeId, op: &Op) -> Result<Dispatch<KernelSpec>, String> {
        let dtype = self.dtype;
        let operands = self.graph.operands(id);
        let operand_width = |slot: usize| width(self.graph.shape(operands[slot]));
        let one = |kernel: KernelSpec| Ok(Dispatch::always(kernel));
        match op {
            Op::Input(_)
            | Op::Weight(_)
            | Op::Quantize(_)
            | Op::Cache { .. }
            | Op::CrossCache { .. } => Err("names data and computes nothing".to_owned()),
            Op::Linear { .. }
            | Op::ScaledLinear { .. }
            | Op::ToE4m3
            | Op::Gate(_)
            | Op::Attention(_)
            | Op::LayerNorm { .. }
            | Op::BiasResidualLayerNorm { .. } => {
                unreachable!("these are lowered as sites of chains and as attention")
            }
            Op::Softmax { scale, causal, by } => self.softmax(id, *scale, *causal, *by),
            Op::Embedding { offset } => one(KernelSpec::Embedding(Embedding {
                table: self.table(operands[0], operands[1], *offset)?,
                width: operand_width(1)?,
                dtype,
            })),
            Op::EmbeddingLayerNorm { eps, offsets } => {
                let n = offsets.len();
                let tables = (0..n)
                    .map(|i| self.table(operands[i], operands[n + i], offsets[i]))
                    .collect::<Result<_, _>>()?;
                let width = operand_width(n)?;
                one(KernelSpec::EmbeddingLayerNorm(EmbeddingLayerNorm {
                    tables,
                    width,
                    eps: *eps,
                    dtype,
                }))
            }
            Op::AddBias => one(KernelSpec::AddBias(AddBias {
                width: operand_width(0)?,
                dtype,
            })),
            Op::Add | Op::Multiply => one(KernelSpec::Combine(Combine {
                how: match op {
                    Op::Multiply => BinaryOp::Product,
                    _ => BinaryOp::Sum,
                },
                width: self.row_width(id)?,
                dtype,
            })),
            Op::RmsNorm {
                eps,
                heads,
                from,
                centered,
            } => one(KernelSpec::RmsNorm(RmsNorm {
                width: operand_width(1)?,
                heads: *heads,
                from: *from,
                stride: operand_width(0)?,
                centered: *centered,
                eps: *eps,
                dtype,
            })),
            Op::Rotary {
                rotation,
                from,
                head,
            } => one(KernelSpec::Rotary(Rotary {
                rotation: rotation.clone(),
                head: *head,
                from: *from,
                stride: operand_width(0)?,
                dtype,
            })),
            Op::Activate(activation) => one(KernelSpec::Activate(Activate {
                activation: *activation,
                width: self.row_width(id)?,
                dtype,
            })),
            Op::Scale { by } => one(KernelSpec::Scale(Scale {
                by: *by,
                width: self.row_width(id)?,
                dtype,
            })),
            Op::SoftCap(cap) => one(KernelSpec::SoftCap(SoftCap {
                cap: *cap,
                width: self.row_width(id)?,
                dtype,
            })),
            Op::SplitHeads { heads } => {
                let head = width(self.graph.shape(id))?;
                one(KernelSpec::SplitHeads(SplitHeads {
                    heads: *heads,
                    head,
                    dtype,
                }))
            }
            Op::MergeHeads => {
                let head = operand_width(0)?;
                let heads = width(self.graph.shape(id))? / head.max(1);
                one(KernelSpec::MergeHeads(MergeHeads { heads, head, dtype }))
            }
            Op::SliceColumns { start, width } => one(KernelSpec::SliceColumns(SliceColumns {
                from_width: operand_width(0)?,
                start: *start,
                width: *width,
                dtype,
            })),
            Op::Scores {
                heads,
                kv_heads,
                head,
                q,
                k,
            } => one(KernelSpec::AttentionScores(AttentionScores {
                heads: *heads,
                kv_heads: *kv_heads,
                head: *head,
                scale: 1.0,
                q: *q,
                k: *k,
                dtype,
            })),
            Op::RelativeScores { heads, head, of } => {
                let rows = constant(&self.graph.shape(operands[1]).0[0])?;
                one(KernelSpec::RelativeScores(RelativeScores {
                    heads: *heads,
                    head: *head,
                    reach: rows / 2,
                    of: *of,
                    dtype,
                }))
            }
            Op::Context {
                heads,
                kv_heads,
                head,
                v,
                out,
            } => one(KernelSpec::AttentionContext(AttentionContext {
                heads: *heads,
                kv_heads: *kv_heads,
                head: *head,
                v: *v,
                out: *out,
                dtype,
            })),
            // The result of `AfterPrompt` ends with unused rows. Only pooling leaves them out.
            Op::AfterPrompt if !self.is_only_pooled(id) => {
                Err("only pooling reads the rows after a prompt".to_owned())
            }
            Op::AfterPrompt | Op::FirstToken | Op::LastToken => {
                one(KernelSpec::TokenOfSequence(TokenOfSequence {
                    which: match op {
                        Op::LastToken => TokenPosition::Last,
                        _ => TokenPosition::First,
                    },
                    width: operand_width(0)?,
                    dtype,
                }))
            }
            Op::MaxPool => one(KernelSpec::MaxPool(MaxPool {
                width: operand_width(0)?,
                dtype,
            })),
            Op::WeightedPool(weights) => one(KernelSpec::WeightedPool(WeightedPool {
                weights: *weights,
                width: operand_width(0)?,
                dtype,
            })),
            Op::Concat { .. } => one(KernelSpec::Concat(Concat {
                widths: (0..operands.len())
                    .map(operand_width)
                    .collect::<Result<_, _>>()?,
                dtype,
            })),
            Op::MeanPool => one(KernelSpec::MeanPool(MeanPool {
                width: operand_width(0)?,
                dtype,
            })),
            Op::Draw => one(KernelSpec::Draw(Draw {
                width: operand_width(0)?,
                dtype,
            })),
            Op::LogProbability => one(KernelSpec::LogProbability(LogProbability {
                width: operand_width(0)?,
                dtype,
            })),
            Op::L2Normalize { eps } => one(KernelSpec::L2Normalize(L2Normalize {
                width: operand_width(0)?,
                eps: *eps,
                dtype,
            })),
            Op::MeanPoolNormalize { eps } => {
                one(KernelSpec::MeanPoolNormalize(MeanPoolNormalize {
                    width: operand_width(0)?,
                    eps: *eps,
                    dtype,
                }))
            }
        }
    }

    /// Returns the kernels for the softmax of stored scores. The length of the longest sequence determines which kernel is launched.
    fn softmax(
        &self,
        id: NodeId,
        scale: f32,
        causal: bool,
        by: PositionBias,
    ) -> Result<Dispatch<KernelSpec>, String> {
        if self.options.invariant && self.options.padding == Padding::Expanded {
            return Err("masks the query expansion of a late-interaction model, which has kernels only for stored scores; these sum rows in an order that depends on the other sequences, so do not use --invariant".to_owned());
        }
        if self.options.invariant && by.is_none() {
            return Err("sums rows in an order that depends on their address, and so on the other sequences; enable the pass `fuse_attention` (`gemmule explain` shows why it refuses), or do not use --invariant".to_owned());
        }
        let heads = constant(&self.graph.shape(id).0[0])?;
        let mask = match self.options.padding {
            // A causal query never reads padding, which is at the end of its sequence.
            _ if causal => SoftmaxMask::Causal,
            Padding::Kept | Padding::Expanded => SoftmaxMask::Padding,
            Padding::Removed => SoftmaxMask::None,
        };
        if !by.is_none() {
            return Ok(Dispatch::always(KernelSpec::from(SoftmaxByDistance {
                heads,
                scale,
                mask,
                by,
                dtype: self.dtype,
            })));
        }
        let softmax = AttentionSoftmax {
            mask,
            ..AttentionSoftmax::new(heads, scale, self.dtype)
        };
        let kernels = softmax.by_length().into_iter();
        Ok(Dispatch::by_longest(
            kernels.map(|(up_to, kernel)| (up_to, Some(kernel.into()))),
        ))
    }

    pub(super) fn table(&self, ids: NodeId, table: NodeId, offset: u32) -> Result<Table, String> {
        let Op::Input(ids) = self.graph.op(ids) else {
            return Err("the ids of an embedding must be an input of the model".to_owned());
        };
        Ok(Table {
            ids: *ids,
            offset,
            rows: constant(&self.graph.shape(table).0[0])?,
        })
    }

    /// Returns whether only pooling reads the value of a node.
    fn is_only_pooled(&self, id: NodeId) -> bool {
        let mut outputs = self.graph.outputs().iter();
        let mut readers = self.graph.consumers(id).into_iter();
        !outputs.any(|&(_, output)| output == id)
            && readers.all(|reader| {
                matches!(
                    self.graph.op(reader),
                    Op::FirstToken
                        | Op::LastToken
                        | Op::MeanPool
                        | Op::MeanPoolNormalize { .. }
                        | Op::MaxPool
                        | Op::WeightedPool(_)
                )
            })
    }

    /// Returns the number of elements per row of a node's value. Rows are counted as in [`rows`](super::rows).
    fn row_width(&self, id: NodeId) -> Result<u32, String> {
        let shape = self.graph.shape(id);
        match shape.0.as_slice() {
            [width, pairs] if pairs.as_symbol() == Some(Symbol::Pairs) => constant(width),
            [heads, _, head] => constant(&(heads * head)),
            _ => width(shape),
        }
    }
}
