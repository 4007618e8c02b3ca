//! The encoder with passes enabled one after another (ByteTransformer IV.D, figure 13).
//!
//! The paper's baseline is its figure 2(a): padded, with the projections of query, key and value merged into one product, cuBLAS, and a
//! separate kernel for every memory-bound operation. The paper adds optimizations in steps (its ladder), which do not name all of our
//! passes. Each unnamed pass is in the step whose description in the paper mentions the same work:
//!
//! - `merge_projections` in the baseline, which packs the three matrices (III.A);
//! - `fold_scale` in the baseline, because a batched GEMM applies a factor at no cost;
//! - `fold_soft_cap` in the baseline, because it finds nothing to fold in this encoder;
//! - `fold_head_layout` in the baseline, where transposes are part of other kernels and need no launches. This pass removes the transposes
//!   entirely, which favors the baseline;
//! - `fuse_embedding_layer_norm` with the fusion of LayerNorm, of which it is the first instance;
//! - `fuse_residual` and `fuse_gate` with the other epilogues, although they find nothing to fuse in post-norm encoders;
//! - `fuse_pool_normalize` and `hoist_pooled_token` at the end, because they do not affect hidden states.
//!
//! Two steps differ from the paper's. The paper's attention without padding still computes padded scores, because batched GEMMs need a
//! single shape. Here, scores have no padding, so the step without padding saves more, and the step with fused attention saves less. The
//! products of unfused attention are grouped GEMMs instead of cuBLAS's batched GEMMs. These grouped GEMMs use tensor cores for 16-bit
//! storage. In f32, neither they nor fused attention use tensor cores, and each thread of a grouped GEMM computes one result.

use std::process::ExitCode;

use gemmule::{
    Engine, EngineError,
    cli::{Outcome, Runnable, align_right, bench::sets::Set, print, table, write_file, write_json},
    engine::Padding,
    measure::{Bound, Comparison},
    passes,
    program::Step,
};
use miette::Report;
use serde::Serialize;

use crate::{
    figure::{Figure, Kind, Series},
    subject::Args,
};

/// Names of the sets that are timed by default. Each set is a batch of 16 sequences, as in figure 13 of ByteTransformer.
const SETS: [&str; 7] = [
    "b16_m64",
    "b16_m128",
    "b16_m256",
    "b16_m384",
    "b16_m512",
    "b16_m768",
    "b16_m1024",
];

/// One step of the ladder. `passes` are the passes that it adds to those of the previous steps.
struct Rung {
    name: &'static str,
    passes: &'static [&'static str],
    padding: Padding,
}

const RUNGS: [Rung; 5] = [
    Rung {
        name: "baseline",
        passes: &[
            "merge_projections",
            "fold_scale",
            "fold_soft_cap",
            "fold_head_layout",
        ],
        padding: Padding::Kept,
    },
    Rung {
        name: "+ LayerNorm fusion",
        passes: &["fuse_embedding_layer_norm", "fuse_bias_residual_layer_norm"],
        padding: Padding::Kept,
    },
    Rung {
        name: "+ GELU fusion",
        passes: &["fuse_gate", "fuse_bias_activation", "fuse_residual"],
        padding: Padding::Kept,
    },
    Rung {
        name: "+ no padding",
        passes: &[],
        padding: Padding::Removed,
    },
    Rung {
        name: "+ fused attention",
        passes: &[
            "fuse_attention",
            "fuse_pool_normalize",
            "hoist_pooled_token",
        ],
        padding: Padding::Removed,
    },
];

impl Rung {
    /// Describes the passes that the step adds, and its padding.
    fn adds(&self) -> String {
        let padding = match (self.padding, self.passes.is_empty()) {
            (Padding::Kept, _) => "padded",
            (Padding::Expanded, _) => "packed, with a mask",
            (Padding::Removed, true) => "packed, no further pass",
            (Padding::Removed, false) => "packed",
        };
        let passes = self.passes.iter().map(|&p| p.to_owned());
        let parts: Vec<String> = passes.chain([padding.to_owned()]).collect();
        parts.join(", ")
    }
}

