//! `generation_config.json`: a checkpoint's settings for generation.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use self::keys::{IN_CONFIG, Meaning, meaning, similar};
use super::{SamplingParams, UnsupportedDraw};
use crate::{
    files::Kind,
    generate::GenerateError,
    runtime::weights::ModelFiles,
    search::{Beams, EarlyStopping, Rules},
};

mod keys;

/// Value of `max_length` that older versions of the library transformers write into the config.json of every model.
const WRITTEN_LENGTH: u64 = 20;

/// Max value of lengths and sequence sizes. A batch has at most 2²⁴ tokens.
pub const MAX_TOKENS: usize = 1 << 24;
/// Maximum token id. Devices store ids in 31 bits.
const MAX_ID: u64 = i32::MAX as u64;
/// Max number of ids in a list, about the size of a large vocabulary.
const MAX_IDS: usize = 1 << 18;
/// Maximum number of end tokens. Beam search keeps candidates for each.
const MAX_ENDS: usize = 1024;

/// Reads the generation settings of a checkpoint folder from its `generation_config.json`. Older folders lack that file; their settings
/// come from config.json. If there is a `generation_config.json`, `eos_token_id` of config.json has no effect, as in the library
/// transformers. The start token of a decoder is `decoder_start_token_id` of `generation_config.json`, or else its `bos_token_id`, or else
/// `decoder_start_token_id` of config.json. If the folder sets no limit on the length, [`Rules::max_new_tokens`] is [`Rules::NO_LIMIT`].
///
/// [`SamplingParams::default_sampling`] and [`SamplingParams::default_beams`] contain the folder's settings even if the folder enables
/// neither sampling nor beam search. If the folder enables both, `sampling` and `beams` are both set.
/// [`Generator::check_options`](super::Generator::check_options) refuses this combination, so the caller must remove one of them.
///
/// # Errors
/// Returns an error if a file cannot be read, if an unsupported key would change the result, if a key is unknown, or if
/// a value has a wrong type or is out of range.
pub fn generation_config(folder: &Path) -> Result<SamplingParams, GenerateError> {
    generation_config_of(&ModelFiles::open(folder)?)
}

/// Reads the generation settings from the files of a model. See [`generation_config`].
///
/// # Errors
/// Returns the errors of [`generation_config`].
pub fn generation_config_of(files: &ModelFiles) -> Result<SamplingParams, GenerateError> {
    let read = |name: &str| -> Result<(PathBuf, Option<Value>), GenerateError> {
        let file = files.name(name);
        let Some(text) = files.text(name, Kind::Config)? else {
            return Ok((file, None));
        };
        match serde_json::from_str(&text) {
            Ok(value) => Ok((file, Some(value))),
            Err(e) => Err(GenerateError::GenerationConfig {
                file,
                problem: format!("it is not JSON: {e}"),
            }),
        }
    };
    let wrong = |file: &Path, problem| GenerateError::GenerationConfig {
        file: file.to_owned(),
        problem,
    };
    let (config_file, config) = read("config.json")?;
    let mut config = config.unwrap_or_else(|| json!({}));
    let start = config.get("bos_token_id").cloned();
    if let Some(object) = config.as_object_mut() {
        // The library transformers writes a `max_length` of 20 even if no user set it.
        object.retain(|key, value| {
            IN_CONFIG.contains(&key.as_str()) && !(key == "max_length" && value == WRITTEN_LENGTH)
        });
    }
    let (file, own) = read("generation_config.json")?;
    let Some(own) = own else {
        let mut parsed = parse(&config).map_err(|problem| wrong(&config_file, problem))?;
        let started = parsed.start_with(start.as_ref().map(|value| ("bos_token_id", value)));
        started.map_err(|problem| wrong(&config_file, problem))?;
        return Ok(parsed.generate());
    };
    let mut parsed = parse(&own).map_err(|problem| wrong(&file, problem))?;
    let started = parsed.start_with(own.get("bos_token_id").map(|value| ("bos_token_id", value)));
    started.map_err(|problem| wrong(&file, problem))?;
    let key = "decoder_start_token_id";
    let started = parsed.start_with(config.get(key).map(|value| (key, value)));
    started.map_err(|problem| wrong(&config_file, problem))?;
    let end = config.get("eos_token_id").filter(|end| !end.is_null());
    if let (true, Some(end)) = (parsed.generate.rules.end.is_empty(), end) {
        tracing::warn!(
            "`{}` has no `eos_token_id`, so generated texts end only at the maximum length, as in the library transformers; to end them at the `eos_token_id` of config.json, {end}, copy it to generation_config.json",
            file.display()
        );
    }
    Ok(parsed.generate())
}

