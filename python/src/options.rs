//! Generation options, with the names of transformers.

use gemmule::{
    generate::{MAX_TOKENS, SamplingParams, generation_config_of},
    search::{Beams, EarlyStopping, Sampling},
    text::TextEncoder,
};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyDict};

use crate::{
    arguments::{kind_of, text, texts},
    error::{Error, Result},
};

const NAMES: &str = "max_new_tokens, min_new_tokens, do_sample, temperature, top_k, top_p, min_p, seed, num_beams, \
    num_beam_groups, diversity_penalty, length_penalty, early_stopping, repetition_penalty, no_repeat_ngram_size, forced_bos_token, stop_strings";

/// Options of a call. `None` selects the value of the folder's generation_config.json.
#[derive(Default)]
pub struct Options {
    pub max_new_tokens: Option<usize>,
    min_new_tokens: Option<usize>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<u64>,
    num_beams: Option<usize>,
    num_beam_groups: Option<usize>,
    diversity_penalty: Option<f32>,
    length_penalty: Option<f32>,
    early_stopping: Option<EarlyStopping>,
    repetition_penalty: Option<f32>,
    no_repeat_ngram_size: Option<usize>,
    /// The first new token, as written in the folder's files.
    forced_bos_token: Option<String>,
    pub stop_strings: Vec<String>,
}

impl Options {
    /// Parses the keyword arguments of a call.
    ///
    /// # Errors
    /// Returns an error if a name is unknown, or if a value has a wrong type or is out of range.
    pub fn new(keywords: Option<&Bound<'_, PyDict>>) -> Result<Self> {
        let mut options = Self::default();
        for (name, value) in keywords.into_iter().flatten() {
            let name = text(&name, || "the name of an option".to_owned())?;
            if value.is_none() {
                continue;
            }
            let value = Value {
                name: &name,
                value: &value,
            };
            match name.as_str() {
                "max_new_tokens" => options.max_new_tokens = Some(value.count()?),
                "min_new_tokens" => options.min_new_tokens = Some(value.count()?),
                "do_sample" => options.do_sample = Some(value.flag()?),
                "temperature" => options.temperature = Some(value.real()?),
                "top_k" => options.top_k = Some(value.count()?),
                "top_p" => options.top_p = Some(value.real()?),
                "min_p" => options.min_p = Some(value.real()?),
                "seed" => options.seed = Some(value.seed()?),
                "num_beams" => options.num_beams = Some(value.count()?),
                "num_beam_groups" => options.num_beam_groups = Some(value.count()?),
                "diversity_penalty" => options.diversity_penalty = Some(value.real()?),
                "length_penalty" => options.length_penalty = Some(value.real()?),
                "early_stopping" => options.early_stopping = Some(value.early_stopping()?),
                "repetition_penalty" => options.repetition_penalty = Some(value.real()?),
                "no_repeat_ngram_size" => options.no_repeat_ngram_size = Some(value.count()?),
                "forced_bos_token" => {
                    options.forced_bos_token = Some(text(value.value, || name.clone())?);
                }
                "stop_strings" => options.stop_strings = value.stops()?,
                _ => {
                    return Err(Error::Python(PyTypeError::new_err(format!(
                        "there is no option `{name}`; expected {NAMES}"
                    ))));
                }
            }
        }
        Ok(options)
    }

    /// Returns the generation settings of the folder, with these options applied.
    ///
    /// # Errors
    /// Returns an error if the folder has unsupported settings, or if options contradict each other.
    pub fn params(&self, encoder: &TextEncoder) -> Result<SamplingParams> {
        let mut params = generation_config_of(encoder.folder().files())?;
        let rules = &mut params.rules;
        if let Some(n) = self.max_new_tokens {
            (rules.max_new_tokens, params.max_length) = (n, None);
        }
        rules.min_new_tokens = self.min_new_tokens.unwrap_or(rules.min_new_tokens);
        rules.repetition_penalty = self.repetition_penalty.unwrap_or(rules.repetition_penalty);
        rules.no_repeat_ngram = self.no_repeat_ngram_size.unwrap_or(rules.no_repeat_ngram);
        if let Some(token) = &self.forced_bos_token {
            let id = encoder.token_id(token).ok_or_else(|| {
                Error::Input(format!(
                    "the tokenizer has no token `{token}`; forced_bos_token is a token as written in the folder's files"
                ))
            })?;
            rules.forced_first = Some(id);
        }
        self.choose_sampling(&mut params)?;
        self.choose_beams(&mut params)?;
        params.seed = self.seed.unwrap_or(0);
        Ok(params)
    }