/// Returns the passes that are disabled at step `index`.
fn without(index: usize) -> Vec<&'static str> {
    let on: Vec<&str> = RUNGS[..=index]
        .iter()
        .flat_map(|r| r.passes)
        .copied()
        .collect();
    let all = passes::all().iter().map(|p| p.name());
    all.filter(|name| !on.contains(name)).collect()
}

#[derive(Serialize)]
struct Measured {
    model: String,
    device: String,
    dtype: String,
    warm_up: usize,
    runs: usize,
    rungs: Vec<Described>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Described {
    name: &'static str,
    passes: &'static [&'static str],
    padded: bool,
}

#[derive(Serialize)]
struct Row {
    set: String,
    rung: &'static str,
    /// Number of tokens that launches process, including padding.
    tokens: u64,
    launches: usize,
    launches_a_layer: Option<usize>,
    ms: f32,
    /// Speedups relative to the previous step (`step_speedup`) and to the first step (`speedup`).
    step_speedup: f32,
    speedup: f32,
    /// Cosine similarity of the step's results and the last step's results, on tokens that are not padding.
    cosine: f32,
    max_difference: f32,
    agrees: bool,
}

pub(crate) fn run(args: Args) -> Outcome {
    let engines = (0..RUNGS.len())
        .map(|index| {
            let builder = args.subject.builder()?;
            Runnable::build(
                builder
                    .without(without(index))
                    .padding(RUNGS[index].padding),
            )
        })
        .collect::<Result<Vec<Engine>, EngineError>>()?;
    let Some(last) = engines.last() else {
        return Ok(ExitCode::SUCCESS);
    };
    let sets = args.sets.read(&SETS, &last.limits())?;
    let mut rows = Vec::with_capacity(sets.len() * RUNGS.len());
    for set in &sets {
        rows.extend(climb(&engines, set, &args)?);
    }
    let measured = Measured {
        model: args.subject.name()?,
        device: last.device().to_string(),
        dtype: last.precision().to_string(),
        warm_up: args.warm_up,
        runs: args.runs,
        rungs: RUNGS.iter().map(describe).collect(),
        rows,
    };
    measured.show(Bound::of(last.precision()))?;
    if let Some(file) = &args.json {
        write_json(file, &measured)?;
    }
    if let Some(file) = &args.figure {
        write_file(file, measured.figure(&sets).svg()?.as_bytes())?;
    }
    Ok(match measured.rows.iter().all(|row| row.agrees) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Measures all steps on one set. Each step has a separate session, so that only one session holds memory at a time.
fn climb(engines: &[Engine], set: &Set, args: &Args) -> Result<Vec<Row>, Report> {
    let mut climbed = Vec::with_capacity(engines.len());
    for engine in engines {
        let batch = set.batch(&engine.limits())?;
        let mut session = engine.session()?;
        let output = session.run(&batch)?.get("last_hidden_state")?.clone();
        let ms = session.time(&batch, args.warm_up, args.runs)?.median();
        climbed.push((
            output,
            ms,
            engine.tokens_computed(&batch)?,
            engine.launched(&batch)?,
        ));
    }
    let (Some((want, ..)), Some(&(_, first, ..))) = (climbed.last(), climbed.first()) else {
        return Ok(Vec::new());
    };
    let mut before = first;
    let rungs = RUNGS.iter().zip(engines).zip(&climbed);
    Ok(rungs
        .map(|((rung, engine), (output, ms, tokens, launched))| {
            let comparison = Comparison::between(output, want);
            Row {
                set: set.name.clone(),
                rung: rung.name,
                tokens: *tokens,
                launches: launched.len(),
                launches_a_layer: launches_a_layer(launched),
                ms: *ms,
                step_speedup: std::mem::replace(&mut before, *ms) / ms,
                speedup: first / ms,
                cosine: comparison.cosine,
                max_difference: comparison.max,
                agrees: Bound::of(engine.precision()).holds(&comparison),
            }
        })
        .collect())
}

fn describe(rung: &Rung) -> Described {
    Described {
        name: rung.name,
        passes: rung.passes,
        padded: rung.padding == Padding::Kept,
    }
}

/// Returns the number of launches in the first layer; `None` if there are none. These launches have names of the form `loop.0.…`, where
/// `loop` is the name of the loop over layers in the description.
fn launches_a_layer(launched: &[&Step]) -> Option<usize> {
    let first = |name: &str| {
        let mut parts = name.split('.');
        parts.next().is_some() && parts.next() == Some("0") && parts.next().is_some()
    };
    let n = launched.iter().filter(|s| first(&s.name)).count();
    (n > 0).then_some(n)
}

impl Measured {
    fn show(&self, bound: Bound) -> Result<(), Report> {
        let mut rungs = table(&["rung", "adds"]);
        for rung in &RUNGS {
            rungs.add_row([rung.name.to_owned(), rung.adds()]);
        }
        let mut times = table(&[
            "set",
            "rung",
            "tokens",
            "launches",
            "a layer",
            "ms",
            "step",
            "in all",
            "cosine",
            "max diff.",
            "",
        ]);
        for row in &self.rows {
            times.add_row([
                row.set.clone(),
                row.rung.to_owned(),
                row.tokens.to_string(),
                row.launches.to_string(),
                row.launches_a_layer
                    .map_or_else(|| "–".to_owned(), |n| n.to_string()),
                format!("{:.4}", row.ms),
                format!("{:.3}×", row.step_speedup),
                format!("{:.3}×", row.speedup),
                format!("{:.6}", row.cosine),
                format!("{:.2e}", row.max_difference),
                if row.agrees { "ok" } else { "DIFFERS" }.to_owned(),
            ]);
        }
        align_right(&mut times, 2..10);
        print(&format!(
            "{rungs}\n{times}\n{}, {}, {}; median of {} runs after {} warm-up runs, ids to last hidden state\ntokens: tokens that launches process, including padding; step: speedup over the previous rung; in all: speedup over the baseline\ncosine and max diff.: comparison of the rung's last hidden state with the last rung's, without padding; ok means a cosine of at least {} for every row and a difference of at most {:e}, relative to values above 1\nunfused attention uses grouped GEMMs, in f32 without tensor cores, and ragged scores without padding; the paper uses cuBLAS with padding\n",
            self.model, self.device, self.dtype, self.runs, self.warm_up, bound.cosine, bound.max,
        ))
    }

    /// Draws the time of every step relative to the baseline, because the times of the sets differ by a factor of a hundred.
    fn figure(&self, sets: &[Set]) -> Figure {
        let values = |rung: &Rung| -> Vec<Option<f64>> {
            let rows = self.rows.iter().filter(|row| row.rung == rung.name);
            rows.map(|row| Some(1.0 / f64::from(row.speedup))).collect()
        };
        Figure {
            title: format!(
                "Passes enabled one after another: {}, {}, {}",
                self.model, self.device, self.dtype
            ),
            x_label: "set of lengths".to_owned(),
            y_label: "time, baseline = 1".to_owned(),
            groups: sets.iter().map(|s| s.name.clone()).collect(),
            series: RUNGS
                .iter()
                .map(|rung| Series::new(rung.name, values(rung)))
                .collect(),
            kind: Kind::Bars,
            log_y: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_is_switched_on_by_exactly_one_rung() {
        let mut placed: Vec<&str> = RUNGS.iter().flat_map(|r| r.passes).copied().collect();
        let mut all: Vec<&str> = passes::all().iter().map(|p| p.name()).collect();
        placed.sort_unstable();
        all.sort_unstable();
        assert_eq!(placed, all);
    }

    #[test]
    fn rungs_only_add_passes() {
        for index in 1..RUNGS.len() {
            let (before, now) = (without(index - 1), without(index));
            assert!(now.iter().all(|pass| before.contains(pass)), "{now:?}");
            let padding = [RUNGS[index - 1].padding, RUNGS[index].padding];
            assert_ne!(padding, [Padding::Removed, Padding::Kept]);
        }
        assert_eq!(without(RUNGS.len() - 1), Vec::<&str>::new());
        assert_eq!(RUNGS[RUNGS.len() - 1].padding, Padding::Removed);
    }

    #[test]
    fn padding_is_removed_before_attention_is_fused() {
        for (index, rung) in RUNGS.iter().enumerate() {
            let fused = !without(index).contains(&"fuse_attention");
            assert!(!(fused && rung.padding == Padding::Kept), "{}", rung.name);
        }
    }
}
