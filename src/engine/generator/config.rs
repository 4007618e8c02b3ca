//! `generation_config.json`: how a checkpoint wants to be written from.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Generate;
use crate::{
    engine::EngineError,
    files::{self, Kind},
    search::{Beams, EarlyStopping, Rules, Sampling},
};

/// Keys that say nothing of the result.
const WITHOUT_EFFECT: [&str; 12] = [
    "_from_model_config",
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "bos_token_id",
    "pad_token_id",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "trust_remote_code",
];

/// Keys of settings of generation that older folders have in config.json, among those of the model.
const IN_CONFIG: [&str; 36] = [
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

/// transformers' own `max_length`: without another one, so many tokens are new.
const USUAL_LENGTH: u64 = 20;

/// Values that ask for nothing beside what is computed.
fn is_neutral(key: &str, value: &Value) -> bool {
    match key {
        "epsilon_cutoff" | "eta_cutoff" | "encoder_no_repeat_ngram_size" => {
            value.as_f64() == Some(0.0)
        }
        "typical_p" | "encoder_repetition_penalty" | "num_return_sequences" => {
            value.as_f64() == Some(1.0)
        }
        "remove_invalid_values" => value == false,
        _ => false,
    }
}

/// What the `generation_config.json` of a checkpoint's folder asks for, and what transformers does without one: config.json has
/// the settings then, as older folders have them. The tokens that end a sequence, and the one before the first new one, are
/// config.json's where that file has none.
///
/// [`Generate::usual_sampling`] and [`Generate::usual_beams`] have the folder's settings of draws and searches also where it asks for neither.
/// Beams and sampling both are what the folder has asked for, where it asks for both. [`Generator::check_options`](super::Generator::check_options)
/// refuses that: the caller takes one out.
///
/// # Errors
/// A file that cannot be read, a key that would change the result and is not computed, and values of a wrong type.
pub fn generation_config(folder: &Path) -> Result<Generate, EngineError> {
    let read = |name: &str| -> Result<(PathBuf, Value), EngineError> {
        let file = folder.join(name);
        if !file.is_file() {
            return Ok((file, json!({})));
        }
        let text = files::text(&file, Kind::Config)?;
        match serde_json::from_str(&text) {
            Ok(value) => Ok((file, value)),
            Err(e) => Err(EngineError::GenerationConfig {
                file,
                problem: format!("it is no JSON: {e}"),
            }),
        }
    };
    let wrong = |file: &Path, problem| EngineError::GenerationConfig {
        file: file.to_owned(),
        problem,
    };
    let (config_file, mut config) = read("config.json")?;
    if let Some(object) = config.as_object_mut() {
        // Its writers had this value in there without having been asked.
        object.retain(|key, value| {
            IN_CONFIG.contains(&key.as_str()) && !(key == "max_length" && value == USUAL_LENGTH)
        });
    }
    let (file, own) = read("generation_config.json")?;
    if !file.is_file() {
        let read = parse(&config).map_err(|problem| wrong(&config_file, problem));
        return read.map(Parsed::generate);
    }
    let mut parsed = parse(&own).map_err(|problem| wrong(&file, problem))?;
    let generate = &mut parsed.generate;
    let of_config = |key: &str| {
        let found = ids(config.get(key).unwrap_or(&Value::Null));
        found.map_err(|problem| wrong(&config_file, format!("`{key}` {problem}")))
    };
    if generate.decoder_start.is_none() {
        generate.decoder_start = of_config("decoder_start_token_id")?.first().copied();
    }
    if generate.rules.end.is_empty() {
        generate.rules.end = of_config("eos_token_id")?;
    }
    Ok(parsed.generate())
}

/// A file's settings.
struct Parsed {
    generate: Generate,
    /// Words of one token each that never come, unless they end sequences.
    bad_words: Vec<u32>,
}

impl Parsed {
    /// The settings, when it is known what ends a sequence.
    fn generate(mut self) -> Generate {
        let rules = &mut self.generate.rules;
        let bad = self.bad_words.into_iter().filter(|id| !rules.ends(*id));
        let bad: Vec<u32> = bad.collect();
        rules.suppressed.extend(bad);
        self.generate
    }
}

fn parse(value: &Value) -> Result<Parsed, String> {
    let object = value.as_object().ok_or("it is no object")?;
    let mut rules = Rules::default();
    let mut sampling = Sampling::default();
    let mut samples = false;
    let mut beams = Beams::of(1);
    let (mut decoder_start, mut forced_bos) = (None, None);
    let mut bad_words = Vec::new();
    let (mut max_new_tokens, mut max_length, mut min_new_tokens) = (None, None, None);
    for (key, value) in object {
        if value.is_null() || WITHOUT_EFFECT.contains(&key.as_str()) || is_neutral(key, value) {
            continue;
        }
        let wrong = |expected: &str| format!("`{key}` is {value}; expected {expected}");
        let real = || {
            value
                .as_f64()
                .map(|x| x as f32)
                .ok_or_else(|| wrong("a number"))
        };
        let whole = || {
            let n = value.as_u64().and_then(|n| usize::try_from(n).ok());
            n.ok_or_else(|| wrong("a whole number"))
        };
        let all = || ids(value).map_err(|problem| format!("`{key}` {problem}"));
        match key.as_str() {
            "do_sample" => samples = value.as_bool().ok_or_else(|| wrong("true or false"))?,
            "temperature" => sampling.temperature = real()?,
            "top_k" => sampling.top_k = whole()?,
            "top_p" => sampling.top_p = real()?,
            "min_p" => sampling.min_p = real()?,
            "repetition_penalty" => rules.repetition_penalty = real()?,
            "no_repeat_ngram_size" => rules.no_repeat_ngram = whole()?,
            "eos_token_id" => rules.end = all()?,
            "min_length" => rules.min_length = whole()?,
            "min_new_tokens" => min_new_tokens = Some(whole()?),
            "max_new_tokens" => max_new_tokens = Some(whole()?),
            "max_length" => max_length = Some(whole()?),
            "decoder_start_token_id" => decoder_start = all()?.first().copied(),
            "bad_words_ids" => bad_words = one_token_each(value)?,
            "forced_bos_token_id" => forced_bos = all()?.first().copied(),
            "forced_eos_token_id" => rules.forced_last = all()?,
            "num_beams" => beams.n = whole()?,
            "num_beam_groups" => beams.groups = whole()?,
            "diversity_penalty" => beams.diversity = real()?,
            "length_penalty" => beams.length_penalty = real()?,
            "early_stopping" => {
                beams.early_stopping = match value {
                    Value::Bool(true) => EarlyStopping::Yes,
                    Value::Bool(false) => EarlyStopping::Heuristic,
                    Value::String(word) if word == "never" => EarlyStopping::Never,
                    _ => return Err(wrong("true, false or \"never\"")),
                }
            }
            "renormalize_logits" => {
                rules.renormalize = value.as_bool().ok_or_else(|| wrong("true or false"))?;
            }
            "suppress_tokens" => rules.suppressed = all()?,
            "begin_suppress_tokens" => rules.suppressed_first = all()?,
            _ => {
                return Err(format!(
                    "`{key}` is {value}, which would change the result and is not computed; take it out of a copy of the folder to go on without"
                ));
            }
        }
    }
    // The one counts before the other, of the most as of the least.
    if let Some(least) = min_new_tokens {
        (rules.min_new_tokens, rules.min_length) = (least, 0);
    }
    let max_length = max_length.filter(|_| max_new_tokens.is_none());
    let new = max_new_tokens.or(max_length);
    rules.max_new_tokens = new.unwrap_or(rules.max_new_tokens);
    let generate = Generate {
        decoder_start,
        forced_bos,
        rules,
        sampling: samples.then_some(sampling),
        beams: (beams.n > 1).then_some(beams),
        usual_sampling: sampling,
        usual_beams: beams,
        max_length,
        ..Generate::default()
    };
    Ok(Parsed {
        generate,
        bad_words,
    })
}

/// Words of one token each, which never come.
fn one_token_each(value: &Value) -> Result<Vec<u32>, String> {
    let words = value.as_array().into_iter().flatten();
    words
        .map(|word| match ids(word)?.as_slice() {
            &[one] => Ok(one),
            several => Err(format!(
                "has a word of {} tokens; only words of one token are kept out",
                several.len()
            )),
        })
        .collect::<Result<_, _>>()
        .map_err(|problem: String| format!("`bad_words_ids` {problem}"))
}

/// A token id, or a list of them.
fn ids(value: &Value) -> Result<Vec<u32>, String> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("has {value}; expected a token id"))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(all) => all.iter().map(id).collect(),
        one => Ok(vec![id(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: &Value) -> Result<Generate, String> {
        super::parse(value).map(Parsed::generate)
    }

    #[test]
    fn published_files_are_read_and_what_is_not_computed_is_refused() {
        // Llama-3.2's and GPT-2's.
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
        insta::assert_snapshot!(guided, @"`guidance_scale` is 4, which would change the result and is not computed; take it out of a copy of the folder to go on without");
        let wrong = parse(&json!({"top_k": "many"})).expect_err("an error");
        insta::assert_snapshot!(wrong, @r#"`top_k` is "many"; expected a whole number"#);
        assert!(
            parse(&json!({"num_beams": 1, "length_penalty": 1.0, "early_stopping": false})).is_ok()
        );
        let several = parse(&json!({"num_return_sequences": 3})).expect_err("an error");
        assert!(several.starts_with("`num_return_sequences` is 3, which would change the result"));
        let time = parse(&json!({"max_time": 2.5})).expect_err("an error");
        assert!(time.starts_with("`max_time` is 2.5, which would change the result"));
        assert!(parse(&json!({"num_return_sequences": 1, "max_time": null})).is_ok());
        let both = parse(&json!({"num_beams": 2, "do_sample": true})).expect("it is read");
        assert!(both.beams.is_some() && both.sampling.is_some());
    }

    #[test]
    fn new_tokens_are_counted_as_transformers_counts_them() {
        let of = |value| {
            let generate = parse(&value).expect("it is read");
            (generate.rules.max_new_tokens, generate.max_length)
        };
        assert_eq!(of(json!({})), (20, None));
        assert_eq!(of(json!({"max_length": 512})), (512, Some(512)));
        assert_eq!(of(json!({"max_length": 20})), (20, Some(20)));
        let both = json!({"max_length": 512, "max_new_tokens": 30});
        assert_eq!(of(both), (30, None));
    }

    #[test]
    fn settings_that_go_before_others_do() {
        let least = parse(&json!({"min_length": 10, "min_new_tokens": 1})).expect("it is read");
        assert_eq!((least.rules.min_length, least.rules.min_new_tokens), (0, 1));
        let bad = json!({"bad_words_ids": [[0], [8]], "eos_token_id": 0});
        assert_eq!(parse(&bad).expect("it is read").rules.suppressed, [8]);
        // What a folder says of draws and searches counts when they are asked for.
        let quiet = json!({"temperature": 0.01, "length_penalty": 3.0, "early_stopping": "never"});
        let quiet = parse(&quiet).expect("it is read");
        assert_eq!((quiet.sampling, quiet.beams), (None, None));
        assert_eq!(quiet.usual_sampling.temperature, 0.01);
        assert_eq!(quiet.usual_beams.early_stopping, EarlyStopping::Never);
        assert_eq!(quiet.usual_beams.length_penalty, 3.0);
    }

    #[test]
    fn config_json_has_settings_too() {
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
        let both = read();
        assert_eq!(
            (both.max_length, both.rules.suppressed),
            (Some(20), vec![4])
        );
    }
}
