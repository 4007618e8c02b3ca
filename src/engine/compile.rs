use std::collections::BTreeSet;

use serde_json::Value;

use super::EngineError;
use crate::{
    codegen::{Codegen, Source},
    graph::Graph,
    kernels::{Instructions, KernelSpec},
    model::{Description, Model},
    names::nearest,
    passes::{self, Report},
    program::{self, AttentionChoice, LowerOptions, Padding, Program},
    tensor::DType,
    tune::{Picks, Problem},
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
    pub dtype: DType,
    /// Which kernels to launch where there are several; the cost model's first guess otherwise.
    pub picks: Option<Picks>,
    pub padding: Padding,
    /// Which kernels compute fused attention.
    pub attention: AttentionChoice,
    /// What the kernels may use.
    pub instructions: Instructions,
    /// One kernel for each operator, so that a sequence's results do not depend on its batch-mates.
    pub invariant: bool,
    /// LayerNorm always by a launch of its own.
    pub norms_apart: bool,
}

impl CompileOptions {
    pub fn new(dtype: DType) -> Self {
        Self {
            outputs: None,
            intermediates: Vec::new(),
            without: BTreeSet::new(),
            dtype,
            picks: None,
            padding: Padding::Removed,
            attention: AttentionChoice::Auto,
            instructions: Instructions::default(),
            invariant: false,
            norms_apart: false,
        }
    }

    fn lowering(&self) -> LowerOptions<'_> {
        LowerOptions {
            dtype: self.dtype,
            padding: self.padding,
            instructions: self.instructions,
            picks: self.picks.as_ref(),
            attention: self.attention,
            invariant: self.invariant,
            norms_apart: self.norms_apart,
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
    /// What has several kernels to choose from.
    pub fn problems(&self) -> Result<Vec<Problem>, EngineError> {
        Ok(program::problems(&self.graph, &self.options.lowering())?)
    }

    /// What one choice is made of, and how often a run has it.
    pub fn groups(&self) -> Result<Vec<(Vec<Problem>, usize)>, EngineError> {
        Ok(program::groups(&self.graph, &self.options.lowering())?)
    }

    /// The program with other picks.
    pub fn program_with(&self, picks: &Picks) -> Result<Program, EngineError> {
        let options = LowerOptions {
            picks: Some(picks),
            ..self.options.lowering()
        };
        Ok(program::lower(&self.graph, &options)?)
    }

    /// Whether the graph can be lowered for every storage type and for every card.
    ///
    /// # Errors
    /// What cannot be, whatever this program was compiled for.
    pub fn check_everywhere(&self) -> Result<(), EngineError> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for instructions in [Instructions::Ampere, Instructions::Hopper] {
                let options = LowerOptions {
                    dtype,
                    instructions,
                    picks: None,
                    ..self.options.lowering()
                };
                program::lower(&self.graph, &options)?;
            }
        }
        Ok(())
    }

    /// The same model with other picks.
    pub fn with_picks(mut self, picks: Option<Picks>) -> Result<Self, EngineError> {
        self.options.picks = picks;
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
    let model = description.build(config, Some(&outputs))?;
    let passes = passes::Options {
        without: options.without.clone(),
    };
    let (mut graph, report) = passes::optimize(model.graph.clone(), &passes)?;
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

/// The asked outputs, or the defaults; and those that are asked for among the intermediates.
fn chosen_outputs<'a>(description: &'a Description, options: &'a CompileOptions) -> Vec<&'a str> {
    let further = || options.intermediates.iter().map(String::as_str);
    let known = description.output_names();
    let mut outputs: Vec<&str> = match &options.outputs {
        Some(outputs) => outputs.iter().map(String::as_str).collect(),
        None if further().any(|name| known.contains(&name)) => Vec::new(),
        None => description.default_outputs(),
    };
    for name in further().filter(|name| known.contains(name)) {
        if !outputs.contains(&name) {
            outputs.push(name);
        }
    }
    outputs
}

/// The CUDA source of kernels, in their order.
pub fn emit(kernels: &[KernelSpec]) -> Result<Vec<Source>, EngineError> {
    let codegen = Codegen::new()?;
    Ok(kernels
        .iter()
        .map(|k| codegen.source(k.as_kernel()))
        .collect::<Result<_, _>>()?)
}
