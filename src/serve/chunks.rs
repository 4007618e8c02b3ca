//! Late chunking: the inputs of a request are chunks of one text. The model runs once on the whole text, and its token vectors are then
//! pooled for each chunk.

use std::{ops::Range, sync::Arc};

use super::{Answer, Model, ServeError, Submit, Text};
use crate::{
    heads::pool_chunks,
    text::{ChunkPooling, Chunks, Prompt},
};

/// Request field that selects late chunking.
const LATE_CHUNKING: &str = "late_chunking";

/// Inputs of a request with late chunking: the chunks of one text.
pub struct JoinedTexts {
    texts: Vec<String>,
    /// Text of the prompt, if the request contains it.
    prompt: Option<Arc<str>>,
}

/// Token range of each chunk in the sequence of the whole text, and the pooling that turns the vectors of a range into one vector.
pub struct JoinedTokens {
    ranges: Vec<Range<usize>>,
    pooling: ChunkPooling,
}

impl JoinedTexts {
    /// Joins the inputs of a request.
    ///
    /// # Errors
    /// Returns an error if an input is a pair of texts or token ids.
    pub fn new(inputs: Vec<Text>) -> Result<Self, ServeError> {
        let mut prompt = None;
        let text = |input| match input {
            Text::One(text) => Ok(text),
            Text::Prompted(own, text) => {
                prompt = Some(own);
                Ok(text)
            }
            Text::Pair(..) | Text::Ids(_) | Text::Encoded(_) => {
                let problem = format!(
                    "`{LATE_CHUNKING}` joins texts, and the input has token ids; send texts"
                );
                Err(ServeError::invalid(LATE_CHUNKING, problem))
            }
        };
        let texts = inputs.into_iter().map(text).collect::<Result<_, _>>()?;
        Ok(Self { texts, prompt })
    }

    /// Number of texts.
    pub fn count(&self) -> usize {
        self.texts.len()
    }

    /// Length of all texts in bytes.
    pub fn bytes(&self) -> usize {
        self.texts.iter().map(String::len).sum()
    }

    /// Tokenizes the texts into one input of the model.
    ///
    /// # Errors
    /// Returns an error if the model's folder does not specify pooling by the mean of all tokens, if the pooling is followed by a module
    /// that does more than scale or truncate vectors, if there are too many tokens, or if the tokenizer refuses a text.
    pub fn join(&self, model: &Model, submit: Submit) -> Result<(Text, JoinedTokens), ServeError> {
        let encoder = model.encoder();
        let named = submit
            .prompt
            .and_then(|at| encoder.folder().prompt_name(at));
        let prompt = match (&self.prompt, named) {
            (Some(text), _) => Prompt::Text(text),
            (None, Some(name)) => Prompt::Named(name),
            (None, None) => Prompt::Default,
        };
        let chunks = encoder.encode_chunks(&self.texts, prompt);
        let both = chunks.and_then(|chunks| Ok((chunks, encoder.folder().chunk_pooling()?)));
        let (chunks, pooling) =
            both.map_err(|error| ServeError::invalid(LATE_CHUNKING, error.to_string()))?;
        let Chunks { encoded, ranges } = chunks;
        Ok((Text::Encoded(encoded), JoinedTokens { ranges, pooling }))
    }
}

impl JoinedTokens {
    /// Returns the pooled vector of each chunk. `whole` is the answer for the whole sequence, with the states of all tokens.
    pub fn pool(&self, whole: &Answer) -> Vec<Answer> {
        let rows = pool_chunks(&whole.values, whole.tokens, &self.ranges, self.pooling);
        let each = self.ranges.iter().zip(rows);
        let each = each.map(|(range, values)| Answer {
            values,
            entries: Vec::new(),
            tokens: range.len(),
        });
        each.collect()
    }
}
