//! Chains and the launches that compute them. A chain is a series of nodes in which each node reads the value of the previous one. `select`
//! decides which nodes of a chain share a launch, depending on the number of rows.

use std::collections::HashMap;

use super::{
    LowerError, LowerOptions, Lowering, Prepared, UNPLACED, attention::conversions, rows,
    rules::Converting, starting_program, unsupported, width,
};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        KernelSpec, Role,
        e4m3::ToE4m3,
        elementwise::{BinaryOp, Combine, Gate},
        gemm::GemmProblem,
        layernorm::{BiasResidualLayerNorm, LayerNorm},
        rms_norm::RmsNorm,
    },
    program::{TensorIndex, fusions::Refused},
    select::{
        Alternative, Chain, ChosenLaunch, Link, Operand, ScratchRows, SelectionInput, Site,
        equation,
    },
    tensor::{DType, Element, Extents, Format, Shape, Symbol},
};

/// The chains of a graph, and the launches that compute them.
pub(super) struct Chains {
    found: Found,
    /// Launches of each distinct chain.
    launches: Vec<Vec<ChosenLaunch>>,
}

/// Returns kernels that lowering does not select for batches of `tokens` tokens but that may be as fast as the selected ones. `more` is
/// passed to [`SelectionInput::alternatives`].
pub fn alternatives(
    graph: &Graph,
    options: &LowerOptions,
    tokens: u64,
    more: f64,
) -> Result<Vec<Alternative>, LowerError> {
    let prepared = Prepared::of(graph, &starting_program(graph, options), options);
    let found = Found::of(graph, options, &prepared, &conversions(graph, options).0)?;
    Ok(found.question(options).alternatives(tokens, more))
}

/// The chains of a graph, before launches are chosen for them.
struct Found {
    /// Nodes of each chain.
    nodes: Vec<Vec<NodeId>>,
    /// For each node, the index of its chain and its position in the chain.
    place_of: HashMap<NodeId, (usize, usize)>,
    /// Distinct chains, with the number of their occurrences.
    different: Vec<(Chain, usize)>,
    /// Index into `different` for each chain.
    covers: Vec<usize>,
}

impl Found {
    fn question<'a>(&'a self, options: &LowerOptions<'a>) -> SelectionInput<'a> {
        SelectionInput {
            chains: &self.different,
            machine: options.machine,
            timings: options.timings,
            may_fuse: !options.no_fused_launches,
            invariant: options.invariant,
            quantizes_rows: options.quantizes_rows,
        }
    }

    fn of(
        graph: &Graph,
        options: &LowerOptions,
        prepared: &Prepared,
        conversions: &HashMap<NodeId, Converting>,
    ) -> Result<Self, LowerError> {
        let order = graph.topological();
        let order_of: HashMap<NodeId, usize> = order.iter().copied().zip(0..).collect();
        let mut nodes: Vec<Vec<NodeId>> = Vec::new();
        let mut place_of: HashMap<NodeId, (usize, usize)> = HashMap::new();
        let mut chains: Vec<Chain> = Vec::new();
        for &id in &order {
            let op = graph.op(id);
            let failed = |problem| unsupported(graph, id, op, problem);
            let (site, feeder) = match prepared.site(id) {
                // The launch can join the preceding chain only if no other node reads the columns that it prepares.
                Some((site, x)) => {
                    let feeds = matches!(site, Site::Prepare { is_alone: true, .. });
                    (site, feeds.then_some(x))
                }
                None if conversions.contains_key(&id) => continue,
                None => match site(graph, id, options.dtype).map_err(failed)? {
                    Some(site) if !prepared.holds(id) => {
                        let first = first_operand(graph, id, &site);
                        (site, feeder(graph, id, first, &order_of))
                    }
                    _ => continue,
                },
            };
            let link = Link {
                site,
                is_private: graph.sole_consumer(id).is_some(),
            };
            match feeder.and_then(|before| place_of.get(&before)).copied() {
                Some((chain, _)) => {
                    nodes[chain].push(id);
                    chains[chain].links.push(link);
                    place_of.insert(id, (chain, nodes[chain].len() - 1));
                }
                None => {
                    place_of.insert(id, (chains.len(), 0));
                    nodes.push(vec![id]);
                    chains.push(Chain {
                        in_one_launch: has_packed_weight(&link.site) && !is_over_tokens(graph, id),
                        links: vec![link],
                    });
                }
            }
        }
        let mut different: Vec<(Chain, usize)> = Vec::new();
        let mut covers = Vec::new();
        for chain in chains {
            match different.iter().position(|(known, _)| *known == chain) {
                Some(at) => {
                    different[at].1 += 1;
                    covers.push(at);
                }
                None => {
                    covers.push(different.len());
                    different.push((chain, 1));
                }
            }
        }
        Ok(Self {
            nodes,
            place_of,
            different,
            covers,
        })
    }
}

