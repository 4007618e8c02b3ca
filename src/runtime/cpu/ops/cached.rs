//! KV cache operations: appending, and attention to cached keys and values.

use gemmule_cpu::{
    Running,
    attention::{MAX_KEYS, MAX_QUERIES, OnlineSoftmax, ScaleRows},
    parallel::{SharedOut, for_row_blocks, with_scratch},
    product::{Into, Operand, multiply},
    rows::RmsRows,
};

use super::args::{Args, Cached, Sequence, elements};
use super::attention::{Distances, biases_and_sinks, blocks_of, rows_of};
use super::rotary::rotate;
use super::{Call, CpuForm, OpError, forms};
use crate::kernels::attention::{Keys as Whose, MhaCached, MhaDecode, MhaPrefill};
use crate::kernels::cache::{AppendCache, BLOCK, Pool, SCALES, index};
use crate::kernels::prepare_attention::PrepareAttention;
use crate::tensor::e4m3;

/// Memory to which a kernel writes keys and values: the elements of a cache, or the rows of another tensor.
pub(super) enum Stored<'a> {
    /// Values in f32, rounded to the format of the cache.
    Real(&'a mut [f32]),
    /// Elements encoded in E4M3.
    E4m3(&'a mut [u8]),
}

impl Stored<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Real(values) => values.len(),
            Self::E4m3(codes) => codes.len(),
        }
    }

    /// Divides `row` by `scale`, and stores the result in the format of `pool`, starting at element `at`. Only a cache in E4M3 has a
    /// `scale` other than 1.
    fn store(&mut self, pool: Pool, at: usize, row: &[f32], scale: f32) {
        match self {
            Self::Real(values) if pool.is_e4m3() => {
                for (to, &value) in values[at..].iter_mut().zip(row) {
                    *to = e4m3::round(value / scale);
                }
            }
            Self::Real(values) => values[at..at + row.len()].copy_from_slice(row),
            Self::E4m3(codes) => {
                for (to, &value) in codes[at..].iter_mut().zip(row) {
                    *to = e4m3::encode(value / scale);
                }
            }
        }
    }
}

forms! {
    MhaCached => |k, args| mha_cached(k, MAX_QUERIES, args);
    MhaDecode => |k, args| mha_cached(&k.plain, MAX_QUERIES, args);
    MhaPrefill => |k, args| mha_cached(&k.plain, MAX_QUERIES, args);
}

impl CpuForm for AppendCache {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [cache] = call.outputs()?;
        append_cache(self, call.args(&mut []), Stored::Real(cache))
    }
}

impl CpuForm for PrepareAttention {
    fn run(&self, mut call: Call<'_, '_, '_>) -> Result<(), OpError> {
        let [queries, keys] = call.outputs()?;
        prepare_attention(self, call.args(&mut []), queries, Stored::Real(keys))
    }
}

pub(super) fn append_cache(
    spec: &AppendCache,
    mut args: Args<'_, '_>,
    mut cache: Stored<'_>,
) -> Result<(), OpError> {
    let (op, tokens, batch) = (args.op(), args.extents.tokens, args.extents.batch);
    let heads = args.heads("the heads of `x`", spec.x, spec.heads, spec.head)?;
    let rows = match spec.of_sequence {
        true => elements(&[batch, heads.token_stride as u64]),
        false => heads.elements,
    };
    let x = args.real("x", &[rows])?;
    let scales = scales(spec.pool, &mut args)?;
    let own;
    let slots = match spec.of_sequence {
        true => {
            let all = args.i32s("slots", args.extents.slots)?;
            let starts = args.i32s("slot_starts", batch)?.iter().enumerate();
            let first = |(index, &start): (usize, &i32)| {
                let slot = usize::try_from(start).ok().and_then(|start| all.get(start));
                slot.copied().ok_or_else(|| OpError::Slot {
                    op,
                    param: "slot_starts",
                    index,
                    found: start,
                    expected: "a place in `slots`".to_owned(),
                })
            };
            own = starts.map(first).collect::<Result<Vec<i32>, _>>()?;
            own.as_slice()
        }
        false => args.i32s("token_slots", tokens)?,
    };
    args.all_taken()?;
    let (n, head, stride) = (
        spec.heads as usize,
        spec.head as usize,
        spec.pool.stride as usize,
    );
    let room = Room::of(cache.len(), n, head, stride);
    room.check(op, "token_slots", slots)?;
    for (token, &slot) in slots.iter().enumerate() {
        for h in 0..n {
            let from = heads.at(h, token);
            let to = index(slot as usize, h, head, stride);
            let scale = scales[usize::from(h >= n / 2)];
            cache.store(spec.pool, to, &x[from..from + head], scale);
        }
    }
    Ok(())
}

