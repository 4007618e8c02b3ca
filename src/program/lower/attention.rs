//! Lowering of fused attention to one or more launches.

use std::collections::HashMap;

use super::{LowerError, LowerOptions, Lowering, UNPLACED, unsupported};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        Fill, Kernel, KernelSpec,
        attention::{AttentionError, Keys, MhaCached, MhaOnline, MhaShort},
        cache::SCALES,
        chain::Chain,
    },
    ops::{AttentionProblem, BatchInput},
    program::{AttentionChoice, TensorIndex},
    select::{Attention, CachedAttention, Dispatch},
};

/// The launches of an attention node.
enum Launches {
    /// A single launch. The second field is the max sequence length, if there is one.
    One(Dispatch<KernelSpec>, Option<u64>),
    /// Several consecutive launches, for any length.
    Several(Chain),
}

/// Kernels of an attention whose decode kernel also appends each sequence's new token to the cache. `steps` are the decode kernels, for
/// batches with one token per sequence. `pieces` are the attention kernels for batches with longer sequences, whose rows a separate launch
/// appends.
pub(super) struct Appending {
    steps: Dispatch<KernelSpec>,
    pieces: Dispatch<KernelSpec>,
    /// Operands of the decode kernels in addition to those of attention: the operands of the append launch without the scales, and the
    /// cache.
    operands: Vec<TensorIndex>,
}

/// An attention that converts its result to E4M3.
#[derive(Clone)]
pub(super) struct Converting {
    /// The attention node. Its 16-bit result is not stored.
    attention: NodeId,
    dispatch: Dispatch<KernelSpec>,
}

/// Returns the attentions that convert their result, by the node of the conversion.
pub(super) fn conversions(graph: &Graph, options: &LowerOptions) -> HashMap<NodeId, Converting> {
    let nodes = graph.topological().into_iter();
    let nodes = nodes.filter(|&id| *graph.op(id) == Op::ToE4m3 && !options.no_fused_launches);
    nodes
        .filter_map(|id| Some((id, converting(graph, options, id)?)))
        .collect()
}

/// Returns the attention whose result is converted by `conversion`, if the attention kernels can convert the result themselves.
fn converting(graph: &Graph, options: &LowerOptions, conversion: NodeId) -> Option<Converting> {
    let id = graph.operand(conversion, "x")?;
    let &Op::Attention(of) = graph.op(id) else {
        return None;
    };
    let reads_rows = graph
        .operands(id)
        .into_iter()
        .all(|operand| !matches!(graph.op(operand), Op::Cache { .. } | Op::CrossCache { .. }));
    let may_choose = match options.attention {
        AttentionChoice::Auto | AttentionChoice::Wgmma => true,
        AttentionChoice::Short | AttentionChoice::Online | AttentionChoice::Grouped => false,
    };
    if !reads_rows || !may_choose || graph.sole_consumer(id) != Some(conversion) {
        return None;
    }
    let dtype = options.dtype;
    let attention = Attention(MhaOnline { of, dtype });
    let dispatch = attention.to_e4m3(options.machine, options.invariant)?;
    Some(Converting {
        attention: id,
        dispatch,
    })
}