    /// Enables sampling if `do_sample` or a sampling parameter is given.
    fn choose_sampling(&self, params: &mut SamplingParams) -> Result<()> {
        let parameters = [
            ("temperature", self.temperature.is_some()),
            ("top_k", self.top_k.is_some()),
            ("top_p", self.top_p.is_some()),
            ("min_p", self.min_p.is_some()),
        ];
        let given = parameters.iter().find(|(_, is_given)| *is_given);
        match (self.do_sample, given) {
            (Some(false), Some((name, _))) => {
                return Err(Error::Input(format!(
                    "{name} has an effect only with sampling, and do_sample is False; omit one of the two"
                )));
            }
            (Some(false), None) => params.sampling = None,
            (Some(true), _) | (None, Some(_)) => {
                let own = params.default_sampling;
                params.beams = None;
                params.sampling = Some(Sampling {
                    temperature: self.temperature.unwrap_or(own.temperature),
                    top_k: self.top_k.unwrap_or(own.top_k),
                    top_p: self.top_p.unwrap_or(own.top_p),
                    min_p: self.min_p.unwrap_or(own.min_p),
                });
            }
            (None, None) if self.num_beams.is_some_and(|n| n > 1) => params.sampling = None,
            (None, None) => {}
        }
        Ok(())
    }

    fn choose_beams(&self, params: &mut SamplingParams) -> Result<()> {
        if let Some(n) = self.num_beams {
            let beams = Beams {
                n,
                ..params.default_beams
            };
            // A single beam is the same as greedy search.
            params.beams = (n != 1).then_some(beams);
        }
        let given = [
            ("num_beam_groups", self.num_beam_groups.is_some()),
            ("diversity_penalty", self.diversity_penalty.is_some()),
            ("length_penalty", self.length_penalty.is_some()),
            ("early_stopping", self.early_stopping.is_some()),
        ];
        match (
            &mut params.beams,
            given.iter().find(|(_, is_given)| *is_given),
        ) {
            (Some(beams), _) => {
                beams.groups = self.num_beam_groups.unwrap_or(beams.groups);
                if self.diversity_penalty.is_some() && beams.groups <= 1 {
                    return Err(Error::Input(
                        "diversity_penalty has an effect only between groups of beams; set num_beam_groups to more than 1, or omit diversity_penalty"
                            .to_owned(),
                    ));
                }
                beams.diversity = self.diversity_penalty.unwrap_or(beams.diversity);
                beams.length_penalty = self.length_penalty.unwrap_or(beams.length_penalty);
                beams.early_stopping = self.early_stopping.unwrap_or(beams.early_stopping);
                Ok(())
            }
            (None, Some((name, _))) => Err(Error::Input(format!(
                "{name} has an effect only with beam search; set num_beams to more than 1, or omit {name}"
            ))),
            (None, None) => Ok(()),
        }
    }
}

/// Value of an option.
struct Value<'a, 'py> {
    name: &'a str,
    value: &'a Bound<'py, PyAny>,
}

impl Value<'_, '_> {
    fn wrong(&self, expected: &str) -> Error {
        Error::Python(PyTypeError::new_err(format!(
            "{} is {}; expected {expected}",
            self.name,
            kind_of(self.value)
        )))
    }

    /// Returns an option's value as a number of tokens or beams.
    fn count(&self) -> Result<usize> {
        let n: i128 = self.value.extract().map_err(|_| self.wrong("int"))?;
        let n = usize::try_from(n).ok().filter(|&n| n <= MAX_TOKENS);
        n.ok_or_else(|| self.out_of_range(&format!("0 to {MAX_TOKENS}")))
    }

    fn seed(&self) -> Result<u64> {
        let n: i128 = self.value.extract().map_err(|_| self.wrong("int"))?;
        u64::try_from(n).map_err(|_| self.out_of_range("0 to 18446744073709551615"))
    }

    fn out_of_range(&self, expected: &str) -> Error {
        Error::Input(format!(
            "{} is {}; expected a whole number from {expected}",
            self.name, self.value
        ))
    }

    fn real(&self) -> Result<f32> {
        self.value.extract().map_err(|_| self.wrong("float"))
    }

    fn flag(&self) -> Result<bool> {
        self.value.extract().map_err(|_| self.wrong("bool"))
    }

    fn early_stopping(&self) -> Result<EarlyStopping> {
        let expected = "True, False or \"never\"";
        match (self.value.extract::<bool>(), self.value.extract::<&str>()) {
            (Ok(true), _) => Ok(EarlyStopping::Yes),
            (Ok(false), _) => Ok(EarlyStopping::Heuristic),
            (_, Ok("never")) => Ok(EarlyStopping::Never),
            (_, Ok(other)) => Err(Error::Input(format!(
                "{} is \"{other}\"; expected {expected}",
                self.name
            ))),
            _ => Err(self.wrong(expected)),
        }
    }

    fn stops(&self) -> Result<Vec<String>> {
        let stops = texts(self.value, self.name)?.texts;
        match stops.iter().any(String::is_empty) {
            true => Err(Error::Input(
                "an empty text in stop_strings would end every text at once; expected at least one character"
                    .to_owned(),
            )),
            false => Ok(stops),
        }
    }
}
