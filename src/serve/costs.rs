//! Measures the cost of batches on the current device, before the first request is served.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use crate::{
    Batch, Engine, EngineError, Session,
    engine::DeviceName,
    files::{Kind, own},
    jit::DiskCache,
    schedule::{CostTable, Costs, Grid, Layout},
    tensor::Extents,
};

/// Sizes in tokens of the smallest and of the largest measured batch.
const FIRST: u64 = 32;
const MOST: u64 = 1 << 15;
/// Sequence lengths of the measured batches.
const LENGTHS: [u64; 3] = [16, 128, 512];

/// Returns the cost table of an engine. On a GPU, the costs are measured once per card, program and version of gemmule, and kept in the
/// user's cache folder. On a CPU, the costs are measured each time a model is loaded, because other processes affect them.
///
/// # Errors
/// Returns an error if a session cannot be opened, and the errors of [`measure`].
pub fn known_or_measured(engine: &Engine, within: Duration) -> Result<CostTable, EngineError> {
    let measured = || measure(engine, &mut engine.session()?, within);
    let folder = match engine.device() {
        DeviceName::Cuda(_) => DiskCache::open_default().ok(),
        DeviceName::Cpu { .. } => None,
    };
    match folder.and_then(|cache| kept_in(cache.path(), engine)) {
        Some(file) => kept_or(&file, measured),
        None => measured(),
    }
}

/// Reads the table from `file`. If the file does not exist or is damaged, measures the costs and writes them to `file`.
fn kept_or(
    file: &Path,
    measured: impl FnOnce() -> Result<CostTable, EngineError>,
) -> Result<CostTable, EngineError> {
    match kept(file) {
        Ok(Some(table)) => return Ok(table),
        Ok(None) => {}
        Err(problem) => {
            let file = file.display();
            tracing::warn!("`{file}` is not used, and costs are measured again: {problem}");
        }
    }
    let table = measured()?;
    let problem = match table.to_ron() {
        Ok(text) => match own::write(file, text.as_bytes()) {
            Ok(()) => return Ok(table),
            Err(trouble) => io::Error::from(trouble).to_string(),
        },
        Err(error) => error.to_string(),
    };
    let file = file.display();
    tracing::warn!("the measured costs of batches are not kept in `{file}`: {problem}");
    Ok(table)
}

/// Returns the path of an engine's cost table in `folder`.
fn kept_in(folder: &Path, engine: &Engine) -> Option<PathBuf> {
    let program = postcard::to_stdvec(engine.program()).ok()?;
    let digest = Sha256::new()
        .chain_update(concat!(
            env!("CARGO_PKG_VERSION"),
            "\n",
            env!("GEMMULE_KERNELS"),
            "\n"
        ))
        .chain_update(format!("{}\n", engine.device()))
        .chain_update(program)
        .finalize();
    let name: String = digest[..12].iter().map(|b| format!("{b:02x}")).collect();
    Some(folder.join(format!("{name}.costs.ron")))
}

/// Reads a cost table from `file`; `None` if the file does not exist. The file must belong to the user.
fn kept(file: &Path) -> Result<Option<CostTable>, String> {
    let bytes = match own::read(file, Kind::Costs.limit()).map_err(io::Error::from) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let text = String::from_utf8(bytes).map_err(|e| e.to_string())?;
    CostTable::parse(&text).map(Some).map_err(|e| e.to_string())
}

/// Measures batches of doubling size, until the largest size is reached or the next size would probably exceed the time `within`. Each
/// batch runs once to warm up and then twice, and the shorter time is used. The memory of a batch is computed by the planner.
///
/// # Errors
/// Returns an error if a batch fails.
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
        let batch = Batch::from_packed(ids.collect(), &lens);
        batch.map(|batch| batch.with_required_ends(&limits))
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
        // The next size takes about twice as long as this one.
        if began.elapsed().as_secs_f64() + 2.0 * spent > within.as_secs_f64() {
            break;
        }
        tokens *= 2;
    }
    let bytes = |tokens: u64, length: u64| -> Result<f64, EngineError> {
        Ok(engine.bytes_needed(&batch(tokens, length)?)? as f64)
    };
    // Derive the bytes per pair of tokens of the same sequence from two batches with the same number of tokens. Derive the bytes per token
    // from two batches with the same sequence length.
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
    // Make the times monotonic, like those of a table that is read from a file.
    Ok(table.clone().checked().unwrap_or(table))
}

/// Returns the smallest batch size in tokens, of the powers of two from 64 to 32,768, at which the throughput is within 0.5 % of the
/// maximum over these sizes. Sequences have 128 tokens.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_kept_and_measured_again_if_the_file_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("own");
        let file = folder.join("x.costs.ron");
        let table = CostTable::parse(include_str!("../../examples/costs.ron")).unwrap();
        let never = || panic!("it is known");
        assert_eq!(kept_or(&file, || Ok(table.clone())).unwrap(), table);
        assert_eq!(kept_or(&file, never).unwrap(), table);
        let text = std::fs::read_to_string(&file).unwrap();
        let unordered = text.replacen("16384", "0.5", 1);
        assert_ne!(unordered, text);
        for damaged in ["", "(about: \"", &text[..text.len() / 2], &unordered] {
            std::fs::write(&file, damaged).unwrap();
            assert!(kept(&file).is_err(), "{damaged}");
            let other = CostTable {
                overhead: 7.0,
                ..table.clone()
            };
            assert_eq!(kept_or(&file, || Ok(other.clone())).unwrap(), other);
            assert_eq!(kept_or(&file, never).unwrap(), other);
        }
        // A failed measurement does not write a file.
        std::fs::remove_file(&file).unwrap();
        let fails = || {
            let problem = "a".to_owned();
            Err(EngineError::Threads { problem })
        };
        assert!(kept_or(&file, fails).is_err() && !file.exists());
    }
}
