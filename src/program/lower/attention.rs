//! Lowering of fused attention to one or more launches.

use std::collections::HashMap;

use super::{
    LowerError, LowerOptions, Lowering, UNPLACED,
    rules::{
        APPEND_IN_STEP, ATTENTION_TO_E4M3, Converting, Preparation, append_in_step,
        attention_to_e4m3,
    },
    unsupported,
};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        Fill, KernelSpec,
        attention::{AttentionError, Keys, MhaCached, MhaOnline, MhaShort},
        cache::SCALES,
        chain::Chain,
    },
    ops::{AttentionProblem, BatchInput},
    program::{
        AttentionChoice, TensorIndex,
        fusions::{Refused, RuleName},
    },
    select::{Attention, CachedAttention, Dispatch, Unfit},
};

/// The launches of an attention node.
enum Launches {
    /// A single launch. The second field is the max sequence length, if there is one.
    One(Dispatch<KernelSpec>, Option<u64>),
    /// Several consecutive launches, for any length.
    Several(Chain),
}

/// Finds the conversions to E4M3 that attention kernels can do themselves. Returns a map from the node of each such conversion to its
/// attention. Also returns a refusal for every other conversion of an attention's result.
pub(super) fn conversions(
    graph: &Graph,
    options: &LowerOptions,
) -> (HashMap<NodeId, Converting>, Vec<Refused>) {
    let (mut found, mut refused) = (HashMap::new(), Vec::new());
    let nodes = graph.topological().into_iter();
    for id in nodes.filter(|&id| *graph.op(id) == Op::ToE4m3 && !options.no_fused_launches) {
        match attention_to_e4m3(graph, options, id) {
            Ok(converting) => {
                found.insert(id, converting);
            }
            Err(unfit) => refused.extend(unfit_at(graph, id, ATTENTION_TO_E4M3, unfit)),
        }
    }
    (found, refused)
}

/// Returns the refusal of a rule at a node; `None` if the rule's pattern was not found.
fn unfit_at(graph: &Graph, id: NodeId, rule: RuleName, unfit: Unfit) -> Option<Refused> {
    match unfit {
        Unfit::Sites => None,
        Unfit::Because(because) => Some(Refused {
            rule: rule.0,
            at: graph.node(id).name.clone(),
            because,
        }),
    }
}

impl Lowering<'_> {
    /// Appends the launch of an attention that converts its result to E4M3. Returns the tensor of the converted result.
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
        self.fused(ATTENTION_TO_E4M3, &[launch.attention, conversion]);
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

    /// Returns the kernel for keys and values in a cache; `None` if both are rows of the batch.
    ///
    /// # Errors
    /// Returns an error if only the keys or only the values are in a cache, if another attention kernel was requested, or if attention to
    /// the sequence's own cache is not causal.
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

    /// Returns whether the attention's decode kernel can append the rows of `launch` to the cache itself. If so, records the attention's
    /// launches for [`Self::attention`]. `launch` is then needed only for batches in which a sequence has several new tokens.
    pub(super) fn appending(
        &mut self,
        id: NodeId,
        launch: &Preparation,
        operands: &[TensorIndex],
    ) -> bool {
        let plain = launch.attention.and_then(|id| match self.graph.op(id) {
            Op::Attention(of) => self.cached(id, of).ok().flatten(),
            _ => None,
        });
        let (machine, invariant) = (self.options.machine, self.options.invariant);
        let found = append_in_step(launch, plain, invariant, machine);
        let (mut appending, attention) = match (found, launch.attention) {
            (Ok(appending), Some(attention)) => (appending, attention),
            (Err(unfit), _) => {
                let refused = unfit_at(self.graph, id, APPEND_IN_STEP, unfit);
                self.refused.extend(refused);
                return false;
            }
            (Ok(_), None) => return false,
        };
        // The scales are omitted, because they are already operands of the attention.
        let params = launch.kernel.as_kernel().params();
        let is_scale =
            |at: usize| matches!(params.get(at), Some(param) if SCALES.contains(&param.name));
        let own = operands.iter().enumerate();
        let own = own.filter(|&(at, _)| !is_scale(at));
        appending.operands = own.map(|(_, &operand)| operand).collect();
        self.appending
            .insert(attention, (appending, launch.nodes.clone()));
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
        if let Some((appending, mut nodes)) = self.appending.remove(&id) {
            let reads = tensors.iter().take(tensors.len() - 1);
            let operands = reads.chain(&appending.operands).chain([&out]);
            self.step(id, appending.steps, operands.copied().collect());
            nodes.push(id);
            self.fused(APPEND_IN_STEP, &nodes);
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

    /// Returns the max sequence length that the tables of position embeddings support; `None` if there are no such tables.
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
