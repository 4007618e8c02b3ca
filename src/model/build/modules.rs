//! Adds to the graph the modules of a sentence-transformers folder that follow the transformer.

use std::collections::HashMap;

use super::Builder;
use crate::{
    graph::{NodeId, Op, WeightExpr},
    model::{
        ModelError, Problem,
        error::At,
        modules::{Module, Pooling, STATES, start, states},
        syntax::Ast,
    },
    ops::{Activation, Epilogue},
};

/// Epsilon of `torch.nn.functional.normalize`, which `Normalize` calls.
const NORMALIZE_EPS: f32 = 1e-12;
/// Epsilon of `torch.nn.LayerNorm`.
const LAYER_NORM_EPS: f32 = 1e-5;

impl Builder<'_> {
    /// Adds the modules and returns the value of their output.
    pub(in crate::model) fn modules(
        &mut self,
        ast: &Ast,
        modules: &[Module],
    ) -> Result<NodeId, ModelError> {
        let Some(states) = states(ast, modules) else {
            let name = start(modules).to_owned();
            let error = self.file.error_elsewhere(Problem::UnknownOutput { name });
            return Err(error.help("the modules of a sentence-transformers folder start from it"));
        };
        let place = &states.span;
        let mut x = self.value(states)?;
        for module in modules {
            x = match module {
                Module::Pooling {
                    folder,
                    modes,
                    after_prompt,
                } => {
                    if *after_prompt {
                        let name = format!("{folder}.after_prompt");
                        x = self.add(name, Op::AfterPrompt, &[x], place)?;
                    }
                    let mut pooled = Vec::new();
                    for mode in modes {
                        let (name, op) = match mode {
                            Pooling::First => ("first", Op::FirstToken),
                            Pooling::Last => ("last", Op::LastToken),
                            Pooling::Mean => ("mean", Op::MeanPool),
                            Pooling::Max => ("max", Op::MaxPool),
                            Pooling::Weighted(weights) => {
                                (weights.name(), Op::WeightedPool(*weights))
                            }
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
                Module::WeightedLayers {
                    folder,
                    from,
                    weights,
                } => self.weighted_layers(states, folder, *from, weights)?,
                Module::Dense {
                    folder,
                    inputs,
                    outputs,
                    bias,
                    activation,
                    residual,
                } => {
                    let input = x;
                    let prefix = match folder.as_str() {
                        "" => "linear",
                        folder => folder,
                    };
                    let (inputs, outputs) = (u64::from(*inputs), u64::from(*outputs));
                    let weight = self.stored(folder, "linear.weight", &[outputs, inputs], place)?;
                    let epilogue = Epilogue::default();
                    let linear = Op::Linear { epilogue };
                    let mut y =
                        self.add(format!("{prefix}.product"), linear, &[x, weight], place)?;
                    if *bias {
                        let bias = self.stored(folder, "linear.bias", &[outputs], place)?;
                        y = self.add(format!("{prefix}.sum"), Op::AddBias, &[y, bias], place)?;
                    }
                    if let Some(kind) = activation {
                        let name = format!("{prefix}.activated");
                        y = self.add(name, Op::Activate(*kind), &[y], place)?;
                    }
                    match residual {
                        false => y,
                        true => {
                            let mut rest = input;
                            if inputs != outputs {
                                let dims = [outputs, inputs];
                                let name = "residual.weight";
                                let weight = self.stored(folder, name, &dims, place)?;
                                let linear = Op::Linear {
                                    epilogue: Epilogue::default(),
                                };
                                let name = format!("{prefix}.projected");
                                rest = self.add(name, linear, &[input, weight], place)?;
                            }
                            self.add(format!("{prefix}.residual"), Op::Add, &[y, rest], place)?
                        }
                    }
                }
                Module::LayerNorm { folder, width } => {
                    let dims = [u64::from(*width)];
                    let gamma = self.stored(folder, "norm.weight", &dims, place)?;
                    let beta = self.stored(folder, "norm.bias", &dims, place)?;
                    let norm = Op::LayerNorm {
                        eps: LAYER_NORM_EPS,
                    };
                    self.add(format!("{folder}.norm"), norm, &[x, gamma, beta], place)?
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
                Module::NormalizeTokens { .. } => {
                    let eps = NORMALIZE_EPS;
                    let op = Op::L2Normalize { eps };
                    self.add("token_vectors".to_owned(), op, &[x], place)?
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

    /// Adds the weighted sum of hidden states: `weights[k]` times the state after `from + k` layers. The state after 0 layers is the
    /// embeddings.
    fn weighted_layers(
        &mut self,
        states: &At<String>,
        folder: &str,
        from: u32,
        weights: &[f32],
    ) -> Result<NodeId, ModelError> {
        let last = self.value(states)?;
        let (mut named, mut open) = (HashMap::new(), vec![last]);
        while let Some(id) = open.pop() {
            if named.insert(self.graph.node(id).name.clone(), id).is_none() {
                open.extend(self.graph.operands(id));
            }
        }
        let mut sum = None;
        for (layer, &by) in (from..).zip(weights) {
            let own = match layer.checked_sub(1) {
                None => format!("{}{}", self.prefix, states.value),
                Some(layer) => format!("{}layer.{layer}.{}", self.prefix, states.value),
            };
            let is_last = layer - from + 1 == weights.len() as u32;
            let Some(&state) = named.get(&own).filter(|&&id| (id == last) == is_last) else {
                let problem = Problem::out_of_range(
                    format!("the state of layer {layer} for `{folder}`"),
                    "no such value, or not that of the last layer",
                    format!(
                        "`{own}` in a description whose `{STATES}` is the state of its last layer"
                    ),
                );
                let label = "the modules of the folder start from it";
                return Err(self.file.error(problem, &states.span, label));
            };
            let name = format!("{folder}.scaled.{layer}");
            let scaled = self.add(name, Op::Scale { by }, &[state], &states.span)?;
            sum = Some(match sum {
                None => scaled,
                Some(sum) => {
                    let name = format!("{folder}.sum.{layer}");
                    self.add(name, Op::Add, &[sum, scaled], &states.span)?
                }
            });
        }
        Ok(sum.unwrap_or(last))
    }

    fn stored(
        &mut self,
        folder: &str,
        tensor: &str,
        dims: &[u64],
        place: &std::ops::Range<usize>,
    ) -> Result<NodeId, ModelError> {
        let name = match folder {
            "" => tensor.to_owned(),
            folder => format!("{folder}/{tensor}"),
        };
        let dims = dims.to_vec();
        let stored = WeightExpr::Stored {
            name: name.clone(),
            dims,
        };
        self.add(name, Op::Weight(stored), &[], place)
    }
}