impl Chains {
    pub(super) fn of(
        graph: &Graph,
        options: &LowerOptions,
        prepared: &Prepared,
        conversions: &HashMap<NodeId, Converting>,
    ) -> Result<Self, LowerError> {
        let found = Found::of(graph, options, prepared, conversions)?;
        let launches = found.question(options).answer();
        Ok(Self { found, launches })
    }

    /// Returns the rules of `select` whose pattern occurs in a chain but which were not used for `batch`, with the reasons.
    pub(super) fn refused(
        &self,
        graph: &Graph,
        options: &LowerOptions,
        batch: &Extents,
    ) -> Vec<Refused> {
        let refusals = self.found.question(options).refusals(&self.launches, batch);
        let chains = self.found.nodes.iter().zip(&self.found.covers);
        let of_chain = |(nodes, &cover): (&Vec<NodeId>, &usize)| {
            let own = refusals.iter().filter(|refusal| refusal.chain == cover);
            let own = own.map(|refusal| Refused {
                rule: refusal.rule,
                at: graph.node(nodes[refusal.first]).name.clone(),
                because: refusal.because.clone(),
            });
            own.collect::<Vec<_>>()
        };
        chains.flat_map(of_chain).collect()
    }

    /// Returns whether a node belongs to a chain.
    pub(super) fn holds(&self, id: NodeId) -> bool {
        self.found.place_of.contains_key(&id)
    }
}

/// Returns the [`Site`] of a node, which describes the node to `select`. Returns `None` if the node's operator cannot be in a chain.
fn site(graph: &Graph, id: NodeId, dtype: DType) -> Result<Option<Site>, String> {
    let first_width = || width(graph.shape(graph.operands(id)[0]));
    Ok(match *graph.op(id) {
        Op::Linear { epilogue } => Some(Site::Linear(GemmProblem {
            weight: match graph.operand(id, "weight").map(|weight| graph.op(weight)) {
                Some(Op::Quantize(format)) => *format,
                _ => dtype.into(),
            },
            ..GemmProblem::new(width(graph.shape(id))?, first_width()?, dtype, epilogue)
        })),
        Op::ScaledLinear { epilogue } => {
            let (n, k) = (width(graph.shape(id))?, first_width()?);
            let problem = GemmProblem::new(n, k, dtype, epilogue);
            Some(Site::Linear(problem.in_e4m3()))
        }
        Op::ToE4m3 => Some(Site::ToE4m3(ToE4m3 {
            width: first_width()?,
            dtype,
        })),
        Op::RmsNorm {
            eps,
            heads: 1,
            from: 0,
            centered: false,
        } if graph.shape(id) == graph.shape(graph.operands(id)[0]) => {
            Some(Site::RmsNorm(RmsNorm::of_rows(first_width()?, eps, dtype)))
        }
        Op::Add => residual_of_norm(graph, id)
            .map(|residual| -> Result<Site, String> {
                let (how, width) = (BinaryOp::Sum, first_width()?);
                let kernel = Combine { how, width, dtype };
                Ok(Site::NormSum { kernel, residual })
            })
            .transpose()?,
        Op::Gate(activation) => Some(Site::Gate(Gate {
            activation,
            width: width(graph.shape(id))?,
            dtype,
        })),
        Op::LayerNorm { eps } => Some(Site::LayerNorm(LayerNorm::new(first_width()?, eps, dtype))),
        Op::BiasResidualLayerNorm { eps, bias } => Some(Site::SumLayerNorm(
            BiasResidualLayerNorm::new(first_width()?, eps, dtype, bias),
        )),
        _ => None,
    })
}

fn has_packed_weight(site: &Site) -> bool {
    matches!(site, Site::Linear(problem) if matches!(problem.weight, Format::Scaled(_)))
}

/// Returns whether the rows of a node's value are the tokens of the batch.
fn is_over_tokens(graph: &Graph, id: NodeId) -> bool {
    rows(graph.shape(id)).as_symbol() == Some(Symbol::Tokens)
}

/// Returns the names of the parameters that a kernel writes.
fn written(kernel: &KernelSpec) -> Vec<&'static str> {
    let params = kernel.as_kernel().params().into_iter();
    let written = params.filter(|param| matches!(param.role, Role::Write { .. }));
    written.map(|param| param.name).collect()
}

/// Returns the name of the residual operand if `sum` adds a residual to an RMSNorm of whole rows, and is the only reader of this norm.
/// Returns `None` for other sums.
fn residual_of_norm(graph: &Graph, sum: NodeId) -> Option<&'static str> {
    let is_norm = |slot| {
        graph.operand(sum, slot).is_some_and(|id| {
            let is_whole = matches!(
                graph.op(id),
                Op::RmsNorm {
                    heads: 1,
                    from: 0,
                    centered: false,
                    ..
                }
            );
            is_whole && graph.sole_consumer(id) == Some(sum)
        })
    };
    match (is_norm("a"), is_norm("b")) {
        (true, _) => Some("b"),
        (false, true) => Some("a"),
        (false, false) => None,
    }
}