pub(super) fn prepare_attention(
    spec: &PrepareAttention,
    mut args: Args<'_, '_>,
    queries: &mut [f32],
    keys: Stored<'_>,
) -> Result<(), OpError> {
    let (op, tokens) = (args.op(), args.extents.tokens);
    let (head_size, row) = (u64::from(spec.head), u64::from(spec.row));
    let x = args.real("x", &[tokens, row])?;
    let mut gamma = |name| args.real(name, &[head_size]);
    let gammas = match spec.norm {
        Some(_) => Some([gamma("q_gamma")?, gamma("k_gamma")?]),
        None => None,
    };
    let positions = match spec.rotation {
        Some(_) => args.i32s("positions", tokens)?,
        None => &[],
    };
    let (scales, slots) = match spec.pool {
        Some(pool) => (scales(pool, &mut args)?, args.i32s("token_slots", tokens)?),
        None => ([1.0; 2], &[][..]),
    };
    let (n, kv) = (spec.heads as usize, spec.kv_heads as usize);
    let (head, row) = (spec.head as usize, row as usize);
    args.check_shape("queries", &[tokens, n as u64, head_size], queries.len())?;
    args.all_taken()?;
    // Normalizes and rotates the heads of a token's queries (`part` 0) or keys (`part` 1).
    let prepare = |part: usize, token: usize, out: &mut [f32]| {
        let from = token * row + spec.columns[part] as usize;
        let x = &x[from..][..out.len()];
        match (spec.norm, gammas) {
            (Some(eps), Some(gammas)) => RmsRows {
                x,
                gamma: gammas[part],
                eps,
                out,
            }
            .run(),
            _ => out.copy_from_slice(x),
        }
        if let Some(rotation) = &spec.rotation {
            rotate(rotation, head, positions[token], out);
        }
    };
    for_row_blocks(queries, n * head, &|first, out| {
        for (i, out) in out.chunks_exact_mut(n * head).enumerate() {
            prepare(0, first + i, out);
        }
    });
    let (pool, mut cache) = match (spec.pool, keys) {
        (Some(pool), cache) => (pool, cache),
        (None, Stored::Real(keys)) => {
            args.check_shape("keys", &[tokens, kv as u64, head_size], keys.len())?;
            for_row_blocks(keys, kv * head, &|first, out| {
                for (i, out) in out.chunks_exact_mut(kv * head).enumerate() {
                    prepare(1, first + i, out);
                }
            });
            return Ok(());
        }
        (None, Stored::E4m3(_)) => {
            return Err(OpError::Writes {
                op,
                expected: "its tensors and no KV cache in E4M3",
                found: 2,
            });
        }
    };
    let stride = pool.stride as usize;
    Room::of(cache.len(), 2 * kv, head, stride).check(op, "token_slots", slots)?;
    let mut keys = vec![0.0; kv * head];
    for (token, &slot) in slots.iter().enumerate() {
        prepare(1, token, &mut keys);
        let values = &x[token * row + spec.columns[2] as usize..][..kv * head];
        let rows = keys.chunks_exact(head).chain(values.chunks_exact(head));
        for (nth, row) in rows.enumerate() {
            let to = index(slot as usize, nth, head, stride);
            cache.store(pool, to, row, scales[usize::from(nth >= kv)]);
        }
    }
    Ok(())
}

/// Takes the scales of the keys and of the values. Returns 1 for both if the cache has no scales.
fn scales(pool: Pool, args: &mut Args<'_, '_>) -> Result<[f32; 2], OpError> {
    match pool.scaled {
        true => Ok([
            args.real(SCALES[0], &[1])?[0],
            args.real(SCALES[1], &[1])?[0],
        ]),
        false => Ok([1.0; 2]),
    }
}

/// Number of slots (places for the keys and values of one token) that the pool has for one cache.
struct Room {
    slots: usize,
}

impl Room {
    /// Computes the number of slots. `elements` counts the elements from the start of the cache to the end of the pool.
    fn of(elements: usize, heads: usize, head: usize, stride: usize) -> Self {
        let own = heads * head * BLOCK as usize;
        // The last block needs only the elements of this cache, because the pool may end right after them.
        let blocks = match elements.checked_sub(own) {
            Some(rest) => rest / stride.max(1) + 1,
            None => 0,
        };
        Self {
            slots: blocks * BLOCK as usize,
        }
    }

