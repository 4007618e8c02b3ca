//! Launches that prepare the operands of attention. One launch computes several nodes from the rows of a projection.

use std::collections::{HashMap, HashSet};

use super::{LowerOptions, Lowering, UNPLACED, width};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::{
        KernelSpec,
        cache::{AppendCache, Pool, SCALES},
        prepare_attention::PrepareAttention,
    },
    ops::{AttentionProblem, HeadView, Rotation},
    program::{Cache, Program},
    select::{Dispatch, Site},
    tensor::DType,
};

/// The launches of a graph that compute several nodes each.
#[derive(Default)]
pub(super) struct Prepared {
    /// Launches, keyed by the node that comes last in lowering order. All operands exist when this node is lowered.
    launches: HashMap<NodeId, Preparation>,
    nodes: HashSet<NodeId>,
}

/// One launch that prepares operands of attention.
#[derive(Clone)]
pub(super) struct Preparation {
    kernel: KernelSpec,
    /// Operands that are nodes of the graph, by parameter name. The first is `x`.
    reads: Vec<(&'static str, NodeId)>,
    writes: Writes,
    /// Whether only this launch reads the columns of `x` that it prepares.
    is_alone: bool,
    /// The attention, if it is the only reader of the caches and their rows are appended unchanged.
    attention: Option<NodeId>,
}

/// Results of a launch.
#[derive(Clone, Copy)]
enum Writes {
    /// Rows of queries and of keys.
    Rows([NodeId; 2]),
    /// Rows of queries, if any, and keys and values in two caches.
    Cache {
        queries: Option<NodeId>,
        keys: NodeId,
        values: NodeId,
    },
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
            let Some((nodes, launch)) = find(graph, program, id, of) else {
                continue;
            };
            // The launch of an earlier attention that reads the same caches may already compute some of these nodes.
            if nodes.iter().any(|node| prepared.nodes.contains(node)) {
                continue;
            }
            let launch = Preparation {
                is_alone: launch.is_alone_in(graph, &nodes, id, of),
                attention: launch.is_added_for(graph, id).then_some(id),
                ..launch
            };
            if let Some(&last) = nodes.iter().max_by_key(|&node| place.get(node)) {
                prepared.launches.insert(last, launch);
                prepared.nodes.extend(nodes);
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
        self.launches.get(&id)
    }

    /// Returns the site of the launch whose last node is `id`, and the node of the rows that it reads. A launch that only appends rows to a
    /// cache is not a site, because no other kernel can do this.
    pub(super) fn site(&self, id: NodeId) -> Option<(Site, NodeId)> {
        let launch = self.launches.get(&id)?;
        let KernelSpec::PrepareAttention(kernel) = &launch.kernel else {
            return None;
        };
        let site = Site::Prepare {
            kernel: kernel.clone(),
            is_alone: launch.is_alone,
        };
        Some((site, launch.read("x")?))
    }
}

impl Preparation {
    /// Returns whether this launch and the attention, which reads its values from `x`, are the only readers of `x`, and read separate
    /// columns.
    fn is_alone_in(
        &self,
        graph: &Graph,
        nodes: &[NodeId],
        attention: NodeId,
        of: &AttentionProblem,
    ) -> bool {
        let (KernelSpec::PrepareAttention(kernel), Some(x)) = (&self.kernel, self.read("x")) else {
            return false;
        };
        let HeadView::TokenMajor { offset, stride } = of.v else {
            return false;
        };
        let [queries, keys, _] = kernel.columns;
        let mut parts = [
            (queries, of.heads),
            (keys, of.kv_heads),
            (offset, of.kv_heads),
        ];
        parts.sort_unstable();
        let apart = parts
            .windows(2)
            .all(|pair| pair[0].0 + pair[0].1 * kernel.head <= pair[1].0);
        let operands = graph.operands(attention);
        let mut places = operands.iter().enumerate();
        let as_values = places.all(|(place, &o)| (o == x) == (place == 2));
        let others = graph
            .consumers(x)
            .into_iter()
            .filter(|c| !nodes.contains(c));
        kernel.pool.is_none()
            && others.eq([attention])
            && as_values
            && stride == kernel.row
            && apart
            && !graph.is_output(x)
    }

