//! Languages of translation models, and the tokens with which their tokenizers mark them.

use std::collections::BTreeMap;

use super::{LanguageSide, TextError};
use crate::names;

/// Max number of similar language names in an error message.
const MAX_NEAR: usize = 3;

/// Languages that have tokens in a tokenizer, and the positions of these tokens.
#[derive(Clone, Debug)]
pub(super) struct Languages {
    /// Token ids by the name of the language.
    pub(super) ids: BTreeMap<String, u32>,
    pub(super) places: Places,
}

/// Positions of language tokens.
#[derive(Clone, Debug)]
pub(super) enum Places {
    /// The source has the token of the source language, and the translation begins with the token of the target language.
    Both {
        source: SourcePlace,
        /// End token of a source.
        end: u32,
        target: TargetPlace,
    },
    /// The source begins with the token of the target language.
    InSource {
        /// Source and target language in the folder's settings. A text in these languages gets no language token.
        source: Option<String>,
        target: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourcePlace {
    /// Before the text.
    Before,
    /// After the text and its end token.
    After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetPlace {
    /// First token of a translation.
    First,
    /// Start token of the decoder.
    Start,
}

/// Language tokens of a translation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LanguagePair {
    /// Language token of the source; `None` if no source language was chosen, or if source languages have no tokens.
    pub(super) source: Option<u32>,
    /// Token of the target language, if it is put before the source; see [`Places::InSource`].
    pub(super) before: Option<u32>,
    /// Start token of the decoder, if the language selects it.
    pub decoder_start: Option<u32>,
    /// First token of the translation, if the language selects it.
    pub forced_first: Option<u32>,
}

impl Languages {
    /// Returns the tokens of a pair of languages; `None` selects the language in the folder's settings.
    ///
    /// # Errors
    /// Returns an error if the tokenizer does not know the language or cannot mark it.
    pub(super) fn pair(
        &self,
        source: Option<&str>,
        target: Option<&str>,
    ) -> Result<LanguagePair, TextError> {
        use LanguageSide::{Source, Target};
        let mut pair = LanguagePair::default();
        match &self.places {
            Places::Both { target: place, .. } => {
                pair.source = source.map(|name| self.id(name, Source)).transpose()?;
                let target = target.map(|name| self.id(name, Target)).transpose()?;
                match place {
                    TargetPlace::First => pair.forced_first = target,
                    TargetPlace::Start => pair.decoder_start = target,
                }
            }
            Places::InSource {
                source: own_source,
                target: own_target,
            } => {
                let is_own = |name: &str, own: &Option<String>| {
                    own.as_ref()
                        .is_some_and(|own| own.eq_ignore_ascii_case(name))
                };
                if let Some(name) = source.filter(|name| !is_own(name, own_source)) {
                    return Err(unknown(name, Source, own_source.iter().map(String::as_str)));
                }
                if let Some(name) = target.filter(|name| !is_own(name, own_target)) {
                    let own = own_target.iter().map(String::as_str);
                    let all = own.chain(self.ids.keys().map(String::as_str));
                    let id = self.found(name);
                    pair.before = Some(id.ok_or_else(|| unknown(name, Target, all))?);
                }
            }
        }
        Ok(pair)
    }

    /// Returns whether a token is a language token.
    pub(super) fn has(&self, id: u32) -> bool {
        self.ids.values().any(|&known| known == id)
    }

    fn id(&self, name: &str, side: LanguageSide) -> Result<u32, TextError> {
        let names = self.ids.keys().map(String::as_str);
        self.found(name).ok_or_else(|| unknown(name, side, names))
    }

    /// Returns the token of a language. `name` is the name of the language or of its token. Case is ignored.
    fn found(&self, name: &str) -> Option<u32> {
        let name = name.trim_matches('_');
        let exact = self.ids.get(name).copied();
        exact.or_else(|| {
            let mut all = self.ids.iter();
            let found = all.find(|(known, _)| known.eq_ignore_ascii_case(name));
            found.map(|(_, &id)| id)
        })
    }
}

/// Builds the error for a language that is not known.
fn unknown<'a>(name: &str, side: LanguageSide, known: impl Iterator<Item = &'a str>) -> TextError {
    let near = names::nearest_few(name, known, MAX_NEAR);
    let near = near.into_iter().map(str::to_owned).collect();
    let name = names::excerpt(name).into_owned();
    TextError::NoLanguage { side, name, near }
}
