//! RON to graph: a description and a checkpoint's `config.json` become a [`Graph`].
//!
//! Reading goes in three steps, each with its own errors: `reader` and `decode` make the syntax
//! tree and keep the place of every word; `scope` checks every name; `build` takes the sizes from
//! config.json and adds the operators to a graph, which infers shapes. All errors are
//! [`ModelError`]s: miette shows them with file, line, column and a caret. No input makes this room
//! panic, and the time it takes is bounded: sources, nesting, unrolled values and sizes have limits.
//!
//! # The language
//!
//! A file is one `Model(…)` in RON, with these fields:
//!
//! | field | holds |
//! |---|---|
//! | `name` | the model's name |
//! | `model_types` | the values of `model_type` in config.json that the description is for: other checkpoints are refused, and a folder is run by the shipped description that names its own. Any, if left out |
//! | `architectures` | `{"BertForTokenClassification": ["token_logits"]}`: what is computed by default of checkpoints with this entry in config.json's `architectures` |
//! | `prefixes` | what published weight names may start with; `[""]` if left out |
//! | `endings` | `{".weight": ".gamma"}`: what some checkpoints write instead of an ending; one, or a list |
//! | `require` | `Must(key: "…", is: …)`: a key of config.json that, if there, has this value, or one of a list; of several shipped descriptions for one `model_type` a checkpoint has the first whose requirements it meets; with `outputs: […]` only where one of them is asked for |
//! | `dims` | whole numbers by name |
//! | `reals` | real numbers by name |
//! | `activations` | activations by name |
//! | `graph` | statements |
//! | `outputs` | `{"output": "value"}` |
//! | `parts` | instead of `graph` and `outputs`: a list of `Part(name: "…", stream: "…", graph: […], outputs: {…}, expect: {…})`, in the order in which they run |
//! | `default` | the outputs that are built if none is asked for |
//! | `expect` | counts after the passes, in the whole graph |
//!
//! Parts run by themselves, each on batches of its own, whose tokens and positions are what its `embedding`s read. Their values are
//! called `encode.…`, after the part, and are not seen by other parts, which meet in caches and share weights. Where only outputs of
//! the first part are asked for, it is a plain graph.
//!
//! A number is `Key("key of config.json")`, `Length("key")` (entries of a list or an object), a
//! number, an expression such as `"hidden / heads"`, or a list of these: the first that is there
//! counts. A key with null is not there; `text_config.hidden_size` is a key inside another. Expressions have names (also the
//! indices of the loops around them), `+ - * / %`, `sqrt(…)`, a sign and parentheses; in whole numbers every division must come
//! out even, and `%` is what it would leave. A value is found when a statement reads it that an asked output needs, so that what only other outputs read may
//! be missing.
//!
//! An activation is `Key("…")`, or one of the names that config.json files have: `gelu` and `gelu_python` (exact), `gelu_new`,
//! `gelu_pytorch_tanh` and `gelu_fast` (by tanh), `quick_gelu`, `relu`, `tanh`, `silu` and `swish`; or a list of these.
//!
//! # Statements
//!
//! - `Let("name", operator(…))`. A name is given once.
//! - `Repeat(times: "layers", from: 0, index: "i", name: "layer", body: […], expect: {…})`, any number of times, none included.
//!   Inside, `Let` of a name from outside gives it the value that the next iteration, and what follows the loop, reads; other
//!   names end with the iteration. Values of index 3 are called `layer.3.…` in the graph. `expect` counts in every iteration.
//! - `When(key: "…", is: …, absent: "…", name: "…", body: […], otherwise: […], expect: {…}, expect_otherwise: {…})`: the one body where the key of config.json has the value,
//!   or one of a list (absent is `null`), else the other, which may be left out. A key may have indices, `layer_types.{i}`, so that a
//!   body depends on what config.json lists of its layer; where there is no such key, `absent` is a condition that decides, as
//!   `"i % 3 == 0"` of the layer's number. `When(holds: "embedding != hidden", …)` compares two
//!   sizes by `== != < <= > >=`. `Let` of a name from outside gives it its new value; a name that both bodies give goes on to
//!   what follows. With `name`, values of either body are called `name.…` in the graph. `expect` counts where the first body is
//!   taken, `expect_otherwise` where the other is, in the iteration around, or in the whole graph where there is none.
//!
//! `expect` counts `launches` (all), `gemms` (of any epilogue), or an operator after the passes: those of the table below by
//! their names (`gelu`, `gelu_tanh`, `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu` of any activation), and `bias_linear`, `linear_gelu`,
//! `bias_gelu_linear` and so on with the other activations, `scores` and `context` (what `matmul` becomes), `slice_columns`,
//! `embedding_layer_norm`, `residual_layer_norm`, `bias_residual_layer_norm`, `attention`, `mean_pool_normalize`.
//!
//! # Operators
//!
//! | operator | fields | result |
//! |---|---|---|
//! | `embedding` | `ids` (`token_ids`, `type_ids`, `positions`), `table` or `sinusoid` (`over_width`, `over_half`), `rows`, `width`, `offset` (0), `skips` (none) | rows of the table. `skips` is the padding token of models that count positions of the other tokens only: here there is no padding, and a sequence that holds it is refused. A `sinusoid` is computed: sines in the first half of the columns and cosines in the second, with frequencies `10000^(−2j / width)` or `10000^(−j / (width / 2 − 1))` |
//! | `linear` | `x`, `out`, `weight`, `bias` (none), `stored` (`out_in`, `in_out`), `of` and `from` (none) | `x · weightᵀ + bias`, `out` wide; `stored` says how the checkpoint has the matrix. With `of` and `from`, the weight is rows `from ..` of a matrix of the checkpoint that has `of` rows |
//! | `add_bias` | `x`, `bias` | a vector added to every row |
//! | `add`, `multiply` | `a`, `b` | two values of one shape, element by element |
//! | `scale` | `x`, `by` | `by · x` |
//! | `gelu` | `x`, `form` (`exact`, `tanh`) | pointwise: `x / 2 · (1 + erf(x / √2))`, or `x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))` |
//! | `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu` | `x` | pointwise: `max(x, 0)`, `tanh x`, `x / (1 + e^(−x))`, `x / (1 + e^(−1.702 x))` (CLIP), `ln(1 + max(x, 0))` (SPLADE) |
//! | `activation` | `x`, `kind` (a name of `activations`) | pointwise |
//! | `layer_norm` | `x`, `weight`, `bias` (none), `eps` | over the width: `(x − mean) / √(variance + eps) · weight + bias`, without the last where there is none |
//! | `rms_norm` | `x`, `weight`, `eps`, `heads` (1), `plus_one` (`false`) | over the width, or over each of `heads` equal parts of it: `x / √(mean of x² + eps) · weight`, or `· (1 + weight)` (Gemma), of which the sum is taken once, when weights are loaded |
//! | `rotary` | `x`, `heads`, `width`, `theta`, `scaling` (none), `longest` (none) | rotary positions of each head's first `width` columns, in halves (below); `scaling` is a key of config.json, or a list, of which the first that is there says how frequencies are scaled: `default`, `linear`, `llama3`, `yarn`, `ntk` (GTE: the base times the factor), or `dynamic`, by which nothing is scaled up to the positions of the training, and longer sequences are refused; so are those of more than `longest` positions |
//! | `columns` | `x`, `from`, `width` | some columns of every row |
//! | `same` | `x` | the value itself, by another name |
//! | `cache` | `x`, `heads`, `name` | the rows of a sequence so far: those of this batch, and behind a KV cache those before. Keys and values of causal attention are kept in one. Of one row for each sequence it keeps one position, which only another part reads |
//! | `cache` without `x` | `heads`, `width`, `name` | what an earlier part added to the cache of this name: the rows of a sequence's source. Attention to them is not causal |
//! | `split_heads` | `x`, `heads` | `[tokens, heads·head]` → `[heads, tokens, head]` |
//! | `merge_heads` | `x` | the way back |
//! | `matmul` | `a`, `b`, `transpose_b` (`false`) | scores `a · bᵀ`, or sums of `b` weighted by `a`; each sequence by itself. The heads of `b` divide those of `a`: each serves a group of neighbours |
//! | `position_table` | `table`, `width`, `span`, `reach` (none) | rows of a table `[2·span, width]` of the checkpoint by distance, `[2·R + 1, width]` for distances −R to R, where R is the first beyond which rows repeat; looked up once, when weights are loaded. Norms and `linear` may follow, then `relative_scores` |
//! | `relative_scores` | `x`, `table`, `heads`, `of` (`query`, `key`) | `[heads, pairs]`: for query `i` and key `j` of a sequence `x[i] · table[j − i]` of each head, or with `key` `x[j] · table[j − i]` (disentangled attention); beyond the table its last rows |
//! | `softmax` | `x`, `causal` (`false`), `window` (none), `bias` (none) | of scores, over the keys `j` of query `i`: `e^(s[i, j]) / Σ e^(s[i, k])`; causal: over those up to the query, `j ≤ i`; with a window: over those that are at most so many positions away, `abs(j − i) ≤ window`; both: over those before, at most so far |
//! | `first_token`, `last_token`, `mean_pool`, `max_pool` | `x` | one row for each sequence |
//! | `concat` | `of` (2 to 16 values) | values of one number of rows, side by side |
//! | `l2_normalize` | `x`, `eps` | rows of length 1 |
//! | `draw` | `mean`, `log_variance` | of one row for each sequence: `mean + exp(log_variance / 2) · noise`, a latent variable's; the noise is standard normal, by the sequence's seed |
//! | `log_probability` | `x` | of logits of every token: the log-probability of each token given those before it, 0 of a sequence's first; an output, which no operator reads |
//!
//! A `bias` of `softmax` is added to the scores that it is given, by the distance `d` of a key from its query, the key's position
//! less the query's:
//!
//! - `alibi`: `−slope · |d|`, with a slope for each head (ALiBi), computed: `2^(−8 (h + 1) / n)` for head `h` of `n`, where `n` is a
//!   power of two; else those of the next smaller power, then every other one of the next larger.
//! - `relative_bias(table: "…", buckets: …, reach: …, bidirectional: …)`: `table[bucket(d)][head]` of a weight `[buckets, heads]`
//!   (T5). Of `b` buckets of a side (half of them where keys behind the query have their own, from bucket `buckets / 2` on; else
//!   all, and keys behind share bucket 0) the first `b / 2` are of one distance each, and distance `|d|` beyond has bucket
//!   `b / 2 + ⌊log(2 |d| / b) / log(2 reach / b) · (b − b / 2)⌋`, at most `b − 1`.
//!
//! A `position_table` has row `span + r` for distance `d`, with `r = −d` at most `span − 1` and at least `−span`; with a `reach` that is
//! so up to half of the span, `m = ⌊span / 2⌋`, and a farther `r` is `±(m + ⌈(m − 1) · log(|d| / m) / log((reach − 1) / m)⌉)` (DeBERTa).
//!
//! `rotary` turns the first `w` columns of each head in pairs, `x[j]` with `x[j + w / 2]`, by an angle that grows with the token's position
//! `p` in its sequence, from 0 on. With frequencies `f[j] = theta^(−2j / w)` for `j` below `w / 2`, and `c = 1`:
//!
//! ```text
//! y[j]         = c · (x[j] · cos(p · f[j]) − x[j + w / 2] · sin(p · f[j]))
//! y[j + w / 2] = c · (x[j + w / 2] · cos(p · f[j]) + x[j] · sin(p · f[j]))
//! ```
//!
//! A `scaling` puts others for `f` and `c`. With `s` for its `factor` and `L` for `original_max_position_embeddings`:
//!
//! - `default`: the same.
//! - `linear`: `f[j] / s`.
//! - `dynamic`: the same, for sequences of at most `L` tokens, or `max_position_embeddings` where it does not say `L`.
//! - `ntk`: `(s · theta)^(−2j / w) / s^(2 / w)`; with `mixed_b = b`, `f[j] / exp(a · (j + 1)^b)` where `a = ln(s) / (w / 2)^b`.
//! - `llama3`: `(1 − r) · f[j] / s + r · f[j]`, where `r = (L · f[j] / 2π − low_freq_factor) / (high_freq_factor − low_freq_factor)`, at
//!   least 0 and at most 1: of the turns within `L` positions, how far their number is from the low one to the high one.
//! - `yarn` (Peng et al. 2023, arXiv:2309.00071): `r · f[j] / s + (1 − r) · f[j]`, where `r = (j − low) / (high − low)`, at least 0 and at
//!   most 1. The pair that turns `n` times within `L` positions is `w · ln(L / 2πn) / (2 ln theta)`; `low` is that of `beta_fast` (32),
//!   rounded down and at least 0, `high` that of `beta_slow` (1), rounded up and at most `w − 1`; neither is rounded where `truncate` is
//!   `false`. `c` is `attention_factor`; else, where `s` is above 1, `(0.1 · mscale · ln(s) + 1) / (0.1 · mscale_all_dim · ln(s) + 1)` if there are
//!   both, and `0.1 · ln(s) + 1` if not.
//!
//! `max_position_embeddings` of config.json limits the length of sequences also where no table does: for models with `rotary`, biases by
//! distance or a `position_table`. The limit is the value of the key; for `linear` it is `s` times the value, for `yarn` `s · L`, rounded
//! down, and for `dynamic` `L`. The lowest of several limits counts, those of `longest` and of tables included. Without the key there is
//! no limit.
//!
//! Weights (`table`, `weight`, `bias`) are named as published, with an index or an expression in braces, `layers.{i}.w` or
//! `h.{3 * i + 1}.w`. A list has further names under which a checkpoint may have the tensor: with every prefix and ending,
//! the first that is there is read. A name that is read twice is one tensor. A further name with a slash, `sparse_linear/weight`, is that
//! of a tensor in a file of its own beside the checkpoint, `sparse_linear.safetensors`.
//!
//! # What it can describe, and what not
//!
//! Transformers with absolute or rotary positions or biases by distance, LayerNorm or RMSNorm before or after (or both), full or
//! causal attention, also within a window and with grouped-query heads, gates, pointwise activations of the list, any head: GPT-2, Llama, Mistral without a window, Qwen3, Gemma 3's text
//! model; encoders with decoders that attend to them: Marian, BART, mBART, M2M-100 and NLLB, T5;
//! BERT and its like (RoBERTa, XLM-RoBERTa and its XL, CamemBERT, DistilBERT, ALBERT, ELECTRA, MPNet, NomicBERT, GTE, JinaBERT v2, ModernBERT, DeBERTa v2 and v3,
//! EmbeddingGemma, CLIP's text tower, MiniLM, and checkpoints such as BGE and E5 that have their form). `gemmule models` lists what is shipped. A layer's body may
//! depend on its number, and on what config.json lists of it (`When`); `examples/own_encoder.ron` is a ModernBERT with another window, order
//! of layers and activation.
//!
//! Outputs that others look for by their names: `sentence_embedding`, a row for each sequence; `sequence_logits`, of which a classifier's or
//! ranker's scores come; `token_logits`; `sparse`, weights that are mostly 0: `[batch, vocabulary]` of SPLADE, a row for each sequence and
//! an entry for each token of the vocabulary, or `[tokens, 1]` of BGE-M3, a weight for each token of the text, specials included; `colbert`,
//! `[tokens, width]`, a vector of length 1 for each token, of which the first token's is not compared.
//!
//! An output `next_token_logits`, one row for each sequence, is what a model writes by; `log_probability`, what it says of a text.
//!
//! What the language cannot say yet:
//!
//! - Convolutions (DeBERTa v2's largest, whose `conv_kernel_size` is refused), recurrences, mixtures of experts, images.
//! - Softcapped logits and scores (Gemma 2), attention with sinks, dropped or merged tokens.
//! - Relative keys and values that are added per distance to keys and values themselves (Shaw et al. 2018: BERT's `relative_key`), and
//!   DeBERTa v1, whose one projection has biases of queries and values alone. Scores of `relative_scores` are stored: no kernel fuses
//!   them into attention yet, so that memory grows with the square of the length.
//! - Rotary positions of interleaved columns, and frequencies that depend on a sequence's length (`dynamic` beyond the training).
//! - Pooling by a token that is found by its id: CLIP's is the last one, as its tokenizer ends a text. Means weighted by position or by
//!   tokens, sums over tokens (SPLADE's first version), tokens of a prompt that pooling leaves out.
//! - Values that are computed of weights alone are computed with every batch, as projections of distances are.