    /// Returns whether the launch appends rows unchanged to caches that only `attention` reads.
    fn is_added_for(&self, graph: &Graph, attention: NodeId) -> bool {
        let Writes::Cache {
            queries: None,
            keys,
            values,
        } = self.writes
        else {
            return false;
        };
        let mut caches = [keys, values].into_iter();
        caches.all(|cache| graph.consumers(cache).iter().eq([&attention]))
    }

    /// Returns the node that a parameter reads.
    pub(super) fn read(&self, param: &str) -> Option<NodeId> {
        let mut reads = self.reads.iter();
        reads
            .find(|(name, _)| *name == param)
            .map(|&(_, node)| node)
    }

    /// Returns the nodes of the launch's two values; `None` if there are no queries.
    fn values(&self) -> Option<[NodeId; 2]> {
        match self.writes {
            Writes::Rows(rows) => Some(rows),
            Writes::Cache { queries, keys, .. } => Some([queries?, keys]),
        }
    }
}

/// Heads in the rows of a projection, and the operators between the projection and attention.
struct Heads<'a> {
    /// Rows that contain the heads.
    x: NodeId,
    /// First column of the heads in `x`.
    from: u32,
    norm: Option<(f32, NodeId)>,
    rotation: Option<&'a Rotation>,
    /// Nodes of the norm and the rotation, if any.
    nodes: Vec<NodeId>,
}

impl<'a> Heads<'a> {
    /// Follows a value of `heads` heads of `head` columns back through an optional rotation and an optional norm.
    fn of(graph: &'a Graph, value: NodeId, heads: u32, head: u32) -> Option<Self> {
        let mut of = Self {
            x: value,
            from: 0,
            norm: None,
            rotation: None,
            nodes: Vec::new(),
        };
        if let Op::Rotary {
            rotation,
            from,
            head: turned,
        } = graph.op(of.x)
        {
            if (rotation.heads, *turned) != (heads, head) {
                return None;
            }
            of.nodes.push(of.x);
            of.rotation = Some(rotation);
            of.from = *from;
            of.x = graph.operands(of.x)[0];
        }
        let whole = width(graph.shape(of.x)).ok()? == heads * head && of.from == 0;
        let vanishes = of.nodes.is_empty() || graph.sole_consumer(of.x).is_some();
        if let Op::RmsNorm {
            eps,
            heads: normed,
            from,
        } = *graph.op(of.x)
            && normed == heads
            && whole
            && vanishes
        {
            let operands = graph.operands(of.x);
            of.nodes.push(of.x);
            of.norm = Some((eps, operands[1]));
            of.from = from;
            of.x = operands[0];
        }
        Some(of)
    }

    /// Returns whether `self` and `other` are prepared in the same way from the same rows.
    fn like(&self, other: &Self) -> bool {
        let angles = |r: &'a Rotation| (&r.frequencies, r.factor);
        self.x == other.x
            && self.norm.map(|(eps, _)| eps) == other.norm.map(|(eps, _)| eps)
            && self.rotation.map(angles) == other.rotation.map(angles)
    }
}