/// The settings of one JSON file: generation_config.json or config.json.
struct Parsed {
    generate: SamplingParams,
    /// Single-token words that are never generated, unless they are end tokens.
    bad_words: Vec<u32>,
}

impl Parsed {
    /// Sets the start token of the decoder to the value of `setting`, unless a start token is already set or the value is null.
    fn start_with(&mut self, setting: Option<(&str, &Value)>) -> Result<(), String> {
        let start = &mut self.generate.decoder_start;
        if let (None, Some((key, value))) = (&start, setting.filter(|(_, v)| !v.is_null())) {
            *start = Some(Setting { key, value }.id()?);
        }
        Ok(())
    }

    /// Returns the sampling parameters, which suppress the bad words. The end tokens must already be set, because a bad word that is an end
    /// token is not suppressed.
    fn generate(mut self) -> SamplingParams {
        let rules = &mut self.generate.rules;
        let bad = self.bad_words.into_iter().filter(|id| !rules.ends(*id));
        let bad: Vec<u32> = bad.collect();
        rules.suppressed.extend(bad);
        self.generate
    }
}

/// A key with its value.
struct Setting<'a> {
    key: &'a str,
    value: &'a Value,
}

impl Setting<'_> {
    fn wrong(&self, expected: &str) -> String {
        format!("`{}` is {}; expected {expected}", self.key, self.value)
    }

    fn real(&self) -> Result<f32, String> {
        let number = self.value.as_f64().map(|x| x as f32);
        let number = number.filter(|x| x.is_finite());
        number.ok_or_else(|| self.wrong("a number"))
    }

    fn flag(&self) -> Result<bool, String> {
        let flag = self.value.as_bool();
        flag.ok_or_else(|| self.wrong("true or false"))
    }

    fn whole(&self, range: RangeInclusive<usize>) -> Result<usize, String> {
        let n = self.value.as_u64().and_then(|n| usize::try_from(n).ok());
        let n = n.filter(|n| range.contains(n));
        let (least, most) = range.into_inner();
        n.ok_or_else(|| self.wrong(&format!("a whole number from {least} to {most}")))
    }

    /// Parses a token id or a list of at most `max` token ids.
    fn ids(&self, max: usize) -> Result<Vec<u32>, String> {
        ids(self.value, max).map_err(|problem| format!("`{}` {problem}", self.key))
    }

    fn id(&self) -> Result<u32, String> {
        match self.ids(1)?.as_slice() {
            &[id] => Ok(id),
            _ => Err(self.wrong("a token id")),
        }
    }

    fn early_stopping(&self) -> Result<EarlyStopping, String> {
        match self.value {
            Value::Bool(true) => Ok(EarlyStopping::Yes),
            Value::Bool(false) => Ok(EarlyStopping::Heuristic),
            Value::String(word) if word == "never" => Ok(EarlyStopping::Never),
            _ => Err(self.wrong("true, false or \"never\"")),
        }
    }

    /// Returns the ids of words. Each word must be a single token.
    fn words(&self) -> Result<Vec<u32>, String> {
        let words = self.value.as_array();
        let words = words.ok_or_else(|| self.wrong("a list of lists of token ids"))?;
        if words.len() > MAX_IDS {
            return Err(format!(
                "`{}` has {} words; expected at most {MAX_IDS}",
                self.key,
                words.len()
            ));
        }
        let one = |word: &Value| match ids(word, MAX_IDS)?.as_slice() {
            &[one] => Ok(one),
            several => Err(format!(
                "has a word of {} tokens; only words of one token are supported",
                several.len()
            )),
        };
        let read = words.iter().map(one).collect::<Result<_, String>>();
        read.map_err(|problem| format!("`{}` {problem}", self.key))
    }

    /// Returns the error message for a known key whose value is not supported.
    fn not_computed(&self) -> String {
        format!(
            "`{}` is {}, which changes the result and is not supported; remove it in a copy of the folder to ignore it",
            self.key, self.value
        )
    }

    /// Returns the error message for an unknown key.
    fn unknown(&self) -> String {
        let similar = similar(self.key).map(|key| format!("did you mean `{key}`? Otherwise "));
        format!(
            "`{}` is {}, which is not a known setting; {}remove it in a copy of the folder to ignore it",
            self.key,
            self.value,
            similar.unwrap_or_default()
        )
    }
}

