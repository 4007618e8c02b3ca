//! Parameters of a generated text.

use crate::{
    generate::SamplingParams,
    search::{Beams, Sampling},
    serve::ServeError,
};

/// Kind of text from which generation starts. It determines the name of the request field in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextSource {
    /// A prompt, which the text continues.
    Prompt,
    /// A conversation, to which the generated text is the reply.
    #[default]
    Messages,
    /// A source text, which is translated.
    Text,
}

impl TextSource {
    /// Returns the name of the request field.
    pub(in crate::serve) fn field(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Messages => "messages",
            Self::Text => "text",
        }
    }
}

/// Parameters of a request for generated text. They override the settings of the model's folder.
#[derive(Clone, Debug, Default)]
pub struct GenerationParams {
    /// Max number of new tokens. The default is `default_max_tokens`, or else the limit of the model's folder, or else the remaining
    /// positions and KV cache.
    pub max_tokens: Option<usize>,
    /// Max number of new tokens if `max_tokens` is `None`. It is lowered to what fits in the remaining positions and in the
    /// KV cache.
    pub default_max_tokens: Option<usize>,
    /// Sampling temperature; 0 selects the most probable token. The default is that of the model's folder.
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub seed: Option<u64>,
    /// Penalties and biases as in [`Rules`](crate::search::Rules).
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub bias: Vec<(u32, f32)>,
    /// Strings at which the text ends. The text does not contain them.
    pub stop: Vec<String>,
    pub source: TextSource,
    /// Number of alternatives to return for each token, with log-probabilities. If `None`, no log-probabilities are returned.
    pub log_probabilities: Option<usize>,
    /// Number of beams; 1 selects greedy search. The default is that of the model's folder.
    pub num_beams: Option<usize>,
    /// Exponent of the length in the scores of beam search.
    pub length_penalty: Option<f32>,
    /// Number of hypotheses of beam search to return when the text ends.
    pub hypotheses: usize,
    /// Start token of the decoder, for models with a source. The default is that of the model's folder.
    pub decoder_start: Option<u32>,
    /// Token that is forced as the first new token.
    pub forced_first: Option<u32>,
    /// Tokens that are forced after the first new token.
    pub prefix: Vec<u32>,
}

impl GenerationParams {
    /// Returns `defaults`, the settings of the model's folder, overridden by these parameters.
    ///
    /// # Errors
    /// Returns an error for the first invalid parameter.
    pub(super) fn options(self, defaults: &SamplingParams) -> Result<SamplingParams, ServeError> {
        if self.stop.iter().any(String::is_empty) {
            return Err(ServeError::invalid(
                "stop",
                "an empty stop string would end every text at once; leave it out",
            ));
        }
        let mut options = defaults.clone();
        let rules = &mut options.rules;
        rules.frequency_penalty = self.frequency_penalty;
        rules.presence_penalty = self.presence_penalty;
        rules.bias = self.bias;
        rules.forced_first = self.forced_first;
        rules.prefix = self.prefix;
        options.decoder_start = self.decoder_start.or(options.decoder_start);
        if let Some(n) = self.max_tokens.or(self.default_max_tokens) {
            (rules.max_new_tokens, options.max_length) = (n, None);
        }
        if self.temperature == Some(0.0) {
            options.sampling = None;
        } else if self.temperature.is_some() || self.top_p.is_some() {
            let defaults = options.sampling.unwrap_or(Sampling {
                top_k: 0,
                ..options.default_sampling
            });
            options.beams = None;
            options.sampling = Some(Sampling {
                temperature: self.temperature.unwrap_or(defaults.temperature),
                top_p: self.top_p.unwrap_or(defaults.top_p),
                ..defaults
            });
        }
        if let Some(n) = self.num_beams {
            let beams = Beams {
                n,
                ..options.default_beams
            };
            (options.beams, options.sampling) = ((n != 1).then_some(beams), None);
        }
        match (&mut options.beams, self.length_penalty) {
            (Some(beams), Some(penalty)) => beams.length_penalty = penalty,
            (None, Some(_)) => {
                return Err(ServeError::invalid(
                    "length_penalty",
                    "`length_penalty` has an effect only with several beams; send `num_beams`, or leave it out",
                ));
            }
            (_, None) => {}
        }
        let n_beams = options.beams.map_or(1, |beams| beams.n);
        if self.hypotheses > n_beams {
            let problem = format!(
                "{} hypotheses are requested of a search with {n_beams} beam{}; send `num_beams` of at least that number, or request fewer",
                self.hypotheses,
                if n_beams == 1 { "" } else { "s" },
            );
            return Err(ServeError::invalid("num_hypotheses", problem));
        }
        if let Some(n) = self.log_probabilities {
            if options.beams.is_some() {
                return Err(ServeError::invalid(
                    "logprobs",
                    "the model uses beam search, whose tokens have no log-probabilities; leave `logprobs` out, or send a `temperature`",
                ));
            }
            (options.log_probabilities, options.top_tokens) = (true, n);
        }
        options.seed = self.seed.unwrap_or_default();
        Ok(options)
    }
}