    fn check(&self, op: &'static str, param: &'static str, slots: &[i32]) -> Result<(), OpError> {
        let outside = |&slot: &i32| usize::try_from(slot).is_ok_and(|slot| slot < self.slots);
        match slots.iter().position(|slot| !outside(slot)) {
            None => Ok(()),
            Some(index) => Err(OpError::Slot {
                op,
                param,
                index,
                found: slots[index],
                expected: format!("a slot below {}", self.slots),
            }),
        }
    }
}

/// Keys of a sequence in the cache.
struct Keys<'a> {
    slots: &'a [i32],
    /// Number of the sequence's keys that precede the keys of its tokens in the batch. Unused for the keys of a source text.
    before: usize,
}

/// Returns the keys of each sequence: its own keys or the keys of its source text, as `whose` selects. Checks that each sequence has enough
/// keys: at least as many of its own as it has tokens in the batch, or at least one key of its source text.
fn keys_of<'a>(
    whose: Whose,
    op: &'static str,
    sequences: &[Sequence],
    slots: &'a [i32],
    starts: &[i32],
    lens: &[i32],
) -> Result<Vec<Keys<'a>>, OpError> {
    let all = sequences.iter().zip(starts.iter().zip(lens)).enumerate();
    all.map(|(index, (sequence, (&start, &n)))| {
        let wrong = |param, found, expected: &str| OpError::Slot {
            op,
            param,
            index,
            found,
            expected: expected.to_owned(),
        };
        let (least, expected) = match whose {
            Whose::Own => (sequence.len, "at least the tokens of the sequence"),
            Whose::Source => (1, "at least one token"),
        };
        let n_keys = usize::try_from(n).ok().filter(|&n| n >= least);
        let n_keys = n_keys.ok_or_else(|| wrong("key_lens", n, expected))?;
        let own = usize::try_from(start)
            .ok()
            .and_then(|start| slots.get(start..)?.get(..n_keys))
            .ok_or_else(|| wrong("slot_starts", start, "a place in `slots`"))?;
        Ok(Keys {
            slots: own,
            before: n_keys.saturating_sub(sequence.len),
        })
    })
    .collect()
}

/// Scratch memory of a task: the keys and values of a tile, and the softmax state of the queries of all heads that share a key head.
#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    running: Vec<Running>,
    factors: Vec<f32>,
}

