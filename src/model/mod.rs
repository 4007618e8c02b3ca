//! Turns a RON description and a checkpoint's `config.json` into a [`Graph`].
//!
//! Reading has three steps, each with its own errors. `reader` and `decode` build the syntax tree with the position of every
//! token. `scope` checks every name. `build` takes the sizes from config.json and adds the operators to a graph, which infers
//! shapes. All errors are [`ModelError`]s, which miette shows with file, line, column and a caret. No input causes a panic. The
//! time is bounded by limits on source size, nesting, unrolled values and tensor sizes.
//!
//! # The language
//!
//! A file is one `Model(…)` in RON, with these fields:
//!
//! | field | meaning |
//! |---|---|
//! | `name` | name of the model |
//! | `model_types` | supported values of `model_type` in config.json. Other checkpoints are rejected, and a checkpoint folder is run by the shipped description that lists its `model_type`. If omitted, any value is supported |
//! | `architectures` | `{"BertForTokenClassification": ["token_logits"]}`: default outputs of checkpoints with this entry in config.json's `architectures`. If the field is given, a checkpoint with another head is an error unless outputs are requested. A checkpoint without a `model_type` is run by the shipped description that lists its architecture |
//! | `prefixes` | prefixes that published weight names may have; `[""]` if omitted |
//! | `ties` | `{"lm_head.weight": "embed_tokens.weight"}`: a head tensor and the table that it is tied to. A `linear` that reads the table reads the head tensor instead if the checkpoint has one with different values |
//! | `ignores` | names of tensors that checkpoints have and that affect no output; one `*` matches any text. Loading warns about any other tensor that no output reads |
//! | `adapters` | `Adapters(names: "lora_adaptations", alpha: "lora_alpha", rank: "lora_rank")`: keys of config.json for low-rank adapters (LoRA): the list of the adapters' names, and two numbers. The adapter that the key `adapter` of config.json names is added to the weights when they are loaded, with the factor `alpha / rank`. Without the key `adapter`, no adapter is added. A weight `w.weight` is stored as `w.parametrizations.weight.original`, with `w.parametrizations.weight.0.lora_A` and `lora_B` of all adapters |
//! | `endings` | `{".weight": ".gamma"}`: an ending of weight names, with the ending that some checkpoints use instead, or a list of such endings |
//! | `require` | `Must(key: "…", is: …)`: a key of config.json that must have this value, or one of a list, if present. If several shipped descriptions support one `model_type`, the first whose requirements are met is used. `default: …` is the value that the model uses if the key is absent. `where: "…", has: …` restricts the requirement to configs in which the key `where` has the value `has`, or one of a list. `outputs: […]` restricts it to these requested outputs |
//! | `equal` | lists of keys for the same value; the keys that are present must agree |
//! | `dims` | whole numbers by name |
//! | `reals` | real numbers by name |
//! | `activations` | activations by name |
//! | `graph` | statements |
//! | `outputs` | `{"output": "value"}` |
//! | `parts` | instead of `graph` and `outputs`: a list of `Part(name: "…", stream: "…", graph: […], outputs: {…}, expect: {…})`, in execution order |
//! | `default` | outputs that are built if none is requested |
//! | `expect` | expected numbers of launches, GEMMs or operators in the whole graph after the passes (see below) |
//!
//! Each part runs separately on its own batches, from which its `embedding`s read tokens and positions. Its values are prefixed with the
//! name of the part, `encode.…`, and are not visible in other parts. Parts exchange data through caches and share weights. If only outputs
//! of the first part are requested, the graph has a single part.
//!
//! A number is `Key("key of config.json")`, `Length("key")` (entries of a list or an object), a number, an expression such as
//! `"hidden / heads"`, or a list of these, of which the first that is present applies. A key with the value null counts as absent;
//! `text_config.hidden_size` is a nested key. Expressions may contain names (including the indices of the enclosing loops), `+ - * / %`,
//! `sqrt(…)`, signs and parentheses. A division of whole numbers must have no remainder; `%` is the remainder. A value is resolved only if
//! a requested output needs it, so values for other outputs may be missing.
//!
//! An activation is `Key("…")`, or one of the names in config.json files: `gelu` and `gelu_python` (exact), `gelu_new`,
//! `gelu_pytorch_tanh` and `gelu_fast` (tanh approximation), `quick_gelu`, `relu`, `tanh`, `silu` and `swish`; or a list of these.
//!
//! # Statements
//!
//! - `Let("name", operator(…))` defines a value. A name is defined once.
//! - `Repeat(times: "layers", from: 0, index: "i", name: "layer", body: […], expect: {…})` repeats a body; `times` may be 0. Inside, a
//!   `Let` of an outer name updates it for the next iteration and for the statements after the loop. Other names are local to an iteration.
//!   Values of iteration 3 are called `layer.3.…` in the graph. `expect` counts the nodes of every iteration separately.
//! - `When(key: "…", is: …, absent: "…", name: "…", body: […], otherwise: […], expect: {…}, expect_otherwise: {…})` selects a body: the
//!   first if the key of config.json has the value, or one of a list (an absent key is `null`), else the optional second. A key may contain
//!   indices, `layer_types.{i}`, so that a body depends on the layer's entry in config.json. If there is no such key, the condition
//!   `absent` decides, for instance `"i % 3 == 0"`; a key that is null counts as absent unless `is` names null.
//!   `When(holds: "embedding != hidden", …)` compares two sizes by `== != < <= > >=`. A `Let` of an outer name updates it. A name that both
//!   bodies define stays visible to later statements. With `name`, values of either body are called `name.…` in the graph. `expect` applies
//!   if the first body is taken, `expect_otherwise` if the second is. Both count the nodes of the enclosing iteration, or of the whole
//!   graph if there is none.
//!
//! `expect` counts `launches` (all), `gemms` (with any epilogue), or an operator after the passes: the operators of the tables below by
//! name (activations by their kind: `gelu`, `gelu_tanh`, `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu`), `bias_linear`, `linear_gelu`,
//! `bias_gelu_linear` and so on with the other activations, `scores` and `context` (the two forms of `matmul`), `slice_columns`,
//! `embedding_layer_norm`, `residual_layer_norm`, `bias_residual_layer_norm`, `attention`, `mean_pool_normalize`.
//!
//! # Operators
//!
//! | group | operators |
//! |---|---|
//! | [`inputs`](operators::inputs) | embeddings |
//! | [`linear`](operators::linear) | linear layers and biases |
//! | [`norms`](operators::norms) | norms of rows or of heads |
//! | [`pointwise`](operators::pointwise) | sums, products, scaling, soft caps, activations, columns, concatenation |
//! | [`attention`](operators::attention) | rotations, caches, heads, `matmul`, scores by distance |
//! | [`softmax`](operators::softmax) | `softmax`, its position biases and sinks |
//! | [`pooling`](operators::pooling) | pools, latent variables, log-probabilities |
//!
//! Weights (`table`, `weight`, `bias`, `sinks`) have their published names, with an index or an expression in braces, `layers.{i}.w` or
//! `h.{3 * i + 1}.w`. A list gives alternative names of the tensor. All prefixes and endings are tried, and the first name that exists is
//! used. A name that is read twice refers to the same tensor. An alternative name with a slash, `sparse_linear/weight`, refers to a tensor
//! in a separate file of the checkpoint folder, `sparse_linear.safetensors`.
//!
//! # Supported models
//!
//! Transformers with absolute or rotary positions or position biases, LayerNorm or RMSNorm before or after each sublayer (or both), full or
//! causal attention, optionally with a window, with sinks and with grouped-query heads, gates, the pointwise activations above, and any
//! head. These include GPT-1 and 2, GPT-Neo, OPT, BLOOM, MPT, GPT-NeoX, GPT-J, Falcon, Cohere, Llama, Mistral, EXAONE, GLM-4, Nemotron,
//! StarCoder, StableLM, SmolLM3, Granite, OLMo, Phi, Qwen2 and 3, Gemma 1 to 3; the encoder-decoder models Marian, BART, mBART, M2M-100,
//! NLLB, T5 and Blenderbot; and BERT and its relatives (RoBERTa, XLM-RoBERTa and its XL, CamemBERT, LUKE, DistilBERT, ALBERT, ELECTRA,
//! MPNet, RemBERT, NomicBERT, GTE, JinaBERT v2, ModernBERT, NeoBERT, RoFormer, DeBERTa 1 to 3, EmbeddingGemma, CLIP's text tower, MiniLM,
//! and checkpoints of the same architecture such as BGE and E5). `gemmule models` lists the shipped descriptions. The body of a layer may
//! depend on its number and on its entry in config.json (`When`): `examples/own_encoder.ron` is a ModernBERT with a different window, layer
//! order and activation, and `examples/sinks_decoder.ron` a dense decoder with the attention of gpt-oss.
//!
//! Some outputs have a meaning for other parts of gemmule. `sentence_embedding` has a row for each sequence. `sequence_logits` are the
//! source of a classifier's or reranker's scores. `token_logits` classify tokens. `sparse` contains sparse weights: `[batch, vocabulary]`
//! (SPLADE), a row for each sequence with an entry for each token of the vocabulary, or `[tokens, 1]` (BGE-M3), a weight for each token of
//! the text, including special tokens. `colbert`, `[tokens, width]`, has a vector of length 1 for each token; the vector of the first token
//! is not compared.
//!
//! `next_token_logits`, one row for each sequence, is the output for text generation. `log_probability` scores a text.
//!
//! The language does not support:
//!
//! - Convolutions (in the largest DeBERTa v2, whose `conv_kernel_size` is rejected), recurrences, mixtures of experts, images.
//! - Dropped or merged tokens.
//! - Relative keys and values that are added to keys and values by distance (Shaw et al. 2018: BERT's `relative_key`). No kernel fuses
//!   `relative_scores` into attention yet, so the scores are stored and their memory grows with the square of the sequence length.
//! - Frequencies of rotary positions that depend on a sequence's length (`dynamic` beyond the trained length).
//! - Pooling by a token that is found by its id, except for the end token (`end` of `last_token`, as in CLIP).
//! - Averages in which the token determines the weight, and sums over tokens (SPLADE's first version).
//! - Precomputed values that depend only on weights, such as projections of distances: they are recomputed for every batch.

