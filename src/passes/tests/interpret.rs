//! A reference interpreter of graphs in f64. Passes must not change its results.

mod heads;
pub mod rows;

use std::collections::{BTreeMap, HashMap};

use self::{
    heads::{Heads, transpose},
    rows::{add, add_bias, l2_normalize, layer_norm, rows},
};
use crate::{
    graph::{
        Bound, CacheRows, Graph, NodeId, Op, WeightExpr, interleaved_row, resized_heads_at, slope,
    },
    ops::{AttentionProblem, BatchInput, Epilogue, HeadView, Side, activate_f64},
    tensor::{Element, Extents, row_scale},
};

/// A batch of sequences with the given lengths. Ids depend on the positions.
pub struct Batch {
    starts: Vec<usize>,
    extents: Extents,
}

impl Batch {
    pub fn new(lens: &[u32]) -> Self {
        let mut starts = vec![0];
        for &n in lens {
            starts.push(starts[starts.len() - 1] + n as usize);
        }
        Self {
            starts,
            extents: Extents::of(lens).unwrap().with_sources(lens, lens),
        }
    }

    fn tokens(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the first token and the length of each sequence.
    fn sequences(&self) -> impl Iterator<Item = (usize, usize)> {
        self.starts.windows(2).map(|w| (w[0], w[1] - w[0]))
    }

    pub fn ids(&self, meta: BatchInput) -> Vec<f64> {
        let mut ids = Vec::new();
        for (start, n) in self.sequences() {
            ids.extend((0..n).map(|i| match meta {
                BatchInput::TokenIds => ((start + i) * 7 + 3) % 13,
                BatchInput::PreviousIds { first } if i == 0 => first as usize,
                BatchInput::PreviousIds { .. } => ((start + i - 1) * 7 + 3) % 13,
                BatchInput::TypeIds => usize::from(2 * i > n),
                BatchInput::Positions => i,
                other => panic!("{other:?} is not an input of a description"),
            } as f64));
        }
        ids
    }
}

/// Evaluates every value that the outputs need, by name.
pub fn evaluate(graph: &Graph, batch: &Batch) -> BTreeMap<String, Vec<f64>> {
    let mut values: HashMap<NodeId, Vec<f64>> = HashMap::new();
    let mut named = BTreeMap::new();
    for id in graph.topological() {
        let operands = graph.operands(id);
        let reads: Vec<&[f64]> = operands.iter().map(|o| values[o].as_slice()).collect();
        let widths: Vec<usize> = operands.iter().map(|&o| width(graph, o)).collect();
        let value = match graph.op(id) {
            // A cross cache holds rows of source sequences. The interpreter uses the batch's own sequences as sources.
            Op::CrossCache { name, .. } => {
                let kept = values.keys().find(|&&node| match graph.op(node) {
                    Op::Cache { name: of, .. } => of == name,
                    _ => false,
                });
                let kept = &values[kept.expect("a part before added to it")];
                let width = width(graph, id);
                // A cache with one position per sequence is repeated for each token of the sequence.
                match kept.len() == batch.tokens() * width {
                    true => kept.clone(),
                    false => {
                        let rows = batch.sequences().zip(kept.chunks(width));
                        rows.flat_map(|((_, n), row)| row.repeat(n)).collect()
                    }
                }
            }
            op => apply(op, &reads, &widths, batch),
        };
        let elements = graph.shape(id).elements().eval(&batch.extents).unwrap();
        assert_eq!(value.len() as u64, elements, "{}", graph.node(id).name);
        named.insert(graph.node(id).name.clone(), value.clone());
        values.insert(id, value);
    }
    named
}

fn width(graph: &Graph, id: NodeId) -> usize {
    graph.shape(id).width().unwrap_or(1) as usize
}

/// Returns a function from the index of an element of the weight `name` to the element, in [−1, 1).
pub fn stored(name: &str) -> impl Fn(u64) -> f64 + Copy + use<> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    });
    move |i| {
        let mut h = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
        h ^= h >> 31;
        h = h.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h ^= h >> 29;
        (h >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

fn weight(expr: &WeightExpr) -> Vec<f64> {
    match expr {
        WeightExpr::Stored { name, dims } => (0..dims.iter().product()).map(stored(name)).collect(),
        WeightExpr::Transposed { name, dims } => {
            let (rows, columns) = (dims[0], dims[1]);
            let stored = stored(name);
            let at = |i: u64| stored(i % rows * columns + i / rows);
            (0..rows * columns).map(at).collect()
        }
        WeightExpr::Sinusoid { style, rows, width } => (0..rows * width)
            .map(|i| style.at(i / width, i % width, *width))
            .collect(),
        WeightExpr::RelativeBias {
            name,
            dims: [_, heads],
            buckets,
        } => {
            let reach = i64::from(buckets.reach);
            let stored = stored(name);
            let of_head = |head| {
                let row = move |distance| buckets.row(distance) * heads + head;
                (-reach..=reach).map(move |distance| stored(row(distance)))
            };
            (0..*heads).flat_map(of_head).collect()
        }
        WeightExpr::Positions {
            name,
            dims: [_, width],
            positions,
        } => {
            let farthest = i64::from(positions.farthest().unwrap());
            let rows = (-farthest..=farthest).map(|distance| positions.row(distance));
            let stored = stored(name);
            rows.flat_map(|row| (0..*width).map(move |c| stored(row * width + c)))
                .collect()
        }
        WeightExpr::Slopes { heads, scale } => (0..*heads)
            .map(|head| f64::from(scale.get()) * slope(head, *heads))
            .collect(),
        WeightExpr::InterleavedColumns {
            name,
            dims,
            interleaved,
        } => {
            let stored = stored(name);
            (0..dims[0])
                .flat_map(|row| (0..dims[1]).map(move |column| (row, column)))
                .map(|(row, column)| stored(row * dims[1] + interleaved_row(column, *interleaved)))
                .collect()
        }
        WeightExpr::Rows {
            name,
            dims,
            groups,
            from,
            rows,
            interleaved,
        } => {
            let width: u64 = dims[1..].iter().product();
            let part = dims[0] / groups;
            let rows = (0..*groups).flat_map(|group| (0..*rows).map(move |row| (group, row)));
            let stored = stored(name);
            rows.flat_map(|(group, row)| {
                let row = group * part + from + interleaved_row(row, *interleaved);
                (0..width).map(move |c| stored(row * width + c))
            })
            .collect()
        }
        WeightExpr::PlusOne { name, dims } => {
            let stored = stored(name);
            (0..dims.iter().product())
                .map(|i| stored(i) + 1.0)
                .collect()
        }
        WeightExpr::ResizedHeads { heads, from, to } => (0..heads * to)
            .flat_map(|row| (0..heads * from).map(move |column| (row, column)))
            .map(|(row, column)| f64::from(resized_heads_at(row, column, *from, *to)))
            .collect(),
        WeightExpr::Zeros { n } => vec![0.0; *n as usize],
        WeightExpr::Ones { n } => vec![1.0; *n as usize],
        WeightExpr::ConcatRows(parts) => all(parts),
        WeightExpr::ProductScales {
            weight: parts,
            input,
        } => {
            let columns = parts[0].dims()[1] as usize;
            let single: Vec<f32> = all(parts).iter().map(|&v| v as f32).collect();
            let scales = single.chunks(columns).map(row_scale);
            scales.map(|s| f64::from(s) * scale(input)).collect()
        }
        WeightExpr::Scale(bound) => vec![scale(bound)],
        WeightExpr::CacheScale { linear, rows } => vec![cache_scale(linear, *rows)],
        WeightExpr::OrderedColumns {
            name,
            dims: [rows, columns],
        } => {
            let order = move |row| order(*columns).map(move |column| row * columns + column);
            (0..*rows).flat_map(order).map(stored(name)).collect()
        }
        WeightExpr::OrderedRows {
            name,
            dims,
            by_dims: [_, columns],
            ..
        } => {
            let width: u64 = dims[1..].iter().product();
            let parts = (0..dims[0] / columns).map(|part| part * columns);
            let rows = parts.flat_map(|first| order(*columns).map(move |row| first + row));
            let stored = stored(name);
            rows.flat_map(|row| (0..width).map(move |c| stored(row * width + c)))
                .collect()
        }
    }
}

/// An arbitrary order of columns, for [`WeightExpr::OrderedColumns`].
fn order(columns: u64) -> impl Iterator<Item = u64> {
    (0..columns).rev()
}

/// Returns the scale of a cache. It is a power of two, so that multiplying by it does not round.
pub fn cache_scale(linear: &str, rows: CacheRows) -> f64 {
    let nth = linear.len() as i32 % 3;
    match rows {
        CacheRows::Keys => 2f64.powi(nth - 6),
        CacheRows::Values => 2f64.powi(-nth - 3),
    }
}

fn all(parts: &[WeightExpr]) -> Vec<f64> {
    parts.iter().flat_map(weight).collect()
}

fn scale(bound: &Bound) -> f64 {
    let single =
        |parts: &[WeightExpr]| -> Vec<f32> { all(parts).iter().map(|&v| v as f32).collect() };
    let (weight, bias) = match &bound.linear {
        Some(linear) => (single(&linear.weight), single(&linear.bias)),
        None => (Vec::new(), Vec::new()),
    };
    bound.of(&single(&bound.gamma), &single(&bound.beta), &weight, &bias) / 448.0
}

fn embedding(ids: &[f64], table: &[f64], width: usize, offset: u32) -> Vec<f64> {
    ids.iter()
        .flat_map(|&id| {
            let row = id as usize + offset as usize;
            table[row * width..][..width].to_vec()
        })
        .collect()
}

fn mean_pool(x: &[f64], width: usize, batch: &Batch) -> Vec<f64> {
    let mut out = Vec::new();
    for (start, n) in batch.sequences() {
        out.extend((0..width).map(|c| {
            let column = (start..start + n).map(|t| x[t * width + c]);
            column.sum::<f64>() / n as f64
        }));
    }
    out
}

fn softmax(x: &[f64], scale: f32) -> Vec<f64> {
    let scale = f64::from(scale);
    let most = x.iter().map(|v| scale * v).fold(f64::MIN, f64::max);
    let sum: f64 = x.iter().map(|v| (scale * v - most).exp()).sum();
    x.iter().map(|v| (scale * v - most).exp() / sum).collect()
}

/// Returns the product of `x`, whose rows have `k` elements, and the transpose of `weight`.
fn product(x: &[f64], weight: &[f64], k: usize) -> Vec<f64> {
    rows(x, k, |x| {
        let dot = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum();
        weight.chunks(k).map(dot).collect()
    })
}

/// Applies the epilogue of a linear layer. `more` are the operands of the epilogue.
fn finish(mut y: Vec<f64>, epilogue: Epilogue, more: &[&[f64]]) -> Vec<f64> {
    if epilogue.bias {
        y = add_bias(&y, more[0]);
    }
    if let Some(activation) = epilogue.activation {
        y.iter_mut().for_each(|v| *v = activate_f64(activation, *v));
    }
    if epilogue.residual {
        y = add(&y, more[usize::from(epilogue.bias)]);
    }
    y
}

fn apply(op: &Op, reads: &[&[f64]], widths: &[usize], batch: &Batch) -> Vec<f64> {
    let tokens = batch.tokens();
    let grouped = |heads: u32, kv_heads: u32, head: u32| Heads {
        heads: heads as usize,
        kv_heads: kv_heads as usize,
        head: head as usize,
        tokens,
    };
    let of = |heads: u32, head: u32| grouped(heads, heads, head);
    match op {
        Op::Input(meta) => batch.ids(*meta),
        Op::Weight(expr) => weight(expr),
        Op::CrossCache { .. } => unreachable!("it is read before"),
        Op::Quantize(format) => format.round(reads[0], widths[0]),
        Op::Embedding { offset } => embedding(reads[0], reads[1], widths[1], *offset),
        Op::Linear { epilogue } => {
            let y = product(reads[0], reads[1], widths[0]);
            finish(y, *epilogue, &reads[2..])
        }
        Op::ToE4m3 => {
            let scaled = reads[0].iter().map(|v| (v / reads[1][0]) as f32);
            scaled.map(|v| f64::from(Element::E4m3.round(v))).collect()
        }
        Op::ScaledLinear { epilogue } => {
            let y = product(reads[0], reads[1], widths[0]);
            let y = rows(&y, reads[2].len(), |row| {
                row.iter().zip(reads[2]).map(|(y, s)| y * s).collect()
            });
            finish(y, *epilogue, &reads[3..])
        }
        Op::Rotary {
            rotation,
            from,
            head,
        } => {
            let positions = batch.ids(BatchInput::Positions);
            let half = rotation.frequencies.len();
            let head = *head as usize;
            let columns = rotation.heads as usize * head;
            let mut out = rows(reads[0], widths[0], |row| {
                row[*from as usize..][..columns].to_vec()
            });
            for (i, row) in out.chunks_mut(head).enumerate() {
                let position = positions[i / rotation.heads as usize];
                for (c, &f) in rotation.frequencies.iter().enumerate() {
                    let (sin, cos) = (position * f64::from(f)).sin_cos();
                    let factor = f64::from(rotation.factor);
                    let (a, b) = (row[c], row[half + c]);
                    row[c] = factor * (a * cos - b * sin);
                    row[half + c] = factor * (b * cos + a * sin);
                }
            }
            out
        }
        Op::Cache {
            from,
            heads,
            head,
            format,
            scaled,
            ..
        } => rows(reads[0], widths[0], |row| {
            let kept = row[*from as usize..][..(heads * head) as usize].iter();
            let scale = if *scaled { reads[1][0] } else { 1.0 };
            let stored = |&v: &f64| match format {
                Some(format) => {
                    scale * f64::from(Element::from(*format).round(v as f32 / scale as f32))
                }
                None => v,
            };
            kept.map(stored).collect()
        }),
        Op::SplitHeads { heads } => {
            let shape = of(*heads, widths[0] as u32 / heads);
            let side = HeadView::TokenMajor {
                offset: 0,
                stride: widths[0] as u32,
            };
            transpose(shape, reads[0], side, HeadView::HeadMajor)
        }
        Op::MergeHeads => {
            let heads = reads[0].len() / (tokens * widths[0]);
            let side = HeadView::TokenMajor {
                offset: 0,
                stride: (heads * widths[0]) as u32,
            };
            let shape = of(heads as u32, widths[0] as u32);
            transpose(shape, reads[0], HeadView::HeadMajor, side)
        }
        Op::Scores {
            heads,
            kv_heads,
            head,
            q,
            k,
        } => {
            let shape = grouped(*heads, *kv_heads, *head);
            shape.scores(batch, (reads[0], reads[1]), [*q, *k])
        }
        Op::RelativeScores {
            heads,
            head,
            of: side,
        } => {
            let width = (heads * head) as usize;
            let reach = (reads[1].len() / width / 2) as i64;
            let mut out = Vec::new();
            of(*heads, *head).each(batch, |h, start, n| {
                for i in 0..n {
                    for j in 0..n {
                        let token = start + if *side == Side::Query { i } else { j };
                        let row = ((j as i64 - i as i64).clamp(-reach, reach) + reach) as usize;
                        let at = |row: usize, c: usize| row * width + h * *head as usize + c;
                        let products = (0..*head as usize)
                            .map(|c| reads[0][at(token, c)] * reads[1][at(row, c)]);
                        out.push(products.sum());
                    }
                }
            });
            out
        }
        Op::Softmax { scale, causal, by } => {
            let pairs: usize = batch.sequences().map(|(_, n)| n * n).sum();
            let by = (*by, &reads[1..]);
            of((reads[0].len() / pairs) as u32, 0).softmax(batch, reads[0], *scale, *causal, by)
        }
        Op::Context {
            heads,
            kv_heads,
            head,
            v,
            out,
        } => {
            let shape = grouped(*heads, *kv_heads, *head);
            shape.context(batch, reads[0], reads[1], [*v, *out])
        }
        // Sequences in tests have no prompts.
        Op::AfterPrompt => reads[0].to_vec(),
        Op::FirstToken => batch
            .sequences()
            .flat_map(|(start, _)| reads[0][start * widths[0]..][..widths[0]].to_vec())
            .collect(),
        Op::LastToken => batch
            .sequences()
            .flat_map(|(start, n)| reads[0][(start + n - 1) * widths[0]..][..widths[0]].to_vec())
            .collect(),
        Op::MeanPool => mean_pool(reads[0], widths[0], batch),
        Op::MaxPool => batch
            .sequences()
            .flat_map(|(start, n)| {
                let column = |c| (start..start + n).map(move |t| reads[0][t * widths[0] + c]);
                let largest = |c| column(c).fold(f64::NEG_INFINITY, f64::max);
                (0..widths[0]).map(largest).collect::<Vec<_>>()
            })
            .collect(),
        Op::WeightedPool(weights) => batch
            .sequences()
            .flat_map(|(start, n)| {
                let sum = |c| {
                    let column =
                        (0..n).map(|i| weights.of(i) * reads[0][(start + i) * widths[0] + c]);
                    column.sum::<f64>() / weights.divisor(n)
                };
                (0..widths[0]).map(sum).collect::<Vec<_>>()
            })
            .collect(),
        Op::Draw => {
            let noise = |i: usize| crate::ops::noise(0, (i % widths[0]) as u32);
            let all = reads[0].iter().zip(reads[1]).enumerate();
            all.map(|(i, (mean, log_variance))| mean + (0.5 * log_variance).exp() * noise(i))
                .collect()
        }
        Op::LogProbability => {
            let (ids, width) = (batch.ids(BatchInput::TokenIds), widths[0]);
            let mut out = vec![0.0; tokens];
            for (start, n) in batch.sequences() {
                for t in start + 1..start + n {
                    let p = softmax(&reads[0][(t - 1) * width..t * width], 1.0);
                    out[t] = p[ids[t] as usize % width].ln();
                }
            }
            out
        }
        Op::EmbeddingLayerNorm { eps, offsets } => {
            let n = offsets.len();
            let mut sum = vec![0.0; tokens * widths[n]];
            for (i, &offset) in offsets.iter().enumerate() {
                sum = add(&sum, &embedding(reads[i], reads[n + i], widths[n], offset));
            }
            layer_norm(&sum, reads[2 * n], reads[2 * n + 1], *eps)
        }
        Op::Attention(attending) => {
            let &AttentionProblem {
                heads,
                kv_heads,
                head,
                scale,
                causal,
                by,
                q,
                k,
                v,
            } = attending;
            let shape = grouped(heads, kv_heads, head);
            let scores = shape.scores(batch, (reads[0], reads[1]), [q, k]);
            let by = (by, &reads[3..]);
            let p = shape.softmax(batch, &scores, scale, causal, by);
            let side = HeadView::TokenMajor {
                offset: 0,
                stride: heads * head,
            };
            shape.context(batch, &p, reads[2], [v, side])
        }
        Op::MeanPoolNormalize { eps } => {
            l2_normalize(&mean_pool(reads[0], widths[0], batch), widths[0], *eps)
        }
        _ => rows::apply(op, reads, widths),
    }
}
