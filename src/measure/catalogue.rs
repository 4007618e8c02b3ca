//! The catalogue of tested kernels: those of the shipped models at common published sizes, fused and unfused, in every
//! storage type, and representative instances for odd sizes.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    engine::{CompileOptions, EngineError, compile},
    graph::{Graph, Op},
    kernels::{KernelSpec, representative},
    machine::{Fit, Machine},
    model::Description,
    passes,
    program::{AttentionChoice, NEXT_LOGITS},
    tensor::DType,
    text::TextError,
};

/// Published sizes by name, with their description and config.
macro_rules! published {
    ($($name:literal: $description:literal),* $(,)?) => {
        &[$((
            $name,
            $description,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/models/configs/", $name, ".json")),
        )),*]
    };
}

const CONFIGS: &[(&str, &str, &str)] = published! {
    "bert-base": "bert",
    "bert-large": "bert",
    "minilm-l6": "bert",
    "roberta-base": "roberta",
    "distilbert-base": "distilbert",
    "albert-base": "albert",
    "electra-base": "electra",
    "modernbert-base": "modernbert",
    "nomic-embed-text-v1.5": "nomic_bert",
    "gpt2": "gpt2",
    "llama-3.2-1b": "llama",
    "qwen3-0.6b": "qwen3",
    "marian-base": "marian",
};

/// Sizes that contribute only their fused 16-bit programs. Their other kernels differ from those of other sizes only in
/// width.
const FUSED_ONLY: [&str; 6] = [
    "bert-large",
    "modernbert-base",
    "nomic-embed-text-v1.5",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "marian-base",
];

/// Returns the name, description and `config.json` of the shipped models.
pub fn shipped_configs() -> Result<Vec<(&'static str, &'static str, Value)>, EngineError> {
    CONFIGS
        .iter()
        .map(|&(name, description, text)| {
            let value = serde_json::from_str(text).map_err(|e| TextError::Config {
                file: format!("models/configs/{name}.json").into(),
                problem: e.to_string(),
            })?;
            Ok((name, description, value))
        })
        .collect()
}

/// A kernel, and the models that launch it.
#[derive(Clone, Debug)]
pub struct Emitted {
    pub kernel: KernelSpec,
    /// Names of shipped sizes that launch it; empty for a representative instance.
    pub models: Vec<String>,
}

/// Returns the cards of the catalogue: those with fitted cost models, and the default card, which represents all others.
fn answered_for() -> Result<Vec<Machine>, EngineError> {
    let fitted = Machine::all()?
        .iter()
        .filter(|machine| machine.fit == Fit::Timings);
    Ok(fitted.cloned().chain([Machine::usual()?]).collect())
}

/// Whether every token attends to every token in all attentions of a model.
fn attends_in_full(graph: &Graph) -> bool {
    let mut nodes = graph.topological().into_iter();
    nodes.all(|id| match graph.op(id) {
        Op::Attention(of) => of.is_full(),
        _ => true,
    })
}

/// Returns all kernels by symbol.
pub fn catalogue() -> Result<BTreeMap<String, Emitted>, EngineError> {
    let mut found: BTreeMap<String, Emitted> = BTreeMap::new();
    let mut add = |kernel: KernelSpec, model: Option<&str>| {
        let symbol = kernel.as_kernel().symbol();
        let entry = found.entry(symbol).or_insert_with(|| Emitted {
            kernel,
            models: Vec::new(),
        });
        if let Some(model) = model.filter(|&m| entry.models.iter().all(|known| known != m)) {
            entry.models.push(model.to_owned());
        }
    };
    let machines = answered_for()?;
    for (name, description, config) in shipped_configs()? {
        let Some(description) = Description::shipped(description) else {
            continue;
        };
        let description = description?;
        let mut outputs: Vec<String> = Vec::new();
        for output in description.outputs_without_source() {
            // Skips outputs that need files which few checkpoints of these sizes have.
            let model = description.build(&config, Some(&[output]))?;
            if !model.weight_names.reads_other_files() {
                outputs.push(output.to_owned());
            }
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (fused, machine) in [true, false].into_iter().flat_map(|fused| {
                let fitted = machines.iter().map(move |machine| (fused, machine));
                fitted.collect::<Vec<_>>()
            }) {
                if FUSED_ONLY.contains(&name) && (!fused || dtype == DType::F32) {
                    continue;
                }
                let mut options = CompileOptions {
                    outputs: Some(Vec::clone(&outputs)),
                    ..CompileOptions::new(dtype, (*machine).clone())
                };
                if !fused {
                    options.without = passes::all().iter().map(|p| p.name().to_owned()).collect();
                }
                let compiled = compile(&description, &config, &options)?;
                let kernels = compiled.program.kernels.into_iter();
                kernels.for_each(|kernel| add(kernel, Some(name)));
                if !fused {
                    continue;
                }
                // Programs that are only compiled on request.
                let mut others = vec![CompileOptions {
                    invariant: true,
                    ..options.clone()
                }];
                // Programs of a single output: values that no other output reads are fused, or computed for fewer rows.
                if dtype != DType::F32 {
                    others.extend(outputs.iter().map(|output| CompileOptions {
                        outputs: Some(vec![output.clone()]),
                        ..options.clone()
                    }));
                }
                if attends_in_full(&compiled.graph) {
                    others.push(CompileOptions {
                        attention: AttentionChoice::Grouped,
                        ..options.clone()
                    });
                }
                let writes = description.output_names().contains(&NEXT_LOGITS);
                if compiled.model.graph.has_caches() || writes {
                    others.push(CompileOptions {
                        outputs: Some(vec![NEXT_LOGITS.to_owned()]),
                        cached: true,
                        ..options
                    });
                }
                for options in others {
                    let compiled = compile(&description, &config, &options)?;
                    let kernels = compiled.program.kernels.into_iter();
                    kernels.for_each(|kernel| add(kernel, Some(name)));
                }
            }
        }
    }
    for kernel in representative().into_iter().chain(KernelSpec::runtime()) {
        add(kernel, None);
    }
    Ok(found)
}
