//! Convenience methods of [`Engine`] on texts: embeddings, scores and generated text.

use std::{ops::ControlFlow, sync::OnceLock};

use super::{Engine, EngineError, heads::BATCH_TOKENS};
use crate::{
    Outputs,
    generate::generation_config_of,
    heads::pool_chunks,
    model::{EMBEDDING, STATES},
    text::{Chunks, Folder, Input, Prompt, StreamDecoder, TextEncoder, TextError},
};

/// The tokenizers of an engine, loaded on first use.
#[derive(Default)]
pub(super) struct Encoders {
    texts: OnceLock<TextEncoder>,
    prompts: OnceLock<TextEncoder>,
}

impl Engine {
    /// Embeds texts and returns a vector for each: the output `sentence_embedding`, pooled and normalized according to the
    /// checkpoint folder. The folder's default prompt is put before each text. Batches contain texts of similar length, up to
    /// 16,384 tokens. The first call loads the tokenizer.
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder or no output `sentence_embedding`, if the tokenizer refuses a text, or if a
    /// batch fails.
    pub fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<f32>>, EngineError> {
        let inputs = texts.iter().map(|text| Input::Text(text.as_ref()));
        self.rows(inputs, |outputs, at| {
            Ok(outputs.sequence(EMBEDDING, at)?.to_vec())
        })
    }

    /// Embeds the chunks of a text with late chunking: all chunks are computed as one sequence, so that their tokens attend to each other.
    /// The vector of a chunk is the mean of the states of its tokens, truncated and normalized as the folder specifies. The folder's
    /// default prompt is put before the first chunk; [`TextEncoder::encode_chunks`] describes the tokens. The engine must have the output
    /// `last_hidden_state`.
    ///
    /// # Errors
    /// Returns the errors of [`TextEncoder::encode_chunks`]. Also returns an error if the engine has no checkpoint folder or no output
    /// `last_hidden_state`, if the folder's pooling is not the mean of all tokens, or if the batch fails.
    pub fn embed_chunks<S: AsRef<str>>(&self, chunks: &[S]) -> Result<Vec<Vec<f32>>, EngineError> {
        let encoder = self.text_encoder()?;
        let pooling = encoder.folder().chunk_pooling()?;
        let Chunks { encoded, ranges } = encoder.encode_chunks(chunks, Prompt::Default)?;
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        let n_tokens = encoded.ids.len();
        let rows = self.head(&[&encoded], STATES, n_tokens, |_, states| {
            pool_chunks(states, n_tokens, &ranges, pooling)
        })?;
        Ok(rows.concat())
    }

    /// Scores each document for a query with a cross-encoder or a late-interaction model, and returns the scores in the order of the
    /// documents. A cross-encoder's score is the logit after the folder's activation, by default a sigmoid; see [`scores`](Self::scores).
    /// For the score of a late-interaction model, see [`max_sim`](Self::max_sim).
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder, if the model does not compute exactly one score per pair, if the tokenizer
    /// refuses a text, or if a batch fails.
    pub fn rerank<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
    ) -> Result<Vec<f32>, EngineError> {
        if self.has_token_vectors() {
            return self.rerank_late(query, documents);
        }
        let inputs = documents
            .iter()
            .map(|document| Input::Pair(query, document.as_ref()));
        self.rows(inputs, |outputs, at| {
            let scores = self.scores(outputs)?;
            match scores.shape.as_slice() {
                [_] => Ok(scores.values[at]),
                shape => Err(EngineError::SeveralScores {
                    labels: shape.last().copied().unwrap_or(0),
                }),
            }
        })
    }

    /// Continues `prompt`, or translates it with a translation model, with the options of the folder's generation_config.json. Returns only
    /// the new text. The engine must be built with [`Builder::generating`](super::Builder::generating).
    ///
    /// # Errors
    /// Returns an error if the engine has no checkpoint folder, if generation_config.json has unsupported options, if the tokenizer refuses
    /// the prompt, if the prompt exceeds the model's max length or the KV cache, or if a step fails.
    pub fn generate_text(&self, prompt: &str) -> Result<String, EngineError> {
        let encoder = self.encoder(&self.encoders.prompts, TextEncoder::for_prompts)?;
        let prompts = encoder.prompts(&[prompt])?;
        let options = generation_config_of(encoder.folder().files())?;
        let generated = self.generate(&prompts, &options, |_, _| ControlFlow::Continue(()))?;
        let generated = generated.into_iter().next().unwrap_or_default();
        if let Some(problem) = generated.problem {
            return Err(EngineError::Generation(problem));
        }
        let decode = |tokens: &[u32]| encoder.decode(tokens);
        let mut text = match self.has_source() {
            true => StreamDecoder::default(),
            false => StreamDecoder::after(&prompts[0], decode)?,
        };
        for token in generated.tokens {
            text.push(token, decode)?;
        }
        Ok(text.text)
    }

    /// Runs inputs in batches of similar lengths. For each input, calls `row` with the outputs of the input's batch and the input's index
    /// in that batch. Returns the results in the order of `inputs`.
    fn rows<'a, T>(
        &self,
        inputs: impl Iterator<Item = Input<'a>>,
        row: impl Fn(&Outputs, usize) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        let encoder = self.text_encoder()?;
        let inputs: Vec<Input<'_>> = inputs.collect();
        let encode = |&input: &Input<'_>| encoder.encode_one(input, Prompt::Default);
        let encoded = self.encode_all::<_, EngineError>(&inputs, encode, || Ok(()))?;
        self.in_order(&encoded, BATCH_TOKENS, |outputs, at, _| row(outputs, at))
    }

    /// Returns the tokenizer for texts that the model embeds or scores. The first call loads it.
    pub(super) fn text_encoder(&self) -> Result<&TextEncoder, EngineError> {
        self.encoder(&self.encoders.texts, TextEncoder::of)
    }

    /// Returns the encoder in `cell`, which `open` creates on first use.
    fn encoder<'c>(
        &self,
        cell: &'c OnceLock<TextEncoder>,
        open: impl FnOnce(Folder) -> Result<TextEncoder, TextError>,
    ) -> Result<&'c TextEncoder, EngineError> {
        match cell.get() {
            Some(encoder) => Ok(encoder),
            None => {
                let folder = self.folder.clone();
                let encoder = open(folder.ok_or(EngineError::NoFolderOfTexts)?)?;
                Ok(cell.get_or_init(|| encoder))
            }
        }
    }
}