mod activations;
mod adapters;
mod build;
mod config;
mod decode;
mod error;
mod expect;
mod expr;
mod modules;
mod need;
mod overview;
mod reader;
mod rotary;
mod scope;
mod shipped;
mod spelling;
mod syntax;
mod terms;

use std::collections::{BTreeMap, BTreeSet};

pub use adapters::ADAPTER;
pub use build::operators;
pub use error::{ModelError, Problem};
pub use expect::Expectation;
pub use modules::{
    EMBEDDING, LOGITS, Module, Pooling, SPARSE, STATES, computed, normalizes_tokens,
};
pub use rotary::MAX_CONTEXT;

pub use crate::graph::TOKEN_VECTORS;

use crate::{
    graph::{Graph, NEXT_LOGITS, WeightNames},
    tensor::SequenceEnd,
};
use error::{File, quoted, suggest};

/// A parsed model description with all names checked. Sizes are resolved by [`build`].
///
/// [`build`]: Description::build
#[derive(Clone, Debug)]
pub struct Description {
    file: File,
    ast: syntax::Ast,
    /// Tied head tensors whose values in the checkpoint differ from those of their tables.
    own: BTreeSet<String>,
}

impl Description {
    /// Parses a description. `name` is the file name in errors.
    ///
    /// # Errors
    /// Returns an error for invalid syntax, unknown operators and fields, undefined and duplicate names, and cycles.
    pub fn parse(name: &str, source: &str) -> Result<Self, ModelError> {
        let file = File::new(name, source);
        let ast = {
            let (reader, whole) = reader::Reader::whole(&file)?;
            decode::description(reader, whole)?
        };
        scope::check(&file, &ast)?;
        let own = BTreeSet::new();
        Ok(Self { file, ast, own })
    }

