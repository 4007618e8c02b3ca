//! Padding of heads to the widths that the kernels for a KV cache accept.

use std::collections::HashMap;

use super::{Graph, GraphError, HEAD_STEP, MAX_HEAD, NodeId, Op, WeightExpr};
use crate::ops::Epilogue;

/// Nodes of the matrices that resize heads. The key is (number of heads, old head size, new head size).
type Matrices = HashMap<(u32, u32, u32), NodeId>;

impl Graph {
    /// Pads heads with zeros to a multiple of [`HEAD_STEP`] elements, as attention to a KV cache requires. The zeros do not change the
    /// products of queries and keys, and the padded columns of the attention result are dropped. Heads wider than [`MAX_HEAD`] and graphs
    /// with relative scores are not changed.
    ///
    /// # Errors
    /// Returns an error if the graph fails [`verify`](Self::verify).
    pub fn with_padded_heads(mut self) -> Result<Self, GraphError> {
        let nodes = self.topological();
        let has_relative = |id: &NodeId| matches!(self.op(*id), Op::RelativeScores { .. });
        if nodes.iter().any(has_relative) {
            return Ok(self);
        }
        let mut matrices = Matrices::new();
        for id in nodes {
            let operands = self.operands(id);
            let op = self.op(id).clone();
            match op {
                Op::Cache {
                    name,
                    heads,
                    head,
                    format,
                    scaled: false,
                    ..
                } if padded(head) != head => {
                    let x =
                        self.resized(id, operands[0], (heads, head, padded(head)), &mut matrices)?;
                    let (from, head) = (0, padded(head));
                    let op = Op::Cache {
                        name,
                        from,
                        heads,
                        head,
                        format,
                        scaled: false,
                    };
                    self.rewrite(id, op, &[x])?;
                }
                Op::CrossCache { name, heads, head } if padded(head) != head => {
                    let head = padded(head);
                    self.rewrite(id, Op::CrossCache { name, heads, head }, &operands)?;
                }
                Op::SplitHeads { heads } => {
                    // If the operand is a cache, its heads are already padded.
                    let width = self.shape(operands[0]).width().unwrap_or(0);
                    let head = u32::try_from(width / u64::from(heads.max(1))).unwrap_or(0);
                    let x = match padded(head) == head {
                        true => operands[0],
                        false => self.resized(
                            id,
                            operands[0],
                            (heads, head, padded(head)),
                            &mut matrices,
                        )?,
                    };
                    self.rewrite(id, Op::SplitHeads { heads }, &[x])?;
                }
                Op::Scores {
                    heads,
                    kv_heads,
                    head,
                    q,
                    k,
                } if padded(head) != head => {
                    let head = padded(head);
                    let op = Op::Scores {
                        heads,
                        kv_heads,
                        head,
                        q,
                        k,
                    };
                    self.rewrite(id, op, &operands)?;
                }
                Op::Context {
                    heads,
                    kv_heads,
                    head,
                    v,
                    out,
                } if padded(head) != head => {
                    let wide = padded(head);
                    let op = Op::Context {
                        heads,
                        kv_heads,
                        head: wide,
                        v,
                        out,
                    };
                    self.rewrite(id, op, &operands)?;
                    for merged in self.consumers(id) {
                        self.rewrite(merged, Op::MergeHeads, &[id])?;
                        let narrow =
                            self.resized(merged, merged, (heads, wide, head), &mut matrices)?;
                        self.replace(merged, narrow);
                    }
                }
                _ => {}
            }
        }
        Ok(self)
    }

    /// Adds a node that resizes the `heads` heads of `x` from `from` to `to` elements. Its name begins with the name of `of`.
    fn resized(
        &mut self,
        of: NodeId,
        x: NodeId,
        (heads, from, to): (u32, u32, u32),
        matrices: &mut Matrices,
    ) -> Result<NodeId, GraphError> {
        let matrix = match matrices.get(&(heads, from, to)) {
            Some(&matrix) => matrix,
            None => {
                let name = format!("heads.{heads}.{from}.{to}");
                let (heads, own) = (u64::from(heads), (heads, from, to));
                let (from, to) = (from.into(), to.into());
                let expr = WeightExpr::ResizedHeads { heads, from, to };
                let matrix = self.add(name, Op::Weight(expr), &[])?;
                matrices.insert(own, matrix);
                matrix
            }
        };
        let name = format!("{}.resized", self.node(of).name);
        let epilogue = Epilogue::default();
        self.add(name, Op::Linear { epilogue }, &[x, matrix])
    }
}

fn padded(head: u32) -> u32 {
    match head.next_multiple_of(HEAD_STEP) {
        padded if padded <= MAX_HEAD => padded,
        _ => head,
    }
}