/// Returns a launch that prepares operands of an attention, and the nodes that it computes; `None` if no launch can.
fn find(
    graph: &Graph,
    program: &Program,
    attention: NodeId,
    of: &AttentionProblem,
) -> Option<(Vec<NodeId>, Preparation)> {
    let operands = graph.operands(attention);
    let &[query, keys, values] = operands.first_chunk()?;
    if !matches!(graph.op(keys), Op::Cache { .. }) {
        return rows(graph, program.dtype, [query, keys], of);
    }
    let columns = |cache| cached(graph, program, cache, of);
    let ((key_cache, key_from), (value_cache, value_from)) = (columns(keys)?, columns(values)?);
    // One launch writes keys and values as the heads of one cache, so the two caches must be adjacent.
    if value_cache != key_cache + 1 {
        return None;
    }
    let value_rows = graph.operands(values)[0];
    let rows = graph.operands(keys)[0];
    let (pool, dtype) = (program.pool(), program.dtype);
    let key = Heads::of(graph, rows, of.kv_heads, of.head)?;
    if key.nodes.is_empty() {
        let kernel = append(of, rows, [key_from, value_from], graph, pool, dtype)?;
        let reads = [("x", rows)].into_iter();
        let launch = Preparation {
            kernel: kernel.into(),
            reads: reads.chain(scales(graph, keys, values)).collect(),
            writes: Writes::Cache {
                queries: None,
                keys,
                values,
            },
            is_alone: false,
            attention: None,
        };
        return (rows == value_rows).then(|| (vec![keys, values], launch));
    }
    let serves = key_from == 0 && value_rows == key.x;
    let queries = together(graph, query, [rows, keys], &key, of).filter(|_| serves)?;
    let kernel = PrepareAttention {
        columns: [queries.from, key.from, value_from],
        pool: Some(pool),
        ..kernel_of(graph, &queries, &key, of, dtype)?
    };
    let mut launch = preparation(kernel, &queries, &key)?;
    launch.writes = Writes::Cache {
        queries: Some(query),
        keys,
        values,
    };
    launch.reads.extend(scales(graph, keys, values));
    let mut nodes = vec![keys, values];
    nodes.extend(queries.nodes);
    nodes.extend(key.nodes);
    Some((nodes, launch))
}

/// Returns the scales of two caches, by the name of the parameter.
fn scales(
    graph: &Graph,
    keys: NodeId,
    values: NodeId,
) -> impl Iterator<Item = (&'static str, NodeId)> {
    let caches = SCALES.into_iter().zip([keys, values]);
    caches.filter_map(|(name, cache)| Some((name, graph.operand(cache, "scale")?)))
}

/// Does the same as [`find`] for attention whose keys are rows of the batch instead of a cache.
fn rows(
    graph: &Graph,
    dtype: DType,
    [query, keys]: [NodeId; 2],
    of: &AttentionProblem,
) -> Option<(Vec<NodeId>, Preparation)> {
    let key = Heads::of(graph, keys, of.kv_heads, of.head)?;
    let queries = together(graph, query, [keys, keys], &key, of)?;
    let (own, all) = (rows_of(of.kv_heads, of.head), [query, keys]);
    // If queries and keys are the same value, one launch would write it twice.
    let serves = query != keys
        && of.k == own
        && !key.nodes.is_empty()
        && all.iter().all(|&x| !graph.is_output(x));
    let kernel = kernel_of(graph, &queries, &key, of, dtype).filter(|_| serves)?;
    let launch = preparation(kernel, &queries, &key)?;
    let nodes = queries.nodes.into_iter().chain(key.nodes).collect();
    Some((nodes, launch))
}

/// Returns the view of rows that contain only these heads.
fn rows_of(heads: u32, head: u32) -> HeadView {
    HeadView::TokenMajor {
        offset: 0,
        stride: heads * head,
    }
}

/// Returns the queries if they are prepared like the keys, and if queries and keys each have a single reader.
fn together<'a>(
    graph: &'a Graph,
    query: NodeId,
    [rows, keys]: [NodeId; 2],
    key: &Heads<'a>,
    of: &AttentionProblem,
) -> Option<Heads<'a>> {
    let queries = Heads::of(graph, query, of.heads, of.head)?;
    let ours = |id| graph.sole_consumer(id).is_some();
    let serves = width(graph.shape(rows)).ok()? == of.kv_heads * of.head
        && of.q == rows_of(of.heads, of.head)
        && queries.like(key)
        && ours(query)
        && (ours(rows) || rows == keys);
    serves.then_some(queries)
}

