//! Translations, as requests to a model that generates from a source.

use super::{GenerationParams, GenerationService, ServeError, TextSource};
use crate::text::{LanguagePair, LanguageSide, TargetPrefix, TextError};

/// Parameters of a request for translations.
#[derive(Clone, Debug, Default)]
pub struct TranslationParams {
    /// Languages, as named by the model's tokenizer. The defaults are the languages that the model's folder specifies.
    pub source_lang: Option<String>,
    pub target_lang: Option<String>,
    /// Max number of new tokens. The default is twice the number of tokens of the text, plus 16, plus the number of tokens of the prefix,
    /// but at most the folder's maximum.
    pub max_tokens: Option<usize>,
    /// Search parameters as in [`GenerationParams`].
    pub num_beams: Option<usize>,
    pub length_penalty: Option<f32>,
    /// Number of translations per text. This number must not exceed the number of beams.
    pub hypotheses: usize,
}

impl GenerationService {
    /// Returns the source tokens of a text and the parameters of its translation. Returns `None` for a blank text, whose translation is
    /// empty. `index` is the index of the text, for errors of the tokenizer.
    ///
    /// # Errors
    /// Returns an error if the tokenizer does not know a language, if it refuses the text or the prefix, or if the prefix has more tokens
    /// than the model can generate.
    pub fn translation(
        &self,
        index: usize,
        text: &str,
        prefix: &TargetPrefix,
        params: &TranslationParams,
    ) -> Result<Option<(Vec<u32>, GenerationParams)>, ServeError> {
        let encoder = self.encoder();
        let pair = self.languages(params)?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        let source = encoder.source(index, text, &pair);
        let source = source.map_err(|e| ServeError::invalid("text", e.to_string()))?;
        let target = encoder.target(prefix, &pair);
        let target = target.map_err(|e| ServeError::invalid("target_prefix", e.to_string()));
        let (forced_first, prefix) = target?;
        let defaults = self.defaults();
        // Check the prefix of each text as it is tokenized, before the prefixes of many texts take memory.
        let room = self.room(source.len());
        if prefix.len() > room {
            let n = prefix.len();
            return Err(ServeError::invalid(
                "target_prefix",
                format!(
                    "the prefix has {n} tokens; expected at most {room}, which the model can generate"
                ),
            ));
        }
        // `max_length` also counts the start token.
        let own = defaults
            .max_length
            .map_or(usize::MAX, |n| n.saturating_sub(1));
        let own = own.min(defaults.rules.max_new_tokens);
        let usual = 2 * source.len() + 16 + prefix.len();
        let params = GenerationParams {
            max_tokens: params.max_tokens,
            default_max_tokens: Some(usual.min(own).max(1)),
            source: TextSource::Text,
            num_beams: params.num_beams,
            length_penalty: params.length_penalty,
            hypotheses: params.hypotheses,
            decoder_start: pair.decoder_start,
            forced_first,
            prefix,
            ..GenerationParams::default()
        };
        Ok(Some((source, params)))
    }

    fn languages(&self, params: &TranslationParams) -> Result<LanguagePair, ServeError> {
        let (source, target) = (&params.source_lang, &params.target_lang);
        let pair = self
            .encoder()
            .language_pair(source.as_deref(), target.as_deref());
        pair.map_err(|error| {
            let param = match &error {
                TextError::NoLanguage {
                    side: LanguageSide::Source,
                    ..
                } => "source_lang",
                _ => "target_lang",
            };
            ServeError::invalid(param, error.to_string())
        })
    }
}
