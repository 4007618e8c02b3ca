//! Rule: one launch computes the norms and rotations of queries and keys, and appends keys and values to caches. All of these must read the
//! same rows.

use super::{Preparation, Writes, cached, quoted, scales};
use crate::{
    graph::{Graph, NodeId, Op},
    kernels::prepare_attention::PrepareAttention,
    ops::{AttentionProblem, HeadView, Rotation},
    program::{Program, fusions::RuleName, lower::width},
    select::{Unfit, require},
};

pub(super) const NAME: RuleName = (
    "prepare attention",
    "rotary(norm(x)) of queries and keys, cache ← keys, values",
);

pub(super) fn find(
    graph: &Graph,
    program: &Program,
    attention: NodeId,
    of: &AttentionProblem,
) -> Result<Preparation, Unfit> {
    let operands = graph.operands(attention);
    let &[query, keys, values] = operands.first_chunk().ok_or(Unfit::Sites)?;
    let is_cached = matches!(graph.op(keys), Op::Cache { .. });
    let rows = if is_cached {
        graph.operands(keys)[0]
    } else {
        keys
    };
    let key = Heads::of(graph, rows, of.kv_heads, of.head)?;
    if key.nodes.is_empty() {
        return Err(Unfit::Sites);
    }
    let queries = together(graph, query, [rows, keys], &key, of)?;
    let mut kernel = PrepareAttention {
        heads: of.heads,
        kv_heads: of.kv_heads,
        head: of.head,
        // The third column, that of the values, is a placeholder: values are copied only if there is a cache.
        columns: [queries.from, key.from, key.from],
        row: width(graph.shape(key.x)).map_err(Unfit::Because)?,
        norm: key.norm.map(|(eps, _)| eps),
        rotation: queries.rotation.cloned(),
        pool: None,
        dtype: program.dtype,
    };
    let nodes = queries.nodes.iter().chain(&key.nodes).copied().collect();
    let gammas = [("q_gamma", &queries), ("k_gamma", &key)].into_iter();
    let gammas = gammas.filter_map(|(name, heads)| Some((name, heads.norm?.1)));
    let mut launch = Preparation {
        reads: [("x", key.x)].into_iter().chain(gammas).collect(),
        nodes,
        writes: Writes::Rows([query, rows]),
        kernel: kernel.clone().into(),
        is_alone: false,
        attention: None,
    };
    if is_cached {
        let [key_from, value_from] = cached(graph, program, [keys, values], of)?;
        let is_same = key_from == 0 && graph.operands(values)[0] == key.x;
        require(is_same, "keys and values are not columns of the same rows")?;
        kernel.columns[2] = value_from;
        kernel.pool = Some(program.pool());
        launch.writes = Writes::Cache {
            queries: Some(query),
            keys,
            values,
        };
        launch.reads.extend(scales(graph, [keys, values]));
        launch.nodes.extend([keys, values]);
    } else {
        // If queries and keys are the same value, one launch would write it twice.
        require(query != keys, "queries and keys are the same value")?;
        let is_whole = of.k == rows_of(of.kv_heads, of.head);
        require(is_whole, "keys are columns of wider rows")?;
        let is_output = graph.is_output(query) || graph.is_output(keys);
        require(!is_output, "queries or keys are an output")?;
        launch.is_alone = is_alone(graph, &kernel, &launch, attention, of);
    }
    kernel.check().map_err(Unfit::Because)?;
    launch.kernel = kernel.into();
    Ok(launch)
}

/// Returns whether the launch and the attention are the only readers of the rows `x`, and read different columns of them. The attention
/// must read its values, and no other operand, directly from these rows.
fn is_alone(
    graph: &Graph,
    kernel: &PrepareAttention,
    launch: &Preparation,
    attention: NodeId,
    of: &AttentionProblem,
) -> bool {
    let (Some(x), HeadView::TokenMajor { offset, stride }) = (launch.read("x"), of.v) else {
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
    let readers = graph.consumers(x).into_iter();
    let others = readers.filter(|reader| !launch.nodes.contains(reader));
    others.eq([attention]) && as_values && stride == kernel.row && apart && !graph.is_output(x)
}

/// Heads in the rows of a projection, and the operators between the projection and attention.
pub(super) struct Heads<'a> {
    /// Rows that contain the heads.
    x: NodeId,
    /// First column of the heads in `x`.
    from: u32,
    norm: Option<(f32, NodeId)>,
    rotation: Option<&'a Rotation>,
    /// Nodes of the norm and the rotation, if any.
    pub nodes: Vec<NodeId>,
}

impl<'a> Heads<'a> {
    /// Traces `value` back to its projection, through an optional rotation and an optional norm. The value has `heads` heads of `head`
    /// columns each.
    pub fn of(graph: &'a Graph, value: NodeId, heads: u32, head: u32) -> Result<Self, Unfit> {
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
            let fits = (rotation.heads, *turned) == (heads, head);
            require(
                fits,
                format!("{} rotates other heads", quoted(graph, value)),
            )?;
            of.nodes.push(of.x);
            of.rotation = Some(rotation);
            of.from = *from;
            of.x = graph.operands(of.x)[0];
        }
        let whole = width(graph.shape(of.x)) == Ok(heads * head) && of.from == 0;
        let vanishes = of.nodes.is_empty() || graph.sole_consumer(of.x).is_some();
        if let Op::RmsNorm {
            eps,
            heads: normed,
            from,
            centered: false,
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
        Ok(of)
    }

    /// Returns whether `self` and `other` are prepared in the same way from the same rows. The weights of the norms may differ.
    fn like(&self, other: &Self) -> bool {
        let angles = |r: &'a Rotation| (&r.frequencies, r.factor);
        self.x == other.x
            && self.norm.map(|(eps, _)| eps) == other.norm.map(|(eps, _)| eps)
            && self.rotation.map(angles) == other.rotation.map(angles)
    }
}

/// Returns the view of rows that contain only these heads.
fn rows_of(heads: u32, head: u32) -> HeadView {
    HeadView::TokenMajor {
        offset: 0,
        stride: heads * head,
    }
}

/// Returns the heads of the queries. Queries and keys must be prepared in the same way from the same rows. Both must have a single reader,
/// except that several attention nodes may read the same keys.
fn together<'a>(
    graph: &'a Graph,
    query: NodeId,
    [rows, keys]: [NodeId; 2],
    key: &Heads<'a>,
    of: &AttentionProblem,
) -> Result<Heads<'a>, Unfit> {
    let queries = Heads::of(graph, query, of.heads, of.head)?;
    let whole = of.kv_heads * of.head;
    let is_whole = width(graph.shape(rows)) == Ok(whole) && of.q == rows_of(of.heads, of.head);
    require(is_whole, "queries or keys are columns of wider rows")?;
    let is_alike = queries.like(key);
    require(
        is_alike,
        "queries are prepared from other rows than keys, or in another way",
    )?;
    // Several attention nodes may read the same keys. A reader of another kind could need the keys before the launch.
    let is_attention = |&reader: &NodeId| matches!(graph.op(reader), Op::Attention(_));
    let are_attended = rows == keys && graph.consumers(keys).iter().all(is_attention);
    for id in [query, rows] {
        let is_ours = graph.sole_consumer(id).is_some() || (id == rows && are_attended);
        require(is_ours, format!("{} has other readers", quoted(graph, id)))?;
    }
    Ok(queries)
}
