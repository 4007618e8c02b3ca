use std::collections::BTreeSet;

use serde_json::Value;

use super::EngineError;
use crate::{
    codegen::{Codegen, Source},
    graph::Graph,
    kernels::KernelSpec,
    machine::Machine,
    model::{self, Description, Model, Module},
    names::nearest,
    passes::{self, PassError, Report},
    program::{self, AttentionChoice, LowerOptions, NEXT_LOGITS, Padding, Program},
    select::{Alternative, Timings},
    tensor::DType,
};

/// What to compile a description for.
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Outputs to compute; `None` means the description's defaults.
    pub outputs: Option<Vec<String>>,
    /// Further values to return, by name: outputs of the description, or values that survive fusion.
    pub intermediates: Vec<String>,
    /// Passes that do not run.
    pub without: BTreeSet<String>,
    /// What a sentence-transformers folder computes behind the transformer; none in other folders.
    pub modules: Vec<Module>,
    pub dtype: DType,
    /// What kernels took in place on the card, which corrects the cost model.
    pub timings: Option<Timings>,
    pub padding: Padding,
    /// Which kernels compute fused attention.
    pub attention: AttentionChoice,
    /// The card that the program is for.
    pub machine: Machine,
    /// One kernel for each operator, so that a sequence's results do not depend on its batch-mates.
    pub invariant: bool,
    /// Every operator by launches of its own.
    pub no_joint_launches: bool,
    /// Whether sequences go on in later batches: what `cache` names lies in a KV cache. Otherwise a sequence is whole in a
    /// batch.
    pub cached: bool,
}

impl CompileOptions {
    /// For a card.
    pub fn new(dtype: DType, machine: Machine) -> Self {
        Self {
            outputs: None,
            intermediates: Vec::new(),
            without: BTreeSet::new(),
            modules: Vec::new(),
            dtype,
            timings: None,
            padding: Padding::Removed,
            attention: AttentionChoice::Auto,
            machine,
            invariant: false,
            no_joint_launches: false,
            cached: false,
        }
    }

    fn lowering(&self) -> LowerOptions<'_> {
        LowerOptions {
            dtype: self.dtype,
            padding: self.padding,
            machine: &self.machine,
            timings: self.timings.as_ref(),
            attention: self.attention,
            invariant: self.invariant,
            no_joint_launches: self.no_joint_launches,
        }
    }
}

/// A description through all pure stages.
pub struct Compiled {
    /// With the unfused graph.
    pub model: Model,
    /// After the passes.
    pub graph: Graph,
    pub report: Report,
    pub program: Program,
    pub options: CompileOptions,
}

impl Compiled {
    /// Kernels that may be as good for batches of so many tokens as those that are launched, as
    /// [`Question::alternatives`](crate::select::Question::alternatives).
    pub fn alternatives(&self, tokens: u64, more: f64) -> Result<Vec<Alternative>, EngineError> {
        let options = self.options.lowering();
        Ok(program::alternatives(&self.graph, &options, tokens, more)?)
    }

    /// The program with other timings.
    pub fn program_with(&self, timings: &Timings) -> Result<Program, EngineError> {
        let options = LowerOptions {
            timings: Some(timings),
            ..self.options.lowering()
        };
        Ok(program::lower(&self.graph, &options)?)
    }

    /// Whether the graph can be lowered for every storage type and for every card that is described.
    ///
    /// # Errors
    /// What cannot be, whatever this program was compiled for.
    pub fn check_everywhere(&self) -> Result<(), EngineError> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for machine in Machine::all()? {
                let options = LowerOptions {
                    dtype,
                    machine,
                    timings: None,
                    ..self.options.lowering()
                };
                program::lower(&self.graph, &options)?;
            }
        }
        Ok(())
    }

    /// The same model with other timings.
    pub fn with_timings(mut self, timings: Option<Timings>) -> Result<Self, EngineError> {
        self.options.timings = timings;
        self.program = program::lower(&self.graph, &self.options.lowering())?;
        Ok(self)
    }
}

/// Description and config to program. Needs no device and no CUDA library.
pub fn compile(
    description: &Description,
    config: &Value,
    options: &CompileOptions,
) -> Result<Compiled, EngineError> {
    let outputs = chosen_outputs(description, options);
    let mut asked = options.outputs.iter().flatten();
    let writes = options.cached && asked.any(|name| name == NEXT_LOGITS);
    if writes && !description.output_names().contains(&NEXT_LOGITS) {
        return Err(EngineError::WritesNothing {
            model: description.name().to_owned(),
        });
    }
    if writes && !description.writes(config) {
        return Err(EngineError::OtherTask {
            architecture: config["architectures"][0].as_str().unwrap_or("").to_owned(),
        });
    }
    let model = description.build_with(config, outputs.as_deref(), &options.modules)?;
    let passes = passes::Options {
        without: options.without.clone(),
    };
    let unfused = match options.cached {
        true if !model.graph.has_caches() => {
            return Err(EngineError::NoCache { model: model.name });
        }
        true => {
            let padded = model.graph.clone().with_padded_heads();
            padded.map_err(|source| PassError::Unsound { source })?
        }
        false => match model.graph.remembered() {
            None => model.graph.clone().without_caches(),
            Some(id) => {
                return Err(EngineError::NeedsSource {
                    value: model.graph.node(id).name.clone(),
                    model: model.name,
                });
            }
        },
    };
    let (mut graph, report) = passes::optimize(unfused, &passes)?;
    for name in &options.intermediates {
        if graph.outputs().iter().any(|(n, _)| n == name) {
            continue;
        }
        let found = graph
            .topological()
            .into_iter()
            .find(|&id| graph.node(id).name == *name);
        let Some(id) = found else {
            let names = graph
                .topological()
                .into_iter()
                .filter(|&id| graph.op(id).is_compute());
            let near = nearest(name, names.map(|id| graph.node(id).name.as_str()))
                .map(|near| format!("; the nearest name is `{near}`"));
            return Err(EngineError::NoIntermediate {
                name: name.clone(),
                near: near.unwrap_or_default(),
            });
        };
        graph.add_output(name.clone(), id);
    }
    let program = program::lower(&graph, &options.lowering())?;
    Ok(Compiled {
        model,
        graph,
        report,
        program,
        options: options.clone(),
    })
}

/// The asked outputs, and those that are asked for among the intermediates; `None` where that is none.
fn chosen_outputs<'a>(
    description: &'a Description,
    options: &'a CompileOptions,
) -> Option<Vec<&'a str>> {
    let mut known = description.output_names();
    known.extend(model::computed(&options.modules));
    let further = options.intermediates.iter().map(String::as_str);
    let further: Vec<&str> = further.filter(|name| known.contains(name)).collect();
    let mut outputs: Vec<&str> = match &options.outputs {
        Some(outputs) => outputs.iter().map(String::as_str).collect(),
        None if !further.is_empty() => Vec::new(),
        // Values that are no outputs are looked for in the graph of the default ones.
        None => return None,
    };
    for name in further {
        if !outputs.contains(&name) {
            outputs.push(name);
        }
    }
    Some(outputs)
}

/// The CUDA source of kernels, in their order.
pub fn emit(kernels: &[KernelSpec]) -> Result<Vec<Source>, EngineError> {
    let codegen = Codegen::new()?;
    Ok(kernels
        .iter()
        .map(|k| codegen.source(k.as_kernel()))
        .collect::<Result<_, _>>()?)
}
