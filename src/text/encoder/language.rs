//! Tokenization of the source of a translation, and of the prefix of its target.

use super::{Coder, TextEncoder};
use crate::names::excerpt;
use crate::text::{
    LanguagePair, LanguageSide, TextError,
    languages::{Places, SourcePlace},
};

/// Beginning of a translation, which the model continues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TargetPrefix {
    #[default]
    None,
    /// A text. It follows the token of the target's language, if there is one.
    Text(String),
    /// Names of tokens in the checkpoint's files. The first may be a language token.
    Tokens(Vec<String>),
}

impl TextEncoder {
    /// Returns the language tokens of a source and a target language. `None` selects the language in the folder's settings.
    ///
    /// # Errors
    /// Returns an error if the tokenizer does not know the language.
    pub fn language_pair(
        &self,
        source: Option<&str>,
        target: Option<&str>,
    ) -> Result<LanguagePair, TextError> {
        if let Some(languages) = &self.languages {
            return languages.pair(source, target);
        }
        let sides = [
            (LanguageSide::Source, source),
            (LanguageSide::Target, target),
        ];
        match sides
            .into_iter()
            .find_map(|(side, name)| Some((side, name?)))
        {
            None => Ok(LanguagePair::default()),
            Some((side, name)) => Err(TextError::NoLanguage {
                side,
                name: excerpt(name).into_owned(),
                near: Vec::new(),
            }),
        }
    }

    /// Tokenizes a source text and adds the language tokens of `pair`. Errors name the text by `index`.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses the text or panics on it.
    pub fn source(
        &self,
        index: usize,
        text: &str,
        pair: &LanguagePair,
    ) -> Result<Vec<u32>, TextError> {
        let place = self.languages.as_ref().map(|languages| &languages.places);
        let Some((id, &Places::Both { source, end, .. })) = pair.source.zip(place) else {
            let own = self.encoded(index, text, true, self.cut_side)?.ids;
            return Ok(pair.before.into_iter().chain(own).collect());
        };
        let own = self.encoded(index, text, false, self.cut_side)?.ids;
        Ok(match source {
            SourcePlace::Before => [id].into_iter().chain(own).chain([end]).collect(),
            SourcePlace::After => own.into_iter().chain([end, id]).collect(),
        })
    }

    /// Returns the forced first token of a translation, and the forced tokens after it. If the prefix begins with a language token, that
    /// token is the first one; otherwise, `pair.forced_first` is.
    ///
    /// # Errors
    /// Returns an error if the tokenizer refuses the prefix or does not know all of it, or if the prefix begins with a language other than
    /// the target's.
    pub fn target(
        &self,
        prefix: &TargetPrefix,
        pair: &LanguagePair,
    ) -> Result<(Option<u32>, Vec<u32>), TextError> {
        let mut tokens = match prefix {
            TargetPrefix::None => return Ok((pair.forced_first, Vec::new())),
            TargetPrefix::Text(text) => {
                let tokens = match &self.tokenizer {
                    Coder::SentencePiece(pieces) => pieces.prefix(text),
                    Coder::Json(..) => self.encoded(0, text, false, self.cut_side)?.ids,
                };
                let unknown = self.named_token("unk_token")?;
                if unknown.is_some_and(|unknown| tokens.contains(&unknown)) {
                    return Err(TextError::UnknownPrefix {
                        text: excerpt(text).into_owned(),
                    });
                }
                tokens
            }
            TargetPrefix::Tokens(tokens) => {
                let id = |token: &String| {
                    self.token_id(token)
                        .ok_or_else(|| TextError::NoPrefixToken {
                            token: excerpt(token).into_owned(),
                        })
                };
                tokens
                    .iter()
                    .map(id)
                    .collect::<Result<Vec<u32>, TextError>>()?
            }
        };
        let languages = self.languages.as_ref();
        let has_own = languages.is_some_and(|languages| {
            matches!(languages.places, Places::Both { .. })
                && tokens.first().is_some_and(|&id| languages.has(id))
        });
        if !has_own {
            return Ok((pair.forced_first, tokens));
        }
        let found = tokens.remove(0);
        match pair.forced_first.filter(|&expected| expected != found) {
            None => Ok((Some(found), tokens)),
            Some(expected) => {
                let name = |id: u32| self.decode_with(&[id], false);
                Err(TextError::PrefixLanguage {
                    found: name(found)?,
                    expected: name(expected)?,
                })
            }
        }
    }
}
