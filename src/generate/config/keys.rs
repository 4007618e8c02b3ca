//! Keys of `generation_config.json`, from `GenerationConfig` of version 5 of the library transformers, grouped by effect.

use serde_json::Value;

use crate::names::nearest;

/// Keys that change the tokens and are supported.
pub(super) const COMPUTED: [&str; 24] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "renormalize_logits",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
];

/// Keys that cannot change the tokens. Most of them select return values, cache storage or speedups: assisted and multi-token decoding
/// produce the same tokens as plain decoding. The others have no counterpart in gemmule: the tokenizer adds the first token of a prompt,
/// batches have no padding, and a NaN logit is an error.
const WITHOUT_EFFECT: [&str; 31] = [
    "_commit_hash",
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "disable_compile",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "return_dict_in_generate",
    "return_legacy_cache",
    "speculation_type",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "use_mtp",
];

/// Keys that change the tokens and are not supported.
const NOT_COMPUTED: [&str; 20] = [
    "assistant_ensemble_weight",
    "cache_implementation",
    "constraints",
    "custom_generate",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "force_bos_token_to_be_generated",
    "force_words_ids",
    "forced_decoder_ids",
    "guidance_scale",
    "is_assistant",
    "max_time",
    "num_return_sequences",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "token_healing",
    "watermarking_config",
];

/// Unsupported keys that affect only sampling.
const DRAWS: [&str; 4] = ["epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"];

/// Generation settings that older folders keep in config.json, next to the model's settings.
pub(super) const IN_CONFIG: [&str; 37] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "eos_token_id",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_bos_token_to_be_generated",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "penalty_alpha",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Effect of a key and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The value cannot change the tokens.
    Nothing,
    Computed,
    /// The value changes the tokens and is not supported.
    NotComputed,
    /// The value changes how tokens are sampled and is not supported.
    Draws,
    Unknown,
}

pub(super) fn meaning(key: &str, value: &Value) -> Meaning {
    if value.is_null() || WITHOUT_EFFECT.contains(&key) || is_neutral(key, value) {
        Meaning::Nothing
    } else if COMPUTED.contains(&key) {
        Meaning::Computed
    } else if DRAWS.contains(&key) {
        Meaning::Draws
    } else if NOT_COMPUTED.contains(&key) {
        Meaning::NotComputed
    } else {
        Meaning::Unknown
    }
}

/// Whether the library transformers treats a key with this value like a missing key.
fn is_neutral(key: &str, value: &Value) -> bool {
    let number = value.as_f64();
    match key {
        // These cutoffs only apply strictly between 0 and 1.
        "epsilon_cutoff" | "eta_cutoff" => number.is_some_and(|x| x <= 0.0 || x >= 1.0),
        "typical_p" => number.is_some_and(|x| x >= 1.0),
        "encoder_no_repeat_ngram_size" | "penalty_alpha" => number.is_some_and(|x| x <= 0.0),
        "encoder_repetition_penalty" | "guidance_scale" | "num_return_sequences" => {
            number == Some(1.0)
        }
        // The second number is the base of the penalty. Base 1 has no effect.
        "exponential_decay_length_penalty" => value[1].as_f64() == Some(1.0),
        "force_bos_token_to_be_generated" | "is_assistant" | "token_healing" => value == false,
        "bad_words_ids" | "constraints" | "force_words_ids" | "forced_decoder_ids"
        | "sequence_bias" | "stop_strings" => match value {
            Value::Array(all) => all.is_empty(),
            Value::Object(all) => all.is_empty(),
            Value::String(text) => text.is_empty(),
            _ => false,
        },
        // The quantized cache rounds keys and values.
        "cache_implementation" => value != "quantized",
        _ => false,
    }
}

/// Returns the known key most similar to an unknown one.
pub(super) fn similar(key: &str) -> Option<&'static str> {
    let all = COMPUTED.into_iter().chain(NOT_COMPUTED).chain(DRAWS);
    nearest(key, all)
}
