//! What batches cost on the device at hand, measured before the first request.

use std::time::{Duration, Instant};

use crate::{
    Batch, Engine, EngineError, Session,
    schedule::{CostTable, Costs, Grid, Layout},
    tensor::Extents,
};

/// Tokens of the first batch that is measured.
const FIRST: u64 = 32;
const MOST: u64 = 1 << 15;
/// Lengths of the sequences in a batch.
const LENGTHS: [u64; 3] = [16, 128, 512];

/// Measures batches from small to large for about so long, each once after a run to warm up, and reckons memory from the planner.
///
/// # Errors
/// A batch that cannot run.
pub fn measure(
    engine: &Engine,
    session: &mut Session,
    within: Duration,
) -> Result<CostTable, EngineError> {
    let began = Instant::now();
    let limits = engine.limits();
    let longest = limits.longest.map_or(u64::MAX, u64::from);
    let batch = |tokens: u64, length: u64| {
        let length = length.min(longest).min(tokens).max(1);
        let mut lens = vec![length as u32; (tokens / length) as usize];
        let rest = (tokens % length) as u32;
        lens.extend((rest > 0).then_some(rest));
        let ids = (0..tokens).map(|i| limits.token_id(i.wrapping_mul(2_654_435_761)));
        Batch::from_packed(ids.collect(), &lens)
    };
    let mut lengths: Vec<u64> = LENGTHS.iter().map(|&n| n.min(longest)).collect();
    lengths.dedup();
    let (mut x, mut values) = (Vec::new(), Vec::new());
    let mut tokens = FIRST;
    while tokens <= MOST {
        let mut row = Vec::new();
        for &length in &lengths {
            let timing = session.time(&batch(tokens, length)?, 1, 2)?;
            let least = timing.ms.iter().copied().fold(f32::INFINITY, f32::min);
            row.push((f64::from(least) * 1e3).max(1.0));
        }
        let spent: f64 = row.iter().sum::<f64>() / 1e6 * 3.0;
        x.push(tokens as f64);
        values.push(row);
        // The next size takes about twice as long.
        if began.elapsed().as_secs_f64() + 2.0 * spent > within.as_secs_f64() {
            break;
        }
        tokens *= 2;
    }
    let bytes = |tokens: u64, length: u64| -> Result<f64, EngineError> {
        Ok(engine.bytes_needed(&batch(tokens, length)?)? as f64)
    };
    // Two batches of as many tokens differ by their pairs, and two of one length by both.
    let (short, long) = (lengths[0].min(longest), longest.min(512));
    let n = 4096;
    let (few, many) = (bytes(n, short)?, bytes(n, long)?);
    let twice = bytes(2 * n, short)?;
    let per_pair = match long > short {
        true => ((many - few) / (n * (long - short)) as f64).max(0.0),
        false => 0.0,
    };
    let per_token = ((twice - few) / n as f64 - per_pair * short as f64).max(0.0);
    let fixed = (few - n as f64 * (per_token + per_pair * short as f64)).max(0.0);
    let mut table = CostTable {
        about: format!("measured on {}", engine.device()),
        packed: Grid {
            x,
            y: lengths.iter().map(|&n| n as f64).collect(),
            values,
        },
        padded: None,
        overhead: 0.0,
        bytes: Default::default(),
        multiple: 1,
    };
    table.bytes.fixed = fixed as u64;
    (table.bytes.per_token, table.bytes.per_pair) = (per_token, per_pair);
    Ok(table)
}

/// Tokens of sequences of 128 from which on larger batches are hardly faster by the token: the fewest whose rate is within half
/// a percent of the best.
pub fn full_batch(costs: &CostTable) -> u64 {
    let sizes = (1..=10).map(|octave| FIRST << octave);
    let rates = sizes.map(|tokens| {
        let extents = Extents {
            pairs: tokens * tokens.min(128),
            ..Layout::Packed.computed([tokens as u32])
        };
        let time = costs.time(Layout::Packed, &extents);
        (tokens, tokens as f64 / time.seconds().max(1e-9))
    });
    let rates: Vec<(u64, f64)> = rates.collect();
    let best = rates.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
    let full = rates.iter().find(|&&(_, rate)| rate >= 0.995 * best);
    full.map_or(FIRST, |&(tokens, _)| tokens)
}
