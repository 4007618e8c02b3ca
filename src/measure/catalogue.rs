//! The catalogue of tested kernels: the kernels of the shipped models at common published sizes, fused and unfused, in every storage type,
//! and representative instances for odd sizes.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde_json::Value;

use crate::{
    engine::{CompileOptions, EngineError, compile},
    graph::{Graph, Op},
    kernels::{KernelSpec, representative},
    machine::{Fit, Machine},
    model::Description,
    passes,
    program::{AttentionChoice, NEXT_LOGITS},
    tensor::{DType, Format},
    text::TextError,
};

/// Published model sizes by name, each with the name of its model description and the text of its config.json.
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

/// Model sizes that contribute only their fused 16-bit programs to the catalogue. Their other kernels differ only in width from kernels of
/// other sizes.
const FUSED_ONLY: [&str; 6] = [
    "bert-large",
    "modernbert-base",
    "nomic-embed-text-v1.5",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "marian-base",
];

/// Model sizes that also contribute their program with weights and inputs in E4M3: an encoder with norms after sums, and an encoder with
/// gates, rotary positions, and norms before layers. The E4M3 kernels of other sizes differ from the kernels of these two only in width.
const IN_FP8: [&str; 2] = ["bert-base", "modernbert-base"];

/// Returns the name of each published model size, with the name of its description and its config.json.
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

/// A kernel, and the models whose programs launch it.
#[derive(Clone, Debug)]
pub struct Emitted {
    pub kernel: KernelSpec,
    /// Names of the model sizes whose programs launch the kernel. Empty for kernels that come from no program, such as representative
    /// instances for odd sizes.
    pub models: Vec<String>,
}

/// Returns the cards of the catalogue: those with fitted cost models, and the default card, which represents all others.
fn answered_for() -> Result<Vec<Machine>, EngineError> {
    let fitted = Machine::all()?
        .iter()
        .filter(|machine| machine.fit == Fit::Timings);
    Ok(fitted.cloned().chain([Machine::usual()?]).collect())
}

/// Returns whether, in all attentions of a model, every token attends to every token of its sequence.
fn attends_in_full(graph: &Graph) -> bool {
    let mut nodes = graph.topological().into_iter();
    nodes.all(|id| match graph.op(id) {
        Op::Attention(of) => of.is_full(),
        _ => true,
    })
}

/// Returns all kernels of the catalogue, keyed by symbol.
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
    let mut sizes = Vec::new();
    for (name, description, config) in shipped_configs()? {
        if let Some(description) = Description::shipped(description) {
            sizes.push(Published::new(name, description?, config)?);
        }
    }
    let each = sizes.iter().flat_map(|size| {
        let options = size.options(&machines);
        options.into_iter().map(move |options| (size, options))
    });
    let each: Vec<(&Published, CompileOptions)> = each.collect();
    let kernels = each
        .into_par_iter()
        .map(|(size, options)| Ok((size.name, size.kernels(options)?)));
    for (name, kernels) in kernels.collect::<Result<Vec<_>, EngineError>>()? {
        kernels
            .into_iter()
            .for_each(|kernel| add(kernel, Some(name)));
    }
    for kernel in representative().into_iter().chain(KernelSpec::runtime()) {
        add(kernel, None);
    }
    Ok(found)
}

/// A model of a published size.
struct Published {
    name: &'static str,
    description: Description,
    config: Value,
    /// Names of the outputs whose weights are all in the checkpoint's main file.
    outputs: Vec<String>,
}

impl Published {
    fn new(
        name: &'static str,
        description: Description,
        config: Value,
    ) -> Result<Self, EngineError> {
        let mut outputs: Vec<String> = Vec::new();
        for output in description.outputs_without_source() {
            let model = description.build(&config, Some(&[output]))?;
            if !model.weight_names.reads_other_files() {
                outputs.push(output.to_owned());
            }
        }
        Ok(Self {
            name,
            description,
            config,
            outputs,
        })
    }

    /// Returns the options of the fused and the unfused program, for each storage type and card.
    fn options(&self, machines: &[Machine]) -> Vec<CompileOptions> {
        let fused_only = FUSED_ONLY.contains(&self.name);
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for fused in [true, false] {
                if fused_only && (!fused || dtype == DType::F32) {
                    continue;
                }
                all.extend(machines.iter().map(|machine| CompileOptions {
                    outputs: Some(self.outputs.clone()),
                    without: match fused {
                        true => BTreeSet::new(),
                        false => passes::all().iter().map(|p| p.name().to_owned()).collect(),
                    },
                    ..CompileOptions::new(dtype, machine.clone())
                }));
            }
        }
        all
    }

    /// Returns the kernels of the program with these options. If the program is fused, adds the kernels of programs that are only compiled
    /// on request.
    fn kernels(&self, options: CompileOptions) -> Result<Vec<KernelSpec>, EngineError> {
        let compiled = compile(&self.description, &self.config, &options)?;
        let mut kernels = compiled.program.kernels;
        if !options.without.is_empty() {
            return Ok(kernels);
        }
        let mut others = vec![CompileOptions {
            invariant: true,
            ..options.clone()
        }];
        // Programs with a single output are added, because they may have kernels that the program with all outputs lacks. They can fuse a
        // value that another output would read, or compute the value for fewer tokens.
        if options.dtype != DType::F32 {
            others.extend(self.outputs.iter().map(|output| CompileOptions {
                outputs: Some(vec![output.clone()]),
                ..options.clone()
            }));
        }
        if options.dtype == DType::F16 && IN_FP8.contains(&self.name) {
            others.push(CompileOptions {
                quantize: Some(Format::FP8),
                ..options.clone()
            });
        }
        if attends_in_full(&compiled.graph) {
            others.push(CompileOptions {
                attention: AttentionChoice::Grouped,
                ..options.clone()
            });
        }
        let writes = self.description.output_names().contains(&NEXT_LOGITS);
        if compiled.model.graph.has_caches() || writes {
            others.push(CompileOptions {
                outputs: Some(vec![NEXT_LOGITS.to_owned()]),
                cached: true,
                ..options
            });
        }
        for options in others {
            let compiled = compile(&self.description, &self.config, &options)?;
            kernels.extend(compiled.program.kernels);
        }
        Ok(kernels)
    }
}
