//! Table of the request fields that the server knows, for all routes.
//!
//! A field is supported by some routes or by none. A route that does not support a field ignores it if no value of the field can change a
//! response. Otherwise, the route accepts only the values that have no effect. A field that is not in the table is refused. Every field may
//! be null.
//!
//! [`Fields`](super::request::Fields) checks bodies against this table. Tests check that the OpenAPI document and the
//! table in `docs/serving.md` agree with it.

use serde_json::Value;

use super::{Route, error::Failure};
use crate::names::{excerpt, nearest};

pub(super) struct Field {
    /// Name in the body. A dot separates the name of an object from the name of a field in it.
    pub name: &'static str,
    /// Routes that support the field.
    pub routes: &'static [Route],
    pub elsewhere: Elsewhere,
}

/// Handling of a field by routes that do not support it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// Ignores the field, because none of its values changes a response.
    Ignored,
    /// Refuses the field, unless the value is null or in this JSON array.
    Refused(&'static str),
}

const fn computed(name: &'static str, routes: &'static [Route]) -> Field {
    computed_or(name, routes, "[]")
}

/// Returns a field that the given routes support. All other routes accept only null and the values in the JSON array `neutral`.
const fn computed_or(name: &'static str, routes: &'static [Route], neutral: &'static str) -> Field {
    Field {
        name,
        routes,
        elsewhere: Elsewhere::Refused(neutral),
    }
}

const fn ignored(name: &'static str) -> Field {
    Field {
        name,
        routes: &[],
        elsewhere: Elsewhere::Ignored,
    }
}

/// Returns a field that no route supports. In the APIs of other servers, it can change a response. Routes therefore accept only null and
/// the values in `neutral`, which do not change a response.
const fn refused(name: &'static str, neutral: &'static str) -> Field {
    computed_or(name, &[], neutral)
}

const ALL: &[Route] = &[
    Route::Embeddings,
    Route::MultiVector,
    Route::Completions,
    Route::ChatCompletions,
    Route::Translate,
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Predict,
    Route::TeiRerank,
    Route::Similarity,
    Route::Tokenize,
    Route::Decode,
    Route::Rerank,
    Route::RerankV2,
    Route::EmbedV2,
    Route::TokenClassification,
    Route::PredictTokens,
    Route::FillMask,
    Route::ZeroShot,
    Route::QuestionAnswering,
];
const TOKENS: &[Route] = &[Route::TokenClassification, Route::PredictTokens];
const ZERO_SHOT: &[Route] = &[Route::ZeroShot];
const QUESTIONS: &[Route] = &[Route::QuestionAnswering];
const EMBEDDINGS: &[Route] = &[Route::Embeddings];
const VECTORS: &[Route] = &[Route::Embeddings, Route::MultiVector];
const PURPOSE: &[Route] = &[Route::Embeddings, Route::MultiVector, Route::EmbedV2];
const GENERATION: &[Route] = &[Route::Completions, Route::ChatCompletions];
const TEXTS: &[Route] = &[Route::Completions, Route::ChatCompletions, Route::Translate];
const TRANSLATION: &[Route] = &[Route::Translate];
const COMPLETIONS: &[Route] = &[Route::Completions];
const CHAT: &[Route] = &[Route::ChatCompletions];
const SIMILARITY: &[Route] = &[Route::Similarity];
const TRUNCATED: &[Route] = &[
    Route::Embeddings,
    Route::MultiVector,
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Predict,
    Route::TeiRerank,
    Route::Rerank,
];
const CUT: &[Route] = &[
    Route::Embeddings,
    Route::MultiVector,
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Predict,
    Route::TeiRerank,
    Route::Rerank,
    Route::EmbedV2,
    Route::TokenClassification,
    Route::PredictTokens,
    Route::FillMask,
    Route::ZeroShot,
];
const PROMPTED: &[Route] = &[
    Route::Embeddings,
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Tokenize,
];
/// Routes with a `prompt`: a text to put before the inputs, or the text to complete.
const PROMPT: &[Route] = &[
    Route::Completions,
    Route::Embeddings,
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Tokenize,
];
const INPUTS: &[Route] = &[
    Route::Embed,
    Route::EmbedAll,
    Route::EmbedSparse,
    Route::Predict,
    Route::Similarity,
    Route::Tokenize,
    Route::TokenClassification,
    Route::PredictTokens,
    Route::FillMask,
    Route::ZeroShot,
];
const RANKING: &[Route] = &[Route::TeiRerank, Route::Rerank, Route::RerankV2];
/// Routes to which `POST /` forwards requests.
const BASE: [Route; 5] = [
    Route::Embed,
    Route::EmbedSparse,
    Route::Predict,
    Route::TeiRerank,
    Route::Similarity,
];

