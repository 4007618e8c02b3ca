use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use serde_json::Value;

use super::{EngineError, Origin};
use crate::{
    codegen::{Codegen, Source},
    graph::Graph,
    kernels::KernelSpec,
    machine::Machine,
    model::{self, Description, Model, Module, TOKEN_VECTORS},
    names::nearest,
    passes::{self, PassError, Report},
    program::{self, AttentionChoice, Fusions, LowerOptions, NEXT_LOGITS, Padding, Program},
    select::{Alternative, Timings},
    tensor::{DType, Extents, Format},
};

/// Options of [`compile`].
#[derive(Clone, Debug)]
pub struct CompileOptions {
    /// Outputs to compute; `None` selects the description's defaults.
    pub outputs: Option<Vec<String>>,
    /// Names of additional values to return: outputs of the description, or intermediate values that were not fused away.
    pub intermediates: Vec<String>,
    /// Names of disabled passes.
    pub without: BTreeSet<String>,
    /// Modules after the transformer in a sentence-transformers folder; empty for other folders.
    pub modules: Vec<Module>,
    pub dtype: DType,
    /// Format that the weights of linear layers are stored in; `None` for the storage type.
    pub quantize: Option<Format>,
    /// Formats of the checkpoint tensors that keep their published quantized values, by tensor name. Ignored if `quantize` is set.
    pub published: BTreeMap<String, Format>,
    /// Formats of the checkpoint tensors with GPTQ's `desc_act` (columns sorted by quantization group), by tensor name. These tensors keep
    /// their published values if their inputs can be computed in the order of the quantization groups. Ignored if `quantize` is set or if
    /// there are `intermediates`.
    pub ordered: BTreeMap<String, Format>,
    /// Whether the checkpoint quantizes only weights. Linear layers whose weights keep their published values then read their inputs in 16
    /// bits. Ignored if `quantize` is set.
    pub keeps_inputs: bool,
    /// Format of the KV cache; `None` for the storage type.
    pub kv_cache: Option<Format>,
    /// Whether the checkpoint contains scales for a KV cache in E4M3. If it does, the program reads them.
    pub cache_scales: bool,
    /// Measured kernel times, which correct the cost model.
    pub timings: Option<Timings>,
    pub padding: Padding,
    /// Choice of the kernels for fused attention.
    pub attention: AttentionChoice,
    /// The card to compile for.
    pub machine: Machine,
    /// Whether each operator has a single kernel, so that a sequence's results do not depend on the rest of the batch.
    pub invariant: bool,
    /// Whether every operator has its own launch.
    pub no_fused_launches: bool,
    /// Whether a sequence may continue in later batches. If so, the values of `cache` nodes are kept in a KV cache. Otherwise, a batch
    /// contains whole sequences.
    pub cached: bool,
}

impl CompileOptions {
    /// Creates the default options for a card.
    pub fn new(dtype: DType, machine: Machine) -> Self {
        Self {
            outputs: None,
            intermediates: Vec::new(),
            without: BTreeSet::new(),
            modules: Vec::new(),
            dtype,
            quantize: None,
            published: BTreeMap::new(),
            ordered: BTreeMap::new(),
            keeps_inputs: false,
            kv_cache: None,
            cache_scales: false,
            timings: None,
            padding: Padding::Removed,
            attention: AttentionChoice::Auto,
            machine,
            invariant: false,
            no_fused_launches: false,
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
            quantizes_rows: !(self.without.contains(passes::QUANTIZE_INPUTS)
                || (self.keeps_inputs && self.quantize.is_none())),
            no_fused_launches: self.no_fused_launches,
        }
    }
}

/// A compiled description, with the results of the intermediate stages.
pub struct Compiled {
    /// The model with its unfused graph.
    pub model: Model,
    /// The graph after the passes.
    pub graph: Graph,
    pub report: Report,
    pub program: Program,
    pub options: CompileOptions,
    /// The description, and the sizes and modules that it was compiled for.
    pub origin: Origin,
}

impl Compiled {
    /// Returns kernels that were not selected for batches of `tokens` tokens, but whose estimated times are close to those of the selected
    /// kernels. `more` limits the difference, as described for
    /// [`SelectionInput::alternatives`](crate::select::SelectionInput::alternatives).
    pub fn alternatives(&self, tokens: u64, more: f64) -> Result<Vec<Alternative>, EngineError> {
        let options = self.options.lowering();
        Ok(program::alternatives(&self.graph, &options, tokens, more)?)
    }

