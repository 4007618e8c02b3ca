//! Compiles and runs random descriptions that contain all operators. If `gemmule check` would accept a description, its results with and
//! without fusion must be the same.

mod generate;

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::common::mates::Numbers;
use gemmule::{
    Batch, DType, DeviceChoice, Engine, EngineError, Outputs,
    engine::{Compiled, ModelFile, compile},
    graph::Op,
    model::{Description, ModelError, operators},
    passes::{self, Entry},
    runtime::weights::RandomWeights,
};
use rayon::prelude::*;
use serde_json::{Value, json};

const GRAPHS: u64 = 500;
/// Min number of accepted descriptions out of [`GRAPHS`], to ensure that most descriptions are compared.
const ACCEPTED: usize = 450;
/// Max difference between two values of an output, relative to the largest value of the output.
const TOLERANCE: f32 = 1e-4;

/// Names of operators in the unfused graph: all operators of the language except norms of rows.
const OPERATORS: [&str; 32] = [
    "embedding",
    "linear",
    "add_bias",
    "add",
    "gelu",
    "gelu_tanh",
    "relu",
    "tanh",
    "scale",
    "soft_cap",
    "split_heads",
    "merge_heads",
    "scores",
    "softmax",
    "context",
    "first_token",
    "last_token",
    "mean_pool",
    "max_pool",
    "weighted_mean_pool",
    "root_length_pool",
    "concat",
    "draw",
    "multiply",
    "silu",
    "quick_gelu",
    "log1p_relu",
    "head_layer_norm",
    "rotary",
    "slice_columns",
    "relative_scores",
    "log_probability",
];

/// Attributes and statements of the language that cannot be counted by the names of operators in the graph. The test searches for them in
/// the source of descriptions.
const WORDS: [&str; 26] = [
    "causal: true",
    "window: ",
    "bias: alibi",
    "bias: alibi(scale: ",
    "bias: relative_bias(",
    "sinusoid: ",
    "skips: ",
    "same(",
    "When(holds: ",
    "When(key: ",
    "plus_one: true",
    "longest: ",
    "of: ",
    "position_table(",
    "rms_norm heads",
    "layer_norm heads",
    "interleaved: ",
    "layer_norm alone",
    "layer_norm bare",
    "grouped heads",
    "\"linear\"]",
    "\"dynamic\"]",
    "\"ntk\"]",
    "\"llama3\"]",
    "\"yarn\"]",
    "\"default\"]",
];

/// Returns the entries of [`WORDS`] that a description contains.
fn words(source: &str) -> Vec<&'static str> {
    let lines = || source.lines();
    let has = |word: &str| match word {
        "rms_norm heads" => lines().any(|l| l.contains("rms_norm(") && l.contains("heads: ")),
        "layer_norm heads" => lines().any(|l| l.contains("layer_norm(") && l.contains("heads: ")),
        "layer_norm bare" => lines().any(|l| l.contains("layer_norm(") && !l.contains("weight: ")),
        "layer_norm alone" => lines().any(|l| l.contains("layer_norm(") && !l.contains("bias: ")),
        word => source.contains(word),
    };
    WORDS.into_iter().filter(|word| has(word)).collect()
}

/// Number of occurrences of each operator, pass and entry of [`WORDS`], by its name.
type Counts = BTreeMap<String, usize>;