fn parse(value: &Value) -> Result<Parsed, String> {
    let object = value.as_object().ok_or("it is not an object")?;
    let mut generate = SamplingParams::default();
    let mut samples = false;
    let mut bad_words = Vec::new();
    let (mut max_new_tokens, mut min_new_tokens) = (None, None);
    let lengths = 0..=MAX_TOKENS;
    for (key, value) in object {
        let setting = Setting { key, value };
        match meaning(key, value) {
            Meaning::Nothing => continue,
            Meaning::NotComputed => return Err(setting.not_computed()),
            Meaning::Unknown => return Err(setting.unknown()),
            Meaning::Draws => {
                let (key, value) = (key.clone(), value.to_string());
                let unsupported = UnsupportedDraw { key, value };
                generate.unsupported_draws.push(unsupported);
                continue;
            }
            Meaning::Computed => {}
        }
        let SamplingParams {
            rules,
            default_sampling: sampling,
            default_beams: beams,
            ..
        } = &mut generate;
        match key.as_str() {
            "do_sample" => samples = setting.flag()?,
            "temperature" => sampling.temperature = setting.real()?,
            "top_k" => sampling.top_k = setting.whole(lengths.clone())?,
            "top_p" => sampling.top_p = setting.real()?,
            "min_p" => sampling.min_p = setting.real()?,
            "repetition_penalty" => rules.repetition_penalty = setting.real()?,
            "no_repeat_ngram_size" => rules.no_repeat_ngram = setting.whole(lengths.clone())?,
            "eos_token_id" => rules.end = setting.ids(MAX_ENDS)?,
            "min_length" => rules.min_length = setting.whole(lengths.clone())?,
            "min_new_tokens" => min_new_tokens = Some(setting.whole(lengths.clone())?),
            "max_new_tokens" => max_new_tokens = Some(setting.whole(1..=MAX_TOKENS)?),
            "max_length" => generate.max_length = Some(setting.whole(lengths.clone())?),
            "decoder_start_token_id" => generate.decoder_start = Some(setting.id()?),
            "bad_words_ids" => bad_words = setting.words()?,
            "forced_bos_token_id" => generate.forced_bos = Some(setting.id()?),
            "forced_eos_token_id" => rules.forced_last = setting.ids(MAX_ENDS)?,
            "num_beams" => beams.n = setting.whole(1..=Beams::MAX)?,
            "num_beam_groups" => beams.groups = setting.whole(1..=Beams::MAX)?,
            "diversity_penalty" => beams.diversity = setting.real()?,
            "length_penalty" => beams.length_penalty = setting.real()?,
            "early_stopping" => beams.early_stopping = setting.early_stopping()?,
            "renormalize_logits" => rules.renormalize = setting.flag()?,
            "suppress_tokens" => rules.suppressed = setting.ids(MAX_IDS)?,
            "begin_suppress_tokens" => rules.suppressed_first = setting.ids(MAX_IDS)?,
            _ => return Err(setting.unknown()),
        }
    }
    let rules = &mut generate.rules;
    // `max_new_tokens` and `min_new_tokens` take precedence over `max_length` and `min_length`.
    if let Some(least) = min_new_tokens {
        (rules.min_new_tokens, rules.min_length) = (least, 0);
    }
    let new = max_new_tokens.or(generate.max_length);
    if max_new_tokens.is_some() {
        // Without a `max_length`, a prompt that leaves fewer than `max_new_tokens` positions is refused. With any `max_length`, the number
        // of new tokens is lowered to the remaining positions instead.
        generate.max_length = Some(usize::MAX);
    }
    rules.max_new_tokens = new.unwrap_or(Rules::NO_LIMIT);
    generate.sampling = samples.then_some(generate.default_sampling);
    generate.beams = (generate.default_beams.n > 1).then_some(generate.default_beams);
    Ok(Parsed {
        generate,
        bad_words,
    })
}

