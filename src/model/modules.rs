//! What a sentence-transformers folder computes behind the transformer, as operators of the graph.

use super::{ModelError, Problem, build::Builder, error::At, syntax::Ast};
use crate::{
    graph::{NodeId, Op, WeightExpr},
    kernels::gemm::{Activation, Epilogue},
};

/// The output that modules compute.
pub const EMBEDDING: &str = "sentence_embedding";
/// The output of a description that they start from.
pub(super) const STATES: &str = "last_hidden_state";

/// `torch.nn.functional.normalize`, which is what `Normalize` calls, keeps the division sound by this.
const NORMALIZE_EPS: f32 = 1e-12;

/// One entry of `modules.json`, with what its folder's config.json says. `folder` names values of the graph, and is where
/// weights are found.
#[derive(Clone, Debug, PartialEq)]
pub enum Module {
    /// `[tokens, width]` → `[batch, modes · width]`.
    Pooling { folder: String, modes: Vec<Pooling> },
    /// `[batch, inputs]` → `[batch, outputs]`, by `linear.weight` and `linear.bias` of its folder.
    Dense {
        folder: String,
        inputs: u32,
        outputs: u32,
        bias: bool,
        activation: Option<Activation>,
    },
    /// Rows of length 1.
    Normalize { folder: String },
    /// The first columns, as `truncate_dim` asks for.
    Truncate { width: u32 },
}

/// One row for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    First,
    Last,
    Mean,
    Max,
}

impl Module {
    /// The folder of its weights, where it has some.
    pub fn weights(&self) -> Option<&str> {
        match self {
            Module::Dense { folder, .. } => Some(folder),
            Module::Pooling { .. } | Module::Normalize { .. } | Module::Truncate { .. } => None,
        }
    }
}

/// The value of a description that modules start from.
pub(super) fn states(ast: &Ast) -> Option<&At<String>> {
    let found = ast.outputs().find(|(name, _)| name.value == STATES);
    found.map(|(_, value)| value)
}

impl Builder<'_> {
    /// The value of [`EMBEDDING`].
    pub(super) fn modules(&mut self, ast: &Ast, modules: &[Module]) -> Result<NodeId, ModelError> {
        let Some(states) = states(ast) else {
            let name = STATES.to_owned();
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
