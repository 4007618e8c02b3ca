//! Adds the modules of a sentence-transformers folder that follow the transformer to the graph.

use super::{ModelError, Problem, build::Builder, error::At, syntax::Ast};
use crate::{
    graph::{NodeId, Op, WeightExpr},
    ops::{Activation, Epilogue},
};

/// Output that most modules compute from a description's output `last_hidden_state`.
pub const EMBEDDING: &str = "sentence_embedding";
/// Output of sparse weights: of vocabulary entries, `[batch, vocabulary]`, or of tokens, `[tokens, 1]`.
pub const SPARSE: &str = "sparse";
/// Output that scores are computed from. Without modules, the description computes it itself.
pub const LOGITS: &str = "sequence_logits";
/// Output of a description that most modules start from.
pub(super) const STATES: &str = "last_hidden_state";
/// Output that modules for vocabulary weights start from.
const TOKEN_LOGITS: &str = "mlm_logits";
/// Output that modules which score the next token start from.
const NEXT_LOGITS: &str = "next_token_logits";

/// Epsilon of `torch.nn.functional.normalize`, which `Normalize` calls.
const NORMALIZE_EPS: f32 = 1e-12;

/// An entry of `modules.json` with the config.json of its folder. `folder` prefixes the names of graph values and of weights.
#[derive(Clone, Debug, PartialEq)]
pub enum Module {
    /// `[tokens, width]` → `[batch, modes · width]`.
    Pooling { folder: String, modes: Vec<Pooling> },
    /// `[batch, inputs]` → `[batch, outputs]`, with `linear.weight` and `linear.bias` of its folder.
    Dense {
        folder: String,
        inputs: u32,
        outputs: u32,
        bias: bool,
        activation: Option<Activation>,
    },
    /// Scales rows to length 1.
    Normalize { folder: String },
    /// Keeps the first columns (`truncate_dim`).
    Truncate { width: u32 },
    /// `ln(1 + max(x, 0))` of the maximum logit of each vocabulary entry; applied a second time if `twice`.
    Splade { folder: String, twice: bool },
    /// Logit of one token, minus that of another if `no` is given, as the single logit of a sequence.
    LogitScore {
        folder: String,
        yes: u32,
        no: Option<u32>,
    },
}

/// Pooling to one row per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    First,
    Last,
    Mean,
    Max,
}

impl Module {
    /// Returns the folder of the module's weights, if it has any.
    pub fn weights(&self) -> Option<&str> {
        match self {
            Module::Dense { folder, .. } => Some(folder),
            Module::Pooling { .. }
            | Module::Normalize { .. }
            | Module::Truncate { .. }
            | Module::Splade { .. }
            | Module::LogitScore { .. } => None,
        }
    }
}

/// Returns the output that `modules` compute, or `None` if there are none.
pub fn computed(modules: &[Module]) -> Option<&'static str> {
    Some(match modules.first()? {
        Module::Splade { .. } => SPARSE,
        Module::LogitScore { .. } => LOGITS,
        _ => EMBEDDING,
    })
}

/// Returns the name of the output that `modules` start from.
fn start(modules: &[Module]) -> &'static str {
    match modules.first() {
        Some(Module::Splade { .. }) => TOKEN_LOGITS,
        Some(Module::LogitScore { .. }) => NEXT_LOGITS,
        _ => STATES,
    }
}

/// Returns the value of a description that `modules` start from.
pub(super) fn states<'a>(ast: &'a Ast, modules: &[Module]) -> Option<&'a At<String>> {
    let start = start(modules);
    let found = ast.outputs().find(|(name, _)| name.value == start);
    found.map(|(_, value)| value)
}

