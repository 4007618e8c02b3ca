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
//! | `architectures` | `{"BertForTokenClassification": ["token_logits"]}`: default outputs of checkpoints with this entry in config.json's `architectures`. If the field is given, a checkpoint with another head is an error unless outputs are requested |
//! | `prefixes` | prefixes that published weight names may have; `[""]` if omitted |
//! | `ties` | `{"lm_head.weight": "embed_tokens.weight"}`: a head tensor and the table that it is tied to. A `linear` that reads the table reads the head tensor instead if the checkpoint has one with different values |
//! | `ignores` | names of tensors that checkpoints have and that affect no output; one `*` matches any text. Loading warns about any other tensor that no output reads |
//! | `adapters` | `Adapters(names: "lora_adaptations", alpha: "lora_alpha", rank: "lora_rank")`: keys of config.json for low-rank adapters (LoRA), of which a checkpoint has one for each name. The one that the key `adapter` names is added to the weights when they are loaded; without this key, no adapter is added. A weight `w.weight` is stored as `w.parametrizations.weight.original`, with `w.parametrizations.weight.0.lora_A` and `lora_B` of all adapters |
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
//! | `expect` | counts after the passes, in the whole graph |
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
//! `expect` counts `launches` (all), `gemms` (with any epilogue), or an operator after the passes: the operators of the table below by
//! name (activations by their kind: `gelu`, `gelu_tanh`, `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu`), `bias_linear`, `linear_gelu`,
//! `bias_gelu_linear` and so on with the other activations, `scores` and `context` (the two forms of `matmul`), `slice_columns`,
//! `embedding_layer_norm`, `residual_layer_norm`, `bias_residual_layer_norm`, `attention`, `mean_pool_normalize`.
//!
//! # Operators
//!
//! | operator | fields (defaults) | result |
//! |---|---|---|
//! | `embedding` | `ids` (`token_ids`, `previous_ids`, `type_ids`, `positions`), `first` (none), `table` or `sinusoid` (`over_width`, `over_half`), `rows`, `width`, `offset` (0), `skips` (none) | rows of the table. `skips` is the padding token of models that count only the positions of other tokens. Batches have no padding, so a sequence that contains it is rejected. `previous_ids` are the ids of the tokens before each token, and `first` is the id before a sequence's first token. A `sinusoid` table is computed: sines in the first half of the columns and cosines in the second, with frequencies `10000^(−2j / width)` or `10000^(−j / (width / 2 − 1))` |
//! | `linear` | `x`, `out`, `weight`, `bias` (none), `stored` (`out_in`, `in_out`), `of` and `from` (none), `groups` (1), `interleaved` (none) | `x · weightᵀ + bias`, of width `out`. `stored` is the layout of the matrix in the checkpoint. With `of` and `from`, the stored matrix and bias have `of` rows in `groups` equal parts, and each part is read from its row `from` on. The first `interleaved` rows that are read of each part are pairs of neighbours, which are reordered: the first rows of all pairs precede the second rows (below) |
//! | `add_bias` | `x`, `bias` | adds a vector to every row |
//! | `add`, `multiply` | `a`, `b` | sum or product of two values of the same shape, element by element |
//! | `scale` | `x`, `by` | `by · x` |
//! | `soft_cap` | `x`, `cap` | `cap · tanh(x / cap)`: rows, or scores before their softmax |
//! | `gelu` | `x`, `form` (`exact`, `tanh`) | pointwise: `x / 2 · (1 + erf(x / √2))`, or `x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³)))` |
//! | `relu`, `tanh`, `silu`, `quick_gelu`, `log1p_relu` | `x` | pointwise: `max(x, 0)`, `tanh x`, `x / (1 + e^(−x))`, `x / (1 + e^(−1.702 x))` (CLIP), `ln(1 + max(x, 0))` (SPLADE) |
//! | `activation` | `x`, `kind` (a name of `activations`) | pointwise |
//! | `layer_norm` | `x`, `weight`, `bias` (none), `eps` | over the width: `(x − mean) / √(variance + eps) · weight + bias` |
//! | `rms_norm` | `x`, `weight`, `eps`, `heads` (1), `plus_one` (`false`) | over the width, or over each of `heads` equal parts of it: `x / √(mean of x² + eps) · weight`, or `· (1 + weight)` (Gemma), where `1 + weight` is computed once when weights are loaded |
//! | `rotary` | `x`, `heads`, `width`, `part` (1), `theta`, `scaling` (none), `longest` (none) | rotates each head's first `width` columns, or the share `part` of these columns, rounded down (below). `scaling` is a key of config.json or a list of keys, of which the first one present specifies the frequency scaling: `default`, `linear`, `llama3`, `yarn`, `ntk` (GTE: the base times the factor), `longrope` (`su`) or `dynamic`. With `longrope` and `dynamic`, sequences of up to the trained number of positions are computed, and longer ones are rejected. Sequences of more than `longest` positions are rejected too |
//! | `columns` | `x`, `from`, `width` | a range of columns of every row |
//! | `same` | `x` | the value itself under another name |
//! | `cache` | `x`, `heads`, `name` | the rows of a sequence so far: those of this batch, preceded by those in the KV cache. Keys and values of causal attention are cached. If `x` has one row per sequence, the cache holds one position, which only another part reads |
//! | `cache` without `x` | `heads`, `width`, `name` | the rows that an earlier part appended to the cache of this name, which are the rows of a sequence's source. Attention to them is not causal |
//! | `split_heads` | `x`, `heads` | `[tokens, heads·head]` → `[heads, tokens, head]` |
//! | `merge_heads` | `x` | the inverse of `split_heads` |
//! | `matmul` | `a`, `b`, `transpose_b` (`false`) | scores `a · bᵀ`, or sums of `b` weighted by `a`, separately for each sequence. The number of heads of `a` is a multiple of that of `b`; each head of `b` serves a group of adjacent heads |
//! | `position_table` | `table`, `width`, `span`, `reach` (none) | rows of a table `[2·span, width]` of the checkpoint by distance: `[2·R + 1, width]` for distances −R to R, where R is the first distance after which rows repeat. Looked up once when weights are loaded. Norms and `linear` may follow, then `relative_scores` |
//! | `relative_scores` | `x`, `table`, `heads`, `of` (`query`, `key`) | `[heads, pairs]`: `x[i] · table[j − i]` of each head for query `i` and key `j` of a sequence, or `x[j] · table[j − i]` with `key` (disentangled attention). Distances outside the table use its first or last row |
//! | `softmax` | `x`, `causal` (`false`), `window` (none), `bias` (none) | of scores, over the keys `j` of query `i`: `e^(s[i, j]) / Σ e^(s[i, k])`. Causal: over keys `j ≤ i`. With a window: over keys with `abs(j − i) ≤ window`. Both restrictions can be combined |
//! | `first_token`, `mean_pool`, `max_pool` | `x` | one row per sequence |
//! | `weighted_mean_pool`, `root_length_pool` | `x` | one row per sequence of `n` tokens: `Σ (i + 1) · x[i] / Σ (i + 1)`, and `Σ x[i] / √n` |
//! | `last_token` | `x`, `end` (none), `highest_end` (none), `is` (none) | the last row of each sequence. `is` is the id that the last token must have: other sequences are rejected. `end` is the id of the token that ends a sequence. Tokens after its first occurrence are padding and are removed before a run. If `end` equals `highest_end`, the highest id of a sequence ends it |
//! | `concat` | `of` (2 to 16 values) | values with the same number of rows, concatenated along the width |
//! | `l2_normalize` | `x`, `eps` | rows scaled to length 1 |
//! | `draw` | `mean`, `log_variance` | a latent variable, one row per sequence: `mean + exp(log_variance / 2) · noise`, where the noise is standard normal and depends on the sequence's seed |
//! | `log_probability` | `x` | from logits of every token: the log-probability of each token given the tokens before it, and 0 for the first token of a sequence. It must be an output, and no operator may read it |
//!
//! A `bias` of `softmax` is added to its scores. It depends on the distance `d`, the position of the key minus that of the query:
//!
//! - `alibi`: `−slope · |d|` with a computed slope for each head (ALiBi): `2^(−8 (h + 1) / n)` for head `h` of `n`, if `n` is a power of
//!   two. Otherwise the slopes of the next smaller power are followed by every other slope of the next larger power.
//! - `relative_bias(table: "…", buckets: …, reach: …, bidirectional: …)`: `table[bucket(d)][head]` of a weight `[buckets, heads]` (T5). If
//!   bidirectional, half of the buckets, from bucket `buckets / 2` on, are for keys after the query; otherwise all such keys share
//!   bucket 0. Let `b` be the number of buckets of one side. The first `b / 2` buckets have one distance each, and a larger `|d|` has bucket
//!   `b / 2 + ⌊log(2 |d| / b) / log(2 reach / b) · (b − b / 2)⌋`, at most `b − 1`.
//!
//! A `position_table` uses row `span + r` for distance `d`, with `r = −d` clamped to `−span ..= span − 1`. With a `reach`, this holds up to
//! half of the span, `m = ⌊span / 2⌋`; a larger `|d|` has `r = ±(m + ⌈(m − 1) · log(|d| / m) / log((reach − 1) / m)⌉)` (DeBERTa).
//!
//! `rotary` rotates the first `w` columns of each head in pairs, `x[j]` with `x[j + w / 2]`, by an angle proportional to the token's
//! position `p` in its sequence, counted from 0. With frequencies `f[j] = theta^(−2j / w)` for `j < w / 2`, and `c = 1`:
//!
//! ```text
//! y[j]         = c · (x[j] · cos(p · f[j]) − x[j + w / 2] · sin(p · f[j]))
//! y[j + w / 2] = c · (x[j + w / 2] · cos(p · f[j]) + x[j] · sin(p · f[j]))
//! ```
//!
//! Some checkpoints rotate neighbours instead, `x[2j]` with `x[2j + 1]` (GPT-J, Cohere). The scores of attention do not depend on the order
//! of the columns of a head, if queries and keys have the same order. The projections of queries and keys are therefore read with
//! `interleaved: w`, which reorders the columns for the rotation above.
//!
//! A `scaling` replaces `f` and `c`. With `s` as its `factor` and `L` as its `original_max_position_embeddings`:
//!
//! - `default`: no change.
//! - `linear`: `f[j] / s`.
//! - `dynamic`: no change, for sequences of at most `L` tokens, or `max_position_embeddings` if `L` is not given.
//! - `longrope`: `f[j] / short_factor[j]`, for sequences of at most `L` tokens. `c` is `attention_factor`, or `√(1 + ln s / ln L)` if `s > 1`.
//!   `s` is `factor`, or `max_position_embeddings` divided by `L`.
//! - `ntk`: `(s · theta)^(−2j / w) / s^(2 / w)`; with `mixed_b = b`, `f[j] / exp(a · (j + 1)^b)` where `a = ln(s) / (w / 2)^b`.
//! - `llama3`: `(1 − r) · f[j] / s + r · f[j]`, where `r = (L · f[j] / 2π − low_freq_factor) / (high_freq_factor − low_freq_factor)`,
//!   clamped to 0 … 1.
//! - `yarn` (Peng et al. 2023, arXiv:2309.00071): `r · f[j] / s + (1 − r) · f[j]`, where `r = (j − low) / (high − low)`, clamped to 0 … 1. The
//!   pair that completes `n` rotations within `L` positions is `w · ln(L / 2πn) / (2 ln theta)`. `low` is that pair for `beta_fast` (32),
//!   rounded down and at least 0. `high` is that pair for `beta_slow` (1), rounded up and at most `w − 1`. Neither is rounded if
//!   `truncate` is `false`. `c` is `attention_factor` if given. Otherwise, if `s > 1`, it is
//!   `(0.1 · mscale · ln(s) + 1) / (0.1 · mscale_all_dim · ln(s) + 1)` if both keys are given, and `0.1 · ln(s) + 1` if not.
//!
//! `max_position_embeddings` of config.json also limits the length of sequences in models without a position table, if they use `rotary` or
//! a position bias. A `position_table` has no limit, because larger distances use its last rows. The limit is the value of the key; for
//! `linear` it is `s` times that value, for `yarn` `s · L`, rounded down, and for `longrope` and `dynamic` it is `L`. The lowest of several limits applies,
//! including `longest` and position tables. Without the key there is no limit.
//!
//! Weights (`table`, `weight`, `bias`) have their published names, with an index or an expression in braces, `layers.{i}.w` or
//! `h.{3 * i + 1}.w`. A list gives alternative names of the tensor. All prefixes and endings are tried, and the first name that exists is
//! used. A name that is read twice refers to the same tensor. An alternative name with a slash, `sparse_linear/weight`, refers to a tensor
//! in a separate file of the checkpoint folder, `sparse_linear.safetensors`.
//!
//! # Supported models
//!
//! Transformers with absolute or rotary positions or position biases, LayerNorm or RMSNorm before or after each part (or both), full or
//! causal attention, optionally with a window and with grouped-query heads, gates, the pointwise activations above, and any head.
//! These include GPT-2, OPT, BLOOM, GPT-NeoX, GPT-J, Falcon, Cohere, Llama, Mistral, StarCoder2, StableLM, SmolLM3, Granite, OLMo 2, Phi, Qwen2 and 3,
//! Gemma 1 to 3; the encoder-decoder models Marian, BART, mBART, M2M-100, NLLB and T5; and BERT and its relatives (RoBERTa,
//! XLM-RoBERTa and its XL, CamemBERT, DistilBERT, ALBERT, ELECTRA, MPNet, NomicBERT, GTE, JinaBERT v2, ModernBERT, NeoBERT, RoFormer,
//! DeBERTa 1 to 3, EmbeddingGemma, CLIP's text tower, MiniLM, and checkpoints of the same architecture such as BGE and E5).
//! `gemmule models` lists the shipped descriptions. The body of a layer may depend on its number and on its entry in config.json (`When`):
//! `examples/own_encoder.ron` is a ModernBERT with a different window, layer order and activation.
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
//! - Attention sinks, dropped or merged tokens.
//! - Relative keys and values that are added to keys and values by distance (Shaw et al. 2018: BERT's `relative_key`). No kernel fuses
//!   `relative_scores` into attention yet, so the scores are stored and their memory grows with the square of the sequence length.
//! - Frequencies of rotary positions that depend on a sequence's length (`longrope` and `dynamic` beyond the trained length).
//! - Pooling by a token that is found by its id (for CLIP, this is the last token, since its tokenizer ends a text with it), means weighted
//!   by token, and sums over tokens (SPLADE's first version).
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
mod syntax;

