//! Table of all request fields that the server recognizes, with the routes that support each field.
//!
//! A field is supported by some routes or by none. A route that does not support a field ignores it if no value of the field can change a
//! response. Otherwise, the route accepts only the values that have no effect. A field that is not in the table is refused. Every field may
//! be null.
//!
//! [`Fields`](super::request::Fields) checks bodies against this table, and the OpenAPI document contains its rules. A test checks that the
//! table in `docs/serving.md` agrees with it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Route, error::Failure};
use crate::names::{excerpt, nearest};

/// All fields that the server recognizes, by their names.
pub(super) struct FieldTable(BTreeMap<String, Field>);

pub(super) struct Field {
    /// Name in the body. A dot separates the name of an object from the name of a field in it.
    pub name: String,
    /// Routes that support the field.
    routes: Vec<Route>,
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

const fn ignored(name: &'static str) -> (&'static str, Elsewhere) {
    (name, Elsewhere::Ignored)
}

/// Returns a field that is refused by routes that do not support it, unless its value is null or in the JSON array `neutral`. These values
/// do not change a response.
const fn refused(name: &'static str, neutral: &'static str) -> (&'static str, Elsewhere) {
    (name, Elsewhere::Refused(neutral))
}

/// Handling of fields by routes that do not support them. If a field of a route is not in this list, it must be null on all other routes.
pub(super) const ELSEWHERE: &[(&str, Elsewhere)] = &[
    // Embeddings.
    refused("embedding_type", r#"["float"]"#),
    refused("output_dtype", r#"["float"]"#),
    refused("embedding_types", r#"[["float"]]"#),
    refused("late_chunking", "[false]"),
    refused("return_sparse", "[false]"),
    refused("return_multivector", "[false]"),
    // Clients of Hugging Face's inference API send this field even if it is an empty object.
    refused("parameters", "[{}]"),
    refused("skip_special_tokens", "[true]"),
    // Heads.
    refused("context", "[[]]"),
    refused("top_k", "[-1, 0]"),
    // Generation.
    refused("stream", "[false]"),
    ignored("stream_options.include_obfuscation"),
    refused("stream_options.continuous_usage_stats", "[false]"),
    refused("n", "[1]"),
    refused("top_logprobs", "[0]"),
    refused("tools", "[[]]"),
    refused("tool_choice", r#"["none", "auto"]"#),
    refused("chat_template_kwargs", "[{}]"),
    refused("continue_final_message", "[false]"),
    refused("add_generation_prompt", "[true]"),
    // Translation.
    refused("num_beams", "[1]"),
    refused("length_penalty", "[1]"),
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

impl FieldTable {
    /// Creates the table for routes whose requests have a body, each with the schema of the body. A route supports the properties of its
    /// schema, and the properties of objects in the schema. If the schema is a union (`anyOf`), the route supports the properties of all
    /// variants.
    pub fn new(bodies: impl IntoIterator<Item = (Route, Value)>) -> Self {
        let mut table = Self(BTreeMap::new());
        for &(name, elsewhere) in ELSEWHERE {
            table.entry(name).elsewhere = elsewhere;
        }
        for (route, body) in bodies {
            match body.get("anyOf").and_then(Value::as_array) {
                Some(variants) => variants.iter().for_each(|own| table.add(route, "", own)),
                None => table.add(route, "", &body),
            }
        }
        table
    }

    fn entry(&mut self, name: &str) -> &mut Field {
        let new = || Field {
            name: name.to_owned(),
            routes: Vec::new(),
            elsewhere: Elsewhere::Refused("[]"),
        };
        self.0.entry(name.to_owned()).or_insert_with(new)
    }

    /// Adds the properties of an object. `prefix` is the path of the object with a trailing dot; empty for the body itself.
    fn add(&mut self, route: Route, prefix: &str, schema: &Value) {
        let properties = schema.get("properties").and_then(Value::as_object);
        for (own, schema) in properties.into_iter().flatten() {
            let name = format!("{prefix}{own}");
            let routes = &mut self.entry(&name).routes;
            if !routes.contains(&route) {
                routes.push(route);
            }
            self.add(route, &format!("{name}."), schema);
        }
    }

    /// Returns the field with this name, if the server recognizes it.
    pub fn get(&self, name: &str) -> Option<&Field> {
        self.0.get(name)
    }

    pub fn all(&self) -> impl Iterator<Item = &Field> {
        self.0.values()
    }

    /// Returns the error for a field that is not in the table. `prefix` is the path of the object that contains it, with a trailing dot. It
    /// is empty for the body itself.
    pub fn unknown(&self, route: Route, prefix: &str, name: &str) -> Failure {
        let siblings = self.all().filter(|field| field.is_computed(route));
        let siblings = siblings.filter_map(|field| field.name.strip_prefix(prefix));
        let near = match nearest(name, siblings.filter(|name| !name.contains('.'))) {
            Some(near) => format!("; did you mean `{prefix}{near}`?"),
            None => "; leave it out".to_owned(),
        };
        let path = format!("{prefix}{}", excerpt(name));
        let problem = format!("`{path}` is not a field of {}{near}", route.label());
        Failure::invalid(&path, problem)
    }
}

impl Field {
    /// Returns whether a route supports the field.
    pub fn is_computed(&self, route: Route) -> bool {
        self.routes.contains(&route)
    }

    /// Returns the routes that support the field, except `POST /`. That route supports all fields of the routes that it forwards to.
    pub fn routes(&self) -> impl Iterator<Item = Route> {
        let routes = self.routes.iter().copied();
        routes.filter(|&route| route != Route::Base)
    }

    /// Returns the neutral values of the field: a route that does not support the field accepts and ignores them. Null is always accepted,
    /// and is not in the list. For [`Elsewhere::Ignored`], every value is accepted, and the list is empty.
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
        let name = &self.name;
        if !self.routes.is_empty() {
            let routes: Vec<&str> = self.routes().map(Route::name).collect();
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