pub(super) const FIELDS: &[Field] = &[
    computed("model", ALL),
    // Embeddings.
    computed("input", VECTORS),
    computed("encoding_format", VECTORS),
    computed(
        "dimensions",
        &[Route::Embeddings, Route::MultiVector, Route::Embed],
    ),
    computed("input_type", PURPOSE),
    computed("task", EMBEDDINGS),
    computed("truncate", CUT),
    computed("truncation", EMBEDDINGS),
    computed_or("embedding_type", VECTORS, r#"["float"]"#),
    computed_or("output_dtype", EMBEDDINGS, r#"["float"]"#),
    computed_or("embedding_types", &[Route::EmbedV2], r#"[["float"]]"#),
    computed("output_dimension", &[Route::Embeddings, Route::EmbedV2]),
    computed("normalized", EMBEDDINGS),
    computed_or("late_chunking", EMBEDDINGS, "[false]"),
    computed_or("return_sparse", EMBEDDINGS, "[false]"),
    computed_or("return_multivector", EMBEDDINGS, "[false]"),
    computed("inputs", INPUTS),
    computed("inputs.source_sentence", SIMILARITY),
    computed("inputs.sentences", SIMILARITY),
    computed("normalize", &[Route::Embed]),
    computed("prompt_name", PROMPTED),
    computed("truncation_direction", TRUNCATED),
    // Clients of Hugging Face's inference API send this field even if it is an empty object.
    computed_or("parameters", SIMILARITY, "[{}]"),
    computed("parameters.truncate", SIMILARITY),
    computed("parameters.prompt_name", SIMILARITY),
    computed("parameters.prompt", SIMILARITY),
    computed("parameters.dimensions", SIMILARITY),
    computed("parameters.truncation_direction", SIMILARITY),
    computed("add_special_tokens", &[Route::Tokenize]),
    computed("ids", &[Route::Decode]),
    computed_or("skip_special_tokens", &[Route::Decode], "[true]"),
    // Scores.
    computed(
        "raw_scores",
        &[Route::Predict, Route::TeiRerank, Route::PredictTokens],
    ),
    computed("query", RANKING),
    computed("texts", &[Route::TeiRerank, Route::EmbedV2]),
    computed("return_text", &[Route::TeiRerank]),
    computed("documents", &[Route::Rerank, Route::RerankV2]),
    computed("top_n", &[Route::Rerank, Route::RerankV2]),
    computed("return_documents", &[Route::Rerank]),
    computed("max_tokens_per_doc", &[Route::RerankV2]),
    // Heads.
    computed("aggregation_strategy", TOKENS),
    computed("ignore_labels", TOKENS),
    computed("targets", &[Route::FillMask]),
    computed("candidate_labels", ZERO_SHOT),
    computed("hypothesis_template", ZERO_SHOT),
    computed("multi_label", ZERO_SHOT),
    computed("question", QUESTIONS),
    computed_or("context", QUESTIONS, "[[]]"),
    computed("max_answer_len", QUESTIONS),
    computed("max_seq_len", QUESTIONS),
    computed("doc_stride", QUESTIONS),
    computed("handle_impossible_answer", QUESTIONS),
    computed("align_to_words", QUESTIONS),
    computed_or(
        "top_k",
        &[Route::FillMask, Route::QuestionAnswering],
        "[-1, 0]",
    ),
    // Generation.
    computed("prompt", PROMPT),
    computed("messages", CHAT),
    computed("max_tokens", TEXTS),
    computed("max_completion_tokens", GENERATION),
    computed("temperature", GENERATION),
    computed("top_p", GENERATION),
    computed("seed", GENERATION),
    computed("frequency_penalty", GENERATION),
    computed("presence_penalty", GENERATION),
    computed("logit_bias", GENERATION),
    computed("stop", GENERATION),
    computed_or("stream", TEXTS, "[false]"),
    computed("stream_options", TEXTS),
    computed("stream_options.include_usage", TEXTS),
    ignored("stream_options.include_obfuscation"),
    refused("stream_options.continuous_usage_stats", "[false]"),
    computed_or("n", TEXTS, "[1]"),
    computed("best_of", COMPLETIONS),
    computed("logprobs", GENERATION),
    computed_or("top_logprobs", CHAT, "[0]"),
    computed_or("tools", CHAT, "[[]]"),
    computed_or("tool_choice", CHAT, r#"["none", "auto"]"#),
    computed_or("chat_template_kwargs", CHAT, "[{}]"),
    computed_or("continue_final_message", CHAT, "[false]"),
    computed_or("add_generation_prompt", CHAT, "[true]"),
    // Translation.
    computed("text", TRANSLATION),
    computed("source_lang", TRANSLATION),
    computed("target_lang", TRANSLATION),
    computed("target_prefix", TRANSLATION),
    computed("num_hypotheses", TRANSLATION),
    computed_or("num_beams", TRANSLATION, "[1]"),
    computed_or("length_penalty", TRANSLATION, "[1]"),
    // Fields that cannot change a response: labels from the client, hints for storage, scheduling and caching, and parameters of sampling
    // methods that are off.
    ignored("user"),
    ignored("metadata"),
    ignored("store"),
    ignored("service_tier"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    ignored("prompt_cache_options"),
    ignored("cache_salt"),
    ignored("cache_prompt"),
    ignored("request_id"),
    ignored("rid"),
    ignored("priority"),
    ignored("id_slot"),
    ignored("slot_id"),
    ignored("n_keep"),
    ignored("n_discard"),
    ignored("keep_alive"),
    ignored("guided_decoding_backend"),
    ignored("guided_whitespace_pattern"),
    ignored("mirostat_tau"),
    ignored("mirostat_eta"),
    ignored("dynatemp_exponent"),
    ignored("xtc_threshold"),
    ignored("dry_base"),
    ignored("dry_allowed_length"),
    ignored("dry_penalty_last_n"),
    ignored("dry_sequence_breakers"),
    // Structured output.
    refused("response_format", r#"[{"type": "text"}]"#),
    refused("structured_outputs", "[]"),
    refused("structural_tag", r#"[""]"#),
    refused("guided_json", r#"[""]"#),
    refused("guided_regex", r#"[""]"#),
    refused("guided_choice", "[[]]"),
    refused("guided_grammar", r#"[""]"#),
    refused("grammar", r#"[""]"#),
    refused("json_schema", "[]"),
    refused("regex", r#"[""]"#),
    refused("ebnf", r#"[""]"#),
    refused("format", r#"[""]"#),
    // Conversations.
    refused("functions", "[[]]"),
    refused("function_call", r#"["none", "auto"]"#),
    refused("parallel_tool_calls", "[true]"),
    refused("parse_tool_calls", "[false]"),
    refused("audio", "[]"),
    refused("modalities", r#"[["text"]]"#),
    refused("prediction", "[]"),
    refused("web_search_options", "[]"),
    refused("verbosity", r#"["medium"]"#),
    refused("reasoning", "[]"),
    refused("reasoning_effort", "[]"),
    refused("reasoning_format", r#"["none"]"#),
    refused("include_reasoning", "[true]"),
    refused("thinking", "[]"),
    refused("think", "[]"),
    refused("enable_thinking", "[]"),
    refused("thinking_budget", "[]"),
    refused("chat_template", r#"[""]"#),
    refused("system", r#"[""]"#),
    refused("template", r#"[""]"#),
    refused("raw", "[false]"),
    refused("options", "[{}]"),
    refused("images", "[[]]"),
    refused("image_data", "[[]]"),
    refused("mm_processor_kwargs", "[{}]"),
    refused("media_io_kwargs", "[{}]"),
    // Sampling.
    refused("top_a", "[0]"),
    refused("min_p", "[0]"),
    refused("typical_p", "[1]"),
    refused("typ_p", "[1]"),
    refused("tfs_z", "[1]"),
    refused("tfs", "[1]"),
    refused("epsilon_cutoff", "[0]"),
    refused("eta_cutoff", "[0]"),
    refused("top_n_sigma", "[-1, 0]"),
    refused("min_keep", "[0]"),
    refused("mirostat", "[0]"),
    refused("mirostat_mode", "[0]"),
    refused("dynatemp_range", "[0]"),
    refused("smoothing_factor", "[0]"),
    refused("xtc_probability", "[0]"),
    refused("dry_multiplier", "[0]"),
    refused("repetition_penalty", "[1]"),
    refused("repeat_penalty", "[1]"),
    refused("encoder_repetition_penalty", "[1]"),
    refused("repeat_last_n", "[-1]"),
    refused("penalize_nl", "[false]"),
    refused("no_repeat_ngram_size", "[0]"),
    refused("samplers", "[]"),
    refused("do_sample", "[]"),
    refused("use_beam_search", "[false]"),
    refused("early_stopping", "[false]"),
    refused("logits_processors", "[[]]"),
    refused("custom_logit_processor", r#"[""]"#),
    refused("bad_words", "[[]]"),
    refused("allowed_token_ids", "[[]]"),
    refused("watermark", "[false]"),
    // Fields for the length and the end of a text.
    refused("max_new_tokens", "[]"),
    refused("max_length", "[]"),
    refused("n_predict", "[]"),
    refused("num_predict", "[]"),
    refused("min_tokens", "[0]"),
    refused("min_length", "[0]"),
    refused("ignore_eos", "[false]"),
    refused("stop_token_ids", "[[]]"),
    refused("stop_regex", r#"["", []]"#),
    refused("include_stop_str_in_output", "[false]"),
    refused("no_stop_trim", "[false]"),
    refused("t_max_predict_ms", "[-1, 0]"),
    refused("n_indent", "[0]"),
    // Form of a response.
    refused("echo", "[false]"),
    refused("suffix", r#"[""]"#),
    refused("return_full_text", "[false]"),
    refused("spaces_between_special_tokens", "[true]"),
    refused("prompt_logprobs", "[]"),
    refused("n_probs", "[0]"),
    refused("post_sampling_probs", "[false]"),
    refused("return_tokens", "[false]"),
    refused("return_token_ids", "[false]"),
    refused("return_tokens_as_token_ids", "[false]"),
    refused("return_hidden_states", "[false]"),
    refused("return_progress", "[false]"),
    refused("timings_per_token", "[false]"),
    refused("response_fields", "[[]]"),
    refused("details", "[false]"),
    refused("decoder_input_details", "[false]"),
    refused("verbose", "[false]"),
    // Adapters and other models.
    refused("lora", "[[]]"),
    refused("lora_path", "[]"),
    refused("adapter_id", "[]"),
    refused("vllm_xargs", "[{}]"),
    refused("kv_transfer_params", "[]"),
    // Embeddings and ranks.
    refused("truncate_prompt_tokens", "[]"),
    refused("instruction", r#"[""]"#),
    refused("embd_normalize", "[]"),
    refused("embed_dtype", r#"["float32"]"#),
    refused("endianness", r#"["little", "native"]"#),
    refused("return_embeddings", "[false]"),
    refused("rank_fields", r#"[["text"]]"#),
    refused("max_chunks_per_doc", "[]"),
];

impl Field {
    /// Returns whether a route supports the field. `POST /` supports the fields of all routes that it forwards to.
    pub fn is_computed(&self, route: Route) -> bool {
        match route {
            Route::Base => BASE.iter().any(|base| self.routes.contains(base)),
            route => self.routes.contains(&route),
        }
    }

    /// Returns the values, other than null, that a route accepts and ignores if it does not support the field. The list is also empty for
    /// [`Elsewhere::Ignored`], which accepts every value.
    pub fn neutral(&self) -> Vec<Value> {
        match self.elsewhere {
            Elsewhere::Ignored => Vec::new(),
            Elsewhere::Refused(list) => {
                serde_json::from_str(list).expect("a test parses each list")
            }
        }
    }

    /// Returns whether a route that does not support the field can ignore `value`, because the value does not affect responses.
    pub fn is_neutral(&self, value: &Value) -> bool {
        let is_same = |neutral: &Value| match (neutral.as_f64(), value.as_f64()) {
            (Some(neutral), Some(value)) => neutral == value,
            _ => neutral == value,
        };
        self.elsewhere == Elsewhere::Ignored
            || value.is_null()
            || self.neutral().iter().any(is_same)
    }

    /// Returns the error for a field that the route does not support and whose value is not neutral.
    pub fn refusal(&self, route: Route, value: &Value) -> Failure {
        let name = self.name;
        if !self.routes.is_empty() {
            let routes: Vec<&str> = self.routes.iter().map(|route| route.name()).collect();
            let problem = format!(
                "`{name}` is not a field of {}, but of {}; leave it out",
                route.label(),
                routes.join(", ")
            );
            return Failure::invalid(name, problem);
        }
        let neutral: Vec<String> = self.neutral().iter().map(Value::to_string).collect();
        let neutral = match neutral.is_empty() {
            true => String::new(),
            false => format!(", or send {}", neutral.join(" or ")),
        };
        let problem = format!(
            "`{name}` is {}, which would change the response and is not supported; leave it out{neutral}",
            shown(value)
        );
        Failure::invalid(name, problem)
    }
}

/// Returns the field with this name, if the server knows it.
pub(super) fn field(name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.name == name)
}

/// Returns the error for a field that is not in the table. `prefix` is the path of the object that contains it, with a trailing dot. It is
/// empty for the body itself.
pub(super) fn unknown(route: Route, prefix: &str, name: &str) -> Failure {
    let siblings = FIELDS.iter().filter(|field| field.is_computed(route));
    let siblings = siblings.filter_map(|field| field.name.strip_prefix(prefix));
    let near = match nearest(name, siblings.filter(|name| !name.contains('.'))) {
        Some(near) => format!("; did you mean `{prefix}{near}`?"),
        None => "; leave it out".to_owned(),
    };
    let path = format!("{prefix}{}", excerpt(name));
    let problem = format!("`{path}` is not a field of {}{near}", route.label());
    Failure::invalid(&path, problem)
}

/// Formats a value for an error: a short value in full, any other value as its type.
pub(super) fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 40;
    let text = value.to_string();
    match value {
        _ if text.chars().count() <= MAX_CHARS => text,
        other => kind(other).to_owned(),
    }
}

/// Returns the name of a value's JSON type, for an error.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "missing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