    /// Returns which rules fused operators into launches for a batch, and why other rules did not.
    pub fn fusions(&self, batch: &Extents) -> Result<Fusions, EngineError> {
        let options = self.options.lowering();
        Ok(program::explain(&self.graph, &options, batch)?)
    }

    /// Lowers the graph again with `timings`.
    pub fn program_with(&self, timings: &Timings) -> Result<Program, EngineError> {
        let options = LowerOptions {
            timings: Some(timings),
            ..self.options.lowering()
        };
        Ok(program::lower(&self.graph, &options)?)
    }

    /// Checks that the graph can be lowered for every storage type and every described card.
    ///
    /// # Errors
    /// Returns the error of the first combination that cannot be lowered.
    pub fn check_everywhere(&self) -> Result<(), EngineError> {
        // These properties alone determine the kernels of a card. Other properties only change their costs.
        let key = |m: &Machine| (m.instructions, m.shared_per_sm, m.shared_per_cta);
        let mut machines: Vec<&Machine> = Vec::new();
        for machine in Machine::all()? {
            if machines.iter().all(|known| key(known) != key(machine)) {
                machines.push(machine);
            }
        }
        let lowered = (self.options.dtype, key(&self.options.machine));
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for &machine in &machines {
                if (dtype, key(machine)) == lowered {
                    continue;
                }
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

    /// Lowers the graph again with `timings`, and replaces the program.
    pub fn with_timings(mut self, timings: Option<Timings>) -> Result<Self, EngineError> {
        self.options.timings = timings;
        self.program = program::lower(&self.graph, &self.options.lowering())?;
        Ok(self)
    }
}

impl CompileOptions {
    /// Returns the options for a late-interaction model whose sequences may end with tokens to which no token attends (query expansion).
    /// Only attention that stores scores can mask these tokens, so `fuse_attention` is disabled. Any other model keeps its options.
    fn with_expansion(&self) -> Cow<'_, Self> {
        let mut asked = self.outputs.iter().flatten();
        let computes = self.outputs.is_none() || asked.any(|name| name == TOKEN_VECTORS);
        let hides = model::normalizes_tokens(&self.modules) == Some(true);
        match self.padding {
            Padding::Removed if computes && hides => {
                let mut options = self.clone();
                options.padding = Padding::Expanded;
                options.without.insert("fuse_attention".to_owned());
                Cow::Owned(options)
            }
            Padding::Removed | Padding::Expanded | Padding::Kept => Cow::Borrowed(self),
        }
    }
}

/// Compiles a description and config to a program. Needs neither a device nor a CUDA library.
pub fn compile(
    description: &Description,
    config: &Value,
    options: &CompileOptions,
) -> Result<Compiled, EngineError> {
    let options = &*options.with_expansion();
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
        quantize: options.quantize,
        published: options.published.clone(),
        ordered: match options.intermediates.is_empty() && options.quantize.is_none() {
            true => options.ordered.clone(),
            false => BTreeMap::new(),
        },
        cache: options.kv_cache.filter(|_| options.cached),
        cache_scales: options.cache_scales,
        // Round inputs to E4M3 to make products faster, but not in programs with a KV cache: their decode steps multiply few rows of
        // activations and spend most of the time reading the weights.
        fp8_inputs: options.dtype.has_mma()
            && options.machine.has_e4m3_products()
            && !options.cached,
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
    let origin = Origin::of(description, config, &options.modules, &model);
    Ok(Compiled {
        origin,
        model,
        graph,
        report,
        program,
        options: options.clone(),
    })
}

/// Returns the requested outputs and those `intermediates` that are outputs of the description or of the modules. Returns `None`,
/// which selects the default outputs, if there are neither.
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
        // Keep the default outputs, because no outputs were requested and no intermediate is an output of the description.
        None => return None,
    };
    for name in further {
        if !outputs.contains(&name) {
            outputs.push(name);
        }
    }
    Some(outputs)
}

/// Returns the CUDA source of each kernel, in the order of `kernels`.
pub fn emit(kernels: &[KernelSpec]) -> Result<Vec<Source>, EngineError> {
    let codegen = Codegen::shared()?;
    Ok(kernels
        .iter()
        .map(|k| codegen.source(k.as_kernel()))
        .collect::<Result<_, _>>()?)
}