fn config() -> Value {
    json!({
        "width": 24, "n_layers": 2, "hidden_act": "gelu_new", "kinds": ["even", "odd"],
        "default": {"rope_type": "default"},
        "linear": {"type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 5},
        "ntk": {"type": "ntk", "factor": 8.0},
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    })
}

/// Checks a description like `gemmule check`, and compiles it.
fn check(description: &Description) -> Result<Compiled, EngineError> {
    let compiled = compile(description, &config(), &crate::common::options(DType::F16))?;
    compiled.model.check_expectations(&compiled.graph)?;
    compiled.check_everywhere()?;
    Ok(compiled)
}

fn run(description: &Description, seed: u64, without: &[&str]) -> Result<Outputs, EngineError> {
    let weights = RandomWeights {
        seed,
        deviation: 0.2,
    };
    let model = ModelFile::Description(Box::new(description.clone()));
    let engine = Engine::from_model(model)
        .config_value(config())
        .random_weights(weights)
        .without(without.iter().copied())
        .device(DeviceChoice::Cpu)
        .build()?;
    let limits = engine.limits();
    let mut numbers = Numbers(seed);
    let sequences: Vec<Vec<u32>> = (0..1 + numbers.below(4))
        .map(|_| {
            let len = 1 + numbers.below(limits.longest.unwrap_or(7).min(7));
            let mut ids = numbers.sequence(len, limits.vocabulary);
            if let Some(skipped) = limits.skipped {
                ids.iter_mut()
                    .filter(|id| **id == skipped)
                    .for_each(|id| *id += 1);
            }
            ids
        })
        .collect();
    let n_tokens = sequences.iter().map(Vec::len).sum::<usize>() as u32;
    let mut batch = Batch::from_sequences(&sequences)?;
    if let Some(kinds) = limits.segments {
        batch = batch.with_type_ids(numbers.sequence(n_tokens, kinds))?;
    }
    engine.session()?.run(&batch)
}

/// Describes the difference between the outputs of two runs, if there is one.
fn difference(fused: &Outputs, unfused: &Outputs) -> Option<String> {
    for (fused, unfused) in fused.iter().zip(unfused.iter()) {
        let name = &unfused.name;
        if (&fused.name, &fused.shape) != (name, &unfused.shape) {
            let (a, b) = (&fused.shape, &unfused.shape);
            return Some(format!("`{}` {a:?} is not `{name}` {b:?}", fused.name));
        }
        let size = |most: f32, value: &f32| most.max(value.abs());
        let largest = unfused.values.iter().fold(0.1, size);
        for (i, (a, b)) in fused.values.iter().zip(&unfused.values).enumerate() {
            // Test for `<=` and not for `>`, because both are false for NaN, which must count as a difference.
            let is_near = (a - b).abs() <= TOLERANCE * largest;
            if !is_near {
                return Some(format!(
                    "`{name}`[{i}] is {a} fused, {b} unfused, of {largest}"
                ));
            }
        }
    }
    let n = |outputs: &Outputs| outputs.iter().count();
    (n(fused) != n(unfused)).then(|| "other outputs".to_owned())
}

/// Checks one description, and counts its operators in `counts`. Returns the reason if the description is refused, and an error if the test
/// fails.
fn examine(source: &str, seed: u64, counts: &mut Counts) -> Result<Option<String>, String> {
    let description = match Description::parse("random.ron", source) {
        Ok(description) => description,
        Err(error) => return refused_in_place(&error),
    };
    let compiled = match check(&description) {
        Ok(compiled) => compiled,
        Err(EngineError::Model(error)) => return refused_in_place(&error),
        Err(error) => return Err(format!("refused without a place: {error}")),
    };
    compiled.program.validate()?;
    let graph = &compiled.model.graph;
    for id in graph.topological() {
        let op = graph.op(id);
        *counts.entry(op.name().into_owned()).or_default() += 1;
        if matches!(op, Op::Scores { heads, kv_heads, .. } if heads > kv_heads) {
            *counts.entry("grouped heads".to_owned()).or_default() += 1;
        }
    }
    for word in words(source) {
        *counts.entry(word.to_owned()).or_default() += 1;
    }
    for entry in &compiled.report.entries {
        if let Entry::Fused { pass, .. } = entry {
            *counts.entry((*pass).to_owned()).or_default() += 1;
        }
    }
    let passes: Vec<&str> = passes::all().iter().map(|pass| pass.name()).collect();
    let failed = |error: EngineError| format!("accepted, but {error}: {error:?}");
    let fused = run(&description, seed, &[]).map_err(failed)?;
    let unfused = run(&description, seed, &passes).map_err(failed)?;
    match difference(&fused, &unfused) {
        None => Ok(None),
        Some(difference) => Err(difference),
    }
}

fn refused_in_place(error: &ModelError) -> Result<Option<String>, String> {
    match error.span() {
        Some(_) => Ok(Some(error.to_string())),
        None => Err(format!("refused without a place: {error}")),
    }
}

#[test]
fn fused_and_unfused_descriptions_compute_the_same() {
    let examined: Vec<_> = (0..GRAPHS)
        .into_par_iter()
        .map(|seed| {
            let (source, is_right) = generate::description(seed);
            let mut counts = Counts::new();
            let result = catch_unwind(AssertUnwindSafe(|| examine(&source, seed, &mut counts)));
            let result = result.unwrap_or_else(|_| Err("a panic".to_owned()));
            (seed, source, is_right, result, counts)
        })
        .collect();
    let mut counts = Counts::new();
    let mut n_accepted = 0;
    let mut wrong = Vec::new();
    for (seed, source, is_right, result, counted) in examined {
        for (name, n) in counted {
            *counts.entry(name).or_default() += n;
        }
        match result {
            Ok(None) if is_right => n_accepted += 1,
            Ok(Some(_)) if !is_right => {}
            Ok(None) => wrong.push(format!("seed {seed}: accepted what is wrong\n{source}")),
            Ok(Some(problem)) => wrong.push(format!("seed {seed}: refused: {problem}\n{source}")),
            Err(problem) => wrong.push(format!("seed {seed}: {problem}\n{source}")),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {GRAPHS} graphs, as {}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("\n")
    );
    let n_refused = GRAPHS as usize - n_accepted;
    assert!(
        n_accepted >= ACCEPTED && n_refused >= 10,
        "{n_accepted} of {GRAPHS} were accepted, {n_refused} refused"
    );
    let passes = passes::all().iter().map(|pass| pass.name());
    let norms = operators::norms::ALL.iter().map(|norm| norm.name);
    let names = OPERATORS.into_iter().chain(norms).chain(WORDS);
    for name in names.chain(passes) {
        let n = counts.get(name).copied().unwrap_or(0);
        assert!(n >= 10, "{name} occurred {n} times: {counts:?}");
    }
}