/// Parses a token id or a list of at most `max` token ids.
fn ids(value: &Value, max: usize) -> Result<Vec<u32>, String> {
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| id <= MAX_ID);
        id.and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| format!("has {value}; expected a token id from 0 to {MAX_ID}"))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(all) if all.len() > max => Err(format!(
            "has {} token ids; expected at most {max}",
            all.len()
        )),
        Value::Array(all) => all.iter().map(id).collect(),
        one => Ok(vec![id(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: &Value) -> Result<SamplingParams, String> {
        super::parse(value).map(Parsed::generate)
    }

    #[test]
    fn published_files_are_read_and_unsupported_settings_refused() {
        // The settings are from the files of Llama 3.2 and GPT-2.
        let llama = json!({
            "_from_model_config": true, "bos_token_id": 128000, "do_sample": true,
            "eos_token_id": [128001, 128008], "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.45.0"
        });
        let generate = parse(&llama).expect("it is read");
        assert_eq!(generate.rules.end, [128001, 128008]);
        let sampling = generate.sampling.expect("it samples");
        assert_eq!(
            (sampling.temperature, sampling.top_k, sampling.top_p),
            (0.6, 50, 0.9)
        );
        let gpt2 = json!({"bos_token_id": 50256, "eos_token_id": 50256});
        let generate = parse(&gpt2).expect("it is read");
        assert_eq!((generate.rules.end, generate.sampling), (vec![50256], None));
        let beams = parse(&json!({"num_beams": 4, "early_stopping": "never"})).expect("it is read");
        let beams = beams.beams.expect("it searches");
        assert_eq!((beams.n, beams.early_stopping), (4, EarlyStopping::Never));
        let guided = parse(&json!({"guidance_scale": 4})).expect_err("an error");
        insta::assert_snapshot!(guided, @"`guidance_scale` is 4, which changes the result and is not supported; remove it in a copy of the folder to ignore it");
        let wrong = parse(&json!({"top_k": "many"})).expect_err("an error");
        insta::assert_snapshot!(wrong, @r#"`top_k` is "many"; expected a whole number from 0 to 16777216"#);
        assert!(
            parse(&json!({"num_beams": 1, "length_penalty": 1.0, "early_stopping": false})).is_ok()
        );
        let several = parse(&json!({"num_return_sequences": 3})).expect_err("an error");
        assert!(several.starts_with("`num_return_sequences` is 3, which changes the result"));
        let time = parse(&json!({"max_time": 2.5})).expect_err("an error");
        assert!(time.starts_with("`max_time` is 2.5, which changes the result"));
        assert!(parse(&json!({"num_return_sequences": 1, "max_time": null})).is_ok());
        let both = parse(&json!({"num_beams": 2, "do_sample": true})).expect("it is read");
        assert!(both.beams.is_some() && both.sampling.is_some());
    }

    #[test]
    fn neutral_values_of_every_key_are_accepted() {
        for (key, value) in [
            ("_commit_hash", json!("abc")),
            ("_from_model_config", json!(true)),
            ("assistant_confidence_threshold", json!(0.7)),
            ("assistant_early_exit", json!(2)),
            ("assistant_lookbehind", json!(5)),
            ("bad_words_ids", json!([])),
            ("begin_suppress_tokens", json!([])),
            ("bos_token_id", json!(0)),
            ("cache_config", json!({})),
            ("cache_implementation", json!("static")),
            ("compile_config", json!({})),
            ("constraints", json!([])),
            ("continuous_batching_config", json!({})),
            ("disable_compile", json!(true)),
            ("diversity_penalty", json!(0.0)),
            ("do_sample", json!(false)),
            ("early_stopping", json!(false)),
            ("encoder_no_repeat_ngram_size", json!(0)),
            ("encoder_repetition_penalty", json!(1)),
            ("epsilon_cutoff", json!(0.0)),
            ("eta_cutoff", json!(0)),
            ("exponential_decay_length_penalty", json!([5, 1.0])),
            ("force_words_ids", json!([])),
            ("forced_decoder_ids", json!([])),
            ("forced_eos_token_id", json!([])),
            ("guidance_scale", json!(1.0)),
            ("is_assistant", json!(false)),
            ("length_penalty", json!(1.0)),
            ("low_memory", json!(false)),
            ("max_cache_len", json!(64)),
            ("max_matching_ngram_size", json!(2)),
            ("min_length", json!(0)),
            ("min_new_tokens", json!(0)),
            ("min_p", json!(0.0)),
            ("no_repeat_ngram_size", json!(0)),
            ("num_assistant_tokens", json!(20)),
            ("num_assistant_tokens_schedule", json!("constant")),
            ("num_beam_groups", json!(1)),
            ("num_beams", json!(1)),
            ("num_return_sequences", json!(1)),
            ("output_attentions", json!(true)),
            ("output_hidden_states", json!(false)),
            ("output_logits", json!(true)),
            ("output_scores", json!(true)),
            ("pad_token_id", json!(-1)),
            ("penalty_alpha", json!(0)),
            ("prefill_chunk_size", json!(8)),
            ("prompt_lookup_num_tokens", json!(3)),
            ("remove_invalid_values", json!(true)),
            ("renormalize_logits", json!(false)),
            ("repetition_penalty", json!(1.0)),
            ("return_dict_in_generate", json!(true)),
            ("return_legacy_cache", json!(true)),
            ("sequence_bias", json!({})),
            ("speculation_type", json!("dflash")),
            ("stop_strings", json!([])),
            ("suppress_tokens", json!([])),
            ("target_lookbehind", json!(5)),
            ("temperature", json!(1.0)),
            ("token_healing", json!(false)),
            ("top_k", json!(50)),
            ("top_p", json!(1.0)),
            ("transformers_version", json!("5.24.0")),
            ("typical_p", json!(1.0)),
            ("use_cache", json!(false)),
            ("use_mtp", json!(true)),
        ] {
            let generate = parse(&json!({key: value}));
            assert_eq!(generate, Ok(SamplingParams::default()), "{key}");
        }
        let every = keys::COMPUTED.iter().chain(&keys::IN_CONFIG);
        for key in every {
            assert_eq!(
                parse(&json!({*key: null})),
                Ok(SamplingParams::default()),
                "{key}"
            );
        }
    }

    #[test]
    fn unsupported_values_and_unknown_keys_are_refused_by_name() {
        for (key, value) in [
            ("assistant_ensemble_weight", json!(0.5)),
            ("cache_implementation", json!("quantized")),
            ("constraints", json!([{}])),
            ("custom_generate", json!("owner/name")),
            ("dola_layers", json!("high")),
            ("encoder_no_repeat_ngram_size", json!(2)),
            ("encoder_repetition_penalty", json!(1.2)),
            ("exponential_decay_length_penalty", json!([5, 1.1])),
            ("force_bos_token_to_be_generated", json!(true)),
            ("force_words_ids", json!([[4]])),
            ("forced_decoder_ids", json!([[1, 4]])),
            ("guidance_scale", json!(1.5)),
            ("is_assistant", json!(true)),
            ("max_time", json!(1.0)),
            ("num_return_sequences", json!(2)),
            ("penalty_alpha", json!(0.6)),
            ("sequence_bias", json!([[[4], 1.0]])),
            ("stop_strings", json!(["end"])),
            ("token_healing", json!(true)),
            ("watermarking_config", json!({})),
        ] {
            let problem = parse(&json!({key: value})).expect_err("an error");
            let text = format!("`{key}` is {value}, which changes the result");
            assert!(problem.starts_with(&text), "{problem}");
        }
        let unknown = parse(&json!({"repetion_penalty": 1.2})).expect_err("an error");
        insta::assert_snapshot!(unknown, @"`repetion_penalty` is 1.2, which is not a known setting; did you mean `repetition_penalty`? Otherwise remove it in a copy of the folder to ignore it");
        let unknown = parse(&json!({"chat_format": "chatml"})).expect_err("an error");
        insta::assert_snapshot!(unknown, @r#"`chat_format` is "chatml", which is not a known setting; remove it in a copy of the folder to ignore it"#);
    }

    #[test]
    fn unsupported_sampling_settings_are_recorded() {
        for (key, value) in [
            ("epsilon_cutoff", json!(0.01)),
            ("eta_cutoff", json!(0.001)),
            ("top_h", json!(0.4)),
            ("typical_p", json!(0.9)),
        ] {
            let generate = parse(&json!({key: value})).expect("it is read");
            let unsupported = UnsupportedDraw {
                key: key.to_owned(),
                value: value.to_string(),
            };
            assert_eq!(generate.unsupported_draws, [unsupported]);
        }
    }

    #[test]
    fn sizes_and_ids_are_range_checked() {
        let problem = |key: &str, value: Value| {
            let problem = parse(&json!({key: value})).expect_err("an error");
            assert!(problem.starts_with(&format!("`{key}` ")), "{problem}");
            problem
        };
        insta::assert_snapshot!(problem("num_beams", json!(1_000_000)), @"`num_beams` is 1000000; expected a whole number from 1 to 256");
        insta::assert_snapshot!(problem("num_beams", json!(0)), @"`num_beams` is 0; expected a whole number from 1 to 256");
        insta::assert_snapshot!(problem("num_beam_groups", json!(1u64 << 40)), @"`num_beam_groups` is 1099511627776; expected a whole number from 1 to 256");
        insta::assert_snapshot!(problem("max_new_tokens", json!(0)), @"`max_new_tokens` is 0; expected a whole number from 1 to 16777216");
        for key in [
            "max_length",
            "max_new_tokens",
            "min_length",
            "min_new_tokens",
            "no_repeat_ngram_size",
            "top_k",
        ] {
            problem(key, json!(16_777_217));
            problem(key, json!(-1));
            problem(key, json!(1.5));
            problem(key, json!(1e30));
        }
        for key in [
            "eos_token_id",
            "forced_eos_token_id",
            "suppress_tokens",
            "begin_suppress_tokens",
        ] {
            problem(key, json!([4, -1]));
            problem(key, json!(1u64 << 31));
            problem(key, json!(vec![4; MAX_IDS + 1]));
        }
        insta::assert_snapshot!(problem("suppress_tokens", json!([1u64 << 31])), @"`suppress_tokens` has 2147483648; expected a token id from 0 to 2147483647");
        insta::assert_snapshot!(problem("eos_token_id", json!(vec![4; 1025])), @"`eos_token_id` has 1025 token ids; expected at most 1024");
        for key in ["decoder_start_token_id", "forced_bos_token_id"] {
            problem(key, json!([4, 5]));
            problem(key, json!(-1));
        }
        problem("bad_words_ids", json!(vec![[4]; MAX_IDS + 1]));
        problem("bad_words_ids", json!([[4, 5]]));
        problem("bad_words_ids", json!(7));
        for key in [
            "diversity_penalty",
            "length_penalty",
            "min_p",
            "repetition_penalty",
            "temperature",
            "top_p",
        ] {
            problem(key, json!(1e39));
            problem(key, json!("much"));
        }
    }

    #[test]
    fn new_tokens_are_counted_as_transformers_counts_them() {
        let of = |value| {
            let generate = parse(&value).expect("it is read");
            (generate.rules.max_new_tokens, generate.max_length)
        };
        assert_eq!(of(json!({})), (Rules::NO_LIMIT, None));
        assert_eq!(of(json!({"max_length": 512})), (512, Some(512)));
        assert_eq!(of(json!({"max_length": 20})), (20, Some(20)));
        let both = json!({"max_length": 512, "max_new_tokens": 30});
        assert_eq!(of(both), (30, Some(usize::MAX)));
    }

    #[test]
    fn new_token_limits_take_precedence() {
        let least = parse(&json!({"min_length": 10, "min_new_tokens": 1})).expect("it is read");
        assert_eq!((least.rules.min_length, least.rules.min_new_tokens), (0, 1));
        let bad = json!({"bad_words_ids": [[0], [8]], "eos_token_id": 0});
        assert_eq!(parse(&bad).expect("it is read").rules.suppressed, [8]);
        // The settings of sampling and of beam search are kept as defaults even if neither is enabled.
        let quiet = json!({"temperature": 0.01, "length_penalty": 3.0, "early_stopping": "never"});
        let quiet = parse(&quiet).expect("it is read");
        assert_eq!((quiet.sampling, quiet.beams), (None, None));
        assert_eq!(quiet.default_sampling.temperature, 0.01);
        assert_eq!(quiet.default_beams.early_stopping, EarlyStopping::Never);
        assert_eq!(quiet.default_beams.length_penalty, 3.0);
    }

    #[test]
    fn config_json_provides_settings_without_a_generation_config() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, value: Value| {
            std::fs::write(folder.path().join(name), value.to_string()).expect("it is written");
        };
        let read = || generation_config(folder.path()).expect("it is read");
        write(
            "config.json",
            json!({"max_length": 20, "eos_token_id": 3, "hidden_size": 8}),
        );
        assert_eq!((read().max_length, read().rules.end), (None, vec![3]));
        write(
            "generation_config.json",
            json!({"bad_words_ids": [[3], [4]], "max_length": 20}),
        );
        let own = read();
        assert_eq!((own.max_length, own.rules.end), (Some(20), vec![]));
        assert_eq!(own.rules.suppressed, [3, 4]);
    }
}
