//! Launches before an attention, which prepare its operands. One launch computes several nodes.

use std::collections::{HashMap, HashSet};

use super::{
    LowerOptions, Lowering, UNPLACED,
    rules::{BEFORE_ATTENTION, Preparation, Writes},
};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::KernelSpec,
    program::{
        Program,
        fusions::{Refused, RuleName},
    },
    select::{Dispatch, Site, Unfit},
};

/// The launches of a graph that prepare operands of attention. Each launch computes several nodes.
#[derive(Default)]
pub(super) struct Prepared {
    /// Launches with their rules. The key is the launch's last node in lowering order, because all operands exist when it is lowered.
    launches: HashMap<NodeId, (RuleName, Preparation)>,
    nodes: HashSet<NodeId>,
    /// Rules that do not apply to an attention node although their pattern was found.
    pub refused: Vec<Refused>,
}

impl Prepared {
    pub(super) fn of(graph: &Graph, program: &Program, options: &LowerOptions) -> Self {
        if options.no_fused_launches {
            return Self::default();
        }
        let order = graph.topological();
        let place: HashMap<NodeId, usize> = order.iter().copied().zip(0..).collect();
        let mut prepared = Self::default();
        for &id in &order {
            let Op::Attention(of) = graph.op(id) else {
                continue;
            };
            for (rule, find) in BEFORE_ATTENTION {
                let launch = match find(graph, program, id, of) {
                    Err(Unfit::Sites) => continue,
                    Err(Unfit::Because(reason)) => Err(reason),
                    Ok(launch) => match launch.nodes.iter().any(|n| prepared.nodes.contains(n)) {
                        true => {
                            Err("a launch for another attention computes its operands".to_owned())
                        }
                        false => Ok(launch),
                    },
                };
                match launch {
                    Ok(launch) => {
                        prepared.nodes.extend(&launch.nodes);
                        let last = launch.nodes.iter().max_by_key(|&node| place.get(node));
                        if let Some(&last) = last {
                            prepared.launches.insert(last, (rule, launch));
                        }
                    }
                    Err(because) => prepared.refused.push(Refused {
                        rule: rule.0,
                        at: graph.node(id).name.clone(),
                        because,
                    }),
                }
            }
        }
        prepared
    }

    /// Returns whether a launch in `self` computes the node.
    pub(super) fn holds(&self, id: NodeId) -> bool {
        self.nodes.contains(&id)
    }

    /// Returns the launch whose last node is `id`.
    pub(super) fn launch(&self, id: NodeId) -> Option<&Preparation> {
        self.launches.get(&id).map(|(_, launch)| launch)
    }

    /// Returns the [`Site`] of the launch whose last node is `id`, and the node whose rows the launch reads. Returns `None` for a launch
    /// that only appends rows to a cache, because there is no other kernel for it.
    pub(super) fn site(&self, id: NodeId) -> Option<(Site, NodeId)> {
        let launch = self.launch(id)?;
        let KernelSpec::PrepareAttention(kernel) = &launch.kernel else {
            return None;
        };
        let site = Site::Prepare {
            kernel: kernel.clone(),
            is_alone: launch.is_alone,
        };
        Some((site, launch.read("x")?))
    }

    /// Returns the nodes of the launch whose last node is `id`; only `id` if there is no such launch.
    pub(super) fn nodes(&self, id: NodeId) -> Vec<NodeId> {
        let launch = self.launch(id);
        launch.map_or_else(|| vec![id], |launch| launch.nodes.clone())
    }
}

impl Lowering<'_> {
    /// Appends the launch whose last node is `id`, if there is one, and creates the tensors of its
    /// values.
    pub(super) fn prepared(&mut self, id: NodeId) {
        let Some((rule, launch)) = self.prepared.launches.get(&id).cloned() else {
            return;
        };
        if self.chains.holds(id) {
            self.chained(id);
            return;
        }
        let dispatch = Dispatch::always(launch.kernel.clone());
        let mut operands = self.bind(&dispatch, |lowering, name| lowering.operand(id, name));
        self.values_of(id);
        if let Writes::Cache { keys, .. } = launch.writes {
            operands.push(self.tensor_of[&keys]);
            let dispatch = match self.appending(id, &launch, &operands) {
                true => {
                    Dispatch::by_longest([(Some(1), None), (None, Some(launch.kernel.clone()))])
                }
                false => dispatch,
            };
            self.step(keys, dispatch, operands);
            self.fused(rule, &launch.nodes);
        }
    }

    /// Creates the tensors of all values of the launch whose last node is `id`. If there is no such launch, creates the tensor of the
    /// node's own value.
    pub(super) fn values_of(&mut self, id: NodeId) {
        let Some(launch) = self.prepared.launch(id) else {
            return self.rows_of(id);
        };
        match launch.writes {
            Writes::Rows(rows) => rows.into_iter().for_each(|id| self.rows_of(id)),
            Writes::Cache {
                queries,
                keys,
                values,
            } => {
                queries.into_iter().for_each(|id| self.rows_of(id));
                for cache in [keys, values] {
                    let tensor = self.cache_tensor(cache);
                    self.tensor_of.insert(cache, tensor);
                }
            }
        }
    }

    fn rows_of(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let element = self.element(id);
        let tensor = self.tensor(&node.name, element, node.shape.clone(), UNPLACED);
        self.tensor_of.insert(id, tensor);
    }

    /// Returns the nodes of the queries and of the keys of the launch whose last node is `id`. Returns `id` twice if there is no such
    /// launch, or if the launch has no queries.
    pub(super) fn value_nodes(&self, id: NodeId) -> [NodeId; 2] {
        let launch = self.prepared.launch(id);
        launch.and_then(Preparation::values).unwrap_or([id; 2])
    }
}