/// Returns the operand through which the node `id` can continue a chain. The preceding node of the chain must compute this operand.
fn first_operand(graph: &Graph, id: NodeId, site: &Site) -> Option<NodeId> {
    match site {
        Site::NormSum { residual: "a", .. } => graph.operand(id, "b"),
        _ => graph.operands(id).first().copied(),
    }
}

/// Returns `before` if the node `id` can follow it in a chain; otherwise `None`. There are three conditions:
///
/// - No other node reads the value of `before` earlier than `id`. A fused launch would compute the value too late for such a reader.
/// - `id` reads the value only once.
/// - The rows of both nodes are the tokens of the batch.
fn feeder(
    graph: &Graph,
    id: NodeId,
    before: Option<NodeId>,
    order_of: &HashMap<NodeId, usize>,
) -> Option<NodeId> {
    let before = before?;
    let readers = graph.consumers(before).into_iter();
    let first = readers.min_by_key(|reader| order_of.get(reader));
    let operands = graph.operands(id);
    let n_reads = operands
        .iter()
        .filter(|&&operand| operand == before)
        .count();
    let feeds = first == Some(id)
        && n_reads == 1
        && is_over_tokens(graph, before)
        && is_over_tokens(graph, id);
    feeds.then_some(before)
}

impl Lowering<'_> {
    /// Appends the launches of a chain's node, and creates the tensor of its value if a launch stores it.
    pub(super) fn chained(&mut self, id: NodeId) {
        let found = &self.chains.found;
        let (chain, place) = found.place_of[&id];
        let (nodes, cover) = (found.nodes[chain].clone(), found.covers[chain]);
        let launches = &self.chains.launches[cover];
        let is_of_node = |launch: &ChosenLaunch, operand: &Operand| matches!(operand, Operand::Value(site) if launch.first + site == place);
        let mut all = launches.iter();
        if all.any(|launch| {
            let mut values = launch.bindings.values.iter();
            values.any(|(_, operand)| is_of_node(launch, operand))
        }) {
            self.values_of(id);
        }
        let launches = &self.chains.launches[cover];
        let own: Vec<ChosenLaunch> = launches
            .iter()
            .filter(|l| l.site == place)
            .cloned()
            .collect();
        for launch in own {
            let of_site = |site: usize| nodes[launch.first + site];
            let tensor = |lowering: &mut Self, operand| match operand {
                Operand::Value(site) => {
                    Some(lowering.tensor_of[&lowering.value_nodes(of_site(site))[0]])
                }
                Operand::Second(site) => {
                    Some(lowering.tensor_of[&lowering.value_nodes(of_site(site))[1]])
                }
                Operand::Input { site, name } => lowering.operand(of_site(site), name),
                Operand::Scratch {
                    site,
                    name,
                    element,
                    columns,
                    rows,
                } => Some(lowering.scratch(of_site(site), name, element, (rows, columns))),
            };
            let bindings = &launch.bindings;
            let operands = self.bind(&launch.dispatch, |lowering, name| {
                match bindings.value(name) {
                    Some(operand) => tensor(lowering, operand),
                    None => bindings
                        .operands_of
                        .iter()
                        .find_map(|&site| lowering.operand(of_site(site), name)),
                }
            });
            let written = launch
                .dispatch
                .choices()
                .next()
                .map(written)
                .unwrap_or_default();
            let written = written.into_iter().filter_map(|name| bindings.value(name));
            let written: Vec<TensorIndex> = written
                .filter_map(|operand| tensor(self, operand))
                .collect();
            let operands = operands.into_iter().chain(written).collect();
            self.step(self.value_nodes(id)[0], launch.dispatch, operands);
            let sites = nodes[launch.first..][..launch.sites].iter();
            let computed: Vec<NodeId> = sites.flat_map(|&id| self.prepared.nodes(id)).collect();
            let equation = equation(launch.rule).unwrap_or_default();
            self.fused((launch.rule, equation), &computed);
        }
    }

    /// Returns a scratch tensor of an implementation, created at first use.
    fn scratch(
        &mut self,
        id: NodeId,
        name: &'static str,
        element: Element,
        (scratch_rows, columns): (ScratchRows, u64),
    ) -> TensorIndex {
        if let Some(&known) = self.scratch_of.get(&(id, name)) {
            return known;
        }
        let node = self.graph.node(id);
        let rows = match scratch_rows {
            ScratchRows::OfBatch { more } => &rows(&node.shape) + &more.into(),
            ScratchRows::Fixed(rows) => rows.into(),
        };
        let shape = Shape::new([rows, columns.into()]);
        let tensor = self.tensor(&format!("{}.{name}", node.name), element, shape, UNPLACED);
        self.scratch_of.insert((id, name), tensor);
        tensor
    }
}