    /// Returns the description for a checkpoint in which the tied head tensors `own` have values that differ from their tables. Linear
    /// layers then read these tensors instead of the tables.
    pub fn with_own(self, own: BTreeSet<String>) -> Self {
        Self { own, ..self }
    }

    /// Name of the model.
    pub fn name(&self) -> &str {
        &self.ast.name
    }

    /// File name and text of the description.
    pub(crate) fn source(&self) -> (&str, &str) {
        (self.file.name(), self.file.text())
    }

    /// Tied head tensors whose values in the checkpoint differ from those of their tables ([`with_own`](Self::with_own)).
    pub(crate) fn own(&self) -> &BTreeSet<String> {
        &self.own
    }

    /// All available outputs, in the order of the file.
    pub fn output_names(&self) -> Vec<&str> {
        let outputs = self.ast.outputs();
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// Outputs of the first part: those of the encoder in an encoder-decoder model, or all outputs of a description with a single graph.
    pub fn outputs_without_source(&self) -> Vec<&str> {
        let first = self.ast.parts.first().into_iter();
        let outputs = first.flat_map(|part| &part.outputs);
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// Outputs that are built if none is requested.
    pub fn default_outputs(&self) -> Vec<&str> {
        let outputs = self.ast.default_outputs.iter();
        outputs.map(|name| name.value.as_str()).collect()
    }

    /// Values of `model_type` in config.json that the description supports; empty if it supports any.
    pub fn model_types(&self) -> &[String] {
        &self.ast.model_types
    }

    /// Returns the outputs that are built for a checkpoint if none is requested. If the description names entries of the checkpoint's
    /// `architectures`, these are the outputs of the first such entry. Otherwise, they are the default outputs.
    ///
    /// # Errors
    /// Returns an error if the description lists architectures, and `architectures` of `config` names only others, one of which has a
    /// head.
    pub fn outputs_for(&self, config: &serde_json::Value) -> Result<Vec<&str>, ModelError> {
        let published = config.get("architectures").and_then(|a| a.as_array());
        let published = published.into_iter().flatten().filter_map(|a| a.as_str());
        let published: Vec<&str> = published.collect();
        let known = &self.ast.architectures;
        let named = |name: &&str| known.iter().find(|(n, _)| n == name);
        if let Some((_, outputs)) = published.iter().find_map(named) {
            return Ok(outputs.iter().map(|o| o.value.as_str()).collect());
        }
        let head = published.iter().find(|name| has_head(name));
        match head.filter(|_| !known.is_empty()) {
            None => Ok(self.default_outputs()),
            Some(head) => {
                let known: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
                let problem = Problem::Head {
                    name: self.ast.name.clone(),
                    found: (*head).to_owned(),
                    expected: quoted(&known),
                };
                let outputs = quoted(&self.output_names());
                let help = format!(
                    "to compute the model without that head, ask for outputs by name; the description has {outputs}"
                );
                Err(self.file.error_elsewhere(problem).help(help))
            }
        }
    }

    /// Returns whether a checkpoint generates text: the description has next-token logits, and `architectures` does not name
    /// another task.
    pub fn writes(&self, config: &serde_json::Value) -> bool {
        let has_logits = self.output_names().contains(&NEXT_LOGITS);
        let outputs = self.outputs_for(config);
        let writes = outputs.is_ok_and(|outputs| {
            // The default outputs of an encoder-decoder model do not include the logits, because another part computes them.
            outputs.contains(&NEXT_LOGITS) || outputs == self.default_outputs()
        });
        has_logits && writes
    }

    /// Builds the graph for the sizes of `config` (a checkpoint's config.json) with the requested `outputs`, or the [default
    /// ones](Self::outputs_for). The graph contains only the values that these outputs need. Keys of `config` that only other
    /// outputs use may be missing.
    ///
    /// # Errors
    /// Returns an error for an unsupported `model_type`, dimensions without a value, values of a wrong type, unmet requirements,
    /// invalid sizes, shapes that do not match, and unknown outputs.
    pub fn build(
        &self,
        config: &serde_json::Value,
        outputs: Option<&[&str]>,
    ) -> Result<Model, ModelError> {
        self.build_with(config, outputs, &[])
    }

    /// Builds like [`build`](Self::build), and adds the output that `modules` [compute](computed), usually [`EMBEDDING`] from the output
    /// `last_hidden_state`. If `outputs` is `None`, only the output of the modules is built. Without modules, this function is the same as
    /// `build`.
    ///
    /// # Errors
    /// Returns the errors of `build`, and an error if the description lacks the output that the modules start from or a module's
    /// width does not match.
    pub fn build_with(
        &self,
        config: &serde_json::Value,
        outputs: Option<&[&str]>,
        modules: &[Module],
    ) -> Result<Model, ModelError> {
        self.check_model_type(config)?;
        let default = match computed(modules) {
            None if outputs.is_none() => self.outputs_for(config)?,
            None => Vec::new(),
            Some(output) => vec![output],
        };
        let outputs = self.choose(outputs.unwrap_or(&default), modules)?;
        build::model(&self.file, &self.ast, config, &outputs, modules, &self.own)
    }

    /// Returns the requested outputs without duplicates, and checks that each output exists.
    fn choose<'o>(
        &self,
        asked: &[&'o str],
        modules: &[Module],
    ) -> Result<Vec<&'o str>, ModelError> {
        let mut known = self.output_names();
        known.extend(computed(modules).filter(|output| !known.contains(output)));
        let mut chosen = Vec::new();
        for &name in asked {
            if !known.contains(&name) {
                let problem = Problem::UnknownOutput {
                    name: name.to_owned(),
                };
                let help = suggest(name, known.iter().copied());
                return Err(self.file.error_elsewhere(problem).help(help));
            }
            if !chosen.contains(&name) {
                chosen.push(name);
            }
        }
        if chosen.is_empty() {
            let help = format!("the outputs are {}", quoted(&known));
            return Err(self.file.error_elsewhere(Problem::NoOutput).help(help));
        }
        Ok(chosen)
    }
}

/// A description with sizes: the input of the passes.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    /// Unfused graph. Values are named as in the description, with a prefix such as `layer.3.` inside a `Repeat`. Weights are
    /// named as in the checkpoint, without prefix.
    pub graph: Graph,
    /// Spellings of the weight names in checkpoints.
    pub weight_names: WeightNames,
    /// Counts that must hold after the passes.
    pub expectations: Vec<Expectation>,
    /// The dimensions of the description that were read.
    pub dims: BTreeMap<String, u64>,
    /// Exclusive upper bound of token ids.
    pub vocab: u32,
    /// Maximum sequence length in tokens, from the position table, the rotary positions or [`MAX_CONTEXT`]; `None` if there is no limit.
    pub max_positions: Option<u32>,
    /// Maximum value of `max_positions` that a larger [`MAX_CONTEXT`] allows, with the rotary frequencies for long contexts if necessary;
    /// `None` if `max_positions` cannot be larger.
    pub extended_positions: Option<u32>,
    /// Exclusive upper bound of type ids; `None` if the model reads none.
    pub type_rows: Option<u32>,
    /// Token id that is not counted as a position. No sequence may contain it.
    pub skipped: Option<u32>,
    /// Token that ends a sequence. Later tokens are padding.
    pub end: Option<SequenceEnd>,
}

impl Model {
    /// Checks all `expect:` lines on the graph after the passes.
    ///
    /// # Errors
    /// Returns an error for the first unmet expectation, with the counts of the graph.
    pub fn check_expectations(&self, fused: &Graph) -> Result<(), ModelError> {
        expect::check(&self.expectations, fused)
    }
}

/// Returns whether the name of a class of Hugging Face transformers is that of a model with a head, such as `BertForQuestionAnswering` or
/// `GPT2DoubleHeadsModel` rather than `BertModel`.
fn has_head(class: &str) -> bool {
    let is_for = |at: usize| class[at + 3..].starts_with(|c: char| c.is_ascii_uppercase());
    class.contains("Head") || class.match_indices("For").any(|(at, _)| is_for(at))
}

#[cfg(test)]
mod tests;