/// Returns the kernel that writes queries and keys as rows, without a cache.
fn kernel_of(
    graph: &Graph,
    queries: &Heads<'_>,
    key: &Heads<'_>,
    of: &AttentionProblem,
    dtype: DType,
) -> Option<PrepareAttention> {
    Some(PrepareAttention {
        heads: of.heads,
        kv_heads: of.kv_heads,
        head: of.head,
        // Values are not copied.
        columns: [queries.from, key.from, key.from],
        row: width(graph.shape(key.x)).ok()?,
        norm: key.norm.map(|(eps, _)| eps),
        rotation: queries.rotation.cloned(),
        pool: None,
        dtype,
    })
}

/// Returns the launch of a kernel that writes queries and keys as rows.
fn preparation(
    kernel: PrepareAttention,
    queries: &Heads<'_>,
    key: &Heads<'_>,
) -> Option<Preparation> {
    kernel.check().ok()?;
    let gammas = [("q_gamma", queries), ("k_gamma", key)].into_iter();
    let gammas = gammas.filter_map(|(name, heads)| Some((name, heads.norm?.1)));
    let reads = [("x", key.x)].into_iter().chain(gammas);
    let written = |heads: &Heads<'_>| heads.nodes.first().copied();
    Some(Preparation {
        reads: reads.collect(),
        writes: Writes::Rows([written(queries)?, written(key)?]),
        kernel: kernel.into(),
        is_alone: false,
        attention: None,
    })
}

/// Returns the index of a cache and the first column of its rows; `None` unless the cache has the layout of `of` and only attention reads
/// it.
fn cached(
    graph: &Graph,
    program: &Program,
    cache: NodeId,
    of: &AttentionProblem,
) -> Option<(usize, u32)> {
    let Op::Cache {
        name,
        from,
        heads,
        head,
        ..
    } = graph.op(cache)
    else {
        return None;
    };
    let readers = graph.consumers(cache);
    let is_attention = |&reader: &NodeId| matches!(graph.op(reader), Op::Attention(_));
    let fits = (*heads, *head) == (of.kv_heads, of.head);
    let is_own = |c: &Cache| c.name == *name;
    let index = program.caches.iter().position(is_own)?;
    (fits && !graph.is_output(cache) && readers.iter().all(is_attention)).then_some((index, *from))
}

/// Returns the kernel that appends keys and values as the heads of one cache. Returns `None` unless their columns are adjacent.
fn append(
    of: &AttentionProblem,
    rows: NodeId,
    [keys, values]: [u32; 2],
    graph: &Graph,
    pool: Pool,
    dtype: DType,
) -> Option<AppendCache> {
    let x = HeadView::TokenMajor {
        offset: keys,
        stride: width(graph.shape(rows)).ok()?,
    };
    (values == keys + of.kv_heads * of.head).then(|| AppendCache {
        heads: 2 * of.kv_heads,
        head: of.head,
        x,
        of_sequence: false,
        pool,
        dtype,
    })
}

impl Lowering<'_> {
    /// Appends the launch whose last node is `id`, if there is one, and creates the tensors of its
    /// values.
    pub(super) fn prepared(&mut self, id: NodeId) {
        let Some(launch) = self.prepared.launches.get(&id).cloned() else {
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
            let dispatch = match self.appending(launch.attention, &launch.kernel, &operands) {
                true => Dispatch::by_longest([(Some(1), None), (None, Some(launch.kernel))]),
                false => dispatch,
            };
            self.step(keys, dispatch, operands);
        }
    }

    /// Creates the tensors for `id`. If `id` is the last node of a launch, these are the tensors of all values of the launch. Otherwise,
    /// this is the tensor of the node's own value.
    pub(super) fn values_of(&mut self, id: NodeId) {
        let Some(launch) = self.prepared.launches.get(&id) else {
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

    /// Returns the nodes of the two values of the launch whose last node is `id`. Without such a launch, returns `id` twice.
    pub(super) fn value_nodes(&self, id: NodeId) -> [NodeId; 2] {
        let launch = self.prepared.launches.get(&id);
        launch.and_then(Preparation::values).unwrap_or([id; 2])
    }
}
