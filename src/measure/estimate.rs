//! Cost tables computed from a card's cost model, without a device.

use crate::{
    machine::Machine,
    plan::lower_bound,
    program::{LaunchError, Program, Storage},
    schedule::{Bytes, CostTable, Grid},
    tensor::Extents,
};

/// Number of tokens of the smallest batch in a cost table. Each further batch has √2 times as many tokens.
const FIRST: f64 = 32.0;
/// Number of batch sizes in a cost table.
const SIZES: i32 = 23;
/// Sequence lengths in a cost table, in tokens.
const LENGTHS: [u64; 5] = [16, 64, 128, 256, 512];
/// Utilization of tensor cores by fused attention. This is a guess, as is [`LAUNCH`]; with these values, estimates for BERT-base on an
/// H200 are close to measurements (README).
const ATTENTION: f64 = 0.4;
/// Cycles to launch a kernel that has no cost model.
const LAUNCH: f64 = 1200.0;
/// Microseconds to start a batch and to read its results.
const OVERHEAD: f64 = 20.0;

/// Estimates the cost of batches on a card as the sum of the cost model's estimates. Kernels that are not chosen by cost are estimated from
/// their multiply-adds at a fraction of the peak rate, or from their bytes at twice the memory bandwidth, since most bytes come from L2.
///
/// # Errors
/// Returns an error if sizes exceed 64 bits.
pub fn estimated_costs(
    program: &Program,
    machine: &Machine,
    name: &str,
) -> Result<CostTable, LaunchError> {
    let x: Vec<f64> = (0..SIZES)
        .map(|i| (FIRST * 2_f64.powf(f64::from(i) / 2.0) / 8.0).round() * 8.0)
        .collect();
    let batch = |tokens: u64, length: u64| {
        let length = length.min(tokens);
        let mut lens = vec![length as u32; (tokens / length) as usize];
        let rest = (tokens % length) as u32;
        lens.extend((rest > 0).then_some(rest));
        Extents::of(&lens).expect("a few thousand lengths, none of them 0")
    };
    let mut values = Vec::with_capacity(x.len());
    for &tokens in &x {
        let mut row = Vec::with_capacity(LENGTHS.len());
        for length in LENGTHS {
            let cycles = cycles(program, machine, &batch(tokens as u64, length))?;
            // Round to a tenth of a microsecond, which suffices for an estimate.
            row.push((cycles / f64::from(machine.clock_mhz) * 10.0).round() / 10.0);
        }
        values.push(row);
    }
    let bytes = |tokens, length| -> Result<f64, LaunchError> {
        Ok(lower_bound(&program.usage(&batch(tokens, length))?) as f64)
    };
    // The batches of `few` and `many` have equal numbers of tokens, but different numbers of pairs. The batches of `few` and `twice` have
    // sequences of equal length, but different numbers of tokens and of pairs.
    let (n, short, long) = (4096, 16, 512);
    let (few, many, twice) = (bytes(n, short)?, bytes(n, long)?, bytes(2 * n, short)?);
    let per_pair = ((many - few) / (n * (long - short)) as f64).max(0.0);
    let per_token = ((twice - few) / n as f64 - per_pair * short as f64).max(0.0);
    Ok(CostTable {
        about: format!(
            "estimated by the cost model of {}, not measured: {name}, {}",
            machine.cards.first().map_or("a card", String::as_str),
            program.dtype
        ),
        packed: Grid {
            x,
            y: LENGTHS.map(|n| n as f64).to_vec(),
            values,
        },
        padded: None,
        overhead: OVERHEAD,
        bytes: Bytes {
            fixed: 0,
            per_token,
            per_pair,
        },
        // CUDA graphs round batches of a few thousand tokens up to a multiple of this number.
        multiple: 64,
    })
}

/// Returns the cycles of all launches of a batch.
fn cycles(program: &Program, machine: &Machine, batch: &Extents) -> Result<f64, LaunchError> {
    let mut sum = 0.0;
    for step in &program.steps {
        let Some((kernel, extents)) = step.launch(batch)? else {
            continue;
        };
        let spec = &program.kernels[kernel];
        if let Some(cycles) = spec.as_kernel().cycles(extents.rows, machine) {
            sum += cycles;
            continue;
        }
        let peak = f64::from(machine.sms) * machine.rates.tensor * 2.0;
        let flop = spec.as_kernel().flop().eval(&extents).unwrap_or(u64::MAX) as f64;
        let mut bytes = 0.0;
        for &operand in &step.operands {
            let tensor = &program.tensors[operand];
            if matches!(tensor.place, Storage::Planned { .. }) {
                bytes += program.bytes(tensor, &extents)? as f64;
            }
        }
        sum += LAUNCH + (flop / (peak * ATTENTION)).max(bytes / (2.0 * machine.rates.dram));
    }
    Ok(sum)
}
