//! Special tokens that tokenizer classes put around texts.

use tokenizers::{
    Tokenizer,
    processors::{roberta::RobertaProcessing, template::TemplateProcessing},
};

use super::{
    TokenizerSettings,
    classes::{Frame, Special},
};
use crate::text::TextError;

impl TokenizerSettings {
    /// Puts the special tokens of the class around texts.
    pub(super) fn frame(&self, frame: &Frame, tokenizer: &mut Tokenizer) -> Result<(), TextError> {
        let (first, last) = (
            self.special(frame.first, tokenizer)?,
            self.special(frame.last, tokenizer)?,
        );
        if let (true, Some(first), Some(last)) = (frame.trims, &first, &last) {
            let trims = self.json.flag("trim_offsets", true)?;
            let adds = self.json.flag("add_prefix_space", false)?;
            let processing = RobertaProcessing::new(last.clone(), first.clone());
            let processing = processing.trim_offsets(trims).add_prefix_space(adds);
            tokenizer.with_post_processor(Some(processing));
            return Ok(());
        }
        let filled = |template: &str| -> Vec<String> {
            let parts = template.split(' ').map(|part| {
                let (part, segment) = match part.strip_suffix('1') {
                    Some(part) => (part, 1),
                    None => (part, 0),
                };
                let token = |token: &Option<(String, u32)>| {
                    let token = token.as_ref().map(|(token, _)| token.as_str());
                    format!("{}:{segment}", token.unwrap_or_default())
                };
                match part {
                    "F" => token(&first),
                    "L" => token(&last),
                    text => format!("${text}:{segment}"),
                }
            });
            parts.collect()
        };
        let mut tokens: Vec<(String, u32)> =
            [&first, &last].into_iter().flatten().cloned().collect();
        tokens.dedup();
        let template = TemplateProcessing::builder()
            .try_single(filled(frame.single))
            .and_then(|builder| builder.try_pair(filled(frame.pair)))
            .map_err(|e| self.json.problem(e.to_string()))?
            .special_tokens(tokens)
            .build()
            .map_err(|e| self.json.problem(e.to_string()))?;
        tokenizer.with_post_processor(Some(template));
        Ok(())
    }

    /// Returns a special token with its id.
    fn special(
        &self,
        special: Option<Special>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<(String, u32)>, TextError> {
        let Some((key, default)) = special else {
            return Ok(None);
        };
        let token = self.token(key)?.unwrap_or(default);
        match tokenizer.token_to_id(token) {
            Some(id) => Ok(Some((token.to_owned(), id))),
            None => Err(self.json.problem(format!(
                "`{key}` is `{token}`, which the tokenizer class puts around texts, and tokenizer.json lacks it; expected a token of tokenizer.json"
            ))),
        }
    }
}