use std::collections::{BTreeMap, BTreeSet};

pub use adapters::ADAPTER;
pub use error::{ModelError, Problem};
pub use expect::Expectation;
pub use modules::{
    EMBEDDING, LOGITS, Module, Pooling, SPARSE, STATES, computed, normalizes_tokens,
};

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
    /// Tied head tensors for which the checkpoint has values of its own.
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

    /// Returns the description for a checkpoint that has its own values for the tied tensors `own`. Linear layers read these tensors
    /// instead of the tables to which the tensors are tied.
    pub fn with_own(self, own: BTreeSet<String>) -> Self {
        Self { own, ..self }
    }

    /// Name of the model.
    pub fn name(&self) -> &str {
        &self.ast.name
    }

    /// All available outputs, in the order of the file.
    pub fn output_names(&self) -> Vec<&str> {
        let outputs = self.ast.outputs();
        outputs.map(|(name, _)| name.value.as_str()).collect()
    }

    /// Outputs that need no other part: all outputs of a model with a single graph, else those of the first part.
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

    /// Returns the outputs that are built for a checkpoint if none is requested: those of the first entry of its `architectures`
    /// that the description names, else the default outputs.
    ///
    /// # Errors
    /// Returns an error if `architectures` names a head that the description lacks, unless the description names no
    /// architectures.
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
            // In an encoder-decoder model, the logits are in another part than the outputs that are built by default.
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
    /// `last_hidden_state`. By default, only that output is built. Without modules, this is the same as `build`.
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

    /// Returns the requested outputs without duplicates, and checks that each is known.
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
    /// Maximum sequence length, from the position table or the rotary positions; `None` if there is no limit.
    pub max_positions: Option<u32>,
    /// Exclusive upper bound of type ids; `None` if the model reads none.
    pub type_rows: Option<u32>,
    /// Token id that gets no position. No sequence may contain it.
    pub skipped: Option<u32>,
    /// Token that ends a sequence. Later tokens are padding.
    pub end: Option<SequenceEnd>,
}

impl Model {
    /// Checks all `expect:` lines on the graph after the passes.
    ///
    /// # Errors
    /// Returns the first unmet expectation, with the counts of the graph.
    pub fn check_expectations(&self, fused: &Graph) -> Result<(), ModelError> {
        expect::check(&self.expectations, fused)
    }
}

/// Returns whether the name of a transformers class is that of a model with a head, such as `BertForQuestionAnswering` or
/// `GPT2DoubleHeadsModel` rather than `BertModel`.
fn has_head(class: &str) -> bool {
    let is_for = |at: usize| class[at + 3..].starts_with(|c: char| c.is_ascii_uppercase());
    class.contains("Head") || class.match_indices("For").any(|(at, _)| is_for(at))
}

#[cfg(test)]
mod tests;