impl Lowering<'_> {
    /// Appends the launch of an attention that converts its result. Returns the tensor of the converted result.
    pub(super) fn converting_attention(
        &mut self,
        conversion: NodeId,
        launch: Converting,
    ) -> TensorIndex {
        let mut operands = self.bind(&launch.dispatch, |lowering, name| {
            let of_attention = lowering.operand(launch.attention, name);
            of_attention.or_else(|| lowering.operand(conversion, name))
        });
        let node = self.graph.node(conversion);
        let element = self.element(conversion);
        let out = self.tensor(&node.name, element, node.shape.clone(), UNPLACED);
        operands.push(out);
        self.step(conversion, launch.dispatch, operands);
        out
    }

    pub(super) fn attention(&mut self, id: NodeId, op: &Op) -> Result<TensorIndex, LowerError> {
        let node = self.graph.node(id);
        let graph = self.graph;
        let unsupported = |problem: String| unsupported(graph, id, op, problem);
        let &Op::Attention(of) = op else {
            return Err(unsupported("is not attention".to_owned()));
        };
        if let Some(kernel) = self.cached(id, &of).map_err(unsupported)? {
            return Ok(self.cached_attention(id, kernel));
        }
        let dtype = self.dtype;
        let attention = Attention(MhaOnline { of, dtype });
        let longest = self.longest().map_err(unsupported)?;
        let choice = self.options.attention;
        let launches =
            self.launches(&attention, longest)
                .map_err(|problem| LowerError::Attention {
                    node: node.name.clone(),
                    choice,
                    problem,
                })?;
        let chain = match &launches {
            // All kernels of a dispatch have the same parameters.
            Launches::One(dispatch, _) => dispatch
                .choices()
                .next()
                .cloned()
                .map(Chain::of)
                .unwrap_or_default(),
            Launches::Several(chain) => chain.clone(),
        };
        let out = self.tensor(&node.name, self.dtype, node.shape.clone(), UNPLACED);
        let mut named: HashMap<&str, TensorIndex> = HashMap::from([("out", out)]);
        let slots = op.slots();
        for (name, operand) in slots.iter().zip(self.graph.operands(id)) {
            named.insert(name, self.tensor_of[&operand]);
        }
        let tensors: Vec<TensorIndex> = chain
            .tensors
            .iter()
            .map(|t| match (named.get(t.name), t.fill) {
                (Some(&tensor), _) => tensor,
                (None, Some(Fill::BatchInput(meta))) => self.meta(meta),
                (None, _) => {
                    let name = format!("{}.{}", node.name, t.name);
                    let tensor = self.tensor(&name, t.element, t.shape.clone(), UNPLACED);
                    named.insert(t.name, tensor);
                    tensor
                }
            })
            .collect();
        for launch in chain.launches {
            let operands: Vec<TensorIndex> = launch.operands.iter().map(|&o| tensors[o]).collect();
            let written = operands
                .get(operands.len() - launch.kernel.as_kernel().n_writes())
                .copied();
            let (dispatch, max_longest) = match &launches {
                Launches::One(dispatch, most) => (dispatch.clone(), *most),
                Launches::Several(_) => (Dispatch::always(launch.kernel), None),
            };
            self.step(id, dispatch, operands);
            if let (Some(step), Some(written)) = (self.program.steps.last_mut(), written) {
                step.max_longest = max_longest;
                step.name = self.program.tensors[written].name.clone();
            }
        }
        Ok(out)
    }

    /// Returns the kernel for keys and values in a cache; `None` if they are rows of the batch.
    fn cached(&self, id: NodeId, of: &AttentionProblem) -> Result<Option<MhaCached>, String> {
        let operands = self.graph.operands(id);
        let is_cache = |slot: usize| matches!(self.graph.op(operands[slot]), Op::Cache { .. });
        let is_source =
            |slot: usize| matches!(self.graph.op(operands[slot]), Op::CrossCache { .. });
        let from_source = is_source(1) && is_source(2);
        match [is_cache(1), is_cache(2)] {
            [false, false] if from_source && self.options.attention == AttentionChoice::Auto => {}
            [false, false] if !from_source => return Ok(None),
            [true, true] if of.causal && self.options.attention == AttentionChoice::Auto => {}
            [true, true] | [false, false] if of.causal || from_source => {
                return Err(format!(
                    "{} attention was requested, but attention to a KV cache has only one kernel; remove the choice",
                    self.options.attention
                ));
            }
            [true, true] | [false, false] => {
                return Err(
                    "it attends to later tokens, which a cache does not contain; write `softmax(…, causal: true)`"
                        .to_owned(),
                );
            }
            _ => {
                return Err(
                    "the keys and the values must both be in a cache, or neither".to_owned(),
                );
            }
        }
        Ok(Some(MhaCached {
            heads: of.heads,
            kv_heads: of.kv_heads,
            head: of.head,
            scale: of.scale,
            q: of.q,
            keys: match from_source {
                true => Keys::Source,
                false => Keys::Own,
            },
            by: of.by,
            pool: self.program.pool(),
            dtype: self.dtype,
        }))
    }

    /// Checks whether the attention's decode kernel can append the new rows to the cache itself. If so, records the launches for
    /// [`Self::attention`]. The launch of `kernel` then appends only the rows of batches with longer sequences.
    pub(super) fn appending(
        &mut self,
        attention: Option<NodeId>,
        kernel: &KernelSpec,
        operands: &[TensorIndex],
    ) -> bool {
        let (Some(id), KernelSpec::AppendCache(append)) = (attention, kernel) else {
            return false;
        };
        let Op::Attention(of) = self.graph.op(id) else {
            return false;
        };
        // An error here is reported when the attention is lowered.
        let plain = self.cached(id, of).ok().flatten();
        let plain = plain.filter(|_| !self.options.invariant);
        let both = plain.map(CachedAttention);
        let both = both.and_then(|both| both.appending(self.options.machine, append.x));
        let Some([steps, pieces]) = both else {
            return false;
        };
        // Attention has the scales among its own operands.
        let params = append.params();
        let is_scale =
            |at: usize| matches!(params.get(at), Some(param) if SCALES.contains(&param.name));
        let own = operands.iter().enumerate();
        let own = own.filter(|&(at, _)| !is_scale(at));
        let appending = Appending {
            steps,
            pieces,
            operands: own.map(|(_, &operand)| operand).collect(),
        };
        self.appending.insert(id, appending);
        true
    }

    fn cached_attention(&mut self, id: NodeId, kernel: MhaCached) -> TensorIndex {
        let node = self.graph.node(id);
        let plain = Dispatch::always(kernel.clone().into());
        let mut tensors = self.bind(&plain, |lowering, name| {
            let of_cache = |slot| lowering.cache_scale(lowering.graph.operand(id, slot)?);
            match name {
                "keys" => lowering.operand(id, "k"),
                "values" => lowering.operand(id, "v"),
                "k_scale" => of_cache("k"),
                "v_scale" => of_cache("v"),
                other => lowering.operand(id, other),
            }
        });
        let out = self.tensor(&node.name, self.dtype, node.shape.clone(), UNPLACED);
        tensors.push(out);
        let machine = self.options.machine;
        let attention = CachedAttention(kernel);
        if let Some(appending) = self.appending.remove(&id) {
            let reads = tensors.iter().take(tensors.len() - 1);
            let operands = reads.chain(&appending.operands).chain([&out]);
            self.step(id, appending.steps, operands.copied().collect());
            self.step(id, appending.pieces, tensors);
            return out;
        }
        let dispatch = match self.options.invariant {
            true => attention.invariant(machine),
            false => attention.by_length(machine),
        };
        self.step(id, dispatch, tensors);
        out
    }

    fn launches(
        &self,
        attention: &Attention,
        longest: Option<u64>,
    ) -> Result<Launches, AttentionError> {
        let machine = self.options.machine;
        let invariant = self.options.invariant;
        let one = |dispatch: Dispatch<KernelSpec>| Launches::One(dispatch, None);
        Ok(match self.options.attention {
            AttentionChoice::Auto if invariant => one(attention.invariant(machine)),
            AttentionChoice::Auto => one(attention.by_length(machine, longest)),
            AttentionChoice::Short => {
                let most = MhaShort::max_len_for(attention.0.of.head, attention.0.dtype);
                let kernel = attention.short(most);
                kernel.check()?;
                Launches::One(Dispatch::always(kernel.into()), Some(most.into()))
            }
            AttentionChoice::Online => {
                attention.0.check()?;
                one(Dispatch::always(attention.0.clone().into()))
            }
            AttentionChoice::Grouped => Launches::Several(attention.grouped()?),
            AttentionChoice::Wgmma => {
                let dispatch = attention.wgmma(machine)?;
                match (invariant, dispatch.choices().last()) {
                    (true, Some(last)) => one(Dispatch::always(last.clone())),
                    _ => one(dispatch),
                }
            }
        })
    }

    /// Returns the maximum sequence length of the position tables, if there are any.
    fn longest(&self) -> Result<Option<u64>, String> {
        let mut longest: Option<u64> = None;
        for id in self.graph.topological() {
            let operands = self.graph.operands(id);
            let offsets = match self.graph.op(id) {
                Op::Embedding { offset } => vec![*offset],
                Op::EmbeddingLayerNorm { offsets, .. } => offsets.clone(),
                _ => continue,
            };
            for (i, &offset) in offsets.iter().enumerate() {
                let table = self.table(operands[i], operands[offsets.len() + i], offset)?;
                if table.ids == BatchInput::Positions {
                    let tokens = u64::from(table.rows.saturating_sub(offset));
                    longest = Some(longest.map_or(tokens, |longest| longest.min(tokens)));
                }
            }
        }
        Ok(longest)
    }
}