mod build;
mod config;
mod decode;
mod error;
mod expect;
mod expr;
mod modules;
mod need;
mod reader;
mod rotary;
mod scope;
mod shipped;
mod syntax;

use std::collections::BTreeMap;

pub use error::{ModelError, Problem};
pub use expect::Expectation;
pub use modules::{EMBEDDING, LOGITS, Module, Pooling, SPARSE, computed};

use crate::graph::{Graph, WeightNames};
use error::{File, quoted, suggest};

/// A model's description: parsed, and every name in it checked. Sizes come with [`build`].
///
/// [`build`]: Description::build
#[derive(Clone, Debug)]
pub struct Description {
    file: File,
    ast: syntax::Ast,
}

impl Description {
    /// Reads a description; `name` is the file's name in errors.
    ///
    /// # Errors
    /// Syntax, unknown operators and fields, undefined and twice-defined names, cycles.
    pub fn parse(name: &str, source: &str) -> Result<Self, ModelError> {
        let file = File::new(name, source);
        let ast = {
            let (reader, whole) = reader::Reader::whole(&file)?;
            decode::description(reader, whole)?
        };
        scope::check(&file, &ast)?;
        Ok(Self { file, ast })
    }

    /// The model's name as the description gives it.
    pub fn name(&self) -> &str {
        &self.ast.name
    }

