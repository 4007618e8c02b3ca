//! Tokenization of texts after a prompt, for models whose pooling leaves out the tokens of the prompt.

use tokenizers::EncodeInput;

use super::{Coder, CutSide, Encoded, TextEncoder};
use crate::text::TextError;

impl TextEncoder {
    /// Returns the number of prompt tokens that pooling leaves out. As in sentence-transformers, the prompt is tokenized without a text,
    /// and a special token at its end is not counted.
    fn left_out(&self, index: usize, prompt: &str) -> Result<usize, TextError> {
        let alone = self.encoding_of(index, EncodeInput::from(prompt), true)?;
        let special = match &self.tokenizer {
            Coder::Json(tokenizer, _) => {
                let last = alone.get_ids().last();
                let token = last.and_then(|&id| tokenizer.id_to_token(id));
                token.is_some_and(|token| tokenizer.get_added_vocabulary().is_special_token(&token))
            }
            // SentencePiece models append the end-of-sequence token.
            Coder::SentencePiece(_) => true,
        };
        Ok(alone.len() - usize::from(special && !alone.is_empty()))
    }

    /// Tokenizes a text after a prompt, and sets [`Encoded::left_out`] to the number of prompt tokens that pooling leaves out.
    pub(super) fn prompted(
        &self,
        index: usize,
        text: &str,
        prompt: &str,
        side: CutSide,
    ) -> Result<Encoded, TextError> {
        let mut encoded = self.encoded(index, &format!("{prompt}{text}"), true, side)?;
        let left_out = self.left_out(index, prompt)?;
        let tokens = encoded.ids.len();
        if left_out >= tokens {
            return Err(TextError::OnlyPrompt {
                index,
                left_out,
                tokens,
            });
        }
        encoded.left_out = left_out;
        Ok(encoded)
    }
}
