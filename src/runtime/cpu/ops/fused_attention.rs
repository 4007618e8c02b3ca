//! Fused attention. A task computes one head of one block of queries ([`Attend`]).

use gemmule_cpu::{
    attention::{Attend, MAX_QUERIES, Scratch},
    parallel::SharedOut,
};

use super::{
    OpError,
    args::{Args, Sequence},
    attention::{
        Block, Distances, biases_and_sinks, blocks_of, for_heads_and_blocks, rows_of, work,
    },
    forms,
};
use crate::{
    kernels::attention::{MhaOnline, MhaShort, MhaSplitKeys, MhaWgmma},
    ops::AttentionProblem,
};

forms! {
    MhaShort => mha_short;
    MhaOnline => mha_online;
    MhaSplitKeys => |k, args| mha_online(&k.plain, args);
    MhaWgmma => |k, args| mha_online(&k.plain(), args);
}

fn mha_short(spec: &MhaShort, args: Args<'_, '_>) -> Result<(), OpError> {
    fused(&spec.of, Some(spec.max_len), args)
}

fn mha_online(spec: &MhaOnline, args: Args<'_, '_>) -> Result<(), OpError> {
    fused(&spec.of, None, args)
}

/// Implements the fused kernels for short sequences and for any length. On the CPU, the two differ only in the maximum length.
fn fused(
    of: &AttentionProblem,
    max_len: Option<u32>,
    mut args: Args<'_, '_>,
) -> Result<(), OpError> {
    let (op, tokens) = (args.op(), args.extents.tokens);
    let q_heads = args.heads("the heads of `q`", of.q, of.heads, of.head)?;
    let k_heads = args.heads("the heads of `k`", of.k, of.kv_heads, of.head)?;
    let v_heads = args.heads("the heads of `v`", of.v, of.kv_heads, of.head)?;
    let q = args.real("q", &[q_heads.elements])?;
    let k = args.real("k", &[k_heads.elements])?;
    let v = args.real("v", &[v_heads.elements])?;
    let [biases, sinks] = biases_and_sinks(of.by, of.heads, &mut args)?;
    let sequences = args.sequences()?;
    if let Some(max_len) = max_len {
        let too_long = |s: &Sequence| s.len as u64 > u64::from(max_len);
        if let Some(sequence) = sequences.iter().position(too_long) {
            return Err(OpError::TooLong {
                op,
                sequence,
                len: sequences[sequence].len,
                max_len,
            });
        }
    }
    let (heads, head) = (of.heads as usize, of.head as usize);
    let group = heads / (of.kv_heads.max(1) as usize);
    let out = args.out(&[tokens, u64::from(of.heads), u64::from(of.head)])?;
    if out.is_empty() {
        return Ok(());
    }
    let width = heads * head;
    let out = SharedOut::new(out);
    let work = work(&sequences, heads, head);
    let body = |scratch: &mut Scratch, h: usize, block: Block| {
        let Sequence { start, len, .. } = block.sequence;
        let distances = Distances {
            by: of.by,
            causal: of.causal,
            biases,
            sinks,
            head: h,
        };
        let attend = Attend {
            q: rows_of(q, &q_heads, h, start),
            k: rows_of(k, &k_heads, h / group, start),
            v: rows_of(v, &v_heads, h / group, start),
            scale: of.scale,
            head,
            len,
            queries: block.query..block.query + block.n_queries,
            positions: &distances,
            scratch,
            out,
            // The result is written to the columns of the head, in the rows of the sequence.
            at: start * width + h * head,
            stride: width,
        };
        // SAFETY: each head has its own columns, and each query has its own rows.
        unsafe { attend.run() };
    };
    // Keys and values are gathered once per block of queries. Blocks are therefore large, as long as each thread still has a few blocks.
    let most = match heads * sequences.len() >= 4 * rayon::current_num_threads() {
        true => 4 * MAX_QUERIES,
        false => MAX_QUERIES,
    };
    for_heads_and_blocks(heads, &blocks_of(most, &sequences), work, &body);
    Ok(())
}