    /// All outputs that can be asked for, in the order of the file.
    pub fn output_names(&self) -> Vec<&str> {
        let outputs = self.ast.outputs();
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// The outputs that nothing of another part is needed for: all of a model that is one graph, and those of the first part
    /// of others.
    pub fn outputs_without_source(&self) -> Vec<&str> {
        let first = self.ast.parts.first().into_iter();
        let outputs = first.flat_map(|part| &part.outputs);
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// The outputs that are built where none is asked for.
    pub fn default_outputs(&self) -> Vec<&str> {
        let outputs = self.ast.default_outputs.iter();
        outputs.map(|name| name.value.as_str()).collect()
    }

    /// The values of `model_type` in config.json that the description is for; any, where there are none.
    pub fn model_types(&self) -> &[String] {
        &self.ast.model_types
    }

    /// The outputs that are built of a checkpoint where none is asked for: those of the first of its `architectures`
    /// that the description names, else the default ones.
    pub fn outputs_for(&self, config: &serde_json::Value) -> Vec<&str> {
        let published = config.get("architectures").and_then(|a| a.as_array());
        let published = published.into_iter().flatten().filter_map(|a| a.as_str());
        let named = |name: &str| self.ast.architectures.iter().find(|(n, _)| n == name);
        match published.into_iter().find_map(named) {
            Some((_, outputs)) => outputs.iter().map(|o| o.value.as_str()).collect(),
            None => self.default_outputs(),
        }
    }

    /// The graph for the sizes of `config` (a checkpoint's config.json) with the asked outputs, or
    /// those that are [computed by default](Self::outputs_for). What no output needs is not in the graph, and what only
    /// such outputs read of `config` may be missing.
    ///
    /// # Errors
    /// A `model_type` that the description is not for, dimensions without a value, values of a wrong type, requirements
    /// that `config` does not meet, sizes without sense, shapes that do not fit, outputs that are not there.
    pub fn build(
        &self,
        config: &serde_json::Value,
        outputs: Option<&[&str]>,
    ) -> Result<Model, ModelError> {
        self.build_with(config, outputs, &[])
    }

    /// As [`build`](Self::build), with the output that these modules [compute](computed), most often [`EMBEDDING`] of the output
    /// `last_hidden_state`, and by default that one alone. Without modules it is what the description says.
    ///
    /// # Errors
    /// As `build`, a description without the output that they start from, and modules whose widths do not fit.
    pub fn build_with(
        &self,
        config: &serde_json::Value,
        outputs: Option<&[&str]>,
        modules: &[Module],
    ) -> Result<Model, ModelError> {
        self.check_model_type(config)?;
        let default = match computed(modules) {
            None => self.outputs_for(config),
            Some(output) => vec![output],
        };
        let outputs = self.choose(outputs.unwrap_or(&default), modules)?;
        build::model(&self.file, &self.ast, config, &outputs, modules)
    }

    /// The outputs that are asked for, each known and named once.
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

/// A description with sizes: what the passes start from.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    /// Unfused. Values are named as in the description, inside a `Repeat` as `layer.3.query`;
    /// weights as in the checkpoint, without prefix.
    pub graph: Graph,
    /// What checkpoints may call its weights.
    pub weight_names: WeightNames,
    /// What must hold after the passes.
    pub expectations: Vec<Expectation>,
    /// The description's dimensions, those that were read.
    pub dims: BTreeMap<String, u64>,
    /// Token ids are below this.
    pub vocab: u32,
    /// The longest sequence that the position table has rows for, or that rotary positions are for; `None` without such a limit.
    pub max_positions: Option<u32>,
    /// Type ids are below this; `None` where the model reads none.
    pub type_rows: Option<u32>,
    /// The token id that the model counts no position for, and that no sequence may hold.
    pub skipped: Option<u32>,
}

impl Model {
    /// Checks all `expect:` lines on the graph after the passes.
    ///
    /// # Errors
    /// The first that is not met, with what the graph has instead.
    pub fn check_expectations(&self, fused: &Graph) -> Result<(), ModelError> {
        expect::check(&self.expectations, fused)
    }
}

#[cfg(test)]
mod tests;