impl Builder<'_> {
    /// Adds the modules and returns the value of their output.
    pub(super) fn modules(&mut self, ast: &Ast, modules: &[Module]) -> Result<NodeId, ModelError> {
        let Some(states) = states(ast, modules) else {
            let name = start(modules).to_owned();
            let error = self.file.error_elsewhere(Problem::UnknownOutput { name });
            return Err(error.help("the modules of a sentence-transformers folder start from it"));
        };
        let place = &states.span;
        let mut x = self.value(states)?;
        for module in modules {
            x = match module {
                Module::Pooling { folder, modes } => {
                    let mut pooled = Vec::new();
                    for mode in modes {
                        let (name, op) = match mode {
                            Pooling::First => ("first", Op::FirstToken),
                            Pooling::Last => ("last", Op::LastToken),
                            Pooling::Mean => ("mean", Op::MeanPool),
                            Pooling::Max => ("max", Op::MaxPool),
                        };
                        pooled.push(self.add(format!("{folder}.{name}"), op, &[x], place)?);
                    }
                    match pooled.as_slice() {
                        [one] => *one,
                        several => {
                            let parts = several.len() as u32;
                            self.add(
                                format!("{folder}.joined"),
                                Op::Concat { parts },
                                several,
                                place,
                            )?
                        }
                    }
                }
                Module::Dense {
                    folder,
                    inputs,
                    outputs,
                    bias,
                    activation,
                } => {
                    let (inputs, outputs) = (u64::from(*inputs), u64::from(*outputs));
                    let weight = self.stored(folder, "weight", &[outputs, inputs], place)?;
                    let epilogue = Epilogue::default();
                    let linear = Op::Linear { epilogue };
                    let mut y =
                        self.add(format!("{folder}.product"), linear, &[x, weight], place)?;
                    if *bias {
                        let bias = self.stored(folder, "bias", &[outputs], place)?;
                        y = self.add(format!("{folder}.sum"), Op::AddBias, &[y, bias], place)?;
                    }
                    match activation {
                        None => y,
                        Some(kind) => {
                            let name = format!("{folder}.activated");
                            self.add(name, Op::Activate(*kind), &[y], place)?
                        }
                    }
                }
                Module::Normalize { folder } => {
                    let eps = NORMALIZE_EPS;
                    self.add(
                        format!("{folder}.normalized"),
                        Op::L2Normalize { eps },
                        &[x],
                        place,
                    )?
                }
                Module::Splade { folder, twice } => {
                    let largest = format!("{folder}.largest");
                    let mut y = self.add(largest, Op::MaxPool, &[x], place)?;
                    let weigh = Op::Activate(Activation::Log1pRelu);
                    y = self.add(format!("{folder}.weight"), weigh.clone(), &[y], place)?;
                    match twice {
                        true => self.add(format!("{folder}.again"), weigh, &[y], place)?,
                        false => y,
                    }
                }
                Module::LogitScore { folder, yes, no } => {
                    let column = |start: u32| Op::SliceColumns { start, width: 1 };
                    let for_it = self.add(format!("{folder}.yes"), column(*yes), &[x], place)?;
                    match no {
                        None => for_it,
                        Some(no) => {
                            let against =
                                self.add(format!("{folder}.no"), column(*no), &[x], place)?;
                            let by = -1.0;
                            let name = format!("{folder}.against");
                            let against = self.add(name, Op::Scale { by }, &[against], place)?;
                            let name = format!("{folder}.difference");
                            self.add(name, Op::Add, &[for_it, against], place)?
                        }
                    }
                }
                Module::Truncate { width } => {
                    let is = self.graph.shape(x).width();
                    if is.is_some_and(|is| is <= u64::from(*width)) {
                        continue;
                    }
                    let (start, width) = (0, *width);
                    let op = Op::SliceColumns { start, width };
                    self.add("truncated".to_owned(), op, &[x], place)?
                }
            };
        }
        Ok(x)
    }

    fn stored(
        &mut self,
        folder: &str,
        tensor: &str,
        dims: &[u64],
        place: &std::ops::Range<usize>,
    ) -> Result<NodeId, ModelError> {
        let name = format!("{folder}/linear.{tensor}");
        let dims = dims.to_vec();
        let stored = WeightExpr::Stored {
            name: name.clone(),
            dims,
        };
        self.add(name, Op::Weight(stored), &[], place)
    }
}