/// Computes attention to a cache. Processes at most `max_queries` queries of a sequence at a time.
pub(super) fn mha_cached(
    spec: &MhaCached,
    max_queries: usize,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, tokens, batch) = (args.op(), args.extents.tokens, args.extents.batch);
    let q_heads = args.heads("the heads of `q`", spec.q, spec.heads, spec.head)?;
    let q = args.real("q", &[q_heads.elements])?;
    let keys = args.pool("keys")?;
    let values = args.pool("values")?;
    let [biases, sinks] = biases_and_sinks(spec.by, spec.heads, &mut args)?;
    let [k_scale, v_scale] = scales(spec.pool, &mut args)?;
    let sequences = args.sequences()?;
    let causal = spec.keys == Whose::Own;
    let n_slots = match spec.keys {
        Whose::Own => args.extents.slots,
        Whose::Source => args.extents.source_slots,
    };
    let slots = args.i32s("slots", n_slots)?;
    let starts = args.i32s("slot_starts", batch)?;
    let lens = args.i32s("key_lens", batch)?;
    let all = keys_of(spec.keys, op, &sequences, slots, starts, lens)?;
    let (heads, kv_heads) = (spec.heads as usize, spec.kv_heads as usize);
    let (head, stride) = (spec.head as usize, spec.pool.stride as usize);
    let room = Room::of(keys.len().min(values.len()), kv_heads, head, stride);
    room.check(op, "slots", slots)?;
    let out = args.out(&[tokens, u64::from(spec.heads), u64::from(spec.head)])?;
    let (group, width) = (heads / kv_heads.max(1), heads * head);
    let out = SharedOut::new(out);
    let blocks = blocks_of(max_queries, &sequences);
    let of_sequence = |start: usize| sequences.partition_point(|s| s.start < start);
    let task = |scratch: &mut Scratch, i: usize| {
        let (kv, block) = (i % kv_heads, blocks[i / kv_heads]);
        let own = &all[of_sequence(block.sequence.start)];
        let n = block.n_queries;
        let first = own.before + block.query;
        let n_keys = match spec.keys {
            Whose::Own => first + n,
            Whose::Source => own.slots.len(),
        };
        // Index of the first key of the first tile that contains a key to which a query attends.
        let first_key = spec.by.seen(causal, first, n_keys).start / MAX_KEYS * MAX_KEYS;
        scratch.running.clear();
        for h in kv * group..(kv + 1) * group {
            let start = Running::after(sinks.get(h).copied());
            let filled = scratch.running.len() + n;
            scratch.running.resize(filled, start);
        }
        scratch.factors.resize(n, 0.0);
        scratch.scores.resize(n * MAX_KEYS, 0.0);
        let token = block.sequence.start + block.query;
        for key in (first_key..n_keys).step_by(MAX_KEYS) {
            let tile = &own.slots[key..n_keys.min(key + MAX_KEYS)];
            let gather = |to: &mut Vec<f32>, from: Cached<'_>| {
                to.clear();
                // Adjacent slots within a block are adjacent rows of the cache, which can be copied together.
                for run in tile.chunk_by(|&a, &b| b == a + 1 && !(b as u32).is_multiple_of(BLOCK)) {
                    let at = index(run[0] as usize, kv, head, stride);
                    from.extend(to, at..at + run.len() * head);
                }
            };
            gather(&mut scratch.keys, keys);
            gather(&mut scratch.values, values);
            let rows = |data| Operand {
                data,
                row: head,
                col: 1,
            };
            for nth in 0..group {
                let h = kv * group + nth;
                let distances = Distances {
                    by: spec.by,
                    causal,
                    biases,
                    sinks,
                    head: h,
                };
                let q = rows_of(q, &q_heads, h, token);
                let scores = &mut scratch.scores[..n * tile.len()];
                // SAFETY: only this task uses the scratch memory.
                unsafe {
                    multiply(
                        (n, tile.len(), head),
                        spec.scale * k_scale,
                        q,
                        rows(&scratch.keys).transposed(),
                        Into::Overwrite,
                        &SharedOut::new(scores),
                        0,
                        tile.len(),
                    );
                }
                OnlineSoftmax {
                    rows: scores,
                    len: tile.len(),
                    positions: &distances,
                    query: first,
                    key,
                    n_keys,
                    running: &mut scratch.running[nth * n..(nth + 1) * n],
                    corrections: &mut scratch.factors,
                }
                .run();
                let at = token * width + h * head;
                let into = match key == first_key {
                    true => Into::Overwrite,
                    false => {
                        let rows = ScaleRows {
                            by: &scratch.factors,
                            out,
                            at,
                            cols: head,
                            stride: width,
                        };
                        // SAFETY: each head has its own columns, and each query has its own rows.
                        unsafe { rows.run() };
                        Into::Accumulate
                    }
                };
                let numerators = Operand {
                    data: scores,
                    row: tile.len(),
                    col: 1,
                };
                let values = rows(&scratch.values);
                // SAFETY: each head has its own columns, and each query has its own rows.
                unsafe {
                    multiply(
                        (n, head, tile.len()),
                        1.0,
                        numerators,
                        values,
                        into,
                        &out,
                        at,
                        width,
                    );
                }
            }
        }
        for nth in 0..group {
            let sums = &scratch.running[nth * n..(nth + 1) * n];
            for (factor, running) in scratch.factors.iter_mut().zip(sums) {
                *factor = v_scale / running.sum;
            }
            let rows = ScaleRows {
                by: &scratch.factors,
                out,
                at: token * width + (kv * group + nth) * head,
                cols: head,
                stride: width,
            };
            // SAFETY: each head has its own columns, and each query has its own rows.
            unsafe { rows.run() };
        }
    };
    let n_tasks = kv_heads * blocks.len();
    let pairs = pairs_of(&all, &sequences);
    with_scratch(n_tasks, pairs.saturating_mul(width), &task);
    Ok(())
}

/// Total number of (query, key) pairs.
fn pairs_of(keys: &[Keys<'_>], sequences: &[Sequence]) -> usize {
    let each = keys.iter().zip(sequences);
    each.map(|(keys, s)| s.len.saturating_mul(keys.slots.len()))
        .fold(0, usize::saturating_add)
}
